"""Streams beside compute's own, on which parts of a layer take turns: none, where compute is one
stream. `cuda` has those of a GPU ([Note: side streams])."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class SideStreams:
    """The side streams of a device whose compute is one stream: none, and nothing happens."""

    def __init__(self) -> None:
        self.streams: Sequence[Any] = ()

    def open(self, count: int) -> None:
        """Make `count` side streams, none for 1."""

    def forked(self) -> AbstractContextManager[object]:
        """The side streams go on after the calling thread's stream, which is given, and it goes on
        after them at the end."""
        return nullcontext()

    def beside(self, number: int, name: str) -> AbstractContextManager[None]:
        """Inside, the calling thread is on a side stream, `number` modulo their count."""
        return nullcontext()

    def follow(self, main: object) -> None:
        """`main`, of `forked`, goes on after the calling thread's stream."""

    def joined(self) -> AbstractContextManager[None]:
        """Inside, the calling thread is on the stream that forked last, which goes on after all
        side streams: for what comes after all parts of a layer."""
        return nullcontext()
