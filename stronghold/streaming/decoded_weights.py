"""Decodes the packed weights of the layer that computes, and points its parameters at them.

Owns one buffer on the device for the decoded weights of one layer, and the values of packed
parameters at rest. The layer's packed tensors lie in its slot, as all stored tensors do. The
training thread enters, and on a GPU autograd's thread in backward. The two never run at once.

[Note: one buffer]
1. One layer computes at a time. So one buffer is enough for all layers.
2. Compute decodes into the buffer after all earlier compute, and before all later compute, on every
   stream of its lane.
3. A saved view of a decoded weight is a handle (`saved.SavedDecoded`). Backward decodes again if
   another layer has taken the buffer since.
4. Hazard: a program keeps a view of a decoded weight. It is refused when another layer takes the
   buffer, as aliases of slots are (`parameter_views`).

[Note: packed parameters at rest]
1. At rest a packed parameter has a shape and no values: it is hidden (`patches.parameters`).
2. A program that reads it waits while the layer's packed tensors are decoded into memory of its
   own. The parameter points there until the layer computes again.
3. What a program writes there would be lost. It is refused at the layer's next use. The same bits
   are harmless: `load_state_dict` writes them for weights that have not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from stronghold.devices.base import Record
from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.model.packed_formats import PackedTensors, Rows, decode_rows, packed_rows
from stronghold.streaming.parameter_views import held_elsewhere
from stronghold.streaming.parts import Parts
from stronghold.streaming.patches.autograd import without_torch_function
from stronghold.streaming.patches.parameters import hide, point, show
from stronghold.streaming.patches.tensors import version_of

logger = logging.getLogger("stronghold")


class DecodedWeights:
    """The decoded weights of one layer at a time.

    `layer`: the layer whose decoded weights are in the buffer, or None. Its parameters point there
    while it is used.
    """

    def __init__(self, parts: Parts) -> None:
        self._device, self._layers = parts.device, parts.layers
        self.layer: int | None = None
        self._bound: int | None = None  # the layer whose parameters point at the buffer
        self._record = Record()
        # by layer, of its packed weights
        self._views: dict[int, list[torch.Tensor]] = {}
        # by layer, and address of its packed tensors
        self._rows: dict[tuple[int, int], Rows] = {}
        # By layer, when its parameters were pointed last: the version of each.
        self._versions: dict[int, list[int]] = {}
        nbytes = max((state.layout.decoded_bytes for state in self._layers), default=0)
        self.memory: torch.Tensor | None = None
        self.address = 0
        if nbytes:
            purpose = "decoded weights"
            self.memory = parts.device.memory.allocate(nbytes, torch.uint8, purpose)
            self.address = self.memory.untyped_storage().data_ptr()

    def make_ready(self, layer: int) -> None:
        """Decode the layer's packed weights, and point its parameters at them.

        Does nothing if the layer has none. Compute has waited for the layer's slot.
        """
        state = self._layers[layer]
        if not state.packed or self._bound == layer:
            return
        assert self.memory is not None
        self._refuse_writes(state)
        if self.layer == layer:
            self._bind(state, self._views[layer])
            return
        self.leave()
        slot = state.on_gpu.slot
        packed_memory = state.weights if slot is None else slot.weights
        views = self._views.get(layer)
        if views is None:
            views = self._views[layer] = _decoded_views(state, self.memory)
        compute = self._device.compute
        compute.wait_for_all_streams()
        place = layer, packed_memory.data_ptr()  # slots are few, and stay
        if place not in self._rows:
            self._rows[place] = packed_rows(_packed_tensors(state, packed_memory, views))
        decoded = compute.submit(
            f"decode {layer}",
            partial(decode_rows, self._device.kernels, self._rows[place]),
            reads=() if slot is None else (slot.record,),
            writes=(self._record,),
            nbytes=packed_memory.nbytes + state.layout.decoded_bytes,
        )
        compute.wait_everywhere(decoded)
        self.layer = layer
        self._bind(state, views)

    def _bind(self, state: LayerState, views: Sequence[torch.Tensor]) -> None:
        self._point(state, views)
        self._bound = state.index

    def leave(self) -> None:
        """Give the buffer up: the parameters of its layer are at rest. ConfigError if code outside
        the engine keeps a view of the buffer."""
        if self.layer is None:
            return
        assert self.memory is not None
        state = self._layers[self.layer]
        self.rest(self.layer)
        self.layer = None
        self._device.memory.poison(self.memory)
        num_ours = sum(map(len, self._views.values()))
        if held_elsewhere(self.memory, num_ours):
            raise ConfigError(
                f"{state.name}: a view of a packed weight (of weight.t(), weight.detach() or "
                "weight.data, say) is still held after the block's forward or backward, in memory "
                "that the next layer's weights take. In a torch.autograd.Function use "
                "ctx.save_for_backward; copy what is kept otherwise (weight.detach().clone()); or "
                "leave stronghold.frozen out"
            )

    def rest(self, layer: int) -> None:
        """Hide the layer's packed parameters. Values that a program has read are freed. The buffer
        keeps its contents."""
        state = self._layers[layer]
        if not state.packed:
            return
        if self._bound == layer:
            self._bound = None
        self._refuse_writes(state)
        _hide(state)
        self._note_versions(state)

    def rest_all(self) -> None:
        """Hide the packed parameters of the layer that computed last."""
        if self._bound is not None:
            self.rest(self._bound)

    def decode_at_rest(self, layer: int) -> None:
        """Give the layer's packed parameters their values, in memory of their own.

        The layer's packed tensors are at home, and no operation writes them.
        """
        state = self._layers[layer]
        if self._bound == layer or not state.packed:
            return
        self._point(state, _decoded_at_home(state))

    def _point(self, state: LayerState, views: Sequence[torch.Tensor]) -> None:
        show(packed.parameter for packed in state.packed)
        for packed, view in zip(state.packed, views, strict=True):
            point(packed.parameter, view)
        self._note_versions(state)

    def _note_versions(self, state: LayerState) -> None:
        self._versions[state.index] = _versions(state)

    def _refuse_writes(self, state: LayerState) -> None:
        """ConfigError if a program wrote other bits into a packed parameter."""
        versions = _versions(state)
        noted = self._versions.get(state.index, versions)
        self._versions[state.index] = versions
        if versions == noted:
            return
        for packed, values in zip(state.packed, _decoded_at_home(state), strict=True):
            if not _has_bits(packed.parameter, values):
                self._forget(state)  # the next use decodes again
                raise ConfigError(
                    f"{packed.name} was written: packed weights are frozen, and what is written is "
                    "lost. Write before stronghold.initialize, or leave stronghold.frozen out. "
                    "Merge adapters after engine.destroy(), or into copies: "
                    "engine.named_weights(merge_adapters=True)"
                )

    def _forget(self, state: LayerState) -> None:
        """Put the layer's packed parameters at rest, and forget what the buffer has of them."""
        if self.layer == state.index:
            self.layer = self._bound = None
        _hide(state)
        self._note_versions(state)

    def start_again(self) -> None:
        """Forget the contents of the buffer, and put every packed parameter at rest. An exception
        may have come at any place."""
        self.layer = self._bound = None
        for state in self._layers:
            self._versions.pop(state.index, None)
            _hide(state)

    def close(self) -> None:
        """Free the buffer. `start_again` has put packed parameters at rest."""
        if self.memory is not None:
            self._views.clear()
            self._rows.clear()
            self._device.memory.release(self.memory)
            self.memory = None


