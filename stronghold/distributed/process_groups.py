"""The process groups of the ranks that train one model together.

Owns torch's groups of one engine, and the mesh of its data-parallel ranks: `replicate` between
nodes, `shard` within a node (HSDP). Never decides what is moved or when: every rank calls the same
methods in the same order.

Each group has one thread, so that its collectives come in one order on every rank:
  gather    the gather lane: all-gather of weights, layer by layer, within a node
  reduce    the reduce lane: reduce-scatter of gradients, layer by layer, over all ranks
  exchange  the exchange lane: all-gather of updated weights, layer by layer, between nodes
  files     the io lane, and the training thread while that is idle: checkpoints
  control   the training thread: the gate, barriers

A node is what can share memory. Two containers on one host are two nodes, and two launches in one
process namespace are one. The environment variable STRONGHOLD_NODE overrides that: ranks with the
same value are a node.

[Note: one order of collectives]
1. Over gloo every collective begins with an all-gather of its name, which has one size.
2. If the names are equal, the collective runs.
3. If they differ, every rank of the group raises RankError, which lists each rank's name. Without
   step 2 gloo ends the process when sizes differ, and mixes layers when they do not.
4. Over NCCL the names are not compared. The gate compares checksums of what was gathered and
   reduced, before any weight changes. Collectives that never match end by NCCL's time-out.
5. A collective that another rank never comes to ends by its time-out (`connections`).

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
So `_connect` connects both, before the engine has lanes: the training thread makes one collective
of one element per rank in the group of gathers, waits until the GPU has done it, and does the same
in the group of reductions. All ranks come in this order. Lanes of an earlier engine go on
meanwhile: its groups are connected, and no rank's lane waits for a training thread. What the
communicators take is gone from the GPU's free bytes before the plan reads these. What NCCL adds
later, for a larger collective, is not.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from stronghold.devices import cuda
from stronghold.distributed.connections import ADVICE, Connections
from stronghold.distributed.node_identity import boot_id, pid_namespace
from stronghold.errors import BudgetError, ConfigError, RankError
from stronghold.memory.neighbours import ALONE, Neighbours
from stronghold.model.layout import Shards

logger = logging.getLogger("stronghold")

Result = TypeVar("Result")

NODE_VARIABLE = "STRONGHOLD_NODE"
# Errors that a user can mend keep their class on the other ranks.
MENDABLE: dict[str, type[ValueError]] = {"ConfigError": ConfigError, "BudgetError": BudgetError}
LABEL_BYTES = 96  # of a collective's name
SHARED_NUMEL = 1 << 22  # elements that ranks give each other at once
PIECE_NUMEL = 1 << 18  # elements that are added at once: they stay in the cache

# Newer releases of torch have new names for both.
_all_gather: Callable[..., Any] = getattr(
    distributed, "all_gather_single", distributed.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = getattr(
    distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor
)


class Group:
    """Collectives of the ranks `members` on `backend`.

    `members` are global rank numbers. This rank is at place `rank` of them. `handle`: torch's group
    of them. `order`: the members' places in the order in which the mean adds them. `num_far`
    members are on other nodes. `connections` explain a failure.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        *,
        handle: Any = None,
        backend: str = "gloo",
        order: Sequence[int] | None = None,
        num_far: int = 0,
        connections: Connections | None = None,
    ) -> None:
        self.members, self.rank, self.num_ranks = list(members), rank, len(members)
        self.handle = handle
        self._backend = backend
        self._order = order or range(len(members))
        self._num_far = num_far
        self._connections = connections
        self.received_bytes = self.far_bytes = 0

    # -- of layers --------------------------------------------------------------------------------
    def gather(self, whole: torch.Tensor, shard: torch.Tensor, operation: str) -> None:
        """All-gather: fill `whole` with every rank's equal part, in order. `shard`: this rank's
        view of it."""
        self._run(operation, _all_gather, whole.view(torch.uint8), shard.view(torch.uint8))
        self._count(whole)

    def mean(self, whole: torch.Tensor, room: torch.Tensor | None, operation: str) -> None:
        """Reduce-scatter: put the mean over the ranks into this rank's equal part of `whole`.

        The other parts are undefined then. `room` has as many elements as `whole`; NCCL needs none.
        """
        share = whole.numel() // self.num_ranks
        shard = whole[self.rank * share : (self.rank + 1) * share]
        if self._backend == "nccl":
            self._run(
                operation, partial(_reduce_scatter, op=distributed.ReduceOp.AVG), shard, whole
            )
        else:
            assert room is not None
            pieces = room[: whole.numel()]
            source = whole.view(torch.uint8)
            self._run(operation, distributed.all_to_all_single, pieces.view(torch.uint8), source)
            mean_of(pieces.view(self.num_ranks, share), shard, self._order)
        self._count(whole)

    def send(self, whole: torch.Tensor, operation: str) -> None:
        """Broadcast the first rank's `whole` to all others. gloo alone."""
        self._run(operation, partial(distributed.broadcast, group_src=0), whole.view(torch.uint8))

    def _count(self, whole: torch.Tensor) -> None:
        share = whole.numel() * whole.element_size() // self.num_ranks
        self.received_bytes += share * (self.num_ranks - 1)
        self.far_bytes += share * self._num_far

    # -- of numbers and objects -------------------------------------------------------------------
    def numbers(self, values: torch.Tensor, operation: str) -> torch.Tensor:
        """All-gather flat CPU tensors of one length. Returns (ranks, elements)."""
        rows = values.new_empty(self.num_ranks, values.numel())
        self._run(operation, _all_gather, rows.view(-1), values)
        return rows

    def objects(self, value: object, operation: str = "exchange") -> list[object]:
        """All-gather objects. Returns them by rank."""
        objects: list[object] = [None] * self.num_ranks
        self._run(operation, distributed.all_gather_object, objects, value)
        return objects

    def all_or_raise(
        self,
        work: Callable[[], Result],
        elsewhere: Callable[[int, str, str], Exception],
        operation: str = "exchange",
    ) -> Result:
        """Call `work` on every rank and return this rank's result.

        If it raises on one rank, all ranks raise: that rank its own error, the others the result of
        `elsewhere(rank, class of the error, its text)`.
        """
        results: list[Result] = []
        failure: BaseException | None = None
        try:
            results.append(work())
        except BaseException as error:
            failure = error
        report = None if failure is None else (type(failure).__name__, str(failure))
        reports: list[Any] = self.objects(report, operation)
        if failure is not None:
            raise failure
        for rank, words in zip(self.members, reports, strict=True):
            if words is not None:
                raise elsewhere(rank, *words)
        return results[0]

    def barrier(self, operation: str = "barrier") -> None:
        """Return when every rank has called it."""
        self.numbers(torch.zeros(1, dtype=torch.uint8), operation)

    # -- waiting ----------------------------------------------------------------------------------
    def _run(self, operation: str, collective: Callable[..., Any], *arguments: Any) -> None:
        """Run a collective of torch.

        Raises RankError if another rank has gone, does not come within the group's time-out, or has
        come for another operation.
        """
        assert self._connections is not None
        if self._connections.failure is not None:
            raise self._connections.failure
        try:
            if self._backend != "nccl":
                self._check_same(operation)
            collective(*arguments, group=self.handle)
        except RankError as error:
            self._connections.end(error)
            raise
        except RuntimeError as error:
            raise self._connections.explain(operation, error) from error

    def _check_same(self, operation: str) -> None:
        """Raise RankError on every rank unless all have come for `operation` ([Note: one order of
        collectives])."""
        label = torch.zeros(LABEL_BYTES, dtype=torch.uint8)
        text = operation.encode()[:LABEL_BYTES]
        label[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        labels = label.new_empty(self.num_ranks, LABEL_BYTES)
        _all_gather(labels.view(-1), label, group=self.handle)
        if bool((labels == label).all()):
            return
        names = (bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in labels)
        pairs = zip(self.members, names, strict=True)
        raise RankError(
            "the ranks have come for different operations: "
            f"{', '.join(f'rank {rank} for {name}' for rank, name in pairs)}. Every rank must call "
            "forward, backward and step equally often, and use the same layers in one order. "
            f"{ADVICE}"
        )

    def close(self) -> None:
        """Leave the group. Harmless when the program has ended all groups before."""
        handle, self.handle = self.handle, None
        if handle is not None and distributed.is_initialized():
            distributed.destroy_process_group(handle)


class SilentGroup(Group):
    """A group without communication, for one process: collectives return their input."""

    def __init__(self, num_ranks: int = 1) -> None:
        super().__init__(range(num_ranks), 0)

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, operation: str) -> None:
        self._count(whole)

    def mean(self, whole: torch.Tensor, room: torch.Tensor | None, operation: str) -> None:
        self._count(whole)

    def numbers(self, values: torch.Tensor, operation: str) -> torch.Tensor:
        return values.expand(self.num_ranks, values.numel())

    def objects(self, value: object, operation: str = "exchange") -> list[object]:
        return [value] * self.num_ranks


