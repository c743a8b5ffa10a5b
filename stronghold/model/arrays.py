"""Array maps: the byte position of each element of a layer in each of its arrays.

Owns no memory. An `ArrayMap` turns elements into bytes, and bytes into typed views. Pure data, made
once for each layer; any thread may use it.

[Note: one path]

1. An array is flat memory of bytes (a flat parameter, a bucket).
2. Its sections follow the layer's ranges, one behind the other. Each section has one dtype.
3. Copies take the bytes of any elements. Kernels take the typed view of elements of one range.
4. Every section begins on a page, whatever its dtype, because a range has whole pages of every
   array (`model.layout`, [Note: ranges]).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from stronghold.errors import StateError
from stronghold.model.layout import LayerLayout, ParameterSlice, Range, Shards, Span
from stronghold.optim.states import Format, group_size, num_items


@dataclass(frozen=True, slots=True)
class Section:
    """Elements [begin, end) of range `number` of the layer, from byte `offset` of the array on.

    The array has one item of `dtype` for each `group` of elements.
    """

    number: int
    begin: int
    end: int
    offset: int
    dtype: torch.dtype
    group: int

    @property
    def nbytes(self) -> int:
        return self.byte_of(self.end) - self.offset

    def byte_of(self, element: int) -> int:
        """The byte at which the item of an element begins; for `end`, the end of the section."""
        item = -(-(element - self.begin) // self.group)
        return self.offset + item * self.dtype.itemsize

    def view(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) in `memory`, the array's bytes, as a flat tensor of `dtype`."""
        first_byte = self.byte_of(begin)
        end_byte = self.byte_of(end)
        return memory[first_byte:end_byte].view(self.dtype)


@dataclass(frozen=True, slots=True)
class ArrayMap:
    """The map of one array of one layer: `nbytes` bytes in sections that follow each other."""

    sections: tuple[Section, ...]
    nbytes: int

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the sections."""
        return tuple(section.dtype for section in self.sections)

    def section(self, begin: int, end: int) -> Section:
        """The section that has elements [begin, end). StateError if none has all of them."""
        section = self.find(begin, end)
        if section is None:
            raise StateError(f"elements [{begin}, {end}) lie in no one section of {self.sections}")
        return section

    def find(self, begin: int, end: int) -> Section | None:
        """The section that has elements [begin, end), or None."""
        for section in self.sections:
            if section.begin <= begin and end <= section.end:
                return section
        return None

    def has(self, begin: int, end: int) -> bool:
        """True if one section has elements [begin, end)."""
        return self.find(begin, end) is not None

    def has_range(self, parameter: ParameterSlice) -> bool:
        """True if the array has the parameter's range. This rank may have no element of it."""
        return any(section.number == parameter.range for section in self.sections)

    def bytes_of(self, begin: int, end: int) -> slice:
        """The bytes of elements [begin, end) of one section. `begin` is a multiple of its group.

        StateError if no one section has these elements.
        """
        section = self.section(begin, end)
        return slice(section.byte_of(begin), section.byte_of(end))

    def view(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of one section of `memory`, as a flat tensor of its dtype."""
        return self.section(begin, end).view(memory, begin, end)

    def parameter(self, memory: torch.Tensor, parameter: ParameterSlice) -> torch.Tensor:
        """The parameter's elements in `memory`, in the parameter's shape, without a copy.

        The array must have every range of the layer.
        """
        section = self.sections[parameter.range]
        first_byte = memory.storage_offset() + section.byte_of(parameter.offset)
        offset = first_byte // section.dtype.itemsize
        strides = contiguous_strides(parameter.shape)
        # Not `.view(dtype)`: its result is the base of further views, which then hold two tensors.
        with torch.inference_mode(False):  # autograd must be able to save it
            typed = torch.empty(0, dtype=section.dtype, device=memory.device)
            typed.set_(memory.untyped_storage(), offset, parameter.shape, strides)
        return typed


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape, in elements."""
    if not shape:
        return ()
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def make_map(spans: Iterable[tuple[int, Span, torch.dtype]], group: int = 1) -> ArrayMap:
    """The map of an array with these sections: a range's number, a span of elements, a dtype."""
    sections: list[Section] = []
    offset = 0
    for number, (begin, end), dtype in spans:
        section = Section(number, begin, end, offset, dtype, group)
        sections.append(section)
        offset += section.nbytes
    return ArrayMap(tuple(sections), offset)


def weight_map(layer: LayerLayout, formats: Sequence[Format]) -> ArrayMap:
    """The map of the whole layer's weights. Slots of weights and of gradients have it, too."""
    sections: list[tuple[int, Span, torch.dtype]] = []
    for number, layer_range in enumerate(layer.ranges):
        dtype = formats[layer_range.format].dtype
        sections.append((number, layer_range.span, dtype))
    return make_map(sections)


def array_maps(
    layer: LayerLayout, formats: Sequence[Format], shards: Shards
) -> dict[str, ArrayMap]:
    """The map of every array that the layer can have, by the array's name.

    "weights" has the whole layer. All other arrays have this rank's shares of the ranges that
    train.
    """
    maps = {"weights": weight_map(layer, formats)}
    for array in (*state_arrays(layer, formats), "gradients", "accumulated"):
        if array != "weights":
            maps[array] = _trained_map(layer, formats, shards, array)
    return maps


def _trained_map(
    layer: LayerLayout, formats: Sequence[Format], shards: Shards, array: str
) -> ArrayMap:
    """The map of an array of this rank's shares of the trainable ranges that have it."""
    sections: list[tuple[int, Span, torch.dtype]] = []
    for number, layer_range in enumerate(layer.trainable_ranges):
        dtype = _trained_dtype(formats[layer_range.format], array)
        if dtype is not None:
            sections.append((number, shards.of(layer_range), dtype))
    return make_map(sections, group_size(array))


def array_bytes(
    layer: LayerLayout, formats: Sequence[Format], array: str, num_ranks: int = 1
) -> int:
    """Bytes of one array on one of the ranks. 0 if the layer has no such array.

    "weights" counts the rank's shares of every range. All other arrays count those of trainable
    ranges; "trained weights" are the weights of these.
    """
    total = 0
    for layer_range in layer.ranges:
        dtype = _range_dtype(layer_range, formats, array)
        if dtype is not None:
            share = (layer_range.end - layer_range.begin) // num_ranks
            total += num_items(array, share) * dtype.itemsize
    return total


def _range_dtype(layer_range: Range, formats: Sequence[Format], array: str) -> torch.dtype | None:
    """The dtype of an array's items for a range; None if the range has no such array."""
    storage_format = formats[layer_range.format]
    if array == "weights":
        return storage_format.dtype
    if not layer_range.trainable:
        return None
    return _trained_dtype(storage_format, array)


def _trained_dtype(storage_format: Format, array: str) -> torch.dtype | None:
    """The dtype of an array's items for a trainable range; None if it has no such array."""
    if array in ("weights", "gradients", "trained weights"):
        return storage_format.dtype
    if array == "accumulated":
        return torch.float32
    return storage_format.trained.dtypes.get(array)


def array_dtype(storage_format: Format, array: str) -> torch.dtype:
    """The dtype of an array's items for a range of this format. The range must have the array."""
    if array in ("weights", "gradients"):
        return storage_format.dtype
    if array == "accumulated":
        return torch.float32
    return storage_format.trained.dtypes[array]


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
    """The layer's arrays in the order in which they lie in files.

    The arrays that an update reads lie together.
    """
    states = [name for name in state_arrays(layer, formats) if name not in ("weights", "low")]
    return (*states, "low", "weights", "gradients", "accumulated")
