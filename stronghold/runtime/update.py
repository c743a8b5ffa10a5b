"""The one path of every update: from gradients that have left compute to weights that are new.

Owns, of each layer, what becomes of its gradients (norms, fp32 sums over micro-batches, an entry in
which they wait) and the optimizer's step; and the account of the step: whether the running
micro-batch ends it, and whether the arrays are of one step (`Ledger`). For each piece of the layer:
load what is in files (nothing, for RAM); work, on the lane of the place where the moments are
(update lane, or compute for a layer whose state is on the device; one launch may cover many
layers); spill what was changed and is in files. Never copies between host and device. The training
thread submits, and autograd's in backward; lanes compute, and write norms, which the training
thread reads behind their record.

[Note: where it stands in the step] As gradients come, unless something decides over all layers: the
norm of the whole model (clipping), or a possible overflow. Then gradients wait until backward has
ended (the gate), and layers are updated in forward order, so that the next forward starts at once
and waits layer by layer. In between stand layers that are deferred ([Note: deferred updates] of
`plan.cost`) or were called several times: at the end of backward.

[Note: a gradient that comes twice] A parameter used in two autograd leaves (two forward calls
before one backward on a GPU, reentrant checkpoints) hands over its gradient in parts. Parts of one
backward are added in the compute dtype, as autograd itself adds them, and so are those of a further
backward that gradient_accumulation_steps does not count; sums over micro-batches are fp32. So parts
wait for the end of backward before they are added to such sums.

[Note: the first pieces] Updates that come as gradients do need their first moments when the first
gradients are there; what lies in files does not depend on these. So loads of the first pieces, as
many as there are entries, are queued when backward begins, in the order of the last step. A piece
that is not the next one expected, in a step whose order is another, drops what was loaded. So does
the end of backward: between steps files may be written from outside.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial

import torch

from stronghold import native
from stronghold.device.base import Record, dependences
from stronghold.errors import ConfigError
from stronghold.memory.layer import Entry, LayerState
from stronghold.memory.tiers import Mode, Views
from stronghold.memory.window import Window
from stronghold.optim.states import Format, group_size
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Position
from stronghold.runtime.parts import Parts
from stronghold.runtime.steps import ParameterStep

logger = logging.getLogger("stronghold")

CLIPPING_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """`grad_norm`: global L2 norm before clipping, loss scale removed, or what waits for it where
    nothing depended on it. `overflow`: the norm is not finite, and nothing was applied; `grad_norm`
    is infinity then, as DeepSpeed's, also where a gradient is NaN."""

    grad_norm: float | Callable[[], float]
    overflow: bool


def norm_and_scale(
    square_sums: Sequence[float], *, clipping: float, loss_scale: float
) -> tuple[float, float]:
    """The global L2 norm without the loss scale, and the factor of the gradients: min(1, clipping /
    (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_ (also of a norm that is not finite), over
    the loss scale. `clipping`: largest global norm, 0 for none.

    Divided, not multiplied by 1 / loss_scale, which rounds once more unless it is a power of two.
    """
    # fsum rounds once: neither the order nor the grouping of parameters into layers can matter.
    norm = math.sqrt(math.fsum(square_sums)) / loss_scale
    clipped = clipping / (norm + CLIPPING_EPSILON) if clipping > 0.0 else 1.0
    return norm, (1.0 if clipped > 1.0 else clipped) / loss_scale


