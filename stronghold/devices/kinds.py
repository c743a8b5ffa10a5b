"""The kinds of GPUs: one row for each, with what differs between them.

Owns the table alone. The device uses `torch.accelerator`, torch's interface for all kinds, where it
can. `DeviceKind.module` is torch's module of a kind (`torch.cuda`, `torch.xpu`). It has streams,
and events on which a thread can sleep. `torch.Event` does not offer these. The rows of ROCm and XPU
follow torch's documentation; they never ran on such hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

_PORTABLE = 1  # the flag cudaHostRegisterPortable
NO_OPTIONS: Mapping[str, bool] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRegistration:
    """The calls that register host memory for direct transfers, with their names for errors.

    `register(address, nbytes)` and `unregister(address)` return a status, 0 for success.
    `already_registered` is the status if some bytes of the slab are registered.
    """

    register_name: str
    unregister_name: str
    register: Callable[[int, int], int]
    unregister: Callable[[int], int]
    already_registered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of GPU.

    `torch_name` is the type of its devices in torch; a ROCm build calls them "cuda", too.
    `registration` is None if host memory cannot be registered. `fence_options` are an event's
    options that let a waiting thread sleep. `raw_stream(index)` returns the address of the current
    stream of a device.
    """

    name: str
    torch_name: str
    registration: HostRegistration | None
    fence_options: Mapping[str, bool]
    raw_stream: Callable[[int], int]

    @property
    def module(self) -> Any:
        """Torch's module of this kind."""
        return torch.get_device_module(self.torch_name)

    def recorded(self, stream: Any) -> Any:
        """Record an event for a fence on `stream`, and return it.

        A host lane that waits for the event sleeps, and leaves its core to updates.
        """
        event = self.module.Event(**self.fence_options)
        event.record(stream)
        return event

    def timed_event(self) -> Any:
        """Return a new event that has a time."""
        return self.module.Event(enable_timing=True)


def _register_by_cuda(address: int, nbytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))


def _unregister_by_cuda(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


def _raw_stream_of_cuda(index: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(index))


def _raw_stream_of_xpu(index: int) -> int:
    return int(torch._C._xpu_getCurrentRawStream(index))


CUDA = DeviceKind(
    name="CUDA",
    torch_name="cuda",
    registration=HostRegistration(
        register_name="cudaHostRegister",
        unregister_name="cudaHostUnregister",
        register=_register_by_cuda,
        unregister=_unregister_by_cuda,
        already_registered=712,
    ),
    fence_options=MappingProxyType({"blocking": True}),
    raw_stream=_raw_stream_of_cuda,
)
# A ROCm build of torch has HIP's calls, and HIP's status, under CUDA's names.
ROCM = replace(CUDA, name="ROCm")
XPU = DeviceKind(
    name="XPU",
    torch_name="xpu",
    registration=None,
    fence_options=NO_OPTIONS,
    raw_stream=_raw_stream_of_xpu,
)
KINDS = (CUDA, ROCM, XPU)


def present_kind() -> DeviceKind | None:
    """Return the kind of the GPUs that this build of torch finds, or None if it finds none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    if accelerator.type == "cuda" and torch.version.hip is not None:
        return ROCM
    return next((kind for kind in KINDS if kind.torch_name == accelerator.type), None)