def _packed_tensors(
    state: LayerState, memory: torch.Tensor, views: Sequence[torch.Tensor]
) -> list[PackedTensors]:
    """The layer's packed weights. `memory` has its stored tensors, `views` are to be decoded."""
    return [
        PackedTensors(packed.format, state.packed_tensors(packed, memory), view)
        for packed, view in zip(state.packed, views, strict=True)
    ]


def _decoded_at_home(state: LayerState, device: torch.device | None = None) -> list[torch.Tensor]:
    """Decode the layer's packed tensors where they lie between steps, by plain torch.

    The kernels' threads may be at work for an update. Each weight has memory of its own, on
    `device`, or beside its packed tensors.
    """
    device = state.weights.device if device is None else device
    weights = [
        torch.empty(packed.described.shape, dtype=packed.described.dtype, device=device)
        for packed in state.packed
    ]
    for weight in _packed_tensors(state, state.weights, weights):
        weight.format.decode(weight.inner, weight.weight)
    return weights


def _has_bits(parameter: torch.Tensor, values: torch.Tensor) -> bool:
    """True if the parameter has the bits of `values`, wherever it lies. NaN equals NaN."""
    with without_torch_function():
        present = parameter.detach().to(values.device).contiguous()
    bits = [tensor.view(-1).view(torch.uint8) for tensor in (present, values)]
    return torch.equal(*bits)


def _decoded_views(state: LayerState, memory: torch.Tensor) -> list[torch.Tensor]:
    """Views of `memory`, uint8, for the layer's decoded weights, in their shapes."""
    return [packed.view(memory) for packed in state.packed]


def _hide(state: LayerState) -> None:
    """Hide the layer's packed parameters. They have a shape, and memory of one element."""
    with without_torch_function():  # hidden parameters do not wait for the engine
        for packed in state.packed:
            point(packed.parameter, packed.placeholder)
    hide(packed.parameter for packed in state.packed)


def _versions(state: LayerState) -> list[int]:
    """The versions of the layer's packed parameters. torch counts writes in place."""
    with without_torch_function():
        return [version_of(packed.parameter) for packed in state.packed]


def return_packed(layers: Sequence[LayerState], available_bytes: int) -> None:
    """Give the packed parameters of all layers their decoded values, when the model is given back.

    If the values need more than `available_bytes`, the parameters are NaN, with a warning.
    """
    packed_layers = [state for state in layers if state.packed]
    need = sum(state.layout.decoded_bytes for state in packed_layers)
    if need > available_bytes:
        logger.warning(
            "the decoded weights of %d layers (%d bytes) do not fit into host memory (%d "
            "available): their packed parameters are NaN now. Load the model again to use it",
            len(packed_layers),
            need,
            available_bytes,
        )
    for state in packed_layers:
        show(packed.parameter for packed in state.packed)
        if need > available_bytes:
            for packed in state.packed:
                point(packed.parameter, packed.placeholder)
            continue
        weights = _decoded_at_home(state, torch.device("cpu"))
        for packed, weight in zip(state.packed, weights, strict=True):
            point(packed.parameter, weight)
