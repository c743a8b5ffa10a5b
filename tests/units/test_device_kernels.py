"""Laws of the update's kernels: a GPU's give the host's bits.

Without a GPU two things show it. Triton's interpreter runs the programs on the CPU, as written:
`TRITON_INTERPRET=1 pytest tests/units/test_device_kernels.py`, which one test here does. And
Triton's compiler gives the PTX: tests/units/test_device_programs.py. Both are
skipped without Triton.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold import native
from stronghold.devices import triton_kernels
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.triton_kernels import TritonKernels
from stronghold.errors import ConfigError
from stronghold.native import Pool
from tests.support.device_kernels import (
    BF16,
    DTYPES,
    F16,
    F32,
    SIZES,
    UPDATES,
    Arrays,
    accumulated,
    assert_same,
    meetings,
    run_adam,
    run_steps,
    some_arrays,
    sums,
)
from tests.support.optimizers import hyper_fields, number_field

# The interpreter computes with NumPy, which warns of the infinities and NaNs that are wanted here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

CPU = torch.device("cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
TIMEOUT_S = 1200


def rounds_fma_once() -> bool:
    """Whether Triton's interpreter does; before 3.7 it multiplied, rounded and added."""
    from triton._C.libtriton import interpreter

    return hasattr(interpreter, "fma_fp32")


TWICE = "this Triton's interpreter rounds twice in an fma"
interpreted = pytest.mark.skipif(
    not INTERPRETING or not rounds_fma_once(),
    reason=TWICE if INTERPRETING else "runs under TRITON_INTERPRET=1",
)


@pytest.fixture(scope="module")
def host() -> Iterator[Pool]:
    with native.Pool(1) as pool:
        yield pool


@pytest.fixture
def triton(device: EmulatedDevice) -> TritonKernels:
    return TritonKernels(device)


# ---- The host's ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_forms_of_the_sums_are_the_same(host: Pool, dtype: torch.dtype):
    arrays = [torch.randn(n).to(dtype) for n in SIZES]
    segments = [(x.data_ptr(), x.numel()) for x in arrays]
    found = host.sum_squares_async(dtype, segments)
    assert found.dtype == torch.float64
    assert found.tolist() == host.sum_squares(dtype, segments)


def test_segments_share_a_launch_when_their_numbers_are_equal():
    sizes = (5, 0, 5, 5, 5)
    steps, decays = (1, 1, 1, 2, 1), (0.0, 0.0, 0.1, 0.1, 0.0)
    segments = [
        native.UpdateSegment(
            *(8, 8, 8, numel), **hyper_fields("adam", step=step, weight_decay=decay, adamw=k == 0)
        )
        for k, (numel, step, decay) in enumerate(zip(sizes, steps, decays, strict=True))
    ]
    groups = triton_kernels._groups("adam", native.rows(segments))
    # Without weight decay both forms are one; a segment without elements is in none.
    found = [(group.variant, group.indices) for group in groups]
    assert found == [(1, [0, 4]), (0, [2]), (0, [3])]


def test_without_triton_the_error_says_what_to_install(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "stronghold.optim.triton_programs", raising=False)
    monkeypatch.delattr("stronghold.optim.triton_programs", raising=False)
    with pytest.raises(ConfigError, match="pip install triton"):
        TritonKernels(device)


# ---- Interpreted: the programs as they are written -------------------------------------------


@pytest.mark.skipif(INTERPRETING or not HAS_TRITON, reason="needs Triton, not yet interpreting")
def test_the_laws_hold_where_triton_interprets():
    if not rounds_fma_once():
        pytest.skip(TWICE)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rN", __file__, "-k", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert " passed" in run.stdout


@interpreted
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("update", UPDATES)
def test_interpreted_updates_have_the_natives_bits(
    host: Pool,
    triton: TritonKernels,
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    update: str,
):
    optimizer, flags = UPDATES[update]
    for special in (False, True):
        ours, theirs = (
            some_arrays(SIZES, weight_dtype, grad_dtype, CPU, special=special, optimizer=optimizer)
            for _ in range(2)
        )
        for kernels, arrays in ((triton, ours), (host, theirs)):
            run_steps(kernels, arrays, range(1, 5), **flags)
        assert_same(ours, theirs, f"special {special}")


@interpreted
@pytest.mark.parametrize("update", UPDATES)
def test_interpreted_updates_have_the_natives_bits_where_hazards_meet(
    host: Pool, triton: TritonKernels, update: str
):
    optimizer, flags = UPDATES[update]
    for changes in ({"grad_scale": 1.0}, {"lr": -1e-3}, {"lr": 0.0}):
        ours, theirs = ([meetings(CPU, optimizer)] for _ in range(2))
        for kernels, arrays in ((triton, ours), (host, theirs)):
            run_steps(kernels, arrays, (1, 2), **changes, **flags)
        assert_same(ours, theirs, str(changes))


@interpreted
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("update", UPDATES)
def test_interpreted_updates_take_arrays_at_any_element(
    host: Pool, triton: TritonKernels, weight_dtype: torch.dtype, update: str
):
    optimizer, flags = UPDATES[update]
    for skip in (1, 8):
        ours, theirs = (
            some_arrays((1025, 3), weight_dtype, F16, CPU, skip=skip, optimizer=optimizer)
            for _ in range(2)
        )
        for kernels, arrays in ((triton, ours), (host, theirs)):
            run_steps(kernels, arrays, (1, 2), **flags)
        assert_same(ours, theirs, f"skip {skip}")


