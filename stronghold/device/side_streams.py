"""Streams beside compute's own, on which parts of a layer take turns.

Owns the streams. The training thread enters, and autograd's in backward.

[Note: side streams] Chunks of a layer take turns on side streams, so that kernels of several run at
once. In forward a layer's call forks and joins. In backward autograd runs a chunk's nodes on its
stream again; the first of them waits for the main stream, by autograd's own events, and the main
stream follows each chunk's last one. What could go wrong between the two, and why it does not:
  memory   torch's allocator gives what is freed to the stream that took it, at once. Between fork
           and join the main stream takes nothing, but for sums of autograd's, which wait for the
           chunk at hand and come after the chunks before; and side streams only run between them.
           So what a side stream reads of the main one's is overwritten after the join, and what
           the main one reads of theirs after the next fork: no tensor needs `record_stream`
  waits    before memory is dropped that a lane still reads, and before a slot is read that a lane
           has written, all streams wait (`ComputeLane.wait_everywhere`)
  sums     gradients are added to a slot on the chunk's stream, after all that the others have
           added (`runtime.gradients`): in the chunks' order. What comes after the last of them,
           rounding, drains, updates on the device, is done on the main stream, after all chunks
Autograd records gradients that change streams on both, so that they are free again when the host
has seen their events: it is kept from running more than two layers ahead of the device in backward.
cuBLAS has its own workspace on each stream, which torch gives it: the same kernels, the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stronghold.device.base import Fence
    from stronghold.device.cuda import GpuCompute

_LAYERS_AHEAD = 2  # [Note: side streams]


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


class GpuSideStreams(SideStreams):
    """The side streams of a GPU ([Note: side streams])."""

    def __init__(self, compute: GpuCompute) -> None:
        super().__init__()
        self._compute = compute
        self._main: Any = None  # the stream that forked last
        self._behind: deque[Fence] = deque()  # the ends of the newest layers' backwards

    @property
    def all_streams(self) -> tuple[Any, ...]:
        """The stream that forked last, and the side streams; none before the first fork."""
        return () if self._main is None else (self._main, *self.streams)

    def open(self, count: int) -> None:
        self.streams = [self._compute.new_stream() for _ in range(count if count > 1 else 0)]
        self._main = None

    @contextmanager
    def forked(self) -> Iterator[Any]:
        main = self._compute.stream()
        if self.streams:
            self._main = main
        for stream in self.streams:
            stream.wait_stream(main)
        try:
            yield main
        finally:
            for stream in self.streams:
                main.wait_stream(stream)

    @contextmanager
    def beside(self, number: int, name: str) -> Iterator[None]:
        if not self.streams:
            yield
            return
        stream = self.streams[number % len(self.streams)]
        with self._compute.on(stream):
            begun = self._compute.begin_span()
            yield
            self._compute.end_span(name, begun)

    def follow(self, main: Any) -> None:
        if self.streams:
            main.wait_stream(self._compute.stream())

    @contextmanager
    def joined(self) -> Iterator[None]:
        if self._main is None:
            yield
            return
        with self._compute.on(self._main):
            for stream in self.streams:
                self._main.wait_stream(stream)
            yield
            self._behind.append(self._compute.record("joined"))
        if len(self._behind) > _LAYERS_AHEAD:
            self._behind.popleft().wait()
