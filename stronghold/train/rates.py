"""Measures the rates of the machine with the code of training: lanes, slabs, kernels.

Owns the order of the measurements, their arrays, and the arithmetic from times to rates. It never
prints: progress goes to the caller's function. It keeps no thread and no buffer. The calling thread
is the compute lane of the measured device.

`seconds` is how long one measurement repeats its work, everywhere in this module. Medians count.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from stronghold import native
from stronghold.devices import cuda
from stronghold.devices.cuda import CudaDevice
from stronghold.devices.device import Device, Lane
from stronghold.devices.fences import Fence
from stronghold.limits import HostLimits, host_limits
from stronghold.model.costs import DTYPES
from stronghold.optim.states import num_items
from stronghold.plan.machine import ADAM_BF16_BYTES, ADAM_LEAN_BYTES, MachineProfile, profile_of
from stronghold.train.slabs import map_slab

MIB = 1 << 20
# Bytes of Adam's arrays per parameter: with lean states, and with these and exact states.
LEAN_RESIDENT_BYTES = (2 + 2) + (1 + 1 + 1 + 0.125)
ADAM_RESIDENT_BYTES = LEAN_RESIDENT_BYTES + (2 + 4 + 4)
LEAST_BYTES = 128 * MIB  # of Adam's arrays with lean states, and of a copy
ROUNDS = 3  # at least
COPIES = 4  # in a row, so that the hand-over to a lane's thread does not count
SIDES = tuple(256 << n for n in range(6))  # of matrices
HEADS = tuple(1 << n for n in range(6))
TOKENS, HEAD_WIDTH = 2048, 128  # of attention
START_S = 0.03  # `seconds` of an engine that starts without a profile
CPUS = Path("/sys/devices/system/cpu")

Step = Callable[[str], None]
logger = logging.getLogger("stronghold")


def measure_machine(
    device: Device,
    limits: HostLimits,
    step: Step,
    *,
    seconds: float,
    threads: int,
    attention: Iterable[str] = tuple(DTYPES),
) -> tuple[MachineProfile, str]:
    """Measure everything but disks. Return the profile, and why host memory could not be pinned
    ("" if it could).

    step       gets the name of each measurement that begins
    threads    of host memory and Adam
    attention  the precisions in which it is measured

    The caller does not use `device` meanwhile.
    """
    host = host_rates(limits, threads, seconds, step)
    link, pin_error = link_rates(device, limits, seconds, step)
    of_bytes: dict[str, Any] = {name: figure(rate) for name, rate in {**host, **link}.items()}
    node = platform.node() or "this host"
    emulated = not isinstance(device, CudaDevice)
    if emulated:  # its memory is its budget, or the host's
        name = f"emulated on {cpu_name()}, {node}"
        gpu_memory_bytes = device.memory.budget_bytes or limits.usable_bytes
    else:
        gpu, gpu_memory_bytes, _ = cuda.identity(device.torch_device.index)
        name = f"{gpu} on {node}"
    flops: dict[str, float] = {}
    for precision, dtype in DTYPES.items():
        step(f"matrix products, {precision}")
        flops[precision] = figure(product_flops(device, dtype, seconds))
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for precision in attention:
        step(f"attention, {precision}")
        try:
            both = attention_flops(device, DTYPES[precision], seconds)
        except RuntimeError as error:
            logger.warning("attention in %s does not run here: %s", precision, error)
            continue
        forward[precision], backward[precision] = map(figure, both)
    profile = MachineProfile(
        name=name,
        measured=datetime.date.today().isoformat(),
        sources=(),
        emulated=emulated,
        num_gpus=1 if emulated else cuda.num_devices(),
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=limits.usable_bytes,
        num_cores=limits.num_cores,
        flops=flops,
        attention_flops=forward or None,
        attention_backward_flops=backward or None,
        **of_bytes,
    )
    return profile, pin_error


def machine_at_start(
    open_device: Callable[[], Device], gpu: str | None, threads: int, dtype: str
) -> MachineProfile:
    """This machine's profile for an engine that starts; without one, a measurement of some seconds.

    open_device  opens a device that nothing else uses
    gpu          name of the GPU; None: the emulated device
    threads      with which Adam runs, of all ranks of the node
    dtype        the precision: "bf16", "fp16" or "fp32"
    """
    profile = profile_of(gpu)
    if profile is not None:
        logger.info("the rates of this machine are those of the profile %r", profile.name)
        return profile
    begun_s = time.perf_counter()
    with contextlib.closing(open_device()) as device:
        profile, _ = measure_machine(
            device,
            host_limits(),
            lambda _: None,
            seconds=START_S,
            threads=threads,
            attention=[dtype],
        )
        device.memory.restart_process_peak()
    logger.info(
        "this machine has no profile. Measured in %.1f s: link %.3g and %.3g GB/s, Adam %.3g GB/s "
        "(threads: %d), products %.3g TFLOP/s. `stronghold doctor` writes a profile",
        time.perf_counter() - begun_s,
        profile.fetch_gbps,
        profile.offload_gbps,
        profile.adam_gbps,
        threads,
        profile.flops[dtype] * 1e-12,
    )
    return profile


def figure(rate: float) -> float:
    """The rate with four digits. Measurements differ in the third."""
    return float(f"{rate:.4g}")


def cpu_name() -> str:
    """The name of the processor, as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