def mean_of(pieces: torch.Tensor, target: torch.Tensor, order: Sequence[int]) -> None:
    """Write the mean of the rows of `pieces` (ranks, elements) to `target`. Rows are added in
    `order` ([Note: the mean])."""
    for begin in range(0, target.numel(), PIECE_NUMEL):
        part = pieces[:, begin : begin + PIECE_NUMEL]
        total = part[order[0]].float()
        for row in order[1:]:
            total = total + part[row]
        target[begin : begin + PIECE_NUMEL] = total / len(order)


# -- places ----------------------------------------------------------------------------------------
def this_node() -> tuple[object, ...]:
    """Return what identifies this node: machine, boot and process namespace, or the value of
    STRONGHOLD_NODE. The first element is for people."""
    if named := os.environ.get(NODE_VARIABLE):
        return (named,)
    return socket.gethostname(), boot_id(), pid_namespace()


def mesh_of(node_of: Sequence[object]) -> torch.Tensor:
    """Return the ranks by node, as a mesh: (nodes, ranks of a node).

    Nodes are in the order of their first ranks. `node_of[rank]`: the rank's `this_node`. Raises
    ConfigError if some nodes have more ranks than others.
    """
    nodes: dict[object, list[int]] = {}
    for rank, node in enumerate(node_of):
        nodes.setdefault(node, []).append(rank)
    sizes = [len(ranks) for ranks in nodes.values()]
    if len(set(sizes)) > 1:
        names = [node[0] if isinstance(node, tuple) else node for node in nodes]
        counts = ", ".join(f"{size} on {name}" for size, name in zip(sizes, names, strict=True))
        raise ConfigError(
            f"the {len(node_of)} data-parallel ranks are divided unequally over {len(sizes)} nodes "
            f"({counts}): start as many on each"
        )
    return torch.tensor(list(nodes.values()))


