"""Laws of bits under other kernels than torch chooses on this machine.

Which kernel multiplies depends on the processor's vendor and instruction set, on memory layout and
on threads. A law that holds because this machine's kernels round alike falls under another choice.
Each choice is a process of its own: torch reads most of them once, when it is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Models whose kernels depend on layout, through windows, policies, residents and accumulation.
LAW = "tests/laws/test_bits.py"
WHICH = "nothing_changes and (t5 or llama or cache_dependent or structured or called_twice)"

FEWEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
CHOICES = {
    "no vector instructions, one sum, two threads": {**FEWEST, "STRONGHOLD_TEST_THREADS": "2"}
}
ONE_BY_ONE = {
    "no vector instructions, one sum": FEWEST,
    "two threads": {"STRONGHOLD_TEST_THREADS": "2"},
    "aten avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "aten default": {"ATEN_CPU_CAPABILITY": "default"},
    "onednn sse4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "onednn avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "mkl sse4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "mkl avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "no onednn": {"STRONGHOLD_TEST_ONEDNN": "0"},
    "no onednn, two threads": {"STRONGHOLD_TEST_ONEDNN": "0", "STRONGHOLD_TEST_THREADS": "2"},
}


def check(choice: dict[str, str], which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", LAW]
    run = subprocess.run(
        [*command, "-k", which],
        cwd=ROOT,
        env={**os.environ, **choice},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES.values(), ids=list(CHOICES))
def test_bits_hold_under_other_kernels(choice: dict[str, str]) -> None:
    check(choice, "nothing_changes and not late and (t5 or odd_llama or cache_dependent)")


@pytest.mark.slow
@pytest.mark.parametrize("choice", ONE_BY_ONE.values(), ids=list(ONE_BY_ONE))
def test_bits_hold_under_each_choice_of_kernels(choice: dict[str, str]) -> None:
    check(choice, WHICH)
