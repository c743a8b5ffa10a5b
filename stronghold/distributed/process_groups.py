"""The ranks that train one model together: who they are, and the groups in which they talk.

Owns the process groups and the watch of one engine. Never decides what is moved or when: every rank
calls the same methods in the same order. A process that is alone says all to itself. A
wait for other ranks ends with RankError when one of them is lost (`watch`).

Every group is entered by one thread, so that its collectives come in one order on every rank:
  gather    the gather lane: weights, layer by layer, among the ranks of a node
  reduce    the reduce lane: gradients, layer by layer
  exchange  the exchange lane: updated weights, layer by layer, among the peers of several nodes
  files     the io lane, and the training thread while that is idle: checkpoints
  control   the training thread: the gate, barriers

A node is what can share memory. Processes do when they see each other's files in /proc, so two
containers on one host are two nodes, and two launches in one process namespace are one. The
environment variable STRONGHOLD_NODE overrides that: ranks with the same value are a node.

[Note: the mean] On the CPU a rank gets every rank's piece of its own range and adds them in fp32,
in the order of the ranks, with one rounding at the end: as many bytes as a ring, and the sum that
one rank gets that accumulates as many micro-batches. NCCL adds in its own order.

[Note: communicators] A group on NCCL is made, then connected, then closed. The first collective
connects it: NCCL makes the communicator, which allocates on the GPU and waits for the group's other
ranks. The allocation may wait for all that the GPU does. Where lanes make both communicators, this
can happen:
  1. Rank 0's gather lane queues a gather; its kernel waits on the GPU for rank 1's
  2. Rank 0's reduce lane connects its group; the allocation waits for that kernel
  3. Rank 1's reduce lane connects the group and waits for rank 0; it holds the driver's lock, and
     rank 1's gather lane cannot queue the kernel that rank 0's waits for
  4. Neither goes on
So `_join` connects both, before the engine has lanes: the training thread makes one collective of
one element per rank in the group of gathers, waits until the GPU has done it, and does the same in
the group of reductions. All ranks come in this order. Lanes of an earlier engine go on meanwhile:
its groups are connected, and no rank's lane waits for a training thread. What the communicators
take is gone from the GPU's free bytes before the plan reads these. What NCCL adds later, for a
larger collective, is not.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from deepspeed.utils import bwc
from torch import distributed
from torch.distributed import distributed_c10d

from stronghold.device import cuda
from stronghold.device.base import only_waits
from stronghold.distributed.meeting import JOINING, Attendance, Meeting, set_timeout
from stronghold.distributed.watch import Watch
from stronghold.errors import BudgetError, ConfigError, RankError
from stronghold.model.layout import Shards
from stronghold.process import ALONE, Neighbours, boot_id, pid_namespace

logger = logging.getLogger("stronghold")

Result = TypeVar("Result")

NODE_VARIABLE = "STRONGHOLD_NODE"
GATHER, REDUCE, FILES, CONTROL, EXCHANGE = range(5)  # a group's number in the watch's rows
# What the user can mend is said in the same class everywhere.
MENDABLE: dict[str, type[ValueError]] = {"ConfigError": ConfigError, "BudgetError": BudgetError}
SLICE_S = 1.0  # of a wait, after which the others are looked at
SAY_EVERY_S = 60.0  # who is waited for
PIECE_NUMEL = 1 << 18  # elements that are added at once: they stay in the cache

# Newer releases of torch have new names for both.
_all_gather: Callable[..., Any] = getattr(
    distributed, "all_gather_single", distributed.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = getattr(
    distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor
)


class Collective(enum.Enum):
    """What a group of layers does."""

    GATHER = enum.auto()
    MEAN = enum.auto()


class Group:
    """The ranks `members` (global numbers, this one at place `rank`) on `backend`, in the order
    given; `handle` is torch's group of them, `number` its place in the watch's rows. `order`: the
    members' places in the order in which the mean adds them. `num_far` of them are on other nodes.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        *,
        handle: Any = None,
        backend: str = "gloo",
        number: int = 0,
        order: Sequence[int] | None = None,
        num_far: int = 0,
    ) -> None:
        self.members, self.rank, self.num_ranks = list(members), rank, len(members)
        self._handle = handle
        self._backend = backend
        self._number = number
        self._order = order or range(len(members))
        self._num_far = num_far
        self._lost: RankError | None = None  # the group is of no use from then on
        self.watch: Watch | None = None
        self.received_bytes = self.far_bytes = 0

    @classmethod
    def open(
        cls,
        members: Sequence[int],
        all_members: Sequence[Sequence[int]],
        backend: str,
        number: int,
        timeout_s: float | None = None,
        **more: Any,
    ) -> Group:
        """`all_members`: the groups that all processes of the program make now, in one order; they
        make them together. RuntimeError when one does not come within `timeout_s`."""
        # Not with local synchronisation: torch uses the names of such groups again, and the second
        # engine of a program would look for the addresses of the first.
        made = [_new_group(list(ranks), backend, timeout_s) for ranks in all_members]
        handle = made[[list(ranks) for ranks in all_members].index(list(members))]
        rank = list(members).index(distributed.get_rank())
        return cls(members, rank, handle=handle, backend=backend, number=number, **more)

    # -- of layers --------------------------------------------------------------------------------
    def gather(self, whole: torch.Tensor, own: torch.Tensor, operation: str) -> None:
        """Fill `whole` with every rank's equal part in order; `own` is this rank's view of it."""
        target, source = whole.view(torch.uint8), own.view(torch.uint8)
        if self._backend == "nccl":
            self._begin_on_stream(operation)
            _all_gather(target, source, group=self._handle)
        else:
            self._run(
                operation,
                lambda: _all_gather(target, source, group=self._handle, async_op=True),
            )
        self._count(whole)

    def mean(self, whole: torch.Tensor, room: torch.Tensor | None, operation: str) -> None:
        """Put the mean over the ranks of `whole` into this rank's equal part of it; the other parts
        are then undefined. `room` has as many elements as `whole`; NCCL needs none."""
        share = whole.numel() // self.num_ranks
        own = whole[self.rank * share : (self.rank + 1) * share]
        if self._backend == "nccl":
            self._begin_on_stream(operation)
            average = distributed.ReduceOp.AVG
            _reduce_scatter(own, whole, op=average, group=self._handle)
        else:
            assert room is not None
            pieces = room[: whole.numel()]
            target, source = pieces.view(torch.uint8), whole.view(torch.uint8)
            self._run(
                operation,
                lambda: distributed.all_to_all_single(
                    target, source, group=self._handle, async_op=True
                ),
            )
            mean_of(pieces.view(self.num_ranks, share), own, self._order)
        self._count(whole)

    def send(self, whole: torch.Tensor, operation: str) -> None:
        """Give the first rank's `whole` to all others (gloo alone)."""
        data = whole.view(torch.uint8)
        self._run(
            operation,
            lambda: distributed.broadcast(data, group_src=0, group=self._handle, async_op=True),
        )

    def connect(self, device: torch.device, collective: Collective) -> None:
        """Make NCCL's communicator on `device` by a collective of one element per rank, and wait
        for that ([Note: communicators]). RankError when a rank is lost meanwhile."""
        if self.num_ranks == 1:
            return
        operation = "connecting the GPUs"
        whole = torch.ones(self.num_ranks, device=device)
        if collective is Collective.GATHER:
            self.gather(whole, whole[self.rank : self.rank + 1], operation)
        else:
            self.mean(whole, None, operation)
        cuda.wait_for_queued(device.index, lambda: self._look(operation))
        self.received_bytes = self.far_bytes = 0  # of layers

    def _look(self, operation: str) -> None:
        if self.watch is not None:
            self.watch.check(operation, self.members)

    def _count(self, whole: torch.Tensor) -> None:
        share = whole.numel() * whole.element_size() // self.num_ranks
        self.received_bytes += share * (self.num_ranks - 1)
        self.far_bytes += share * self._num_far

    # -- of numbers and objects -------------------------------------------------------------------
    def numbers(self, mine: torch.Tensor, operation: str) -> torch.Tensor:
        """Every rank's flat CPU tensor of one length, by rank."""
        found = mine.new_empty(self.num_ranks, mine.numel())
        self._run(
            operation,
            lambda: _all_gather(found.view(-1), mine, group=self._handle, async_op=True),
        )
        return found

    def objects(self, mine: object, operation: str = "exchange") -> list[object]:
        """Every rank's object, by rank."""
        data = pickle.dumps(mine)
        sizes = self.numbers(torch.tensor([len(data)]), operation).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.numbers(padded, operation)
        pairs = zip(rows, sizes, strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in pairs]

    def all_or_raise(
        self,
        work: Callable[[], Result],
        elsewhere: Callable[[int, str, str], Exception],
        operation: str = "exchange",
    ) -> Result:
        """What `work` returns here. When it raises on one rank, all raise: that one its own error,
        the others what `elsewhere` makes of that rank, of the error's class and of its words."""
        results: list[Result] = []
        failure: BaseException | None = None
        try:
            results.append(work())
        except BaseException as error:
            failure = error
        said = None if failure is None else (type(failure).__name__, str(failure))
        of_all: list[Any] = self.objects(said, operation)
        if failure is not None:
            raise failure
        for rank, words in zip(self.members, of_all, strict=True):
            if words is not None:
                raise elsewhere(rank, *words)
        return results[0]

    def barrier(self, operation: str = "barrier") -> None:
        """Return when every rank has called it."""
        self.numbers(torch.zeros(1, dtype=torch.uint8), operation)

    # -- waiting ----------------------------------------------------------------------------------
    def _begin_on_stream(self, operation: str) -> None:
        """What is only enqueued waits for nobody: look whether all are there."""
        if self.watch is not None:
            self.watch.begin(self._number, operation, self.members)
            self.watch.end(self._number)
            self.watch.check(operation, self.members)

    @only_waits
    def _run(self, operation: str, start: Callable[[], Any]) -> None:
        if self._lost is not None:
            raise self._lost
        if self.watch is not None:
            self.watch.begin(self._number, operation, self.members)
        begun, said = time.monotonic(), SAY_EVERY_S
        try:
            work = start()
            while not self._wait(work):
                if self.watch is None:
                    continue
                self.watch.check(operation, self.members)
                if (waited := time.monotonic() - begun) > said:
                    said += SAY_EVERY_S
                    behind = self.watch.behind(self._number, self.members)
                    logger.warning("%s waits for %s since %.0f s", operation, behind, waited)
        except RankError as error:
            self._lost = error
            raise
        except RuntimeError as error:
            if self.watch is None:
                raise
            self._lost = self.watch.explain(operation, self._number, self.members, error)
            raise self._lost from error
        finally:
            if self.watch is not None:
                self.watch.end(self._number)

    def _wait(self, work: Any) -> bool:
        """Whether the work ends within a slice of time; raises its error."""
        try:
            work.wait(timedelta(seconds=SLICE_S))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # its own error, or it ended just now
        return True

    def abort(self) -> None:
        """End what runs on the GPU for this group: its lane's fences pass, and the lane's next
        operation fails. Without effect on the CPU, where whoever waits looks around by itself."""
        if self._backend == "nccl" and self._handle is not None:
            with contextlib.suppress(RuntimeError):  # ended by itself meanwhile
                self._handle.abort()

    def close(self) -> None:
        """Leave the group; harmless when the program has ended all groups before."""
        handle, self._handle = self._handle, None
        if handle is not None and distributed.is_initialized():
            distributed.destroy_process_group(handle)


