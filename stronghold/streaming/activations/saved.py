"""Handles: objects that stand in autograd's graph for saved tensors.

Owns the types that the pack hook returns (`packing`), and the errors of a tensor that was written
since it was saved (a write-after-read hazard). Moves no bytes. The training thread makes handles in
forward. Autograd's thread resolves them in backward.

[Note: pack] The graph's node owns the object that a pack hook returns. A handle never holds the
saved tensor itself, but `detach()` of it:

1. The training thread packs a tensor. Its `grad_fn` is the node that saves it.
2. If the node owned the tensor, the tensor would own the node in turn. No collector sees this
   cycle. A graph that ends without a backward would never be freed.
3. `detach` shares memory and version counter, and has no `grad_fn`.
4. Autograd does not check versions of a tensor behind a hook. So the handle keeps the version, and
   unpack compares it.

[Note: sparse] A sparse tensor has no storage, but tensors of indices and values. It stays on the
device as it is, or is recomputed. If its values are a weight in a slot
(`torch.sparse_coo_tensor(indices, weight)`), its tensors are saved one by one. Backward builds the
sparse tensor from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from stronghold.devices.base import Fence, Record
from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.streaming.patches.autograd import Hooks
from stronghold.streaming.patches.tensors import version_of


class SavedTensor(NamedTuple):
    """A saved tensor that stays on its device, and its version counter when it was saved."""

    tensor: torch.Tensor
    version: int

    def unwritten(self) -> torch.Tensor:
        """Return the tensor, detached. RuntimeError if it was written since."""
        if version_of(self.tensor) != self.version:
            refuse_written(self)
        return self.tensor.detach()


class SavedWeight(NamedTuple):
    """A saved view of a slot.

    Backward resolves it in the slot that holds the layer then. `epoch` is the version of the
    weights that the forward has used. `offset` and `stride` are elements of `dtype`.
    """

    layer: int
    epoch: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedDecoded(NamedTuple):
    """A saved view of a decoded weight. Backward resolves it in the buffer of decoded weights, once
    the layer is decoded there again. `offset` and `stride` are elements of `dtype`.
    """

    layer: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedResident(NamedTuple):
    """A saved view of weights that stay on the device, and its version counter."""

    tensor: torch.Tensor
    version: int


@dataclass(eq=False)
class SavedStorage:
    """One storage that is offloaded (swapped out) and loaded back; saved tensors are its views.

    Autograd's graph owns it. It dies when the last node that saved it has run. Then its host memory
    returns to the pool.

    source   the tensor on the device, until its memory may be dropped
    version  version counter of `source` when it was saved
    host     the bytes on the host, uint8 [bytes]
    lent     access record of the gradient entry that has `host`; empty: the pool has it
    stored   fence of the copy to the host
    loaded   the bytes on the device again, or None
    """

    source: torch.Tensor | None
    version: int
    host: torch.Tensor
    lent: tuple[Record, ...] = ()
    stored: Fence | None = None
    loaded: LoadedStorage | None = None


@dataclass(slots=True, eq=False)
class LoadedStorage:
    """The bytes of `owner` on the device, uint8 [bytes]. They are valid after `ready`."""

    owner: weakref.ref[SavedStorage]
    memory: torch.Tensor
    ready: Fence


class SavedActivation(NamedTuple):
    """A view of a `SavedStorage`. `offset` and `stride` are elements of `dtype`."""

    storage: SavedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedSparse(NamedTuple):
    """A sparse tensor, as the handles of its indices and values ([Note: sparse])."""

    handles: tuple[Any, ...]
    layout: torch.layout
    shape: torch.Size
    is_coalesced: bool

    def built_from(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sparse tensor of these indices and values. It shares their memory."""
        if self.layout is torch.sparse_coo:
            indices, values = tensors
            return torch.sparse_coo_tensor(
                indices, values, self.shape, is_coalesced=self.is_coalesced, check_invariants=False
            )
        compressed_indices, plain_indices, values = tensors
        return torch.sparse_compressed_tensor(
            compressed_indices,
            plain_indices,
            values,
            self.shape,
            layout=self.layout,
            check_invariants=False,
        )


class SavedForeign(NamedTuple):
    """The result of the user's own pack hook."""

    packed: Any


@dataclass(frozen=True, slots=True)
class ForeignHooks:
    """The user's pair of saved-tensor hooks, which was active before the layer's forward."""

    pair: Hooks

    def pack(self, tensor: torch.Tensor) -> SavedForeign:
        """Call the user's pack hook."""
        return SavedForeign(self.pair[0](tensor))


@dataclass(frozen=True, slots=True)
class WeightsEpoch:
    """The version of a layer's weights at one moment."""

    state: LayerState
    epoch: int

    def refuse_newer(self) -> None:
        """ConfigError if the layer's weights were written since."""
        refuse_newer_weights(self.state, self.epoch)


def refuse_newer_weights(state: LayerState, epoch: int) -> None:
    """ConfigError if the layer's weights are not those of `epoch`; autograd refuses this, too."""
    if state.views.epoch != epoch:
        raise ConfigError(
            f"backward needs the weights of {state.name} as they were in "
            "its forward, and they were written since, by engine.step() or in place: call "
            "backward before the step, and write after it"
        )


def refuse_written_resident() -> NoReturn:
    """ConfigError for weights on the device that an update has written."""
    raise ConfigError(
        "backward needs weights as they were before an update on the gpu: the graph is "
        "older than the step. Run the forward again after engine.step, or set "
        'stronghold.resident_updates to "host"'
    )


def refuse_written(saved: SavedTensor) -> NoReturn:
    """RuntimeError for a saved tensor that was written in place, as autograd raises it."""
    raise RuntimeError(
        "a tensor needed for backward was modified in place after it was saved: "
        f"{saved.tensor.dtype} {list(saved.tensor.shape)} is at version "
        f"{version_of(saved.tensor)}, expected version {saved.version}; write out of "
        "place (y = y + x, not y += x)"
    )


def refuse_written_source(source: torch.Tensor, version: int) -> NoReturn:
    """RuntimeError for a tensor that was written in place while it was offloaded."""
    raise RuntimeError(
        "a tensor that backward needs was written in place while it was offloaded "
        f"({source.dtype} {list(source.shape)} is at version {version_of(source)}, "
        f"expected version {version}); write out of place (y = y + x, not "
        'y += x), or set stronghold.activations to "keep"'
    )
