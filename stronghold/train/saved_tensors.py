"""Saved tensors of a layer's forward: handles in place of views of slots.

[Note: saved weights]
1. Autograd saves a view of a slot. The graph gets a handle instead.
2. The slot goes to another layer.
3. Backward asks the handle. It brings its layer to any slot, and returns the view there.
4. With RECOMPUTE torch's checkpoint runs the forward again. Its pair of hooks lies below ours, in
   both runs, and sees all tensors but weights. So the second run keeps no view of a slot either:
   the slot may leave before the last tensor of that run was used.
5. A wrapper subclass (a quantised weight) and a sparse tensor have no memory of their own. The
   graph gets handles of their inner tensors. They are made anew around what these return.

[Note: below] Torch applies the innermost pair of saved-tensor hooks alone. So our pair calls the
pair below it: that of a checkpoint, ours or the user's. It leaves out the pairs of layers whose
forwards run around it, for these would make the same handles.

[Note: pack] The graph's node owns what the pack hook returns. If that held the saved tensor itself,
whose `grad_fn` is the node, a graph that ends without a backward would never be freed. So a handle
holds `detach()` of it, which shares memory and version counter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from stronghold.model.inner_tensors import is_wrapper
from stronghold.private import Hooks, saved_tensor_hooks
from stronghold.train.weights import SavedWeight, Weights

PLAIN = (Tensor, nn.Parameter)

Handle = partial[Tensor]
"""Stands in the graph for a saved tensor. Backward calls it."""
Keep = Callable[[Tensor], Handle]
"""Makes the handle of a tensor that is no weight: `kept`, or one that takes it to the host."""


def kept(tensor: Tensor) -> Handle:
    """The handle of a tensor that stays where it is ([Note: pack])."""
    return partial(unwritten, tensor.detach(), tensor._version)


def unwritten(tensor: Tensor, version: int) -> Tensor:
    """The tensor, if it still has this version. Autograd compares none behind a pair of hooks."""
    if tensor._version != version:
        refuse_written(tensor.dtype, tensor.shape)
    return tensor


def refuse_written(dtype: torch.dtype, shape: torch.Size) -> NoReturn:
    """RuntimeError for a saved tensor that was written since."""
    raise RuntimeError(
        "a tensor needed for backward was modified in place after it was saved: "
        f"{dtype} {list(shape)}; write out of place (y = y + x, not y += x)"
    )


class Packing:
    """The pack hook of one call of a layer: it makes the handles. `Handle.__call__` unpacks.

    below  the pair of saved-tensor hooks that gets all tensors but weights ([Note: below])
    read   returns a saved weight's view, once its layer is in a slot
    keep   makes the handles of other tensors, if there is no pair below
    """

    def __init__(
        self, weights: Weights, read: Callable[[SavedWeight], Tensor], keep: Keep = kept
    ) -> None:
        self.below = pair_below()
        self._weights, self._saved = weights, weights.saved
        self._read, self._keep = read, keep

    def __call__(self, tensor: Tensor) -> Handle:
        if type(tensor) not in PLAIN and is_wrapper(tensor) and has_weights(tensor, self._weights):
            return pack_wrapper(tensor, self._dense)
        return self._dense(tensor)

    def _dense(self, tensor: Tensor) -> Handle:  # this runs for each tensor of a forward
        if tensor.layout is torch.strided:
            saved = self._saved(tensor)
            if saved is not None:
                return partial(self._read, saved)
        elif tensor.layout is torch.sparse_coo:
            sparse = tensor.detach()
            parts = sparse._indices(), sparse._values()  # it may hold an index twice
            if any(map(self._weights.has_memory_of, parts)):
                indices, values = map(self._dense, parts)
                return partial(sparse_anew, indices, values, tensor.shape, tensor.is_coalesced())
        if self.below is None:
            return self._keep(tensor)
        pack_below, unpack_below = self.below
        return partial(unpack_below, pack_below(tensor))


def pair_below() -> Hooks | None:
    """The innermost pair of saved-tensor hooks in this thread that is no layer's."""
    pair = saved_tensor_hooks()
    pack: Any = None if pair is None else pair[0]
    return pack.below if isinstance(pack, Packing) else pair


def is_packed() -> bool:
    """True if the graph that is made now gets handles of weights."""
    pair = saved_tensor_hooks()
    return pair is not None and isinstance(pair[0], Packing)


def has_weights(wrapper: Any, weights: Weights) -> bool:
    """True if an inner tensor of a wrapper subclass is a view of a slot."""
    inner = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
    return any(
        has_weights(x, weights) if is_wrapper(x) else weights.has_memory_of(x) for x in inner
    )


def pack_wrapper(wrapper: Any, pack: Callable[[Tensor], Handle]) -> Handle:
    """The handle of a wrapper subclass: `pack` makes those of its inner tensors."""
    names, context = wrapper.__tensor_flatten__()
    tensors = {name: getattr(wrapper, name) for name in names}
    inner = {
        name: pack_wrapper(tensor, pack) if is_wrapper(tensor) else pack(tensor)
        for name, tensor in tensors.items()
    }
    return partial(made_anew, type(wrapper), inner, context, wrapper.size(), wrapper.stride())


def made_anew(
    kind: Any, inner: dict[str, Handle], context: Any, size: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """The wrapper subclass around its saved inner tensors."""
    tensors = {name: handle() for name, handle in inner.items()}
    wrapper: Tensor = kind.__tensor_unflatten__(tensors, context, size, stride)
    return wrapper


def sparse_anew(indices: Handle, values: Handle, shape: torch.Size, is_coalesced: bool) -> Tensor:
    """The sparse tensor of its saved indices and values."""
    return torch.sparse_coo_tensor(
        indices(), values(), shape, is_coalesced=is_coalesced, check_invariants=False
    )
