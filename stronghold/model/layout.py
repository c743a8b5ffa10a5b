"""Layout: the offset of every parameter in its layer's arrays, the padded sizes, and each rank's
shard of every range.

No other file computes offsets. Owns no bytes and reads none: shapes and formats decide, on the meta
device too. All numbers are elements, not bytes. So one layout serves 16-bit weights, remainders and
gradients, and 32-bit moments; `model.arrays` computes their bytes. Pure data, made once; any thread
may read it.

[Note: ranges]

1. A range (a flat parameter, a bucket) holds neighbouring parameters of one layer with one format:
   one dtype of the weights, and one optimizer or none.
2. Trainable ranges come first. So moments and gradients cover a prefix of the layer.
3. Each range is cut into equal contiguous shards of whole pages, one per rank in order. So moments
   and gradients are cut like the weights above them.
4. An all-gather of a range's shards writes each element to its place in the layer's slot. A
   reduce-scatter of a range's gradients gives each rank its shard.

[Note: nodes] (HSDP: sharded within a node, replicated between nodes.)

1. Each of M nodes holds every layer's weights.
2. Shard number j M + k belongs to the j-th rank of node k. So the shards of ranks with one local
   index are neighbours.
3. A rank updates its shard. Its peers on the other nodes send it theirs. All of these are one
   contiguous block of the node's weights.
4. The rank fetches this block for its GPU. So no rank fetches elements that another process of
   its node writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch

from stronghold.errors import StateError
from stronghold.model.partition import Partition
from stronghold.model.stored_tensors import PackedParameter
from stronghold.optim.states import EXACT, page_numel

# Every parameter starts at a multiple of this: 256 bytes in 16-bit and 512 in 32-bit arrays. CUDA's
# caching allocator hands out multiples of 512 bytes. cuBLAS picks its kernel by pointer alignment,
# up to 256 bytes. So a view into a slot must be aligned like a fresh allocation, or the window
# would change bits. It is also eight times the widest SIMD store.
ALIGN_NUMEL = 128

# A decoded weight begins at a multiple of this, for the same reason.
DECODED_ALIGN_BYTES = 512

# Ranges are padded to this: 4096 bytes in 16-bit arrays, which is a page and O_DIRECT's block.
# States with arrays of fewer bits pad to `states.page_numel`.
PAGE_NUMEL = page_numel(EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """A stored tensor's properties that decide its place in the layout.

    `format` is the number of its format among the model's (`optim.states.Format`). `num_weights`:
    number of weights that it stands for, if that is not its number of elements.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    format: int = 0
    num_weights: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice(ParameterShape):
    """A parameter's place in each of its layer's arrays.

    It has elements [offset, offset + numel) of the layer, in range number `range`.
    """

    offset: int
    numel: int
    range: int

    def within(self, begin: int, end: int) -> slice:
        """The parameter's elements in [begin, end) of the layer, counted from `begin`.

        The slice is empty if the parameter has none of them.
        """
        first = max(self.offset, begin)
        last = max(first, min(self.offset + self.numel, end))
        return slice(first - begin, last - begin)


