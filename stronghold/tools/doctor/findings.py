"""The figures and limits of one machine, as the doctor measured them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from stronghold.limits import HostLimits
from stronghold.plan.machine import MachineProfile

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

    `isa` is the instruction set of the kernels, `best_isa` the best that the CPU has.
    `pinnable_bytes` could be pinned until `pin_error`. With `one_memory` the GPU's memory is the
    host's. `link` is None if there is no PCIe link, or the system does not describe it. `disk` is
    None if the caller named no directory.
    """

    profile: MachineProfile
    limits: HostLimits
    emulated: bool
    isa: str
    best_isa: str
    pin_error: str = ""
    pinnable_bytes: int = 0
    one_memory: bool = False
    link: PcieLink | None = None
    disk: DiskRates | None = None


def threads_in_words(count: int) -> str:
    """1 thread, 2 threads."""
    return "1 thread" if count == 1 else f"{count} threads"
