"""The pretended GPU holds what it says: laws of the CUDA path pass on it, mistakes die on it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.pretended import build, install, kernels
from tests.pretended.deselected import DESELECTED

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300

# Fences of fetches, drains and compute; a window's bits; a layer that is updated on the GPU; a
# checkpoint.
LAWS = {
    "device_cuda.py::test_fetches_and_drains_finish_while_compute_is_busy": 1,
    "device_cuda.py::test_a_drain_does_not_wait_for_a_fetch": 1,
    "device_cuda.py::test_a_copy_may_span_registered_and_other_memory": 4,
    "training_cuda.py::test_a_plan_of_its_own_never_changes_a_bit[fp32]": 1,
    "residents_cuda.py::test_updates_on_the_gpu_have_the_hosts_bits[half-gated-bf16]": 1,
    "checkpoint_cuda.py": 4,
}
OTHER_THREAD = """
import threading
found = []
def wait():
    try: torch.cuda.Event().record(torch.cuda.current_stream())
    except RuntimeError as error: found.append(error)
thread = threading.Thread(target=wait); thread.start(); thread.join()
raise found[0]
"""
REGISTER = """
import mmap
slab = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
register = lambda at, size: torch.cuda.cudart().cudaHostRegister(slab.data_ptr() + at, size, 1)
"""
TWO_PAGES = f"{REGISTER}\nregister(0, 5000); raise RuntimeError(register(6000, 9))"
COPYING = f"""{REGISTER}
register(0, 1 << 20)
torch.cuda._sleep(10**9)
torch.empty(1 << 20, dtype=torch.uint8, device="cuda").copy_(slab, non_blocking=True)
torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
"""
# What a CUDA GPU refuses; the host would compute it, or read the memory, without a word.
MISTAKES = {
    "import ctypes; ctypes.string_at(there.data_ptr(), 4)": "",
    "there + torch.ones(3)": "Expected all tensors to be on the same device",
    "torch.ones(3).set_(there.untyped_storage())": "different device|to a storage on",
    OTHER_THREAD: "has set no device",
    TWO_PAGES: "712",
    COPYING: "while it is copied",
}

# What torch's CUDA side does beside what it is asked for; each asserts it.
WORKSPACES = """
from torch import nn
taken = torch.cuda.memory_allocated
linear, x = nn.Linear(8, 8, device="cuda"), torch.ones(8, 8, device="cuda", requires_grad=True)
def grown(work):
    before = taken()
    work()
    return (taken() - before) >> 20
def multiply(): x.detach() @ x.detach()
def add_bias(): linear(x.detach())
assert grown(multiply) == 32
assert grown(multiply) == 0
assert grown(add_bias) == 1, "cublasLt's own"
assert grown(lambda: linear(x).sum().backward()) == 32, "autograd's thread has another handle"
with torch.cuda.stream(torch.cuda.Stream()):
    assert grown(add_bias) == 33, "each stream has its own"
torch.cuda.empty_cache()
assert grown(torch._C._cuda_clearCublasWorkspaces) == -98
"""
ATTENTION = """
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend
def parts(dtype, length=16, size=8):
    draw = lambda: torch.randn(2, length, 4, size, device="cuda", dtype=dtype)
    return [draw().transpose(1, 2).requires_grad_() for _ in range(3)]
def chosen(*parts): return SDPBackend(torch._fused_sdp_choice(*parts))
half = parts(torch.bfloat16)
first = SDPBackend.CUDNN_ATTENTION
if "TORCH_CUDNN_SDPA_DEPRIORITIZED" in os.environ: first = SDPBackend.FLASH_ATTENTION
assert chosen(*half) == first
assert chosen(*parts(torch.bfloat16, size=12)) == SDPBackend.FLASH_ATTENTION
assert chosen(*parts(torch.float32)) == SDPBackend.EFFICIENT_ATTENTION
torch.use_deterministic_algorithms(True)
assert chosen(*half) == SDPBackend.FLASH_ATTENTION
torch.use_deterministic_algorithms(False)
mask = torch.randn(16, 16, device="cuda", dtype=torch.bfloat16)
for more in ({}, {"is_causal": True}, {"attn_mask": mask}):
    found = []
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel): output = attend(*half, **more)
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), half)])
    for ours, plain in zip(*found): torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05)
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    try: attend(*parts(torch.float32))
    except RuntimeError as error: assert "No viable backend" in str(error)
    else: raise AssertionError("there is no kernel for fp32")
