"""Calls: one call of a block as data, so that its like need not run.

Owns two questions: are two calls alike, and what did a call do. Works on tensors without memory;
keeps none. One thread enters.

[Note: alike] Calls are alike when the blocks' classes, settings and shapes of parameters are, and
the inputs'. Settings are every attribute but the block's number among its like, whether it matters
or not: a difference that does not matter costs the time of tracing a block, an overlooked one would
be a wrong number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Attributes that number a block.
INDEX_NAMES = frozenset(
    {"block_idx", "idx", "index", "layer_id", "layer_idx", "layer_index", "layer_number"}
)
MAX_CONTAINER = 100  # a longer list is compared by identity
_MODULE_OWN = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A storage that a call saved: its input leaf's, or a new one, maybe its output leaf's."""

    nbytes: int
    input_leaf: int | None
    output_leaf: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An output leaf: a new tensor like this, or the input leaf `alias`."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    alias: int | None

    def again(self, leaves: Sequence[Any]) -> Any:
        if self.alias is not None:
            return leaves[self.alias]
        new = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        # The clone is no leaf: the model may change its blocks' outputs in place.
        return new.requires_grad_().clone() if self.requires_grad else new


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one call did; `answer` and `saved` of another are made from its input leaves."""

    flops: float
    saves: tuple[Saved, ...]
    outputs: tuple[Any, ...]  # `Made`, or a leaf that is no tensor
    spec: TreeSpec

    def answer(self, leaves: Sequence[Any]) -> tuple[Any, list[torch.Tensor]]:
        """The output of a like call with the input `leaves`, and a tensor of each saved storage."""
        answers = [leaf.again(leaves) if isinstance(leaf, Made) else leaf for leaf in self.outputs]
        saved = []
        for save in self.saves:
            if save.input_leaf is not None:
                saved.append(leaves[save.input_leaf])
            elif save.output_leaf is not None:
                saved.append(answers[save.output_leaf])
            else:
                saved.append(torch.empty(save.nbytes, dtype=torch.uint8, device="meta"))
        return tree_unflatten(answers, self.spec), saved


def record(
    *,
    flops: float,
    saved: Sequence[tuple[int, int]],
    leaves: Sequence[Any],
    output: Any,
    key_of: Callable[[torch.Tensor], int],
) -> Call | None:
    """The call as data; None when outputs share memory with each other or are views of an input.

    `saved`: (storage, bytes), each storage once. `key_of`: the storage of a tensor.
    """
    inputs: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            inputs.setdefault(key_of(leaf), number)
    answers, spec = tree_flatten(output)
    outputs: list[Any] = []
    made: dict[int, int] = {}
    for number, leaf in enumerate(answers):
        if not isinstance(leaf, torch.Tensor):
            outputs.append(leaf)
            continue
        key = key_of(leaf)
        alias = next((i for i, other in enumerate(leaves) if other is leaf), None)
        if alias is None and (key in made or key in inputs):
            return None
        if alias is None:
            made[key] = number
        outputs.append(
            Made(
                shape=leaf.shape,
                stride=leaf.stride(),
                dtype=leaf.dtype,
                requires_grad=leaf.requires_grad,
                alias=alias,
            )
        )
    saves = tuple(
        Saved(nbytes=nbytes, input_leaf=inputs.get(key), output_leaf=made.get(key))
        for key, nbytes in saved
    )
    return Call(flops=flops, saves=saves, outputs=tuple(outputs), spec=spec)


def structure(block: nn.Module) -> tuple[Any, ...]:
    """Everything of a block that decides what it computes, except values ([Note: alike])."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, _setting(value)) for key, value in vars(module).items() if _decides(key)),
            tuple((key, _kind(value)) for key, value in module._parameters.items()),
            tuple((key, _kind(value)) for key, value in module._buffers.items()),
        )
        for name, module in block.named_modules()
    )


def kinds(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What decides of each input leaf; of tensors that share memory also which is the first."""
    first: dict[int, int] = {}
    found = []
    for number, leaf in enumerate(leaves):
        shares = None
        if isinstance(leaf, torch.Tensor):
            shares = first.setdefault(int(leaf.untyped_storage()._cdata), number)
        found.append((_kind(leaf), shares))
    return tuple(found)


def _decides(attribute: str) -> bool:
    return attribute not in _MODULE_OWN and attribute not in INDEX_NAMES


def _setting(value: Any) -> Any:
    if isinstance(value, tuple | list | dict | set) and len(value) <= MAX_CONTAINER:
        return repr(value)
    if isinstance(value, functools.partial):
        return id(value.func), repr(value.args), repr(value.keywords)
    return _kind(value)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, str | int | float | None | torch.dtype):
        return value
    return id(value)
