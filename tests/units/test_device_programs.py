"""Laws of what a GPU is told to do: Triton's compiler, which needs no GPU, gives the PTX, and its
arithmetic must be the formula's operations, correctly rounded, and no others.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stronghold import native
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.triton_kernels import TritonKernels
from tests.support.device_kernels import BF16, DTYPES, F16, Arrays, accumulated, some_arrays, sums
from tests.support.optimizers import FORMS, hyper_fields

HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU = torch.device("cpu")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
compiled = pytest.mark.skipif(INTERPRETING or not HAS_TRITON, reason="needs Triton's compiler")


class NullDriver:
    """Takes launches for a GPU of this architecture and runs nothing: Triton compiles for real."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)
        self.launches: list[tuple[int, ...]] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 48 << 10},
            load_binary=lambda *_: (1, 1, 32, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_device(self) -> int:
        return self._target.arch  # caches of compiled programs are per device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launches.append(arguments[:3])

    def compiled(self, function: Any) -> list[Any]:
        """What was compiled of one program."""
        return list(function.device_caches[self._target.arch][0].values())

    def programs(self, function: Any) -> list[str]:
        """The PTX of it."""
        return [kernel.asm["ptx"] for kernel in self.compiled(function)]


@pytest.fixture(params=[80, 90, 100])
def driver(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[NullDriver]:
    from triton.runtime.driver import driver

    from stronghold.optim import triton_programs as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    null = NullDriver(request.param)
    before = driver._active
    driver.set_active(null)
    yield null
    launched = (programs.update, programs.accumulate, programs.sum_squares, programs.sum_blocks)
    for function in launched:
        for kernel in null.compiled(function):
            # there is nothing to unload, least of all by another driver
            kernel.module = None
        del function.device_caches[request.param]
    driver._active = before


def arithmetic(ptx: str) -> collections.Counter[str]:
    """How often each instruction that computes with floats occurs; a packed one counts twice.

    Moves, comparisons and exact conversions are not among them, nor `abs`, which the compiler makes
    of the test for NaN: it hands on some NaN for a NaN.
    """
    found = re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z0-9_.]+)", ptx, flags=re.MULTILINE)
    exact = re.compile(r"(ld|st|mov|selp|setp|abs)\.|cvt\.f(32|64)\.")
    counts: collections.Counter[str] = collections.Counter()
    for name in found:
        if re.search(r"\.b?f(16|32|64)", name) and not exact.match(name):
            counts[name.replace("x2", "")] += 2 if "x2" in name else 1
    return counts


# Rounded operations on one element, by optimizer and variant: those of its formula in
# `stronghold.h`.
OPERATIONS = {
    ("adam", 0): {"mul": 4, "fma": 5, "div": 1, "sqrt": 1},
    ("adam", 1): {"mul": 5, "fma": 4, "div": 1, "sqrt": 1},
    ("lion", 0): {"mul": 4, "fma": 3},
    ("sgd_momentum", 0): {"mul": 1, "fma": 3},
    ("sgd_momentum", 1): {"mul": 1, "fma": 4},
    ("sgd", 0): {"mul": 1, "fma": 2},
}


def variant_of(optimizer: str, flags: dict[str, Any]) -> int:
    """The variant of the optimizer's formula that these flags choose."""
    segment = native.UpdateSegment(8, 8, 8, 1, **hyper_fields(optimizer, **flags))
    return int(native.constants(optimizer, [segment])[1][0])


FLAGS = {(optimizer, variant_of(optimizer, flags)): flags for optimizer, flags in FORMS.values()}


@compiled
def test_every_optimizer_has_a_formula_whose_operations_are_known():
    from stronghold.optim import triton_programs

    assert set(triton_programs.FORMULAS) == set(native.optimizers())
    assert {optimizer for optimizer, _ in OPERATIONS} == set(native.optimizers())
    assert set(OPERATIONS) == set(FLAGS)


