"""Laws of lean states: the kernel is the reference bit for bit, and the encoding keeps its word."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from stronghold import native
from stronghold.errors import ConfigError
from stronghold.optim import states
from tests.support.kernel_arrays import BF16, DTYPES, F16, F32, NAN, bits, values
from tests.support.lean_arrays import LeanArrays, differing
from tests.support.optimizers import FORMS, OPTIMIZERS
from tests.support.pairs import pairs

SIZES = (0, 1, 15, 17, 31, 33, 63, 64, 65, 255, 256, 257, 4097)
HALF = 1 + 2**-20  # half a step, and the rounding of the few operations on the way


# ---- The kernel is the reference ----------------------------------------------------------------


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("isa", "grad_dtype", "form"), pairs(native.isas(), DTYPES, FORMS))
def test_the_kernel_is_the_reference_bit_for_bit(isa, grad_dtype, form):
    optimizer, changes = form
    with native.Pool(1, isa=isa) as pool, native.Pool(1) as exact:
        for numel, skip, special in itertools.product(SIZES, (0, 1, 6), (False, True)):
            master, grad = values(numel, 1), values(numel, 2, special).to(grad_dtype)
            kernel, reference = (LeanArrays(master, grad, skip, optimizer) for _ in range(2))
            for step in (1, 2, 3):
                grad = values(numel, step + 2, special).to(grad_dtype)
                for arrays in (kernel, reference):
                    arrays.put("grad", grad)
                kernel.run(pool, step, **changes)
                reference.run_reference(exact, step, **changes)
                assert differing(kernel, reference) == [], (numel, skip, special, step)
            if numel > 1 and not special:
                assert not torch.equal(kernel.read()[0], master)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parts_of_a_parameter_that_begin_at_groups_are_the_whole(optimizer):
    master, grad = values(4097, 1), values(4097, 2)
    whole, parts = (LeanArrays(master, grad, optimizer=optimizer) for _ in range(2))
    bytes_per_element = {"weight": 2, "low": 1, "grad": 4}
    bytes_per_element |= {f"moment{k}": 1 for k in range(len(whole.moments))}
    ends = (64, 320, 384, 2048, 4097)
    with native.Pool(1) as pool:
        for step in (1, 2):
            whole.run(pool, step)
            row = parts.segment(step)
            for begin, end in itertools.pairwise((0, *ends)):
                moved = {
                    name: getattr(row, name) + begin * size
                    for name, size in bytes_per_element.items()
                }
                for k in range(len(whole.moments)):
                    moved[f"scale{k}"] = getattr(row, f"scale{k}") + begin // states.GROUP * 4
                segment = row._replace(numel=end - begin, **moved)
                pool.update(optimizer, BF16, F32, [segment], lean=True)
    assert differing(whole, parts) == []


@pytest.mark.parametrize("isa", native.isas())
def test_every_weight_with_every_remainder_comes_back(isa):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    kept = torch.full((1 << 16,), 5, dtype=torch.int8)
    with native.Pool(2, isa=isa) as pool:
        arrays = LeanArrays(torch.zeros(1 << 16), torch.zeros(1 << 16))
        for low in range(-128, 128):
            arrays.put("weight", every)
            arrays.put("low", kept.fill_(low))
            master = states.join_master(every.view(BF16), kept)
            assert torch.equal(bits(master) & 0xFF, torch.zeros(1 << 16, dtype=torch.int32))
            nan, zero = master.isnan(), every.view(BF16) == 0
            # Weight decay 0 and no gradient: the master goes through the kernel as it is.
            arrays.run(pool, lr=0.0, weight_decay=0.0)
            weight, rest = (arrays.get("weight", torch.int16), arrays.get("low", torch.int8))
            assert torch.equal(weight[~nan], every[~nan])
            assert (rest[~nan & ~zero] == low).all()
            # less, and somebody wrote the zero
            assert (rest[zero] == max(low, 0)).all()
            assert (weight[nan] == NAN >> 16).all()
            assert (rest[nan] == 0).all()
            mine = states.split_lean_master(master)
            assert torch.equal(mine[0].view(torch.int16), weight)
            assert torch.equal(mine[1], rest)


@pytest.mark.parametrize("isa", native.isas())
def test_every_code_of_both_moments_is_decoded_as_written(isa):
    """Without a gradient beta 0.5 halves first moments, and beta 0.25 the roots: codes stay."""
    signed, unsigned = torch.arange(-127, 128), torch.arange(1, 256)
    for scale in (2.0**-120, 1e-30, 3.0e-8, 0.123, 1.0, 777.0, 2.0**60):
        arrays = LeanArrays(torch.zeros(4 * 255), torch.zeros(4 * 255))
        # Each group holds its largest code: else the encoding would make a finer scale.
        codes = torch.cat([signed, signed.flip(0), signed, signed.flip(0)]).to(torch.int8)
        squares = torch.cat([unsigned, unsigned.flip(0), unsigned, unsigned.flip(0)])
        squares = squares.to(torch.uint8)
        codes[:: states.GROUP], squares[:: states.GROUP] = 127, 255
        groups = states.num_items("exp_avg_scale", codes.numel())
        scales = torch.full((groups,), scale)
        arrays.put("moment0", codes)
        arrays.put("moment1", squares)
        arrays.put("scale0", scales)
        arrays.put("scale1", scales.clamp(2.0**-50, 2.0**40))  # squares are kept
        before = arrays.read()
        with native.Pool(1, isa=isa) as pool:
            arrays.run(pool, lr=0.0, beta1=0.5, beta2=0.25)
        after = arrays.read()
        assert torch.equal(arrays.get("moment0", torch.int8), codes)
        assert torch.equal(arrays.get("moment1", torch.uint8), squares)
        assert torch.allclose(after[1], before[1] / 2, rtol=2**-21, atol=0)
        assert torch.allclose(after[2], before[2] / 4, rtol=2**-20, atol=2.0**-149)


def test_codes_are_those_nearest_to_their_values():
    codes = torch.arange(256)
    exact = states.expand(codes).double()
    # From code 2 on compress() is a line between neighbouring codes: the middle of two values
    # rounds to either.
    middles = (exact[1:] + exact[:-1]) / 2
    for offset, expected in ((-(2.0**-20), codes[:-1]), (2.0**-20, codes[1:])):
        rounded = states.compress((middles * (1 + offset)).float()).round().long()
        assert torch.equal(rounded[2:], expected[2:])


# ---- What the encoding promises ------------------------------------------------------------------


def spread(seed: int, groups: int = 512) -> torch.Tensor:
    """Groups of many sizes, with elements that dwarf theirs."""
    x = values(groups * states.GROUP, seed).view(groups, states.GROUP)
    generator = torch.Generator().manual_seed(seed)
    x *= torch.pow(10.0, torch.randint(-30, 20, (groups, 1), generator=generator).float())
    x[::3, 5] *= 1e6
    x[1::7] = 0.0
    return x


def test_a_master_is_within_2_to_the_minus_16():
    master = torch.cat([spread(1).view(-1), torch.tensor([1e-40, -1e-44, 0.0, -0.0, 3e38])])
    error = (states.join_master(*states.split_lean_master(master)).double() - master.double()).abs()
    normal = master.abs() >= 2.0**-126
    assert (error[normal] <= 2.0**-16 * master[normal].abs()).all()
    assert (error[~normal] <= 2.0**-142).all()


def test_a_weight_is_the_nearest_to_its_master():
    weight, low = states.split_lean_master(values(4097, 3))
    master = states.join_master(weight, low).double()
    for neighbour in (-1, 1):
        other = (weight.view(torch.int16) + neighbour).view(BF16).double()
        assert ((weight.double() - master).abs() <= (other - master).abs()).all()


def test_a_first_moment_is_within_its_words():
    exp_avg = spread(2)
    found = states.decode_signed(*states.encode_signed(exp_avg)).double()
    error, largest = ((found - exp_avg).abs(), exp_avg.double().abs().amax(1, keepdim=True))
    assert (error <= (largest / 126).clamp_min(2.0**-119) * HALF).all()
    near = (exp_avg.abs() >= largest / 15) & (largest >= 2.0**-112)
    assert near.sum() > 1000
    assert (error[near] <= exp_avg.double().abs()[near] / 31 * HALF).all()
    assert (found[exp_avg == 0] == 0).all()


def test_a_second_moments_root_is_within_its_words():
    root = spread(3).abs()
    root = root.clamp(max=1e18).double()
    exp_avg_sq = root.square().float()
    root = exp_avg_sq.double().sqrt()
    found = states.decode_root(*states.encode_root(exp_avg_sq)).double().sqrt()
    error, largest = (found - root).abs(), root.amax(1, keepdim=True)
    # Squares below 2^-126 have fewer bits: a root there is only as exact as they are.
    bound = (largest / 254).clamp_min(2.0**-74)
    assert (error <= bound * HALF).all()
    near = (root >= largest / 63) & (root >= 2.0**-62)
    assert near.sum() > 1000
    assert (error[near] <= root[near] / 31 * HALF).all()
    assert (found[(exp_avg_sq > 0) & (root >= 2.0**-50)] > 0).all()


def test_scales_follow_a_decay_that_no_code_could():
    """Gradients ten times smaller for 5000 steps of beta2 0.999: the roots follow."""
    arrays = LeanArrays(torch.zeros(1024), torch.zeros(1024))
    generator = torch.Generator().manual_seed(0)
    sizes = (0.5 * torch.randn(1024, generator=generator)).exp()
    exact = torch.zeros(1024)
    with native.Pool(1) as pool:
        for step in range(1, 7001):
            grad = torch.randn(1024, generator=generator) * sizes * (1.0 if step <= 2000 else 0.1)
            arrays.put("grad", grad)
            arrays.run(pool, step, lr=0.0, beta2=0.999, grad_scale=1.0, adamw=True)
            exact = 0.999 * exact + 0.001 * grad.square()
    ratio = (arrays.read()[2] / exact).sqrt()
    assert ratio.median().item() == pytest.approx(1.0, abs=0.03)
    assert ((ratio > 0.6) & (ratio < 1.7)).all()


# ---- The ends of the range -----------------------------------------------------------------------


def test_an_element_that_dwarfs_its_group_makes_no_other_jump():
    """Adam's update is at most about lr * 7.3 (beta 0.9, 0.999); were a second moment rounded to
    nothing, it would be lr * m / eps."""
    generator = torch.Generator().manual_seed(0)
    arrays = LeanArrays(torch.zeros(640), torch.zeros(640))
    with native.Pool(1) as pool:
        for step in range(1, 200):
            grad = torch.randn(640, generator=generator)
            grad[::64] *= 10.0 ** (step % 9)
            grad[step % 7 :: 7] = 0.0
            arrays.put("grad", grad)
            before = arrays.read()[0]
            arrays.run(pool, step, lr=1e-3, weight_decay=0.0)
            assert (arrays.read()[0] - before).abs().max().item() < 1e-3 * 7.4


def after_one_wrong(wrong, optimizer):
    """What the arrays hold after a step with one wrong gradient of 200, element 70, and after a
    further step with ones; and whether the optimizer has moments."""
    grad = torch.ones(200)
    grad[70] = wrong
    arrays = LeanArrays(torch.ones(200), grad, optimizer=optimizer)
    with native.Pool(1) as pool:
        arrays.run(pool, 1)
        first = arrays.read()
        arrays.put("grad", torch.ones(200))
        arrays.run(pool, 2)
        return first, arrays.read(), bool(arrays.moments)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_stays_visible(optimizer, wrong):
    first, second, has_moments = after_one_wrong(wrong, optimizer)
    # To Lion the sign of an infinity is a step as any other.
    lost = [70] if optimizer != "lion" or math.isnan(wrong) else []
    assert (~first[0].isfinite()).nonzero().flatten().tolist() == lost
    # A moment's scale is that of a group of 64.
    lost = list(range(64, 128)) if has_moments else [70]
    assert (~second[0].isfinite()).nonzero().flatten().tolist() == lost
    for moment in (*first[1:], *second[1:]):
        assert moment.isnan().nonzero().flatten().tolist() == lost


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_weights_than_bf16_and_missing_arrays_are_refused(optimizer):
    arrays = LeanArrays(torch.ones(17), torch.ones(17), optimizer=optimizer)
    with native.Pool(1) as pool:
        for dtype in (F32, F16):
            with pytest.raises(ConfigError, match="lean states are a layout of bfloat16"):
                pool.update(optimizer, dtype, F32, [arrays.segment()], lean=True)
        for name in arrays.parts:
            with pytest.raises(ConfigError, match=f"segment 0: {name} is NULL"):
                pool.update(optimizer, BF16, F32, [arrays.segment(**{name: 0})], lean=True)
