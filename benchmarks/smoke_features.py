"""The features of `smoke.py`: what each asks, and what it saw.

Each is run in a process of its own, and imports there what it needs. It takes "cuda" or "emulated",
returns a line about what it saw, and raises when that is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = float(1 << 30)
LIMIT_S = 90.0


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """`limit_s` is what its process may take, which begins with `environment`: torch reads some of
    it when it is imported."""

    run: Callable[[str], str]
    limit_s: float
    only_cuda: bool
    environment: dict[str, str]


FEATURES: dict[str, Feature] = {}  # in the order in which one needs the other


def feature(
    limit_s: float = LIMIT_S, *, only_cuda: bool = False, **environment: str
) -> Callable[[Callable[[str], str]], Callable[[str], str]]:
    def register(run: Callable[[str], str]) -> Callable[[str], str]:
        FEATURES[run.__name__.replace("_", "-")] = Feature(run, limit_s, only_cuda, environment)
        return run

    return register


# -- what training stands on -----------------------------------------------------------------------
@feature(only_cuda=True)
def gpu(machine: str) -> str:
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    assert (a @ a).isfinite().all()
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, torch {torch.__version__}"


@feature()
def library(machine: str) -> str:
    from stronghold import native

    return f"kernels for {native.isa()}, {native.available_cores()} cores"


@feature(only_cuda=True)
def pin(machine: str) -> str:
    """A gigabyte of ours is registered, and torch copies from it while the device is busy."""
    import resource

    import torch

    from stronghold.devices.cuda import CudaDevice
    from stronghold.train.slabs import map_slab

    device, slab = CudaDevice(), map_slab(1 << 30, torch.uint8)
    begun = time.perf_counter()
    device.pinning.pin(slab)
    seconds = time.perf_counter() - begun
    assert slab.is_pinned(), "torch does not see that it is registered"
    there = device.memory.allocate(1 << 30, torch.uint8, "smoke")
    torch.cuda._sleep(1_000_000_000)
    busy = device.compute.record("busy")
    begun = time.perf_counter()
    device.fetch.submit("fetch", lambda: device.copy(there, slab)).wait()
    copied = time.perf_counter() - begun
    assert not busy.done, "the copy waited for compute"
    device.close()
    device.pinning.unpin(slab)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return f"1 GiB registered in {seconds:.2f} s, copied in {copied:.3f} s; ulimit -l {locked}"


@feature(only_cuda=True)
def rebind(machine: str) -> str:
    """Autograd and parameters that are on the GPU during forward and backward, else at rest."""
    import threading

    import torch

    parameter = torch.nn.Parameter(torch.ones(64, 64))
    host, there = parameter.data, torch.ones(64, 64, device="cuda")
    seen: list[Any] = []

    def arrived(p: torch.Tensor) -> None:
        assert p.grad is not None
        seen.append((p.device.type, p.grad.device.type, threading.current_thread().name))
        p.grad = None

    parameter.register_post_accumulate_grad_hook(arrived)
    for bound in (True, False):  # in backward: on the GPU again, or still at rest
        parameter.data = there
        loss = (torch.ones(2, 64, device="cuda") @ parameter).sum()
        parameter.data = host
        if bound:
            parameter.data = there
        loss.backward()
        parameter.data = host
    assert [(a, b) for a, b, _ in seen] == [("cuda", "cuda"), ("cpu", "cuda")], seen
    return f"hooks run in {seen[0][2]}"


@feature(only_cuda=True)
def triton(machine: str) -> str:
    import torch

    from stronghold import native
    from stronghold.devices.cuda import CudaDevice
    from tests.support.device_kernels import BF16, F32, assert_same, run_adam, some_arrays, sums

    device = CudaDevice()
    on_gpu, on_cpu = torch.device("cuda", 0), torch.device("cpu")
    with native.Pool(2) as host:
        for dtype in (BF16, F32):
            ours, theirs = (some_arrays((17, 4097), dtype, BF16, d) for d in (on_gpu, on_cpu))
            run_adam(device.kernels, ours, (1, 2, 3))
            run_adam(host, theirs, (1, 2, 3))
            assert_same(ours, theirs)
        found = sums(device.kernels, (17, 70_000), BF16, on_gpu)
        assert torch.equal(found, sums(host, (17, 70_000), BF16, on_cpu))
    device.close()
    return "the host's bits"


# -- steps -----------------------------------------------------------------------------------------
def trained(machine: str, section: dict[str, Any], name: str = "gpt", **options: Any) -> str:
    """Ten steps have the bits of a plain loop on the same device."""
    from tests.models import MODELS
    from tests.support.training import (
        assert_identical,
        config,
        operators_in_one_order,
        train_plain,
        train_windowed,
    )

    options = {"precision": "fp32", "clipping": 0.5, "accumulation": 1, **options}
    settings = config(section={"device": machine, "cpu_threads": 2, **section}, **options)
    plans: list[Any] = []
    with operators_in_one_order():
        run = train_windowed(
            MODELS[name], steps=10, settings=settings, inspect=lambda e: plans.append(e.plan)
        )
        if machine == "cuda":
            from tests.gpu.test_training_cuda import plain

            expected = plain(name, **options)
        else:
            expected = train_plain(MODELS[name], steps=10, **options)
    assert_identical(run, expected)
    plan = plans[0]
    on_gpu = len(plan.updated_on_gpu)
    return f"a plain loop's bits; window {plan.window}, {on_gpu} layers updated on the gpu"


# Nothing is left open, which would be planned anew after the first steps.
STREAMED = {"window": 1, "resident_layers": 0, "resident_updates": "host", "activations": "keep"}
ON_GPU = {"resident_updates": "gpu", "activations": "recompute"}
BF16: dict[str, Any] = {"precision": "bf16"}
# What the section says, and how the model trains.
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "step-fp32": (STREAMED, {}),
    "step-bf16": ({**STREAMED, "window": 2}, {**BF16, "accumulation": 2}),
    "recompute": ({**STREAMED, "activations": "recompute"}, {**BF16, "name": "gpt_dropout"}),
    "offload": ({**STREAMED, "activations": "offload"}, BF16),
    "early-updates": (STREAMED, {**BF16, "clipping": 0.0}),
    "resident": ({**STREAMED, **ON_GPU, "resident_layers": 2}, BF16),
    "whole": ({**ON_GPU, "activations": "keep", "resident_layers": "all"}, BF16),
    "automatic": ({}, BF16),  # the plan is made for the first batch
    "hugging-face": (STREAMED, {**BF16, "name": "llama"}),
}
for step, (section, options) in STEPS.items():
    run_step = functools.partial(trained, section=section, **options)
    FEATURES[step] = Feature(run_step, LIMIT_S, only_cuda=False, environment={})


def given_again(*kernels: str) -> None:
    """What these of attention's kernels gave is given again."""
    from torch.nn.attention import SDPBackend

    from tests.gpu.test_training_cuda import FUSED, check_fused_attention
    from tests.support.training import operators_in_one_order

    chosen = [getattr(SDPBackend, name) for name in kernels]
    with operators_in_one_order():
        for kernel, precision in FUSED:
            if kernel in chosen:
                check_fused_attention(kernel, precision)


