"""A layer (FSDP unit): its arrays, and four records of what is done with it while an engine lives.

| record | what it has | written by |
|---|---|---|
| `on_gpu` | its slots, and how far the fetch (unshard) is | `memory.window` |
| `views` | what its parameters point to | `streaming.parameter_views`, `streaming.trainer` |
| `gradients` | gradients that are expected, and where they lie | `streaming`: executor, gradients |
| `optimizer` | which parameters are trained, and update counts | `streaming.steps`, a load |

`memory.host` makes the arrays. `repr(layer)` prints all four records. The training thread enters,
and autograd's thread in backward. The two never run at once. Lanes use the arrays' addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from stronghold.devices.base import Fence, Record
from stronghold.errors import ConfigError, StateError
from stronghold.memory.buffers import GradientSlot, Slot
from stronghold.model.arrays import ArrayMap, Section, array_maps, contiguous_strides, state_arrays
from stronghold.model.layout import LayerLayout, ParameterSlice, Shards, Span, decoded_bytes
from stronghold.model.packed_formats import PackedFormat, PackingError
from stronghold.model.stored_tensors import PackedParameter
from stronghold.native import Pool
from stronghold.optim.states import Format, Formats
from stronghold.plan.homes import GPU, HOST, Home

# Access records beside those of the states' arrays. "norms": sums of squares of gradients.
FURTHER_RECORDS = ("accumulated", "gradients", "norms")


class Residency(Enum):
    """How far the fetch of a layer is.

    AWAY: the layer has no slot. FETCHING: the fetch is queued. READY: compute has waited for it.
    """

    AWAY = "away"
    FETCHING = "fetching"
    READY = "ready"


TRANSITIONS: dict[Residency, frozenset[Residency]] = {
    Residency.AWAY: frozenset({Residency.FETCHING}),
    Residency.FETCHING: frozenset({Residency.READY, Residency.AWAY}),
    # READY to FETCHING: a resident layer was updated, and is fetched again into its own slot.
    Residency.READY: frozenset({Residency.AWAY, Residency.FETCHING}),
}


@dataclass(slots=True, eq=False)
class GpuRecord:
    """A layer's buffers on the GPU.

    slot               the slot with its weights, or None
    residency          how far its fetch is
    version            how often the weights at home have changed. The slot has this step's weights
                       if its contents are (layer, version)
    gradient_slot      the slot in which its gradients gather now, or None
    own_gradient_slot  a gradient slot that no other layer takes, or None
    """

    slot: Slot | None = None
    residency: Residency = Residency.AWAY
    version: int = 0
    gradient_slot: GradientSlot | None = None
    own_gradient_slot: GradientSlot | None = None


class OwnStorage(NamedTuple):
    """A storage that one view alone holds.

    `address`: of torch's object. `num_references`: references to it while only the view holds it.
    """

    address: int
    num_references: int


class ParameterPlace(NamedTuple):
    """Views of one buffer, one per parameter of a layer, in the parameters' shapes.

    `addresses`: the views' data pointers. `storages`: the storage of each view, which no other view
    shares. Empty for a slot that many layers take.
    """

    views: list[torch.Tensor]
    addresses: tuple[int, ...]
    storages: tuple[OwnStorage, ...]


class CopyElsewhere(NamedTuple):
    """A copy of a parameter's values on another device, which a program has made.

    `name`: of the parameter. `copy`: None once the program has dropped it. `version`: the copy's,
    when the parameter was pointed at it: torch counts writes in place.
    """

    name: str
    copy: Callable[[], torch.Tensor | None]
    version: int


@dataclass(slots=True, eq=False)
class ParameterViews:
    """The memory to which a layer's parameters point.

    places          the places that were bound, by address
    place           the place to which the parameters point. None: an interrupt may have left some
                    parameters at one place and some at another
    hidden          the newest values are on their way to `place`
    version_sum     sum of the parameters' versions at the last look
    saved_versions  the parameters' versions when writes in place were last copied to the arrays
    epoch           number of changes of the values
    copies          copies that a program pointed parameters at, since the last look

    A version is torch's count of writes in place.
    """

    places: dict[int, ParameterPlace] = field(default_factory=dict)
    place: ParameterPlace | None = None
    hidden: bool = False
    version_sum: int = 0
    epoch: int = 0
    saved_versions: list[int] | None = None
    copies: list[CopyElsewhere] = field(default_factory=list)


class GradientStage(Enum):
    """How far the gradients of a layer are in a step.

    EMPTY: no gradient has come. GATHERING: gradients come into a slot. OFFLOADING: the copy to the
    host (reduce) is queued. PENDING: gradients wait for their update. EARLY: an update before the
    gate uses them. The gate commits or drops its result.
    """

    EMPTY = "no gradients"
    GATHERING = "gradients gather"
    OFFLOADING = "gradients are offloaded"
    PENDING = "gradients are pending"
    EARLY = "updated early"


@dataclass(slots=True, eq=False)
class ExpectedGradients:
    """Gradients that the forwards since the last backward announce.

    num_pending_backwards  forward calls whose backward has not run yet. Each gives every gradient
    resident_calls         calls of a resident layer, whose gradients come once for all calls. In
                           reentrant checkpoints they come once for each
    is_undivided           some of these calls are not in chunks
    chunks                 chunks of calls whose gradients have not come
    """

    num_pending_backwards: int = 0
    resident_calls: int = 0
    is_undivided: bool = False
    chunks: int = 0

    @property
    def is_last(self) -> bool:
        """True if no further call gives gradients once the slot is complete."""
        return self.num_pending_backwards <= 1 and self.chunks == 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EarlyUpdate:
    """An update that was queued before the gradient norm was known. It writes the second arrays.

    fence        the update's fence
    positions    the parameters that it updates
    steps        the numbers of its step (rate, scale, ...), per parameter in ascending position
    version_sum  sum of the parameters' versions at that moment, as torch counts writes in place
    """

    fence: Fence
    positions: frozenset[int]
    steps: tuple[NamedTuple, ...]
    version_sum: int


@dataclass(slots=True, eq=False)
class GradientRecord:
    """The gradients of a layer in this step. Positions name its parameters.

    expected       gradients that have not come
    pending        positions whose gradient waits as it came: in the array "gradients", or on the
                   GPU in `own_gradient_slot` or `per_parameter`
    summed         positions whose gradient was added to the fp32 array "accumulated"
    early          the update before the gate that uses the gradients, or None
    per_parameter  gradients on the GPU, one tensor per position
    square_sums    sums of squares, by position
    """

    expected: ExpectedGradients = field(default_factory=ExpectedGradients)
    pending: set[int] = field(default_factory=set)
    summed: set[int] = field(default_factory=set)
    early: EarlyUpdate | None = None
    per_parameter: dict[int, torch.Tensor] = field(default_factory=dict)
    square_sums: dict[int, float] = field(default_factory=dict)

    @property
    def arrived(self) -> frozenset[int]:
        """Positions of the parameters that have a gradient in this step."""
        return frozenset(self.pending | self.summed)

    @property
    def is_empty(self) -> bool:
        """True if no parameter has a gradient in this step."""
        return not (self.pending or self.summed)

    @property
    def without_square_sum(self) -> frozenset[int]:
        """Positions with a gradient whose sum of squares is not known."""
        return self.arrived - self.square_sums.keys()

    @property
    def array(self) -> str:
        """Name of the array in which gradients wait for the update."""
        return "accumulated" if self.summed else "gradients"

    def positions(self, array: str) -> set[int]:
        """Positions whose gradients are in `array`: "gradients" or "accumulated"."""
        return self.summed if array == "accumulated" else self.pending

    def restrict(self, positions: set[int]) -> None:
        """Drop the gradients of all other parameters."""
        self.pending &= positions
        self.summed &= positions

    def clear(self) -> None:
        """Forget all gradients: the step has ended, or is dropped."""
        self.pending.clear()
        self.summed.clear()
        self.early = None
        self.per_parameter.clear()
        # a new one: queued operations may still write to the old one
        self.square_sums = {}


@dataclass(slots=True, eq=False)
class OptimizerRecord:
    """The optimizer's part of a layer.

    `trained`: positions of the parameters that the optimizer updates. `counts`: number of updates
    of each parameter.
    """

    trained: frozenset[int] = frozenset()
    counts: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SecondArrays:
    """Memory for the result of an early update: one array per array that a step changes.

    `records`: the access record of each.
    """

    arrays: dict[str, torch.Tensor]
    records: dict[str, Record]


@dataclass(frozen=True, slots=True)
class UpdatedElements:
    """The elements that this rank updates of the parameters at `positions` of a layer.

    `spans`: (position, first element of the layer, number of elements), without empty ones.
    `numels`: number of elements per format.
    """

    positions: frozenset[int]
    spans: tuple[tuple[int, int, int], ...]
    numels: tuple[tuple[Format, int], ...]

    def has_any(self, begin: int, end: int) -> bool:
        """True if some of the elements are among elements [begin, end) of the layer."""
        return any(begin < first + numel and first < end for _, first, numel in self.spans)

    def moved_bytes(self, bytes_each: Callable[[Format], float]) -> int:
        """Bytes that an operation moves, at `bytes_each(format)` per element."""
        return int(sum(bytes_each(element_format) * numel for element_format, numel in self.numels))


@dataclass(frozen=True, slots=True, eq=False)
class PackedPlace:
    """A parameter of a layer whose packed tensors the layer stores in its place.

    described    its name, shape, dtype and format
    positions    by name of a packed tensor: its position among the layer's stored tensors
    offset       first byte of the decoded weight in a buffer of the layer's decoded weights
    placeholder  NaN in the weight's shape, in memory of one element: what a hidden parameter has
    """

    described: PackedParameter
    positions: Mapping[str, int]
    offset: int
    placeholder: torch.Tensor

    @property
    def name(self) -> str:
        return self.described.name

    @property
    def parameter(self) -> nn.Parameter:
        return self.described.parameter

    @property
    def format(self) -> PackedFormat:
        return self.described.format

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The decoded weight in `memory`, uint8, in the weight's shape."""
        dtype, shape = self.described.dtype, self.described.shape
        offset = (memory.storage_offset() + self.offset) // dtype.itemsize
        with torch.inference_mode(False):  # autograd must be able to save it
            view = torch.empty(0, dtype=dtype, device=memory.device)
            view.set_(memory.untyped_storage(), offset, shape, contiguous_strides(shape))
        return view