class Ledger:
    """The account of one engine's layers. `early`: updates may be made as gradients come."""

    def __init__(self, layers: Sequence[LayerState], *, early: bool) -> None:
        self._layers = layers
        self.early = early
        self.boundary = True  # whether the running micro-batch ends the step
        self._torn: str | None = None  # why the arrays are of two steps, or of two checkpoints

    @property
    def pending(self) -> bool:
        """Whether gradients of a step that has not ended are there."""
        return any(state.arrived for state in self._layers)

    @property
    def applied(self) -> list[LayerState]:
        """The layers that were updated before the gate, in this step."""
        return [state for state in self._layers if state.applied]

    def begin_backward(self, *, boundary: bool) -> None:
        """The next gradients belong to a micro-batch that ends the step (`boundary`) or not."""
        self.check()
        if self.early and (not boundary or self.applied):
            raise ConfigError(
                "a second engine.backward before engine.step would change weights that were "
                "updated already: set gradient_accumulation_steps to the number of backward calls "
                "per step, or gradient_clipping above 0"
            )
        self.boundary = boundary

    def check(self) -> None:
        """ConfigError while the arrays are of two steps, or of two checkpoints."""
        if self._torn is not None:
            raise ConfigError(self._torn)

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Around a change of many layers, which `what` makes: where it does not end, nothing goes
        on before one that does."""
        self._torn = (
            f"{what} did not end: some layers have new values and others have not. Nothing can go "
            "on from that: load a checkpoint (engine.load_checkpoint)"
        )
        yield
        self._torn = None

    def refuse_dropping(self) -> None:
        """ConfigError when gradients shall be dropped that weights have taken already."""
        if applied := self.applied:
            raise ConfigError(
                f"zero_grad between backward and step: {applied[0].name} was updated with these "
                "gradients already, as they came. To throw a batch away set gradient_clipping "
                "above 0 or bf16.check_grad_overflow true, so that updates wait for engine.step; "
                "or look at the loss before engine.backward"
            )

    def refuse_further(self, state: LayerState, repeated: Iterable[int]) -> None:
        """ConfigError when gradients come again for a layer that was updated before the gate."""
        names = [state.layout.slices[k].name for k in sorted(repeated)]
        if state.applied and names:
            raise ConfigError(
                f"a further gradient of {', '.join(names)} came after its layer was updated; set "
                "gradient_clipping above 0 or bf16.check_grad_overflow true, so that updates wait "
                "for the end of backward"
            )

    def refuse_early(self, layers: Iterable[int], verb: str) -> None:
        """ConfigError when one of these layers was updated before the gate, and is `verb` ("read",
        "written") from outside: until the step ends a plain loop has the weights of the step
        before."""
        for state in (self._layers[layer] for layer in layers):
            if state.applied:
                raise ConfigError(
                    f"weights of {state.name} are {verb} between engine.backward and engine.step, "
                    "and were updated as their gradients came: do that after engine.step(), or set "
                    "gradient_clipping above 0 or bf16.check_grad_overflow true, so that updates "
                    "wait for the step; for several backwards a step set "
                    "gradient_accumulation_steps to the number of backwards"
                )

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void. Weights that it changed cannot be changed
        back: after that no further step is exact, and `begin_backward` refuses it."""
        names = [state.layout.name for state in self.applied]
        if names:
            some = f"{names[0]} and {len(names) - 1} more layers" if names[1:] else names[0]
            self._torn = (
                f"backward failed after {some} had been updated: weights are of two steps. "
                "Start again from a checkpoint; with gradient_clipping above 0 updates wait for "
                "the end of backward, and a failed one changes nothing"
            )
        elif self.pending:
            logger.warning("backward failed: the gradients of this step so far are dropped")

    def forget(self) -> None:
        """Drop the gradients of the step that has ended or is abandoned."""
        for state in self._layers:
            state.forget_step()


Work = Callable[[], None]
# What a verb loads and spills, where that is not masters and moments.
WHAT = {"update": "", "norm": " gradients", "merge": " gradients", "accumulate": " sums"}
SUM_BLOCK_NUMEL = 65536  # kSumBlock of the kernels: a part of the result's definition


@dataclass(slots=True, eq=False)
class Gathered:
    """Gradients of one layer: bytes in `memory`, which lie as the layer's array "gradients", or (of
    a model that is whole on the device) `each` by itself. Where `memory` is None they
    lie in `array` of the layer, maybe in a file. `at_once`: the layer is updated with them as they
    come. `part`: they wait for the end of backward, since more may come before. `repeated`: those
    that had come before, of parts in this backward, else in this step; `first`: nothing had."""

    state: LayerState
    arrived: frozenset[int]
    memory: torch.Tensor | None = None
    record: Record = field(default_factory=Record)
    _: KW_ONLY
    each: Mapping[int, torch.Tensor] = field(default_factory=dict)
    array: str = ""
    at_once: bool = False
    part: bool = False
    repeated: frozenset[int] = frozenset()
    first: bool = False

    @property
    def arrays(self) -> tuple[str, ...]:
        return (self.array,) if self.array else ()


