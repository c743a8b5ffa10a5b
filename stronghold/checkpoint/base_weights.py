"""The frozen weights of a run, from a prepared base.

Joins `checkpoint.base` and the layers of an engine. Layers that host memory holds are read while
the model is taken over. Of all others it names the bytes in files, which `memory.frozen_files`
reads in each pass. It never packs a weight. The training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from stronghold.checkpoint.base import (
    PlacedRange,
    StoredPlace,
    open_base,
    source_mark,
    stored_place,
)
from stronghold.checkpoint.pretrained import directory_of
from stronghold.errors import ConfigError
from stronghold.model.arrays import ArrayMap
from stronghold.model.file_ranges import FileRange
from stronghold.model.layout import LayerLayout, ParameterSlice


class BaseWeights:
    """An open base whose frozen weights an engine takes (a `model.partition.FrozenSource`).

    `frozen`: name of its packed format.
    """

    def __init__(self, path: Path, model: nn.Module, *, frozen: str | None) -> None:
        """Open the base, and check that it is one of `model` if `from_pretrained` opened that.

        `frozen`: the config's format, or None. Raises what `open_base` raises.
        """
        directory = directory_of(model)
        source = None if directory is None else source_mark(directory)
        self._base = open_base(path, frozen=frozen, source=source)
        self.frozen: str = self._base.manifest.frozen

    def check(self, num_blocks: int) -> None:
        """Raise ConfigError if the base has another number of layers than the model has blocks."""
        num_layers = len(self._base.layers)
        if num_layers != num_blocks:
            raise ConfigError(
                f"{self._base.path}: has {num_layers} layers, and the model has {num_blocks} "
                "blocks. Prepare a base of this model"
            )

    def has(self, number: int, name: str) -> bool:
        """True if the base has the stored tensor `name` of a block.

        Others are the model's: those of frozen adapters. `number`: of the block, in the order of
        the model.
        """
        return self._base.has(number, name)

    def reader(
        self, number: int, weights: ArrayMap, slices: Sequence[ParameterSlice]
    ) -> Callable[[torch.Tensor], None]:
        """Return a function that fills memory with the frozen stored tensors of a block.

        number   of the block, in the order of the model
        weights  map of the layer's weights
        slices   the layer's stored tensors that the base has

        The function takes the flat bytes of the layer's weights, and waits for the disk. It raises
        CheckpointError for contents that have changed. Raises ConfigError here if the base has
        other tensors.
        """
        places = [stored_place(weights, parameter_slice) for parameter_slice in slices]
        self._base.has_layout(number, places)
        return partial(self._read, number, places)

    def file_ranges(
        self, number: int, weights: ArrayMap, layer: LayerLayout
    ) -> tuple[FileRange, ...] | None:
        """The files' bytes that are a block's frozen ranges, as `Base.file_ranges`.

        number   of the block, in the order of the model
        weights  map of the layer's weights
        layer    its layout
        """
        places: dict[int, list[StoredPlace]] = {}
        for parameter_slice in layer.slices:
            if not parameter_slice.trainable:
                of_range = places.setdefault(parameter_slice.range, [])
                of_range.append(stored_place(weights, parameter_slice))
        ranges: list[PlacedRange] = []
        for section in weights.sections:
            if section.number in places:
                ranges.append(
                    PlacedRange(
                        begin=section.offset,
                        end=section.offset + section.nbytes,
                        places=tuple(places[section.number]),
                    )
                )
        return self._base.file_ranges(number, ranges)

    def _read(self, number: int, places: Sequence[StoredPlace], memory: torch.Tensor) -> None:
        self._base.read_into(number, memory, places)

    def close(self) -> None:
        """Close the base's files. Safe to call twice."""
        self._base.close()