def packed_weights(
    packed: Iterable[PackedParameter], tensors: Sequence[torch.Tensor]
) -> tuple[PackedPlace, ...]:
    """Place the packed parameters of a layer, whose stored tensors are `tensors`."""
    position_of = {id(tensor): position for position, tensor in enumerate(tensors)}
    result = []
    offset = 0
    for described in packed:
        positions = {name: position_of[id(inner)] for name, inner in described.inner.items()}
        one_item = torch.full((1,), torch.nan, dtype=described.dtype)
        placeholder = one_item.expand(described.shape)
        result.append(PackedPlace(described, positions, offset, placeholder))
        offset += decoded_bytes(described)
    return tuple(result)


@dataclass(slots=True, eq=False, repr=False)
class LayerState:
    """One layer of the model.

    layout      its ranges and parameters, with offsets in elements
    weights     flat uint8 tensor: the weights of the whole layer
    packed      parameters whose packed tensors are among `parameters`
    packing_errors  by name of a packed parameter: the error of its packed form
    pool        threads that pack weights while the model is taken over. None: plain torch packs
    aliases     by position: further tensors of a library over a stored tensor's memory
    formats     formats of its ranges
    shards      the ranks' shares of each range
    homes       homes of the arrays that do not lie on the host
    parameters  the model's stored tensors (parameters, as a rule), in the layout's order
    arrays      flat uint8 tensors that only training needs, by name: the states' arrays,
                "accumulated" (fp32 sums over micro-batches) and "gradients" (pending ones). They
                have this rank's `shares`. They exist from the first backward on, unless their home
                is a staged one
    records     access records (hazard tracking), by array
    second      arrays for early updates, or None
    index       its place in the model's layout
    maps        by array: where the elements of each range lie in its bytes
    changed     names of the arrays that a step writes
    sections    by position: the section of the weights that has the parameter
    shares      spans of elements that this rank trains
    """

    layout: LayerLayout
    weights: torch.Tensor
    formats: Formats
    shards: Shards
    homes: Mapping[str, Home] = field(default_factory=dict)
    parameters: Sequence[torch.Tensor] = ()
    packed: tuple[PackedPlace, ...] = ()
    packing_errors: dict[str, PackingError] = field(default_factory=dict)
    pool: Pool | None = None
    aliases: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    records: dict[str, Record] = field(init=False)
    second: SecondArrays | None = None
    on_gpu: GpuRecord = field(default_factory=GpuRecord)
    views: ParameterViews = field(default_factory=ParameterViews)
    gradients: GradientRecord = field(default_factory=GradientRecord)
    optimizer: OptimizerRecord = field(default_factory=OptimizerRecord)
    index: int = field(init=False)
    maps: dict[str, ArrayMap] = field(init=False)
    changed: tuple[str, ...] = field(init=False)
    sections: tuple[Section, ...] = field(init=False)
    shares: tuple[Span, ...] = field(init=False)
    # By position: the elements that this rank updates.
    _elements: tuple[Span, ...] = field(init=False)
    # By array, first element, last element, and the identity of the memory.
    _views: dict[tuple[str, int, int, int], torch.Tensor | None] = field(default_factory=dict)
    # The last result of `updated_elements`.
    _updated: UpdatedElements = UpdatedElements(frozenset(), (), ())

    def __post_init__(self) -> None:
        slices = self.layout.slices
        self.index = self.layout.index
        self.changed = state_arrays(self.layout, self.formats)
        self.records = {name: Record() for name in (*self.changed, *FURTHER_RECORDS)}
        self.maps = array_maps(self.layout, self.formats, self.shards)
        self.shares = self.shards.trained(self.layout)
        weights = self.maps["weights"]
        self.sections = tuple(weights.sections[parameter.range] for parameter in slices)
        self._elements = tuple(self._elements_of(parameter) for parameter in slices)

    def _elements_of(self, parameter: ParameterSlice) -> Span:
        """The elements of a parameter that this rank updates. Empty for a frozen one."""
        for begin, end in self.shares:
            first = max(begin, parameter.offset)
            last = min(end, parameter.offset + parameter.numel)
            if first < last:
                return first, last
        return parameter.offset, parameter.offset

    def __repr__(self) -> str:
        is_on_gpu = self.home is GPU
        facts = ["updated on the gpu" if is_on_gpu else self.on_gpu.residency.value]
        facts.append(self.stage.value)
        if self.on_gpu.slot is not None and not self.is_fetched:
            facts.append("its slot is outdated")
        if self.views.hidden:
            facts.append("its parameters are hidden")
        num_calls = self.gradients.expected.num_pending_backwards
        if num_calls:
            facts.append(f"called {num_calls} times")
        num_arrived = len(self.gradients.arrived)
        if num_arrived:
            facts.append(f"{num_arrived} gradients arrived")
        for name, record in self.records.items():
            if not record.writer.done:
                facts.append(f"{name} after {record.writer.lane}: {record.writer.operation}")
        return f"<layer {self.index} {self.name}: {', '.join(facts)}>"

    @property
    def stage(self) -> GradientStage:
        """How far the layer's gradients are in this step."""
        gradients = self.gradients
        if self.on_gpu.gradient_slot is not None:
            return GradientStage.GATHERING
        if gradients.early is not None:
            return GradientStage.EARLY
        if not gradients.arrived:
            return GradientStage.EMPTY
        if self.records[gradients.array].writer.done:
            return GradientStage.PENDING
        return GradientStage.OFFLOADING

    @property
    def is_fetched(self) -> bool:
        """True if the layer's slot has, or will have, the newest weights."""
        slot = self.on_gpu.slot
        return slot is not None and slot.contents == (self.index, self.on_gpu.version)

    @property
    def home(self) -> Home:
        """The home that updates the layer: `GPU`, or `HOST`."""
        home = self.home_of("weights")
        return HOST if home.is_staged else home

    def home_of(self, array: str) -> Home:
        """The home (tier) of the array: its place between two operations."""
        return self.homes.get(array, HOST)

    @property
    def staged(self) -> tuple[str, ...]:
        """The arrays that pass through the host in pieces, always in one order."""
        return tuple(array for array, home in self.homes.items() if home.is_staged)

    @property
    def name(self) -> str:
        """The layer's dotted name in the model, for people."""
        return self.layout.name or "the root"

    def move(self, to: Residency) -> None:
        """Change the layer's residency. Raises StateError if `TRANSITIONS` lacks the change."""
        residency = self.on_gpu.residency
        if to not in TRANSITIONS[residency]:
            raise StateError(f"layer {self.index} cannot go from {residency.value} to {to.value}")
        self.on_gpu.residency = to

    def fill(self, weights: torch.Tensor) -> None:
        """Copy the layer's stored tensors into `weights`, cast to the layer's dtypes. Pack what is
        packed.

        `weights`: flat uint8 host tensor.
        """
        weight_map, slices = self.maps["weights"], self.layout.slices
        for position in self.positions_of_model:
            target = weight_map.parameter(weights, slices[position])
            target.copy_(self.parameters[position].detach())
        for packed in self.packed:
            self.encode(packed, self.packed_tensors(packed, weights))

    def packed_tensors(self, packed: PackedPlace, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The packed tensors of a parameter by name. `memory`: the flat bytes of the weights."""
        weights, slices = self.maps["weights"], self.layout.slices
        return {
            name: weights.parameter(memory, slices[position])
            for name, position in packed.positions.items()
        }

    @property
    def positions_of_model(self) -> list[int]:
        """Positions of the stored tensors whose values the model has, and that are not packed.

        ValueError if the layer has another number of parameters than its layout.
        """
        packed = self.of_packed
        pairs = zip(self.layout.slices, self.parameters, strict=True)
        return [k for k, _ in enumerate(pairs) if k not in packed]

    @property
    def of_packed(self) -> frozenset[int]:
        """Positions of the packed tensors."""
        return frozenset(k for packed in self.packed for k in packed.positions.values())

    def encode(self, packed: PackedPlace, inner: Mapping[str, torch.Tensor]) -> None:
        """Write the packed tensors of a parameter. Notes the error of the packed form.

        `inner`: host memory for each packed tensor.
        """
        described = packed.described
        values = packed.parameter.detach().to(described.dtype)
        try:
            error = described.format.encode(values, inner, self.pool)
        except ConfigError as reason:
            raise ConfigError(f"{packed.name}: {reason}") from reason
        self.packing_errors[packed.name] = error

    def array(self, name: str) -> torch.Tensor | None:
        """The array's memory: a flat uint8 tensor. None if the layer has it not in memory."""
        return self.weights if name == "weights" else self.arrays.get(name)

    def in_memory(self, arrays: Iterable[str]) -> tuple[str, ...]:
        """The arrays that the layer has in memory, of `arrays`."""
        staged = self.staged
        return tuple(a for a in arrays if a not in staged and self.array(a) is not None)

    def views_of(self, arrays: Iterable[str], begin: int, end: int) -> dict[str, torch.Tensor]:
        """Elements [begin, end) of each of the arrays that their range has, by name, as `view`."""
        views: dict[str, torch.Tensor] = {}
        for array in arrays:
            view = self.view(array, begin, end)
            if view is not None:
                views[array] = view
        return views

    def view(self, array: str, begin: int, end: int) -> torch.Tensor | None:
        """Elements [begin, end) of an array in memory, of one range, in the range's dtype.

        None if the range does not have the array. Views are kept, since every step needs the same
        ones. Views of weights are not kept: the references to their memory are counted, so that
        aliases in a program show.
        """
        flat = self.array(array)
        assert flat is not None
        return self._view(flat, array, begin, end)

    def second_view(self, array: str, begin: int, end: int) -> torch.Tensor | None:
        """Elements [begin, end) of one of the layer's second arrays, as `view`."""
        assert self.second is not None
        return self._view(self.second.arrays[array], array, begin, end)

    def _view(self, flat: torch.Tensor, array: str, begin: int, end: int) -> torch.Tensor | None:
        is_kept = array != "weights"
        key = array, begin, end, id(flat)
        if is_kept and key in self._views:
            return self._views[key]
        section = self.maps[array].find(begin, end)
        view = None if section is None else section.view(flat, begin, end)
        if is_kept:
            self._views[key] = view
        return view

    def swap_second_arrays(self) -> None:
        """Make the second arrays the layer's, and the layer's arrays the second ones."""
        second = self.second
        assert second is not None
        for name, array in second.arrays.items():
            before = self.array(name)
            assert before is not None
            self._set_array(name, array)
            second.arrays[name] = before
            record = self.records[name]
            self.records[name] = second.records[name]
            second.records[name] = record

    def all_arrays(self) -> dict[str, torch.Tensor]:
        """Every array in memory that outlives the step, the weights first."""
        lasting = {name: array for name, array in self.arrays.items() if name != "gradients"}
        return {"weights": self.weights, **lasting}

    def drop_array(self, name: str) -> torch.Tensor:
        """Remove the array from the layer, and return it."""
        self._views.clear()  # they keep memory alive
        return self.arrays.pop(name)

    def drop_arrays(self) -> None:
        """Remove every array but the weights from the layer."""
        self._views.clear()
        self.arrays = {}

    def replace_array(self, name: str, array: torch.Tensor) -> None:
        """Give the array other memory, which has its values."""
        self._views.clear()
        self._set_array(name, array)

    def _set_array(self, name: str, array: torch.Tensor) -> None:
        if name == "weights":
            self.weights = array
        else:
            self.arrays[name] = array

    def drop_second(self) -> list[torch.Tensor]:
        """Remove the second arrays from the layer, and return them.

        Waits until no operation reads or writes them.
        """
        second = self.second
        self.second = None
        self._views.clear()
        if second is None:
            return []
        for record in second.records.values():
            record.wait()
        return list(second.arrays.values())

    def records_of(self, arrays: Iterable[str]) -> list[Record]:
        """Access records of the arrays, in their order."""
        return [self.records[array] for array in arrays]

    def wait(self) -> None:
        """Block until every submitted write of the layer's arrays has ended."""
        for record in self.records.values():
            record.writer.wait()

    def wait_unused(self) -> None:
        """Block until no operation writes or reads the layer's arrays.

        Callers that write the arrays from outside of the lanes wait like this first.
        """
        second = {} if self.second is None else self.second.records
        for record in (*self.records.values(), *second.values()):
            record.wait()

    @property
    def trains_here(self) -> bool:
        """True if this rank updates some elements of the layer."""
        return self.maps["gradients"].nbytes > 0

    def elements(self, positions: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (position, begin, end): the elements of each parameter that this rank updates.

        `begin` equals `end` for a parameter of which this rank updates nothing.
        """
        for position in sorted(positions):
            begin, end = self._elements[position]
            yield position, begin, end

    def updated_elements(self, positions: frozenset[int]) -> UpdatedElements:
        """The elements that this rank updates of the parameters at `positions`.

        Most steps ask for the same positions, so the last result is kept. Any thread may call.
        """
        last = self._updated
        if last.positions == positions:
            return last
        spans = []
        numels: dict[Format, int] = {}
        for position, begin, end in self.elements(positions):
            weight_format = self.formats[self.layout.slices[position].format]
            numels[weight_format] = numels.get(weight_format, 0) + end - begin
            if end > begin:
                spans.append((position, begin, end - begin))
        updated = UpdatedElements(positions, tuple(spans), tuple(numels.items()))
        self._updated = updated
        return updated
