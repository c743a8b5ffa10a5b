"""Layout: the offset of every parameter in its layer's arrays, the padded sizes, and each rank's
elements. The only place that computes offsets.

Owns no bytes and reads none: shapes and formats decide, on the meta device too. All numbers are
elements, not bytes: one layout serves 16-bit weights, remainders and gradients and 32-bit moments.
`model.arrays` makes bytes of them. Pure data, made once; any thread may read it.

[Note: ranges] A range holds neighbouring parameters of one layer with one format: one dtype of the
weights, and one optimizer or none. Trainable ranges come first, so moments and gradients cover a
prefix of the layer. Each range is cut into equal contiguous shares of whole pages, one per rank in
order. So moments and gradients are cut like the weights above them, and an all-gather of each range
lands where the layer's slot has it.

[Note: nodes] Of M nodes each holds every layer's weights. The shares are given out so that those of
one local index are neighbours: number j M + k belongs to the j-th rank of node k. What such a rank
updates and what its peers on the other nodes send it is then one contiguous part of the node's
weights, and exactly what it fetches for its GPU: nobody fetches what another process writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from torch import nn

from stronghold.errors import StateError
from stronghold.model.partition import Partition
from stronghold.optim.states import EXACT, page_numel

# Every parameter starts at a multiple of this: 256 bytes in 16-bit and 512 in 32-bit arrays. The
# caching allocator of CUDA hands out 512-byte multiples and cuBLAS picks its kernel by pointer
# alignment, up to 256 bytes: a view into a slot must look like a fresh allocation, or the window
# would change bits. It is also the widest SIMD store, eight times over.
ALIGN_NUMEL = 128

# The trainable part and the whole layer are padded to this: 4096 bytes in 16-bit arrays, a page and
# O_DIRECT's block; where states have arrays of fewer bits, to `states.page_numel`.
PAGE_NUMEL = page_numel(EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """What decides where a parameter lies. `format`: the number of its format among the model's
    (`optim.states.Format`)."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    format: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice(ParameterShape):
    """Where one parameter lies in each of its layer's arrays: elements [offset, offset + numel) of
    the layer, in range number `range`."""

    offset: int
    numel: int
    range: int

    def within(self, begin: int, end: int) -> slice:
        """The elements of the layer that are the parameter's and in [begin, end), counted from
        `begin`; empty where it has none there."""
        low = max(self.offset, begin)
        return slice(low - begin, max(low, min(self.offset + self.numel, end)) - begin)


