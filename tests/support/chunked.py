"""A plain loop whose blocks are chunked: the oracle of `stronghold.chunk`.

Each chunk calls the block with leaves of its own on the parameters' memory; their gradients are
added in fp32, in the order in which autograd comes to them, and rounded once for each call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Sums:
    """Of one model: fp32 sums by call and parameter, until `to_grad`."""

    def __init__(self) -> None:
        # the last call's first
        self._calls: dict[int, dict[nn.Parameter, torch.Tensor]] = {}
        self._count = 0

    def call(self) -> int:
        self._count += 1
        return self._count

    def add(self, call: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        sums = self._calls.setdefault(call, {})
        if parameter in sums:
            sums[parameter].add_(gradient)
        else:
            sums[parameter] = gradient.float()

    def to_grad(self) -> None:
        """What autograd would have left, which adds calls' gradients in the compute dtype."""
        for sums in self._calls.values():
            for parameter, total in sums.items():
                rounded = total.to(parameter.dtype)
                parameter.grad = rounded if parameter.grad is None else parameter.grad + rounded
        self._calls.clear()


def parts_of(value: Any, batch: int, size: int) -> list[Any]:
    if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == batch:
        return list(value.split(size))
    count = -(-batch // size)
    if isinstance(value, tuple | list):
        each = [parts_of(part, batch, size) for part in value]
        return [type(value)(part[k] for part in each) for k in range(count)]
    if isinstance(value, dict):
        tables = {key: parts_of(part, batch, size) for key, part in value.items()}
        return [{key: part[k] for key, part in tables.items()} for k in range(count)]
    return [value] * count


def joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        # Relative positions are one table, whatever the chunk.
        same = all(torch.equal(first, other) for other in outputs)
        return first if same else torch.cat(outputs)
    if isinstance(first, tuple | list):
        return type(first)(joined(list(parts)) for parts in zip(*outputs, strict=True))
    return first


def chunk_blocks(blocks: list[nn.Module], size: int, *, checkpointed: bool = False) -> Sums:
    """Call these blocks chunk by chunk from now on, each through torch's checkpoint or not."""
    sums = Sums()
    for block in blocks:
        _chunk(block, size, sums, checkpointed)
    return sums


def _chunk(block: nn.Module, size: int, sums: Sums, checkpointed: bool) -> None:
    inner = block.forward
    places = [
        (table, name, parameter)
        for table in (part._parameters for part in block.modules())
        for name, parameter in table.items()
        if parameter is not None and parameter.requires_grad
    ]

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim())
        batch = next(tensors).size(0)
        if batch <= size or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        outputs, call = [], sums.call()
        for of_args, of_kwargs in parts_of((args, kwargs), batch, size):
            leaves = {}
            for _, _, parameter in places:
                leaf = parameter.detach().requires_grad_()
                leaf.register_post_accumulate_grad_hook(_adder(sums, call, parameter))
                leaves[parameter] = leaf
            run = partial(with_leaves, leaves)
            if checkpointed:
                run = partial(checkpoint, run, use_reentrant=False)
            outputs.append(run(*of_args, **of_kwargs))
        return joined(outputs)

    def with_leaves(leaves: dict[nn.Parameter, Any], *args: Any, **kwargs: Any) -> Any:
        for table, name, parameter in places:
            table[name] = leaves[parameter]
        try:
            return inner(*args, **kwargs)
        finally:
            for table, name, parameter in places:
                table[name] = parameter

    vars(block)["forward"] = forward


def _adder(sums: Sums, call: int, parameter: nn.Parameter) -> Any:
    def add(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        sums.add(call, parameter, leaf.grad)
        leaf.grad = None

    return add
