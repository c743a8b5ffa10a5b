"""Rates of the machine, measured through the code that training runs: lanes, slabs, kernels.

Owns the arrays for the length of a measurement, and how a rate is made out of times. Never keeps a
thread or a buffer: the device belongs to the caller, who drops its buffers by closing it. The
calling thread is the compute lane.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from stronghold import native
from stronghold.device.base import Device, Fence, Lane
from stronghold.memory.slab import map_slab
from stronghold.plan.profile import ADAM_BF16_BYTES

MIB = 1 << 20
ADAM_RESIDENT_BYTES = 2 + 2 + 4 + 4 + 2  # what the arrays of Adam occupy, per parameter
_L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_COPIES = 4  # in a row, so that the hand-over to a lane's thread does not count
_LARGEST_MATRIX = 8192
_PIN_BYTES = 32 * MIB

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is moved, and how often; the median of the rounds counts."""

    adam_numel: int
    copy_bytes: int
    rounds: int
    product_s: float  # how long one dtype's products are repeated
    pin_s: float  # how long memory is pinned to see how much the system allows
    pin_bytes: int  # and at most
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """In 1e9 bytes/s. `pin_error` says why the host memory could not be pinned, "" when it was;
    `pinnable_bytes` could be until then."""

    fetch_gbps: float
    drain_gbps: float
    duplex_gbps: float
    gpu_memory_gbps: float
    pin_error: str
    pinnable_bytes: int


