"""Laws of the native kernels: same bits everywhere, exact layouts, the formula's rounding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from stronghold import native
from tests.support.kernel_arrays import (
    BF16,
    DTYPES,
    F16,
    F32,
    NAN,
    SIZES,
    Arrays,
    addresses,
    bits,
    same,
    target_of,
    values,
)
from tests.support.optimizers import FORMS, OPTIMIZERS
from tests.support.reference import AdamHyper, LionHyper, SgdHyper, adam_step, lion_step, sgd_step

# ---- Same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_instruction_set_never_changes_a_bit_of_an_update(weight_dtype, grad_dtype, form):
    optimizer, changes = FORMS[form]
    pools = [native.Pool(1, isa=isa) for isa in native.isas()]
    for numel, skip, special in itertools.product(SIZES, (0, 1, 6), (False, True)):
        master, grad = values(numel, 1), values(numel, 2, special).to(grad_dtype)
        results = []
        for pool in pools:
            arrays = Arrays(master, grad, weight_dtype, skip, optimizer)
            arrays.run(pool, **changes)
            results.append(arrays)
        assert all(same(results[-1], other) for other in results), (numel, skip, special)
        if numel > 1:
            assert not torch.equal(results[0].master(), master)
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_number_of_threads_never_changes_a_bit_of_an_update(num_threads, weight_dtype, optimizer):
    sizes = [200_003, 0, 1, 15, 17, 4097, 65_536, *([1024] * 50)]
    inputs = [(values(n, n), values(n, n + 1).bfloat16()) for n in sizes]
    results = []
    for count in (1, num_threads):
        with native.Pool(count) as pool:
            many = [Arrays(*pair, weight_dtype, optimizer=optimizer) for pair in inputs]
            for step in (1, 2):
                pool.update(optimizer, weight_dtype, BF16, [a.segment(step) for a in many])
            results.append(many)
    assert all(same(one, other) for one, other in zip(*results, strict=True))


def test_the_distance_of_prefetching_is_found_and_never_changes_a_bit():
    numel = 65 * 32_768 + 17
    master, grad = values(numel, 1), values(numel, 2).bfloat16()
    timed, fresh = Arrays(master, grad, BF16), Arrays(master, grad, BF16)
    with native.Pool(2) as pool:
        timed.run(pool, steps=(1,))
        # the first step makes the moments' pages
        assert pool.prefetch("adam", BF16, BF16) == 0
        for step in range(2, 9):
            assert pool.prefetch("adam", BF16, BF16) == 0
            timed.run(pool, steps=(step,))
        timed.run(pool, steps=(9,))
        assert pool.prefetch("adam", BF16, BF16) in (64, 256)
        timed.run(pool, steps=(10,))
        assert pool.prefetch("adam", F32, F32) == 0
        assert pool.prefetch("lion", BF16, BF16) == 0
    for step in range(1, 11):
        with native.Pool(1) as pool:
            fresh.run(pool, steps=(step,))
    assert same(timed, fresh)


def test_segments_of_one_call_are_independent():
    inputs = [(values(n, n), values(n, n + 1)) for n in (17, 40_000, 1, 33_000)]
    together = [Arrays(master, grad, F32) for master, grad in inputs]
    alone = [Arrays(master, grad, F32) for master, grad in inputs]
    with native.Pool(2) as pool:
        pool.update("adam", F32, F32, [a.segment(3, lr=0.1 * i) for i, a in enumerate(together)])
        for i, arrays in enumerate(alone):
            arrays.run(pool, steps=(3,), lr=0.1 * i)
    assert all(same(one, other) for one, other in zip(together, alone, strict=True))


def test_callers_flush_to_zero_mode_changes_no_bit_and_is_given_back():
    master, grad = torch.full((50_001,), 1e-39), torch.full((50_001,), 1e-39)
    plain, flushed = Arrays(master, grad, F32), Arrays(master, grad, F32)
    with native.Pool(2) as pool:
        plain.run(pool)
        assert torch.set_flush_denormal(True)
        try:
            flushed.run(pool)
            assert (torch.tensor(1e-39) * 1.0).item() == 0.0
        finally:
            torch.set_flush_denormal(False)
    assert same(plain, flushed)
    assert plain.array("moment0", F32).abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_set_and_threads_never_change_a_bit_of_reductions(dtype):
    sizes = (0, 1, 15, 17, 31, 4097, 65_536, 200_003)
    for special in (False, True):
        arrays = [values(n, n, special).to(dtype) for n in sizes]
        seen = set()
        for isa, num_threads in itertools.product(native.isas(), (1, 2, 3)):
            with native.Pool(num_threads, isa=isa) as pool:
                sums = pool.sum_squares(dtype, addresses(*arrays))
                accs = [values(n, n + 7, special) for n in sizes]
                for add in (True, False, True):
                    segments = [
                        (a.data_ptr(), acc.data_ptr(), len(a), add)
                        for a, acc in zip(arrays, accs, strict=True)
                    ]
                    pool.accumulate(dtype, segments)
            seen.add((np.array(sums).tobytes(), *(acc.numpy().tobytes() for acc in accs)))
        assert len(seen) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nan_is_always_stored_as_the_one_quiet_nan(optimizer):
    odd_nan = torch.tensor([-1, 0x7F800001, 0x7FFFFFFF] * 7, dtype=torch.int32).view(F32)
    for isa in native.isas():
        with native.Pool(1, isa=isa) as pool:
            arrays = Arrays(torch.ones(21), odd_nan, BF16, optimizer=optimizer)
            arrays.run(pool, steps=(1,))
            acc = torch.zeros(21)
            pool.accumulate(F32, [(odd_nan.data_ptr(), acc.data_ptr(), 21, False)])
        assert (bits(arrays.master()) == NAN).all()
        assert (arrays.array("weight", torch.int16) == NAN >> 16).all()
        for k in range(OPTIMIZERS[optimizer].num_moments):
            assert (bits(arrays.array(f"moment{k}", F32)) == NAN).all()
        assert (bits(acc) == NAN).all()


# ---- Layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", native.isas())
def test_bf16_split_loses_no_bit(isa):
    # Every upper half with sampled lower halves. lr 0 and zero gradients: p goes through the
    # kernel's join and split, and must come out as it went in.
    lows = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD], np.uint32)
    patterns = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | lows).reshape(-1)
    master = torch.from_numpy(patterns.view(np.float32).copy())
    arrays = Arrays(master, torch.zeros_like(master), BF16)
    # of a zero and a negative remainder, which nothing has split: zero
    master = arrays.master()
    with native.Pool(1, isa=isa) as pool:
        arrays.run(pool, steps=(1,), lr=0.0, weight_decay=0.0)
    nan = master.isnan()
    assert torch.equal(bits(arrays.master())[~nan], bits(master)[~nan])
    assert (bits(arrays.master())[nan] == NAN).all()
    assert arrays.array("weight", BF16).isnan().equal(nan)


def test_bf16_weight_is_the_nearest_to_its_master():
    arrays = Arrays(values(4097, 3), values(4097, 4), BF16)
    with native.Pool(1) as pool:
        arrays.run(pool)
    weight, master = arrays.array("weight", BF16).double(), arrays.master().double()
    for neighbour in (-1, 1):
        other = (arrays.array("weight", torch.int16) + neighbour).view(BF16).double()
        assert ((weight - master).abs() <= (other - master).abs()).all()


@pytest.mark.parametrize("isa", native.isas())
def test_fp16_weight_is_torchs_rounding_of_its_master(isa):
    edges = torch.tensor([65504.0, 65519.99, 65520.0, 1e6, 2**-14, 2**-24, 2**-25, 1.5 * 2**-24])
    halves = torch.arange(-32768, 32768, dtype=torch.int16).view(F16).float()
    halves = halves[halves.isfinite()]
    ties = (halves + halves.roll(1)) / 2
    master = torch.cat([edges, -edges, halves, ties, values(4097, 5)])
    arrays = Arrays(torch.zeros_like(master), torch.zeros_like(master), F16)
    arrays.put("low", master)
    arrays.put("weight", master.half())
    with native.Pool(1, isa=isa) as pool:
        arrays.run(pool, steps=(1,), lr=0.0, weight_decay=0.0)
    assert torch.equal(bits(arrays.master()), bits(master))
    assert torch.equal(bits(arrays.array("weight", F16)), bits(master.half()))


def test_fp16_weight_written_by_somebody_else_becomes_the_master():
    arrays = Arrays(torch.tensor([0.1, 0.1, 0.3]), torch.zeros(3), F16)
    arrays.put("weight", torch.tensor([0.1, 2.0, 0.3]).half())
    with native.Pool(1) as pool:
        arrays.run(pool, steps=(1,), weight_decay=0.0)
    assert torch.equal(arrays.master(), torch.tensor([0.1, 2.0, 0.3]))


@pytest.mark.parametrize("isa", native.isas())
def test_half_precision_gradients_are_read_exactly(isa):
    for dtype in (BF16, F16):
        grad = torch.arange(-32768, 32768, dtype=torch.int16).view(dtype)
        acc = torch.empty(len(grad))
        with native.Pool(1, isa=isa) as pool:
            segments = [(grad.data_ptr(), acc.data_ptr(), len(grad), False)]
            pool.accumulate(dtype, segments)
        finite = ~grad.isnan()
        assert torch.equal(bits(acc)[finite], bits(grad.float())[finite])
        assert acc.isnan().equal(grad.isnan())


# ---- The formula ----------------------------------------------------------------------------


@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "uncorrected"])
def test_adam_is_the_papers_formula_up_to_rounding(adamw, bias_correction):
    hyper = AdamHyper(weight_decay=0.1, adamw=adamw, bias_correction=bias_correction)
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(4097, generator=generator)
    arrays = Arrays(master, torch.zeros(4097), F32)
    p, m, v = master.double().numpy(), np.zeros(4097), np.zeros(4097)
    with native.Pool(1) as pool:
        for step in range(1, 21):
            grad = torch.randn(4097, generator=generator)
            arrays.put("grad", grad)
            arrays.run(pool, steps=(step,), adamw=adamw, bias_correction=bias_correction)
            p, m, v = adam_step(p, m, v, 0.5 * grad.double().numpy(), step, hyper)
    # Per step: p rounds twice, half an ulp (2^-24 |p|) each; the update, at most lr * 4 here,
    # carries the relative error of m (absolute: 2^-22 of the largest |m|), of v and d.
    rounding = 20 * (2 * 2**-24 * np.abs(p).max() + 1e-3 * 4 * 2**-20)
    assert np.abs(arrays.master().double().numpy() - p).max() < rounding
    assert np.abs(arrays.array("moment0", F32).double().numpy() - m).max() < 2**-20
    np.testing.assert_allclose(arrays.array("moment1", F32).double().numpy(), v, rtol=2**-19)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_is_the_papers_formula_up_to_rounding(weight_decay):
    hyper = LionHyper(weight_decay=weight_decay)
    master = values(4097, 1)
    arrays = Arrays(master, torch.zeros(4097), F32, optimizer="lion")
    with native.Pool(1) as pool:
        for step in range(1, 21):
            before = arrays.master().double().numpy()
            momentum = arrays.array("moment0", F32).double().numpy()
            grad = values(4097, step + 1)
            arrays.put("grad", grad)
            arrays.run(pool, steps=(step,), weight_decay=weight_decay)
            scaled = 0.5 * grad.double().numpy()
            p, m, u = lion_step(before, momentum, scaled, hyper)
            # Each product and sum rounds by half an ulp, 2^-24 of its value; constants too.
            terms = np.abs(momentum) + np.abs(scaled)
            assert np.all(
                np.abs(arrays.array("moment0", F32).double().numpy() - m) <= terms * 2**-22
            )
            # Where u is nothing but rounding, its sign is too.
            clear = np.abs(u) > terms * 2**-22
            assert clear.mean() > 0.99
            error = np.abs(arrays.master().double().numpy() - p)[clear]
            assert np.all(error <= (np.abs(before)[clear] + hyper.lr) * 2**-22)


def test_lion_is_deepspeeds_formula_up_to_rounding():
    """DeepSpeed's CPULion, in torch and fp32: the sign comes from two comparisons."""
    lr, beta1, beta2, decay, steps = 1e-3, 0.9, 0.99, 0.1, 10
    master = values(4097, 1)
    arrays = Arrays(master, torch.zeros(4097), F32, optimizer="lion")
    param, momentum = master.clone(), torch.zeros(4097)
    clear, largest = torch.ones(4097, dtype=torch.bool), torch.zeros(4097)
    with native.Pool(1) as pool:
        for step in range(1, steps + 1):
            grad = values(4097, step + 1)
            largest = largest.maximum(grad.abs())
            arrays.put("grad", grad)
            arrays.run(pool, steps=(step,), grad_scale=1.0)
            c = grad * (1 - beta1) + momentum * beta1
            clear &= c.abs() > largest * 2**-18  # else its sign is that of rounding
            param = param * (1 - lr * decay) + ((c > 0).float() - (c < 0).float()) * -lr
            momentum = momentum * beta2 + grad * (1 - beta2)
    assert clear.float().mean() > 0.99
    # Both round by an ulp or two in a step.
    error = (arrays.master() - param).abs()
    assert (error <= steps * 2**-22 * (master.abs() + steps * lr))[clear].all()
    error = (arrays.array("moment0", F32) - momentum).abs()
    assert (error <= steps * 2**-22 * largest).all()


