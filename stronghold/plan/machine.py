"""The machine profile: a machine's rates and sizes, and the rates of one rank on it.

`stronghold doctor` measures a profile; others ship with the package. Pure: no tensors, no threads,
no clock. Owns the JSON of a profile and the path of this machine's file. Never measures anything.
Rates are sustained, in 1e9 bytes per second (`*_gbps`) or FLOP per second; sizes are bytes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stronghold.errors import ConfigError, did_you_mean, explain
from stronghold.telemetry.trace import write_whole

if TYPE_CHECKING:
    from stronghold.model.operators import Counts

VERSION = 2
MACHINES = Path(__file__).parent / "machines"
ENVIRONMENT = "STRONGHOLD_PROFILE"
EMULATED = "emulated"

NETWORK_GBPS = 25.0  # default rate between nodes: 200 Gb/s for each GPU
# The rate of Adam with lean states as a share of the exact one's, if the profile has none. The lean
# one computes more for fewer bytes. benchmarks/results/adam_lean_amd-epyc.md has 0.61 for one of
# two cores, and 0.83 for both, which share their memory as the cores of large machines do.
LEAN_RATE = 0.83
LEAST_SHARE = 0.05  # of a lane's rate alone, which it keeps however busy the others are
# Seconds of the calling thread for a block's forward, and for its backward. The thread runs the
# module's Python and our hooks, and launches the kernels. A recomputed block runs its forward once
# more, under autograd's hooks.
# benchmarks/results/host-time_emulated-cpu_2026-11-23.md has these per layer and step, on one core
# of an EPYC: 1.50 ms, and 0.89 ms more for recomputation.
LAUNCH_S = 7.5e-4
RECOMPUTE_LAUNCH_S = 8.9e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of one rank's lanes, in 1e9 bytes/s, and the seconds of hand-overs and launches.

    fetch_gbps, offload_gbps  the link from host to device, and back
    duplex_gbps    the sum of both directions of the link if both are busy
    update_gbps    the CPU's Adam
    memory_gbps    host memory as a whole
    device_gbps    device memory
    load_gbps, spill_gbps  files to the host, and back
    io_gbps        the sum of loads and spills if both are busy
    reduce_gbps    gradients of other ranks
    exchange_gbps  weights from other nodes
    handover_s     seconds from a submission to its lane's start
    *launch_s      seconds of the calling thread for a block's forward or backward (`LAUNCH_S`)
    """

    fetch_gbps: float
    offload_gbps: float
    duplex_gbps: float
    update_gbps: float
    memory_gbps: float
    device_gbps: float
    load_gbps: float = 1.0
    spill_gbps: float = 1.0
    io_gbps: float = 2.0
    reduce_gbps: float = 25.0
    exchange_gbps: float = 25.0
    handover_s: float = 3e-5
    launch_s: float = 0.0
    recompute_launch_s: float = 0.0


# `states.States.adam_bytes` of bf16 weights and gradients, with exact and with lean states.
ADAM_BF16_BYTES, ADAM_LEAN_BYTES = 26, 12.25
_logger = logging.getLogger("stronghold")


_AGAIN = "write it again with `stronghold doctor`"
Count = Annotated[int, Field(ge=1, lt=1 << 53)]
Rate = Annotated[float, Field(gt=0)]
Dtype = Annotated[str, Field(pattern="^(bf16|fp16|fp32)$")]
ByDtype = Annotated[dict[Dtype, Rate], Field(min_length=3)]
OfSomeDtypes = Annotated[dict[Dtype, Rate], Field(min_length=1)]


@dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
    config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False),
)
class MachineProfile:
    """The rates and sizes of a machine. ValidationError for a rate that is not positive and finite.

    measured         ISO date; "" for a shipped profile, whose `sources` name the origin of its
                     rates
    emulated         the device is CPU memory. Its compute runs on the calling thread, so launches
                     add to the time of compute
    fetch_gbps, offload_gbps  pinned host to device and back, each alone
    duplex_gbps      the sum of both if both run
    memory_gbps      host memory with Adam's mix of accesses, all cores together
    adam_gbps        the CPU's Adam with all cores, which moves `ADAM_BF16_BYTES` per parameter
    adam_thread_gbps the same with one thread
    adam_lean_gbps   the same with lean states and all cores: `ADAM_LEAN_BYTES` per parameter
    flops            a large matrix product on the device, by dtype
    gpu_memory_gbps  bytes that a copy on the device reads and writes
    attention_flops  fused attention's forward with a causal mask, by dtype. It counts all pairs of
                     tokens, also the skipped ones. Not every dtype need have it
    attention_backward_flops  its backward, counted as twice forward
    nvme_*           transfers past the page cache at the best depth; `nvme_mixed_gbps` is the sum
                     of both directions
    """

    name: str
    measured: str
    sources: tuple[str, ...]
    emulated: bool = False
    num_gpus: Count = 1
    gpu_memory_bytes: Count
    host_memory_bytes: Count
    num_cores: Count
    fetch_gbps: Rate
    offload_gbps: Rate
    duplex_gbps: Rate
    memory_gbps: Rate
    adam_gbps: Rate
    adam_thread_gbps: Rate
    flops: ByDtype
    gpu_memory_gbps: Rate
    attention_flops: OfSomeDtypes | None = None
    attention_backward_flops: OfSomeDtypes | None = None
    adam_lean_gbps: Rate | None = None
    nvme_read_gbps: Rate | None = None
    nvme_write_gbps: Rate | None = None
    nvme_mixed_gbps: Rate | None = None
    nvme_path: str = ""

    def adam_rate(self, threads: int, states: str = "exact") -> float:
        """The rate of the CPU's Adam with so many threads, in 1e9 bytes/s: each adds the rate of
        one, until the cores together have the memory's."""
        rate = min(threads * self.adam_thread_gbps, self.adam_gbps)
        if states != "lean":
            return rate
        lean_gbps = self.adam_lean_gbps or LEAN_RATE * self.adam_gbps
        return rate * lean_gbps / self.adam_gbps

    def attention_s(self, dtype: str, counts: Counts) -> tuple[float, float]:
        """(seconds of fused attention's forward, seconds of its backward), by the FLOPs of forward.

        These count all pairs of tokens. Under a causal mask a kernel skips half of the pairs, so a
        call without a mask takes twice as long. A profile without rates of attention in this dtype
        takes the rate of matrix products.
        """
        forward = (self.attention_flops or {}).get(dtype)
        backward = (self.attention_backward_flops or {}).get(dtype)
        if forward is None or backward is None:
            seconds = counts.attention_flops / self.flops[dtype]
            return seconds, 2 * seconds
        flops = 2 * counts.attention_flops - counts.causal_flops
        return flops / forward, 2 * flops / backward

    def share(self, num_ranks: int) -> MachineProfile:
        """The machine as one of its ranks has it.

        The rank has a GPU and a link, and 1 / `num_ranks` of the bandwidth of memory and disks.
        """
        return dataclasses.replace(
            self,
            memory_gbps=self.memory_gbps / num_ranks,
            nvme_read_gbps=_divided(self.nvme_read_gbps, num_ranks),
            nvme_write_gbps=_divided(self.nvme_write_gbps, num_ranks),
            nvme_mixed_gbps=_divided(self.nvme_mixed_gbps, num_ranks),
        )

    def to_json(self) -> str:
        """The profile with its version, as JSON that a person can read and edit."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> MachineProfile:
        """Read the profile that `to_json` wrote. ConfigError, which names `where`, for any other
        text."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}; {_AGAIN}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: got a {type(raw).__name__}, expected an object; {_AGAIN}")
        version = raw.pop("version", None)
        if version != VERSION:
            raise ConfigError(
                f"{where}: version: got {version!r}, expected {VERSION}: another stronghold wrote "
                f"it; {_AGAIN}"
            )
        try:
            return TypeAdapter(cls).validate_json(json.dumps(raw))
        except ValidationError as error:
            known = [field.name for field in dataclasses.fields(cls)]
            raise ConfigError(f"{where}: {explain(error, 'profile', known)}; {_AGAIN}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON, whole or not at all. Missing directories are made."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> MachineProfile:
        """Read a shipped profile by its name, or any profile by its path.

        ConfigError if there is none, or if it cannot be read.
        """
        name = os.fspath(path_or_name)
        path = Path(name).expanduser()
        if name in machine_names():
            path = MACHINES / f"{name}.json"
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError:
            known = machine_names()
            raise ConfigError(
                f"machine profile {name!r}: no such file, and no machine of that name."
                f"{did_you_mean(name, known)} Known machines: {', '.join(known)}; "
                "`stronghold doctor` measures this one"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"machine profile {name!r}: cannot be read: {error}") from error


def machine_names() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def default_path(gpu: str | None = None) -> Path:
    """The path of this machine's profile: one file per host and kind of GPU.

    `gpu` is None for the emulated device. STRONGHOLD_PROFILE overrides the path, unless it names a
    shipped profile.
    """
    chosen = os.environ.get(ENVIRONMENT)
    if chosen and chosen not in machine_names():
        return Path(chosen).expanduser()
    return _folder() / f"{_slug(platform.node())}-{_slug(gpu or EMULATED)}.json"


def find_profile() -> MachineProfile | None:
    """Read this machine's profile. None if the machine was never measured.

    1. STRONGHOLD_PROFILE, a path or a shipped name, comes first. ConfigError if it is missing.
    2. Else the newest profile of this host in the cache, a GPU's before the emulated device's.
    3. A file in the cache that cannot be read counts as absent, with a warning.
    """
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return MachineProfile.load(chosen)
    emulated = default_path()
    order: list[tuple[bool, float, str, Path]] = []
    for path in _folder().glob(f"{_slug(platform.node())}-*.json"):
        order.append((path == emulated, -path.stat().st_mtime, path.name, path))
    return _first_readable(path for *_, path in sorted(order))


def profile_of(gpu: str | None) -> MachineProfile | None:
    """Read the profile of this host with this GPU, as `find_profile` does. `gpu` is None for the
    emulated device."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return MachineProfile.load(chosen)
    path = default_path(gpu)
    return _first_readable([path] if path.exists() else [])


def _first_readable(paths: Iterable[Path]) -> MachineProfile | None:
    for path in paths:
        try:
            return MachineProfile.load(path)
        except ConfigError as error:
            _logger.warning("%s", error)
    return None


def _divided(rate: float | None, num_ranks: int) -> float | None:
    return None if rate is None else rate / num_ranks


def _folder() -> Path:
    """The folder of measured profiles."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "stronghold"


def _slug(text: str) -> str:
    """The text as a piece of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def rates_of(
    machine: MachineProfile,
    cpu_threads: int,
    *,
    sharing: int = 1,
    num_nodes: int = 1,
    network_gbps: float | None = None,
    states: str = "exact",
) -> Rates:
    """The rates of one rank's lanes on `machine`.

    cpu_threads   threads of the rank for the CPU's Adam
    sharing       ranks of a node. Each has a link; together they divide the bandwidth of host
                  memory and disks
    network_gbps  rate at which a rank receives from other nodes; None: NETWORK_GBPS
    """
    share = machine.share(sharing)
    wire = machine.fetch_gbps  # of a rank from its node: assumed to be that of its link
    network = network_gbps or NETWORK_GBPS
    read = share.nvme_read_gbps or 1.0 / sharing
    write = share.nvme_write_gbps or 1.0 / sharing
    # A node's gradients are added over its wire, then the nodes' sums over the network.
    within_node = (sharing - 1) / sharing
    between_nodes = (num_nodes - 1) / (num_nodes * sharing)
    received = 1 - 1 / (sharing * num_nodes)
    reduce = wire
    if received:
        reduce = received / (within_node / wire + between_nodes / network)
    alone = machine.adam_rate(cpu_threads, states)
    together = machine.adam_rate(cpu_threads * sharing, states) / sharing
    return Rates(
        fetch_gbps=machine.fetch_gbps,
        offload_gbps=machine.offload_gbps,
        duplex_gbps=machine.duplex_gbps,
        update_gbps=min(alone, together),
        memory_gbps=share.memory_gbps,
        reduce_gbps=reduce,
        exchange_gbps=network,
        device_gbps=machine.gpu_memory_gbps,
        load_gbps=read,
        spill_gbps=write,
        io_gbps=share.nvme_mixed_gbps or max(read, write),
        launch_s=LAUNCH_S,
        recompute_launch_s=RECOMPUTE_LAUNCH_S,
    )
