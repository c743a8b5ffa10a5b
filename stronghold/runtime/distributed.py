"""The ranks that train one model together: who they are, and the groups in which they talk.

Owns the process groups and the watch of one engine. Never moves a byte of a layer: `runtime.ranks`
does, through these groups. One rank has no `Ranks` at all: its engine asks nobody.

Every group is entered by one thread, so that its collectives come in one order on every rank:
  gather    the gather lane: weights, layer by layer, among the ranks of a node
  reduce    the reduce lane: gradients, layer by layer
  flags     the reduce lane: which of them came, between CPUs
  exchange  the exchange lane: updated weights, layer by layer, among the peers of several nodes
  files     the io lane, and the training thread while that is idle: checkpoints
  control   the training thread: the gate, barriers
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import bwc
from torch import distributed

from stronghold.errors import ConfigError
from stronghold.model.shards import Shards
from stronghold.runtime.ranks.group import Group
from stronghold.runtime.ranks.nodes import Nodes, nodes_of, share_of_cores, this_node
from stronghold.runtime.ranks.watch import Watch

logger = logging.getLogger("stronghold")

GATHER, REDUCE, FILES, CONTROL, EXCHANGE = range(5)


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
    """The data-parallel ranks of this process, which has range `shards.rank` of every layer, and is
    `index` of `num_local` on its node, one of `num_nodes`. `norms` are the model-parallel ranks,
    over which norms are summed, or None. `files` are the ranks that save together, `company`: of
    all slices of the model.
    """

    def __init__(self, mpu: Any, *, on_gpu: bool, silence_s: float) -> None:
        self.global_rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.model_parallel_rank, self.model_parallel_size = model_parallel_place(mpu)
        backend = "nccl" if on_gpu else "gloo"
        with contextlib.ExitStack() as undo:
            meeting = _Meeting(mpu, undo)
            own, self.members = meeting.own, meeting.own.members
            nodes, place = own.nodes, self.members.index(self.global_rank)
            self.control = meeting.group("gloo", CONTROL, lambda found: [found.members])
            self.gather = meeting.group(backend, GATHER, Found.of_nodes)
            self.reduce = meeting.group(
                backend,
                REDUCE,
                lambda found: [found.globally(found.nodes.by_range)],
                order=list(map(nodes.range_of, range(len(self.members)))),
                num_far=len(self.members) - len(nodes.nodes[0]),
            )
            self.flags = self.reduce
            if on_gpu or meeting.on_several_nodes:  # whose order is that of ranges
                self.flags = meeting.group("gloo", REDUCE, lambda found: [found.members])
            self.files = meeting.group("gloo", FILES, lambda found: [found.company])
            self.norms: Group | None = None
            if self.model_parallel_size > 1:
                self.norms = meeting.group("gloo", CONTROL, lambda found: [found.units])
            self.exchange: Group | None = None
            if meeting.on_several_nodes:
                self.exchange = meeting.group(
                    "gloo", EXCHANGE, Found.of_peers, num_far=nodes.num_nodes - 1
                )
            self.counts_duplicates = self.model_parallel_rank == 0
            self.rank, self.num_nodes = place, nodes.num_nodes
            self.node, self.index = nodes.place(place)
            self.num_local = len(nodes.nodes[self.node])
            self.shards = Shards(
                num_ranks=len(self.members), rank=nodes.range_of(place), num_nodes=self.num_nodes
            )
            self.company, self.node_name = own.company, meeting.node_name
            self.of_node = OfNode(self.control, nodes.nodes[self.node])
            self.watch = meeting.watch(silence_s, self.files)
            for group in self._groups():
                group.watch = self.watch
            self.watch.on_loss = self._abort
            meeting.end()
            undo.pop_all()
        allowed = self.of_node.of_node(sorted(os.sched_getaffinity(0)))
        self.cores = share_of_cores(allowed, self.index)
        self._closed = False

    def _groups(self) -> list[Group]:
        groups = (self.norms, self.exchange, self.files, self.flags, self.reduce, self.gather)
        each = dict.fromkeys((*groups, self.control))  # one may be two
        return [group for group in each if group is not None]

    @property
    def num_ranks(self) -> int:
        return self.shards.num_ranks

    @property
    def received_bytes(self) -> int:
        """Bytes of weights and gradients that this rank has received from others."""
        return sum(group.received_bytes for group in self._groups())

    @property
    def received_from_nodes_bytes(self) -> int:
        """Those of them that came from ranks of other nodes."""
        return sum(group.far_bytes for group in self._groups())

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


def _around(mine: str, words: list[str]) -> str:
    """The place where the first other text departs from this one."""
    other = next((word for word in words if word != mine), "")
    at = next((k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), -1)
    begin = max(0, at - 40)
    return f"...{mine[begin : begin + 80]!r}, elsewhere ...{other[begin : begin + 80]!r}"


def _members(group: Any) -> list[int]:
    return [int(rank) for rank in distributed.get_process_group_ranks(group)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the process of one rank belongs to, in global numbers: `members` share its part of the
    model, `units` have the parts, `company` is all of them. `nodes` are the places of `members`.
    """

    members: list[int]
    units: list[int]
    company: list[int]
    nodes: Nodes

    def globally(self, places: Sequence[int]) -> list[int]:
        return [self.members[place] for place in places]

    def of_nodes(self) -> list[list[int]]:
        return [self.globally(places) for places in self.nodes.nodes]

    def of_peers(self) -> list[list[int]]:
        return [self.globally(self.nodes.peers(place)) for place in self.nodes.nodes[0]]


