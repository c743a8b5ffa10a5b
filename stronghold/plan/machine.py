"""The machine: rates and sizes of one, measured by `stronghold doctor` or shipped, and the rates
that a simulated rank has of it.

Pure: no tensors, no threads, no clock. Owns the JSON of a profile and where a machine's own lies;
never measures anything. Rates are sustained, in 1e9 bytes per second (`*_gbps`) or FLOP per second;
sizes are bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stronghold.errors import ConfigError, did_you_mean, explain
from stronghold.process import write_whole

VERSION = 1
MACHINES = Path(__file__).parent / "machines"
ENVIRONMENT = "STRONGHOLD_PROFILE"
EMULATED = "emulated"

NETWORK_GBPS = 25.0  # between nodes, unless it is said: 200 Gb/s for each GPU
# What Adam with lean states moves in a second, of what the exact one does, where the profile does
# not say: it computes more for fewer bytes. benchmarks/results/adam_lean_amd-epyc.md has 0.61 for
# one of two cores, and 0.83 for both, which share their memory as those of large machines do.
LEAN_RATE = 0.83
LEAST_SHARE = 0.05  # a lane keeps this share of its own rate, however busy the others are
# Seconds of the calling thread for a block's forward, and for its backward: it runs the module's
# Python, our hooks, and launches the kernels. In a model that is whole on the device there are no
# hooks. A block that is computed again costs its forward once more, under autograd's hooks.
# benchmarks/results/host-time_emulated-cpu_2026-11-23.md has them for a layer and step, on one core
# of an EPYC: 1.50 ms with hooks, 0.89 ms without, 0.89 ms more for computing again.
LAUNCH_S = 7.5e-4
WHOLE_LAUNCH_S = 4.5e-4
RECOMPUTE_LAUNCH_S = 8.9e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the lanes reach, in 1e9 bytes/s, and the seconds that a hand-over costs.

    `duplex_gbps` is the sum of both directions of the link when both are busy; `update_gbps` the
    CPU Adam's, `memory_gbps` the host memory's as a whole; `io_gbps` the sum of loads and spills
    when both are busy; `device_gbps` the device memory's; `wire_gbps` what comes from other ranks
    of the node, `reduce_gbps` the gradients from all ranks, `exchange_gbps` the weights from other
    nodes. `handover_s` passes between a submission and its lane's start. `*launch_s` are the
    calling thread's seconds for a block's forward or backward (`LAUNCH_S`).
    """

    fetch_gbps: float
    drain_gbps: float
    duplex_gbps: float
    update_gbps: float
    memory_gbps: float
    device_gbps: float
    load_gbps: float = 1.0
    spill_gbps: float = 1.0
    io_gbps: float = 2.0
    wire_gbps: float = 25.0
    reduce_gbps: float = 25.0
    exchange_gbps: float = 25.0
    handover_s: float = 3e-5
    launch_s: float = 0.0
    whole_launch_s: float = 0.0
    recompute_launch_s: float = 0.0


# `states.States.adam_bytes` of bf16 weights and gradients, with exact and with lean states.
ADAM_BF16_BYTES, ADAM_LEAN_BYTES = 26, 12.25
_logger = logging.getLogger("stronghold")


_AGAIN = "write it again with `stronghold doctor`"
Count = Annotated[int, Field(ge=1, lt=1 << 53)]
Rate = Annotated[float, Field(gt=0)]
Threads = Annotated[int, Field(ge=1, lt=10**9, strict=False)]  # JSON's keys are strings
ByThreads = Annotated[dict[Threads, Rate], Field(min_length=1)]
Dtype = Annotated[str, Field(pattern="^(bf16|fp16|fp32)$")]
ByDtype = Annotated[dict[Dtype, Rate], Field(min_length=3)]
Size = Annotated[int, Field(ge=1, lt=10**9, strict=False)]
ByWidth = Annotated[dict[Size, Rate], Field(min_length=1)]
ByTokensAndWidth = Annotated[dict[Size, ByWidth], Field(min_length=1)]
OfAttention = Annotated[dict[Dtype, ByTokensAndWidth], Field(min_length=3)]


@dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
    config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False),
)
class MachineProfile:
    """What a machine can do. ValidationError for a rate that is not a positive, finite number.

    `measured` is the ISO date, "" for a shipped profile, whose `sources` say where its rates come
    from. `emulated`: the device is CPU memory. Its compute runs on the calling thread, so that
    launches add to the time of compute. `fetch_gbps` and `drain_gbps` are pinned host -> device and
    device -> host, each alone; `duplex_gbps` is the sum when both run. `memory_gbps` is the host
    memory's by number of threads, with the mix of accesses of Adam; `adam_gbps` the CPU Adam's, in
    `ADAM_BF16_BYTES` per parameter; `adam_lean_gbps` with lean states, in `ADAM_LEAN_BYTES`.
    `flops` is a large matrix product's on the device. `gpu_memory_gbps` counts what a copy on the
    device reads and writes. `attention_flops` is fused attention's forward with a causal mask, by
    tokens of a sequence and width of a head; `attention_backward_flops` its backward's. Both count
    all pairs of tokens, also those that a kernel skips, and backward as twice forward. `nvme_*` are
    transfers past the page cache at the best depth, `nvme_mixed_gbps` the sum of both directions.
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
    drain_gbps: Rate
    duplex_gbps: Rate
    memory_gbps: ByThreads
    adam_gbps: ByThreads
    flops: ByDtype
    gpu_memory_gbps: Rate
    attention_flops: OfAttention | None = None
    attention_backward_flops: OfAttention | None = None
    adam_lean_gbps: ByThreads | None = None
    nvme_read_gbps: Rate | None = None
    nvme_write_gbps: Rate | None = None
    nvme_mixed_gbps: Rate | None = None
    nvme_path: str = ""

    def memory_rate(self, threads: int) -> float:
        """Host memory bandwidth with so many threads, in 1e9 bytes/s: between two measured numbers
        of threads on the line between them, outside them the nearest."""
        return _interpolate(self.memory_gbps, threads)

    def adam_rate(self, threads: int, states: str = "exact") -> float:
        """The CPU Adam's rate with so many threads, as `memory_rate`."""
        if states == "lean" and self.adam_lean_gbps is not None:
            return _interpolate(self.adam_lean_gbps, threads)
        return _interpolate(self.adam_gbps, threads) * (LEAN_RATE if states == "lean" else 1.0)

    def attention_s(
        self,
        dtype: str,
        *,
        tokens: int,
        width: int,
        causal_flops: float,
        other_flops: float = 0.0,
    ) -> tuple[float, float]:
        """Seconds of fused attention's forward, and of its backward, over sequences of so many
        tokens, with heads of this width. The FLOPs are of forward and count all pairs. A kernel
        skips half of them under a causal mask, so that others take twice as long. A profile in
        which attention was not measured takes the rate of matrix products for all."""
        if self.attention_flops is None or self.attention_backward_flops is None:
            seconds = (causal_flops + other_flops) / self.flops[dtype]
            return seconds, 2 * seconds
        flops = causal_flops + 2 * other_flops
        forward, backward = (
            _interpolate(
                {
                    length: _interpolate(by_width, width)
                    for length, by_width in rates[dtype].items()
                },
                tokens,
            )
            for rates in (self.attention_flops, self.attention_backward_flops)
        )
        return flops / forward, 2 * flops / backward

    def share(self, num_ranks: int) -> MachineProfile:
        """The machine as one of its ranks has it: a GPU and a link, and a part of the bandwidth of
        memory and disks."""
        disk = (self.nvme_read_gbps, self.nvme_write_gbps, self.nvme_mixed_gbps)
        read, write, mixed = (rate and rate / num_ranks for rate in disk)
        return dataclasses.replace(
            self,
            memory_gbps={count: rate / num_ranks for count, rate in self.memory_gbps.items()},
            nvme_read_gbps=read,
            nvme_write_gbps=write,
            nvme_mixed_gbps=mixed,
        )

    def to_json(self) -> str:
        """The profile with its version, as JSON that a person can read and edit."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> MachineProfile:
        """The profile of `to_json`; ConfigError, naming `where`, for anything else."""
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
        """Write the JSON, whole or not at all, making the directories that are missing."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> MachineProfile:
        """A shipped profile by name, or any by path; ConfigError where there is none."""
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
    """Where this machine's profile lies: one file per host and kind of GPU (None: the emulated
    device), or the one that STRONGHOLD_PROFILE names, if that is no shipped one."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen and chosen not in machine_names():
        return Path(chosen).expanduser()
    return _folder() / f"{_slug(platform.node())}-{_slug(gpu or EMULATED)}.json"


def find_profile() -> MachineProfile | None:
    """This machine's own profile, None if it was never measured: the newest of this host's, a GPU's
    before the emulated device's. STRONGHOLD_PROFILE, a path or a shipped name, overrides that and
    must exist; a file in the cache that cannot be read counts as absent, with a warning."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return MachineProfile.load(chosen)
    emulated = default_path()
    found = _folder().glob(f"{_slug(platform.node())}-*.json")
    order = sorted(found, key=lambda path: (path == emulated, -path.stat().st_mtime, path.name))
    for path in order:
        try:
            return MachineProfile.load(path)
        except ConfigError as error:
            _logger.warning("%s", error)
    return None


