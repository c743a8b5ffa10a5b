"""A layer: its arrays, and four records of what is done with it while an engine lives.

| record | what it has | written by |
|---|---|---|
| `on_gpu` | its slots, and how far the fetch is | `memory.window` |
| `views` | what its parameters point to | `runtime.binding`, `runtime.runtime` (versions) |
| `gradients` | which gradients come, and where they are | `runtime`: executor, the updates' files |
| `optimizer` | which parameters are trained, and update counts | `runtime.steps`, a load |

The arrays are made by `memory.host`. `repr(layer)` shows all of it. The training thread enters, and
autograd's in backward; the two never run at once. Lanes read the arrays' addresses alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from stronghold.device.base import Fence, Record
from stronghold.errors import StateError
from stronghold.memory.buffers import GradientSlot, Slot
from stronghold.model.arrays import Map, Section, array_maps, state_arrays
from stronghold.model.layout import LayerLayout, ParameterSlice, Shards, Span
from stronghold.model.partition import WeightSource
from stronghold.optim.states import Format, Formats
from stronghold.plan.homes import GPU, HOST, Home

# What has a record beside the arrays of the states. "norms": sums of squares of gradients.
FURTHER_RECORDS = ("accumulated", "gradients", "norms")


class Residency(Enum):
    """How far the fetch of a layer is. READY: compute has waited for it. FETCHING: it is queued."""

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
class OnGpu:
    """A layer's buffers on the GPU. `version` counts how often the weights at home changed: `slot`
    has this step's weights if its contents are (layer, version). Gradients gather in
    `gradient_slot` now; `own_gradient_slot` is one that no other layer takes."""

    slot: Slot | None = None
    residency: Residency = Residency.AWAY
    version: int = 0
    gradient_slot: GradientSlot | None = None
    own_gradient_slot: GradientSlot | None = None


class Place(NamedTuple):
    """A layer's parameters in one place. `storage`: of these views alone, with so many references;
    None for a slot that many layers take."""

    views: list[torch.Tensor]
    addresses: tuple[int, ...]
    storage: int | None
    num_references: int


@dataclass(slots=True, eq=False)
class ParameterViews:
    """What a layer's parameters point to. `place` is one of `places`, which are kept by address; it
    is None where an interrupt may have left some parameters in one place and some in another.
    `hidden`: the newest values are on their way to `place`. `version_sum` and `saved_versions` are
    versions of the parameters, as torch counts writes in place: at the last look, and when such
    writes were last brought to the arrays. `epoch` counts changes of the values."""

    places: dict[int, Place] = field(default_factory=dict)
    place: Place | None = None
    hidden: bool = False
    version_sum: int = 0
    epoch: int = 0
    saved_versions: list[int] | None = None


class Stage(Enum):
    """How far the gradients of a layer are in a step. OFFLOADING: the copy to the host is queued.
    PENDING: they wait for their update. EARLY: an update that uses them is queued, or has ended,
    and the gate will commit it or not."""

    EMPTY = "no gradients"
    GATHERING = "gradients gather"
    OFFLOADING = "gradients are offloaded"
    PENDING = "gradients are pending"
    EARLY = "updated early"


@dataclass(slots=True, eq=False)
class ExpectedGradients:
    """What the forwards since the last backward announce. Each of `calls` gives every gradient of
    the layer. `resident_calls` are calls of a resident layer, whose gradients come once for all of
    them, but in reentrant checkpoints; `is_undivided`: some of these are not in chunks. `chunks`
    are parts of calls whose gradients have not come."""

    calls: int = 0
    resident_calls: int = 0
    is_undivided: bool = False
    chunks: int = 0

    @property
    def is_last(self) -> bool:
        """Whether no further call's gradients will come once the slot is complete."""
        return self.calls <= 1 and self.chunks == 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EarlyUpdate:
    """An update of a layer that was queued before the norm was known. It writes the layer's second
    arrays. `fence` is its operation's. `positions` are the parameters that it updates, and `steps`
    the numbers that it uses for each of them. `version_sum`: of the versions of the layer's
    parameters then, as torch counts writes in place."""

    fence: Fence
    positions: frozenset[int]
    steps: tuple[NamedTuple, ...]
    version_sum: int


