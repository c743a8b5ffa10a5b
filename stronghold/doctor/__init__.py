"""`stronghold doctor`: what this machine can do, and what is wrong with it.

Owns the order of the measurements and the names of machines. Never prints: progress goes to the
caller's function. The calling thread is the compute lane of the device that is measured.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stronghold import native
from stronghold.device import cuda
from stronghold.device.base import Device
from stronghold.device.cuda import CudaDevice
from stronghold.device.emulated import EmulatedDevice
from stronghold.doctor import measure
from stronghold.doctor.disk import DEPTHS, DiskRates, disk_rates
from stronghold.doctor.findings import Findings, PcieLink, Problem
from stronghold.errors import ConfigError
from stronghold.limits import HostLimits, host_limits
from stronghold.plan.profile import MachineProfile

__all__ = ["Findings", "Problem", "examine", "gpu_name"]

KINDS = ("cuda", "emulated")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# What is measured now, and the share of all measurements that is done.
Progress = Callable[[str, float], None]


def examine(
    device: str | Device | None = None,
    path: str | os.PathLike[str] | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> Findings:
    """Measure this machine: less than a minute, with `quick` a few seconds and rougher.

    `device` is "cuda", "emulated", None for a GPU where there is one, or a device of the caller's
    that has no buffers and no other user meanwhile. The emulated device's figures are those of CPU
    memory and of torch's CPU threads. `path` is a directory on the disk to measure, None for none;
    a temporary file in it is gone when this returns or raises. ConfigError for a device or a
    directory that is not there.
    """
    folder = None if path is None else Path(path).expanduser()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--path: got {folder}, expected a directory that exists")
    limits = host_limits()
    opened = device if isinstance(device, Device) else _open(device)
    try:
        steps = _Steps(progress, len(measure.thread_counts(limits.num_cores)), folder is not None)
        size = measure.effort(quick, limits.available_bytes)
        return _examine(opened, limits, size, folder, steps)
    finally:
        if opened is not device:
            opened.close()


def gpu_name(device: str | None = None) -> str | None:
    """The GPU's name, None for the emulated device; for `profile.default_path`."""
    return cuda.identity(0)[0] if _kind(device) == "cuda" else None


def _examine(
    device: Device, limits: HostLimits, size: measure.Effort, folder: Path | None, steps: _Steps
) -> Findings:
    memory, adam = measure.host_rates(size, limits.num_cores, steps)
    rates = measure.link_rates(device, size, steps)
    link = _pcie_link(device)  # now: an idle link runs slower
    flops = {}
    for name, dtype in _DTYPES.items():
        steps(f"matrix products, {name}")
        flops[name] = measure.product_flops(device, dtype, size)
    disk = None
    if folder is not None:
        disk = disk_rates(folder, size.disk_bytes, steps)
    steps.done()
    emulated = not isinstance(device, CudaDevice)
    return Findings(
        profile=MachineProfile(
            name=_name(device),
            measured=datetime.date.today().isoformat(),
            sources=(),
            num_gpus=1 if emulated else cuda.num_devices(),
            gpu_memory_bytes=_gpu_memory_bytes(device, limits),
            host_memory_bytes=limits.usable_bytes,
            num_cores=limits.num_cores,
            fetch_gbps=_figure(rates.fetch_gbps),
            drain_gbps=_figure(rates.drain_gbps),
            duplex_gbps=_figure(rates.duplex_gbps),
            memory_gbps={threads: _figure(rate) for threads, rate in memory.items()},
            adam_gbps={threads: _figure(rate) for threads, rate in adam.items()},
            flops={name: _figure(rate) for name, rate in flops.items()},
            gpu_memory_gbps=_figure(rates.gpu_memory_gbps),
            **_of_disk(disk),
        ),
        limits=limits,
        emulated=emulated,
        isa=native.isa(),
        best_isa=native.isas()[0],
        pin_error=rates.pin_error,
        pinnable_bytes=rates.pinnable_bytes,
        one_memory=not emulated and cuda.shares_memory(device.torch_device.index),
        link=link,
        disk=disk,
    )


def _of_disk(disk: DiskRates | None) -> dict[str, Any]:
    """The profile's fields of a disk; none where the figures would be the page cache's."""
    if disk is None or not disk.direct:
        return {}
    return {
        "nvme_read_gbps": _figure(max(disk.read_gbps.values())),
        "nvme_write_gbps": _figure(max(disk.write_gbps.values())),
        "nvme_mixed_gbps": _figure(disk.mixed_gbps),
        "nvme_path": disk.path,
    }


def _figure(rate: float) -> float:
    """As many digits as a measurement is worth."""
    return float(f"{rate:.4g}")


class _Steps:
    """Tells the caller which measurement begins, and how many of all have ended."""

    def __init__(self, progress: Progress | None, num_threads: int, disk: bool) -> None:
        self._progress = progress
        self._begun = 0
        # As many as `measure` and `disk` name: threads, five of the link, dtypes, depths and both.
        self._total = num_threads + 5 + len(_DTYPES) + (len(DEPTHS) + 1 if disk else 0)

    def __call__(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, min(1.0, self._begun / self._total))
        self._begun += 1

    def done(self) -> None:
        if self._progress is not None:
            self._progress("done", 1.0)


def _kind(device: str | None) -> str:
    if device is not None and device not in KINDS:
        raise ConfigError(f"--device: got {device!r}, expected {' or '.join(KINDS)}")
    return device or ("cuda" if cuda.available() else "emulated")


def _open(device: str | None) -> Device:
    # Poison writes over buffers that nobody frees here.
    return CudaDevice() if _kind(device) == "cuda" else EmulatedDevice(poison=False)


def _name(device: Device) -> str:
    host = platform.node() or "this host"
    if isinstance(device, CudaDevice):
        return f"{cuda.identity(device.torch_device.index)[0]} on {host}"
    return f"emulated on {_cpu_name()}, {host}"


def _gpu_memory_bytes(device: Device, limits: HostLimits) -> int:
    """The emulated device's memory is its budget, or the host's."""
    if isinstance(device, CudaDevice):
        return cuda.identity(device.torch_device.index)[1]
    return device.budget_bytes or limits.usable_bytes


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _pcie_link(device: Device) -> PcieLink | None:
    """What sysfs says of the GPU's link; None in virtual machines that hide it."""
    if not isinstance(device, CudaDevice):
        return None
    folder = Path("/sys/bus/pci/devices") / cuda.identity(device.torch_device.index)[2]
    return read_link(folder)


def read_link(folder: Path) -> PcieLink | None:
    """The link of a PCI device's directory in sysfs."""
    values = []
    for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"):
        try:
            found = re.match(r"[0-9.]+", (folder / name).read_text(encoding="ascii"))
        except OSError:
            return None
        if found is None:
            return None
        values.append(float(found[0]))
    speed, width, max_speed, max_width = values
    if width == 0 or max_width == 0:
        return None
    return PcieLink(speed=speed, width=int(width), max_speed=max_speed, max_width=int(max_width))