@pytest.mark.parametrize("isa", native.isas())
def test_lion_has_no_step_where_the_interpolation_is_zero(isa):
    """sign(0) is 0, of either zero; sign of the smallest number is a whole step."""
    grad = torch.tensor([0.0, -0.0, 1e-40, -1e-40, math.inf, -math.inf, 3e38, -3e38] * 5)
    master = torch.tensor([1.0, -0.0, 0.0, 0.0, 2.0, 2.0, 3.0, 3.0] * 5)
    arrays = Arrays(master, grad, F32, optimizer="lion")
    with native.Pool(1, isa=isa) as pool:
        arrays.run(pool, steps=(1,), lr=0.25, weight_decay=0.0, grad_scale=1.0)
    expected = torch.tensor([1.0, -0.0, -0.25, 0.25, 1.75, 2.25, 2.75, 3.25] * 5)
    assert torch.equal(bits(arrays.master()), bits(expected))


SGD_FORMS = {
    "plain": ("sgd", {"momentum": 0.0}),
    "momentum": ("sgd_momentum", {"momentum": 0.9}),
    "nesterov": ("sgd_momentum", {"momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("form", SGD_FORMS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_the_formula_up_to_rounding(form, weight_decay):
    optimizer, changes = SGD_FORMS[form]
    hyper = SgdHyper(weight_decay=weight_decay, **changes)
    arrays = Arrays(values(4097, 1), torch.zeros(4097), F32, optimizer=optimizer)
    buffer = np.zeros(4097)
    with native.Pool(1) as pool:
        for step in range(1, 21):
            before = arrays.master().double().numpy()
            if "moment0" in arrays.parts:
                buffer = arrays.array("moment0", F32).double().numpy()
            grad = values(4097, step + 1)
            arrays.put("grad", grad)
            arrays.run(pool, steps=(step,), weight_decay=weight_decay, **changes)
            scaled = 0.5 * grad.double().numpy()
            p, b = sgd_step(before, buffer, scaled, hyper)
            # Each fma rounds by half an ulp, 2^-24 of its value; constants too.
            terms = np.abs(scaled) + np.abs(before) * weight_decay + np.abs(buffer)
            if "moment0" in arrays.parts:
                error = np.abs(arrays.array("moment0", F32).double().numpy() - b)
                assert np.all(error <= terms * 2**-22)
            error = np.abs(arrays.master().double().numpy() - p)
            assert np.all(error <= np.abs(before) * 2**-23 + hyper.lr * terms * 2**-21)


@pytest.mark.parametrize("form", SGD_FORMS)
def test_sgd_is_torchs_up_to_rounding(form):
    optimizer, changes = SGD_FORMS[form]
    lr, decay, steps = 1e-2, 0.1, 10
    master = values(4097, 1)
    param = torch.nn.Parameter(master.clone())
    torchs = torch.optim.SGD([param], lr=lr, weight_decay=decay, **changes)
    arrays = Arrays(master, torch.zeros(4097), F32, optimizer=optimizer)
    largest = master.abs()
    with native.Pool(1) as pool:
        for step in range(1, steps + 1):
            grad = values(4097, step + 1)
            largest = largest.maximum(grad.abs())
            param.grad = grad.clone()
            torchs.step()
            arrays.put("grad", grad)
            arrays.run(pool, steps=(step,), grad_scale=1.0, lr=lr, weight_decay=decay, **changes)
    # The buffer is at most 10 of the largest terms; both round by an ulp or two in a step.
    error = (arrays.master() - param.detach()).abs()
    assert (error <= steps * 2**-22 * (master.abs() + 20 * lr * steps * largest)).all()
    if "moment0" in arrays.parts:
        expected = torchs.state[param]["momentum_buffer"]
        error = (arrays.array("moment0", F32) - expected).abs()
        assert (error <= steps * 2**-22 * 10 * largest).all()


def test_a_non_finite_gradient_stays_visible():
    grad = torch.ones(33)
    grad[7], grad[20] = math.nan, math.inf
    arrays = Arrays(torch.ones(33), grad, F32)
    with native.Pool(1) as pool:
        arrays.run(pool, steps=(1,))
        (total,) = pool.sum_squares(F32, addresses(grad))
    assert arrays.master().isnan().nonzero().flatten().tolist() == [7, 20]
    assert not math.isfinite(total)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_traffic_in_place_changes_nothing_and_past_the_caches_copies(optimizer):
    grad, zeros = values(4097, 2).bfloat16(), torch.zeros(4097)
    for weight_dtype in DTYPES:
        source, before = (
            Arrays(values(4097, 1), grad, weight_dtype, optimizer=optimizer) for _ in range(2)
        )
        target = Arrays(zeros, zeros.bfloat16(), weight_dtype, optimizer=optimizer)
        source.run(pool := native.Pool(1), steps=(1,))
        before.run(pool, steps=(1,))
        batch = native.UpdateBatch(optimizer, weight_dtype, BF16, [source.segment()])
        batch.traffic(pool)
        assert same(source, before)
        segments, targets = [source.segment()], [target_of(target.segment())]
        native.UpdateBatch(optimizer, weight_dtype, BF16, segments, targets=targets).traffic(pool)
        assert same(source, before)
        for name, part in target.parts.items():
            assert torch.equal(part, source.parts[name]) == (name != "grad")
        pool.close()


def test_a_prepared_batch_takes_new_numbers_in_place():
    prepared, fresh = (Arrays(values(17, 1), values(17, 2), BF16) for _ in range(2))
    with native.Pool(1) as pool:
        batch = native.UpdateBatch("adam", BF16, F32, [prepared.segment(1)])
        batch.run(pool)
        batch.rows["step"], batch.rows["number0"], batch.rows["grad_scale"] = (2, 0.5, 2.0)
        batch.run(pool)
        fresh.run(pool, steps=(1,))
        fresh.run(pool, steps=(2,), lr=0.5, grad_scale=2.0)
    assert same(prepared, fresh)


# ---- Norms and accumulation -----------------------------------------------------------------


def test_sum_of_squares_is_exact_where_double_is():
    x = torch.arange(1, 100_001, dtype=F32) % 97
    with native.Pool(2) as pool:
        assert pool.sum_squares(F32, addresses(x)) == [(x.double() ** 2).sum().item()]


def test_sum_of_squares_of_finite_input_never_overflows():
    x = torch.full((4097,), torch.finfo(F32).max)
    with native.Pool(1) as pool:
        (total,) = pool.sum_squares(F32, addresses(x))
    assert total == pytest.approx(4097 * torch.finfo(F32).max ** 2, rel=1e-12)


def test_sum_of_squares_of_a_segment_ignores_its_neighbours():
    arrays = [values(n, n) for n in (70_000, 1, 0, 17, 131_073)]
    with native.Pool(2) as pool:
        together = pool.sum_squares(F32, addresses(*arrays))
        alone = [pool.sum_squares(F32, addresses(array))[0] for array in arrays]
        assert pool.sum_squares(F32, []) == []
    assert together == alone
    assert together[2] == 0.0


def test_accumulation_adds_in_fp32_in_order():
    micro = [values(4097, seed).bfloat16() for seed in range(4)]
    acc = torch.full((4097,), math.nan)
    with native.Pool(2) as pool:
        for i, grad in enumerate(micro):
            pool.accumulate(BF16, [(grad.data_ptr(), acc.data_ptr(), 4097, i > 0)])
        pool.accumulate(BF16, [])
    expected = micro[0].float()
    for grad in micro[1:]:
        expected = expected + grad.float()
    assert torch.equal(acc, expected)