"""
NEIGHBOUR = """
free = torch.cuda.mem_get_info
assert free() == free()
install.neighbour.there = True
assert free()[0] > free()[0]
"""

can_pretend = pytest.mark.skipif(
    torch.version.cuda is not None or not torch.__version__.startswith(f"{install.TORCH}."),
    reason=f"the pretended device needs torch {install.TORCH} without CUDA",
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@can_pretend
@pytest.mark.slow
def test_laws_of_the_cuda_path_pass_on_the_pretended_device() -> None:
    laws = [f"tests/gpu/test_{law}" for law in LAWS]
    result = run("-m", "pytest", "-q", "-p", "tests.pretended.plugin", "-m", "gpu", *laws)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(rf"^{sum(LAWS.values())} passed in", result.stdout, re.MULTILINE), (
        result.stdout
    )


@can_pretend
@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_gpu_refuses_dies_on_the_pretended_device(mistake: str) -> None:
    begin = "from tests.pretended.install import install; install(); import torch"
    result = run("-c", f"{begin}; there = torch.ones(3, device='cuda')\n{mistake}")
    assert result.returncode == (1 if MISTAKES[mistake] else -signal.SIGSEGV), result.stderr
    assert re.search(MISTAKES[mistake], result.stderr), result.stderr


@can_pretend
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "environment"),
    [
        (WORKSPACES, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        (ATTENTION, {}),
        (ATTENTION, {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}),
        (NEIGHBOUR, {}),
    ],
    ids=["workspaces", "attention", "flash first", "neighbour"],
)
def test_it_does_what_torchs_cuda_does_unasked(program: str, environment: dict[str, str]) -> None:
    begin = "import os; from tests.pretended import install; install.install(); import torch"
    result = run("-c", f"{begin}\n{program}", **environment)
    assert result.returncode == 0, result.stderr


def test_launches_have_the_tables_of_triton_programs() -> None:
    source = (ROOT / "stronghold/optim/triton_programs.py").read_text(encoding="utf-8")
    rows = re.search(r"^ROWS: tl.constexpr = tl.constexpr\((\d+)\)", source, re.MULTILINE)
    assert rows is not None
    assert int(rows[1]) == kernels.ROWS
    formulas = re.findall(r'^    "(\w+)": Formula\(\w+, num_moments=(\d)\)', source, re.MULTILINE)
    assert {name: int(number) for name, number in formulas} == kernels.NUM_MOMENTS


LOST = """
import pytest, torch
def test_that_fails():
    torch.nn.functional.embedding(torch.tensor([9], device="cuda"), torch.ones(3, 2, device="cuda"))
    torch.cuda.synchronize()
def test_after_it():
    assert torch.ones(2, device="cuda").sum().item() == 2.0
"""


@can_pretend
@pytest.mark.slow
def test_tests_end_where_one_has_lost_the_gpu(tmp_path: Path) -> None:
    program = tmp_path / "test_lost.py"
    program.write_text(LOST)
    plugins = ["-p", "tests.pretended.plugin", "-p", "tests.gpu.conftest"]
    result = run("-m", "pytest", "-q", *plugins, f"--rootdir={tmp_path}", str(program))
    assert "a test before has lost the GPU" in result.stdout
    assert "1 failed" in result.stdout, result.stdout


@can_pretend
@pytest.mark.slow
def test_one_rank_gathers_and_takes_means_on_the_pretended_device() -> None:
    begin = "from tests.pretended.install import install; install(); import sys, tests.conftest"
    groups = "from tests.pretended import process_groups; process_groups.install()"
    feature = "sys.path.append('benchmarks'); from smoke_features import FEATURES"
    result = run("-c", f"{begin}; {groups}; {feature}; print(FEATURES['nccl'].run('cuda'))")
    assert result.returncode == 0, result.stdout + result.stderr


LANES_OWN = """
import os, threading, torch
os.environ["MASTER_PORT"] = str(tests.conftest.free_port())
torch.cuda.set_device(0)
torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
group = torch.distributed.new_group([0], backend="nccl")
whole, said = torch.ones(4, device="cuda"), []
def gather():
    torch.cuda.set_device(0)
    try: torch.distributed.all_gather_into_tensor(whole, whole, group=group)
    except RuntimeError as error: said.append(str(error))
def on_a_lane():
    lane = threading.Thread(target=gather, name="lane"); lane.start(); lane.join()
free = torch.cuda.mem_get_info()[0]
on_a_lane()
assert "makes its communicator on the thread lane" in said.pop(), said
gather()
assert free - torch.cuda.mem_get_info()[0] == process_groups.COMMUNICATOR_BYTES
on_a_lane()
assert not said
"""


@can_pretend
@pytest.mark.slow
def test_a_lane_that_makes_a_communicator_is_refused_on_the_pretended_device() -> None:
    """The training thread may, and lanes use it then."""
    begin = "from tests.pretended.install import install; install(); import sys, tests.conftest"
    groups = "from tests.pretended import process_groups; process_groups.install()"
    result = run("-c", f"{begin}; {groups}\n{LANES_OWN}")
    assert result.returncode == 0, result.stdout + result.stderr


def test_it_is_not_installed_where_torch_has_looked_for_a_gpu() -> None:
    with pytest.raises(install.Refused, match=r"before torch is imported|written for torch"):
        install.install()


def test_another_torch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.14.1+cpu")
    with pytest.raises(install.Refused, match=r"^.*for torch 2\.13, here is torch 2\.14\.1\+cpu$"):
        install.install()


def test_another_source_or_torch_is_another_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {build.folder()}
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "version", lambda name: "2.13.9")
        found.add(build.folder())
    changed = tmp_path / "device.cpp"
    changed.write_bytes(build.SOURCES[0].read_bytes() + b"\n")
    monkeypatch.setattr(build, "SOURCES", [changed, *build.SOURCES[1:]])
    found.add(build.folder())
    assert len(found) == 3


@pytest.mark.parametrize("law", DESELECTED)
def test_what_is_deselected_exists(law: str) -> None:
    path, name = law.split("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
