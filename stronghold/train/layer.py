"""The layer: parameters, the bytes that they take, how far weights and gradients are, and slots.

A layer is the unit that moves (FSDP unit): one block of the model, or the modules outside of the
blocks that hold a parameter. Its bytes are one buffer: first the trained parameters, which have one
dtype, then the frozen ones as they came. Host, slot and file have the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from weakref import ReferenceType

import torch
from torch import Tensor

from stronghold.devices.device import Device
from stronghold.devices.fences import Record
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.model.partition import Layer as PartitionLayer
from stronghold.model.partition import NamedParameter, Partition
from stronghold.optim.contract import Group, Optimizer
from stronghold.optim.states import EXACT, PAGE_BYTES, StateKind, States, items, states_of
from stronghold.private import without_torch_function

Groups = Mapping[Tensor, tuple[Group, Optimizer]]
"""Live group of each trained parameter, and the optimizer of that group."""

NO_ALIASES: Mapping[Tensor, Sequence[Tensor]] = MappingProxyType({})

# `point(parameter, view)` is `parameter.data = view`, also while `visible` replaces that name.
point: Callable[[Tensor, Tensor], None] = Tensor.data.__set__  # type: ignore[attr-defined]

# A parameter begins at a multiple of this. cuBLAS picks its kernel by the alignment of a pointer,
# up to 256 bytes. So a view of a slot must be aligned like a fresh allocation, or the window would
# change bits. Groups of lean states have 64 elements, which are 128 bytes in bf16.
ALIGN_BYTES = 256


class WeightState(Enum):
    """The place of a layer's newest weights, beside the host."""

    AWAY = "away"  # on the host alone
    COMING = "coming"  # a fetch to the layer's slot is queued
    HERE = "here"  # compute has waited for the fetch
    STALE = "stale"  # a resident's slot has older weights than the host


class GradientState(Enum):
    """The stage of a layer's gradients in a step."""

    NONE = "none"
    GATHERING = "gathering"  # autograd adds them in a gradient slot
    WAITING = "waiting"  # in the layer's buffer, or on their way to it, until the update


WEIGHT_MOVES = {
    WeightState.AWAY: {WeightState.COMING},
    WeightState.COMING: {WeightState.HERE, WeightState.AWAY, WeightState.STALE},
    WeightState.HERE: {WeightState.AWAY, WeightState.STALE},
    WeightState.STALE: {WeightState.COMING},
}