def share_of_cores(allowed: Sequence[object], index: int) -> tuple[int, ...]:
    """Return the cores of the node's rank `index`. `allowed[k]`: cores that rank k may use.

    They are the rank's cores if the launcher has bound ranks apart, else an equal part of the
    common ones. Neighbours in number are neighbours in memory: Linux numbers a NUMA node's cores
    one after the other, hyper-threads later.
    """
    sets = [set(cores) for cores in allowed if isinstance(cores, list)]
    usable = sets[index]
    sharing = [i for i, other in enumerate(sets) if other & usable]
    if len(sharing) == 1:
        return tuple(sorted(usable))
    cores = sorted(usable)
    position, count = sharing.index(index), len(sharing)
    begin, end = position * len(cores) // count, (position + 1) * len(cores) // count
    return tuple(cores[begin:end]) or (cores[position % len(cores)],)


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


class NodeRanks(Neighbours):
    """`Neighbours` over `group`; `local` are the places of this node's ranks in it."""

    def __init__(self, group: Group, local: Sequence[int]) -> None:
        self._group = group
        self._local = local
        self.index, self.count = local.index(group.rank), len(local)

    def of_node(self, value: Result) -> list[Result]:
        values = self._group.objects(value)
        return [cast(Result, values[place]) for place in self._local]

    def of_all(
        self, value: Result, operation: str = "set-up", *, beside: bool = False
    ) -> list[Result]:
        return cast(list[Result], self._group.objects(value))

    def barrier(self) -> None:
        self._group.barrier()

    def together(self, work: Callable[[], Result]) -> list[Result]:
        return self.of_node(self._group.all_or_raise(work, _failed_elsewhere))


def _failed_elsewhere(rank: int, kind: str, words: str) -> Exception:
    if kind in MENDABLE:
        return MENDABLE[kind](f"rank {rank}: {words}")
    return RankError(f"rank {rank}: {kind}: {words}")


