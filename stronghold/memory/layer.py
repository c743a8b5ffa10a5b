"""A layer: all that is known of it while an engine lives; and the buffers that layers take in turn,
on the device and on the host.

Owns which arrays it has and their records, where its weights are and its parameters point, what its
gradients wait for, and how often it was updated.
Owns no memory: `memory.host` makes the arrays, `memory.window` the slots. A buffer
may be overwritten when what its record (`device.base`) names is done.
`repr(layer)` says what it is doing. The training thread enters, and autograd's in backward; the two
never run at once. Lanes read the arrays' addresses alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from stronghold.device.base import Record
from stronghold.errors import StateError
from stronghold.model.arrays import Map, Section, array_maps, state_arrays
from stronghold.model.layout import LayerLayout, ParameterSlice, Shards, Span
from stronghold.model.partition import WeightSource
from stronghold.optim.states import Format, Formats
from stronghold.plan.homes import GPU, HOST, Home


@dataclass(slots=True, eq=False)
class Entry:
    """Host room for one layer's drained gradients, or for a piece on its way from or to a file."""

    memory: torch.Tensor
    record: Record = field(default_factory=Record)


class Ring(deque[Entry]):
    """Entries that are taken in turn."""

    def next(self) -> Entry:
        """The entry whose use lies longest back."""
        self.rotate(-1)
        return self[-1]


@dataclass(slots=True, eq=False)
class Slot:
    """Device room for one layer's weights, as bytes; `layer`: which one is in it, or on its way."""

    weights: torch.Tensor
    layer: int | None = None
    record: Record = field(default_factory=Record)


@dataclass(slots=True, eq=False)
class GradientSlot:
    """Device room for one layer's gradients, as bytes that lie as those of its weights.

    `arrived` names the parameters that are in it, `writers` the compute lane's streams that may
    write it. `held`: gathering is over, and the gradients stay until the step ends. `sums`: room
    for fp32 sums of chunks, an item for each element; `summing`: by position, where those of the
    running call are, until they are rounded. `is_spare`: no slot of the plan's, but memory of
    torch's, without an owner once the gradients have left.
    """

    gradients: torch.Tensor
    sums: torch.Tensor | None = None
    summing: dict[int, torch.Tensor] = field(default_factory=dict)
    layer: int | None = None
    held: bool = False
    is_spare: bool = False
    arrived: set[int] = field(default_factory=set)
    writers: list[object] = field(default_factory=list)
    record: Record = field(default_factory=Record)
    _views: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def view(self, state: LayerState, position: int) -> torch.Tensor:
        """The place of a parameter's gradient; layers are alike, so that each is made once."""
        part, section = state.layout.slices[position], state.sections[position]
        key = True, section.byte_of(part.offset), section.dtype, part.shape
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = state.maps["weights"].parameter(self.gradients, part)
        return found

    def sum_of(self, state: LayerState, position: int) -> torch.Tensor:
        """The place of a parameter's fp32 sum over the chunks of one call: apart from what other
        calls gave."""
        if state.sections[position].dtype is torch.float32 and position not in self.arrived:
            return self.view(state, position)
        if self.sums is None:  # what comes twice in a step is rare, and not planned
            numel = state.layout.trainable_numel
            self.sums = torch.empty(numel, dtype=torch.float32, device=self.gradients.device)
        part = state.layout.slices[position]
        key = False, part.offset, torch.float32, part.shape
        found = self._views.get(key)
        if found is None:
            flat = self.sums[part.offset : part.offset + part.numel]
            found = self._views[key] = flat.view(part.shape)
        return found

    def round_sums(self, state: LayerState) -> None:
        """The call's sums are complete: round them, and add them to what other calls gave."""
        if not self.arrived and self.summing:
            for section in state.maps["weights"].sections:
                if section.begin < state.layout.trainable_numel and self.sums is not None:
                    self._round_section(state, section)
        for position, total in self.summing.items():
            place = self.view(state, position)
            if position in self.arrived:
                place.add_(total.to(place.dtype))
            elif total is not place:
                place.copy_(total)
            self.arrived.add(position)
        self.summing.clear()

    def _round_section(self, state: LayerState, section: Section) -> None:
        """One rounding for all parameters of a section, where none had come before."""
        if section.dtype is torch.float32:
            return
        assert self.sums is not None
        place = state.maps["weights"].view(self.gradients, section.begin, section.end)
        place.copy_(self.sums[section.begin : section.end])
        done = [k for k in self.summing if state.sections[k] is section]
        self.arrived.update(done)
        for position in done:
            del self.summing[position]


# What has a record beside the arrays of the states. "norms": sums of squares of gradients.
FURTHER_RECORDS = ("accumulated", "gradients", "norms")


class Residency(Enum):
    """Where a layer's weights are. RESIDENT: compute waited for the fetch, not merely that it was
    queued."""

    HOST = "host"
    FETCHING = "fetching"
    RESIDENT = "resident"


TRANSITIONS: dict[Residency, frozenset[Residency]] = {
    Residency.HOST: frozenset({Residency.FETCHING}),
    Residency.FETCHING: frozenset({Residency.RESIDENT, Residency.HOST}),
    # RESIDENT to FETCHING: a resident layer was updated, and is fetched again into its own slot.
    Residency.RESIDENT: frozenset({Residency.HOST, Residency.FETCHING}),
}


