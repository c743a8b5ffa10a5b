"""Split and join: the arguments and results of a block's call, cut along the batch.

Pure functions over trees of tensors. Owns no state.

[Note: what is split] A tensor whose first dimension is the batch's is split, also in lists, tuples
and dicts. Every chunk gets all other values whole. Results are joined along the first dimension.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stronghold.errors import ConfigError

KEY = "stronghold.chunk"

Call = tuple[Any, Any]  # args, kwargs


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the number of sequences in a call: the first dimension of its first tensor, or 0."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.size(0)
    return 0


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def split(value: Any, batch: int, sizes: Sequence[int]) -> list[Any]:
    """Return the share of `value` for each chunk ([Note: what is split]).

    Args:
        value: a tree of arguments.
        batch: the number of sequences in the call.
        sizes: the number of sequences in each chunk; their sum is `batch`.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() and value.size(0) == batch:
            return list(value.split(list(sizes)))
    elif isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        shares = [split(item, batch, sizes) for item in value]  # by item: that of each chunk
        return [_like(value, [share[number] for share in shares]) for number in range(len(sizes))]
    elif isinstance(value, dict):
        table = {key: split(item, batch, sizes) for key, item in value.items()}
        return [{key: table[key][number] for key in table} for number in range(len(sizes))]
    return [value] * len(sizes)


def _like(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    block_name: str,
    shared: frozenset[int] = frozenset(),
    _numbers: Iterator[int] | None = None,
) -> Any:
    """Join the outputs of a block's chunks, the inverse of `split`.

    Args:
        outputs: one tree per chunk.
        sizes: the number of sequences in each chunk.
        block_name: the block's name, for errors.
        shared: numbers of the tensors that are equal for all chunks.

    Raises:
        ConfigError: an output cannot be joined.
    """
    numbers = itertools.count() if _numbers is None else _numbers
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        is_shared = next(numbers) in shared
        return _join_tensors(outputs, sizes, block_name, is_shared=is_shared)
    is_ragged = isinstance(first, tuple | list) and len(set(map(len, outputs))) > 1
    if isinstance(first, tuple | list) and not is_ragged:
        columns = zip(*outputs, strict=True)
        items = [join(column, sizes, block_name, shared, numbers) for column in columns]
        return _like(first, items)
    # Transformers' outputs are tables and dataclasses at once
    if isinstance(first, Mapping):
        table = {}
        for key in first:
            column = [output[key] for output in outputs]
            table[key] = join(column, sizes, block_name, shared, numbers)
        make: Any = type(first)
        return make(**table) if dataclasses.is_dataclass(first) else make(table)
    if not is_ragged and all(output is first or output == first for output in outputs[1:]):
        return first
    raise ConfigError(
        f"{KEY}: {block_name} returns a {type(first).__name__} that differs between chunks and "
        "cannot be joined. Leave the key out"
    )


def _join_tensors(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int], block_name: str, *, is_shared: bool
) -> torch.Tensor:
    first = tensors[0]
    if is_shared:
        return first if first.grad_fn is None else first.view_as(first)
    rows = [tensor.size(0) if tensor.dim() else 0 for tensor in tensors]
    rows_per_sequence = rows[0] // sizes[0] if sizes[0] else 0
    expected_rows = [rows_per_sequence * size for size in sizes]
    if rows_per_sequence and rows == expected_rows:
        return torch.cat(list(tensors))
    if all(torch.equal(first, tensor) for tensor in tensors[1:]):
        return first
    raise ConfigError(
        f"{KEY}: {block_name} returns a tensor of {list(first.shape)} for {sizes[0]} sequences, "
        "which cannot be joined along the batch (a sum or a mean over it?). Leave the key out, "
        "or let the block return one row for each sequence"
    )