@dataclass(slots=True, kw_only=True)
class Ranks:
    """The data-parallel ranks that train one model, and this rank's place among them.

    * `control`: all of them. This rank has range `shards.rank` of every layer.
    * `mesh`: dimensions `replicate` and `shard`, over the groups `exchange` and `gather` (HSDP).
    * `files`: all of them, for saves beside training.
    * `on_node`: ranks of `control` that share this rank's memory.
    * `on_disks`: ranks of `files` that share its disks.
    * `cores`: this rank's cores, if ranks divide the node's.
    * `communicator_bytes`: GPU memory of NCCL's communicators.
    * `timeout`: time-out of every wait for other ranks.

    Without arguments it describes one process.
    """

    shards: Shards = field(default_factory=Shards)
    control: Group = field(default_factory=SilentGroup)
    gather: Group = field(default_factory=SilentGroup)
    reduce: Group = field(default_factory=SilentGroup)
    exchange: Group = field(default_factory=SilentGroup)
    files: Group = field(default_factory=SilentGroup)
    mesh: DeviceMesh | None = None
    global_rank: int = 0
    world_size: int = 1
    node_name: str = ""
    on_node: Neighbours = ALONE
    on_disks: Neighbours = ALONE
    cores: tuple[int, ...] = ()
    communicator_bytes: int = 0
    connections: Connections | None = None
    timeout: timedelta = timedelta()
    closed: bool = False

    @property
    def rank(self) -> int:
        return self.global_rank

    @property
    def index(self) -> int:
        return self.on_node.index

    @property
    def count(self) -> int:
        return self.on_node.count

    def of_all(self, value: Any, operation: str = "set-up", *, beside: bool = False) -> list[Any]:
        return (self.files if beside else self.control).objects(value, operation)

    @property
    def several(self) -> bool:
        """True if there are other ranks, with other data."""
        return self.world_size > 1

    @property
    def num_nodes(self) -> int:
        return self.shards.num_nodes

    @property
    def groups(self) -> list[Group]:
        return [self.exchange, self.files, self.reduce, self.gather, self.control]

    @property
    def num_ranks(self) -> int:
        return self.shards.num_ranks

    @property
    def received_bytes(self) -> int:
        """Bytes of weights and gradients that this rank has received from others."""
        return sum(group.received_bytes for group in self.groups)

    @property
    def received_from_nodes_bytes(self) -> int:
        """Bytes of weights and gradients that came from ranks of other nodes."""
        return sum(group.far_bytes for group in self.groups)

    def least(self, number: int) -> int:
        """Return the least of every rank's number."""
        return int(self.control.numbers(torch.tensor([number]), "least").min())

    def complete(self, flat: torch.Tensor, operation: str) -> None:
        """Fill in the fp32 elements that other ranks own. Each rank has zeros for those before."""
        if self.num_ranks > 1:
            for bits in flat.view(torch.int32).split(SHARED_NUMEL):
                rows = self.control.numbers(bits.clone(), operation)
                bits.copy_(rows.sum(dim=0, dtype=torch.int32))

    def check_same(self, described: dict[str, str]) -> None:
        """Raise ConfigError on every rank if one rank's description differs."""
        descriptions = self.control.objects(described)
        for what, description in described.items():
            texts = [other[what] for other in descriptions if isinstance(other, dict)]
            if len(set(texts)) > 1:
                verb = "differ" if what.endswith("s") else "differs"
                raise ConfigError(
                    f"{what} {verb} between the ranks: here {_around(description, texts)}. Build "
                    "one model and read one config on every rank"
                )

    def check(self, operation: str) -> None:
        """Raise RankError if a rank has gone."""
        if self.connections is not None:
            self.connections.check(operation)

    def fail(self, reason: str) -> None:
        """End this rank's groups, because it cannot go on. No rank waits in them afterwards."""
        if self.connections is not None:
            self.connections.end(RankError(f"this rank cannot go on: {reason}. {ADVICE}"))

    def close(self) -> None:
        """Leave the groups. Waits for no other rank. Safe to call twice."""
        if not self.closed:
            self.closed = True
            self.mesh = None
            for group in self.groups:
                group.close()
            if self.connections is not None:
                self.connections.close()


def join(*, device: torch.device | None, timeout: timedelta) -> Ranks:
    """Make the groups of this process's engine. Every rank calls it.

    `device`: the GPU; None: CPU memory. torch's process group is initialised. Raises RankError if a
    rank has gone, or does not come within `timeout`. Raises ConfigError on every rank if they
    cannot train together.
    """
    if world_size() == 1:
        return Ranks()
    check_initialized()
    with contextlib.ExitStack() as undo:
        ranks = _join("gloo" if device is None else "nccl", timeout, undo)
        if device is not None:
            _connect(ranks, device)
        undo.pop_all()
        return ranks


def check_initialized() -> None:
    """Raise ConfigError without a process group of torch's."""
    if not distributed.is_initialized():
        raise ConfigError(
            f"WORLD_SIZE: got {world_size()}, but torch.distributed is not initialised: leave "
            "dist_init_required out, or call deepspeed.init_distributed() first"
        )