class Place(NamedTuple):
    """A layer's parameters in one place. `storage`: of these views alone, with so many references;
    None for a slot that many layers take."""

    views: list[torch.Tensor]
    addresses: tuple[int, ...]
    storage: int | None
    num_references: int


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
    weights, and "accumulated", fp32 sums over micro-batches. An array is there from the first
    backward on, unless it lies in a file. It is a slab on the host, or `on_device`, where the layer
    is updated. It has this rank's `shares` of the layer's trainable ranges. `held`: its gradients
    in an entry of its own, until its update."""

    layout: LayerLayout
    weights: torch.Tensor
    formats: Formats
    shards: Shards
    on_device: bool = False
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    held: Entry | None = None
    records: dict[str, Record] = field(init=False)
    parameters: Sequence[nn.Parameter] = ()  # in the layout's order
    trained: frozenset[int] = frozenset()  # positions of those that the optimizer owns
    counts: list[int] = field(default_factory=list)  # how often each was updated
    # Of its parameters, as they were when writes from outside were last looked for.
    versions: list[int] | None = None
    # Where they may point, by address, and where they do; None: an interrupt may have left some
    # here and some there.
    places: dict[int, Place] = field(default_factory=dict)
    place: Place | None = None
    hidden: bool = False  # newest values are on their way to there
    version_sum: int = 0  # of its parameters, as last seen
    epoch: int = 0  # how often its values changed
    # On the device. `stale`: resident, and yet to be fetched since its last update.
    residency: Residency = Residency.HOST
    slot: Slot | None = None
    stale: bool = False
    gathering: GradientSlot | None = None  # in which its gradients come together
    own_gradients: GradientSlot | None = None  # that no other layer takes
    # Of the running step. `calls`: since the last backward, whose gradients come by themselves;
    # `together`: those of a resident, whose gradients come at once but in reentrant checkpoints.
    calls: int = 0
    together: int = 0
    undivided: bool = False  # whether a resident's calls that are no chunks are among them
    chunks: int = 0  # of these calls, whose gradients are to come
    # Positions of gradients that left in this backward although more may come.
    parts: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)  # positions of parameters with a gradient
    square_sums: dict[int, float] = field(default_factory=dict)  # of them, by position
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # where no slot gathers them
    applied: bool = False  # updated before the gate
    maps: dict[str, Map] = field(init=False)
    changed: tuple[str, ...] = field(init=False)  # the arrays that a step writes
    sections: tuple[Section, ...] = field(init=False)  # of the weights, by position
    shares: tuple[Span, ...] = field(init=False)
    _elements: tuple[Span, ...] = field(init=False)  # of each parameter, this rank's
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
        weights = "updated on the device" if self.on_device else self.residency.value
        waits = [
            word
            for word, true in (
                ("old", self.stale),
                ("hidden from readers", self.hidden),
                (f"called {self.calls} times", self.calls > 0),
                ("gathering", self.gathering is not None),
                (f"{len(self.arrived)} gradients arrived", bool(self.arrived)),
                ("updated before the gate", self.applied),
                *(
                    (f"{name} after {record.writer.lane}: {record.writer.operation}", True)
                    for name, record in self.records.items()
                    if not record.writer.done
                ),
            )
            if true
        ]
        return f"<layer {self.layout.index} {self.name}: {', '.join([weights, *waits])}>"

    @property
    def home(self) -> Home:
        """Where the layer is updated: `GPU`, or `HOST`."""
        return GPU if self.on_device else HOST

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def name(self) -> str:
        """Its dotted name in the model, for people."""
        return self.layout.name or "the root"

    def move(self, to: Residency) -> None:
        """Change where its weights are; StateError on a transition that the table does not have."""
        if to not in TRANSITIONS[self.residency]:
            raise StateError(
                f"layer {self.index} cannot go from {self.residency.value} to {to.value}"
            )
        self.residency = to

    def fill(self, weights: torch.Tensor, source: WeightSource | None) -> None:
        """Copy its parameters into `weights`, bytes of host memory, cast to its dtypes; those on
        the meta device are read from `source`."""
        for part, parameter in zip(self.layout.slices, self.parameters, strict=True):
            place = self.maps["weights"].parameter(weights, part)
            if parameter.is_meta and source is not None:
                source.read_into(parameter, place)
            else:
                place.copy_(parameter.detach())

    @property
    def gradients(self) -> torch.Tensor | None:
        """Those that wait for the update in memory; of this rank's elements."""
        return None if self.held is None else self.held.memory

    def array(self, name: str) -> torch.Tensor | None:
        """The array in memory, flat; None where the layer has none there."""
        if name == "weights":
            return self.weights
        return self.gradients if name == "gradients" else self.arrays.get(name)

    def all_arrays(self) -> dict[str, torch.Tensor]:
        """Every array in memory, the weights first."""
        return {"weights": self.weights, **self.arrays}

    def replace_array(self, name: str, array: torch.Tensor) -> None:
        """The array lies in other memory from now on."""
        if name == "weights":
            self.weights = array
        else:
            self.arrays[name] = array

    def records_of(self, arrays: Iterable[str]) -> list[Record]:
        return [self.records[array] for array in arrays]

    def wait(self) -> None:
        """Block until all that was submitted has written its arrays."""
        for record in self.records.values():
            record.writer.wait()

    def wait_unused(self) -> None:
        """Block until nothing writes or reads its arrays: before they are written from outside."""
        for record in self.records.values():
            record.wait()

    def forget_step(self) -> None:
        """The step has ended, or is void."""
        self.arrived.clear()
        self.parts.clear()
        self.applied = False
        self.kept.clear()
        self.square_sums = {}  # anew: what is queued may still write to the old one

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