class Layer:
    """One layer of the model, with the state that its owners share.

    name            dotted path of the block, or of the first module that holds a parameter
    is_block        only the block's own call uses the parameters
    block           of a layer outside of the blocks: the block that alone holds it, if one does
    is_resident     its weights never leave the device
    is_on_gpu       its masters and moments lie on the device, which updates them. It is resident
    level           of activations: one of `plan.cost.LEVELS`
    parameters      trained ones first. `names`: their first names in the model
    offsets         first byte of each parameter in the layer's buffer
    trained_bytes   bytes of the trained parameters, padded to pages. `num_bytes`: of all
    states          the arrays of the optimizer; None if nothing trains
    slot            has the weights on the device. `gradient_slot`: gathers gradients there
    waiting         positions of the parameters whose gradient waits for the update
    aliases         by position: further tensors of a library over a parameter's memory
    num_calls       forward calls since the first forward after a backward
    num_updates     optimizer steps so far
    fetched         `version` of what the slot has
    is_seen         the program may have written parameters since the layer was used (`visible`).
                    `num_looks`: how often it has looked at them
    *_record        hazards of weights, remainders and moments; of gradients
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameters: Sequence[NamedParameter],
        dtypes: Sequence[torch.dtype],
        states: States | None,
        num_trained: int,
    ) -> None:
        self.index, self.name = index, name
        self.is_block, self.is_resident, self.is_on_gpu = False, True, False
        self.block: Layer | None = None
        self.level = "keep"
        self.parameters = [named.parameter for named in parameters]
        self.names = [named.name for named in parameters]
        self.dtypes, self.states, self.num_trained = tuple(dtypes), states, num_trained
        self.offsets: list[int] = []
        self.trained_bytes = self.num_bytes = 0
        for position, (parameter, dtype) in enumerate(zip(self.parameters, dtypes, strict=True)):
            self.offsets.append(self.num_bytes)
            nbytes = math.prod(parameter.shape) * dtype.itemsize
            # In a file an update writes whole pages, and none of a frozen parameter.
            align = PAGE_BYTES if position == num_trained - 1 else ALIGN_BYTES
            self.num_bytes = -(-(self.num_bytes + nbytes) // align) * align
            if position < num_trained:
                self.trained_bytes = self.num_bytes
        self.weight_state, self.gradient_state = WeightState.AWAY, GradientState.NONE
        self.slot: Slot | None = None
        self.gradient_slot: Slot | None = None
        self.waiting: set[int] = set()
        self.num_calls = self.num_updates = 0
        self.fetched, self.is_seen, self.num_looks = (0, 0), True, 0
        self.aliases: Mapping[int, Sequence[Tensor]] = {}
        self.weight_record, self.gradient_record = Record(), Record()

    def __repr__(self) -> str:
        facts = [f"weights {self.weight_state.value}", f"gradients {self.gradient_state.value}"]
        if self.waiting:
            facts.append(f"{len(self.waiting)} of {self.num_trained} wait")
        if self.num_calls:
            facts.append(f"called {self.num_calls} times")
        for record in (self.weight_record, self.gradient_record):
            if not record.writer.done:
                facts.append(f"after {record.writer.operation}")
        return f"<layer {self.index} {self.name}: {', '.join(facts)}>"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trained parameters."""
        return self.dtypes[0]

    @property
    def trained_numel(self) -> int:
        """Elements of the trained parameters, padded: each array of the optimizer covers them."""
        return self.trained_bytes // self.dtype.itemsize if self.num_trained else 0

    @property
    def version(self) -> tuple[int, int]:
        """Changes with each update, and with each write of the program into a parameter."""
        with without_torch_function():  # hidden parameters need not be shown
            return self.num_updates, sum(p._version for p in self.parameters)

    def element(self, position: int) -> int:
        """First element of a trained parameter in the layer's arrays."""
        return self.offsets[position] // self.dtype.itemsize

    def arrays_of(self, optimizer: Optimizer) -> dict[str, str]:
        """The arrays that hold a parameter's state, by the names that its optimizer gives them.

        They have the names of the optimizer with the most moments in this layer. Others share them,
        moment by moment.
        """
        assert self.states is not None
        own = self.states.of(optimizer.moments)
        arrays = {array: array for array in own.dtypes if array not in own.moment_dtypes}
        for moment, shared in zip(own.moments, self.states.moments, strict=False):
            arrays |= zip(own.arrays_of(moment), self.states.arrays_of(shared), strict=True)
        return arrays

    def extent(self, array: str, position: int) -> slice:
        """The bytes of a parameter in an array of the optimizer. Of "weights": in the layer's
        buffer, which has frozen parameters, too."""
        numel = math.prod(self.parameters[position].shape)
        if array == "weights":
            begin = self.offsets[position]
            return slice(begin, begin + numel * self.dtypes[position].itemsize)
        assert self.states is not None
        begin, itemsize = self.element(position), self.states.dtypes[array].itemsize
        of_array = items(array, begin, begin + numel)
        return slice(of_array.start * itemsize, of_array.stop * itemsize)

    def move(self, state: WeightState) -> None:
        """Change the state of the weights. AssertionError for a move that cannot be."""
        if state not in WEIGHT_MOVES[self.weight_state]:
            raise AssertionError(f"{self!r} cannot become {state.value}")
        self.weight_state = state

    @torch.inference_mode(False)  # an evaluation may be the first to need a view that trains later
    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters' views of a uint8 buffer. Of the trained ones alone if it is shorter."""
        is_whole = buffer.numel() == self.num_bytes
        views = []
        for k in range(len(self.parameters) if is_whole else self.num_trained):
            shape, begin = self.parameters[k].shape, self.offsets[k]
            end = begin + math.prod(shape) * self.dtypes[k].itemsize
            view = buffer[begin:end].view(self.dtypes[k]).view(shape)
            views.append(view.data)  # without `_base`, which would be one more tensor of the memory
        return views

    def bind(self, views: Sequence[Tensor]) -> None:
        """Point the parameters at these views. Autograd does not see it."""
        with without_torch_function():
            for parameter, view in zip(self.parameters, views, strict=True):
                point(parameter, view)
            for position, aliases in self.aliases.items():
                for alias in aliases:
                    point(alias, views[position])


