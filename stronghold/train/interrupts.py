"""Temporary changes that end whenever Ctrl-C comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def run_and_restore(work: Callable[[], Result], restore: Callable[[], object]) -> Result:
    """Call `work`, then `restore`, however `work` ends.

    A KeyboardInterrupt may come between any two bytecodes, also of `restore`. Then `restore` runs
    again from its beginning. A context manager is not enough: an interrupt can come before its
    exit, which then waits until the traceback is gone.
    """
    try:
        try:
            return work()
        finally:
            restore()
    except BaseException:
        restore()
        raise