@interpreted
@pytest.mark.parametrize("update", UPDATES)
def test_interpreted_updates_take_the_callers_scale(host: Pool, triton: TritonKernels, update: str):
    """The scale comes after the tables: it replaces that of every segment."""
    optimizer, flags = UPDATES[update]
    for scale in (0.1, 0.0, float("inf")):
        ours, theirs = (
            some_arrays((1025, 3), BF16, F16, CPU, optimizer=optimizer) for _ in range(2)
        )
        for kernels, arrays in ((triton, ours), (host, theirs)):
            segments = [part.segment(1, **flags) for part in arrays]
            kernels.prepare_update(optimizer, BF16, F16, segments)(scale)
        assert_same(ours, theirs, f"scale {scale}")


@interpreted
@pytest.mark.parametrize("update", UPDATES)
def test_interpreted_masters_at_every_remainder_keep_their_bits(triton: TritonKernels, update: str):
    """Ties included: a step with a learning rate of 0 joins, does nothing, and splits."""
    optimizer, flags = UPDATES[update]
    arrays = Arrays(1 << 16, BF16, BF16, device=CPU, optimizer=optimizer)
    rest = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    arrays.low.copy_(rest)
    arrays.weight[arrays.weight == 0] = 1.0  # zeros have no negative one
    weight = arrays.weight.clone()
    segment = arrays.segment(1, lr=0.0, weight_decay=0.0, **flags)
    triton.update(optimizer, BF16, BF16, [segment])
    assert torch.equal(arrays.weight, weight)
    assert torch.equal(arrays.low, rest)


@interpreted
def test_interpreted_updates_take_more_segments_than_a_table_has_rows(
    host: Pool, triton: TritonKernels
):
    sizes = [(k * 7) % 23 for k in range(400)]
    ours, theirs = (some_arrays(sizes, BF16, BF16, CPU) for _ in range(2))
    run_adam(triton, ours, (1,))
    run_adam(host, theirs, (1,))
    assert_same(ours, theirs)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skip", [0, 1])
def test_interpreted_accumulation_has_the_natives_bits(
    host: Pool, triton: TritonKernels, dtype, skip
):
    ours = accumulated(triton, SIZES, dtype, CPU, skip)
    theirs = accumulated(host, SIZES, dtype, CPU, skip)
    assert all(map(torch.equal, ours, theirs))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_interpreted_sums_have_the_natives_bits(host: Pool, triton: TritonKernels, dtype, special):
    sizes = (*SIZES, 0, 65_535, 65_536, 131_105, 33, 0)
    assert torch.equal(
        sums(triton, sizes, dtype, CPU, special), sums(host, sizes, dtype, CPU, special)
    )
    many = [k % 40 for k in range(150)]
    assert torch.equal(sums(triton, many, dtype, CPU), sums(host, many, dtype, CPU))
    assert triton.sum_squares(dtype, []) == []


@interpreted
def test_interpreted_kernels_refuse_other_dtypes(triton: TritonKernels):
    x = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"got torch\.float64"):
        triton.sum_squares(torch.float64, [(x.data_ptr(), 4)])
    with pytest.raises(ConfigError, match=r"got torch\.float64"):
        triton.accumulate(torch.float64, [(x.data_ptr(), x.data_ptr(), 4, False)])
    with pytest.raises(ConfigError, match=r"got torch\.float64"):
        triton.update("adam", torch.float64, F32, [])


@interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta1": 1.0}, r"segment 1: beta1 must be in \[0, 1\)"),
        ({"beta2": float("nan")}, "beta2"),
        ({"eps": -1.0}, "eps must be >= 0"),
        ({"lr": float("inf")}, "lr must be finite"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"step": 0}, "step must be >= 1"),
        ({"numel": -1}, "numel"),
        ({"grad": 0}, "grad"),
        ({"moment1": 0}, "moment"),
    ],
)
def test_interpreted_updates_refuse_what_the_native_refuses(
    host: Pool, triton: TritonKernels, changes: dict[str, Any], message: str
):
    arrays = Arrays(17, BF16, BF16, device=CPU)
    before = arrays.state()
    numbers = {"beta1", "beta2", "eps", "lr", "weight_decay"} & set(changes)
    fields = {
        number_field("adam", name) if name in numbers else name: value
        for name, value in changes.items()
    }
    good = arrays.segment(1)
    for kernel in (triton, host):
        with pytest.raises(ConfigError, match=message):
            kernel.update("adam", BF16, BF16, [good, good._replace(**fields)])
    assert all(map(torch.equal, before, arrays.state()))


@interpreted
def test_interpreted_updates_refuse_addresses_that_a_gpu_cannot_load_from(triton: TritonKernels):
    good = Arrays(17, BF16, BF16, device=CPU).segment(1)
    for name, multiple in (("weight", 2), ("low", 2), ("grad", 2), ("moment0", 4), ("moment1", 4)):
        wrong = good._replace(**{name: getattr(good, name) + multiple // 2})
        message = f"segment 1: {name}: got {getattr(wrong, name)}, expected an address aligned to"
        with pytest.raises(ConfigError, match=f"{message} {multiple} bytes"):
            triton.update("adam", BF16, BF16, [good, wrong])
