"""Measures the rates of the machine with the code of training: lanes, slabs, kernels, files.

Owns the order of the measurements, their arrays, and the arithmetic from times to rates. It never
prints: progress goes to the caller's function. It keeps no thread, buffer or file. The calling
thread is the compute lane of the measured device, and keeps the queue of the disk full.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import platform
import re
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from stronghold import native
from stronghold.devices import cuda
from stronghold.devices.base import Device, Fence, Lane
from stronghold.devices.cuda import CudaDevice
from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import ConfigError
from stronghold.limits import HostLimits, host_limits
from stronghold.memory.slab import map_slab
from stronghold.model.costs import DTYPES
from stronghold.native import IoFile, IoQueue
from stronghold.optim.states import num_items
from stronghold.plan.machine import ADAM_BF16_BYTES, ADAM_LEAN_BYTES, MachineProfile
from stronghold.tools.doctor.findings import DiskRates, Findings, PcieLink, threads_in_words

MIB = 1 << 20
# Bytes of Adam's arrays per parameter: with lean states, and with these and exact states.
LEAN_RESIDENT_BYTES = (2 + 2) + (1 + 1 + 1 + 0.125)
ADAM_RESIDENT_BYTES = LEAN_RESIDENT_BYTES + (2 + 4 + 4)
CPUS = Path("/sys/devices/system/cpu")
_COPIES = 4  # in a row, so that the hand-over to a lane's thread does not count
_LARGEST_MATRIX = 8192
# Attention is measured with heads of these widths.
_HEAD_WIDTHS = (32, 128)
_MOST_HEADS = 32
_PIN_BYTES = 32 * MIB

KINDS = ("cuda", "emulated")

DEPTHS = (1, 4, 16, 32)  # of the disk's queue
BLOCK_BYTES = 1 << 20
LONGEST_S = 1.5  # of one transfer: a slow disk is known to be slow by then

# Takes the measurement that begins, and the share of all measurements that is done.
Progress = Callable[[str, float], None]
Step = Callable[[str], None]


def examine(
    device: str | Device | None = None,
    path: str | os.PathLike[str] | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> Findings:
    """Measure this machine, in less than a minute.

    Arguments:
        device: "cuda", "emulated", None for a GPU if the machine has one, or an open device that
            the caller does not use meanwhile. An open device stays open.
        path: a directory on the disk to measure; None measures no disk.
        quick: measure in a few seconds, with rougher results.
        progress: gets each measurement that begins.

    Raises ConfigError for a device or a directory that does not exist.
    """
    folder = None if path is None else Path(path).expanduser()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--path: got {folder}, expected a directory that exists")
    limits = host_limits()
    opened = device if isinstance(device, Device) else _open(device)
    try:
        # Numbers of threads, five of the link, dtypes of products and of attention, depths of the
        # disk's queue, and reads beside writes.
        total = len(thread_counts(limits.num_cores)) + 5 + 2 * len(DTYPES)
        total += 0 if folder is None else len(DEPTHS) + 1
        size = effort(quick, limits.available_bytes)
        findings = _examine(opened, limits, size, folder, _Steps(progress, total))
        if progress is not None:
            progress("done", 1.0)
        return findings
    finally:
        if opened is not device:
            opened.close()


class _Steps:
    """Counts `total` measurements, and reports each when it begins."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._num_begun = 0

    def __call__(self, measurement: str) -> None:
        if self._progress is not None:
            self._progress(measurement, min(1.0, self._num_begun / self._total))
        self._num_begun += 1


def gpu_name(device: str | None = None) -> str | None:
    """The name of the GPU, or None for the emulated device."""
    return cuda.identity(0)[0] if _kind(device) == "cuda" else None