class SilentGroup(Group):
    """Ranks of a simulation, and a process that is alone: everybody says what this one says, at
    once, and what is sent moves the lane's clock alone."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(range(num_ranks), 0)

    def gather(self, whole: torch.Tensor, own: torch.Tensor, operation: str) -> None:
        self._count(whole)

    def mean(self, whole: torch.Tensor, room: torch.Tensor | None, operation: str) -> None:
        self._count(whole)

    def numbers(self, mine: torch.Tensor, operation: str) -> torch.Tensor:
        return mine.expand(self.num_ranks, mine.numel())

    def objects(self, mine: object, operation: str = "exchange") -> list[object]:
        return [mine] * self.num_ranks


class StoreGroup(Group):
    """The ranks `members` that talk in a `meeting`, before they have process groups: of numbers and
    objects alone."""

    def __init__(self, members: Sequence[int], rank: int, meeting: Meeting) -> None:
        super().__init__(members, rank)
        self._meeting = meeting

    def numbers(self, mine: torch.Tensor, operation: str) -> torch.Tensor:
        return torch.stack(self._meeting.objects(self.members, mine, operation))

    def objects(self, mine: object, operation: str = JOINING) -> list[object]:
        return self._meeting.objects(self.members, mine, operation)


def mean_of(pieces: torch.Tensor, target: torch.Tensor, order: Sequence[int]) -> None:
    """The mean of the rows of `pieces`, added in `order` ([Note: the mean])."""
    for begin in range(0, target.numel(), PIECE_NUMEL):
        part = pieces[:, begin : begin + PIECE_NUMEL]
        total = part[order[0]].float()
        for row in order[1:]:
            total = total + part[row]
        target[begin : begin + PIECE_NUMEL] = total / len(order)


def _new_group(ranks: list[int], backend: str, timeout_s: float | None) -> Any:
    """A new group of torch's, whose ranks gloo connects now: within `timeout_s`, if that is given.
    What the group does later has torch's own time-out."""
    if timeout_s is None or backend == "nccl":
        return _sorted_or_not(ranks, backend=backend)
    group = _sorted_or_not(ranks, backend=backend, timeout=timedelta(seconds=timeout_s))
    if distributed.get_rank() in ranks:
        set_timeout(group, distributed_c10d.default_pg_timeout)
    return group


