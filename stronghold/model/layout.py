"""The sizes of layers, for the planner: their parameters, and the bytes of their arrays.

Pure data, made once (`train.layer.layout_of`). Shapes and dtypes decide, on the meta device too.
Any thread may read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from stronghold.optim.states import States, num_items


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """The sizes of one layer.

    streamed        it is a block, and may leave the GPU
    in_block        it is no block, and one block alone holds it
    states          the arrays of its trained parameters; None if nothing trains
    trained_numel   elements of the trained parameters, padded to pages
    frozen_bytes    bytes of the frozen parameters, padded. `frozen_dtypes`: their dtypes
    num_parameters  weights, without padding. `num_trained`: those that train
    """

    index: int
    name: str
    streamed: bool
    in_block: bool = False
    states: States | None
    trained_numel: int
    frozen_bytes: int = 0
    frozen_dtypes: frozenset[torch.dtype] = frozenset()
    num_parameters: int
    num_trained: int

    def array_bytes(self, array: str) -> int:
        """Bytes of one array, padded. 0 if the layer has no such array.

        "weights" has the frozen parameters, too. All other arrays cover those that train: an array
        of the states, "gradients" in the dtype of the weights, their sums in fp32 ("accumulated").
        """
        return self._bytes.get(array, 0)

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """By array. A plan is found by comparing many, which all ask."""
        if self.states is None:
            return {"weights": self.frozen_bytes}
        others = {"gradients": self.states.dtype, "accumulated": torch.float32}
        sizes = {
            array: num_items(array, self.trained_numel) * dtype.itemsize
            for array, dtype in {**self.states.dtypes, **others}.items()
        }
        return sizes | {"weights": sizes["weights"] + self.frozen_bytes}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: those of the layer's buffer."""
        return self.array_bytes("weights")

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients, and of the weights that train."""
        return self.array_bytes("gradients")

    @property
    def update_bytes(self) -> float:
        """Bytes of memory that an update reads and writes, with gradients of the weights' dtype."""
        if self.states is None:
            return 0.0
        return self.trained_numel * self.states.update_bytes(self.states.dtype)


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The layouts of a model's layers, in the partition's order: `layers[i].index == i`."""

    layers: tuple[LayerLayout, ...]

    @property
    def num_parameters(self) -> int:
        """Parameters of the model without padding, each tied one counted once."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_trained(self) -> int:
        """Parameters that train, without padding."""
        return sum(layer.num_trained for layer in self.layers)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of the layers that move."""
        return tuple(layer.index for layer in self.layers if layer.streamed)

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the layers that never leave the GPU."""
        return tuple(layer.index for layer in self.layers if not layer.streamed)

    @cached_property
    def moments(self) -> tuple[str, ...]:
        """Names of the arrays that hold moments, of all layers, each once."""
        names: dict[str, None] = {}
        for layer in self.layers:
            if layer.states is not None:
                names.update(dict.fromkeys(layer.states.moment_dtypes))
        return tuple(names)
