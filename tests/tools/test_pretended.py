"""The pretended GPU holds what it says: laws of the CUDA path pass on it, mistakes die on it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.pretended import install

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300

LAWS = [
    "device_cuda.py::test_fetches_and_drains_finish_while_compute_is_busy",
    "training_cuda.py::test_a_plan_of_its_own_never_changes_a_bit[fp32]",
    "residents_cuda.py::test_updates_on_the_gpu_have_the_hosts_bits[half-gated-bf16]",
]
# What a CUDA GPU refuses; the host would compute it, or read the memory, without a word.
MISTAKES = {
    "import ctypes; ctypes.string_at(there.data_ptr(), 4)": "",
    "there + torch.ones(3)": "Expected all tensors to be on the same device",
}

can_pretend = pytest.mark.skipif(
    torch.version.cuda is not None or not torch.__version__.startswith(f"{install.TORCH}."),
    reason=f"the pretended device needs torch {install.TORCH} without CUDA",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)


@can_pretend
@pytest.mark.slow
def test_laws_of_the_cuda_path_pass_on_the_pretended_device() -> None:
    laws = [f"tests/gpu/test_{law}" for law in LAWS]
    result = run("-m", "pytest", "-q", "-p", "tests.pretended.plugin", "-m", "gpu", *laws)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(LAWS)} passed in" in result.stdout, result.stdout


@can_pretend
@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_gpu_refuses_dies_on_the_pretended_device(mistake: str) -> None:
    begin = "from tests.pretended.install import install; install(); import torch"
    result = run("-c", f"{begin}; there = torch.ones(3, device='cuda')\n{mistake}")
    assert result.returncode == (1 if MISTAKES[mistake] else -signal.SIGSEGV), result.stderr
    assert re.search(MISTAKES[mistake], result.stderr), result.stderr


def test_another_torch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.14.1+cpu")
    with pytest.raises(install.Refused, match=r"^.*for torch 2\.13, here is torch 2\.14\.1\+cpu$"):
        install.install()
