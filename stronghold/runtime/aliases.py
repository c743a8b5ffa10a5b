"""Views of a slot that the user's code holds, where neither autograd nor the engine knows of them.

Owns nothing. When a slot is given to another layer, nothing of the user's may refer to
its memory: whoever reads it later would read that layer's weights, silently. What autograd saves
comes through our hooks and becomes a handle, and parameters point elsewhere by then. What is left
is a view that a custom Function keeps as an attribute, that hooks inside the model packed, that a
closure or a module holds. A storage counts its references. Entered by the training thread, and by
autograd's in backward.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from stronghold.errors import ConfigError
from stronghold.model.layout import LayerLayout

# What may hold a view, and lets go of it: a lane, just after it has said that it is done; and what
# hangs in a cycle, young or old, and is read by nobody.
_WAITS: tuple[Callable[[], object], ...] = (
    partial(time.sleep, 0.0002),
    partial(time.sleep, 0.001),
    partial(gc.collect, 1),
    partial(time.sleep, 0.02),
    gc.collect,
    partial(time.sleep, 0.2),
)


def refuse_aliases(layer: LayerLayout, slot: torch.Tensor, ours: Sequence[torch.Tensor]) -> None:
    """ConfigError when anything but `slot` and `ours`, views of it, holds the slot's memory."""
    if slot.is_meta:  # of a simulated device
        return
    storage = slot.untyped_storage()
    expected = len(ours) + 2  # the slot, and the storage that is asked
    if _count(storage) <= expected:
        return
    for wait in _WAITS:
        wait()
        if _count(storage) <= expected:
            return
    raise ConfigError(_message(layer, _views(storage, {id(slot), *map(id, ours)})))


def _count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _views(storage: torch.UntypedStorage, known: set[int]) -> list[torch.Tensor]:
    found = []
    for held in gc.get_objects():
        if issubclass(type(held), torch.Tensor) and id(held) not in known:
            with contextlib.suppress(RuntimeError):  # a tensor without a storage
                if held.untyped_storage().data_ptr() == storage.data_ptr():
                    found.append(held)
    return found


def _message(layer: LayerLayout, views: list[torch.Tensor]) -> str:
    names = {
        part.name
        for view in views
        for part in layer.slices
        if part.offset <= view.storage_offset() < part.offset + part.numel
    }
    return (
        f"{', '.join(sorted(names)) or layer.name}: a view (of weight.t(), weight.detach() or "
        "weight.data, say) is still held after the block's forward or backward, in memory that "
        "the next layer takes: read later it would be another layer's weights. In a "
        "torch.autograd.Function use ctx.save_for_backward, not an attribute of ctx, or keep the "
        "parameter itself and make the view in backward; copy what is kept otherwise "
        "(weight.detach().clone()); or let the weights stay on the gpu: "
        'stronghold.resident_layers: "all"'
    )