# -- the host -------------------------------------------------------------------------------------
def host_rates(limits: HostLimits, threads: int, seconds: float, step: Step) -> dict[str, float]:
    """Rates of host memory and of Adam with so many threads, and of Adam with one, in 1e9 bytes/s
    by their names in a profile."""
    numel = adam_numel(limits)
    weight = map_slab(numel, torch.bfloat16).fill_(0.01)
    grad = map_slab(numel, torch.bfloat16).fill_(0.01)
    low = map_slab(numel, torch.int16).zero_()
    moments = [map_slab(numel, torch.float32).fill_(value) for value in (1e-3, 4e-4)]
    codes = map_slab(3 * numel, torch.int8).zero_()
    num_scales = num_items("exp_avg_scale", numel)
    scales = [map_slab(num_scales, torch.float32).zero_() for _ in range(2)]
    exact = native.UpdateSegment(
        weight=weight.data_ptr(),
        low=low.data_ptr(),
        grad=grad.data_ptr(),
        numel=numel,
        moment0=moments[0].data_ptr(),
        moment1=moments[1].data_ptr(),
        number0=1e-6,  # lr
        number1=0.9,  # beta1
        number2=0.999,  # beta2
        number3=1e-8,  # eps
        number4=0.01,  # weight decay
        step=10,
        flags=0b11,  # AdamW with bias correction
    )
    begin = codes.data_ptr()
    lean = exact._replace(
        low=begin,
        moment0=begin + numel,
        moment1=begin + 2 * numel,
        scale0=scales[0].data_ptr(),
        scale1=scales[1].data_ptr(),
    )
    bf16 = torch.bfloat16
    batch = native.UpdateBatch("adam", bf16, bf16, [exact])
    lean_batch = native.UpdateBatch("adam", bf16, bf16, [lean], lean=True)
    step("Adam, threads: 1")
    with native.Pool(1) as pool:
        (thread_s,) = _medians([lambda: batch.run(pool)], seconds)
    step(f"host memory and Adam, threads: {threads}")
    with native.Pool(threads) as pool:
        works = [functools.partial(run, pool) for run in (batch.traffic, batch.run, lean_batch.run)]
        memory_s, adam_s, lean_s = _medians(works, seconds)
    gigabytes = numel * ADAM_BF16_BYTES / 1e9
    return {
        "memory_gbps": gigabytes / memory_s,
        "adam_gbps": gigabytes / adam_s,
        "adam_thread_gbps": gigabytes / thread_s,
        "adam_lean_gbps": numel * ADAM_LEAN_BYTES / 1e9 / lean_s,
    }