Span = tuple[int, int]
"""Elements [begin, end) of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements [begin, end) of a layer, padded, that have one format ([Note: ranges]). The other
    two numbers are without padding."""

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
    """One layer's arrays. `slices` follow `Layer.parameters`: trainable first, then frozen, and
    those of one format together. Moments and gradients cover the padded prefix `trainable_numel`,
    weights the padded whole, `numel`. `ranges` cover the whole. The other two numbers are without
    padding."""

    index: int
    name: str
    streamed: bool
    slices: tuple[ParameterSlice, ...]
    ranges: tuple[Range, ...]
    trainable_numel: int
    numel: int
    num_parameters: int
    num_trainable: int

    @property
    def trainable_ranges(self) -> tuple[Range, ...]:
        """They cover the prefix `trainable_numel`."""
        return tuple(each for each in self.ranges if each.trainable)

    def within(self, begin: int, end: int) -> Iterator[tuple[Range, Span]]:
        """The parts of [begin, end) in each range that has some of it."""
        for each in self.ranges:
            first, last = max(begin, each.begin), min(end, each.end)
            if first < last:
                yield each, (first, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The layers in the partition's order: `layers[i].index == i`. `page_numel`: what each of their
    parts is a multiple of, for every rank."""

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
    format_of: Callable[[nn.Parameter], int] | None = None,
) -> ModelLayout:
    """The layout of `partition`, whose ranges `num_ranks` divides into whole pages (of `page_numel`
    elements). `format_of` gives the number of a parameter's format; without it all have one.
    StateError when a layer's parameters are not in the order of [Note: ranges], which `partition`
    with the same `format_of` makes."""
    layers = (
        layer_layout(
            [
                ParameterShape(
                    name=named.name,
                    shape=tuple(named.parameter.shape),
                    trainable=named.parameter.requires_grad,
                    format=format_of(named.parameter) if format_of else 0,
                )
                for named in layer.parameters
            ],
            index=layer.index,
            name=layer.name,
            streamed=layer.streamed,
            num_ranks=num_ranks,
            page_numel=page_numel,
        )
        for layer in partition.layers
    )
    return ModelLayout(layers=tuple(layers), page_numel=page_numel)


def for_ranks(layout: ModelLayout, num_ranks: int, page_numel: int = PAGE_NUMEL) -> ModelLayout:
    """The layout of the same parameters whose parts `num_ranks` divides into whole pages."""
    layers = (
        layer_layout(
            layer.slices,
            index=layer.index,
            name=layer.name,
            streamed=layer.streamed,
            num_ranks=num_ranks,
            page_numel=page_numel,
        )
        for layer in layout.layers
    )
    return ModelLayout(layers=tuple(layers), page_numel=page_numel)


def layer_layout(
    parameters: Sequence[ParameterShape],
    *,
    index: int,
    name: str,
    streamed: bool,
    num_ranks: int = 1,
    page_numel: int = PAGE_NUMEL,
) -> LayerLayout:
    """The layout of one layer; StateError when its parameters are not trainable first, and within
    these by the number of their format."""
    order = [(not parameter.trainable, parameter.format) for parameter in parameters]
    if order != sorted(order):
        raise StateError(
            f"layer {index} ({name!r}): its parameters are not in the order of their ranges: "
            "trainable ones first, then by format; requires_grad changed between partition() and "
            "layout()"
        )
    slices: list[ParameterSlice] = []
    ranges: list[Range] = []
    for (is_frozen, number), members in groupby(zip(order, parameters, strict=True), itemgetter(0)):
        start = ranges[-1].end if ranges else 0
        placed, end = _place([parameter for _, parameter in members], start, len(ranges))
        slices += placed
        ranges.append(
            Range(
                begin=start,
                end=start + _padded(end - start, num_ranks * page_numel),
                format=number,
                trainable=not is_frozen,
                num_parameters=sum(part.numel for part in placed),
            )
        )
    return LayerLayout(
        index=index,
        name=name,
        streamed=streamed,
        slices=tuple(slices),
        ranges=tuple(ranges),
        trainable_numel=max((each.end for each in ranges if each.trainable), default=0),
        numel=ranges[-1].end if ranges else 0,
        num_parameters=sum(each.num_parameters for each in ranges),
        num_trainable=sum(each.num_parameters for each in ranges if each.trainable),
    )


def condensed(layout: ModelLayout) -> ModelLayout:
    """The layout with one parameter for each range, of the same sizes: the same bytes move, in
    fewer Python objects."""
    return replace(layout, layers=tuple(_condensed(layer) for layer in layout.layers))


def _condensed(layer: LayerLayout) -> LayerLayout:
    slices = [
        ParameterSlice(
            name=f"{layer.name}.{number}",
            offset=each.begin,
            numel=each.num_parameters,
            shape=(each.num_parameters,),
            trainable=each.trainable,
            format=each.format,
            range=number,
        )
        for number, each in enumerate(layer.ranges)
        if each.num_parameters
    ]
    return replace(layer, slices=tuple(slices))


def _place(
    parameters: Iterable[ParameterShape], start: int, number: int
) -> tuple[tuple[ParameterSlice, ...], int]:
    """Slices of range `number`, one after the other from `start`, each aligned, and the unpadded
    end of the last."""
    slices, end = [], start
    for parameter in parameters:
        offset, numel = _padded(end, ALIGN_NUMEL), math.prod(parameter.shape)
        slices.append(
            ParameterSlice(
                name=parameter.name,
                offset=offset,
                numel=numel,
                shape=parameter.shape,
                trainable=parameter.trainable,
                format=parameter.format,
                range=number,
            )
        )
        end = offset + numel
    return tuple(slices), end


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


# -- ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Share `rank` of `num_ranks`, of which each of `num_nodes` has as many ([Note: nodes])."""

    num_ranks: int = 1
    rank: int = 0
    num_nodes: int = 1

    def of(self, each: Range) -> Span:
        """This rank's share of a range."""
        return self._of(*each.span)

    def trained(self, layer: LayerLayout) -> tuple[Span, ...]:
        """Elements whose moments and gradients are this rank's, of each trainable range."""
        return tuple(self.of(each) for each in layer.trainable_ranges)

    def weights(self, layer: LayerLayout) -> tuple[Span, ...]:
        """Elements whose weights are this rank's, of each range."""
        return tuple(self.of(each) for each in layer.ranges)

    def within(self, layer: LayerLayout, begin: int, end: int) -> Iterator[Span]:
        """The elements of [begin, end) whose weights are this rank's."""
        for low, high in self.weights(layer):
            if max(begin, low) < min(end, high):
                yield max(begin, low), min(end, high)

    def fetched(self, layer: LayerLayout) -> tuple[tuple[Range, Span], ...]:
        """(a range of the layer, what this rank fetches of it): its own share and those of its
        peers on other nodes."""
        node = Shards(num_ranks=self.num_ranks // self.num_nodes, rank=self.rank // self.num_nodes)
        return tuple((each, node.of(each)) for each in layer.ranges)

    def exchanged(self, layer: LayerLayout) -> tuple[tuple[Range, Span, Span], ...]:
        """(a range, what this rank and its peers have of it, this rank's own share of that)."""
        return tuple((each, block, self.of(each)) for each, block in self.fetched(layer))

    def _of(self, begin: int, end: int) -> Span:
        share = (end - begin) // self.num_ranks
        return begin + self.rank * share, begin + (self.rank + 1) * share
