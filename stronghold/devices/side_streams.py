"""Side streams: streams beside compute's main stream, on which chunks of a layer take turns.

This class has none. `cuda` has a GPU's, and why they do not race ([Note: side streams]).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class SideStreams:
    """The side streams of a device whose compute is one stream: there are none."""

    def __init__(self) -> None:
        self.streams: Sequence[Any] = ()

    def open(self, count: int) -> None:
        """Make `count` side streams; none for 1."""

    def forked(self) -> AbstractContextManager[object]:
        """Context manager: the side streams run beside the calling thread's stream.

        At entry the side streams wait for this stream. At exit it waits for them. The manager
        returns this stream.
        """
        return nullcontext()

    def beside(self, number: int, name: str) -> AbstractContextManager[None]:
        """Context manager: the calling thread is on side stream `number` modulo their count."""
        return nullcontext()

    def follow(self, main: object) -> None:
        """Let `main`, the stream of `forked`, wait for the calling thread's stream."""

    def on_main(self) -> AbstractContextManager[None]:
        """Context manager: the calling thread is on the stream that forked last. Nothing waits."""
        return nullcontext()

    def joined(self) -> AbstractContextManager[None]:
        """Context manager: the calling thread is on the stream that forked last.

        At entry this stream waits for all side streams, so it runs after all chunks of a layer.
        """
        return nullcontext()
