"""The update lane: what happens to gradients on the host, and when weights become new.

Owns which gradients of this step have arrived, their norms, and the `updated` fences. Never copies
between tiers. The training thread submits, and autograd's in backward; the update lane's thread
computes and writes norms, which the training thread reads only behind a fence.

[Note: the gate] When the norm of the whole model (clipping) or a possible overflow decides over
every layer, gradients are held until backward has ended; then layers are updated in forward order,
so that the next forward starts at once and waits layer by layer. Without either, a layer is updated
as soon as its gradients are complete, or deferred ([Note: deferred updates] of `plan.deferral`).

[Note: a gradient that comes twice] A parameter used in two autograd leaves (two forward calls
before one backward on a GPU, reentrant checkpoints) hands over its gradient in parts. Parts of one
backward are added in the compute dtype, as autograd itself adds them, and so are those of a further
backward that gradient_accumulation_steps does not count; sums over micro-batches are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from stronghold.device.base import Device, Fence, completed
from stronghold.device.kernels import Kernels
from stronghold.memory.gradients import GradientEntry
from stronghold.memory.host import HostStore
from stronghold.plan.planner import Gradients
from stronghold.runtime.adam import AdamSteps, TrainingArrays, adam_bytes, adam_segments
from stronghold.runtime.ledger import GateResult, Ledger, open_gate
from stronghold.runtime.residents import Residents
from stronghold.runtime.spills import Finish, Spills


class Agreement(Protocol):
    """What several ranks decide together."""

    def meet(self, square_sums: Sequence[dict[int, float]]) -> tuple[list[float], list[set[int]]]:
        """This rank's sums of squares, by layer and parameter -> those of the step, and the
        parameters with a gradient on any rank, by layer."""
        ...

    def publishing(self, layer: int, work: Callable[[], object]) -> Callable[[], None]:
        """`work`, after which the layer counts as updated by this rank."""
        ...

    def forget(self) -> None:
        """The step's gradients were used, or are void."""
        ...


