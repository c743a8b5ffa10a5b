"""The ranks that train one model together: who they are, and the groups in which they talk.

Owns the process groups and the watch of one engine. Never moves a byte of a layer: `runtime.ranks`
does, through these groups. One rank has no `Ranks` at all: its engine asks nobody.

Every group is entered by one thread, so that its collectives come in one order on every rank:
  gather    the gather lane: weights, layer by layer
  reduce    the reduce lane: gradients, layer by layer
  flags     the reduce lane: which of them came, between CPUs
  files     the io lane, and the training thread while that is idle: checkpoints
  control   the training thread: the gate, barriers
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any

import torch
from deepspeed.utils import bwc
from torch import distributed

from stronghold.errors import ConfigError
from stronghold.model.shards import Shards
from stronghold.runtime.ranks.group import Group
from stronghold.runtime.ranks.watch import Watch

logger = logging.getLogger("stronghold")

GATHER, REDUCE, FILES, CONTROL = range(4)


def world_size() -> int:
    """How many processes the launcher started, or the process group has."""
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def data_parallel_size(mpu: Any) -> int:
    """How many ranks share the model's state: all, or those of `mpu`'s data-parallel group."""
    if mpu is None or world_size() == 1:
        return world_size()
    if not hasattr(mpu, "get_data_parallel_world_size"):  # DeepSpeed's of sequence parallelism
        raise ConfigError(
            "mpu: has no get_data_parallel_world_size; pass none, or one that has it."
        )
    return int(mpu.get_data_parallel_world_size())


def model_parallel_place(mpu: Any) -> tuple[int, int]:
    """This rank among those that have a part of the model each, and how many they are."""
    if mpu is None or world_size() == 1:
        return 0, 1
    return (
        int(bwc.bwc_tensor_model_parallel_rank(mpu)),
        int(bwc.bwc_tensor_model_parallel_world_size(mpu)),
    )


def join(mpu: Any, *, on_gpu: bool, silence_s: float) -> Ranks | None:
    """The ranks of this process's engine; None for one alone. Every rank calls it, with the process
    group initialised. ConfigError on every rank when they cannot train together.
    """
    if world_size() == 1:
        return None
    if not distributed.is_initialized():
        raise ConfigError(
            f"WORLD_SIZE: got {world_size()}, but torch.distributed is not initialised: leave "
            "dist_init_required out, or call deepspeed.init_distributed() first"
        )
    return Ranks(mpu, on_gpu=on_gpu, silence_s=silence_s)


def places_of(ranks: Ranks | None) -> tuple[int, int, int]:
    """The global rank, the number of processes, and how many share the model's state."""
    return (0, 1, 1) if ranks is None else (ranks.global_rank, ranks.world_size, ranks.num_ranks)


