"""Collectives of one group of ranks, one after the other.

Owns a process group of torch's and the counts of bytes that it received, in all and from ranks of
other nodes. Never decides what is moved or when: every rank calls the same methods in the same
order, on one thread per group. A wait for other ranks ends with RankError when one of them is lost
(`watch`).

[Note: the mean] On the CPU a rank gets every rank's piece of its own range and adds them in fp32,
in the order of the ranks, with one rounding at the end: as many bytes as a ring, and the sum that
one rank gets that accumulates as many micro-batches. NCCL adds in its own order.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from stronghold.errors import ConfigError, RankError

if TYPE_CHECKING:
    from stronghold.runtime.ranks.watch import Watch

logger = logging.getLogger("stronghold")

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


class Group:
    """The ranks `members` (global numbers, this one among them) on `backend`, "gloo" or "nccl", in
    the order given.

    `number` is the group's place in the watch's rows. `all_members`: the groups that all processes
    of the program make now, in one order; they make them together. `order`: the members' places in
    the order in which the mean adds them. `num_far` of them are on other nodes.
    """

    def __init__(
        self,
        members: Sequence[int],
        all_members: Sequence[Sequence[int]],
        backend: str,
        number: int,
        *,
        order: Sequence[int] | None = None,
        num_far: int = 0,
    ) -> None:
        self._backend = backend
        self._number = number
        self._order = order or range(len(members))
        self._num_far = num_far
        self._members = frozenset(members)
        self._lost: RankError | None = None  # the group is of no use from then on
        self.watch: Watch | None = None
        # Not with local synchronisation: torch uses the names of such groups again, and the second
        # engine of a program would look for the addresses of the first.
        made = [_new_group(list(ranks), backend) for ranks in all_members]
        self._handle: Any = made[[list(ranks) for ranks in all_members].index(list(members))]
        self.num_ranks = len(members)
        self.rank = list(members).index(distributed.get_rank())
        self.received_bytes = self.far_bytes = self.numbers_bytes = 0

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
        are then undefined. `room` has as many elements as `whole`; NCCL needs none.
        """
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

    def _count(self, whole: torch.Tensor) -> None:
        share = whole.numel() * whole.element_size() // self.num_ranks
        self.received_bytes += share * (self.num_ranks - 1)
        self.far_bytes += share * self._num_far

    # -- of numbers and objects -------------------------------------------------------------------
    def numbers(self, mine: torch.Tensor, operation: str) -> torch.Tensor:
        """Every rank's flat CPU tensor of one length, by rank."""
        found = mine.new_empty(self.num_ranks, mine.numel())
        self.numbers_bytes += (self.num_ranks - 1) * mine.nbytes
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

    def barrier(self, operation: str = "barrier") -> None:
        """Return when every rank has called it."""
        self.numbers(torch.zeros(1, dtype=torch.uint8), operation)

    # -- waiting ----------------------------------------------------------------------------------
    def _begin(self) -> None:
        if self.watch is not None:
            self.watch.begin(self._number)

    def _begin_on_stream(self, operation: str) -> None:
        """What is only enqueued waits for nobody: look whether all are there."""
        self._begin()
        if self.watch is not None:
            self.watch.check(operation, self._members)

    def _run(self, operation: str, start: Callable[[], Any]) -> None:
        if self._lost is not None:
            raise self._lost
        self._begin()
        begun, said = time.monotonic(), SAY_EVERY_S
        try:
            work = start()
            while not self._wait(work):
                if self.watch is None:
                    continue
                self.watch.check(operation, self._members)
                if (waited := time.monotonic() - begun) > said:
                    said += SAY_EVERY_S
                    behind = self.watch.behind(self._number, self._members)
                    logger.warning("%s waits for %s since %.0f s", operation, behind, waited)
        except RankError as error:
            self._lost = error
            raise
        except RuntimeError as error:
            if self.watch is None:
                raise
            self._lost = self.watch.explain(operation, self._number, self._members, error)
            raise self._lost from error

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


def mean_of(pieces: torch.Tensor, target: torch.Tensor, order: Sequence[int]) -> None:
    """The mean of the rows of `pieces`, added in `order` ([Note: the mean])."""
    for begin in range(0, target.numel(), PIECE_NUMEL):
        part = pieces[:, begin : begin + PIECE_NUMEL]
        total = part[order[0]].float()
        for row in order[1:]:
            total = total + part[row]
        target[begin : begin + PIECE_NUMEL] = total / len(order)


def _new_group(ranks: list[int], backend: str) -> Any:
    if ranks == sorted(ranks):
        return distributed.new_group(ranks, backend=backend)
    if "sort_ranks" not in inspect.signature(distributed.new_group).parameters:
        raise ConfigError(
            f"several nodes with several ranks each need a torch whose new_group has sort_ranks "
            f"(2.13 has it): got {torch.__version__}"
        )
    return distributed.new_group(ranks, backend=backend, sort_ranks=False)
