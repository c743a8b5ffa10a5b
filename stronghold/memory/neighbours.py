"""The processes of one node that use the same disks for one model.

Owns nothing: it is how they do one after the other what would disturb them at once, and how all of
them learn of it when one fails. The training thread alone enters; every process makes the same
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from stronghold.errors import BudgetError, ConfigError, RankError
from stronghold.memory.shared import Exchange

Result = TypeVar("Result")

# What the user can mend is said in the same class everywhere.
MENDABLE: dict[str, type[ValueError]] = {"ConfigError": ConfigError, "BudgetError": BudgetError}


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """This process, `rank` of all nodes', is number `index` of `count` on its node."""

    index: int
    count: int
    rank: int
    exchange: Exchange

    def first(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on the first of this node, which alone does it; an error on all."""
        found = self.together(lambda: work() if self.index == 0 else None)
        return cast(Result, found[0])

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """What `work` returns on each of this node. When it raises on one, of whatever node, all
        raise: that one its own error, the others one that names its rank."""
        result: Result | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        said = None if failure is None else (self.rank, type(failure).__name__, str(failure))
        of_all: Any = self.exchange.of_all(said)
        if failure is not None:
            raise failure
        for words in of_all:
            if words is not None:
                rank, kind, text = words
                if kind in MENDABLE:
                    raise MENDABLE[kind](f"rank {rank}: {text}")
                raise RankError(f"rank {rank}: {kind}: {text}")
        return cast(list[Result], self.exchange.of_node(result))


class _Nobody:
    def of_node(self, mine: object) -> list[object]:
        return [mine]

    def of_all(self, mine: object) -> list[object]:
        return [mine]

    def barrier(self) -> None:
        """There is nobody to wait for."""


ALONE = Neighbours(index=0, count=1, rank=0, exchange=_Nobody())
