"""Laws of updates out of place: the bits of the step in place, and nothing else is written."""

from __future__ import annotations

import itertools

import pytest
import torch

from stronghold import native
from stronghold.errors import ConfigError
from tests.support.kernel_arrays import BF16, DTYPES, F16, F32, Arrays, target_of, values
from tests.support.lean_arrays import LeanArrays
from tests.support.optimizers import FORMS, OPTIMIZERS
from tests.support.pairs import pairs
from tests.support.targets import Targets

SIZES = (0, 1, 15, 17, 33, 63, 64, 65, 255, 256, 257, 513, 4097)
LAYOUTS = ("fp32", "bf16", "fp16", "lean")
WEIGHTS = {"fp32": F32, "bf16": BF16, "fp16": F16, "lean": BF16}
# Bytes past a multiple of 64 at which sources and targets begin.
SKIPS = ((0, 0), (6, 0), (0, 1), (1, 6))
EitherArrays = Arrays | LeanArrays


def arrays_of(
    layout: str, optimizer: str, numel: int, grad: torch.Tensor, skip: int = 0
) -> EitherArrays:
    master = values(numel, 1)
    if layout == "lean":
        return LeanArrays(master, grad, skip, optimizer)
    return Arrays(master, grad, WEIGHTS[layout], skip, optimizer)


def update(
    pool: native.Pool,
    layout: str,
    arrays: list[EitherArrays],
    step: int,
    targets: list[native.Target] | None = None,
    **changes: float,
) -> None:
    segments = [part.segment(step, **changes) for part in arrays]
    dtypes = WEIGHTS[layout], arrays[0].grad_dtype
    lean = layout == "lean"
    pool.update(arrays[0].optimizer, *dtypes, segments, lean=lean, targets=targets)


def written(layout: str, optimizer: str) -> list[str]:
    """The fields of a segment's arrays that a step writes."""
    return [name for name in arrays_of(layout, optimizer, 1, torch.ones(1)).parts if name != "grad"]


def assert_step_is_that_in_place(
    pool: native.Pool,
    layout: str,
    arrays: EitherArrays,
    expected: EitherArrays,
    targets: Targets,
    step: int,
    **changes: float,
) -> None:
    """One step of `arrays` to `targets`, and of `expected`, which had the same bits, in place."""
    before = {name: part.clone() for name, part in arrays.parts.items()}
    update(pool, layout, [arrays], step, [targets.target()], **changes)
    update(pool, layout, [expected], step, **changes)
    for name, part in arrays.parts.items():
        source = before[name] if name in targets.views or name == "grad" else expected.parts[name]
        assert torch.equal(part, source), f"source: {name}"
    for name, view in targets.views.items():
        assert torch.equal(view, expected.parts[name]), f"target: {name}"
    assert targets.are_guards_untouched()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("isa", "layout", "grad_dtype", "form"), pairs(native.isas(), LAYOUTS, DTYPES, FORMS)
)
def test_out_of_place_never_changes_a_bit(isa, layout, grad_dtype, form):
    optimizer, changes = form
    with native.Pool(1, isa=isa) as pool:
        for numel, (skip, target_skip), special in itertools.product(SIZES, SKIPS, (False, True)):
            grad = values(numel, 2, special).to(grad_dtype)
            arrays, expected = (arrays_of(layout, optimizer, numel, grad, skip) for _ in range(2))
            for step in (1, 2, 3):
                targets = Targets(arrays.parts, target_skip)
                assert_step_is_that_in_place(
                    pool, layout, arrays, expected, targets, step, **changes
                )
                arrays.parts.update(targets.views)  # the swap
            if numel > 1:
                assert not torch.equal(
                    arrays.parts["weight"],
                    arrays_of(layout, optimizer, numel, grad, skip).parts["weight"],
                )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("isa", native.isas())
