"""The processes of one node that use the same disks for one model.

Owns nothing: it is how they do one after the other what would disturb them at once, and how all of
them learn of it when one fails. The training thread alone enters; every process makes the same
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from stronghold.errors import BudgetError, ConfigError, RankError
from stronghold.memory.shared import Exchange

Result = TypeVar("Result")

# What the user can mend is said in the same class everywhere.
MENDABLE: dict[str, type[ValueError]] = {"ConfigError": ConfigError, "BudgetError": BudgetError}


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """This process is number `index`; `ranks` are the global ranks of all."""

    index: int
    ranks: Sequence[int]
    exchange: Exchange

    @property
    def count(self) -> int:
        return len(self.ranks)

    def first(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on the first of them, which alone does it; its error on all."""
        found = self.together(lambda: work() if self.index == 0 else None)
        return cast(Result, found[0])

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """What `work` returns on each. When it raises on one, all raise: that one its own error,
        the others one that names its rank."""
        result: Result | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        said = None if failure is None else (type(failure).__name__, str(failure))
        found: Any = self.exchange.objects((said, result))
        if failure is not None:
            raise failure
        for rank, (words, _) in zip(self.ranks, found, strict=True):
            if words is not None:
                kind, text = words
                if kind in MENDABLE:
                    raise MENDABLE[kind](f"rank {rank}: {text}")
                raise RankError(f"rank {rank}: {kind}: {text}")
        return [outcome for _, outcome in found]


class _Nobody:
    def objects(self, mine: object) -> list[object]:
        return [mine]

    def barrier(self) -> None:
        """There is nobody to wait for."""


ALONE = Neighbours(index=0, ranks=(0,), exchange=_Nobody())
