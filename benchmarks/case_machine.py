"""What each machine of the five cases answers: its methods, a run of one, and a comparison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from methods.task import Task

Row = dict[str, Any]


class Machine(ABC):
    """Where a case is asked."""

    word: str
    description = "Measured."
    simulated = False

    @abstractmethod
    def methods(self) -> list[str]:
        """Methods whose figures this machine gives."""

    @abstractmethod
    def run(self, method: str, task: Task) -> Row:
        """One method's row; `status` says whether it ran."""

    @abstractmethod
    def compare(self, names: Sequence[str], task: Task) -> list[Row]:
        """Rows of the methods at one size, their losses judged where there are any."""