def _examine(
    device: Device, limits: HostLimits, size: Effort, folder: Path | None, step: Step
) -> Findings:
    memory, adam, lean_adam = host_rates(size, limits.num_cores, step)
    rates, pinnable_bytes, pin_error = link_rates(device, size, step)
    host = platform.node() or "this host"
    emulated = not isinstance(device, CudaDevice)
    if emulated:  # its memory is its budget, or the host's
        name = f"emulated on {cpu_name()}, {host}"
        link = None
        gpu_memory_bytes = device.memory.budget_bytes or limits.usable_bytes
    else:
        gpu, gpu_memory_bytes, address = cuda.identity(device.torch_device.index)
        name = f"{gpu} on {host}"
        # now: an idle link runs slower
        link = read_link(Path("/sys/bus/pci/devices") / address)
    flops = {}
    for precision, dtype in DTYPES.items():
        step(f"matrix products, {precision}")
        flops[precision] = product_flops(device, dtype, size)
    attention, attention_backward = attention_rates(device, size, step)
    disk = None
    if folder is not None:
        disk = disk_rates(folder, size.disk_bytes, step)
    figures = {name: _figure(rate) for name, rate in rates.items()} | _of_disk(disk)
    return Findings(
        profile=MachineProfile(
            name=name,
            measured=datetime.date.today().isoformat(),
            sources=(),
            emulated=emulated,
            num_gpus=1 if emulated else cuda.num_devices(),
            gpu_memory_bytes=gpu_memory_bytes,
            host_memory_bytes=limits.usable_bytes,
            num_cores=limits.num_cores,
            memory_gbps={threads: _figure(rate) for threads, rate in memory.items()},
            adam_gbps={threads: _figure(rate) for threads, rate in adam.items()},
            adam_lean_gbps={threads: _figure(rate) for threads, rate in lean_adam.items()},
            flops={name: _figure(rate) for name, rate in flops.items()},
            attention_flops=attention,
            attention_backward_flops=attention_backward,
            **figures,
        ),
        limits=limits,
        emulated=emulated,
        isa=native.isa(),
        best_isa=native.isas()[0],
        pin_error=pin_error,
        pinnable_bytes=pinnable_bytes,
        one_memory=not emulated and cuda.shares_memory(device.torch_device.index),
        link=link,
        disk=disk,
    )


def _of_disk(disk: DiskRates | None) -> dict[str, Any]:
    """The fields of a profile for a disk. No fields if the page cache was measured."""
    if disk is None or not disk.direct:
        return {}
    return {
        "nvme_read_gbps": _figure(max(disk.read_gbps.values())),
        "nvme_write_gbps": _figure(max(disk.write_gbps.values())),
        "nvme_mixed_gbps": _figure(disk.mixed_gbps),
        "nvme_path": disk.path,
    }


def _figure(rate: float) -> float:
    """The rate with four digits. Measurements differ in the third."""
    return float(f"{rate:.4g}")


def _kind(device: str | None) -> str:
    if device is not None and device not in KINDS:
        raise ConfigError(f"--device: got {device!r}, expected {' or '.join(KINDS)}")
    return device or ("cuda" if cuda.available() else "emulated")


def _open(device: str | None) -> Device:
    if _kind(device) == "emulated":
        # Poison overwrites buffers that are never freed during a measurement.
        return EmulatedDevice(poison=False)
    return CudaDevice()


def cpu_name() -> str:
    """The name of the processor, as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def read_link(folder: Path) -> PcieLink | None:
    """The link of a PCI device, from its directory in sysfs. None if a virtual machine hides it."""
    values = []
    for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"):
        try:
            match = re.match(r"[0-9.]+", (folder / name).read_text(encoding="ascii"))
        except OSError:
            return None
        if match is None:
            return None
        values.append(float(match[0]))
    speed, width, max_speed, max_width = values
    if width == 0 or max_width == 0:
        return None
    return PcieLink(speed=speed, width=int(width), max_speed=max_speed, max_width=int(max_width))


# -- memory, the link and products ----------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The sizes of arrays and the number of rounds. The median of the rounds counts."""

    adam_numel: int
    copy_bytes: int
    rounds: int
    product_s: float  # for products of one dtype
    attention_tokens: tuple[int, ...]  # of sequences
    pin_s: float  # for the search for the limit of pinned memory
    pin_bytes: int  # the most that this search pins
    disk_bytes: int