def _sorted_or_not(ranks: list[int], **options: Any) -> Any:
    if ranks == sorted(ranks):
        return distributed.new_group(ranks, **options)
    if "sort_ranks" not in inspect.signature(distributed.new_group).parameters:
        raise ConfigError(
            f"several nodes with several ranks each need a torch whose new_group has sort_ranks "
            f"(2.13 has it): got {torch.__version__}"
        )
    return distributed.new_group(ranks, sort_ranks=False, **options)


# -- places ----------------------------------------------------------------------------------------
def this_node() -> tuple[object, ...]:
    """What processes that can share memory have in common, its first word for people: machine,
    boot and process namespace, or what the environment says."""
    if named := os.environ.get(NODE_VARIABLE):
        return (named,)
    return socket.gethostname(), boot_id(), pid_namespace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """`nodes[k]` are the global numbers of node k's ranks, in the order of their group; nodes are
    numbered as their first ranks are. All have as many: the j-th ranks of all nodes are peers."""

    nodes: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def place(self, rank: int) -> tuple[int, int]:
        """The rank's node and its index there."""
        return next((k, of.index(rank)) for k, of in enumerate(self.nodes) if rank in of)

    @property
    def peers(self) -> list[tuple[int, ...]]:
        """The ranks of each index, by node."""
        return list(zip(*self.nodes, strict=True))

    def range_of(self, rank: int) -> int:
        """Which range of every layer is the rank's ([Note: nodes] of `model.layout`)."""
        node, index = self.place(rank)
        return index * self.num_nodes + node

    @property
    def by_range(self) -> tuple[int, ...]:
        """The ranks in the order of their ranges."""
        return tuple(rank for of_index in self.peers for rank in of_index)