def adam_numel(limits: HostLimits) -> int:
    """Parameters of the measured Adam. Its arrays with lean states are twice the caches, and all of
    them are in an eighth of free memory."""
    # Exact states take almost five times the caches then. With twice the caches 16 cores of a Xeon
    # with 300 MiB showed 190 GB/s, now 155 to 160. Training had 149.
    nbytes = max(LEAST_BYTES, 2 * last_cache_bytes())
    room = limits.available_bytes / 8
    return max(MIB, int(min(nbytes / LEAN_RESIDENT_BYTES, room / ADAM_RESIDENT_BYTES)))


def last_cache_bytes(cpus: Path = CPUS) -> int:
    """The last-level caches of all cores together; 64 MiB if the system does not name them."""
    caches: dict[str, int] = {}
    for folder in cpus.glob("cpu[0-9]*/cache/index3"):
        with contextlib.suppress(OSError):
            cores = (folder / "shared_cpu_list").read_text(encoding="ascii")
            size = (folder / "size").read_text(encoding="ascii").strip()
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            caches[cores] = int(size.rstrip("KMG")) * unit
    return sum(caches.values()) or 64 * MIB


# -- the link -------------------------------------------------------------------------------------
def link_rates(
    device: Device, limits: HostLimits, seconds: float, step: Step
) -> tuple[dict[str, float], str]:
    """Rates of copies between pinned host slabs and the device, alone, together and on the device.

    Returns them in 1e9 bytes/s by their names in a profile, and why host memory could not be pinned
    ("" if it could). The copies may stay in the host's caches, which no link outruns.
    """
    nbytes = min(LEAST_BYTES, limits.available_bytes // 16) // 4096 * 4096
    # Slabs and slots are filled. Memory that was never written is one page of zeros, which stays in
    # the cache.
    hosts = [map_slab(nbytes, torch.uint8).fill_(1) for _ in range(2)]
    slots = [
        device.memory.allocate(nbytes, torch.uint8, "a buffer for measurements").fill_(1)
        for _ in range(2)
    ]
    device.compute.record("fill").wait()
    pinned: list[torch.Tensor] = []
    pin_error = ""
    try:
        for host in hosts:
            try:
                device.pinning.register(host)
            except OSError as error:
                pin_error = str(error)
                device.pinning.pin(host)  # a refused slab is copied as in training
            pinned.append(host)
        rates = _copy_rates(device, hosts, slots, seconds, step)
    finally:
        for host in pinned:
            device.pinning.unpin(host)
    step("device memory")
    _, copy_s = _on_compute(device, lambda _: lambda: slots[0].copy_(slots[1]), [1], seconds)
    device.memory.release(*slots)
    return rates | {"gpu_memory_gbps": 2 * nbytes / copy_s / 1e9}, pin_error


def _copy_rates(
    device: Device,
    hosts: Sequence[torch.Tensor],
    slots: Sequence[torch.Tensor],
    seconds: float,
    step: Step,
) -> dict[str, float]:
    """Rates of both directions of the link, each alone, and of both at once."""

    def submit(lane: Lane, target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Fence:
        copy = functools.partial(device.copy, target[:nbytes], source[:nbytes])
        return [lane.submit("measure", copy, nbytes=nbytes) for _ in range(COPIES)][-1]

    def fetch(nbytes: int) -> Fence:
        return submit(device.fetch, slots[0], hosts[0], nbytes)

    def offload(nbytes: int) -> Fence:
        return submit(device.offload, hosts[1], slots[1], nbytes)

    step("host to device")
    nbytes = hosts[0].numel()
    first_s = _seconds(lambda: fetch(nbytes).wait())
    nbytes = max(1, int(nbytes * min(1.0, seconds / first_s)))  # a slow link copies less
    (fetch_s,) = _medians([lambda: fetch(nbytes).wait()], seconds)
    step("device to host")
    (offload_s,) = _medians([lambda: offload(nbytes).wait()], seconds)
    step("both directions together")
    # The slower direction gets less to copy, so that both end together.
    fetched = max(1, int(nbytes * min(1.0, offload_s / fetch_s)))
    offloaded = max(1, int(nbytes * min(1.0, fetch_s / offload_s)))

    def copy_both_ways() -> None:
        for fence in (fetch(fetched), offload(offloaded)):
            fence.wait()

    (both_s,) = _medians([copy_both_ways], seconds)
    return {
        "fetch_gbps": COPIES * nbytes / fetch_s / 1e9,
        "offload_gbps": COPIES * nbytes / offload_s / 1e9,
        "duplex_gbps": COPIES * (fetched + offloaded) / both_s / 1e9,
    }


# -- compute --------------------------------------------------------------------------------------
def product_flops(device: Device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of a square matrix product, with the largest of SIDES that takes a part of
    `seconds`."""

    def product(side: int) -> Callable[[], object]:
        a, b = _random(device, 2, (side, side), dtype)
        return functools.partial(torch.matmul, a, b, out=torch.empty_like(a))

    side, product_s = _on_compute(device, product, SIDES, seconds)
    return 2.0 * side**3 / product_s


def attention_flops(device: Device, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """FLOP/s of fused attention with a causal mask, in forward and in backward.

    All pairs of tokens count, as in a profile.
    """

    def inputs(heads: int) -> list[torch.Tensor]:
        return _random(device, 3, (1, heads, TOKENS, HEAD_WIDTH), dtype)

    def forward(heads: int) -> Callable[[], torch.Tensor]:
        query, key, value = inputs(heads)
        attend = F.scaled_dot_product_attention
        return functools.partial(attend, query, key, value, is_causal=True)

    def backward(heads: int) -> Callable[[], object]:
        leaves = [tensor.requires_grad_() for tensor in inputs(heads)]
        query, key, value = leaves
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradient = torch.ones_like(output)
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

    heads, forward_s = _on_compute(device, forward, HEADS, seconds)
    _, backward_s = _on_compute(device, backward, [heads], seconds)
    flops = 4.0 * heads * TOKENS**2 * HEAD_WIDTH  # of two products
    return flops / forward_s, 2 * flops / backward_s


def _random(
    device: Device, count: int, shape: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    # the caller's generator is not advanced
    generator = torch.Generator(device.torch_device)
    made = functools.partial(torch.randn, shape, generator=generator, device=device.torch_device)
    return [made().to(dtype) for _ in range(count)]


def _on_compute(
    device: Device,
    make: Callable[[int], Callable[[], object]],
    sizes: Iterable[int],
    seconds: float,
) -> tuple[int, float]:
    """(size, median seconds of one `make(size)()` on the compute lane).

    It is the largest of `sizes` with which one call takes an eighth of `seconds` at most, or the
    next one. Calls repeat in a row: a GPU takes hardly longer for a small one than for its launch,
    and its clock falls to the rate that its power allows.
    """

    def run(work: Callable[[], object], repeats: int) -> None:
        for _ in range(repeats):
            work()
        device.compute.record("measure").wait()

    for size in sizes:
        work = make(size)
        run(work, 1)  # the library chooses and loads its kernel
        once_s = min(_seconds(functools.partial(run, work, 1)) for _ in range(2))
        if 8 * once_s > seconds:
            break
    if once_s > seconds:
        return size, once_s
    repeats = max(1, int(seconds / ROUNDS / once_s))
    (median_s,) = _medians([functools.partial(run, work, repeats)], 0.0)
    return size, median_s / repeats


# -- time -----------------------------------------------------------------------------------------
def _medians(works: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The median seconds of each work. They take turns, for other programs use the same memory,
    more in one second than in the next."""
    for work in works:
        work()
    begun_s = time.perf_counter()
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS or time.perf_counter() - begun_s < seconds:
        rounds.append([_seconds(work) for work in works])
    return [statistics.median(of_work) for of_work in zip(*rounds, strict=True)]


def _seconds(run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return max(time.perf_counter() - begun_s, 1e-9)
