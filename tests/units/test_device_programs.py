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

from stronghold.device.emulated import EmulatedDevice
from stronghold.device.triton_kernels import TritonKernels
from tests.support.device_kernels import BF16, DTYPES, F16, accumulated, some_arrays, sums

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

    from stronghold.device import triton_programs as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    null = NullDriver(request.param)
    before = driver._active
    driver.set_active(null)
    yield null
    for function in (programs.adam, programs.accumulate, programs.sum_squares, programs.sum_blocks):
        for kernel in null.compiled(function):
            kernel.module = None  # there is nothing to unload, least of all by another driver
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


@compiled
@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_compiled_adam_has_the_formulas_operations_and_no_others(
    driver: NullDriver, device: EmulatedDevice, weight_dtype: torch.dtype, adamw: bool
):
    for grad_dtype in DTYPES:
        arrays = some_arrays((1, 4097), weight_dtype, grad_dtype, CPU)
        segments = [part.segment(1, adamw=adamw) for part in arrays]
        TritonKernels(device).adam(weight_dtype, grad_dtype, segments)
    from stronghold.device import triton_programs

    programs = driver.programs(triton_programs.adam)
    assert len(programs) == len(DTYPES)
    # 8 elements of a thread, with and without a mask.
    elements = 16
    expected = collections.Counter(
        {
            "mul.rn.f32": elements * (5 if adamw else 4),
            "fma.rn.f32": elements * (4 if adamw else 5),
            "div.rn.f32": elements,
            "sqrt.rn.f32": elements,
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
    from stronghold.device import triton_programs

    programs = driver.programs(triton_programs.accumulate)
    found = sorted(tuple(arithmetic(ptx).items()) for ptx in programs)
    assert found == [(), (), (), *[(("add.rn.f32", 8),)] * 3]
    assert not any("ftz" in ptx for ptx in programs)


@compiled
def test_compiled_sums_add_in_the_order_of_the_tree(driver: NullDriver, device: EmulatedDevice):
    kernels = TritonKernels(device)
    for dtype in DTYPES:
        sums(kernels, (4097, 131_073), dtype, CPU)
    from stronghold.device import triton_programs

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
def test_other_numbers_and_other_segments_compile_nothing(
    driver: NullDriver, device: EmulatedDevice
):
    kernels = TritonKernels(device)
    for count, rate in ((1, 1e-3), (2, 1.0), (16, 0.0), (100, 3e-4)):
        arrays = some_arrays([16] * count, BF16, BF16, CPU)
        kernels.adam(BF16, BF16, [part.segment(1, lr=rate) for part in arrays])
    from stronghold.device import triton_programs

    assert len(driver.programs(triton_programs.adam)) == 1
    assert driver.launches == [(1, 1, 1), (2, 1, 1), (16, 1, 1), (64, 1, 1), (36, 1, 1)]
