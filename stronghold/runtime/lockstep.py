"""The executor of one of several ranks ([Note: lockstep] of `distributed.sharding`).

All ranks fetch the layers of a training pass in one order, since a fetch gathers from all of them.
A rank that skips a layer fetches it nevertheless. What a rank fetches for itself (an evaluation, a
read of weights) must not change that order: it leaves the order, and takes it up again with the
same layers in the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Action, Kind
from stronghold.runtime.binding import Bindings
from stronghold.runtime.executor import Executor, Phase, Track
from stronghold.runtime.optimizer_step import Ledger, OptimizerStep
from stronghold.runtime.parts import Parts


class LockstepExecutor(Executor):
    """As `Executor`, in the order of all ranks."""

    def __init__(
        self,
        parts: Parts,
        window: Window,
        step: OptimizerStep,
        ledger: Ledger,
        plan: Plan,
        bindings: Bindings,
    ) -> None:
        super().__init__(parts, window, step, ledger, plan, bindings)
        # What was in slots, and was outdated, when this rank left the agreed order of fetches:
        # until it takes it up again, its fetches are its own. None while it follows that order.
        self._left: tuple[list[int | None], list[LayerState]] | None = None
        self.called_residents = frozenset()

    # -- leaving the order ------------------------------------------------------------------------
    def _leave(self) -> None:
        """What is fetched from now on, other ranks may not fetch."""
        if self._left is None:
            refreshed = (self.layers[layer] for layer in self.weights.refreshed)
            outdated = [state for state in refreshed if not state.is_fetched]
            self._left = self._window.places(), outdated

    def _take_up(self) -> None:
        """The slots hold again what they held when this rank went on alone, in the same order: the
        others' order of gathers counts on that."""
        if self._left is None:
            return
        window, (places, outdated) = self._window, self._left
        shared = {layer for layer in places if layer is not None}
        for layer in set(window.held_layers()) - shared:
            self.weights.release(layer)
        for layer in sorted(shared - set(window.held_layers())):
            self._fetch(layer, keep=layer)
        window.arrange(places)
        for state in outdated:  # fetched with the others
            self._window.outdate(state.index)
        self._left = None

    def _is_in_order(self) -> bool:
        return self._left is None and self._current is self._training

    def _turn_to(self, track: Track) -> None:
        before = self._current
        super()._turn_to(track)
        if track is self._training:
            self._take_up()
        elif track is not before:
            self._leave()

    # -- passes -----------------------------------------------------------------------------------
    def begin_forward_pass(self, *, training: bool) -> None:
        super().begin_forward_pass(training=training)
        if training:
            self._training.cursor = 0

    def end_forward_pass(self) -> None:
        if self.phase is Phase.FORWARD:
            self._catch_up(Kind.FORWARD)
        super().end_forward_pass()

    def begin_backward_pass(self) -> None:
        self._turn_to(self._training)
        super().begin_backward_pass()

    def end_backward_pass(self, called: frozenset[int]) -> None:
        self._span.end()
        self._catch_up(Kind.BACKWARD)
        super().end_backward_pass(called)

    def start_again(self) -> None:
        self._left = None
        super().start_again()

    def _learn(self, track: Track, called: frozenset[int] = frozenset()) -> None:
        """Adopt the order of uses that this pass showed: of a training pass when all ranks have
        seen it."""
        if track is not self._training:
            super()._learn(track)
            return
        seen = tuple(track.recorded)
        track.recorded.clear()

        def adopt() -> None:
            self._adopt(track, self._with_skipped(seen))
            self.called_residents = called

        self._team.propose((seen, sorted(called)), adopt)
        if track.cursor >= len(track.schedule.uses):
            track.cursor = 0

    def _with_skipped(self, seen: Sequence[Action]) -> tuple[Action, ...]:
        """A training pass as `seen`, and with the uses that ranks may have another time, each
        behind what it followed."""
        uses, at = list(seen), 0
        for use in self._training.schedule.uses:
            if use in seen:
                at = uses.index(use) + 1
            elif use.kind is Kind.FORWARD or self.layers[use.layer].optimizer.trained:
                uses.insert(at, use)
                at += 1
        return tuple(uses)

    # -- uses -------------------------------------------------------------------------------------
    def _advance(self, use: Action) -> None:
        track = self._current
        if track is not self._training:
            super()._advance(use)
            return
        self._record(use)
        uses = track.schedule.uses
        ahead = range(track.cursor, len(uses))
        position = next((at for at in ahead if uses[at] == use), None)
        if position is None or (self._left is not None and set(self._inside) - {use.layer}):
            self._leave()  # what is there may not go while a block runs that is in it
            return
        self._take_up()
        begin = position
        while begin > track.cursor and uses[begin - 1].kind is use.kind:
            begin -= 1
        track.cursor = begin
        self._walk(track, position)
        self._perform_before(track, position)

    def _walk(self, track: Track, end: int) -> None:
        """Do for the uses from the cursor to `end` what ranks do that use those layers."""
        inside, outer = self._inside, self._inside[:-1]
        for position in range(track.cursor, end):
            use = track.schedule.uses[position]
            enters = use.kind is Kind.FORWARD and self.layers[use.layer].layout.streamed
            self._inside = [*outer, use.layer] if enters else outer
            self._perform_before(track, position)
            if self.weights.needs_fetch(use.layer):
                self._fetch(use.layer, keep=use.layer)
        self._inside = inside

    def _catch_up(self, kind: Kind) -> None:
        """The pass has ended: follow the rest of its uses, which other ranks may have."""
        track = self._training
        if track is not self._current or not track.recorded:
            return
        uses, end = track.schedule.uses, track.cursor
        while end < len(uses) and uses[end].kind is kind:
            end += 1
        self._take_up()
        self._walk(track, end)

    def make_ready(self, layer: int, *, together: bool = False) -> None:
        is_away = layer not in self._plan.updated_on_gpu and self.weights.needs_fetch(layer)
        if is_away and not together:
            self._leave()
        super().make_ready(layer, together=together)

    # -- between steps ----------------------------------------------------------------------------
    def outdate(self, layers: Sequence[int]) -> None:
        self._turn_to(self._training)
        super().outdate(layers)

    def settle(self, layers: Sequence[int]) -> None:
        self._device.check()
        for layer in layers:
            self.layers[layer].wait()
        self._leave()
        super().settle(layers)

    def given_out(self, layers: Sequence[int]) -> None:
        """What was fetched ahead stays: all ranks count on it."""