def effort(quick: bool, available_bytes: int) -> Effort:
    """The effort for this machine: arrays of twice its caches at least, in an eighth of free
    memory."""
    outside = 2 * last_cache_bytes()
    # A lean update moves the fewest bytes per parameter.
    numel = max((8 if quick else 64) * MIB, int(outside / LEAN_RESIDENT_BYTES))
    numel = min(numel, int(available_bytes / 8 / ADAM_RESIDENT_BYTES))
    copy_bytes = max((32 if quick else 256) * MIB, outside)
    copy_bytes = min(copy_bytes, available_bytes // 16)
    return Effort(
        adam_numel=max(numel, MIB),
        copy_bytes=copy_bytes,
        rounds=3 if quick else 5,
        product_s=0.05 if quick else 0.3,
        # In fp16 the backward over 4096 tokens takes seconds on some CPUs.
        attention_tokens=(1024, 2048) if quick else (1024, 4096),
        pin_s=0.3 if quick else 5.0,
        pin_bytes=available_bytes // 2,
        disk_bytes=32 * MIB if quick else 256 * MIB,
    )


def host_rates(size: Effort, num_cores: int, step: Step) -> tuple[dict[int, float], ...]:
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
    for threads in thread_counts(num_cores):
        step(f"host memory and Adam, {threads_in_words(threads)}")
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


def thread_counts(num_cores: int) -> list[int]:
    """Powers of two, and all cores."""
    powers = [1 << n for n in range(num_cores.bit_length())]
    return sorted({*powers, num_cores})


def link_rates(device: Device, size: Effort, step: Step) -> tuple[dict[str, float], int, str]:
    """Rates of copies between pinned host slabs and the device, alone, together and on the device.

    Returns them in 1e9 bytes/s by their names in a profile; the bytes of host memory that could be
    pinned; and the reason for no more, "" if nothing was refused.
    """
    nbytes = size.copy_bytes // 4096 * 4096
    # Slabs and slots are filled. Memory that was never written is one page of zeros, which stays in
    # the cache.
    hosts = [map_slab(nbytes, torch.uint8).fill_(1) for _ in range(2)]
    slots = [
        device.memory.allocate(nbytes, torch.uint8, "doctor's buffer").fill_(1) for _ in range(2)
    ]
    device.compute.record("fill").wait()
    step("pinned memory")
    pinnable_bytes, pin_error = _pinnable(device, size)
    pinned: list[torch.Tensor] = []
    try:
        for host in hosts:
            device.pinning.pin(host)  # a refused slab is copied as in training
            pinned.append(host)
    except OSError as error:
        pin_error = str(error)
    try:
        step("host to device")
        fetch = _lone(device, device.fetch, slots[0], hosts[0], size.rounds)
        step("device to host")
        offload = _lone(device, device.offload, hosts[1], slots[1], size.rounds)
        step("both directions together")
        duplex = _together(device, hosts, slots, offload / fetch, size.rounds)
    finally:
        for host in pinned:
            device.pinning.unpin(host)
    step("device memory")
    on_device = _on_compute(
        device, functools.partial(slots[0].copy_, slots[1]), size.rounds, _COPIES
    )
    device.memory.release(*slots)
    rates = {
        "fetch_gbps": nbytes / fetch / 1e9,
        "offload_gbps": nbytes / offload / 1e9,
        "duplex_gbps": duplex / 1e9,
        "gpu_memory_gbps": 2 * nbytes / on_device / 1e9,
    }
    return rates, pinnable_bytes, pin_error


def _pinnable(device: Device, size: Effort) -> tuple[int, str]:
    """The bytes that can be pinned, and the reason for no more; "" if time or memory ended."""
    taken: list[torch.Tensor] = []
    begun_s = time.perf_counter()
    error = ""
    try:
        while (len(taken) + 1) * _PIN_BYTES <= size.pin_bytes:
            slab = map_slab(_PIN_BYTES, torch.uint8)
            device.pinning.register(slab)
            taken.append(slab)
            if time.perf_counter() - begun_s > size.pin_s:
                break
    except OSError as refused:
        error = str(refused)
    finally:
        for slab in taken:
            device.pinning.unpin(slab)
    return len(taken) * _PIN_BYTES, error


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


OfAttention = dict[str, dict[int, dict[int, float]]]


def attention_rates(device: Device, size: Effort, step: Step) -> tuple[OfAttention, OfAttention]:
    """FLOP/s of fused attention in forward, and in backward.

    Both are by dtype, tokens of a sequence and width of a head, as in a profile.
    """
    forward: OfAttention = {}
    backward: OfAttention = {}
    for precision, dtype in DTYPES.items():
        step(f"attention, {precision}")
        for rates in (forward, backward):
            rates[precision] = {tokens: {} for tokens in size.attention_tokens}
        for tokens, width in itertools.product(size.attention_tokens, _HEAD_WIDTHS):
            measured = attention_flops(device, dtype, tokens, width, size)
            for rates, rate in zip((forward, backward), measured, strict=True):
                rates[precision][tokens][width] = _figure(rate)
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
    device: Device, lane: Lane, target: torch.Tensor, source: torch.Tensor, rounds: int
) -> float:
    """Median seconds of one copy on a lane that has nothing else to do."""
    _copy_and_wait(device, lane, target, source, 1)
    copies = functools.partial(_copy_and_wait, device, lane, target, source, _COPIES)
    return _median_s(copies, rounds) / _COPIES