class Ranks:
    """The data-parallel ranks of this process, which is `shards.rank` of `shards.num_ranks`, and
    `index` of `num_local` on its node. `norms` are the model-parallel ranks, over which norms are
    summed, or None.
    """

    def __init__(self, mpu: Any, *, on_gpu: bool, silence_s: float) -> None:
        world = range(distributed.get_world_size())
        members = list(world) if mpu is None else _members(mpu.get_data_parallel_group())
        backend = "nccl" if on_gpu else "gloo"
        with contextlib.ExitStack() as undo:
            make = _Maker(members, undo)
            self.control = make.group("gloo", CONTROL)
            self.gather = make.group(backend, GATHER)
            self.reduce = make.group(backend, REDUCE)
            self.flags = make.group("gloo", REDUCE) if on_gpu else self.reduce
            self.files = make.group("gloo", FILES)
            self.norms = _norms(mpu, undo)
            self.counts_duplicates = model_parallel_place(mpu)[0] == 0
            self.shards = Shards(num_ranks=len(members), rank=self.control.rank)
            self.members = members
            self.global_rank, self.world_size = distributed.get_rank(), len(world)
            nodes = self.control.objects(_node())
            self.local = [i for i, node in enumerate(nodes) if node == nodes[self.control.rank]]
            if len(self.local) != len(members):
                raise ConfigError(
                    f"the {len(members)} data-parallel ranks are on {len(set(nodes))} nodes "
                    f"({len(self.local)} on {socket.gethostname()}): this release trains on the "
                    "GPUs of one node"
                )
            self.index, self.num_local = self.control.rank, len(self.local)
            self.watch = Watch(members, self.index, silence_s, self.control)
            for group in self._groups():
                group.watch = self.watch
            self.watch.on_loss = self._abort
            undo.pop_all()
        self.cores = _share_of_cores(
            self.control.objects(sorted(os.sched_getaffinity(0))), self.index
        )
        self._closed = False

    @property
    def rank(self) -> int:
        """This rank among those that share the model's state."""
        return self.shards.rank

    @property
    def num_ranks(self) -> int:
        return self.shards.num_ranks

    @property
    def received_bytes(self) -> int:
        """Bytes of weights and gradients that this rank has received from others."""
        return self.gather.received_bytes + self.reduce.received_bytes

    def least(self, number: int) -> int:
        """The least of every rank's number."""
        return int(self.control.numbers(torch.tensor([number]), "least").min())

    def check_same(self, described: dict[str, str]) -> None:
        """ConfigError, on every rank, when one describes a thing differently."""
        of_all = self.control.objects(described)
        for what, mine in described.items():
            words = [found[what] for found in of_all if isinstance(found, dict)]
            if len(set(words)) > 1:
                raise ConfigError(
                    f"{what} differ{'' if what.endswith('s') else 's'} between the ranks: here "
                    f"{_around(mine, words)}. Build one model and read one config on every rank"
                )

    def _abort(self) -> None:
        """A rank is lost: end the kernels that wait for it on this GPU, which nobody else can."""
        for group in (self.gather, self.reduce):
            group.abort()

    def close(self) -> None:
        """Leave the groups. Waits for nobody; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.watch.close()
        for group in self._groups():
            group.close()

    def _groups(self) -> list[Group]:
        made = (self.norms, self.files, self.flags, self.reduce, self.gather, self.control)
        return [group for group in made if group is not None]


def _around(mine: str, words: list[str]) -> str:
    """The place where the first other text departs from this one."""
    other = next((word for word in words if word != mine), "")
    at = next((k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), -1)
    begin = max(0, at - 40)
    return f"...{mine[begin : begin + 80]!r}, elsewhere ...{other[begin : begin + 80]!r}"


def _members(group: Any) -> list[int]:
    return [int(rank) for rank in distributed.get_process_group_ranks(group)]


class _Maker:
    """Makes groups of `members`, while other processes make theirs."""

    def __init__(self, members: list[int], undo: contextlib.ExitStack) -> None:
        found: list[Any] = [None] * distributed.get_world_size()
        if len(members) < len(found):
            distributed.all_gather_object(found, members)
        else:
            found = [members]
        self._members, self._undo = members, undo
        self._all = sorted({tuple(ranks) for ranks in found})

    def group(self, backend: str, number: int) -> Group:
        group = Group(self._members, [list(ranks) for ranks in self._all], backend, number)
        self._undo.callback(group.close)
        return group


def _norms(mpu: Any, undo: contextlib.ExitStack) -> Group | None:
    if model_parallel_place(mpu)[1] == 1:
        return None
    return _Maker(_members(bwc.bwc_tensor_model_parallel_group(mpu)), undo).group("gloo", CONTROL)


def _node() -> tuple[str, str, int]:
    """What processes that can share memory have in common: machine, boot and process namespace."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return socket.gethostname(), boot, os.stat("/proc/self/ns/pid").st_ino


def _share_of_cores(allowed: list[object], index: int) -> tuple[int, ...]:
    """This rank's cores of those that the node's ranks may use: all of its own where the launcher
    has bound them apart, else an equal part of the common ones. Neighbours in number are neighbours
    in memory: Linux numbers the cores of a NUMA node one after the other, hyper-threads later.
    """
    sets = [set(cores) for cores in allowed if isinstance(cores, list)]
    mine = sets[index]
    sharing = [i for i, other in enumerate(sets) if other & mine]
    if len(sharing) == 1:
        return tuple(sorted(mine))
    cores = sorted(mine)
    place, count = sharing.index(index), len(sharing)
    begin, end = place * len(cores) // count, (place + 1) * len(cores) // count
    return tuple(cores[begin:end]) or (cores[place % len(cores)],)
