"""Makes `torch.cuda` and `torch.accelerator` of a build without CUDA work on the pretended device.

Owns the Python names: streams, events, the counts of memory, what a GPU says of itself. It replaces
attributes of `torch.cuda`, `torch.accelerator` and `torch._C` for the life of the process. Some are
private ones of torch 2.13, and another version is refused. Has to run before anybody imports torch,
which asks for CUDA's hooks once. Cannot show what a GPU does with these names: it answers from
`device.cpp`.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from tests.pretended import build

TORCH = "2.13"
TOTAL_BYTES = 16 << 30
CYCLES_PER_S = 2e9  # what torch.cuda._sleep counts
DEVICE_TYPE = 1  # the number of c10::DeviceType::CUDA
# Orders vary in a run under a delay: at most this many seconds are added to each copy, and to each
# launch.
DELAY = "STRONGHOLD_PRETENDED_DELAY_S"
LAUNCH_DELAY = "STRONGHOLD_PRETENDED_LAUNCH_DELAY_S"

# As CUDA numbers them.
SUCCESS, ALREADY_REGISTERED, NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY = (0, 712, 713, 1, 2)
LAUNCH_FAILED = 719


class Neighbour:
    """Another process on the device. While it is `there`, it takes a MiB more before each look at
    what the device has free, and gives all back after a few hundred."""

    MOST_BYTES = 256 << 20

    def __init__(self) -> None:
        self.there = False
        self._taken = 0

    def taken_bytes(self) -> int:
        """What it has by the time of a look."""
        self._taken = (self._taken + (1 << 20)) % self.MOST_BYTES if self.there else 0
        return self._taken


neighbour = Neighbour()


class Refused(Exception):
    """This Python cannot pretend a device; the message says what it would need."""


def install() -> ModuleType:
    """The extension, with `torch` imported on it. Raises `Refused`."""
    found = metadata.version("torch")
    if found.split("+")[0].rsplit(".", 1)[0] != TORCH:
        raise Refused(f"the pretended device is written for torch {TORCH}, here is torch {found}")
    if "torch" in sys.modules:
        raise Refused("the pretended device must be installed before torch is imported")
    # As many threads for an operator on a stream's thread as on the program's: sums have one order.
    os.environ["OMP_NUM_THREADS"] = "1"
    extension = _load(build.compiled())
    import torch

    if torch.version.cuda is not None:
        raise Refused(f"the pretended device needs torch without CUDA, here is torch {found}")
    extension.set_delay(float(os.environ.get(DELAY, "0")))
    extension.set_launch_delay(float(os.environ.get(LAUNCH_DELAY, "0")))
    # Python's launches need the interpreter: none may be left when it ends.
    atexit.register(torch.accelerator.synchronize, 0)
    _streams(torch, extension)
    _memory(torch, extension)
    _identity(torch, extension)
    _numbers(torch, extension)
    return extension


def _load(library: Path) -> ModuleType:
    """Torch's libraries without its Python, then the device: torch will find its hooks."""
    torch = importlib.util.find_spec("torch")
    folder = Path(torch.origin).parent / "lib"
    if (folder / "libtorch_cuda.so").exists():
        raise Refused("the pretended device needs torch's build without CUDA")
    for name in ("c10", "torch_cpu", "torch", "torch_python"):
        ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location(build.NAME, library)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _streams(torch: Any, extension: Any) -> None:
    class Stream(torch.Stream):  # type: ignore[misc]
        def __new__(cls, device: Any = None, priority: int = 0, **place: int) -> Any:
            if place:
                return super().__new__(cls, **place)
            return super().__new__(cls, device="cuda", priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def wait_stream(self, other: Any) -> None:
            self.wait_event(other.record_event())

    class EventType(type):
        def __call__(cls, enable_timing: bool = False, blocking: bool = False, **_: bool) -> Any:
            return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)

        def __instancecheck__(cls, found: object) -> bool:
            return isinstance(found, torch.Event)

    class Event(metaclass=EventType):
        pass

    class Current:
        """`with torch.cuda.stream(s)`; None changes nothing."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream
            self._before = 0

        def __enter__(self) -> None:
            self._before = extension.current_stream()
            if self._stream is not None:
                extension.set_current_stream(self._stream.stream_id)

        def __exit__(self, *_: object) -> None:
            extension.set_current_stream(self._before)

    class Capture:
        """`with torch.cuda.graph(g)`: the stream says that it captures, and nothing is kept."""

        under_way = False

        def __init__(self, graph: object, **_: object) -> None:
            pass

        def __enter__(self) -> None:
            Capture.under_way = True

        def __exit__(self, *_: object) -> None:
            Capture.under_way = False

    def named(number: int) -> Any:
        return Stream(stream_id=number, device_index=0, device_type=DEVICE_TYPE)

    cuda = torch.cuda
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.stream = cuda.StreamContext = Current
    cuda.current_stream = lambda device=None: named(extension.current_stream())
    cuda.default_stream = lambda device=None: named(0)
    cuda.set_stream = lambda stream: extension.set_current_stream(stream.stream_id)
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize(0)
    cuda.is_current_stream_capturing = lambda: Capture.under_way
    cuda.CUDAGraph = object
    cuda.graph = Capture
    cuda._sleep = lambda cycles: extension.sleep(cycles / CYCLES_PER_S)
    torch._C._cuda_getCurrentRawStream = lambda device: extension.current_stream()


def _memory(torch: Any, extension: Any) -> None:
    class Runtime:
        """The calls of `torch.cuda.cudart()` that register host memory; they return statuses."""

        limit = 1 << 62  # bytes that the system lets a process register
        registered: ClassVar[dict[int, int]] = {}

        def cudaHostRegister(self, begin: int, num_bytes: int, flags: int) -> int:
            if num_bytes == 0:
                return INVALID_VALUE
            if sum(self.registered.values()) + num_bytes > self.limit:
                return OUT_OF_MEMORY
            if not extension.register_host(begin, num_bytes):
                return ALREADY_REGISTERED
            self.registered[begin] = num_bytes
            return SUCCESS

        def cudaHostUnregister(self, begin: int) -> int:
            if extension.failed():
                return LAUNCH_FAILED
            if not extension.unregister_host(begin):
                return NOT_REGISTERED
            del self.registered[begin]
            return SUCCESS

    def is_pinned(tensor: Any, device: Any = None) -> bool:
        on_host = tensor.device.type == "cpu" and tensor.numel() > 0
        return bool(on_host and extension.is_registered(tensor.data_ptr()))

    def statistics(device: Any = None) -> dict[str, int]:
        return {
            "allocation.all.allocated": extension.num_allocations(),
            "allocated_bytes.all.current": extension.allocated(),
            "allocated_bytes.all.peak": extension.peak(),
            "active_bytes.all.current": extension.active(),
            "active_bytes.all.peak": extension.active_peak(),
            "reserved_bytes.all.current": extension.reserved(),
            "reserved_bytes.all.peak": extension.reserved_peak(),
            "num_alloc_retries": extension.num_retries(),
            "num_ooms": extension.num_failures(),
        }

    copy_of_host = torch.Tensor.__deepcopy__

    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
        # torch has no storage of this kind
        if tensor.device.type != "cuda" or id(tensor) in memo:
            return copy_of_host(tensor, memo)
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    cuda = torch.cuda
    torch.Tensor.__deepcopy__ = deepcopy
    torch.Tensor.is_pinned = is_pinned
    cuda.cudart = Runtime
    fraction = [1.0]

    def of_the_device(device: Any = None) -> tuple[int, int]:
        """What is free of the whole device, whatever the process may have of it."""
        return TOTAL_BYTES - extension.reserved() - neighbour.taken_bytes(), TOTAL_BYTES

    cuda.mem_get_info = of_the_device
    cuda.memory_stats = statistics
    # Pinned memory of torch's own: none is kept, so that none is counted.
    cuda.host_memory_stats = lambda: {"allocations.allocated": 0, "allocated_bytes.allocated": 0}
    cuda.memory_allocated = lambda device=None: extension.allocated()
    cuda.memory_reserved = lambda device=None: extension.reserved()
    cuda.max_memory_allocated = lambda device=None: extension.peak()
    cuda.max_memory_reserved = lambda device=None: extension.reserved_peak()
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated"):
        setattr(cuda, name, lambda device=None: extension.restart_peak())
    cuda.empty_cache = cuda.ipc_collect = extension.empty_cache
    torch._C._cuda_clearCublasWorkspaces = extension.clear_workspaces

    of_all_kinds = torch.accelerator
    of_all_kinds.get_memory_info = of_the_device
    for name in ("memory_stats", "empty_cache", "reset_peak_memory_stats"):
        setattr(of_all_kinds, name, getattr(cuda, name))
    for name in ("allocated", "reserved"):
        for most in ("memory_", "max_memory_"):
            setattr(of_all_kinds, most + name, getattr(cuda, most + name))

    def leave_to_this_process(part: float, device: Any = None) -> None:
        fraction[0] = part
        extension.limit(int(part * TOTAL_BYTES))

    cuda.set_per_process_memory_fraction = leave_to_this_process
    cuda.get_per_process_memory_fraction = lambda device=None: fraction[0]


class _Properties:
    name = "Pretended GPU"
    total_memory = TOTAL_BYTES
    major, minor = 9, 0
    multi_processor_count = 8
    pci_domain_id, pci_bus_id, pci_device_id = 0, 1, 0
    L2_cache_size = 1 << 20
    gcnArchName = ""
    is_integrated = False


class _Device:
    """`with torch.cuda.device(0)`: there is one."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _identity(torch: Any, extension: Any) -> None:
    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index > 0:
            raise RuntimeError("CUDA error: invalid device ordinal")
        extension.set_device()

    torch.accelerator.set_device_index = set_device
    torch.accelerator.device_count = lambda: 1
    cuda = torch.cuda
    cuda.is_available = cuda.is_initialized = cuda._is_compiled = lambda: True
    cuda._initialized = True  # checkpoints restore the generator of an initialized device
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda._lazy_init = cuda.init = lambda: None
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = set_device
    cuda.device = cuda.device_of = _Device
    cuda.get_device_name = lambda device=None: _Properties.name
    cuda.get_device_capability = lambda device=None: (_Properties.major, _Properties.minor)
    cuda.get_device_properties = lambda device=None: _Properties()
    cuda.can_device_access_peer = lambda device, peer: False
    # For profilers, of which there is none.
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = lambda *_: 0
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"


def _numbers(torch: Any, extension: Any) -> None:
    """The device's own generator is one of the host's kind."""

    class Generator(torch.Generator):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu")

    cuda = torch.cuda
    torch.Generator = Generator
    for names in (cuda, cuda.random):  # Transformers' Trainer uses the module's
        names.get_rng_state = lambda device="cuda": extension.random_state()
        names.set_rng_state = lambda state, device="cuda": extension.set_random_state(state)
        names.get_rng_state_all = lambda: [extension.random_state()]
        names.set_rng_state_all = lambda states: extension.set_random_state(states[0])
        names.manual_seed = names.manual_seed_all = extension.seed