@dataclass(eq=False)
class Slot:
    """A buffer on the device, for weights or for gradients. Layers take turns, or one keeps it.

    views      of each layer that was ever in it; `num_views` in all
    left       further views, which frames of an exception hold
    arrived    positions of the gradients in it
    sum_memory fp32 [elements of a layer], for sums of chunks that are not in the gradient's place
    sums       the fp32 sums of the call whose chunks come now, by position
    writers    streams of compute that have written these
    """

    memory: Tensor
    layer: Layer | None = None
    record: Record = field(default_factory=Record)
    views: dict[Layer, list[Tensor]] = field(default_factory=dict)
    num_views: int = 0
    left: list[ReferenceType[Tensor]] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    sum_memory: Tensor | None = None
    sums: dict[int, Tensor] = field(default_factory=dict)
    writers: list[object] = field(default_factory=list)

    @classmethod
    def allocate(cls, device: Device, num_bytes: int, purpose: str) -> Slot:
        return cls(device.memory.allocate(num_bytes, torch.uint8, purpose))

    def views_of(self, layer: Layer, num_bytes: int) -> list[Tensor]:
        """The views of a layer whose first `num_bytes` the slot has."""
        views = self.views.get(layer)
        if views is None:
            views = self.views[layer] = layer.views(self.memory[:num_bytes])
            self.num_views = sum(map(len, self.views.values()))
        return views


def layers_of(
    partition: Partition,
    groups: Groups,
    *,
    dtype_of: Callable[[Tensor], torch.dtype],
    kind: StateKind,
    aliases: Mapping[Tensor, Sequence[Tensor]] = NO_ALIASES,
) -> list[Layer]:
    """The layers of a partition, in its order.

    groups    the trained parameters; all others are frozen
    dtype_of  the dtype of a parameter in training. The trained ones of a layer have one
    kind      of the states: "exact", or "lean" for bf16 weights
    aliases   further tensors of a library over a parameter's memory
    """
    layers = []
    for part in partition.layers:
        trained = [named for named in part.parameters if named.parameter in groups]
        frozen = [named for named in part.parameters if named.parameter not in groups]
        dtypes = [dtype_of(named.parameter) for named in trained]
        states = None
        if trained:
            # Groups without momentum share the arrays of groups with momentum.
            moments = max((groups[n.parameter][1].moments for n in trained), key=len)
            states = states_of(dtypes[0], kind if dtypes[0] is torch.bfloat16 else EXACT, moments)
        dtypes += [dtype_of(named.parameter) for named in frozen]
        layer = Layer(part.index, part.name, [*trained, *frozen], dtypes, states, len(trained))
        layer.is_block, layer.is_resident = part.streamed, not part.streamed
        layer.aliases = {k: aliases[p] for k, p in enumerate(layer.parameters) if p in aliases}
        layers.append(layer)
    pairs = list(zip(layers, partition.layers, strict=True))
    block_of = {
        module: layer
        for layer, part in pairs
        for block in (part.modules if layer.is_block else ())
        for module in block.modules()
    }
    for layer, part in pairs:
        holders = {block_of.get(module) for module in part.modules}
        if not layer.is_block and len(holders) == 1:
            (layer.block,) = holders
    return layers


def layout_of(layers: Sequence[Layer], partition: Partition) -> ModelLayout:
    """The sizes of the layers, for the planner: exactly those of their buffers and arrays."""
    return ModelLayout(layers=tuple(map(_sizes_of, layers, partition.layers)))


def _sizes_of(layer: Layer, part: PartitionLayer) -> LayerLayout:
    return LayerLayout(
        index=layer.index,
        name=layer.name,
        streamed=layer.is_block,
        in_block=layer.block is not None,
        states=layer.states,
        trained_numel=layer.trained_numel,
        frozen_bytes=layer.num_bytes - layer.trained_bytes,
        frozen_dtypes=frozenset(layer.dtypes[layer.num_trained :]),
        num_parameters=sum(
            math.prod(named.parameter.shape) if named.num_weights is None else named.num_weights
            for named in part.parameters
        ),
        num_trained=sum(math.prod(p.shape) for p in layer.parameters[: layer.num_trained]),
    )