def _together(
    device: Device, hosts: list[torch.Tensor], slots: list[torch.Tensor], ratio: float, rounds: int
) -> float:
    """Bytes per second of both lanes at once.

    `ratio` is the seconds of an offload over those of a fetch. The slower direction gets less
    to copy, by this ratio, so that both end together.
    """
    nbytes = hosts[0].numel()
    fetched = int(nbytes * min(1.0, ratio)) or 1
    drained = int(nbytes * min(1.0, 1 / ratio)) or 1
    both = functools.partial(
        _copy_both_ways,
        device,
        (slots[0][:fetched], hosts[0][:fetched]),
        (hosts[1][:drained], slots[1][:drained]),
    )
    both()
    return _COPIES * (fetched + drained) / _median_s(both, rounds)


def _copy_both_ways(
    device: Device,
    fetch: tuple[torch.Tensor, torch.Tensor],
    offload: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Copy (target, source) of both lanes at once, and wait for both."""
    fetches = _submit(device, device.fetch, *fetch, _COPIES)
    offloads = _submit(device, device.offload, *offload, _COPIES)
    fetches.wait()
    offloads.wait()


def _copy_and_wait(
    device: Device, lane: Lane, target: torch.Tensor, source: torch.Tensor, copies: int
) -> None:
    _submit(device, lane, target, source, copies).wait()


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


# -- the disk -------------------------------------------------------------------------------------
def disk_rates(folder: Path, nbytes: int, step: Callable[[str], None]) -> DiskRates:
    """Rates of writes, of reads and of both at once, of one file of `nbytes` in `folder`.

    An `OSError` becomes the result's `error`.
    """
    reads: dict[int, float] = {}
    writes: dict[int, float] = {}
    path = str(folder.resolve())
    try:
        with _nameless_file(folder) as name:
            memory = map_slab(max(DEPTHS) * BLOCK_BYTES, torch.uint8)
            # Random bytes: a disk may hold zeros without writing them.
            memory.view(torch.int64).random_()
            for depth in DEPTHS:
                step(f"file writes and reads, depth {depth}")
                with _queue(depth, memory) as queue, queue.open(name, nbytes, create=False) as file:
                    # the first writes allocate blocks
                    _transfer(queue, file, memory, depth, "w")
                    writes[depth] = _transfer(queue, file, memory, depth, "w")
                    reads[depth] = _transfer(queue, file, memory, depth, "r")
            rates = DiskRates(path=path, read_gbps=reads, write_gbps=writes)
            depth = rates.best_depth
            step("file writes and reads together")
            depth = max(2, depth)  # one of each
            with _queue(depth, memory) as queue, queue.open(name, nbytes, create=False) as file:
                mixed = _transfer(queue, file, memory, depth, "rw")
                return DiskRates(
                    path=path,
                    engine=queue.engine,
                    direct=file.direct,
                    read_gbps=reads,
                    write_gbps=writes,
                    mixed_gbps=mixed,
                )
    except OSError as error:
        return DiskRates(path=path, read_gbps={}, write_gbps={}, error=str(error))


@contextmanager
def _nameless_file(folder: Path) -> Iterator[str]:
    """Context manager for a new file without a name. It gives a path that opens the file."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".stronghold-doctor-")
    try:
        os.unlink(name)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _queue(depth: int, memory: torch.Tensor) -> IoQueue:
    return IoQueue(depth, BLOCK_BYTES, registered=[(memory.data_ptr(), memory.numel())])


def _transfer(queue: IoQueue, file: IoFile, memory: torch.Tensor, depth: int, kinds: str) -> float:
    """The rate of one pass over the file with `depth` blocks in flight, in 1e9 bytes/s.

    `kinds` is "r", "w", or "rw" for reads and writes in turn. The pass ends after LONGEST_S.
    """
    flying: deque[int] = deque()
    moved = 0
    begun = time.perf_counter()
    for index in range(file.size // BLOCK_BYTES):
        if len(flying) == depth:
            queue.wait(flying.popleft())
            if time.perf_counter() - begun > LONGEST_S:
                break
        # A block's memory is free again once the operation `depth` before it has ended.
        address = memory.data_ptr() + index % depth * BLOCK_BYTES
        submit = queue.write if kinds[index % len(kinds)] == "w" else queue.read
        flying.append(submit(file, index * BLOCK_BYTES, address, BLOCK_BYTES))
        moved += BLOCK_BYTES
    while flying:
        queue.wait(flying.popleft())
    return moved / (time.perf_counter() - begun) / 1e9