@dataclass(eq=False)  # without slots: its properties are found once
class Piece:
    """Elements [begin, end) of one range of a layer, and the arrays that an operation works on
    there. `entry` has those that lie in files."""

    found: Gathered
    begin: int
    end: int
    views: Views
    entry: Entry | None = None

    def gradient(self, k: int, at: int) -> int:
        """The address of the gradient of the layer's element `at`, of parameter `k`."""
        found = self.found
        if k in found.each:
            gradient, offset = found.each[k], at - found.state.layout.slices[k].offset
            return gradient.data_ptr() + offset * gradient.element_size()
        flat = self.gradients
        return flat.data_ptr() + (at - self.begin) * flat.element_size()

    @cached_property
    def gradients(self) -> torch.Tensor:
        """The flat gradients of these elements."""
        found = self.found
        if found.memory is None:
            return self.views[found.array]
        return found.state.maps["gradients"].view(found.memory, self.begin, self.end)

    @cached_property
    def range(self) -> int:
        """The number of the range that has the elements."""
        ranges = self.found.state.layout.ranges
        return next(i for i, each in enumerate(ranges) if each.begin <= self.begin < each.end)

    @cached_property
    def format(self) -> Format:
        """Of this range."""
        state = self.found.state
        return state.formats[state.layout.ranges[self.range].format]

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of its gradients."""
        return torch.float32 if self.found.array == "accumulated" else self.format.dtype


class Updates:
    """Norms, sums and steps of one engine. Hyper-parameters are read when an update is submitted.

    `plan` says where in the step updates stand, and whether gradients wait as sums; `window` has
    the slots of layers on the device.
    """

    def __init__(self, parts: Parts, ledger: Ledger, plan: Plan, window: Window) -> None:
        self._device, self._kernels = parts.device, parts.kernels
        self._host, self._tiers = parts.host, parts.host.tiers
        self._layers, self._window = parts.layers, window
        self._ledger, self._steps, self._plan = ledger, parts.steps, plan
        self._metrics, self._team = parts.metrics, parts.team
        self._device_sums: list[torch.Tensor] = []  # of squares, of this step
        # Of layers on the device: their gradients, and what updates once the gate has decided.
        self._prepared: tuple[Sequence[Gathered], Callable[[float], None]] | None = None
        self._expected: deque[Piece] = deque()  # loaded ahead ([Note: the first pieces])
        self._first: list[tuple[LayerState, int, int]] = []  # since backward began

    # -- gradients come ---------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Backward is about to run."""
        if self._ledger.early:
            first, self._first = self._first, []
            for state, begin, end in first:
                filed = self._tiers.spilled(state.index)
                unknown = Gathered(state, frozenset())  # they have not come
                self._expected.append(self._load(unknown, begin, end, filed))

    def gathered(self, batch: Sequence[Gathered]) -> bool:
        """Gradients are on their way: queue what uses them, in one launch for all layers of `batch`
        where they are summed up on the device. Returns whether they stay in their slot until the
        step ends. ConfigError when gradients come after the update that they were for."""
        for found in batch:
            state = found.state
            if found.part:
                self._hold_part(found)
                return False
            found.first, found.repeated = not state.arrived, found.arrived & state.arrived
            self._ledger.refuse_further(state, found.repeated if found.at_once else found.arrived)
            state.arrived |= found.arrived
        if batch and self._plan.accumulates:
            self._accumulate(batch)
            return False
        stay = False
        for found in batch:
            if found.at_once:
                self._update_now(found)
            elif found.state.on_device:
                stay = self._hold_on_device(found)
            else:
                self._hold(found)
        return stay

    def _update_now(self, found: Gathered) -> None:
        state = found.state
        state.applied = True  # also when it fails halfway
        if state.on_device:
            self._device_sums.append(self._sums_on_device([found]))
            self._prepare([found])(1.0)
            return
        self._step(found, 1.0, norms=self._norms(state))

    def _hold(self, found: Gathered) -> None:
        """Merge gradients into those that wait, where these are elsewhere, and take norms once all
        have come."""
        state, drained = found.state, found.memory
        assert drained is not None
        if not self._tiers.holds(state.index, "gradients"):
            self._host.held_entry(state.index)
        norms = None if found.part else self._norms(state)

        def work(piece: Piece) -> None:
            held = piece.views["gradients"]
            new = state.maps["gradients"].view(drained, piece.begin, piece.end)
            if held.data_ptr() != new.data_ptr():
                for k, at, numel in _parts(piece):
                    own = slice(at - piece.begin, at - piece.begin + numel)
                    _merge(held[own], new[own], add=k in found.repeated)
            if norms is not None:
                norms.add(piece, "gradients")

        verb = "norm" if norms is not None else "merge"
        self._over_pieces(verb, found, ("gradients",), work, _grad_bytes, norms=norms is not None)

    def _hold_on_device(self, found: Gathered) -> bool:
        state, own, flat = found.state, found.state.own_gradients, found.memory
        if own is None or flat is None:  # a model that is whole there
            for k, gradient in found.each.items():
                if k in found.repeated:
                    state.kept[k].add_(gradient)
                else:
                    state.kept[k] = gradient
            return True
        if flat is own.gradients:
            return True
        slices, places = state.layout.slices, state.maps["weights"]

        def work() -> None:
            for k in sorted(found.arrived):
                part = places.parameter(flat, slices[k])
                _merge(own.view(state, k), part, add=k in found.repeated)

        self._device.compute.submit(
            f"merge {state.index}", work, reads=(found.record,), writes=(own.record,)
        )
        return False

    def _accumulate(self, batch: Sequence[Gathered]) -> None:
        """Add gradients to their layers' fp32 sums; those that are not `repeated` begin one. The
        last micro-batch takes norms of what is updated on the host; of what is on the device one
        launch does at the gate."""

        def work(pieces: Sequence[Piece], norms: PieceNorms | None = None) -> None:
            segments: dict[torch.dtype, list[tuple[int, int, int, bool]]] = defaultdict(list)
            for piece in pieces:
                sums = piece.views["accumulated"]
                for k, at, numel in _parts(piece):
                    place = sums.data_ptr() + (at - piece.begin) * 4
                    segment = piece.gradient(k, at), place, numel, k in piece.found.repeated
                    segments[piece.format.dtype].append(segment)
            kernels = self._device.kernels if batch[0].state.on_device else self._kernels
            for dtype, of_dtype in segments.items():
                kernels.accumulate(dtype, of_dtype)
            for piece in pieces if norms is not None else ():
                assert norms is not None
                norms.add(piece, "accumulated")

        if batch[0].state.on_device:
            moved = sum(
                part.numel * (found.state.sections[k].dtype.itemsize + more)
                for found in batch
                for k in found.arrived
                for part in (found.state.layout.slices[k],)
                for more in (8 if k in found.repeated else 4,)
            )
            self._on_device("accumulate", batch, ("accumulated",), work, moved)
            return
        (found,) = batch
        norms = self._norms(found.state) if self._ledger.boundary else None
        # Gradients are read, sums read and written; the last micro-batch reads them for a norm.
        more = 12 if norms is not None else 8

        def bytes_each(made: Format) -> float:
            return made.dtype.itemsize + more

        self._over_pieces(
            "accumulate", found, ("accumulated",), lambda p: work([p], norms), bytes_each
        )

    def end_backward(self) -> None:
        """Backward has ended: update, in the order of the next forward, what is deferred, and what
        more gradients might have come for."""
        for state in self._layers if self._ledger.early else ():
            if state.arrived and not state.applied:
                state.applied = True
                self._step(self._waiting(state), 1.0)
        for state in self._layers:
            if state.parts and self.parts_wait(state):
                self._take_parts(state)
            state.parts.clear()
        self._expected.clear()

    def _hold_part(self, found: Gathered) -> None:
        """Merge a part of gradients into those that wait for the end of backward."""
        state = found.state
        if not state.on_device:
            self._hold(found)
            return
        assert found.memory is not None
        for k in found.arrived:  # the slot is another layer's next
            part = state.maps["weights"].parameter(found.memory, state.layout.slices[k])
            state.kept[k] = state.kept[k].add_(part) if k in found.repeated else part.clone()

    def parts_wait(self, state: LayerState) -> bool:
        """Whether parts of its gradients wait for the end of backward: for a sum that they begin,
        or an update on the device that would come between them."""
        at_once = self._plan.updates[state.index] is Position.DRAIN
        return self._plan.accumulates or (state.on_device and at_once)

    def _take_parts(self, state: LayerState) -> None:
        """All parts of the layer's gradients have come."""
        arrived = frozenset(state.parts)
        at_once = not self._plan.accumulates
        found = Gathered(state, arrived, each=dict(state.kept), at_once=at_once)
        if not state.on_device:
            held = self._host.held_entry(state.index)
            found = Gathered(state, arrived, held.memory, held.record)
        state.kept.clear()
        self.gathered([found])

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void, and weights that it changed stay so."""
        self._ledger.abandon_backward()
        self._expected.clear()
        self.forget()

    # -- the gate ---------------------------------------------------------------------------------
    def close_gate(
        self, *, clipping: float, loss_scale: float, skips: bool
    ) -> tuple[GateResult, list[int]]:
        """End the step: wait for the norm, then queue the updates in forward order, or nothing
        where the norm is not finite and it `skips` then. Where the norm does not decide anything
        and is the device's, nobody waits for it.

        `clipping`: largest global norm, 0 for none. Gradients carry `loss_scale`. Returns the
        layers on the host that change.
        """
        for state in self._layers:
            state.records["norms"].writer.wait()
        self._ledger.check()
        self._steps.refuse_changed()
        with self._ledger.changing("engine.step"):
            gate, scale = self._decide(clipping, loss_scale, skips)
            changed: list[LayerState] = []
            if not gate.overflow:
                changed = [s for s in self._layers if s.arrived and not s.on_device]
                for state in changed:
                    if not state.applied:
                        self._step(self._waiting(state), scale)
                prepared, self._prepared = self._prepared, None
                if prepared is not None:
                    prepared[1](scale)
            self.forget()
        return gate, [state.index for state in changed]

    def _decide(self, clipping: float, loss_scale: float, skips: bool) -> tuple[GateResult, float]:
        on_host, read = self._square_sums()
        on_host = self._team.meet(self._layers, on_host)
        if skips or clipping > 0.0 or on_host or read is None:
            sums = on_host + (read() if read is not None else [])
            found, scale = norm_and_scale(sums, clipping=clipping, loss_scale=loss_scale)
            if skips and not math.isfinite(found):
                return GateResult(grad_norm=math.inf, overflow=True), scale
            return GateResult(grad_norm=found, overflow=False), scale

        def norm() -> float:
            return norm_and_scale(read(), clipping=0.0, loss_scale=loss_scale)[0]

        return GateResult(grad_norm=norm, overflow=False), 1.0 / loss_scale

    def _square_sums(self) -> tuple[list[float], Callable[[], list[float]] | None]:
        """The sums of squares of the step's gradients, in any order: of those on the host, and what
        reads those on the device, whose share of the update is prepared meanwhile."""
        on_host: list[float] = []
        waiting: list[Gathered] = []
        for state in self._layers:
            if state.on_device:
                if state.arrived and not state.applied:
                    waiting.append(self._waiting(state))
                continue
            for k in sorted(state.arrived - state.square_sums.keys()):
                self._late_norm(state, k)  # summed up before, without a gradient in the last batch
            on_host += [state.square_sums[k] for k in state.arrived]
        sums = list(self._device_sums)
        if waiting:
            sums.append(self._sums_on_device(waiting))
            self._prepared = waiting, self._prepare(waiting)
        return on_host, self._device.read_later(torch.cat(sums)) if sums else None

    def _late_norm(self, state: LayerState, k: int) -> None:
        ((_, begin, end),), norms = state.elements((k,)), self._norms(state)
        state.square_sums[k] = 0.0
        offset = state.layout.slices[k].offset
        for piece, flat in self.gradient_pieces(state, k):
            at = offset + piece.start
            norms.add_part(flat, at, offset + piece.stop, k, begin, end - begin)

    def gradient_pieces(
        self, state: LayerState, k: int, *, mode: Mode = "read"
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """The gradient of parameter `k` that waits for the step, as `HostStore.pieces`: which of
        the parameter's elements, and a flat tensor of them, of this rank's. Nothing of the layer's
        is under way meanwhile."""
        found = self._waiting(state)
        state.records["norms"].writer.wait()
        found.record.wait()
        part = state.layout.slices[k]
        at, end = part.offset, part.offset + part.numel
        if found.array:
            for piece, there in self._host.pieces(state.index, found.arrays, at, end, mode=mode):
                yield piece, there[found.array]
        elif found.memory is None:
            yield slice(0, part.numel), found.each[k].view(-1)
        else:
            ((_, first, last),) = state.elements((k,))
            flat = state.maps["gradients"].view(found.memory, first, last)
            yield slice(first - at, last - at), flat

    def forget(self) -> None:
        """Drop the gradients of the step that has ended or is abandoned."""
        self._team.forget()
        if self._prepared is not None:  # the gate stays closed: its steps were not taken
            for found in self._prepared[0]:
                self._steps.retract(found.state, found.arrived)
            self._prepared = None
        self._device_sums.clear()
        for state in self._layers:
            if state.on_device:
                self._window.drop_held(state.index)
        self._steps.forget()
        self._ledger.forget()

    def restart(self, *, keep_gradients: bool = False) -> None:
        """The arrays are about to be written anew, or moved: finish what is queued, and drop the
        gradients of a step that has not ended, unless they are kept: sums of whole backwards are
        arrays like others."""
        self._expected.clear()
        if not keep_gradients:
            self.forget()
        for state in self._layers:
            state.wait_unused()

    # -- the optimizer's step ---------------------------------------------------------------------
    def _waiting(self, state: LayerState) -> Gathered:
        """The layer's gradients where they wait."""
        arrived, own = frozenset(state.arrived), state.own_gradients
        if self._plan.accumulates:
            array = "accumulated"
        elif not state.on_device:
            array = "gradients"
        elif own is not None:
            return Gathered(state, arrived, own.gradients, own.record)
        else:
            return Gathered(state, arrived, each=state.kept)
        return Gathered(state, arrived, record=state.records[array], array=array)

    def _step(self, found: Gathered, scale: float, norms: PieceNorms | None = None) -> None:
        """One step of a layer on the host, with this moment's hyper-parameters; norms of its
        gradients on the way, where they were not taken before."""
        state, summed = found.state, found.array == "accumulated"
        steps = dict(
            zip(
                sorted(found.arrived),
                self._steps.advance(state, found.arrived, scale),
                strict=True,
            )
        )

        def work(piece: Piece) -> None:
            if norms is not None:
                norms.add(piece)
            made = piece.format
            self._kernels.update(
                made.kernel,
                made.dtype,
                piece.grad_dtype,
                _segments(piece, steps),
                lean=made.trained.is_lean,
            )

        def bytes_each(made: Format) -> float:
            read_twice = 0 if norms is None else 4 if summed else made.dtype.itemsize
            return _step_bytes(made, summed=summed) + read_twice

        # An update whose norms were taken before is not waited for by the gate.
        taken = norms is not None
        self._over_pieces("update", found, state.changed, work, bytes_each, norms=taken)
        self._team.exchange(state)

    def _over_pieces(
        self,
        verb: str,
        found: Gathered,
        changed: Sequence[str],
        work: Callable[[Piece], None],
        bytes_each: Callable[[Format], float],
        *,
        norms: bool = True,
    ) -> None:
        """Queue `work` over a layer on the host, piece by piece: it reads the gradients of `found`
        and writes the arrays `changed`, and `norms` where it takes them. `bytes_each`: what it
        moves for an element of a format."""
        state, device = found.state, self._device
        last: Callable[[Work], Work] = lambda run: run  # noqa: E731
        if verb == "update":
            last = partial(self._team.publishing, state)
        of_ram = self._present(state, changed)
        writes = [*state.records_of(of_ram), *([state.records["norms"]] if norms else [])]
        arrays = (*changed, *found.arrays)
        filed = tuple(a for a in self._tiers.spilled(state.index) if a in arrays)
        if not filed:
            pieces = self._whole(found, changed)
            device.update.submit(
                f"{verb} {state.index}",
                last(partial(_each, work, pieces)),
                reads=(found.record,),
                writes=writes,
                nbytes=int(_moved(found, bytes_each)),
            )
            return
        kept = tuple(a for a in (*of_ram, *found.arrays) if a not in filed)
        spills = tuple(a for a in filed if a in changed)
        reads = () if found.array in filed else (found.record,)
        spilled = dependences((), (), state.records_of(spills))
        cuts = list(self._cut(found, filed))
        if not cuts:  # no element of this rank's has a gradient
            run = last(lambda: None)
            device.update.submit(f"{verb} {state.index}", run, reads=reads, writes=writes)
        for begin, end, from_files in cuts:
            if from_files:
                piece = self._next(verb, found, begin, end, from_files)
            else:
                piece = Piece(found, begin, end, {})
            piece.views = piece.views | self._slabs(state, kept, begin, end)
            entry = piece.entry
            run = partial(work, piece)
            device.update.submit(
                f"{verb} {state.index}",
                run if (begin, end, from_files) != cuts[-1] else last(run),
                reads=reads,
                writes=writes if entry is None else (entry.record, *writes),
                nbytes=int(bytes_each(piece.format) * (end - begin)),
            )
            if entry is not None and any(array in spills for array in from_files):
                views = {array: piece.views[array] for array in from_files if array in spills}
                fence = self._tiers.queue_spill(
                    device, state.index, begin, end, views, entry, spilled, what=WHAT[verb]
                )
                spilled = (fence,)
        for record in state.records_of(spills) if cuts and spilled else ():
            record.write(spilled[0])

    def _cut(
        self, found: Gathered, filed: tuple[str, ...]
    ) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """The pieces for which a gradient came, of what the layer has here: begin, end, and those
        of the arrays `filed` that have the elements. In memory a piece is a range's whole share."""
        state = found.state
        places = [(at, at + numel) for _, at, numel in state.owned(found.arrived).parts]
        for share in state.shares:
            arrays = tuple(a for a in filed if state.maps[a].has(*share))
            cuts = self._tiers.cuts(state.index, arrays, *share) if arrays else iter([share])
            for begin, end in cuts:
                if any(begin < last and first < end for first, last in places):
                    yield begin, end, arrays

    # -- pieces -----------------------------------------------------------------------------------
    def _present(self, state: LayerState, arrays: Iterable[str]) -> tuple[str, ...]:
        """Those of `arrays` that the layer has in memory."""
        filed = self._tiers.spilled(state.index)
        return tuple(a for a in arrays if a not in filed and state.array(a) is not None)

    def _slabs(self, state: LayerState, arrays: Iterable[str], begin: int, end: int) -> Views:
        """Elements [begin, end) of those arrays that their range has."""
        views: Views = {}
        for array in arrays:
            flat, lies = state.array(array), state.maps[array]
            assert flat is not None
            section = lies.find(begin, end)
            if section is not None:
                views[array] = section.view(flat, begin, end)
        return views

    def _whole(self, found: Gathered, changed: Sequence[str]) -> list[Piece]:
        """The layer, of which nothing lies in a file, as a piece for each range with a gradient."""
        state = found.state
        arrays = (*self._present(state, changed), *found.arrays)
        return [
            Piece(found, begin, end, self._slabs(state, arrays, begin, end))
            for begin, end, _ in self._cut(found, ())
        ]

    def _next(
        self, verb: str, found: Gathered, begin: int, end: int, filed: tuple[str, ...]
    ) -> Piece:
        """The piece with room in a staging entry, whose load is queued unless there is nothing."""
        state = found.state
        if verb != "update" and found.first:
            entry = self._tiers.updates.next()
            views = self._tiers.views(entry.memory, state.index, filed, begin, end)
            return Piece(found, begin, end, views, entry)
        if verb == "update" and len(self._first) < len(self._tiers.updates):
            self._first.append((state, begin, end))
        if self._expected:
            piece = self._expected[0]
            if (piece.found.state, piece.begin, piece.end) == (state, begin, end):
                piece.found = found
                return self._expected.popleft()
            self._expected.clear()
        return self._load(found, begin, end, filed, WHAT[verb])

    def _load(
        self, found: Gathered, begin: int, end: int, filed: Sequence[str], what: str = ""
    ) -> Piece:
        entry = self._tiers.updates.next()
        views = self._tiers.queue_load(
            self._device, found.state, begin, end, filed, entry, what=what
        )
        return Piece(found, begin, end, views, entry)

    def _norms(self, state: LayerState) -> PieceNorms:
        return PieceNorms(self._kernels, state.square_sums)

    # -- on the device ----------------------------------------------------------------------------
    def _on_device(
        self,
        verb: str,
        batch: Sequence[Gathered],
        changed: Sequence[str],
        work: Callable[[Sequence[Piece]], None],
        nbytes: int,
    ) -> None:
        """Run `work` on the compute lane, in one launch for all layers of `batch`."""
        pieces = [piece for found in batch for piece in self._whole(found, changed)]
        records = [
            found.state.records[array]
            for found in batch
            for array in self._present(found.state, changed)
        ]
        first = batch[0].state.index
        more = f" and {len(batch) - 1} more layers" if len(batch) > 1 else ""
        self._device.compute.submit(
            f"{verb} {first}{more}",
            lambda: work(pieces),
            reads=[found.record for found in batch],
            writes=records,
            nbytes=nbytes,
        )
        for seconds in self._device.compute.take_waits():
            self._metrics.waited("update", seconds)

    def _sums_on_device(self, batch: Sequence[Gathered]) -> torch.Tensor:
        """The sum of squares of each gradient, fp64, on the device: valid for later compute."""
        sums: list[torch.Tensor] = []

        def work(pieces: Sequence[Piece]) -> None:
            segments: dict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
            for piece in pieces:
                for k, at, numel in _parts(piece):
                    segments[piece.grad_dtype].append((piece.gradient(k, at), numel))
            kernels = self._device.kernels
            made = [kernels.sum_squares_async(dtype, each) for dtype, each in segments.items()]
            sums.append(made[0] if len(made) == 1 else torch.cat(made))

        moved = sum(_moved(found, _grad_bytes) for found in batch)
        self._on_device("norm", batch, (), work, int(moved))
        return sums[0]

    def _prepare(self, batch: Sequence[Gathered]) -> Callable[[float], None]:
        """Everything of an update but the gradients' scale, with this moment's hyper-parameters:
        the host's share of it, done while the device is still busy with backward. What it returns
        does the rest."""
        calls: dict[tuple[Format, torch.dtype], list[native.Segment]] = defaultdict(list)
        moved = 0.0
        for found in batch:
            state = found.state
            advanced = self._steps.advance(state, found.arrived, 1.0)
            steps = dict(zip(sorted(found.arrived), advanced, strict=True))
            for piece in self._whole(found, state.changed):
                calls[piece.format, piece.grad_dtype] += _segments(piece, steps)
            moved += _moved(found, partial(_step_bytes, summed=found.array == "accumulated"))
        updates = [
            self._device.kernels.prepare_update(
                made.kernel, made.dtype, dtype, segments, lean=made.trained.is_lean
            )
            for (made, dtype), segments in calls.items()
        ]

        def work(scale: float, _: Sequence[Piece]) -> None:
            for update in updates:
                update(scale)
            # A graph that was kept may need the weights of before: autograd refuses it then.
            torch.autograd.graph.increment_version(
                [found.state.parameters[k] for found in batch for k in found.arrived]
            )

        changed = tuple(dict.fromkeys(array for found in batch for array in found.state.changed))
        return lambda scale: self._on_device(
            "update", batch, changed, partial(work, scale), int(moved)
        )


