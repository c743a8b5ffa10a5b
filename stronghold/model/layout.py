"""The sizes of layers, for the planner: their parameters, and the bytes of their arrays.

Pure data, made once (`train.layer.layout_of`). Shapes and dtypes decide, on the meta device too.
All numbers are elements, not bytes, unless their name says so. Any thread may read it.

A range holds neighbouring parameters of one layer with one format: one dtype of the weights, and
one optimizer or none. The trained range comes first. Masters, moments and gradients cover it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stronghold.optim.states import EXACT, Format, num_items, page_numel

# Elements of a page in 16-bit arrays. States with arrays of fewer bits have `states.page_numel`.
PAGE_NUMEL = page_numel(EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """A stored tensor's place in its layer: elements [offset, offset + numel), in range number
    `range`.

    format       the number of its format among the model's (`optim.states.Format`)
    num_weights  number of weights that it stands for, if that is not its number of elements
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    format: int
    num_weights: int | None
    offset: int
    numel: int
    range: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements [begin, end) of a layer, padded, that have one format.

    format          the format's number among the model's
    num_parameters  its elements without padding
    """

    begin: int
    end: int
    format: int
    trainable: bool
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """The layout of one layer.

    slices           trained parameters first, then frozen ones, and those of one format together
    ranges           cover the layer
    trainable_numel  elements of the trained range, padded. `numel`: of all
    num_parameters   weights, without padding. `num_trainable`: those that train
    in_block         the layer is no block, and one block alone holds it
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
    in_block: bool = False

    @property
    def trainable_ranges(self) -> tuple[Range, ...]:
        """The ranges that train."""
        return tuple(layer_range for layer_range in self.ranges if layer_range.trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The layouts of a model's layers, in the partition's order: `layers[i].index == i`.

    page_numel  elements that fill whole pages in every array
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


# -- arrays ---------------------------------------------------------------------------------------
def array_bytes(layer: LayerLayout, formats: Sequence[Format], array: str) -> int:
    """Bytes of one array. 0 if the layer has no such array.

    "weights" counts every range. All other arrays count the trainable ones; "trained weights" are
    the weights of these.
    """
    total = 0
    for layer_range in layer.ranges:
        dtype = _range_dtype(layer_range, formats, array)
        if dtype is not None:
            total += num_items(array, layer_range.end - layer_range.begin) * dtype.itemsize
    return total


def _range_dtype(layer_range: Range, formats: Sequence[Format], array: str) -> torch.dtype | None:
    """The dtype of an array's items for a range; None if the range has no such array."""
    storage_format = formats[layer_range.format]
    if array == "weights":
        return storage_format.dtype
    if not layer_range.trainable:
        return None
    if array in ("gradients", "trained weights"):
        return storage_format.dtype
    if array == "accumulated":
        return torch.float32
    return storage_format.trained.dtypes.get(array)


def moment_arrays(formats: Sequence[Format]) -> tuple[str, ...]:
    """Names of the arrays that hold moments, of all formats, each once."""
    names: dict[str, None] = {}
    for storage_format in formats:
        if storage_format.states is not None:
            names.update(dict.fromkeys(storage_format.states.moment_dtypes))
    return tuple(names)


def state_arrays(layer: LayerLayout, formats: Sequence[Format]) -> tuple[str, ...]:
    """Names of the arrays that an update of the layer changes, the weights first."""
    names = dict.fromkeys(["weights"])
    for layer_range in layer.trainable_ranges:
        dtypes = formats[layer_range.format].trained.dtypes
        names.update(dict.fromkeys(dtypes))
    return tuple(names)


def file_order(layer: LayerLayout, formats: Sequence[Format]) -> tuple[str, ...]:
    """The layer's arrays in the order in which they lie in files."""
    states = [name for name in state_arrays(layer, formats) if name not in ("weights", "low")]
    return (*states, "low", "weights")
