"""The doctor's examination: rates of the machine, of a disk, and what the system allows.

It never prints: progress goes to the caller's function. It keeps no thread, buffer or file. The
calling thread is the compute lane of the measured device.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stronghold import native
from stronghold.devices import cuda
from stronghold.devices.cuda import CudaDevice
from stronghold.devices.device import Device
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.threads import Workers
from stronghold.errors import BudgetError, ConfigError
from stronghold.limits import HostLimits, host_limits
from stronghold.plan.machine import MachineProfile
from stronghold.train.files import Files, Transfer
from stronghold.train.rates import Step, figure, measure_machine
from stronghold.train.slabs import map_slab

MIB = 1 << 20
KINDS = ("cuda", "emulated")
SECONDS = 0.3  # of one measurement
DISK_BYTES = 256 * MIB
PIECE_BYTES = 16 * MIB  # of a transfer
LONGEST_S = 1.5  # of one transfer: a slow disk is known to be slow by then

# Bytes per second and lane of PCI Express after its line code, by the transfers per second in
# sysfs: generations 1 to 6.
LANE_GBPS = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.969, 32.0: 3.938, 64.0: 7.563}


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """The GPU's slot: 1e9 transfers per second and lane, and lanes, as they are and at most."""

    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def best_gbps(self) -> float:
        """The standard's rate per direction at the highest speed; 0 for an unknown speed."""
        return LANE_GBPS.get(self.max_speed, 0.0) * self.max_width

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Rates of files in one directory, in 1e9 bytes/s.

    `mixed_gbps` counts reads and writes at once. Without `direct` the rates are those of the page
    cache. `error` is the reason if nothing was measured.
    """

    path: str
    direct: bool = False
    read_gbps: float = 0.0
    write_gbps: float = 0.0
    mixed_gbps: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """One machine.

    `isa` is the instruction set of the kernels. `pin_error` is the reason why host memory could not
    be pinned. With `one_memory` the GPU's memory is the host's. `link` is None if there is no PCIe
    link, or the system does not describe it. `disk` is None if the caller named no directory.
    """

    profile: MachineProfile
    limits: HostLimits
    isa: str
    pin_error: str = ""
    one_memory: bool = False
    link: PcieLink | None = None
    disk: DiskRates | None = None


def examine(
    device: str | Device | None = None,
    path: str | os.PathLike[str] | None = None,
    step: Step = lambda _: None,
) -> Findings:
    """Measure this machine, in less than a minute.

    Arguments:
        device: "cuda", "emulated", None for a GPU if the machine has one, or an open device that
            the caller does not use meanwhile. An open device stays open.
        path: a directory on the disk to measure; None measures no disk.
        step: gets the name of each measurement that begins.

    Raises ConfigError for a device or a directory that does not exist.
    """
    folder = None if path is None else Path(path).expanduser()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--path: got {folder}, expected a directory that exists")
    limits = host_limits()
    opened = device if isinstance(device, Device) else _open(device)
    try:
        profile, pin_error = measure_machine(
            opened, limits, step, seconds=SECONDS, threads=limits.num_cores
        )
        disk = None
        if folder is not None:
            disk = disk_rates(folder, DISK_BYTES, step)
        link, one_memory = None, False
        if isinstance(opened, CudaDevice):
            index = opened.torch_device.index
            one_memory = cuda.shares_memory(index)
            # now: an idle link runs slower
            link = read_link(Path("/sys/bus/pci/devices") / cuda.identity(index)[2])
        return Findings(
            profile=dataclasses.replace(profile, **_of_disk(disk)),
            limits=limits,
            isa=native.isa(),
            pin_error=pin_error,
            one_memory=one_memory,
            link=link,
            disk=disk,
        )
    finally:
        if opened is not device:
            opened.close()


def gpu_name(device: str | None = None) -> str | None:
    """The name of the GPU, or None for the emulated device."""
    return cuda.identity(0)[0] if _kind(device) == "cuda" else None


def _of_disk(disk: DiskRates | None) -> dict[str, Any]:
    """The fields of a profile for a disk. No fields if the page cache was measured."""
    if disk is None or not disk.direct:
        return {}
    return {
        "nvme_read_gbps": figure(disk.read_gbps),
        "nvme_write_gbps": figure(disk.write_gbps),
        "nvme_mixed_gbps": figure(disk.mixed_gbps),
        "nvme_path": disk.path,
    }


def _kind(device: str | None) -> str:
    if device is not None and device not in KINDS:
        raise ConfigError(f"--device: got {device!r}, expected {' or '.join(KINDS)}")
    return device or ("cuda" if cuda.available() else "emulated")


def _open(device: str | None) -> Device:
    if _kind(device) == "emulated":
        # Poison overwrites buffers that are never freed during a measurement.
        return EmulatedDevice(poison=False)
    return CudaDevice()


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


# -- the disk -------------------------------------------------------------------------------------
def disk_rates(folder: Path, nbytes: int, step: Callable[[str], None]) -> DiskRates:
    """Rates of writes, of reads and of both at once, of `nbytes` of the engine's own files in
    `folder`. What is refused becomes the result's `error`."""
    path = str(folder.resolve())
    memory = map_slab(2 * PIECE_BYTES, torch.uint8)
    # Random bytes: a disk may hold zeros without writing them.
    memory.view(torch.int64).random_()
    written, read = memory.split(PIECE_BYTES)
    half = nbytes // 2
    try:
        with closing(Files([folder], nbytes)) as files, Workers("doctor", 1) as second:
            step("file writes")
            _rate(files.write, written, range(0, nbytes, PIECE_BYTES))  # it allocates blocks
            write_gbps = _rate(files.write, written, range(0, nbytes, PIECE_BYTES))
            step("file reads")
            read_gbps = _rate(files.read, read, range(0, nbytes, PIECE_BYTES))
            step("file writes and reads together")
            beside = second.submit(_rate, files.read, read, range(0, half, PIECE_BYTES))
            mixed_gbps = _rate(files.write, written, range(half, nbytes, PIECE_BYTES))
            return DiskRates(
                path=path,
                direct=files.is_direct,
                read_gbps=read_gbps,
                write_gbps=write_gbps,
                mixed_gbps=mixed_gbps + beside.result(),
            )
    except (OSError, ConfigError, BudgetError) as error:
        return DiskRates(path=path, error=str(error))


def _rate(move: Callable[[Sequence[Transfer]], None], memory: torch.Tensor, begins: range) -> float:
    """The rate at which pieces move, one after the other, in 1e9 bytes/s. It ends after
    LONGEST_S."""
    moved = 0
    begun = time.perf_counter()
    for begin in begins:
        move([(begin, memory)])
        moved += memory.nbytes
        if time.perf_counter() - begun > LONGEST_S:
            break
    return moved / (time.perf_counter() - begun) / 1e9