@compiled
@pytest.mark.parametrize(("optimizer", "variant"), OPERATIONS)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_compiled_updates_have_the_formulas_operations_and_no_others(
    driver: NullDriver,
    device: EmulatedDevice,
    weight_dtype: torch.dtype,
    optimizer: str,
    variant: int,
):
    for grad_dtype in DTYPES:
        arrays = some_arrays((1, 4097), weight_dtype, grad_dtype, CPU, optimizer=optimizer)
        segments = [part.segment(1, **FLAGS[optimizer, variant]) for part in arrays]
        TritonKernels(device).update(optimizer, weight_dtype, grad_dtype, segments)
    from stronghold.optim import triton_programs

    programs = driver.programs(triton_programs.update)
    assert len(programs) == len(DTYPES)
    # 8 elements of a thread, with and without a mask.
    elements = 16
    expected = collections.Counter(
        {
            f"{operation}.rn.f32": elements * count
            for operation, count in OPERATIONS[optimizer, variant].items()
        }
    )
    if weight_dtype == F16:  # of the old master and of the new one
        expected["cvt.rn.f16.f32"] = 2 * elements
    for ptx in programs:
        assert arithmetic(ptx) == expected
        assert "ftz" not in ptx
        assert "ld.global.v4" in ptx  # 16 bytes at a time where there is no mask
    assert driver.launches == [(6, 1, 1)] * len(DTYPES)


@compiled
def test_compiled_accumulation_adds_once(driver: NullDriver, device: EmulatedDevice):
    kernels = TritonKernels(device)
    for dtype in DTYPES:
        accumulated(kernels, (4097,), dtype, CPU)
    from stronghold.optim import triton_programs

    programs = driver.programs(triton_programs.accumulate)
    found = sorted(tuple(arithmetic(ptx).items()) for ptx in programs)
    assert found == [(), (), (), *[(("add.rn.f32", 8),)] * 3]
    assert not any("ftz" in ptx for ptx in programs)


@compiled
def test_compiled_sums_add_in_the_order_of_the_tree(driver: NullDriver, device: EmulatedDevice):
    kernels = TritonKernels(device)
    for dtype in DTYPES:
        sums(kernels, (4097, 131_073), dtype, CPU)
    from stronghold.optim import triton_programs

    unroll = triton_programs.SUM_UNROLL.value
    programs = driver.programs(triton_programs.sum_squares)
    assert len(programs) == len(DTYPES)
    for ptx in programs:
        found = arithmetic(ptx)
        assert found.pop("fma.rn.f64") == unroll
        assert set(found) == {"add.rn.f64"}
    [ptx] = driver.programs(triton_programs.sum_blocks)
    assert arithmetic(ptx) == {"add.rn.f64": unroll}


@compiled
@pytest.mark.parametrize("form", FORMS)
def test_other_numbers_and_other_segments_compile_nothing(
    driver: NullDriver, device: EmulatedDevice, form: str
):
    optimizer, flags = FORMS[form]
    kernels = TritonKernels(device)
    for count, rate in ((1, 1e-3), (2, 1.0), (16, 0.0), (100, 3e-4)):
        arrays = some_arrays([16] * count, BF16, BF16, CPU, optimizer=optimizer)
        segments = [part.segment(1, lr=rate, **flags) for part in arrays]
        kernels.update(optimizer, BF16, BF16, segments)
    from stronghold.optim import triton_programs

    assert len(driver.programs(triton_programs.update)) == 1
    assert driver.launches == [(1, 1, 1), (2, 1, 1), (16, 1, 1), (64, 1, 1), (36, 1, 1)]


@compiled
def test_each_formula_is_a_program_of_its_own(driver: NullDriver, device: EmulatedDevice):
    """Triton keeps compiled programs by their arguments, of which the formula is one."""
    kernels = TritonKernels(device)
    for _ in range(2):
        for optimizer, flags in FORMS.values():
            arrays = Arrays(16, BF16, BF16, device=CPU, optimizer=optimizer)
            kernels.update(optimizer, BF16, BF16, [arrays.segment(1, **flags)])
    from stronghold.optim import triton_programs

    assert len(driver.programs(triton_programs.update)) == len(FORMS)
