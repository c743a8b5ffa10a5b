"""The processes of one node that train one model, as host memory and files see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

Result = TypeVar("Result")


class Neighbours:
    """A process that has its node for itself: collectives return their input.

    rank, num_ranks  this process, and how many train the model
    node, node_name  its node's number, and a name for people
    index, count     its place on its node, and how many the node has
    cores            of this process alone. Empty if it shares all of them
    device_bytes     that connections take of the device
    sent_bytes       bytes that this process has given to collectives, by their kind

    Every process of every node makes the same calls, on its training thread. `train.ranks` has
    several processes.
    """

    rank, num_ranks = 0, 1
    node, index, count = 0, 0, 1
    node_name = ""
    cores: tuple[int, ...] = ()
    device_bytes = 0
    sent_bytes: Mapping[str, int] = {}

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.count

    def of_node(self, value: Result) -> list[Result]:
        """Return the values of this node's processes, in their order (all-gather)."""
        return [value]

    def of_all(
        self, value: Result, operation: str = "set-up", *, beside: bool = False
    ) -> list[Result]:
        """Return the values of all processes of all nodes, in their order (all-gather).

        beside  beside training: the io lane may enter, and the training thread while it is idle
        """
        return [value]

    def barrier(self) -> None:
        """Return when every process of every node has called it."""

    def first(self, work: Callable[[], Result]) -> Result:
        """Call `work` on the node's first process alone, and return its result on all of them.

        If `work` raises, every process raises.
        """
        results = self.together(work if self.index == 0 else _nothing)
        return cast(Result, results[0])

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Call `work` on every process, and return the results of this node.

        If it raises on one process, of any node, every process raises: that one its own error, the
        others an error that names its rank.
        """
        return [work()]

    def fail(self, reason: str) -> None:
        """This process cannot go on: no other one waits for it any more."""

    def close(self) -> None:
        """Leave the other processes."""


def _nothing() -> None:
    """Stand in for the work of a process that is not the node's first."""


ALONE = Neighbours()
