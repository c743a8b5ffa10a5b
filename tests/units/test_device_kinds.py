"""The table of GPUs: torch's module of each kind has the names that a device uses."""

from __future__ import annotations

import pytest
import torch

from stronghold.devices.kinds import CUDA, KINDS, ROCM, XPU, DeviceKind, present_kind

USED = (
    "Event",
    "Stream",
    "current_stream",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "is_current_stream_capturing",
    "set_rng_state",
    "stream",
)
USED_OF_ALL_KINDS = (
    "current_accelerator",
    "device_count",
    "empty_cache",
    "get_memory_info",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device_index",
    "synchronize",
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_torchs_module_of_a_kind_has_what_a_device_uses(kind: DeviceKind) -> None:
    assert [name for name in USED if not hasattr(kind.module, name)] == []


def test_torch_has_what_devices_of_all_kinds_use() -> None:
    assert [name for name in USED_OF_ALL_KINDS if not hasattr(torch.accelerator, name)] == []


def test_kinds_have_names_of_their_own_and_rocm_has_cudas_calls() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert ROCM.registration is CUDA.registration
    assert ROCM.torch_name == CUDA.torch_name != XPU.torch_name


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is here")
def test_without_a_gpu_there_is_no_kind() -> None:
    assert present_kind() is None