def _interpolate(rates: Mapping[int, float], count: int) -> float:
    """The rate for a count of threads or tokens, or for a width: on the line between two known
    ones, outside them the nearest."""
    known = sorted(rates)
    if count <= known[0]:
        return rates[known[0]]
    for low, high in itertools.pairwise(known):
        if count <= high:
            share = (count - low) / (high - low)
            return rates[low] + share * (rates[high] - rates[low])
    return rates[known[-1]]


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stronghold"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def rates_of(
    machine: MachineProfile,
    cpu_threads: int,
    *,
    sharing: int = 1,
    num_nodes: int = 1,
    wire_gbps: float | None = None,
    network_gbps: float | None = None,
    states: str = "exact",
) -> Rates:
    """The lanes' rates on `machine` with so many threads for the CPU's Adam. `sharing` ranks of
    each of `num_nodes` nodes have a link each, and divide the bandwidth of host memory and disks;
    `wire_gbps` is what a rank receives from its node (None: as over its link), `network_gbps` from
    others."""
    share = machine.share(sharing)
    wire, network = wire_gbps or machine.fetch_gbps, network_gbps or NETWORK_GBPS
    read, write = share.nvme_read_gbps or 1.0 / sharing, share.nvme_write_gbps or 1.0 / sharing
    # Of gradients a node's are added on its wire, the sums of its ranks' parts over the network.
    within, between = (sharing - 1) / sharing, (num_nodes - 1) / (num_nodes * sharing)
    received = 1 - 1 / (sharing * num_nodes)
    alone, together = (
        machine.adam_rate(cpu_threads * ranks, states) / ranks for ranks in (1, sharing)
    )
    return Rates(
        fetch_gbps=machine.fetch_gbps,
        drain_gbps=machine.drain_gbps,
        duplex_gbps=machine.duplex_gbps,
        update_gbps=min(alone, together),
        memory_gbps=share.memory_rate(max(machine.memory_gbps)),
        wire_gbps=wire,
        reduce_gbps=received / (within / wire + between / network) if received else wire,
        exchange_gbps=network,
        device_gbps=machine.gpu_memory_gbps,
        load_gbps=read,
        spill_gbps=write,
        io_gbps=share.nvme_mixed_gbps or max(read, write),
        launch_s=LAUNCH_S,
        whole_launch_s=WHOLE_LAUNCH_S,
        recompute_launch_s=RECOMPUTE_LAUNCH_S,
    )
