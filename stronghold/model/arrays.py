"""Where each element of a layer lies in the bytes of its arrays.

Owns no memory: a `ArrayMap` turns elements into bytes, and bytes into typed views. Pure data, made once
for each layer; any thread may use it.

[Note: one path] An array is flat memory of bytes. Its sections follow the layer's ranges, one
behind the other; each has a dtype of its own. Copies take bytes of any elements, kernels take the
typed view of elements of one range. Every section begins on a page, whatever its dtype, because a
range has whole pages of every array (`model.layout`, [Note: ranges]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from stronghold.errors import StateError
from stronghold.model.layout import LayerLayout, ParameterSlice, Range, Shards, Span
from stronghold.optim.states import Format, group_size


@dataclass(frozen=True, slots=True)
class Section:
    """Elements [begin, end) of range `number` of the layer, one item for `group` of them, from byte
    `at` on."""

    number: int
    begin: int
    end: int
    at: int
    dtype: torch.dtype
    group: int

    @property
    def nbytes(self) -> int:
        return -(-(self.end - self.begin) // self.group) * self.dtype.itemsize

    def byte_of(self, element: int) -> int:
        """The byte at which the item of an element begins; of `end` the end of the section."""
        return self.at + -(-(element - self.begin) // self.group) * self.dtype.itemsize

    def view(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the section in `memory`, typed and flat."""
        return memory[self.byte_of(begin) : self.byte_of(end)].view(self.dtype)


@dataclass(frozen=True, slots=True)
class ArrayMap:
    """One array of one layer: `nbytes` in sections that follow each other."""

    sections: tuple[Section, ...]
    nbytes: int

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the sections."""
        return tuple(section.dtype for section in self.sections)

    def section(self, begin: int, end: int) -> Section:
        """The section that has elements [begin, end). StateError where none has all of them."""
        found = self.find(begin, end)
        if found is None:
            raise StateError(f"elements [{begin}, {end}) lie in no one section of {self.sections}")
        return found

    def find(self, begin: int, end: int) -> Section | None:
        """The section that has elements [begin, end), or None."""
        for section in self.sections:
            if section.begin <= begin and end <= section.end:
                return section
        return None

    def has(self, begin: int, end: int) -> bool:
        """Whether one section has elements [begin, end)."""
        return self.find(begin, end) is not None

    def has_range(self, part: ParameterSlice) -> bool:
        """Whether the array has the parameter's range, of which a rank may have no element."""
        return any(one.number == part.range for one in self.sections)

    def bytes_of(self, begin: int, end: int) -> slice:
        """The bytes of elements [begin, end), which lie in one section; begin is a multiple of its
        group."""
        section = self.section(begin, end)
        return slice(section.byte_of(begin), section.byte_of(end))

    def view(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of one section of `memory`, typed and flat."""
        return self.section(begin, end).view(memory, begin, end)

    def parameter(self, memory: torch.Tensor, part: ParameterSlice) -> torch.Tensor:
        """The parameter's part of `memory`, in its own shape: of an array that has every range."""
        section = self.sections[part.range]
        begin = memory.storage_offset() + section.byte_of(part.offset)
        offset, strides = begin // section.dtype.itemsize, contiguous_strides(part.shape)
        # Not `.view(dtype)`: its result is the base of further views, which then hold two tensors.
        with torch.inference_mode(False):  # autograd must be able to save it
            typed = torch.empty(0, dtype=section.dtype, device=memory.device)
            typed.set_(memory.untyped_storage(), offset, part.shape, strides)
        return typed


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def make_map(spans: Iterable[tuple[int, Span, torch.dtype]], group: int = 1) -> ArrayMap:
    """The map of an array that has these elements: the number of a range, a span, its dtype."""
    sections: list[Section] = []
    at = 0
    for number, (begin, end), dtype in spans:
        sections.append(Section(number, begin, end, at, dtype, group))
        at += sections[-1].nbytes
    return ArrayMap(tuple(sections), at)


def weight_map(layer: LayerLayout, formats: Sequence[Format]) -> ArrayMap:
    """Of the whole layer's weights, and of slots that hold them or their gradients."""
    return make_map(
        (number, each.span, formats[each.format].dtype) for number, each in enumerate(layer.ranges)
    )


def array_maps(
    layer: LayerLayout, formats: Sequence[Format], shards: Shards
) -> dict[str, ArrayMap]:
    """Of every array that the layer can have, by name: "weights" of the whole layer, all others of
    this rank's shares of what trains."""

    def trained(dtype_of: Callable[[Range], torch.dtype | None], group: int = 1) -> ArrayMap:
        spans = (
            (number, shards.of(each), dtype_of(each))
            for number, each in enumerate(layer.trainable_ranges)
        )
        return make_map(((k, span, dtype) for k, span, dtype in spans if dtype is not None), group)

    maps = {"weights": weight_map(layer, formats)}
    for array in state_arrays(layer, formats):
        if array != "weights":
            maps[array] = trained(
                lambda each, array=array: formats[each.format].trained.dtypes.get(array),  # type: ignore[misc]
                group_size(array),
            )
    maps["gradients"] = trained(lambda each: formats[each.format].dtype)
    maps["accumulated"] = trained(lambda each: torch.float32)
    return maps


def array_bytes(
    layer: LayerLayout, formats: Sequence[Format], array: str, num_ranks: int = 1
) -> int:
    """Bytes of one array on one of the ranks: of "weights" those of its shares of every range, of
    others those of what trains. 0 where the layer has no such array."""
    total = 0
    for each in layer.ranges:
        made = formats[each.format]
        if array == "weights":
            dtype: torch.dtype | None = made.dtype
        elif not each.trainable:
            continue
        elif array in ("gradients", "trained weights"):
            dtype = made.dtype
        elif array == "accumulated":
            dtype = torch.float32
        else:
            dtype = made.trained.dtypes.get(array)
        if dtype is not None:
            share = (each.end - each.begin) // num_ranks
            total += -(-share // group_size(array)) * dtype.itemsize
    return total


def array_dtype(made: Format, array: str) -> torch.dtype:
    """Of the items that an array has for a range of this format, which has the array."""
    if array in ("weights", "gradients"):
        return made.dtype
    return torch.float32 if array == "accumulated" else made.trained.dtypes[array]


def moment_arrays(formats: Sequence[Format]) -> tuple[str, ...]:
    """The arrays that hold moments, of all formats."""
    states = [made.states for made in formats if made.states is not None]
    return tuple(dict.fromkeys(array for one in states for array in one.moment_dtypes))


def state_arrays(layer: LayerLayout, formats: Sequence[Format]) -> tuple[str, ...]:
    """The names of the arrays that steps of the layer change, the weights first."""
    names = dict.fromkeys(["weights"])
    for each in layer.trainable_ranges:
        names.update(dict.fromkeys(formats[each.format].trained.dtypes))
    return tuple(names)


def file_order(layer: LayerLayout, formats: Sequence[Format]) -> tuple[str, ...]:
    """The layer's arrays in the order in which they lie in files: what an update reads lies
    together."""
    states = [name for name in state_arrays(layer, formats) if name not in ("weights", "low")]
    return (*states, "low", "weights", "gradients", "accumulated")