class Updater:
    """Applies Adam to layers. Hyper-parameters are read when an update is submitted."""

    def __init__(
        self,
        *,
        device: Device,
        host: HostStore,
        adam: AdamSteps,
        mode: Gradients,
        kernels: Kernels,
        ledger: Ledger,
        deferred: frozenset[int] = frozenset(),
        residents: Residents | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._agreement = agreement
        self._device = device
        self._host = host
        self._mode = mode
        self._kernels = kernels
        self._adam_steps = adam
        self.ledger = ledger
        self._residents = residents
        self.spills = Spills(device=device, host=host, kernels=kernels, ledger=ledger)
        self._square_sums: list[dict[int, float]] = [{} for _ in host.layers]
        self._norm_done: list[Fence] = []
        self._deferred = deferred
        # Layers whose update waits for the end of backward, and the fences of their norms: they are
        # on the same lane, but only a fence tells that a drain or a norm failed.
        self._late: dict[int, list[Fence]] = {}

    # -- asked by the executor --------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Backward is about to run."""
        if self._mode is Gradients.RING:
            self.spills.loads.begin_backward()

    def entry_for(self, layer: int, arrived: frozenset[int], calls: int) -> GradientEntry:
        """Where the drain of these gradients goes."""
        if self._mode is Gradients.ACCUMULATED:
            return self._host.ring_entry()
        if self._mode is Gradients.HELD and self.spills.holds_gradients(layer):
            return self._host.ring_entry()
        repeated = arrived & self.ledger.arrived[layer]
        if self._early(layer, calls):
            self.ledger.refuse_further(layer, repeated)
            return self._host.ring_entry()
        return self._host.ring_entry() if repeated else self._host.held_entry(layer)

    def drained(
        self,
        layer: int,
        arrived: frozenset[int],
        entry: GradientEntry,
        drained: Fence,
        last_fetch: Fence,
        calls: int,
    ) -> None:
        """Gradients of `arrived` are on their way into `entry`: queue what uses them."""
        first = not self.ledger.arrived[layer]
        repeated = self.ledger.arrive(layer, arrived)
        if self._mode is Gradients.ACCUMULATED and self.spills.accumulates(layer):
            slices = self._host.layers[layer].layout.slices
            parts = [(k, slices[k], k in repeated) for k in sorted(arrived)]
            sums = self._square_sums[layer] if self.ledger.boundary else None
            entry.free_after = self.spills.accumulate(
                layer, entry.gradients, parts, drained, sums, first=first
            )
            self._norm_done.append(entry.free_after)
        elif self._mode is Gradients.ACCUMULATED:
            work: Callable[[], None] = self._accumulation(layer, arrived, repeated, entry)
            # Gradients are read, sums read and written; the last micro-batch reads them for a norm.
            size = entry.gradients.element_size() + (12 if self.ledger.boundary else 8)
            nbytes = size * self._numel(layer, arrived)
            self._norm_done.append(
                self._submit("accumulate", layer, work, (drained,), entry, nbytes)
            )
        elif self._early(layer, calls):
            self._update_early(layer, arrived, entry, drained, last_fetch)
        elif self._mode is Gradients.HELD and self.spills.holds_gradients(layer):
            merge = self._holding(layer, arrived, repeated, entry.gradients)
            nbytes = entry.gradients.element_size() * self._numel(layer, arrived)
            self._norm_done.append(
                self.spills.hold(layer, entry, drained, merge, nbytes, first=first)
            )
        else:
            held = self._host.held_entry(layer).gradients
            work = partial(self._holding(layer, arrived, repeated, entry.gradients), held)
            nbytes = entry.gradients.element_size() * self._numel(layer, arrived)
            self._norm_done.append(self._submit("norm", layer, work, (drained,), entry, nbytes))
            if self._mode is Gradients.RING:
                self._late.setdefault(layer, []).append(self._norm_done[-1])

    def _early(self, layer: int, calls: int) -> bool:
        """Whether the layer is updated as its gradients come: no more may come."""
        return self._mode is Gradients.RING and calls <= 1 and layer not in self._deferred

    def _update_early(
        self,
        layer: int,
        arrived: frozenset[int],
        entry: GradientEntry,
        drained: Fence,
        last_fetch: Fence,
    ) -> None:
        self.ledger.applied.add(layer)  # also when it fails halfway
        norms = self._norms(layer, arrived, entry.gradients)
        after = (drained, last_fetch, self.ledger.read(layer))
        dtype, numel = entry.gradients.dtype, self._numel(layer, arrived)
        if self.spills.updates(layer):
            nbytes = dtype.itemsize * numel
            self._norm_done.append(self._submit("norm", layer, norms, (drained,), entry, nbytes))
            steps = self._adam_steps.advance(layer, arrived, 1.0)
            entry.free_after = self.spills.update(layer, steps, entry.gradients, after)
        else:
            adam = self._adam(layer, arrived, entry.gradients, 1.0)
            nbytes = (dtype.itemsize + adam_bytes(self._host.dtype, dtype)) * numel
            updated = self._submit("update", layer, lambda: (norms(), adam()), after, entry, nbytes)
            self.ledger.update(layer, updated)
            self._norm_done.append(updated)

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void, and weights that it changed stay so."""
        self.ledger.abandon_backward()
        self.spills.loads.drop()
        self._late.clear()
        self.forget()

    def end_backward(self, last_fetch: Callable[[int], Fence]) -> None:
        """Backward has ended: update, in the order of the next forward, what is deferred, and what
        more gradients might have come for.
        """
        for layer in sorted(self._late):
            self.ledger.applied.add(layer)
            self._submit_update(layer, 1.0, (last_fetch(layer), *self._late[layer]))
        self.spills.loads.drop()
        self._late.clear()

    # -- asked by the engine ----------------------------------------------------------------------
    def close_gate(
        self, *, clipping: float, loss_scale: float, last_fetch: Callable[[int], Fence]
    ) -> tuple[GateResult, list[int]]:
        """End the step: wait for the norm, then queue the updates in forward order, or nothing on
        overflow.

        `clipping`: largest global norm, 0 for none. Gradients carry `loss_scale`. Returns the
        layers that change. The coefficient is min(1, clipping / (norm + 1e-6)), as in
        torch.nn.utils.clip_grad_norm_.
        """
        for fence in self._norm_done:
            fence.wait()
        self.ledger.check()
        with self.ledger.changing("engine.step"):
            return self._close(clipping, loss_scale, last_fetch)

    def _close(
        self, clipping: float, loss_scale: float, last_fetch: Callable[[int], Fence]
    ) -> tuple[GateResult, list[int]]:
        early = self._mode is Gradients.RING
        square_sums = self._all_square_sums()
        if self._agreement is not None:
            square_sums, self.ledger.arrived[:] = self._agreement.meet(self._square_sums)
        gate, scale = open_gate(square_sums, clipping=clipping, loss_scale=loss_scale, early=early)
        changed = [] if gate.overflow else [layer for layer, _ in self._on_host()]
        if not early and not gate.overflow:
            for layer in changed:
                self._submit_update(layer, scale, (last_fetch(layer),))
            if self._residents is not None:
                self._residents.update(scale)
        self.forget()
        return gate, changed

    def forget(self) -> None:
        """Drop the gradients of the step that has ended or is abandoned."""
        self._norm_done.clear()
        if self._agreement is not None:
            self._agreement.forget()
        if self._residents is not None:
            self._residents.forget()
        self.ledger.forget()
        self._square_sums = [{} for _ in self._square_sums]

    def restart(self) -> None:
        """The arrays are about to be written anew: finish what is queued, and drop the gradients of
        a step that has not ended.
        """
        for fence in self._norm_done:
            fence.wait()
        self.spills.loads.drop()
        self._late.clear()
        self.forget()
        self.ledger.restart()

    # -- work -------------------------------------------------------------------------------------
    def _submit(
        self,
        verb: str,
        layer: int,
        work: Callable[[], object],
        after: tuple[Fence, ...],
        entry: GradientEntry,
        nbytes: int,
    ) -> Fence:
        def run() -> None:
            work()

        lane = self._device.update
        entry.free_after = lane.submit(f"{verb} {layer}", run, after, nbytes=nbytes)
        return entry.free_after

    def _submit_update(self, layer: int, scale: float, after: tuple[Fence, ...]) -> None:
        arrived = frozenset(self.ledger.arrived[layer])
        # Of several nodes this one's last weights may still be on their way to the others.
        after = (*after, self.ledger.read(layer), self.ledger.updated(layer))
        entry = self._waiting(layer)
        if self.spills.updates(layer):
            steps = self._adam_steps.advance(layer, arrived, scale)
            gradients = entry.gradients if entry else None
            used = self.spills.update(layer, steps, gradients, after, finish=self._finish(layer))
            if entry is not None:
                entry.free_after = used
            self._published(layer)
            return
        assert entry is not None
        work = self._publishing(layer, self._adam(layer, arrived, entry.gradients, scale))
        nbytes = adam_bytes(self._host.dtype, entry.gradients.dtype) * self._numel(layer, arrived)
        self.ledger.update(layer, self._submit("update", layer, work, after, entry, nbytes))
        self._published(layer)

    def _published(self, layer: int) -> None:
        """An update of the layer was submitted; of several ranks all do that in one order."""

    def _publishing(self, layer: int, work: Callable[[], object]) -> Callable[[], object]:
        finish = self._finish(layer)
        return work if finish is None else finish(work)

    def _finish(self, layer: int) -> Finish | None:
        """What the last work of an update becomes: other ranks learn of it."""
        return partial(self._agreement.publishing, layer) if self._agreement is not None else None

    def _waiting(self, layer: int) -> GradientEntry | None:
        """Where the layer's gradients wait for the gate; None when that is a file."""
        if self._mode is not Gradients.ACCUMULATED:
            return self._host.layers[layer].held
        if self.spills.accumulates(layer):
            return None
        return GradientEntry(self._host.accumulator(layer), completed("update", "sums"))

    def _all_square_sums(self) -> list[float]:
        """The sum of squares of every gradient of the step: the same bits for every plan."""
        for layer, arrived in self._on_host():
            if missing := arrived - self._square_sums[layer].keys():
                # Accumulated in an earlier micro-batch, without a gradient in the last one.
                self._late_norms(layer, missing)
        sums = [self._square_sums[layer][k] for layer, arrived in self._on_host() for k in arrived]
        return sums if self._residents is None else sums + self._residents.square_sums()

    def _late_norms(self, layer: int, missing: set[int]) -> None:
        if not self.spills.accumulates(layer):
            self._norms(layer, frozenset(missing), self._host.accumulator(layer))()
            return
        slices = self._host.layers[layer].layout.slices
        for k in missing:
            self._square_sums[layer][k] = self.spills.sums_of(layer, k, slices[k])

    def _on_host(self) -> list[tuple[int, set[int]]]:
        """The layers that have gradients and are updated here, in forward order."""
        states = zip(self.ledger.arrived, self._host.layers, strict=True)
        return [
            (layer, arrived)
            for layer, (arrived, state) in enumerate(states)
            if arrived and not state.on_device
        ]

    def _accumulation(
        self, layer: int, arrived: frozenset[int], repeated: frozenset[int], entry: GradientEntry
    ) -> Callable[[], None]:
        accumulator = self._host.accumulator(layer)
        size = entry.gradients.element_size()
        segments = [
            (
                entry.gradients.data_ptr() + own.start * size,
                accumulator.data_ptr() + own.start * 4,
                own.stop - own.start,
                k in repeated,
            )
            for k, own in self._own(layer, arrived)
        ]
        norms = self._norms(layer, arrived, accumulator) if self.ledger.boundary else None

        def run() -> None:
            self._kernels.accumulate(entry.gradients.dtype, segments)
            if norms is not None:
                norms()

        return run

    def _holding(
        self,
        layer: int,
        arrived: frozenset[int],
        repeated: frozenset[int],
        drained: torch.Tensor,
    ) -> Callable[[torch.Tensor], None]:
        """What merges `drained` into what is held, where that is another array, and takes norms."""
        sums = self._square_sums[layer]  # of this step, also if the step is abandoned meanwhile

        def run(held: torch.Tensor) -> None:
            if drained.data_ptr() != held.data_ptr():
                for k, own in self._own(layer, arrived):
                    target, part = held[own], drained[own]
                    if k in repeated:
                        target.add_(part)
                    else:
                        target.copy_(part)
            self._norms(layer, arrived, held, sums)()

        return run

    def _norms(
        self,
        layer: int,
        arrived: frozenset[int],
        gradients: torch.Tensor,
        sums: dict[int, float] | None = None,
    ) -> Callable[[], None]:
        parts = self._own(layer, arrived)
        base, size = gradients.data_ptr(), gradients.element_size()
        segments = [(base + own.start * size, own.stop - own.start) for _, own in parts]
        into = self._square_sums[layer] if sums is None else sums

        def run() -> None:
            found = self._kernels.sum_squares(gradients.dtype, segments)
            into.update(zip((k for k, _ in parts), found, strict=True))

        return run

    def _adam(
        self, layer: int, arrived: frozenset[int], gradients: torch.Tensor, scale: float
    ) -> Callable[[], None]:
        """Adam over the parameters that have a gradient, with this moment's hyper-parameters."""
        arrays = self._arrays(layer, gradients)
        segments = adam_segments(self._adam_steps.advance(layer, arrived, scale), arrays)
        dtype = self._host.dtype
        # The closure keeps `gradients` alive, whose address the segments hold.
        return lambda: self._kernels.adam(dtype, gradients.dtype, segments)

    def _arrays(self, layer: int, gradients: torch.Tensor) -> TrainingArrays:
        state = self._host.layers[layer]
        assert state.exp_avg is not None
        assert state.exp_avg_sq is not None
        return TrainingArrays(
            begin=state.begin,
            end=state.end,
            weights=state.weights[state.begin : state.end],
            low=state.low,
            exp_avg=state.exp_avg,
            exp_avg_sq=state.exp_avg_sq,
            gradients=gradients,
        )

    def _own(self, layer: int, arrived: frozenset[int]) -> list[tuple[int, slice]]:
        """The elements of each parameter that this rank has, counted from the first one of its
        range; an empty slice where it has none."""
        state = self._host.layers[layer]
        slices = state.layout.slices
        return [(k, slices[k].within(state.begin, state.end)) for k in sorted(arrived)]

    def _numel(self, layer: int, arrived: frozenset[int]) -> int:
        return sum(own.stop - own.start for _, own in self._own(layer, arrived))