def effort(quick: bool, available_bytes: int) -> Effort:
    """What is worth moving on this machine: arrays larger than all last caches together, so that
    memory is measured, but never more than an eighth of the memory that is free.
    """
    if quick:
        return Effort(
            adam_numel=8 * MIB,
            copy_bytes=32 * MIB,
            rounds=3,
            product_s=0.05,
            pin_s=0.3,
            pin_bytes=available_bytes // 2,
            disk_bytes=32 * MIB,
        )
    most = min(128 * MIB, available_bytes // 8 // ADAM_RESIDENT_BYTES)
    # 64 Mi parameters take 0.9 GB; a processor of several chiplets names the cache of one alone.
    numel = min(most, max(64 * MIB, 2 * _last_cache_bytes() // ADAM_RESIDENT_BYTES))
    copy_bytes = min(256 * MIB, available_bytes // 16)
    return Effort(
        adam_numel=max(numel, MIB),
        copy_bytes=copy_bytes,
        rounds=5,
        product_s=0.3,
        pin_s=5.0,
        pin_bytes=available_bytes // 2,
        disk_bytes=256 * MIB,
    )


def host_rates(size: Effort, num_cores: int, step: Step) -> tuple[dict[int, float], ...]:
    """Host memory bandwidth and the CPU Adam's rate by number of threads, in 1e9 bytes/s.

    Both move the same arrays in turn: memory is shared with others, and changes from second to
    second.
    """
    numel = size.adam_numel
    weight, grad = (map_slab(numel, torch.bfloat16).fill_(0.01) for _ in range(2))
    low = map_slab(numel, torch.int16).zero_()
    moments = [map_slab(numel, torch.float32).fill_(value) for value in (1e-3, 4e-4)]
    segment = native.AdamSegment(
        weight=weight.data_ptr(),
        low=low.data_ptr(),
        exp_avg=moments[0].data_ptr(),
        exp_avg_sq=moments[1].data_ptr(),
        grad=grad.data_ptr(),
        numel=numel,
        lr=1e-6,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        grad_scale=1.0,
        step=10,
        adamw=True,
        bias_correction=True,
    )
    batch = native.AdamBatch(torch.bfloat16, torch.bfloat16, [segment])
    moved = numel * ADAM_BF16_BYTES
    memory: dict[int, float] = {}
    adam: dict[int, float] = {}
    for threads in thread_counts(num_cores):
        step(f"host memory and Adam, {threads_in_words(threads)}")
        with native.Pool(threads) as pool:
            batch.traffic(pool)
            batch.run(pool)
            copying, updating = [], []
            for _ in range(size.rounds):
                copying.append(_seconds(lambda: batch.traffic(pool)))
                updating.append(_seconds(lambda: batch.run(pool)))
        memory[threads] = moved / statistics.median(copying) / 1e9
        adam[threads] = moved / statistics.median(updating) / 1e9
    return memory, adam


def thread_counts(num_cores: int) -> list[int]:
    """Powers of two, and all cores."""
    powers = [1 << n for n in range(num_cores.bit_length())]
    return sorted({*powers, num_cores})


def threads_in_words(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def link_rates(device: Device, size: Effort, step: Step) -> LinkRates:
    """Copies between pinned host slabs and the device, alone and together, and on the device.

    The device has no buffers but these, and none afterwards.
    """
    nbytes = size.copy_bytes // 4096 * 4096
    hosts = [map_slab(nbytes, torch.uint8).fill_(1) for _ in range(2)]
    # Filled: CPU memory that was never written is one page of zeros, which stays in the cache.
    slots = [device.allocate(nbytes, torch.uint8, "doctor's buffer").fill_(1) for _ in range(2)]
    device.record_compute("fill").wait()
    step("pinned memory")
    pinnable_bytes, pin_error = _pinnable(device, size)
    pinned: list[torch.Tensor] = []
    try:
        for host in hosts:
            device.pin(host)  # what is refused is copied as in training
            pinned.append(host)
    except OSError as error:
        pin_error = str(error)
    try:
        step("host to device")
        fetch = _lone(device, device.fetch, slots[0], hosts[0], size.rounds)
        step("device to host")
        drain = _lone(device, device.drain, hosts[1], slots[1], size.rounds)
        step("both directions together")
        duplex = _together(device, hosts, slots, drain / fetch, size.rounds)
    finally:
        for host in pinned:
            device.unpin(host)
    step("device memory")
    on_device = _on_compute(device, lambda: slots[0].copy_(slots[1]), size.rounds, _COPIES)
    device.release(*slots)
    return LinkRates(
        fetch_gbps=nbytes / fetch / 1e9,
        drain_gbps=nbytes / drain / 1e9,
        duplex_gbps=duplex / 1e9,
        gpu_memory_gbps=2 * nbytes / on_device / 1e9,
        pin_error=pin_error,
        pinnable_bytes=pinnable_bytes,
    )


def _pinnable(device: Device, size: Effort) -> tuple[int, str]:
    """The bytes that can be pinned, and why no more; "" where time or memory ended before."""
    taken: list[torch.Tensor] = []
    begun, error = time.perf_counter(), ""
    try:
        while (len(taken) + 1) * _PIN_BYTES <= size.pin_bytes:
            slab = map_slab(_PIN_BYTES, torch.uint8)
            device.register(slab)
            taken.append(slab)
            if time.perf_counter() - begun > size.pin_s:
                break
    except OSError as refused:
        error = str(refused)
    finally:
        for slab in taken:
            device.unpin(slab)
    return len(taken) * _PIN_BYTES, error


def product_flops(device: Device, dtype: torch.dtype, size: Effort) -> float:
    """FLOP/s of a square matrix product on the device, with torch's present settings.

    The largest of powers of two whose product takes no longer than `size.product_s`, repeated for
    so long: a GPU's clock falls to what its power allows.
    """
    chance = torch.Generator(device.torch_device)  # the caller's random numbers stay theirs
    side = 256
    while True:
        a, b = (
            torch.randn(side, side, generator=chance, device=device.torch_device).to(dtype)
            for _ in range(2)
        )
        product = _Product(a, b, torch.empty_like(a))
        _on_compute(device, product, 1, 1)  # the library chooses and loads its kernel
        once = _on_compute(device, product, 3, 1)
        if side == _LARGEST_MATRIX or 8 * once > size.product_s:
            break
        side *= 2
    repeats = max(1, int(size.product_s / 3 / once))
    seconds = _on_compute(device, product, 3, repeats)
    return 2.0 * side**3 / seconds


class _Product:
    """out = a @ b, as a call without arguments."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self._arrays = (a, b, out)

    def __call__(self) -> None:
        a, b, out = self._arrays
        with torch.no_grad():
            torch.matmul(a, b, out=out)


def _lone(
    device: Device, lane: Lane, target: torch.Tensor, source: torch.Tensor, rounds: int
) -> float:
    """Median seconds of one copy on a lane that has nothing else to do."""
    _submit(device, lane, target, source, 1).wait()
    return (
        statistics.median(
            _seconds(lambda: _submit(device, lane, target, source, _COPIES).wait())
            for _ in range(rounds)
        )
        / _COPIES
    )


def _together(
    device: Device,
    hosts: list[torch.Tensor],
    slots: list[torch.Tensor],
    ratio: float,
    rounds: int,
) -> float:
    """Bytes per second of both lanes at once. `ratio`: seconds of a drain in those of a fetch; the
    slower direction gets less to copy, so that both end together."""
    nbytes = hosts[0].numel()
    fetched = int(nbytes * min(1.0, ratio)) or 1
    drained = int(nbytes * min(1.0, 1 / ratio)) or 1

    def both() -> None:
        fetches = _submit(device, device.fetch, slots[0][:fetched], hosts[0][:fetched], _COPIES)
        drains = _submit(device, device.drain, hosts[1][:drained], slots[1][:drained], _COPIES)
        fetches.wait()
        drains.wait()

    both()
    seconds = statistics.median(_seconds(both) for _ in range(rounds))
    return _COPIES * (fetched + drained) / seconds


def _submit(
    device: Device, lane: Lane, target: torch.Tensor, source: torch.Tensor, copies: int
) -> Fence:
    def copy() -> None:
        device.copy(target, source)

    fences = [lane.submit("measure", copy) for _ in range(copies)]
    return fences[-1]


def _on_compute(device: Device, work: Callable[[], object], rounds: int, repeats: int) -> float:
    """Median seconds of one `work` on the compute lane."""

    def run() -> None:
        for _ in range(repeats):
            work()
        device.record_compute("measure").wait()

    return statistics.median(_seconds(run) for _ in range(rounds)) / repeats


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return max(time.perf_counter() - begun, 1e-9)


def _last_cache_bytes() -> int:
    try:
        text = _L3.read_text(encoding="ascii").strip()
    except OSError:
        return 64 * MIB
    digits = text.rstrip("KMG")
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[len(digits) :], 1)
    return int(digits) * unit if digits.isdigit() else 64 * MIB
