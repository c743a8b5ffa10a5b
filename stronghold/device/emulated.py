"""A device made of CPU memory: more hostile than a GPU, so that races show without one.

Owns CPU tensors that stand for GPU memory, and one thread per lane, so that overlap and races are
real. Seeded jitter comes before each operation, freed buffers are filled with NaN, the budget is
enforced, the link can be paced. Without all of that small operations are their submitter's, as on a
GPU. Compute is the calling thread: its work is done when it returns.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time

import torch

from stronghold import native
from stronghold.device.base import Device, Fence, HostLane, Lane, completed, timed
from stronghold.device.kernels import NativeKernels
from stronghold.errors import StateError
from stronghold.telemetry.trace import NullTrace, Trace

# Small enough that a copy never keeps a core from the training thread for long, large enough that
# the call does not count: with 256 MB pieces half of a copy hides behind compute, with 1 MB pieces
# nine tenths.
COPY_PIECE_BYTES = 1 << 20
# Copied in less time than it takes to give the interpreter's lock to another thread and to get it
# back, tens of microseconds: under the lock.
SMALL_COPY_BYTES = 256 << 10
DISK_LANES = {"load": "read", "stage": "read", "spill": "write"}
WIRE_LANES = ("gather", "reduce", "exchange")
NAN_BYTE = 0xFF  # 0xFFFF and 0xFFFFFFFF are NaN in bfloat16, float16 and float32

_move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class _ShortLane(HostLane):
    """Of a device that is not hostile: what is small is done where it is submitted."""

    def _is_short(self, after: tuple[Fence, ...], nbytes: int) -> bool:
        small = self._device.alone and 0 < nbytes <= SMALL_COPY_BYTES
        return small and all(fence.done and not fence.failed for fence in after)


class EmulatedDevice(Device):
    """CPU tensors, a thread per lane.

    `jitter_s` is the longest random delay before an operation; `link_gbps` paces each direction of
    the link, `update_gbps` the update lane, `nvme_gbps` what lanes read from files, all together,
    and what they write, `wire_gbps` what other ranks send to each of the lanes that meet them (1e9
    bytes/s; None: as fast as they are); `poison` fills freed buffers with NaN.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        trace: Trace | None = None,
        poison: bool = True,
        jitter_s: float = 0.0,
        seed: int = 0,
        link_gbps: float | None = None,
        update_gbps: float | None = None,
        nvme_gbps: float | None = None,
        wire_gbps: float | None = None,
    ) -> None:
        super().__init__("emulated", budget_bytes, trace or NullTrace())
        self._poison = poison
        self._jitter_s = jitter_s
        self._seed = seed
        self._random: dict[str, random.Random] = {}
        self._link_gbps = link_gbps
        self._update_gbps = update_gbps
        self._nvme_gbps = nvme_gbps
        self._wire_gbps = wire_gbps
        self._disk_lock = threading.Lock()
        self._disk_free_s = {"read": 0.0, "write": 0.0}  # when the disk has done what it was given
        self._pool: native.Pool | None = None
        gentle = not poison and jitter_s == 0.0 and link_gbps is None and update_gbps is None
        self._short = ("fetch", "drain", "update") if gentle else ()
        self._open_lanes()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def _make_lane(self, name: str) -> Lane:
        return (_ShortLane if name in self._short else HostLane)(name, self)

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(numel, dtype=dtype)
        self.poison(buffer)
        return buffer

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # memmove, not Tensor.copy_: it releases the GIL and never starts torch's intra-op threads.
        total = source.numel() * source.element_size()
        room = target.numel() * target.element_size()
        if room != total or not (target.is_contiguous() and source.is_contiguous()):
            raise StateError(f"a copy of {total} bytes into {room}: expected as many, contiguous")
        start = time.perf_counter()
        for begin in range(0, total, COPY_PIECE_BYTES):
            size = min(COPY_PIECE_BYTES, total - begin)
            move = _move_small if total <= SMALL_COPY_BYTES else ctypes.memmove
            move(target.data_ptr() + begin, source.data_ptr() + begin, size)
            if self._link_gbps is not None:
                due = start + (begin + size) / (self._link_gbps * 1e9)
                time.sleep(max(0.0, due - time.perf_counter()))

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy(target, source)

    @property
    def kernels(self) -> NativeKernels:
        # A pool of its own: work on the compute lane must not wait for the update lane's.
        if self._pool is None:
            self._pool = native.Pool(torch.get_num_threads())
        return NativeKernels(self._pool)

    def poison(self, tensor: torch.Tensor) -> None:
        if self._poison:
            ctypes.memset(tensor.data_ptr(), NAN_BYTE, tensor.numel() * tensor.element_size())

    def record_compute(self, operation: str, stream: object = None) -> Fence:
        return completed("compute", operation)

    def compute_wait(self, fence: Fence) -> float:
        return timed(fence.wait)

    def begin_compute_span(self) -> float:
        return time.perf_counter()

    def end_compute_span(self, name: str, begun: object) -> None:
        assert isinstance(begun, float)
        self.trace.record("compute", name, begun, time.perf_counter())

    def before_operation(self) -> None:
        if self._jitter_s > 0.0:
            # One generator per lane: a lane's delays are the same whatever the others do.
            lane = threading.current_thread().name
            if lane not in self._random:
                self._random[lane] = random.Random(f"{self._seed} {lane}")
            time.sleep(self._random[lane].uniform(0.0, self._jitter_s))

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.close()

    def pace(self, lane: str, nbytes: int, start_s: float) -> None:
        due_s = start_s
        if lane == "update" and self._update_gbps is not None:
            due_s += nbytes / (self._update_gbps * 1e9)
        elif lane in WIRE_LANES and self._wire_gbps is not None:
            due_s += nbytes / (self._wire_gbps * 1e9)
        elif lane in DISK_LANES and self._nvme_gbps is not None:
            direction = DISK_LANES[lane]
            with self._disk_lock:
                begin_s = max(start_s, self._disk_free_s[direction])
                due_s = self._disk_free_s[direction] = begin_s + nbytes / (self._nvme_gbps * 1e9)
        if due_s > start_s:  # a sleep of no time, too, gives the interpreter's lock away
            time.sleep(max(0.0, due_s - time.perf_counter()))
