"""The ranks that train one model: their nodes, the memory of a node, and what they send each other.

Each layer has one owner: the rank that updates it. Its masters and moments exist there alone.

[Note: weights in common]
1. The ranks of a node have one copy of the weights. The owner of a layer writes its new weights,
   and then its counter (release).
2. A rank that reads the layer waits for the counter of the last update (acquire).
3. Updates come after the clip barrier. At its end every rank gives the slots of all updated layers
   back. So a fetch that still reads old weights then fills a slot without a user.
4. Each node has a copy. An owner sends new weights to the rank of its place in every other node.

[Note: a rank fails]
1. A rank that cannot go on writes why to torch's store, and its number to the node's memory: the
   store ends with the process that has it. The first one's words stay. Then it closes its
   connections.
2. A rank whose process ends closes them, too. The ranks of its node see its end by a pidfd, those
   of others see a connection that is closed. They write what they see.
3. So an operation of another rank fails at once. This rank looks for the words, raises them, and
   closes its own connections.
4. A rank that hangs closes nothing. The operation fails by its time-out. The rank that has begun
   the fewest reductions is the one that hangs: the node's memory counts them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from stronghold import native
from stronghold.devices import cuda
from stronghold.devices.fences import Fence, LaneName
from stronghold.errors import ConfigError, RankError
from stronghold.optim.states import PAGE_BYTES
from stronghold.plan.cost import owners
from stronghold.train.layer import Layer
from stronghold.train.processes import RankGroup, joining, mesh_of, share_of_cores, this_node
from stronghold.train.slabs import NodeMemory

logger = logging.getLogger("stronghold")

POLL_S, LOOK_S = 5e-5, 0.05  # between two looks at a counter; at the other processes
CAUSE_S = 1.0  # a process that ends closes its connections before its pidfd shows it
TAG = 7  # of messages that no rank sends
_numbers = itertools.count()  # of the objects of this process, which all ranks make in one order


class Ranks(RankGroup):
    """The ranks that train one model. Every rank makes the same calls in the same order.

    has_nodes  there are several nodes

    Each group of torch has one thread, so that its collectives come in one order: `reduce` and
    `exchange` that of their lane, `control` the training thread, `files` the io lane.

    RankError if a rank does not come within `timeout`. ConfigError if some nodes have more ranks
    than others.
    """

    def __init__(self, *, device: torch.device | None, timeout: timedelta) -> None:
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._timeout = timeout
        every = range(self.num_ranks)
        self._control = self._group(every)
        infos: list[Any] = [None for _ in every]
        with joining("stronghold.initialize"):
            info = this_node(), os.getpid(), sorted(os.sched_getaffinity(0))
            distributed.all_gather_object(infos, info, group=self._control)
        mesh = mesh_of([node for node, *_ in infos]).tolist()
        self.node = next(number for number, row in enumerate(mesh) if self.rank in row)
        self.node_name = str(infos[self.rank][0][0])
        self._node = mesh[self.node]
        self.index, self.count = self._node.index(self.rank), len(self._node)
        self.has_nodes = self.count < self.num_ranks
        self.cores = share_of_cores([infos[rank][2] for rank in self._node], self.index)
        self._reduce = self._group(every, "gloo" if device is None else "nccl")
        self._files = self._group(every)
        exchanges = [self._group(column) for column in zip(*mesh, strict=True)]
        self._exchange = exchanges[self.index]
        self._groups: tuple[Any, ...] = (self._reduce, self._control, self._exchange, self._files)
        store = distributed_c10d._get_default_store()  # outlives connections
        self._store = distributed_c10d.PrefixStore(f"stronghold {next(_numbers)}", store)
        self._failure: RankError | None = None
        self._is_failing = threading.Lock()
        self._sent: list[Any] = []  # gloo keeps a message that nothing receives
        self._begun, self._failed = torch.zeros(self.count), torch.tensor(0)  # until `open`
        # A pidfd is readable once its process has ended.
        self._processes = {os.pidfd_open(infos[rank][1]): rank for rank in self._node}
        self.sent_bytes: Counter[str] = Counter()
        if device is not None:
            self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Make NCCL's connections now: they allocate, which may wait for all that the GPU does."""
        before = cuda.physical_bytes(device.index)
        numbers = torch.zeros(1, device=device)
        self._run("connecting the GPUs", distributed.all_reduce, numbers, group=self._reduce)
        cuda.wait_for_queued(device.index, self._check)
        self.device_bytes = before - cuda.physical_bytes(device.index)

    def _check(self) -> None:
        if (cause := self._cause()) is not None:
            raise self._explain("connecting the GPUs", cause, hangs=False)

    def _group(self, members: Sequence[int], backend: str = "gloo") -> Any:
        """Every rank makes every group."""
        with joining("stronghold.initialize"):
            return distributed.new_group(list(members), backend=backend, timeout=self._timeout)

    def open(self, layers: Sequence[Layer]) -> None:
        """Choose the owners of these layers, and make the node's memory for them. ConfigError if
        the ranks have different models."""
        self._refuse_other_models(layers)
        self._index = {layer: k for k, layer in enumerate(layers)}
        self._owner = owners([layer.trained_bytes for layer in layers], self.num_ranks)
        num_words = len(layers) + self.count + 1
        sizes = [8 * num_words, *(layer.num_bytes for layer in layers)]
        self._begins = [
            *itertools.accumulate(-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes)
        ]
        self.memory = NodeMemory("weights", self._begins[-1], self)
        # Of each layer: the updates that its weights have. Of each rank of the node: the reductions
        # that it has begun. And 1 more than the number of the rank that failed first, else 0.
        self._words = self.memory.part(0, num_words, torch.int64)
        self._begun, self._failed = self._words[len(layers) : -1], self._words[-1]

    def _refuse_other_models(self, layers: Sequence[Layer]) -> None:
        described = [
            f"{name} {dtype} {tuple(parameter.shape)}"
            + (" trained" if k < layer.num_trained else "")
            for layer in layers
            for k, (name, dtype, parameter) in enumerate(
                zip(layer.names, layer.dtypes, layer.parameters, strict=True)
            )
        ]
        for rank, other in enumerate(self.of_all(described)):
            for own, its in zip(described, other, strict=False):
                if own != its:
                    raise ConfigError(
                        f"the ranks have different models: rank {self.rank} has {own}, and rank "
                        f"{rank} has {its}. Build one model and read one config on every rank"
                    )
            if len(described) != len(other):
                raise ConfigError(
                    f"the ranks have different models: rank {self.rank} has {len(described)} "
                    f"parameters, and rank {rank} has {len(other)}"
                )

    # -- owners -----------------------------------------------------------------------------------
    def owner(self, layer: Layer) -> int:
        return self._owner[self._index[layer]]

    def owns(self, layer: Layer) -> bool:
        return self.owner(layer) == self.rank

    def receives(self, layer: Layer) -> bool:
        """True if the owner is on another node, and sends the weights to this rank."""
        owner = self.owner(layer)
        is_peer = owner in distributed.get_process_group_ranks(self._exchange)
        return self.has_nodes and is_peer and owner not in self._node

    # -- weights ----------------------------------------------------------------------------------
    def weights_of(self, layer: Layer) -> Tensor:
        """The node's copy: uint8 [num_bytes]."""
        begin = self._begins[self._index[layer]]
        return self.memory.part(begin, layer.num_bytes, torch.uint8)

    def publish(self, layer: Layer, version: int) -> None:
        """The node's copy has so many updates."""
        native.store(self._words[self._index[layer]], version)

    def has_weights(self, layer: Layer, version: int) -> bool:
        return native.load(self._words[self._index[layer]]) >= version

    def wait_for_weights(self, layer: Layer, version: int) -> None:
        """Block the calling thread until the node's copy has so many updates."""
        look = time.monotonic() + LOOK_S
        end = time.monotonic() + self._timeout.total_seconds()
        while not self.has_weights(layer, version):
            time.sleep(POLL_S)
            if time.monotonic() > look:
                look = time.monotonic() + LOOK_S
                if self._cause() is not None or look > end:
                    name, words = f"weights of {layer.name}", f"from rank {self.owner(layer)}"
                    raise self._explain(name, words, hangs=look > end)

    def send_weights(self, layer: Layer, source: int, weights: Tensor) -> None:
        """Send the weights from a rank to that of its place in every other node."""
        name, group = f"exchange {layer.name}", self._exchange
        self._run(name, distributed.broadcast, weights, src=source, group=group)

    def share_weights(self) -> None:
        """Give the copy of rank 0's node to all nodes. The training thread enters."""
        self.barrier()  # it has been written
        if self.index == 0 and self.has_nodes:
            for layer in self._index:
                self.send_weights(layer, 0, self.weights_of(layer))
        self.barrier()

    # -- gradients and numbers --------------------------------------------------------------------
    def reduce_to_owner(self, layer: Layer, gradients: Tensor) -> None:
        """Add gradients over the ranks, in a fixed order: a stream's work on a GPU."""
        self._begun[self.index] += 1
        owner, group = self.owner(layer), self._reduce
        self._run(f"reduce {layer.name}", distributed.reduce, gradients, dst=owner, group=group)

    def reduce_on_host(self, layer: Layer, gradients: Tensor) -> None:
        """Add late gradients over the ranks, in host memory. The training thread enters."""
        owner, group = self.owner(layer), self._control
        self._run(f"late {layer.name}", distributed.reduce, gradients, dst=owner, group=group)

    def add(self, numbers: Tensor) -> None:
        """Add numbers over the ranks."""
        self._run("clip barrier", distributed.all_reduce, numbers, group=self._control)

    def from_owner(self, layer: Layer, numbers: Tensor) -> None:
        """Fill these numbers with those of the layer's owner. The training thread enters."""
        source, group = self.owner(layer), self._control
        self._run(f"reading {layer.name}", distributed.broadcast, numbers, source, group=group)

    def barrier(self) -> None:
        self._run("barrier", distributed.barrier, group=self._control)

    def of_all(self, value: Any, operation: str = "set-up", *, beside: bool = False) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        group = self._files if beside else self._control
        self._run(operation, distributed.all_gather_object, values, value, group=group)
        return values

    def of_node(self, value: Any) -> list[Any]:
        values = self.of_all(value)
        return [values[rank] for rank in self._node]

    # -- failures ---------------------------------------------------------------------------------
    def _run(self, name: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure
        end = time.monotonic() + self._timeout.total_seconds()
        try:
            collective(*args, **kwargs)
        except RuntimeError as error:
            words, hangs = str(error).partition("\n")[0], time.monotonic() > end
            raise self._explain(name, words, hangs=hangs) from error
        self.sent_bytes[name.split()[0]] += getattr(args[0], "nbytes", 0) if args else 0

    def _cause(self) -> str | None:
        """Say what happened to the rank that failed first. None: unknown."""
        with contextlib.suppress(RuntimeError):  # the store ends with its process, mostly rank 0's
            if self._store.check(["failure"]):
                words: str = self._store.get("failure").decode()
                return words
        if self._failed:
            return f"rank {int(self._failed) - 1} has failed"
        poll = select.poll()
        for descriptor in self._processes:
            poll.register(descriptor, select.POLLIN)
        ended = [self._processes[descriptor] for descriptor, _ in poll.poll(0)]
        return self._first_failure(ended[0], "has ended") if ended else None

    def _first_failure(self, rank: int, words: str) -> str:
        """Tell all ranks that this one has failed, unless they know of another one."""
        words = f"rank {rank} {words}"
        if not self._failed:
            native.store(self._failed, rank + 1)
        with contextlib.suppress(RuntimeError):
            words = str(self._store.compare_set("failure", "", words).decode())
        return words

    def _closed(self) -> int | None:
        """A rank of another node whose connections are closed."""
        others: list[int] = sorted({*range(self.num_ranks)} - {*self._node})
        for rank in others:
            try:
                byte = torch.zeros(1, dtype=torch.uint8)
                self._sent.append(distributed.isend(byte, rank, group=self._control, tag=TAG))
            except RuntimeError:
                return rank
        return None

    def _explain(self, name: str, words: str, *, hangs: bool) -> RankError:
        """The error of an operation that has failed. It ends the operations of all ranks."""
        with self._is_failing:
            if self._failure is None:
                end = time.monotonic() + CAUSE_S
                while (cause := self._cause()) is None and time.monotonic() < end:
                    time.sleep(0.01)
                begun = self._begun.tolist()
                if cause is None and hangs and min(begun) < max(begun):
                    rank = self._node[begun.index(min(begun))]
                    cause = self._first_failure(rank, "does not come")
                if cause is None and (closed := self._closed()) is not None:
                    cause = self._first_failure(closed, "has ended")
                self._end(f"{name}: {cause or 'a rank of another node does not come'} ({words})")
                logger.error("%s", self._failure)  # before a launcher ends this process
        assert self._failure is not None
        return self._failure

    def fail(self, reason: str) -> None:
        """This rank cannot go on: let the operations of all ranks end."""
        with self._is_failing:
            if self._failure is None:
                self._first_failure(self.rank, f"has failed: {reason}")
                self._end(f"this rank has failed: {reason}")

    def _end(self, message: str) -> None:
        self._failure = RankError(f"{message}. Start all ranks again, from the last checkpoint")
        for group in self._groups:
            _close_connections(group)

    def close(self) -> None:
        """Leave the groups, and close the node's memory, whose mapping stays. Waits for no rank.
        Safe to call twice."""
        if distributed.is_initialized():
            for group in self._groups:
                distributed.destroy_process_group(group)
        # Hazard: a forked child that collects a group waits for threads that it does not have.
        self._groups = ()
        self._control = self._reduce = self._exchange = self._files = None
        for descriptor in self._processes:
            os.close(descriptor)
        self._processes.clear()
        if hasattr(self, "memory"):
            self.memory.close()


class OwnersUpdate(Fence):
    """Marks the end of an update that another rank runs: the layer's counter shows it."""

    __slots__ = ("_count", "_layer", "_ranks")

    def __init__(self, ranks: Ranks, layer: Layer, count: int) -> None:
        super().__init__(LaneName.UPDATE, f"update {layer.index} of rank {ranks.owner(layer)}")
        self._ranks, self._layer, self._count = ranks, layer, count

    def wait_issued(self) -> None:
        self._ranks.wait_for_weights(self._layer, self._count)

    @property
    def done(self) -> bool:
        return self._ranks.has_weights(self._layer, self._count)


def _close_connections(group: Any) -> None:
    """End a group for all of its ranks. Gloo closes the connections of a receive that times out."""
    if distributed.get_backend(group) == "nccl":
        group.abort()
        return
    for rank in {*distributed.get_process_group_ranks(group)} - {distributed.get_rank()}:
        with contextlib.suppress(RuntimeError):
            message = distributed.irecv(torch.zeros(1), rank, group=group, tag=TAG + 1)
            if message is not None:
                message.wait(timedelta(milliseconds=1))
