"""Transfers of files one after the other, without a pause between them.

Owns which transfer of a lane comes next. Never waits for a fence: the lane does. The training
thread submits, the lane's thread runs.

[Note: no pause] A lane that waits for a piece before it begins the next one lets the disk run dry
at every piece's end: 3 to 6 % of its rate with pieces of 32 MiB. So a piece that runs begins its
successor first, if that could run: its fences are done and none of them failed. All else is as if
it had begun in its turn; whatever is wrong with it is told there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from stronghold.device.base import Fence, Lane
from stronghold.memory.tiers import Transfer


class _Piece:
    """One transfer, begun in its turn or by the one before it."""

    __slots__ = ("_after", "_begin", "_begun", "following")

    def __init__(self, begin: Callable[[], Transfer], after: Sequence[Fence]) -> None:
        self._begin = begin
        self._after = after
        self._begun: Transfer | None = None
        self.following: _Piece | None = None

    def run(self) -> None:
        if self._begun is None:
            self._begun = self._begin()
        following, self.following = self.following, None
        if following is not None and following.may_begin:
            with contextlib.suppress(OSError):  # it tries again in its turn, and tells
                following._begun = following._begin()
        self._begun.wait()

    @property
    def may_begin(self) -> bool:
        return all(fence.done and not fence.failed for fence in self._after)


class Ahead:
    """Submits transfers to one lane."""

    def __init__(self) -> None:
        self._last: _Piece | None = None

    def submit(
        self,
        lane: Lane,
        operation: str,
        begin: Callable[[], Transfer],
        after: Sequence[Fence],
        *,
        nbytes: int,
    ) -> Fence:
        """As `Lane.submit`, of the transfer that `begin` starts. Only `after` orders it behind
        other transfers: it may begin before an operation that was submitted earlier ends.
        """
        piece = _Piece(begin, after)
        fence = lane.submit(operation, piece.run, after, nbytes=nbytes)
        # Only what will have its turn may be begun before it: an interrupt may have ended us here.
        if self._last is not None:
            self._last.following = piece
        self._last = piece
        return fence
