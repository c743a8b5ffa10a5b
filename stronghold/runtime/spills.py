"""The NVMe pipeline: updates and fetches of layers of which a part lies in files, piece by piece.

Owns the order of loads, updates and spills of pieces, and by layer the newest write to its files.
Never decides what spills (the plan) or which Adam (`adam`). The training thread submits, and
autograd's in backward; lanes move and compute.

A layer's way through an update, for each piece of the staging ring ([Note: a piece] of `tiers`):
  load lane    reads the spilled arrays of elements [begin, end) into an entry
  update lane  Adam over these elements: spilled arrays in the entry, the others in their slabs
  spill lane   writes back what Adam changed; the entry is free after it
A fetch of spilled weights, for each piece of the other ring:
  stage lane   reads weights into an entry
  fetch lane   copies them to the slot; the entry is free after it
Gradients that wait for the gate and have no room in RAM drain into the gradient ring, are read for
their norm by the update lane, and go to a file; the update's pieces bring them back. fp32 sums over
micro-batches pass the staging ring as moments do: loaded, added to, written.
Loads are submitted as soon as the update is (those of a backward's first pieces before that, by
`piece_loads`), on a lane of their own: they run ahead, as far as
there are entries, over the border between layers too. Races and what prevents them:
  * an entry is overwritten while it is used     -> a load waits for the entry's `free_after`: its
                                                    spill, or its copy to a slot
  * a load reads what is still being written     -> it waits for the layer's newest spill
  * a stage reads weights that are being written -> it waits for `updated`, which for spilled
                                                    weights is the last piece's spill
  * a spill writes weights that a stage reads    -> the update waits for the layer's last fetch, and
                                                    the spill for the update
  * a spill writes what a checkpoint reads       -> the update waits for the layer's reader
  * a piece fails and a later one succeeds       -> each waits for the one before: the last fence
                                                    of a layer fails when any of its pieces did

[Note: what does not overlap] For a forward of F seconds, a backward of B and updates of D (the
disk's, or the CPU's), a step takes at least max(F + B, D). Updates that come as gradients do reach
it but for the way of a layer or two, since some of them wait for the next forward
([Note: deferred updates] of `plan.deferral`). Behind the gate no update can begin before backward
has ended, for the clip coefficient is known last, and the next backward needs them all: a step
takes B + max(F, D), and the disk rests in backward. That is the least there can be where clipping
is exact, and of no account where the disk takes less than forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from stronghold.device.base import Device, Fence, completed
from stronghold.device.kernels import Kernels
from stronghold.memory.gradients import GradientEntry
from stronghold.memory.host import HostStore
from stronghold.memory.tiers import Views
from stronghold.model.layout import ParameterSlice
from stronghold.plan.spills import WRITTEN
from stronghold.runtime.adam import ParameterStep, TrainingArrays, adam_bytes, adam_segments
from stronghold.runtime.ahead import Ahead
from stronghold.runtime.ledger import Ledger
from stronghold.runtime.piece_loads import PieceLoads
from stronghold.runtime.piece_norms import PieceNorms

Finish = Callable[[Callable[[], object]], Callable[[], None]]


class Spills:
    """The pipeline of one engine. Layers without spilled arrays are fetched at once, and not
    updated here."""

    def __init__(
        self, *, device: Device, host: HostStore, kernels: Kernels, ledger: Ledger
    ) -> None:
        self._device = device
        self._host = host
        self._tiers = host.tiers
        self._kernels = kernels
        self._ledger = ledger
        self._stages, self._spills = Ahead(), Ahead()
        self._written = [completed("spill", "initial values") for _ in host.layers]
        self.loads = PieceLoads(device, self._tiers, self._written)

    # -- updates ----------------------------------------------------------------------------------
    def updates(self, layer: int) -> bool:
        """Whether an update of the layer passes the staging ring."""
        return bool(self._tiers.spilled(layer))

    def update(
        self,
        layer: int,
        steps: Sequence[ParameterStep],
        gradients: torch.Tensor | None,
        after: Sequence[Fence],
        *,
        chosen: Callable[[], Sequence[ParameterStep]] | None = None,
        finish: Finish | None = None,
    ) -> Fence:
        """Queue one step of Adam, once all of `after` are done, and tell the ledger.

        `gradients` are this rank's of the layer (compute dtype or fp32 sums), None where they are
        spilled too. `chosen` says when the update runs which of `steps` are taken; `finish` is
        given the last work of the update, which runs what that returns. Returns the fence after
        which `gradients` may be overwritten.
        """
        device, arrays = self._device, self._tiers.spilled(layer)
        updated: Fence | None = None
        spilled = self._written[layer]
        cuts = [  # for the others no gradient came
            (begin, end)
            for begin, end in self._tiers.cuts(layer, arrays)
            if any(_overlap(step.part, begin, end) for step in steps)
        ]
        if not cuts and finish is not None:
            updated = device.update.submit(f"update {layer}", finish(_nothing), after)
        for begin, end in cuts:
            found = self.loads.next(layer, begin, end)
            piece = self._arrays(layer, begin, end, found.views, gradients)
            work = self._adam(chosen or (lambda: steps), piece)
            updated = device.update.submit(
                f"update {layer}",
                work if finish is None or end < cuts[-1][1] else finish(work),
                (found.loaded, *after, *([updated] if updated is not None else [])),
                nbytes=adam_bytes(self._host.dtype, piece.gradients.dtype) * (end - begin),
            )
            changed = {array: view for array, view in found.views.items() if array in WRITTEN}
            found.entry.free_after = spilled = self._spills.submit(
                device.spill,
                f"spill {layer}",
                partial(self._tiers.spill, layer, begin, changed),
                (updated, spilled),
                nbytes=self._tiers.nbytes(tuple(changed), end - begin),
            )
        self._written[layer] = spilled
        if updated is None:
            return self._ledger.updated(layer)
        weights_spill = self._tiers.holds(layer, "weights")
        self._ledger.update(layer, spilled if weights_spill else updated, stored=spilled)
        return updated

    def _arrays(
        self, layer: int, begin: int, end: int, views: Views, gradients: torch.Tensor | None
    ) -> TrainingArrays:
        state = self._host.layers[layer]

        def array(name: str) -> torch.Tensor | None:
            if name in views:
                return views[name]
            slab: torch.Tensor | None = getattr(state, name)
            first = 0 if name == "weights" else state.begin
            return slab[begin - first : end - first] if slab is not None else None

        found = views.get("accumulated", views.get("gradients"))
        if found is None:
            assert gradients is not None
            found = gradients[begin - state.begin : end - state.begin]
        weights, exp_avg, exp_avg_sq = array("weights"), array("exp_avg"), array("exp_avg_sq")
        assert weights is not None
        assert exp_avg is not None
        assert exp_avg_sq is not None
        return TrainingArrays(
            begin=begin,
            end=end,
            weights=weights,
            low=array("low"),
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            gradients=found,
        )

    def _adam(
        self, chosen: Callable[[], Sequence[ParameterStep]], arrays: TrainingArrays
    ) -> Callable[[], None]:
        def adam() -> None:
            segments = adam_segments(chosen(), arrays)
            self._kernels.adam(self._host.dtype, arrays.gradients.dtype, segments)

        return adam

    # -- gradients --------------------------------------------------------------------------------
    def holds_gradients(self, layer: int) -> bool:
        """Whether gradients wait for the gate in a file."""
        return self._tiers.holds(layer, "gradients")

    def hold(
        self,
        layer: int,
        entry: GradientEntry,
        drained: Fence,
        work: Callable[[torch.Tensor], None],
        nbytes: int,
        *,
        first: bool,
    ) -> Fence:
        """Queue the way of gradients from `entry` to their file, where the update finds them.

        `work` is given the array that will be written: it merges what is in `entry` into it if it
        is another one, and takes norms; it moves `nbytes`. `first`: nothing of this step is there
        yet. Returns the fence of `work`.
        """
        device, target = self._device, entry
        after: tuple[Fence, ...] = (drained,)
        state = self._host.layers[layer]
        numel = state.end - state.begin
        if not first:
            target = self._host.ring_entry()
            after = (drained, self._gradient_transfer("load", layer, target, numel, ()))
        views = {"gradients": target.gradients[:numel]}
        worked = device.update.submit(
            f"norm {layer}", partial(work, views["gradients"]), after, nbytes=nbytes
        )
        entry.free_after = worked
        target.free_after = self._gradient_transfer("spill", layer, target, numel, (worked,))
        self._written[layer] = target.free_after
        return worked

    def _gradient_transfer(
        self, verb: str, layer: int, entry: GradientEntry, numel: int, after: tuple[Fence, ...]
    ) -> Fence:
        ahead, lane, move = (
            (self.loads.ahead, self._device.load, self._tiers.load)
            if verb == "load"
            else (self._spills, self._device.spill, self._tiers.spill)
        )
        return ahead.submit(
            lane,
            f"{verb} gradients {layer}",
            partial(
                move,
                layer,
                self._host.layers[layer].begin,
                {"gradients": entry.gradients[:numel]},
            ),
            (*after, entry.free_after, self._written[layer]),
            nbytes=self._tiers.nbytes(("gradients",), numel),
        )

    def accumulates(self, layer: int) -> bool:
        """Whether the layer's fp32 sums lie in a file."""
        return self._tiers.holds(layer, "accumulated")

    def accumulate(
        self,
        layer: int,
        gradients: torch.Tensor,
        parts: Sequence[tuple[int, ParameterSlice, bool]],
        drained: Fence,
        sums: dict[int, float] | None,
        *,
        first: bool,
    ) -> Fence:
        """Queue the addition of `gradients` to the layer's sums: those of `parts`, (position,
        slice, whether to add or to begin a sum). `first`: the layer has no sums in this step yet.
        The sums' own sums of squares go into `sums` by position. Returns the fence of it.
        """
        device, arrays = self._device, ("accumulated",)
        parts = [(k, self._own(layer, part), add) for k, part, add in parts]
        if sums is not None:
            sums.update((k, 0.0) for k, part, _ in parts if not part.numel)
        norms = PieceNorms(self._kernels, sums) if sums is not None else None
        worked, spilled = drained, self._written[layer]
        for begin, end in self._tiers.cuts(layer, arrays):
            inside = [part for part in parts if _overlap(part[1], begin, end)]
            if not inside:
                continue
            entry, nbytes = self._tiers.updates.next(), self._tiers.nbytes(arrays, end - begin)
            views = self._tiers.views(entry.memory, arrays, end - begin)
            after = (worked, entry.free_after)
            if not first:
                loaded = self.loads.ahead.submit(
                    device.load,
                    f"load sums {layer}",
                    partial(self._tiers.load, layer, begin, views),
                    (entry.free_after, self._written[layer]),
                    nbytes=nbytes,
                )
                after = (worked, loaded)
            worked = device.update.submit(
                f"accumulate {layer}",
                partial(
                    self._accumulate,
                    gradients[begin - self._host.layers[layer].begin :],
                    views["accumulated"],
                    begin,
                    end,
                    inside,
                    norms,
                ),
                after,
                nbytes=(gradients.element_size() + (12 if norms is not None else 8))
                * (end - begin),
            )
            entry.free_after = spilled = self._spills.submit(
                device.spill,
                f"spill sums {layer}",
                partial(self._tiers.spill, layer, begin, views),
                (worked, spilled),
                nbytes=nbytes,
            )
        self._written[layer] = spilled
        return worked

    def _accumulate(
        self,
        gradients: torch.Tensor,
        accumulated: torch.Tensor,
        begin: int,
        end: int,
        parts: Sequence[tuple[int, ParameterSlice, bool]],
        norms: PieceNorms | None,
    ) -> None:
        base, to, size = gradients.data_ptr(), accumulated.data_ptr(), gradients.element_size()
        segments = []
        for _, part, add in parts:
            low, high = max(begin, part.offset) - begin, min(end, part.offset + part.numel) - begin
            segments.append((base + low * size, to + low * 4, high - low, add))
        self._kernels.accumulate(gradients.dtype, segments)
        if norms is not None:
            norms.add(accumulated, begin, end, [(k, part) for k, part, _ in parts])

    def sums_of(self, layer: int, position: int, part: ParameterSlice) -> float:
        """The sum of squares of one parameter's sums; waits for them."""
        self._written[layer].wait()
        sums: dict[int, float] = {}
        part = self._own(layer, part)
        norms, at = PieceNorms(self._kernels, sums), part.offset
        for begin, end, found in self._host.pieces(layer, ("accumulated",), at, at + part.numel):
            norms.add(found["accumulated"], begin, end, [(position, part)])
        return sums.get(position, 0.0)

    def _own(self, layer: int, part: ParameterSlice) -> ParameterSlice:
        """The part of a parameter that this rank has; blocks of a norm are counted from there."""
        state = self._host.layers[layer]
        own = part.within(state.begin, state.end)
        return replace(part, offset=state.begin + own.start, numel=own.stop - own.start)

    # -- fetches ----------------------------------------------------------------------------------
    def fetch(self, layer: int, target: torch.Tensor, free: Fence) -> Fence:
        """Queue the copy of the layer's newest weights to `target`, which may be written after
        `free`; the fence of the (last) copy."""
        updated, copy = self._ledger.updated(layer), self._device.copy
        if self._tiers.holds(layer, "weights"):
            return self._fetch_pieces(layer, target, free, updated)
        source = self._host.layers[layer].weights
        return self._device.fetch.submit(
            f"fetch {layer}", partial(copy, target, source), (free, updated), nbytes=source.nbytes
        )

    def _fetch_pieces(self, layer: int, target: torch.Tensor, free: Fence, updated: Fence) -> Fence:
        device, fetched = self._device, free
        for begin, end in self._tiers.cuts(layer, ("weights",)):
            entry = self._tiers.fetches.next()
            views = self._tiers.views(entry.memory, ("weights",), end - begin)
            nbytes = self._tiers.nbytes(("weights",), end - begin)
            staged = self._stages.submit(
                device.stage,
                f"stage {layer}",
                partial(self._tiers.load, layer, begin, views),
                (entry.free_after, updated),
                nbytes=nbytes,
            )
            entry.free_after = fetched = device.fetch.submit(
                f"fetch {layer}",
                partial(device.copy, target[begin:end], views["weights"]),
                (staged, fetched),
                nbytes=nbytes,
            )
        return fetched


def _nothing() -> None:
    """No element of this rank's has a gradient."""


def _overlap(part: ParameterSlice, begin: int, end: int) -> bool:
    return part.numel > 0 and begin < part.offset + part.numel and part.offset < end