class PieceNorms:
    """Sums of squares of parameters, by position, in `sums`, with the bits that the whole gives.

    The kernel adds up blocks of a fixed size, counted from a parameter's first element, and then
    the blocks in order ([Note: same bits] of `stronghold.h`); pieces of a layer end wherever a page
    does. So a block that is cut is put together here before it is summed. A sum is complete once
    every element was added, in order. Entered by one thread at a time.
    """

    def __init__(self, kernels: native.Kernels, sums: dict[int, float]) -> None:
        self._kernels = kernels
        self._sums = sums
        self._totals: dict[int, float] = {}  # `sums` may have an older one
        self._cut: torch.Tensor | None = None  # the block that the last piece cut

    def add(self, piece: Piece, array: str = "") -> None:
        """Add the piece's gradients, or what lies in `array`, of every parameter that arrived."""
        flat = piece.views[array] if array else piece.gradients
        state, number, whole = piece.found.state, piece.range, list[tuple[int, int, int]]()
        for k, at, stop in state.elements(piece.found.arrived):
            if state.layout.slices[k].range != number:
                continue
            numel = stop - at
            inside = piece.begin <= at and at + numel <= piece.end
            # A simulation's blocks would be most of its time.
            if inside or not numel or flat.is_meta:
                address = flat.data_ptr() + (at - piece.begin) * flat.element_size()
                whole.append((k, address, numel))
            elif at < piece.end and piece.begin < at + numel:
                self.add_part(flat, piece.begin, piece.end, k, at, numel)
        found = self._kernels.sum_squares(flat.dtype, [(at, numel) for _, at, numel in whole])
        self._sums.update(zip((k for k, _, _ in whole), found, strict=True))

    def add_part(
        self, flat: torch.Tensor, begin: int, end: int, k: int, first: int, numel: int
    ) -> None:
        """Add what of parameter `k`, `numel` elements of the layer from `first` on, lies in `flat`:
        elements [begin, end)."""
        blocks: list[torch.Tensor] = []
        at, stop = max(begin, first), min(end, first + numel)
        while at < stop:
            done = (at - first) // SUM_BLOCK_NUMEL + 1
            last = first + min(numel, done * SUM_BLOCK_NUMEL)
            block = flat[at - begin : min(stop, last) - begin]
            if self._cut is not None:
                block, self._cut = torch.cat([self._cut, block]), None
            if stop < last:
                self._cut = block.clone()
            else:
                blocks.append(block)
            at = min(stop, last)
        segments = [(block.data_ptr(), block.numel()) for block in blocks]
        for value in self._kernels.sum_squares(flat.dtype, segments):
            self._sums[k] = self._totals[k] = self._totals.get(k, 0.0) + value