class _Meeting:
    """All processes of the program, while they find out who is where and make their groups."""

    def __init__(self, mpu: Any, undo: contextlib.ExitStack) -> None:
        self._world = list(range(distributed.get_world_size()))
        self._undo = undo
        self._rank = distributed.get_rank()
        members, units = self._world, [self._rank]
        if mpu is not None:
            members = _members(mpu.get_data_parallel_group())
            if model_parallel_place(mpu)[1] > 1:
                units = _members(bwc.bwc_tensor_model_parallel_group(mpu))
        everyone = Group(self._world, [self._world], "gloo", CONTROL)
        undo.callback(everyone.close)
        self._everyone = everyone
        said: Any = everyone.objects((members, units, this_node()))
        self._node_of = [node for _, _, node in said]
        self._found = [self._find(*of_rank[:2]) for of_rank in said]
        self.own = self._found[self._rank]

    def _find(self, members: list[int], units: list[int]) -> Found:
        whole = len(units) > 1
        return Found(
            members=members,
            units=units,
            company=self._world if whole else members,
            nodes=nodes_of([self._node_of[rank] for rank in members]),
        )

    @property
    def on_several_nodes(self) -> bool:
        return any(found.nodes.num_nodes > 1 for found in self._found)

    def group(
        self,
        backend: str,
        number: int,
        of: Callable[[Found], list[list[int]]],
        *,
        order: Sequence[int] | None = None,
        num_far: int = 0,
    ) -> Group:
        """This process's group of those that `of` names; every process makes its own of them."""
        every = sorted({tuple(ranks) for found in self._found for ranks in of(found)})
        mine = next(ranks for ranks in of(self.own) if self._rank in ranks)
        group = Group(mine, every, backend, number, order=order, num_far=num_far)
        self._undo.callback(group.close)
        return group

    @property
    def node_name(self) -> str:
        return str(self._node_of[self._rank][0])

    def end(self) -> None:
        """Every process has made its groups."""
        self._everyone.close()

    def watch(self, silence_s: float, company: Group) -> Watch:
        """Over all ranks that this one may wait for."""
        ranks = self.own.company
        nodes = [self._node_of[rank] for rank in ranks]
        mine = ranks.index(self._rank)
        local = [i for i, node in enumerate(nodes) if node == nodes[mine]]
        names = [str(node[0]) for node in nodes]
        return Watch(ranks, names, local, mine, silence_s, OfNode(company, local))


class OfNode:
    """A group as `memory.shared` sees it; `local` are the places of this node's ranks in it."""

    def __init__(self, group: Group, local: Sequence[int]) -> None:
        self._group = group
        self._local = local

    def of_node(self, mine: object) -> list[object]:
        found = self._group.objects(mine)
        return [found[place] for place in self._local]

    def of_all(self, mine: object) -> list[object]:
        return self._group.objects(mine)

    def barrier(self) -> None:
        self._group.barrier()
