"""Measures the rates of the machine with the code of training: lanes, slabs, kernels.

Owns the order of the measurements, their arrays, and the arithmetic from times to rates. It never
prints: progress goes to the caller's function. It keeps no thread and no buffer. The calling thread
is the compute lane of the measured device.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import logging
import math
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from stronghold import native
from stronghold.devices import cuda
from stronghold.devices.base import Device, Fence, Lane
from stronghold.devices.cuda import CudaDevice
from stronghold.limits import HostLimits, host_limits
from stronghold.model.costs import DTYPES
from stronghold.optim.states import num_items
from stronghold.plan.machine import ADAM_BF16_BYTES, ADAM_LEAN_BYTES, MachineProfile, profile_of
from stronghold.train.slabs import map_slab

MIB = 1 << 20
# Bytes of Adam's arrays per parameter: with lean states, and with these and exact states.
LEAN_RESIDENT_BYTES = (2 + 2) + (1 + 1 + 1 + 0.125)
ADAM_RESIDENT_BYTES = LEAN_RESIDENT_BYTES + (2 + 4 + 4)
CPUS = Path("/sys/devices/system/cpu")
_LARGEST_MATRIX = 8192
_MOST_HEADS = 32

Step = Callable[[str], None]
logger = logging.getLogger("stronghold")


def measure_machine(
    device: Device, limits: HostLimits, size: Effort, step: Step
) -> tuple[MachineProfile, str]:
    """Measure everything but disks. Return the profile, and why host memory could not be pinned
    ("" if it could).

    `step` gets the name of each measurement that begins. The caller does not use `device`
    meanwhile.
    """
    memory, adam, lean_adam = host_rates(size, step)
    link, pin_error = link_rates(device, size, step)
    host = platform.node() or "this host"
    emulated = not isinstance(device, CudaDevice)
    if emulated:  # its memory is its budget, or the host's
        name = f"emulated on {cpu_name()}, {host}"
        gpu_memory_bytes = device.memory.budget_bytes or limits.usable_bytes
    else:
        gpu, gpu_memory_bytes, _ = cuda.identity(device.torch_device.index)
        name = f"{gpu} on {host}"
    flops = {}
    for precision, dtype in DTYPES.items():
        step(f"matrix products, {precision}")
        flops[precision] = product_flops(device, dtype, size)
    attention, attention_backward = attention_rates(device, size, step)
    profile = MachineProfile(
        name=name,
        measured=datetime.date.today().isoformat(),
        sources=(),
        emulated=emulated,
        num_gpus=1 if emulated else cuda.num_devices(),
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=limits.usable_bytes,
        num_cores=limits.num_cores,
        memory_gbps={threads: figure(rate) for threads, rate in memory.items()},
        adam_gbps={threads: figure(rate) for threads, rate in adam.items()},
        adam_lean_gbps={threads: figure(rate) for threads, rate in lean_adam.items()},
        flops={name: figure(rate) for name, rate in flops.items()},
        attention_flops=attention or None,
        attention_backward_flops=attention_backward or None,
        fetch_gbps=figure(link["fetch_gbps"]),
        offload_gbps=figure(link["offload_gbps"]),
        duplex_gbps=figure(link["duplex_gbps"]),
        gpu_memory_gbps=figure(link["gpu_memory_gbps"]),
    )
    return profile, pin_error


def machine_at_start(
    open_device: Callable[[], Device], gpu: str | None, threads: tuple[int, ...], dtype: str
) -> MachineProfile:
    """This machine's profile for an engine that starts; without one, a measurement of some seconds.

    open_device  opens a device that nothing else uses
    gpu          name of the GPU; None: the emulated device
    threads      numbers of threads with which Adam may run
    dtype        the precision: "bf16", "fp16" or "fp32"
    """
    profile = profile_of(gpu)
    if profile is not None:
        logger.info("the rates of this machine are those of the profile %r", profile.name)
        return profile
    begun_s = time.perf_counter()
    limits = host_limits()
    with contextlib.closing(open_device()) as device:
        size = least_effort(threads, dtype, limits)
        profile, _ = measure_machine(device, limits, size, lambda _: None)
        device.memory.restart_process_peak()
    logger.info(
        "this machine has no profile. Measured in %.1f s: link %.3g and %.3g GB/s, Adam %.3g GB/s "
        "(threads: %d), products %.3g TFLOP/s. `stronghold doctor` writes a profile",
        time.perf_counter() - begun_s,
        profile.fetch_gbps,
        profile.offload_gbps,
        profile.adam_gbps[threads[-1]],
        threads[-1],
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


# -- the effort -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The sizes of arrays and the number of rounds. The median of the rounds counts."""

    threads: tuple[int, ...]  # numbers of threads for memory and Adam
    adam_numel: int
    copy_bytes: int
    copies: int  # in a row, so that the hand-over to a lane's thread does not count
    copy_s: float  # a slow link copies less, so that one copy takes no longer
    rounds: int
    product_s: float  # for products of one dtype
    attention_dtypes: tuple[str, ...]
    attention_tokens: tuple[int, ...]  # of sequences
    head_widths: tuple[int, ...]