@feature(only_cuda=True)
def attention(machine: str) -> str:
    """By the fused kernels, which the others leave out: the one of 16 bits, and the one of 32."""
    given_again("FLASH_ATTENTION", "EFFICIENT_ATTENTION")
    return "what flash and memory-efficient attention gave is given again"


@feature(only_cuda=True)
def attention_cudnn(machine: str) -> str:
    """By the kernel that torch chooses first on an H100. Where it crashes, train with
    TORCH_CUDNN_SDPA_DEPRIORITIZED=1, which makes flash attention the first."""
    given_again("CUDNN_ATTENTION")
    return "what cuDNN's attention gave is given again"


@feature()
def nvme(machine: str) -> str:
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        section = {**STREAMED, "window": 2, "nvme": {"path": folder, "spill": "weights"}}
        return trained(machine, section, precision="bf16")


@feature()
def checkpoint(machine: str) -> str:
    import torch

    from tests.support.checkpoints import assert_same, make_model, resume, session, snapshot, train
    from tests.support.training import operators_in_one_order

    section = {"device": machine, "window": 2, "cpu_threads": 2}
    with tempfile.TemporaryDirectory() as folder, operators_in_one_order():
        with session(section=section, precision="bf16") as engine:
            train(engine, 2)
            engine.save_checkpoint(folder)
            losses, expected = train(engine, 3), snapshot(engine)
        with session(make_model(seed=9), section=section, precision="bf16") as engine:
            resume(engine, folder)
            assert all(map(torch.equal, train(engine, 3), losses))
            assert_same(snapshot(engine), expected)
    return "goes on as if it had not stopped"