def test_every_form_and_layout_runs_out_of_place(isa, form, layout):
    """Every kernel once: the test above covers pairs of its parameters."""
    optimizer, changes = FORMS[form]
    with native.Pool(1, isa=isa) as pool:
        for grad_dtype, target_skip in itertools.product(DTYPES, (0, 2)):
            grad = values(1091, 2, special=True).to(grad_dtype)
            arrays, expected = (arrays_of(layout, optimizer, 1091, grad) for _ in range(2))
            targets = Targets(arrays.parts, target_skip)
            assert_step_is_that_in_place(pool, layout, arrays, expected, targets, 1, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_some_arrays_in_place_and_others_not_never_change_a_bit(optimizer, layout):
    names, grad = written(layout, optimizer), values(4097, 2).bfloat16()
    with native.Pool(1) as pool:
        for count in range(len(names) + 1):
            for in_place in itertools.combinations(names, count):
                for skip in (0, 3):
                    arrays, expected = (arrays_of(layout, optimizer, 4097, grad) for _ in range(2))
                    targets = Targets(arrays.parts, skip, in_place)
                    assert_step_is_that_in_place(pool, layout, arrays, expected, targets, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_threads", [2, 3])
def test_number_of_threads_never_changes_a_bit_out_of_place(num_threads, optimizer, layout):
    sizes = [200_003, 0, 1, 15, 17, 4097, 65_536, *([1024] * 50)]
    results = []
    for count, is_out_of_place in ((1, False), (1, True), (num_threads, True)):
        many = [arrays_of(layout, optimizer, n, values(n, n).bfloat16()) for n in sizes]
        with native.Pool(count) as pool:
            for step in (1, 2):
                targets = [
                    Targets(part.parts, skip=k % 2, in_place=part.parts if k % 3 == 2 else ())
                    for k, part in enumerate(many)
                ]
                if is_out_of_place:
                    update(pool, layout, many, step, [each.target() for each in targets])
                    for part, each in zip(many, targets, strict=True):
                        assert each.are_guards_untouched()
                        part.parts.update(each.views)
                else:
                    update(pool, layout, many, step)
        results.append(many)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            for name, part in one.parts.items():
                assert torch.equal(part, other.parts[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_target_that_is_its_source_means_in_place(layout):
    grad = values(4097, 2).bfloat16()
    arrays, expected = (arrays_of(layout, "adam", 4097, grad) for _ in range(2))
    with native.Pool(1) as pool:
        update(pool, layout, [arrays], 1, [target_of(arrays.segment())])
        update(pool, layout, [expected], 1)
    assert all(map(torch.equal, arrays.parts.values(), expected.parts.values()))


# ---- Bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_target_that_overlaps_an_array_of_its_segment_is_refused(optimizer, layout):
    good, bad = (arrays_of(layout, optimizer, 300, torch.ones(300)) for _ in range(2))
    before = [{name: part.clone() for name, part in a.parts.items()} for a in (good, bad)]
    targets = [Targets(a.parts) for a in (good, bad)]
    names = [name for name in bad.parts if bad.parts[name].numel()]
    with native.Pool(1) as pool:
        for name, other in itertools.product(targets[1].views, names):
            if not targets[1].views[name].numel():
                continue
            begin, nbytes = bad.parts[other].data_ptr(), bad.parts[other].nbytes
            # Its first byte in the other's last, and its last byte in the other's first.
            for address in (begin + nbytes - 1, begin - targets[1].views[name].nbytes + 1):
                moved = targets[1].target()._replace(**{name: address})
                message = f"segment 1: the target of {name} overlaps (the target of )?"
                with pytest.raises(ConfigError, match=message):
                    update(pool, layout, [good, bad], 1, [targets[0].target(), moved])
        for name, other in itertools.permutations(targets[1].views, 2):
            if not (targets[1].views[name].numel() and targets[1].views[other].numel()):
                continue
            address = targets[1].views[other].data_ptr() + 1
            moved = targets[1].target()._replace(**{name: address})
            # A longer array may reach into other memory of the segment, too: that is named first.
            with pytest.raises(ConfigError, match=r"segment 1: the target of .* overlaps "):
                update(pool, layout, [good, bad], 1, [targets[0].target(), moved])
    for arrays, old in zip((good, bad), before, strict=True):
        assert all(torch.equal(part, old[name]) for name, part in arrays.parts.items())
    for each in targets:
        assert all(bool((view == 0xA5).all()) for view in each.views.values())


def test_targets_next_to_other_arrays_are_taken():
    """Arrays that touch do not overlap."""
    numel = 256
    room = torch.zeros(8 * numel)
    starts = [room.data_ptr() + 4 * k * numel for k in range(8)]
    weight, moment0, moment1, grad, *to = starts
    segment = (
        Arrays(torch.ones(1), torch.ones(1), F32)
        .segment()
        ._replace(weight=weight, low=0, moment0=moment0, moment1=moment1, grad=grad, numel=numel)
    )
    target = native.Target(weight=to[0], moment0=to[1], moment1=to[2])
    with native.Pool(1) as pool:
        pool.update("adam", F32, F32, [segment], targets=[target])
        moved = target._replace(weight=moment0 + 4 * numel - 4)
        with pytest.raises(ConfigError, match="the target of weight overlaps moment0"):
            pool.update("adam", F32, F32, [segment], targets=[moved])


def test_a_call_has_a_target_for_each_segment_or_none():
    arrays = Arrays(torch.ones(17), torch.ones(17), F32)
    with native.Pool(1) as pool:
        for targets in ([], [native.Target()] * 2):
            with pytest.raises(ConfigError, match=f"targets: got {len(targets)}, expected one for"):
                pool.update("adam", F32, F32, [arrays.segment()], targets=targets)
        pool.update("adam", F32, F32, [], targets=[])
