"""The processes of one node that train one model, as host memory and files see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

Result = TypeVar("Result")


class Neighbours:
    """A process that has its node for itself: collectives return their input.

    This process is number `index` of `count` on its node. Every process of every node makes the
    same calls, on its training thread. `distributed.process_groups` has several processes.
    """

    index = 0
    count = 1

    def of_node(self, value: Result) -> list[Result]:
        """Return the values of this node's processes, in their order (all-gather)."""
        return [value]

    def of_all(self, value: Result) -> list[Result]:
        """Return the values of all processes of all nodes, in their order (all-gather)."""
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


def _nothing() -> None:
    """Stand in for the work of a process that is not the node's first."""


ALONE = Neighbours()
