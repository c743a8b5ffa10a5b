"""The executor of one of several ranks: what it does with others it does in the order of all.

Owns which passes are made together and which alone, and what a rank does for uses that it skips.
Entered as `runtime.executor`. A rank's fetches of a training pass are gathers, in which every rank
takes part; their order must depend on nothing that may differ between ranks:
  * a layer that this rank does not use    -> the schedule is followed as if it did
  * a pass that this rank makes alone      -> its fetches meet nobody, and the slots hold afterwards
                                              what they held before
  * another order of uses than predicted   -> adopted when every rank has seen it (`gate`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stronghold.errors import ConfigError
from stronghold.memory.window import Slot
from stronghold.plan.schedule import Action, Kind
from stronghold.runtime.executor import MAX_RECORDED_USES, Executor, Phase
from stronghold.runtime.ranks.gathers import Gathers
from stronghold.runtime.track import Track, make_track


class SharedExecutor(Executor):
    """`Executor` of one of several ranks."""

    def __init__(self, *, gathers: Gathers, **parts: Any) -> None:
        super().__init__(**parts)
        self._gathers = gathers
        self._alone = False
        # What was in the slots, and was old in slots of its own, when this rank went alone.
        self._together: set[int] = set()
        self._old: set[int] = set()
        self._seen: tuple[Action, ...] = ()  # uses of the last training pass

    def _wrote(self, layer: int) -> None:
        raise ConfigError(
            f"a parameter of {self._host.layers[layer].layout.name} was written in place: several "
            "ranks share its memory, and each would write. Use load_state_dict on every rank, or "
            "engine.load_checkpoint"
        )

    # -- the order of all -------------------------------------------------------------------------
    def seen_uses(self) -> str:
        """The uses of the last training pass."""
        return ", ".join(map(str, self._seen))

    def adopt_uses(self) -> None:
        """Every rank saw the same uses: expect them from now on."""
        seen = self._seen
        if 0 < len(seen) <= MAX_RECORDED_USES and seen != self._training.schedule.uses:
            self._training.schedule = make_track(self._plan, seen).schedule

    def _learn(self, track: Track) -> None:
        if track is not self._training:
            super()._learn(track)
            return
        self._seen = tuple(track.recorded)
        track.cursor = 0
        track.recorded.clear()

    def _turn_to(self, track: Track) -> None:
        if track is self._current:
            return
        self._current = track
        if track is self._evaluation:
            track.cursor = 0
            track.recorded.clear()
            self._together, self._old = set(self._window.held_layers()), set(self._stale)
            return
        for layer in set(self._window.held_layers()) - self._together:
            self._release(layer)
        self._alone = True
        for layer in sorted(self._together - set(self._window.held_layers())):
            self._fetch(layer, keep=layer)
        self._alone = False
        self._stale |= self._old  # new here, and yet to be fetched with the others

    def _fill(self, slot: Slot, layer: int) -> int:
        alone = self._alone or self._current is self._evaluation
        updated = self._updater.ledger.updated(layer)
        fences = self._gathers.fetch(layer, slot, updated, alone=alone)
        self._last_fetch[layer], slot.ready, nbytes = fences
        return nbytes

    # -- uses of others ---------------------------------------------------------------------------
    def _follow(self, track: Track, position: int) -> None:
        use = track.schedule.uses[position]
        if track is self._training:
            between = track.schedule.uses[track.cursor : position]
            if all(other.kind is use.kind for other in between):
                self._walk(track, position)
        super()._follow(track, position)
        self._reached(use)

    def _walk(self, track: Track, end: int) -> None:
        """Do for the uses from the cursor to `end` what ranks do that use those layers."""
        inside, outer = self._inside, self._inside[:-1]
        for position in range(track.cursor, end):
            use = track.schedule.uses[position]
            enters = use.kind is Kind.FORWARD and self._streams[use.layer]
            self._inside = [*outer, use.layer] if enters else outer
            super()._follow(track, position)
            if self._needs_fetch(use.layer):
                self._fetch(use.layer, keep=use.layer)
            self._reached(use)
        self._inside = inside

    def _reached(self, use: Action) -> None:
        if use.kind is Kind.BACKWARD:
            self.drains.reached(use.layer)

    def _catch_up(self, kind: Kind) -> None:
        """The pass has ended: follow the rest of its uses."""
        track = self._training
        if track is not self._current or not track.recorded:
            return
        uses, end = track.schedule.uses, track.cursor
        while end < len(uses) and uses[end].kind is kind:
            end += 1
        self._walk(track, end)

    # -- passes -----------------------------------------------------------------------------------
    def end_forward_pass(self) -> None:
        if self.phase is Phase.FORWARD:
            self._catch_up(Kind.FORWARD)
        super().end_forward_pass()

    def begin_backward_pass(self) -> None:
        self._turn_to(self._training)
        self.drains.prepare(self._calls)
        super().begin_backward_pass()

    def end_backward_pass(self) -> None:
        self.end_span()
        self._catch_up(Kind.BACKWARD)
        super().end_backward_pass()

    def weights_changed(self, layers: Sequence[int]) -> None:
        self._turn_to(self._training)
        super().weights_changed(layers)

    def settle(self, layers: Sequence[int]) -> None:
        old, self._alone = set(self._stale), True
        super().settle(layers)
        self._alone = False
        self._stale |= old
        self._gathers.settle(layers)