Span = tuple[int, int]
"""Elements [begin, end) of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements [begin, end) of a layer, padded, that have one format ([Note: ranges]).

    `format` is the format's number among the model's. `num_parameters`: its elements without
    padding.
    """

    begin: int
    end: int
    format: int
    trainable: bool
    num_parameters: int

    @property
    def span(self) -> Span:
        return self.begin, self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """The layout of one layer's arrays.

    `slices` have the order of `Layer.parameters`: trainable ones first, then frozen ones, and those
    of one format together. `ranges` cover the layer. Moments and gradients cover the padded prefix
    `trainable_numel`; weights cover the padded whole, `numel`. `num_parameters` and `num_trainable`
    count weights, without padding. `decoded_bytes`: bytes of the layer's packed weights when they
    are decoded. `in_block`: the layer is no block, and one block alone holds it.
    """

    index: int
    name: str
    streamed: bool
    slices: tuple[ParameterSlice, ...]
    ranges: tuple[Range, ...]
    trainable_numel: int
    numel: int
    num_parameters: int
    num_trainable: int
    decoded_bytes: int = 0
    in_block: bool = False

    @property
    def trainable_ranges(self) -> tuple[Range, ...]:
        """The ranges that train. They cover the prefix `trainable_numel`."""
        return tuple(layer_range for layer_range in self.ranges if layer_range.trainable)

    def within(self, begin: int, end: int) -> Iterator[tuple[Range, Span]]:
        """Each range that has elements of [begin, end), with the span of these."""
        for layer_range in self.ranges:
            first = max(begin, layer_range.begin)
            last = min(end, layer_range.end)
            if first < last:
                yield layer_range, (first, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The layouts of a model's layers, in the partition's order: `layers[i].index == i`.

    The shards of every range are multiples of `page_numel` elements, on every rank.
    """

    layers: tuple[LayerLayout, ...]
    page_numel: int = PAGE_NUMEL

    @property
    def num_parameters(self) -> int:
        """Parameters of the model without padding, each tied one counted once."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_trainable(self) -> int:
        """Parameters with `requires_grad`, without padding."""
        return sum(layer.num_trainable for layer in self.layers)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of the layers that move."""
        return tuple(layer.index for layer in self.layers if layer.streamed)

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the layers that never leave the GPU."""
        return tuple(layer.index for layer in self.layers if not layer.streamed)


def layout(
    partition: Partition,
    num_ranks: int = 1,
    page_numel: int = PAGE_NUMEL,
    format_of: Callable[[torch.Tensor], int] | None = None,
) -> ModelLayout:
    """Lay out a partition's parameters.

    Each range is padded so that every one of `num_ranks` has whole pages of `page_numel` elements.
    `format_of` gives the number of a stored tensor's format; None: all have one format.

    StateError if a layer's parameters are not in the order of [Note: ranges]. `partition` makes
    that order if it gets the same `format_of`.
    """
    layers: list[LayerLayout] = []
    for layer in partition.layers:
        shapes = [
            ParameterShape(
                name=named.name,
                shape=tuple(named.parameter.shape),
                trainable=named.parameter.requires_grad,
                format=format_of(named.parameter) if format_of else 0,
                num_weights=named.num_weights,
            )
            for named in layer.parameters
        ]
        layers.append(
            layer_layout(
                shapes,
                index=layer.index,
                name=layer.name,
                streamed=layer.streamed,
                num_ranks=num_ranks,
                page_numel=page_numel,
                decoded_bytes=sum(map(decoded_bytes, layer.packed)),
            )
        )
    return ModelLayout(layers=tuple(layers), page_numel=page_numel)


def decoded_bytes(packed: PackedParameter) -> int:
    """Bytes of a packed parameter's decoded weight. Each begins like a fresh allocation."""
    nbytes = math.prod(packed.shape) * packed.dtype.itemsize
    return _padded(nbytes, DECODED_ALIGN_BYTES)


def layer_layout(
    parameters: Sequence[ParameterShape],
    *,
    index: int,
    name: str,
    streamed: bool,
    num_ranks: int = 1,
    page_numel: int = PAGE_NUMEL,
    decoded_bytes: int = 0,
) -> LayerLayout:
    """Lay out the stored tensors of one layer.

    StateError if they are not in the order of [Note: ranges]: trainable ones first, and within
    these and the frozen ones by the number of their format.
    """
    order = [(not parameter.trainable, parameter.format) for parameter in parameters]
    if order != sorted(order):
        raise StateError(
            f"layer {index} ({name!r}): its parameters are not in the order of their ranges: "
            "trainable ones first, then by format; requires_grad changed between partition() and "
            "layout()"
        )
    slices: list[ParameterSlice] = []
    ranges: list[Range] = []
    pairs = zip(order, parameters, strict=True)
    for (is_frozen, format_number), members in groupby(pairs, itemgetter(0)):
        begin = ranges[-1].end if ranges else 0
        placed, end = _place([parameter for _, parameter in members], begin, len(ranges))
        slices += placed
        ranges.append(
            Range(
                begin=begin,
                end=begin + _padded(end - begin, num_ranks * page_numel),
                format=format_number,
                trainable=not is_frozen,
                num_parameters=sum(parameter.numel for parameter in placed),
            )
        )
    trainable = [layer_range for layer_range in ranges if layer_range.trainable]
    return LayerLayout(
        index=index,
        name=name,
        streamed=streamed,
        slices=tuple(slices),
        ranges=tuple(ranges),
        trainable_numel=trainable[-1].end if trainable else 0,
        numel=ranges[-1].end if ranges else 0,
        num_parameters=sum(map(_num_weights, slices)),
        num_trainable=sum(layer_range.num_parameters for layer_range in trainable),
        decoded_bytes=decoded_bytes,
    )


def _num_weights(parameter: ParameterSlice) -> int:
    return parameter.numel if parameter.num_weights is None else parameter.num_weights


def _place(
    parameters: Iterable[ParameterShape], begin: int, number: int
) -> tuple[tuple[ParameterSlice, ...], int]:
    """Place the parameters of range `number` one after the other from `begin`, each aligned.

    Returns their slices and the unpadded end of the last one.
    """
    slices: list[ParameterSlice] = []
    end = begin
    for parameter in parameters:
        offset = _padded(end, ALIGN_NUMEL)
        numel = math.prod(parameter.shape)
        slices.append(
            ParameterSlice(
                name=parameter.name,
                offset=offset,
                numel=numel,
                shape=parameter.shape,
                trainable=parameter.trainable,
                format=parameter.format,
                num_weights=parameter.num_weights,
                range=number,
            )
        )
        end = offset + numel
    return tuple(slices), end


def _padded(numel: int, multiple: int) -> int:
    """The least multiple that is not below `numel`."""
    return -(-numel // multiple) * multiple


# -- ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shard number `rank` of `num_ranks`. All of `num_nodes` nodes have as many ranks ([Note:
    nodes])."""

    num_ranks: int = 1
    rank: int = 0
    num_nodes: int = 1

    def of(self, layer_range: Range) -> Span:
        """This rank's shard of a range."""
        begin, end = layer_range.span
        shard_numel = (end - begin) // self.num_ranks
        first = begin + self.rank * shard_numel
        return first, first + shard_numel

    def trained(self, layer: LayerLayout) -> tuple[Span, ...]:
        """This rank's shard of each trainable range: the elements whose moments and gradients it
        keeps."""
        return tuple(self.of(layer_range) for layer_range in layer.trainable_ranges)

    def weights(self, layer: LayerLayout) -> tuple[Span, ...]:
        """This rank's shard of each range: the elements whose weights it keeps."""
        return tuple(self.of(layer_range) for layer_range in layer.ranges)

    def within(self, layer: LayerLayout, begin: int, end: int) -> Iterator[Span]:
        """The spans of [begin, end) whose weights this rank keeps."""
        for shard_begin, shard_end in self.weights(layer):
            first = max(begin, shard_begin)
            last = min(end, shard_end)
            if first < last:
                yield first, last

    def fetched(self, layer: LayerLayout) -> tuple[tuple[Range, Span], ...]:
        """Each range of the layer with the block of it that this rank fetches.

        The block is the rank's shard and those of its peers on other nodes. The ranks of a node
        all-gather their blocks.
        """
        ranks_per_node = self.num_ranks // self.num_nodes
        node = Shards(num_ranks=ranks_per_node, rank=self.rank // self.num_nodes)
        return tuple((layer_range, node.of(layer_range)) for layer_range in layer.ranges)

    def exchanged(self, layer: LayerLayout) -> tuple[tuple[Range, Span, Span], ...]:
        """(a range, the block of this rank and its peers, this rank's shard in that block)."""
        return tuple(
            (layer_range, block, self.of(layer_range)) for layer_range, block in self.fetched(layer)
        )