def nodes_of(found: Mapping[int, object]) -> Nodes:
    """The places of the ranks of a group, `found[rank]` being what `this_node` says there.
    ConfigError when some nodes have more ranks than others."""
    groups: dict[object, list[int]] = {}
    for rank, node in found.items():
        groups.setdefault(node, []).append(rank)
    sizes = [len(of) for of in groups.values()]
    if len(set(sizes)) > 1:
        names = [node[0] if isinstance(node, tuple) else node for node in groups]
        counts = ", ".join(f"{size} on {name}" for size, name in zip(sizes, names, strict=True))
        raise ConfigError(
            f"the {len(found)} data-parallel ranks are divided unequally over {len(sizes)} nodes "
            f"({counts}): start as many on each"
        )
    return Nodes(nodes=tuple(map(tuple, groups.values())))


def share_of_cores(allowed: Sequence[object], index: int) -> tuple[int, ...]:
    """The cores of the node's rank `index` of those that each may use: its own where the launcher
    has bound them apart, else an equal part of the common ones. Neighbours in number are neighbours
    in memory: Linux numbers a NUMA node's cores one after the other, hyper-threads later."""
    sets = [set(cores) for cores in allowed if isinstance(cores, list)]
    mine = sets[index]
    sharing = [i for i, other in enumerate(sets) if other & mine]
    if len(sharing) == 1:
        return tuple(sorted(mine))
    cores = sorted(mine)
    place, count = sharing.index(index), len(sharing)
    begin, end = place * len(cores) // count, (place + 1) * len(cores) // count
    return tuple(cores[begin:end]) or (cores[place % len(cores)],)


