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
    values,
)
from tests.support.reference import AdamHyper, adam_step

# ---- Same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
def test_instruction_set_never_changes_a_bit_of_adam(weight_dtype, grad_dtype, adamw):
    pools = [native.Pool(1, isa=isa) for isa in native.isas()]
    for numel, skip, special in itertools.product(SIZES, (0, 1, 6), (False, True)):
        master, grad = values(numel, 1), values(numel, 2, special).to(grad_dtype)
        results = []
        for pool in pools:
            arrays = Arrays(master, grad, weight_dtype, skip)
            arrays.run(pool, adamw=adamw)
            results.append(arrays)
        assert all(same(results[-1], other) for other in results), (numel, skip, special)
        if numel > 1:
            assert not torch.equal(results[0].master(), master)
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_number_of_threads_never_changes_a_bit_of_adam(num_threads, weight_dtype):
    sizes = [200_003, 0, 1, 15, 17, 4097, 65_536, *([1024] * 50)]
    inputs = [(values(n, n), values(n, n + 1).bfloat16()) for n in sizes]
    results = []
    for count in (1, num_threads):
        with native.Pool(count) as pool:
            many = [Arrays(master, grad, weight_dtype) for master, grad in inputs]
            for step in (1, 2):
                pool.update("adam", weight_dtype, BF16, [a.segment(step) for a in many])
            results.append(many)
    assert all(same(one, other) for one, other in zip(*results, strict=True))


def test_the_distance_of_prefetching_is_found_and_never_changes_a_bit():
    numel = 65 * 32_768 + 17
    master, grad = values(numel, 1), values(numel, 2).bfloat16()
    timed, fresh = Arrays(master, grad, BF16), Arrays(master, grad, BF16)
    with native.Pool(2) as pool:
        timed.run(pool, steps=(1,))
        assert pool.prefetch("adam", BF16, BF16) == 0  # the first step makes the moments' pages
        for step in range(2, 9):
            assert pool.prefetch("adam", BF16, BF16) == 0
            timed.run(pool, steps=(step,))
        timed.run(pool, steps=(9,))
        assert pool.prefetch("adam", BF16, BF16) in (64, 256)
        timed.run(pool, steps=(10,))
        assert pool.prefetch("adam", F32, F32) == 0
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


def test_nan_is_always_stored_as_the_one_quiet_nan():
    odd_nan = torch.tensor([-1, 0x7F800001, 0x7FFFFFFF] * 7, dtype=torch.int32).view(F32)
    for isa in native.isas():
        with native.Pool(1, isa=isa) as pool:
            arrays = Arrays(torch.ones(21), odd_nan, BF16)
            arrays.run(pool, steps=(1,))
            acc = torch.zeros(21)
            pool.accumulate(F32, [(odd_nan.data_ptr(), acc.data_ptr(), 21, False)])
        assert (bits(arrays.master()) == NAN).all()
        assert (arrays.array("weight", torch.int16) == NAN >> 16).all()
        assert (bits(arrays.array("moment0", F32)) == NAN).all()
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
    master = arrays.master()  # of a zero and a negative remainder, which nothing has split: zero
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


def test_a_non_finite_gradient_stays_visible():
    grad = torch.ones(33)
    grad[7], grad[20] = math.nan, math.inf
    arrays = Arrays(torch.ones(33), grad, F32)
    with native.Pool(1) as pool:
        arrays.run(pool, steps=(1,))
        (total,) = pool.sum_squares(F32, addresses(grad))
    assert arrays.master().isnan().nonzero().flatten().tolist() == [7, 20]
    assert not math.isfinite(total)


def test_traffic_in_place_changes_nothing_and_past_the_caches_copies():
    for weight_dtype in DTYPES:
        source = Arrays(values(4097, 1), values(4097, 2).bfloat16(), weight_dtype)
        before = Arrays(values(4097, 1), values(4097, 2).bfloat16(), weight_dtype)
        target = Arrays(torch.zeros(4097), torch.zeros(4097).bfloat16(), weight_dtype)
        source.run(pool := native.Pool(1), steps=(1,))
        before.run(pool, steps=(1,))
        batch = native.UpdateBatch("adam", weight_dtype, BF16, [source.segment()])
        batch.traffic(pool)
        assert same(source, before)
        batch.traffic(pool, native.UpdateBatch("adam", weight_dtype, BF16, [target.segment()]))
        for name in ("weight", "low", "moment0", "moment1"):
            assert torch.equal(source.parts[name], target.parts[name])
        pool.close()


def test_a_prepared_batch_takes_new_numbers_in_place():
    prepared, fresh = (Arrays(values(17, 1), values(17, 2), BF16) for _ in range(2))
    with native.Pool(1) as pool:
        batch = native.UpdateBatch("adam", BF16, F32, [prepared.segment(1)])
        batch.run(pool)
        batch.rows["step"], batch.rows["number0"], batch.rows["grad_scale"] = 2, 0.5, 2.0
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
