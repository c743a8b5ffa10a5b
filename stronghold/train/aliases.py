"""Aliases of a slot: views of weights that a program keeps after their layer.

[Note: aliases of a slot]
1. Autograd saves views of a slot, and gets handles (`saved_tensors`). Parameters point elsewhere
   when a slot is reused.
2. Hazard: an attribute of a custom Function, hooks inside of the model, a closure or a module may
   keep another view. It reads the next layer's weights, and no hook sees that.
3. A storage counts the tensors that refer to it. One more than ours is such a view. It is refused
   when the slot is released, or when a resident's newer weights come.
4. The frames of an exception keep views, as long as a debugger or a notebook keeps the exception.
   They run no more, and such a view is harmless.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FrameType
from weakref import ReferenceType

import torch

from stronghold.errors import ConfigError
from stronghold.private import without_torch_function
from stronghold.train.layer import Layer, Slot

# A lane may hold a view for a moment after its operation is done. A cycle of garbage may hold one,
# too. So the references are counted again after each of these.
_WAITS: tuple[Callable[[], object], ...] = (
    partial(time.sleep, 0.0002),
    partial(time.sleep, 0.001),
    partial(gc.collect, 1),
    partial(time.sleep, 0.02),
    gc.collect,
    partial(time.sleep, 0.2),
)
VIEW_IS_HELD = (
    "{names}: a view (of weight.t(), weight.detach() or weight.data, say) is still held after the "
    "block's forward or backward. Other weights take its memory next, and a later read would find "
    "these. In a torch.autograd.Function use ctx.save_for_backward, not an "
    "attribute of ctx, or keep the parameter itself and make the view in backward; copy what is "
    "kept otherwise (weight.detach().clone()); or let the gpu keep and update the weights: "
    'stronghold.resident_layers: "all", "resident_updates": "gpu"'
)


CONTAINERS = (list, tuple, set, CellType, partial, Iterator)
MAX_DEPTH = 4  # of containers in one another


def refuse_aliases(layer: Layer, slot: Slot) -> None:
    """ConfigError if the program keeps a view of the slot, which the layer has had. No parameter
    points at the slot."""
    own = [view for views in slot.views.values() for view in views]
    slot.num_views = len(own)  # an interrupt may have come before it was counted
    slot.left = [reference for reference in slot.left if reference() is not None]
    if not held_elsewhere(slot.memory, slot.num_views + len(slot.left)):
        return
    others = views_in(slot.memory.untyped_storage(), {id(slot.memory), *map(id, own)})
    slot.left = [ReferenceType(v) for v in others if is_left_by_exception(v, {id(others)})]
    if not held_elsewhere(slot.memory, slot.num_views + len(slot.left)):
        return
    begins = [view.data_ptr() - slot.memory.data_ptr() for view in others]
    names = {layer.names[bisect(layer.offsets, begin) - 1] for begin in begins}
    raise ConfigError(VIEW_IS_HELD.format(names=", ".join(sorted(names)) or layer.name))


def held_elsewhere(memory: torch.Tensor, num_ours: int) -> bool:
    """True if an object holds the memory's storage beside `memory` and `num_ours` views of it."""
    if num_elsewhere(memory, num_ours) == 0:
        return False
    for wait in _WAITS:
        wait()
        if num_elsewhere(memory, num_ours) == 0:
            return False
    return True


def num_elsewhere(memory: torch.Tensor, num_ours: int) -> int:
    """The number of objects that hold the memory's storage beside `memory` and `num_ours` views."""
    storage = memory.untyped_storage()  # is one more
    references = torch._C._storage_Use_Count(storage._cdata)
    return max(0, references - num_ours - 2)


def views_in(storage: torch.UntypedStorage, known: set[int]) -> list[torch.Tensor]:
    """Return the tensors in `storage` whose ids are not `known`."""
    views = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and id(candidate) not in known:
            # A tensor of any library may have no storage. A hidden one is not to be shown.
            with contextlib.suppress(Exception), without_torch_function():
                if candidate.untyped_storage().data_ptr() == storage.data_ptr():
                    views.append(candidate)
    return views


def is_left_by_exception(held: object, others: set[int], depth: int = MAX_DEPTH) -> bool:
    """True if only frames that run no more hold the object, by themselves or in containers.

    others  ids of holders that do not count
    """
    ignored = others | set(map(id, running_frames()))
    holders = [holder for holder in gc.get_referrers(held) if id(holder) not in ignored]
    others = others | {id(holders)}
    for holder in holders:
        if isinstance(holder, FrameType):
            continue
        is_container = depth > 0 and isinstance(holder, CONTAINERS)
        if not is_container or not is_left_by_exception(holder, others, depth - 1):
            return False
    return bool(holders)  # a frame that runs may hold the object, and is no holder in this list


def running_frames() -> Iterator[FrameType]:
    """The frames that run, of all threads."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            yield frame
            frame = frame.f_back