@dataclass(slots=True, eq=False)
class GradientRecord:
    """The gradients of a layer in this step.

    A gradient that has left its slot is in one of two places:

    * `pending`: as it came, in the array "gradients". On the GPU it is in `own_gradient_slot`, or
      in `per_parameter`, one tensor for each parameter.
    * `summed`: added to the fp32 array "accumulated".

    Both name parameters by their position. `square_sums` are sums of squares, by position. `early`:
    the update before the gate that has used the gradients, or None.
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
        """Whether no parameter has a gradient in this step."""
        return not (self.pending or self.summed)

    @property
    def array(self) -> str:
        """The array in which they wait for the update."""
        return "accumulated" if self.summed else "gradients"

    def positions(self, array: str) -> set[int]:
        """The parameters whose gradients are in `array`: "gradients" or "accumulated"."""
        return self.summed if array == "accumulated" else self.pending

    def restrict(self, positions: set[int]) -> None:
        """Drop the gradients of other parameters."""
        for positions_here in (self.pending, self.summed):
            positions_here &= positions

    def clear(self) -> None:
        """The step has ended, or is void."""
        self.pending.clear()
        self.summed.clear()
        self.early = None
        self.per_parameter.clear()
        self.square_sums = {}  # a new one: queued operations may still write to the old one


@dataclass(slots=True, eq=False)
class OptimizerRecord:
    """`trained` are the positions of the parameters that the optimizer owns; `counts` has the
    number of updates of each parameter."""

    trained: frozenset[int] = frozenset()
    counts: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SecondArrays:
    """Memory in which an early update puts a layer's next arrays: one for each array that a step
    changes, with its access record."""

    arrays: dict[str, torch.Tensor]
    records: dict[str, Record]


@dataclass(frozen=True, slots=True)
class Owned:
    """What this rank updates of the parameters at some positions of a layer: `parts` are (position,
    first element of the layer, number of elements) where there are any, and `numels` the number of
    elements of each format."""

    positions: frozenset[int]
    parts: tuple[tuple[int, int, int], ...]
    numels: tuple[tuple[Format, int], ...]


@dataclass(slots=True, eq=False, repr=False)
class LayerState:
    """One layer, whose ranges have `formats`.

    Arrays are bytes; `maps` has where the elements of each lie. `weights` has the whole layer.
    `arrays` has what only training needs, by name: what the states of its ranges name beside the
    weights, "accumulated" (fp32 sums over micro-batches) and "gradients" (those that are pending).
    An array is here from the first backward on, unless its home is a staged one. It has this rank's
    `shares` of the layer's trainable ranges. `homes` names the arrays that do not lie on the host.
    `records` are the access records, by array. `second`: where an early update writes, if the layer
    has that; `exchange_arrays` makes it the layer's."""

    layout: LayerLayout
    weights: torch.Tensor
    formats: Formats
    shards: Shards
    homes: Mapping[str, Home] = field(default_factory=dict)
    parameters: Sequence[nn.Parameter] = ()  # in the layout's order
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    records: dict[str, Record] = field(init=False)
    second: SecondArrays | None = None
    on_gpu: OnGpu = field(default_factory=OnGpu)
    views: ParameterViews = field(default_factory=ParameterViews)
    gradients: GradientRecord = field(default_factory=GradientRecord)
    optimizer: OptimizerRecord = field(default_factory=OptimizerRecord)
    maps: dict[str, Map] = field(init=False)
    changed: tuple[str, ...] = field(init=False)  # the arrays that a step writes
    sections: tuple[Section, ...] = field(init=False)  # of the weights, by position
    shares: tuple[Span, ...] = field(init=False)
    _elements: tuple[Span, ...] = field(init=False)  # of each parameter, this rank's
    # By array, elements, and the identity of the memory.
    _views: dict[tuple[str, int, int, int], torch.Tensor | None] = field(default_factory=dict)
    _owned: Owned = Owned(frozenset(), (), ())  # of the last positions that were asked for

    def __post_init__(self) -> None:
        slices = self.layout.slices
        self.changed = state_arrays(self.layout, self.formats)
        self.records = {name: Record() for name in (*self.changed, *FURTHER_RECORDS)}
        self.maps = array_maps(self.layout, self.formats, self.shards)
        self.shares = self.shards.trained(self.layout)
        weights = self.maps["weights"]
        self.sections = tuple(weights.sections[part.range] for part in slices)
        self._elements = tuple(self._elements_of(part) for part in slices)

    def _elements_of(self, part: ParameterSlice) -> Span:
        """The elements of a parameter that this rank updates; none of a frozen one."""
        for begin, end in self.shares:
            first, last = max(begin, part.offset), min(end, part.offset + part.numel)
            if first < last:
                return first, last
        return part.offset, part.offset

    def __repr__(self) -> str:
        where = "updated on the gpu" if self.home is GPU else self.on_gpu.residency.value
        facts = [where, self.stage.value]
        if self.on_gpu.slot is not None and not self.is_fetched:
            facts.append("its slot is outdated")
        if self.views.hidden:
            facts.append("its parameters are hidden")
        if self.gradients.expected.calls:
            facts.append(f"called {self.gradients.expected.calls} times")
        if arrived := self.gradients.arrived:
            facts.append(f"{len(arrived)} gradients arrived")
        for name, record in self.records.items():
            if not record.writer.done:
                facts.append(f"{name} after {record.writer.lane}: {record.writer.operation}")
        return f"<layer {self.index} {self.name}: {', '.join(facts)}>"

    @property
    def stage(self) -> Stage:
        """How far its gradients are in this step."""
        gradients = self.gradients
        if self.on_gpu.gradient_slot is not None:
            return Stage.GATHERING
        if gradients.early is not None:
            return Stage.EARLY
        if not gradients.arrived:
            return Stage.EMPTY
        return Stage.PENDING if self.records[gradients.array].writer.done else Stage.OFFLOADING

    @property
    def is_fetched(self) -> bool:
        """Whether its slot has, or will have, the newest weights."""
        slot = self.on_gpu.slot
        return slot is not None and slot.contents == (self.index, self.on_gpu.version)

    @property
    def home(self) -> Home:
        """Where the layer is updated: `GPU`, or `HOST`."""
        home = self.home_of("weights")
        return HOST if home.is_staged else home

    def home_of(self, array: str) -> Home:
        """Where the array lies between two operations."""
        return self.homes.get(array, HOST)

    @property
    def staged(self) -> tuple[str, ...]:
        """The arrays that pass the host in pieces, always in one order."""
        return tuple(array for array, home in self.homes.items() if home.is_staged)

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def name(self) -> str:
        """Its dotted name in the model, for people."""
        return self.layout.name or "the root"

    def move(self, to: Residency) -> None:
        """Change where its weights are; StateError on a transition that the table does not have."""
        residency = self.on_gpu.residency
        if to not in TRANSITIONS[residency]:
            raise StateError(f"layer {self.index} cannot go from {residency.value} to {to.value}")
        self.on_gpu.residency = to

    def fill(self, weights: torch.Tensor, source: WeightSource | None) -> None:
        """Copy its parameters into `weights`, bytes of host memory, cast to its dtypes; those on
        the meta device are read from `source`."""
        for part, parameter in zip(self.layout.slices, self.parameters, strict=True):
            place = self.maps["weights"].parameter(weights, part)
            if parameter.is_meta and source is not None:
                source.read_into(parameter, place)
            else:
                place.copy_(parameter.detach())

    def array(self, name: str) -> torch.Tensor | None:
        """The array in memory, flat; None where the layer has none there."""
        return self.weights if name == "weights" else self.arrays.get(name)

    def view(self, array: str, begin: int, end: int) -> torch.Tensor | None:
        """Elements [begin, end) of an array in memory, of one range, in its dtype; None where the
        range does not have the array. Kept, since each step asks for the same, but for weights: the
        references to their memory are counted, to find those that a program keeps."""
        flat = self.array(array)
        assert flat is not None
        return self._view(flat, array, begin, end)

    def second_view(self, array: str, begin: int, end: int) -> torch.Tensor | None:
        """Elements [begin, end) of one of the layer's second arrays, as `view`."""
        assert self.second is not None
        return self._view(self.second.arrays[array], array, begin, end)

    def _view(self, flat: torch.Tensor, array: str, begin: int, end: int) -> torch.Tensor | None:
        key = array, begin, end, id(flat)
        if array != "weights" and key in self._views:
            return self._views[key]
        section = self.maps[array].find(begin, end)
        view = None if section is None else section.view(flat, begin, end)
        if array != "weights":
            self._views[key] = view
        return view

    def exchange_arrays(self) -> None:
        """The second arrays are the layer's from now on, and those that it had are the second."""
        second = self.second
        assert second is not None
        for name, array in second.arrays.items():
            before = self.array(name)
            assert before is not None
            self._set_array(name, array)
            second.arrays[name] = before
            self.records[name], second.records[name] = second.records[name], self.records[name]

    def all_arrays(self) -> dict[str, torch.Tensor]:
        """Every array in memory that outlives the step, the weights first."""
        lasting = {name: array for name, array in self.arrays.items() if name != "gradients"}
        return {"weights": self.weights, **lasting}

    def drop_array(self, name: str) -> torch.Tensor:
        """The layer has the array no more. Returns it."""
        self._views.clear()  # they keep memory
        return self.arrays.pop(name)

    def drop_arrays(self) -> None:
        """The layer has no array but its weights."""
        self._views.clear()
        self.arrays = {}

    def replace_array(self, name: str, array: torch.Tensor) -> None:
        """The array lies in other memory from now on."""
        self._views.clear()
        self._set_array(name, array)

    def _set_array(self, name: str, array: torch.Tensor) -> None:
        if name == "weights":
            self.weights = array
        else:
            self.arrays[name] = array

    def drop_second(self) -> list[torch.Tensor]:
        """The layer has no second arrays from now on. Returns them, once nothing uses them."""
        second, self.second = self.second, None
        self._views.clear()
        if second is None:
            return []
        for record in second.records.values():
            record.wait()
        return list(second.arrays.values())

    def records_of(self, arrays: Iterable[str]) -> list[Record]:
        return [self.records[array] for array in arrays]

    def wait(self) -> None:
        """Block until all that was submitted has written its arrays."""
        for record in self.records.values():
            record.writer.wait()

    def wait_unused(self) -> None:
        """Block until nothing writes or reads its arrays: before they are written from outside."""
        second = {} if self.second is None else self.second.records
        for record in (*self.records.values(), *second.values()):
            record.wait()

    @property
    def trains_here(self) -> bool:
        """Whether this rank updates any of it."""
        return self.maps["gradients"].nbytes > 0

    def elements(self, positions: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """(position, begin, end): the elements of each parameter that this rank updates; begin is
        end where it has none."""
        return ((k, *self._elements[k]) for k in sorted(positions))

    def owned(self, positions: frozenset[int]) -> Owned:
        """What this rank updates of these parameters. The same ones come in most steps, so the last
        answer is kept. Any thread may ask."""
        last = self._owned
        if last.positions == positions:
            return last
        parts = [(k, begin, end - begin) for k, begin, end in self.elements(positions)]
        numels: dict[Format, int] = {}
        for k, _, numel in parts:
            made = self.formats[self.layout.slices[k].format]
            numels[made] = numels.get(made, 0) + numel
        present = tuple(part for part in parts if part[2])
        self._owned = found = Owned(positions, present, tuple(numels.items()))
        return found