def _merge(target: torch.Tensor, part: torch.Tensor, *, add: bool) -> None:
    if add:
        target.add_(part)
    else:
        target.copy_(part)


def _parts(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """(position, first element of the layer, number of elements) of the gradients that came for
    elements of the piece."""
    for k, at, numel in piece.found.state.owned(piece.found.arrived).parts:
        first, last = max(at, piece.begin), min(at + numel, piece.end)
        if first < last:
            yield k, first, last - first


def _each(work: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        work(piece)


def _grad_bytes(made: Format) -> float:
    return made.dtype.itemsize


def _step_bytes(made: Format, *, summed: bool) -> float:
    """Bytes that a step reads and writes for one parameter; `summed`: its gradient is fp32."""
    return made.trained.update_bytes(torch.float32 if summed else made.dtype)


def _moved(found: Gathered, bytes_each: Callable[[Format], float]) -> float:
    """Bytes of an operation over the gradients of this rank."""
    numels = found.state.owned(found.arrived).numels
    return sum(bytes_each(made) * numel for made, numel in numels)


def _segments(piece: Piece, steps: Mapping[int, ParameterStep]) -> list[native.Segment]:
    """The kernel's segments of the piece, one for each parameter with a gradient in it. The caller
    keeps the piece's arrays alive until the kernel has run."""
    # Of each array of a segment: the address of its first item, an item's bytes, its elements.
    places: list[tuple[int, int, int]] = []
    for array in piece.format.trained.kernel_arrays:
        flat = None if array is None else piece.views.get(array)
        if array is None or flat is None:
            places.append((0, 0, 1))
        else:
            places.append((flat.data_ptr(), flat.element_size(), group_size(array)))
    segments = []
    for k, at, numel in _parts(piece):
        i = at - piece.begin
        weight, low, *moments = (begin + i // of * size for begin, size, of in places)
        numbers, scale, count, flags = steps[k]
        segments.append(
            native.Segment._make(
                (weight, low, piece.gradient(k, at), numel, *moments, *numbers, scale, count, flags)
            )
        )
    return segments