# -- beside training -------------------------------------------------------------------------------
@feature()
def doctor(machine: str) -> str:
    from stronghold.tools.doctor.examine import examine

    found = examine(machine)
    rates = found.profile
    adam, bf16 = rates.adam_gbps, rates.flops["bf16"] / 1e12
    return (
        f"to the device {rates.fetch_gbps:.3g} GB/s, back {rates.offload_gbps:.3g}, both "
        f"{rates.duplex_gbps:.3g}; Adam {adam:.3g} GB/s; bf16 {bf16:.3g} TFLOPS"
        + (f"; not pinned: {found.pin_error}" if found.pin_error else "")
    )


@feature(only_cuda=True, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
def cap(machine: str) -> str:
    """A cap on memory is kept, with the allocator that the comparisons use."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * GIB / total, 0)
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return f"{kept.nbytes / GIB:.0f} GiB of 2 fit, 3 more do not"
    raise RuntimeError("the cap of 2 GiB was passed")


@feature(only_cuda=True)
def nccl(machine: str) -> str:
    import torch

    from stronghold.train.ranks import Ranks

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    ranks = Ranks(device=torch.device("cuda", 0), timeout=timedelta(minutes=1))
    taken = ranks.device_bytes
    ranks.close()
    torch.distributed.destroy_process_group()
    return f"one rank connects; its communicator takes {taken >> 20} MiB"


@feature(limit_s=180.0)
def comparison(machine: str) -> str:
    """`compare.py`, both of its own methods, with the losses of every step."""
    sizes = "--layers 2 --hidden 64 --heads 4 --seq 32 --vocab 256 --batch 2 --steps 2 --warmup 2"
    with tempfile.TemporaryDirectory() as folder:
        trace = str(Path(folder, "trace.json"))
        words = ["--method", "plain,stronghold", *sizes.split(), "--machine", machine]
        words += ["--precision", "bf16", "--threads", "2", "--timeout", "80", "--trace", trace]
        run = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "compare.py"), *words],
            capture_output=True,
            text=True,
        )
        print(run.stdout, run.stderr)
        rows = [line for line in run.stdout.splitlines() if re.match(r"\| (plain|strong)", line)]
        if len(rows) != 2:
            raise RuntimeError((run.stderr.strip() or "no rows").splitlines()[-1])
        for row in rows:
            if "| ok | equal" not in row:
                raise RuntimeError(row)
        assert Path(trace).stat().st_size > 0
    return "plain and stronghold have equal losses"


@feature(only_cuda=True)
def peers(machine: str) -> str:
    """What DeepSpeed's CPU Adam needs before it can be compiled; `compile` does that."""
    import deepspeed
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.utils.cpp_extension import CUDA_HOME

    if not CPUAdamBuilder().is_compatible(verbose=True):
        raise RuntimeError(f"CPUAdamBuilder is not compatible, CUDA_HOME {CUDA_HOME}")
    return f"deepspeed {deepspeed.__version__}, CUDA_HOME {CUDA_HOME}"