@contextlib.contextmanager
def joining(operation: str) -> Iterator[None]:
    """Context manager for the first collectives of torch. Their errors become RankError."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"{operation}: not all ranks have come, or one has gone: {error}. Its own output has "
            "the cause. Start all ranks again; stronghold.rank_timeout_s is how long they are "
            "waited for"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Makes groups. Each process makes all of them, and is in one. `undo` leaves them."""

    rank: int
    timeout: timedelta
    connections: Connections
    undo: contextlib.ExitStack

    def make(self, backend: str, every: Iterable[Sequence[int]], **more: Any) -> Group:
        """Make the groups `every`, and return the one that has this process."""
        # Hazard of local synchronisation: torch uses the names of such groups again. The second
        # engine of a program would look for the addresses of the first.
        made: dict[tuple[int, ...], Any] = {}
        for members in sorted({tuple(members) for members in every}):
            try:
                made[members] = new_group(members, backend, self.timeout)
            except RuntimeError as error:
                raise self.connections.explain("making process groups", error) from error
        members = next(members for members in made if self.rank in members)
        group = Group(
            members,
            members.index(self.rank),
            handle=made[members],
            backend=backend,
            connections=self.connections,
            **more,
        )
        if len(members) > 1:
            self.connections.add(group.handle, backend, members[group.rank - 1])
        self.undo.callback(group.close)
        return group


def new_group(members: Sequence[int], backend: str, timeout: timedelta) -> Any:
    """Make a group of torch with its ranks in the order of `members`. Every process calls it."""
    options: dict[str, Any] = {"backend": backend, "timeout": timeout}
    if list(members) != sorted(members):
        if "sort_ranks" not in inspect.signature(distributed.new_group).parameters:
            raise ConfigError(
                f"several nodes with several ranks each need a torch whose new_group has "
                f"sort_ranks (2.13 has it): got {torch.__version__}"
            )
        options["sort_ranks"] = False
    return distributed.new_group(list(members), **options)


def _join(backend: str, timeout: timedelta, undo: contextlib.ExitStack) -> Ranks:
    rank, world = distributed.get_rank(), range(distributed.get_world_size())
    node_of: list[Any] = [None for _ in world]
    with joining("stronghold.initialize"):
        handle = new_group(world, "gloo", timeout)
        distributed.all_gather_object(node_of, this_node(), group=handle)
    connections = Connections(world, handle)
    undo.callback(connections.close)
    mesh = mesh_of(node_of)
    by_index = mesh.T  # the ranks of each index, by node
    node = int((mesh == rank).nonzero()[0, 0])
    num_nodes, num_local = mesh.shape
    by_range = by_index.flatten().tolist()
    maker = _Maker(rank=rank, timeout=timeout, connections=connections, undo=undo)
    ranks = Ranks(
        shards=Shards(num_ranks=len(world), rank=by_range.index(rank), num_nodes=num_nodes),
        control=maker.make("gloo", [world]),
        gather=maker.make(backend, mesh.tolist()),
        reduce=maker.make(
            backend,
            [by_range],
            order=list(map(by_range.index, world)),
            num_far=len(world) - num_local,
        ),
        exchange=maker.make("gloo", by_index.tolist(), num_far=num_nodes - 1),
        files=maker.make("gloo", [world]),
        global_rank=rank,
        world_size=len(world),
        node_name=str(node_of[rank][0]),
        connections=connections,
        timeout=timeout,
    )
    ranks.mesh = DeviceMesh.from_group(
        [ranks.exchange.handle, ranks.gather.handle],
        "cpu" if backend == "gloo" else "cuda",
        mesh,
        mesh_dim_names=("replicate", "shard"),
    )
    ranks.on_node = NodeRanks(ranks.control, mesh[node].tolist())
    same_disks = [other for other in world if node_of[other] == node_of[rank]]
    ranks.on_disks = NodeRanks(ranks.files, same_disks)
    return ranks


def _connect(ranks: Ranks, device: torch.device) -> None:
    """Make NCCL's communicators ([Note: communicators]), and count what they take."""
    before = cuda.physical_bytes(device.index)
    operation = "connecting the GPUs"
    for group in (ranks.gather, ranks.reduce):
        if group.num_ranks == 1:
            continue
        whole = torch.ones(group.num_ranks, device=device)
        if group is ranks.gather:
            group.gather(whole, whole[group.rank : group.rank + 1], operation)
        else:
            group.mean(whole, None, operation)
        cuda.wait_for_queued(device.index, partial(ranks.check, operation))
        group.received_bytes = group.far_bytes = 0  # of layers alone
    ranks.communicator_bytes = before - cuda.physical_bytes(device.index)
    logger.info("communicators take %.2f GiB of %s", ranks.communicator_bytes / 2**30, device)


def _around(text: str, texts: list[str]) -> str:
    """Quote this text and the first other one, around the place where they differ."""
    other = next((candidate for candidate in texts if candidate != text), "")
    place = next((k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), -1)
    begin = max(0, place - 40)
    return f"...{text[begin : begin + 80]!r}, elsewhere ...{other[begin : begin + 80]!r}"
