"""Split and join: the arguments and results of a block's call, cut along the batch.

Pure functions over trees of tensors. Owns no state.

[Note: what is split] A tensor whose first dimension is the batch's is split, also in lists, tuples
and dicts. Every chunk gets all other values whole. Results are joined along the first dimension.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stronghold.errors import ConfigError
from stronghold.streaming.patches.tensors import tree_leaves

KEY = "stronghold.chunk"

# of a tensor among the arguments: a position or a name, then inwards
Path = tuple[Any, ...]
Rows = Mapping[Path, int]  # rows per sequence of the arguments that have several
NO_ROWS: Rows = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the calls of a class of blocks are divided.

    rows    arguments with several rows per sequence (`chunk_trial`, [Note: several rows])
    shared  numbers of the returned tensors that are equal for all chunks
    """

    rows: Rows
    shared: frozenset[int]


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the number of sequences in a call: the first dimension of its first tensor, or 0."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.size(0)
    return 0


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, tuple | list) and not isinstance(value, torch.Size)


def split(
    value: Any, batch: int, sizes: Sequence[int], rows: Rows = NO_ROWS, path: Path = ()
) -> list[Any]:
    """Return the share of `value` for each chunk ([Note: what is split]).

    Args:
        value: a tree of arguments.
        batch: the number of sequences in the call.
        sizes: the number of sequences in each chunk; their sum is `batch`.
        rows: the arguments with several rows per sequence.
        path: the place of `value` among the arguments.
    """
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, batch, sizes, rows.get(path, 1))
    num_chunks = len(sizes)
    if _is_sequence(value):
        columns = []  # by item: its share for each chunk
        for index, item in enumerate(value):
            columns.append(split(item, batch, sizes, rows, (*path, index)))
        chunks = []
        for number in range(num_chunks):
            items = [column[number] for column in columns]
            chunks.append(_like(value, items))
        return chunks
    if isinstance(value, dict):
        shares = {}  # by key: its share for each chunk
        for key, item in value.items():
            shares[key] = split(item, batch, sizes, rows, (*path, key))
        tables = []
        for number in range(num_chunks):
            tables.append({key: share[number] for key, share in shares.items()})
        return tables
    return [value] * num_chunks


def _split_tensor(
    tensor: torch.Tensor, batch: int, sizes: Sequence[int], rows_per_sequence: int
) -> list[torch.Tensor]:
    for factor in (1, rows_per_sequence):
        if tensor.dim() and tensor.size(0) == factor * batch:
            return list(tensor.split([factor * size for size in sizes]))
    return [tensor] * len(sizes)


def tensors_by_path(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield every tensor in lists, tuples and dicts, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif _is_sequence(value):
        for index, item in enumerate(value):
            yield from tensors_by_path(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_by_path(item, (*path, key))


def replaced_at(value: Any, target: Path, tensor: torch.Tensor, path: Path = ()) -> Any:
    """Return a copy of `value` with `tensor` in place of the tensor at `target`."""
    if isinstance(value, torch.Tensor):
        return tensor if path == target else value
    if _is_sequence(value):
        items = []
        for index, item in enumerate(value):
            items.append(replaced_at(item, target, tensor, (*path, index)))
        return _like(value, items)
    if isinstance(value, dict):
        table = {}
        for key, item in value.items():
            table[key] = replaced_at(item, target, tensor, (*path, key))
        return table
    return value


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
