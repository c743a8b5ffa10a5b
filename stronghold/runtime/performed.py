"""The operations that a step performed, in order: what `engine.inspect()` compares with the
schedule. The thread that calls hooks enters."""

from __future__ import annotations

from stronghold.plan.schedule import Action, Kind

MAX_ACTIONS = 1 << 16  # of one step: a run without steps (evaluation) must not fill memory


class Performed:
    """`last`: the actions of the step that ended last."""

    def __init__(self) -> None:
        self.last: tuple[Action, ...] = ()
        self._now: list[Action] = []

    def add(self, kind: Kind, layer: int = -1) -> None:
        """An operation was queued; of a use, compute is about to begin it."""
        if len(self._now) < MAX_ACTIONS:
            self._now.append(Action(kind=kind, layer=layer))

    def end_step(self) -> None:
        """What comes belongs to the next step."""
        self.last = tuple(self._now)
        self._now = []

    def clear(self) -> None:
        """The step so far is void."""
        self._now = []