def effort(quick: bool, limits: HostLimits) -> Effort:
    """The doctor's effort for this machine: arrays of twice its caches at least, in an eighth of
    free memory."""
    outside, available_bytes = 2 * last_cache_bytes(), limits.available_bytes
    # A lean update moves the fewest bytes per parameter.
    numel = max((8 if quick else 64) * MIB, int(outside / LEAN_RESIDENT_BYTES))
    numel = min(numel, int(available_bytes / 8 / ADAM_RESIDENT_BYTES))
    copy_bytes = max((32 if quick else 256) * MIB, outside)
    copy_bytes = min(copy_bytes, available_bytes // 16)
    return Effort(
        threads=thread_counts(limits.num_cores),
        adam_numel=max(numel, MIB),
        copy_bytes=copy_bytes,
        copies=4,
        copy_s=math.inf,
        rounds=3 if quick else 5,
        product_s=0.05 if quick else 0.3,
        attention_dtypes=tuple(DTYPES),
        # In fp16 the backward over 4096 tokens takes seconds on some CPUs.
        attention_tokens=(1024, 2048) if quick else (1024, 4096),
        head_widths=(32, 128),
    )


def least_effort(threads: tuple[int, ...], dtype: str, limits: HostLimits) -> Effort:
    """The effort of an engine that starts without a profile: some seconds.

    Adam's arrays with lean states are twice the caches, in an eighth of free memory. The copies may
    stay in the host's caches, which no link outruns. Attention has one `dtype`, that of training:
    "bf16", "fp16" or "fp32".
    """
    # Exact states take almost five times the caches then. With twice the caches 16 cores of a Xeon
    # with 300 MiB showed 190 GB/s, now 155 to 160. Training had 149.
    outside = max(128 * MIB, 2 * last_cache_bytes())
    room = limits.available_bytes / 8
    numel = int(min(outside / LEAN_RESIDENT_BYTES, room / ADAM_RESIDENT_BYTES))
    return Effort(
        threads=threads,
        adam_numel=max(numel, MIB),
        copy_bytes=min(128 * MIB, limits.available_bytes // 16),
        copies=2,
        copy_s=0.02,
        rounds=3,
        product_s=0.03,
        attention_dtypes=(dtype,),
        attention_tokens=(1024,),
        head_widths=(128,),
    )


# -- memory, the link and products ----------------------------------------------------------------
def host_rates(size: Effort, step: Step) -> tuple[dict[int, float], ...]:
    """Rates of host memory, of Adam with exact states, and of Adam with lean states.

    Each is by number of threads, in 1e9 bytes/s. The three are measured in turn, since other
    programs use the same memory, more in one second than in the next.
    """
    numel = size.adam_numel
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
    nbytes = numel * ADAM_BF16_BYTES
    lean_nbytes = numel * ADAM_LEAN_BYTES
    works = ((batch.traffic, nbytes), (batch.run, nbytes), (lean_batch.run, lean_nbytes))
    rates: tuple[dict[int, float], ...] = ({}, {}, {})
    for threads in size.threads:
        step(f"host memory and Adam, threads: {threads}")
        with native.Pool(threads) as pool:
            for work, _ in works:
                work(pool)
            rounds = [
                [_seconds(functools.partial(work, pool)) for work, _ in works]
                for _ in range(size.rounds)
            ]
        for index, (_, moved_bytes) in enumerate(works):
            median_s = statistics.median(seconds[index] for seconds in rounds)
            rates[index][threads] = moved_bytes / median_s / 1e9
    return rates


def thread_counts(num_cores: int) -> tuple[int, ...]:
    """Powers of two, and all cores."""
    powers = [1 << n for n in range(num_cores.bit_length())]
    return tuple(sorted({*powers, num_cores}))


def link_rates(device: Device, size: Effort, step: Step) -> tuple[dict[str, float], str]:
    """Rates of copies between pinned host slabs and the device, alone, together and on the device.

    Returns them in 1e9 bytes/s by their names in a profile, and why host memory could not be pinned
    ("" if it could).
    """
    nbytes = size.copy_bytes // 4096 * 4096
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
        step("host to device")
        first_s = _seconds(lambda: _submit(device, device.fetch, slots[0], hosts[0], 1).wait())
        linked = nbytes if first_s <= size.copy_s else int(nbytes * size.copy_s / first_s) or 1
        near, far = [host[:linked] for host in hosts], [slot[:linked] for slot in slots]
        fetch = _lone(device, device.fetch, far[0], near[0], size)
        step("device to host")
        offload = _lone(device, device.offload, near[1], far[1], size)
        step("both directions together")
        duplex = _together(device, near, far, offload / fetch, size)
    finally:
        for host in pinned:
            device.pinning.unpin(host)
    step("device memory")
    copy = functools.partial(slots[0].copy_, slots[1])
    _on_compute(device, copy, 1, 1)
    once = _on_compute(device, copy, 3, 1)
    # In a row, since a GPU takes hardly longer for one copy than for its launch.
    on_device = _sustained(device, copy, once, size)
    device.memory.release(*slots)
    rates = {
        "fetch_gbps": linked / fetch / 1e9,
        "offload_gbps": linked / offload / 1e9,
        "duplex_gbps": duplex / 1e9,
        "gpu_memory_gbps": 2 * nbytes / on_device / 1e9,
    }
    return rates, pin_error


def product_flops(device: Device, dtype: torch.dtype, size: Effort) -> float:
    """FLOP/s of a square matrix product, repeated for `size.product_s`.

    Its side is the largest power of two with which one product takes no longer. It is repeated
    because the clock of a GPU falls to the rate that its power allows.
    """
    # the caller's generator is not advanced
    generator = torch.Generator(device.torch_device)
    side = 256
    while True:
        a, b = (
            torch.randn(side, side, generator=generator, device=device.torch_device).to(dtype)
            for _ in range(2)
        )
        product = functools.partial(torch.matmul, a, b, out=torch.empty_like(a))
        _on_compute(device, product, 1, 1)  # the library chooses and loads its kernel
        once = _on_compute(device, product, 3, 1)
        if side == _LARGEST_MATRIX or 8 * once > size.product_s:
            break
        side *= 2
    return 2.0 * side**3 / _sustained(device, product, once, size)


ByTokensAndWidth = dict[int, dict[int, float]]
OfAttention = dict[str, ByTokensAndWidth]


def attention_rates(device: Device, size: Effort, step: Step) -> tuple[OfAttention, OfAttention]:
    """FLOP/s of fused attention in forward, and in backward.

    Both are by dtype, tokens of a sequence and width of a head, as in a profile. A dtype is absent,
    with a warning, if torch has no kernel for it here.
    """
    forward: OfAttention = {}
    backward: OfAttention = {}
    for precision in size.attention_dtypes:
        step(f"attention, {precision}")
        of_dtype: tuple[ByTokensAndWidth, ...] = tuple(
            {tokens: {} for tokens in size.attention_tokens} for _ in range(2)
        )
        try:
            for tokens, width in itertools.product(size.attention_tokens, size.head_widths):
                measured = attention_flops(device, DTYPES[precision], tokens, width, size)
                for rates, rate in zip(of_dtype, measured, strict=True):
                    rates[tokens][width] = figure(rate)
        except RuntimeError as error:
            logger.warning("attention in %s does not run here: %s", precision, error)
            continue
        forward[precision], backward[precision] = of_dtype
    return forward, backward


def attention_flops(
    device: Device, dtype: torch.dtype, tokens: int, width: int, size: Effort
) -> tuple[float, float]:
    """FLOP/s of fused attention with a causal mask, in forward and in backward.

    All pairs of tokens count, as in a profile. The number of heads is the largest power of two with
    which one call takes no longer than a share of `size.product_s`. It is repeated for so long.
    """
    # the caller's generator is not advanced
    generator = torch.Generator(device.torch_device)
    heads = 1
    while True:
        query, key, value, outer = (
            torch.randn(
                1, heads, tokens, width, generator=generator, device=device.torch_device
            ).to(dtype)
            for _ in range(4)
        )
        attend = functools.partial(
            F.scaled_dot_product_attention, query, key, value, is_causal=True
        )
        _on_compute(device, attend, 1, 1)  # the library chooses and loads its kernel
        once = _on_compute(device, attend, 3, 1)
        if heads == _MOST_HEADS or 8 * once > size.product_s:
            break
        heads *= 2
    forward_s = _sustained(device, attend, once, size)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    differentiate = functools.partial(
        torch.autograd.grad, attend(), inputs, outer, retain_graph=True
    )
    _on_compute(device, differentiate, 1, 1)
    once = _on_compute(device, differentiate, 1, 1)
    backward_s = _sustained(device, differentiate, once, size)
    flops = 4.0 * heads * tokens**2 * width  # of two products
    return flops / forward_s, 2 * flops / backward_s


def _sustained(device: Device, work: Callable[[], object], once_s: float, size: Effort) -> float:
    """Median seconds of one `work`, repeated for `size.product_s`. Alone it took `once_s`, which
    counts if it took longer than that."""
    if once_s > size.product_s:
        return once_s
    repeats = max(1, int(size.product_s / 3 / once_s))
    return _on_compute(device, work, 3, repeats)


def _lone(
    device: Device, lane: Lane, target: torch.Tensor, source: torch.Tensor, size: Effort
) -> float:
    """Median seconds of one copy on a lane that has nothing else to do."""
    _submit(device, lane, target, source, 1).wait()

    def copy() -> None:
        _submit(device, lane, target, source, size.copies).wait()

    return _median_s(copy, size.rounds) / size.copies


def _together(
    device: Device, hosts: list[torch.Tensor], slots: list[torch.Tensor], ratio: float, size: Effort
) -> float:
    """Bytes per second of both lanes at once.

    `ratio` is the seconds of an offload over those of a fetch. The slower direction gets less
    to copy, by this ratio, so that both end together.
    """
    nbytes = hosts[0].numel()
    fetched = int(nbytes * min(1.0, ratio)) or 1
    drained = int(nbytes * min(1.0, 1 / ratio)) or 1
    fetch = (slots[0][:fetched], hosts[0][:fetched])
    offload = (hosts[1][:drained], slots[1][:drained])

    def copy_both_ways() -> None:
        fetches = _submit(device, device.fetch, *fetch, size.copies)
        offloads = _submit(device, device.offload, *offload, size.copies)
        fetches.wait()
        offloads.wait()

    copy_both_ways()
    return size.copies * (fetched + drained) / _median_s(copy_both_ways, size.rounds)


def _submit(
    device: Device, lane: Lane, target: torch.Tensor, source: torch.Tensor, copies: int
) -> Fence:
    copy = functools.partial(device.copy, target, source)
    fences = [lane.submit("measure", copy, nbytes=target.nbytes) for _ in range(copies)]
    return fences[-1]


def _on_compute(device: Device, work: Callable[[], object], rounds: int, repeats: int) -> float:
    """Median seconds of one `work` on the compute lane."""
    run = functools.partial(_repeat, device, work, repeats)
    return _median_s(run, rounds) / repeats


def _repeat(device: Device, work: Callable[[], object], repeats: int) -> None:
    """Run `work` on the compute lane, and wait for the last."""
    for _ in range(repeats):
        work()
    device.compute.record("measure").wait()


def _median_s(run: Callable[[], object], rounds: int) -> float:
    """The median seconds of so many calls of `run`."""
    return statistics.median(_seconds(run) for _ in range(rounds))


def _seconds(run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return max(time.perf_counter() - begun_s, 1e-9)


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