# -- who they are ----------------------------------------------------------------------------------
def local_rank_of(args: Any) -> int:
    """This process's number on its node: a launcher's argument, or its environment."""
    named = getattr(args, "local_rank", None)  # -1 where no launcher gave the argument
    given = os.environ.get("LOCAL_RANK", 0) if named is None or int(named) < 0 else named
    return int(given)


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


class NodeRanks(Neighbours):
    """`Neighbours` that talk in `group`; `local` are the places of this node's ranks in it."""

    def __init__(self, group: Group, local: Sequence[int]) -> None:
        self._group = group
        self._local = local
        self.index, self.count = local.index(group.rank), len(local)

    def of_node(self, mine: Result) -> list[Result]:
        found = self._group.objects(mine)
        return [cast(Result, found[place]) for place in self._local]

    def of_all(self, mine: Result) -> list[Result]:
        return cast(list[Result], self._group.objects(mine))

    def barrier(self) -> None:
        self._group.barrier()

    def together(self, work: Callable[[], Result]) -> list[Result]:
        return self.of_node(self._group.all_or_raise(work, _failed_elsewhere))


def _failed_elsewhere(rank: int, kind: str, words: str) -> Exception:
    if kind in MENDABLE:
        return MENDABLE[kind](f"rank {rank}: {words}")
    return RankError(f"rank {rank}: {kind}: {words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What one rank's process belongs to: `data_parallel` ranks, on `nodes`, share its part of the
    model, `model_parallel` ranks have the parts, `all_ranks` are those of all parts."""

    data_parallel: list[int]
    model_parallel: list[int]
    all_ranks: list[int]
    nodes: Nodes


@dataclass(slots=True, kw_only=True)
class Ranks:
    """The data-parallel ranks of this process, which are those of `control`; it has range
    `shards.rank` of every layer. `norms` are the model-parallel ranks, over which norms are summed,
    or None; `files` are the ranks of all parts of the model, which save together. `on_node` are
    those of `control` that share this rank's memory, `on_disks` those of `files` that share its
    disks. `cores` are its own, where it divides the node's with others. `communicator_bytes` of its
    GPU are NCCL's. Without arguments: a process that is alone."""

    shards: Shards = field(default_factory=Shards)
    control: Group = field(default_factory=lambda: SilentGroup(1))
    gather: Group = field(default_factory=lambda: SilentGroup(1))
    reduce: Group = field(default_factory=lambda: SilentGroup(1))
    files: Group = field(default_factory=lambda: SilentGroup(1))
    norms: Group | None = None
    exchange: Group | None = None
    global_rank: int = 0
    world_size: int = 1
    model_parallel_rank: int = 0
    model_parallel_size: int = 1
    node_name: str = ""
    on_node: Neighbours = ALONE
    on_disks: Neighbours = ALONE
    cores: tuple[int, ...] = ()
    communicator_bytes: int = 0
    watch: Watch | None = None
    closed: bool = False

    @property
    def several(self) -> bool:
        """Whether there are others, who have other data or other parts of the model."""
        return self.world_size > 1

    @property
    def num_nodes(self) -> int:
        return self.shards.num_nodes

    @property
    def groups(self) -> list[Group]:
        groups = (self.norms, self.exchange, self.files, self.reduce, self.gather, self.control)
        return [group for group in groups if group is not None]

    @property
    def num_ranks(self) -> int:
        return self.shards.num_ranks

    @property
    def received_bytes(self) -> int:
        """Bytes of weights and gradients that this rank has received from others."""
        return sum(group.received_bytes for group in self.groups)

    @property
    def received_from_nodes_bytes(self) -> int:
        """Those of them that came from ranks of other nodes."""
        return sum(group.far_bytes for group in self.groups)

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

    def fail(self, reason: str) -> None:
        """This rank cannot go on: the others shall not wait for it, nor it for them."""
        if self.watch is not None:
            self.watch.fail(reason)
        self.abort()

    def abort(self) -> None:
        """End the kernels that wait for other ranks on this GPU, which nobody else can."""
        for group in (self.gather, self.reduce):
            group.abort()

    def close(self) -> None:
        """Leave the groups. Waits for nobody; safe to call twice."""
        if not self.closed:
            self.closed = True
            if self.watch is not None:
                self.watch.close()
            for group in self.groups:
                group.close()


def join(mpu: Any, *, device: torch.device | None, attendance: Attendance) -> Ranks:
    """The ranks of this process's engine, which trains on the GPU `device` (None: on CPU memory).
    Every rank calls it, with the process group initialised. RankError when one is lost before that
    (`distributed.meeting`). ConfigError on every rank when they cannot train together."""
    if world_size() == 1:
        return Ranks()
    if not distributed.is_initialized():
        raise ConfigError(
            f"WORLD_SIZE: got {world_size()}, but torch.distributed is not initialised: leave "
            "dist_init_required out, or call deepspeed.init_distributed() first"
        )
    with contextlib.ExitStack() as undo:
        ranks = _join(mpu, "gloo" if device is None else "nccl", attendance, undo)
        if device is not None:
            _connect(ranks, device)
        undo.pop_all()
        return ranks


def _join(mpu: Any, backend: str, attendance: Attendance, undo: contextlib.ExitStack) -> Ranks:
    global_rank, world = distributed.get_rank(), list(range(distributed.get_world_size()))
    store: Any = distributed_c10d._get_default_store()
    silence_s = attendance.silence_s
    meeting = Meeting(store, global_rank, attendance, store.timeout.total_seconds())
    said = meeting.objects(world, (*_parallel_ranks(mpu, world), this_node()), JOINING)
    node_of = [node for _, _, node in said]
    memberships = [
        Membership(
            data_parallel=data_parallel,
            model_parallel=model_parallel,
            all_ranks=world if len(model_parallel) > 1 else data_parallel,
            nodes=nodes_of({rank: node_of[rank] for rank in data_parallel}),
        )
        for data_parallel, model_parallel, _ in said
    ]

    def make(
        backend: str, number: int, of: Callable[[Membership], Iterable[Sequence[int]]], **more: Any
    ) -> Group:
        """This process's group of those that `of` names; every process makes its own."""
        every = sorted({tuple(ranks) for each in memberships for ranks in of(each)})
        ranks = next(ranks for ranks in of(own) if global_rank in ranks)
        everyone, operation = {rank for ranks in every for rank in ranks}, "making process groups"
        watch.begin(number, operation, everyone)
        try:
            group = Group.open(ranks, every, backend, number, silence_s, **more)
        except RuntimeError as error:
            raise watch.explain(operation, number, everyone, error) from error
        finally:
            watch.end(number)
        undo.callback(group.close)
        group.watch = watch
        return group

    own, here = memberships[global_rank], node_of[global_rank]
    members, nodes, all_ranks = own.data_parallel, own.nodes, own.all_ranks
    node, index = nodes.place(global_rank)
    order = list(map(nodes.range_of, members))
    num_far = len(members) - len(nodes.nodes[node])
    local = [place for place, other in enumerate(all_ranks) if node_of[other] == here]
    names = [str(node_of[other][0]) for other in all_ranks]
    place = all_ranks.index(global_rank)
    met = NodeRanks(StoreGroup(all_ranks, place, meeting), local)
    watch = Watch(all_ranks, names, local, place, silence_s, met)
    undo.callback(watch.close)
    model_parallel_rank, model_parallel_size = model_parallel_place(mpu)
    ranks = Ranks(
        shards=Shards(
            num_ranks=len(members), rank=nodes.range_of(global_rank), num_nodes=nodes.num_nodes
        ),
        control=make("gloo", CONTROL, lambda each: [each.data_parallel]),
        gather=make(backend, GATHER, lambda each: each.nodes.nodes),
        reduce=make(
            backend, REDUCE, lambda each: [each.nodes.by_range], order=order, num_far=num_far
        ),
        files=make("gloo", FILES, lambda each: [each.all_ranks]),
        global_rank=global_rank,
        world_size=len(world),
        model_parallel_rank=model_parallel_rank,
        model_parallel_size=model_parallel_size,
        node_name=str(here[0]),
        watch=watch,
    )
    if model_parallel_size > 1:
        ranks.norms = make("gloo", CONTROL, lambda each: [each.model_parallel])
    if any(each.nodes.num_nodes > 1 for each in memberships):
        far = nodes.num_nodes - 1
        ranks.exchange = make("gloo", EXCHANGE, lambda each: each.nodes.peers, num_far=far)
    ranks.on_node = NodeRanks(ranks.control, [members.index(near) for near in nodes.nodes[node]])
    ranks.on_disks = NodeRanks(ranks.files, local)
    watch.on_loss = ranks.abort
    ranks.cores = share_of_cores(ranks.on_node.of_node(sorted(os.sched_getaffinity(0))), index)
    return ranks


def _connect(ranks: Ranks, device: torch.device) -> None:
    """Make NCCL's communicators ([Note: communicators]), and count what they take."""
    before = cuda.physical_bytes(device.index)
    ranks.gather.connect(device, Collective.GATHER)
    ranks.reduce.connect(device, Collective.MEAN)
    ranks.communicator_bytes = before - cuda.physical_bytes(device.index)
    logger.info("communicators take %.2f GiB of %s", ranks.communicator_bytes / 2**30, device)


def simulated_ranks(num_ranks: int, num_nodes: int) -> Ranks:
    """The first of so many, on virtual clocks: it stands for all of them."""
    everyone = SilentGroup(num_ranks)
    return Ranks(
        shards=Shards(num_ranks=num_ranks, num_nodes=num_nodes),
        control=everyone,
        gather=SilentGroup(num_ranks // num_nodes),
        reduce=everyone,
        files=everyone,
        exchange=SilentGroup(num_nodes),
        world_size=num_ranks,
    )


def _parallel_ranks(mpu: Any, world: list[int]) -> tuple[list[int], list[int]]:
    """The data-parallel and the model-parallel ranks of this process."""

    def members(group: Any) -> list[int]:
        return [int(rank) for rank in distributed.get_process_group_ranks(group)]

    data_parallel = world if mpu is None else members(mpu.get_data_parallel_group())
    if model_parallel_place(mpu)[1] == 1:
        return data_parallel, [distributed.get_rank()]
    return data_parallel, members(bwc.bwc_tensor_model_parallel_group(mpu))


def _around(mine: str, words: list[str]) -> str:
    """The place where the first other text departs from this one."""
    other = next((word for word in words if word != mine), "")
    at = next((k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), -1)
    begin = max(0, at - 40)
    return f"...{mine[begin : begin + 80]!r}, elsewhere ...{other[begin : begin + 80]!r}"
