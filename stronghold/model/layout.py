"""Layout: the offset of every parameter in its layer's arrays, the padded sizes, and which elements
are one rank's own. The only place that computes offsets.

Owns no bytes and reads none: shapes alone decide, on the meta device too. All numbers are elements,
not bytes, so that one layout serves 16-bit weights, remainders and gradients and 32-bit moments
alike. Pure data, made once; any thread may read it.

[Note: two ranges] A layer's trainable and frozen parts are each cut into equal contiguous ranges of
whole pages, one per rank in order. So moments and gradients, which cover the trainable part alone,
are cut like the weights above them, and an all-gather of each part lands where the layer's slot has
it.

[Note: nodes] Of M nodes each holds every layer's weights. The ranges are given out so that those of
one local index are neighbours: number j M + k belongs to the j-th rank of node k. What such a rank
updates and what its peers on the other nodes send it is then one contiguous part of the node's
weights, and exactly what it fetches for its GPU: nobody fetches what another process writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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
    """What decides where a parameter lies."""

    name: str
    shape: tuple[int, ...]
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice(ParameterShape):
    """Where one parameter lies in each of its layer's arrays: `array[offset : offset +
    numel].view(shape)`."""

    offset: int
    numel: int

    def within(self, begin: int, end: int) -> slice:
        """The elements of the layer that are the parameter's and in [begin, end), counted from
        `begin`; empty where it has none there."""
        low = max(self.offset, begin)
        return slice(low - begin, max(low, min(self.offset + self.numel, end)) - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """One layer's arrays. `slices` follow `Layer.parameters`: trainable first, then frozen. Moments
    and gradients cover the padded prefix `trainable_numel`, weights the padded whole, `numel`; the
    other two numbers are without padding."""

    index: int
    name: str
    streamed: bool
    slices: tuple[ParameterSlice, ...]
    trainable_numel: int
    numel: int
    num_parameters: int
    num_trainable: int


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

    @property
    def max_numel(self) -> int:
        """Elements that a weight slot must hold: the largest streamed layer, padded; 0 without
        one."""
        return max((self.layers[index].numel for index in self.streamed), default=0)


def layout(partition: Partition, num_ranks: int = 1, page_numel: int = PAGE_NUMEL) -> ModelLayout:
    """The layout of `partition`, whose parts `num_ranks` divides into whole pages (of `page_numel`
    elements). StateError when a layer's parameters are not trainable first."""
    layers = (
        layer_layout(
            [
                ParameterShape(
                    name=named.name,
                    shape=tuple(named.parameter.shape),
                    trainable=named.parameter.requires_grad,
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
    """The layout of one layer; StateError when its parameters are not trainable first."""
    trainable = [parameter for parameter in parameters if parameter.trainable]
    frozen = [parameter for parameter in parameters if not parameter.trainable]
    if list(parameters) != trainable + frozen:
        raise StateError(
            f"layer {index} ({name!r}): a frozen parameter precedes a trainable one, "
            "but moments and gradients cover a prefix of the layer; requires_grad changed between "
            "partition() and layout()"
        )
    first, end = _place(trainable, start=0)
    trainable_numel = _padded(end, num_ranks * page_numel)
    second, end = _place(frozen, start=trainable_numel)
    slices = first + second
    return LayerLayout(
        index=index,
        name=name,
        streamed=streamed,
        slices=slices,
        trainable_numel=trainable_numel,
        numel=trainable_numel + _padded(end - trainable_numel, num_ranks * page_numel),
        num_parameters=sum(part.numel for part in slices),
        num_trainable=sum(part.numel for part in first),
    )


def condensed(layout: ModelLayout) -> ModelLayout:
    """The layout with at most two parameters a layer, trainable and frozen, of the same sizes: the
    same bytes move, in fewer Python objects."""
    return replace(layout, layers=tuple(_condensed(layer) for layer in layout.layers))


def _condensed(layer: LayerLayout) -> LayerLayout:
    frozen = layer.num_parameters - layer.num_trainable
    slices = [
        ParameterSlice(name=name, offset=offset, numel=numel, shape=(numel,), trainable=trains)
        for name, offset, numel, trains in (
            (f"{layer.name}.trainable", 0, layer.num_trainable, True),
            (f"{layer.name}.frozen", layer.trainable_numel, frozen, False),
        )
        if numel
    ]
    return replace(layer, slices=tuple(slices))


def _place(
    parameters: Iterable[ParameterShape], *, start: int
) -> tuple[tuple[ParameterSlice, ...], int]:
    """Slices one after the other from `start`, each aligned, and the unpadded end of the last."""
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
            )
        )
        end = offset + numel
    return tuple(slices), end


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


# -- ranks ----------------------------------------------------------------------------------------

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Range `rank` of `num_ranks`, of which each of `num_nodes` has as many ([Note: nodes])."""

    num_ranks: int = 1
    rank: int = 0
    num_nodes: int = 1

    def trained(self, layer: LayerLayout) -> Range:
        """Elements whose moments and gradients are this rank's."""
        return self._of(0, layer.trainable_numel)

    def weights(self, layer: LayerLayout) -> tuple[Range, ...]:
        """Elements whose weights are this rank's: at most two ranges, none of them empty."""
        parts = (0, layer.trainable_numel), (layer.trainable_numel, layer.numel)
        return tuple(self._of(begin, end) for begin, end in parts if end > begin)

    def within(self, layer: LayerLayout, begin: int, end: int) -> Iterator[Range]:
        """The elements of [begin, end) whose weights are this rank's."""
        for low, high in self.weights(layer):
            if max(begin, low) < min(end, high):
                yield max(begin, low), min(end, high)

    def fetched(self, layer: LayerLayout) -> tuple[tuple[Range, Range], ...]:
        """(a part of the layer, what this rank fetches of it), for each part that is not empty: its
        own range and those of its peers on other nodes."""
        node = Shards(num_ranks=self.num_ranks // self.num_nodes, rank=self.rank // self.num_nodes)
        parts = (0, layer.trainable_numel), (layer.trainable_numel, layer.numel)
        return tuple((part, node._of(*part)) for part in parts if part[1] > part[0])

    def exchanged(self, layer: LayerLayout) -> tuple[tuple[Range, Range], ...]:
        """(what this rank and its peers have of a part, this rank's own range of that)."""
        blocks = [block for _, block in self.fetched(layer)]
        return tuple(zip(blocks, self.weights(layer), strict=True))

    def _of(self, begin: int, end: int) -> Range:
        share = (end - begin) // self.num_ranks
        return begin + self.rank * share, begin + (self.rank + 1) * share
