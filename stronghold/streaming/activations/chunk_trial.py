"""Trial: whether chunks of a batch give the results of the whole batch.

Owns the calls that try it, once for each class of blocks, before the first step trains. Dropout and
gradients are off in them. They leave no trace: they get copies of the arguments, generators and all
that the block holds are put back, and no hook inside it is called. The training thread enters in
forward.

The trial compares two chunks with both at once. They must be equal but for rounding. So a norm or a
sum over the batch is noticed, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.errors import ConfigError
from stronghold.streaming.activations.block_state import BlockState
from stronghold.streaming.activations.chunk_effects import InnerHooks, refuse_change
from stronghold.streaming.activations.chunk_values import KEY, Call, join, split, tensors_of
from stronghold.streaming.interrupts import run_and_restore
from stronghold.streaming.patches.tensors import tree_map_only

# Rounding of another matrix shape, not another function: relative to the largest element.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}

# of a block that gets unexpected arguments
FAILURES = (RuntimeError, IndexError, ValueError)


class Trial:
    """Tries whether a block's calls can be divided.

    block_name  the block's name, for errors
    module      the block
    inner       its forward
    hooks       those on modules inside it; what they get is tried as the block's output is
    device      the device on which the block runs
    """

    def __init__(
        self,
        block_name: str,
        module: nn.Module,
        inner: Callable[..., Any],
        hooks: InnerHooks,
        device: torch.device,
    ) -> None:
        self._block_name = block_name
        self._module = module
        self._inner = inner
        self._hooks = hooks
        self._device = device

    def shared(self, call: Call, sizes: Sequence[int]) -> frozenset[int]:
        """Return the numbers of the returned tensors that are equal for all chunks.

        ConfigError if the first two chunks (`sizes`: sequences in each) differ from both at once.
        """
        batch, chunk_sizes = sum(sizes), sizes[:2]
        both_size = sum(chunk_sizes)
        both = split(call, batch, [both_size, batch - both_size])[0]
        try:
            expected, *outputs = self._outputs([both, *split(call, batch, sizes)[:2]])
        except FAILURES as error:
            raise refusal(self._block_name, chunk_sizes[0], error) from error
        return shared_tensors(self._block_name, expected, outputs, chunk_sizes)

    def _outputs(self, calls: Iterable[Call]) -> list[Any]:
        """Return the block's output for each (args, kwargs), without dropout, with the records of
        its hooks. Nothing of the calls stays."""
        state, random = BlockState(self._module), random_state(self._device)

        def run() -> list[Any]:
            for submodule in self._module.modules():
                submodule.training = False
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                copies = [tree_map_only(torch.Tensor, torch.clone, call) for call in calls]
                return [self._hooks.run(self._inner, *call) for call in copies]

        def restore() -> None:
            state.restore()
            if random is not None:
                set_random_state(self._device, random)

        outputs = run_and_restore(run, restore)
        refuse_change(self._block_name, state)  # written in place
        return outputs


def refusal(block_name: str, size: int, error: Exception) -> ConfigError:
    """The error for a block that has failed with `size` sequences."""
    return ConfigError(
        f"{KEY}: {block_name} fails with {size} of the batch's sequences at a time ({error}): an "
        "argument with as many rows as the batch is none, or has several for each sequence, or "
        "the block needs them all. Leave the key out"
    )


def shared_tensors(
    block_name: str, expected: Any, outputs: Sequence[Any], sizes: Sequence[int]
) -> frozenset[int]:
    """Return the numbers of returned tensors with the same shape for a chunk and for both. A table
    of relative positions, say, is one for all chunks.

    expected  what the block has returned for two chunks at once
    outputs   what it has returned for each; `sizes`: sequences in each

    ConfigError if they differ.
    """
    whole = tensors_of(expected)
    columns = zip(*map(tensors_of, outputs), strict=False)
    shared = frozenset(
        number
        for number, (column, tensor) in enumerate(zip(columns, whole, strict=False))
        if all(one.shape == tensor.shape for one in column)
    )
    joined = tensors_of(join(outputs, sizes, block_name, shared))
    if len(joined) != len(whole) or not all(map(_is_close, joined, whole)):
        raise ConfigError(
            f"{KEY}: {block_name} does not give for {sizes[0]} sequences at a time what it gives "
            f"for {sum(sizes)}: it mixes the sequences of a batch (a norm or a sum over it), or an "
            f"argument with {sum(sizes)} rows is no batch. Leave the key out"
        )
    return shared


def _is_close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the tensors are equal but for rounding. NaN is no difference."""
    if tensor.shape != expected.shape or not tensor.is_floating_point():
        return tensor.shape == expected.shape
    limit = TOLERANCE.get(tensor.dtype, 1e-3)
    scale = expected.float().abs().max().clamp_min(1e-6)
    is_apart = (tensor.float() - expected.float()).abs() > limit * scale
    return not is_apart.any()
