"""Trial: whether chunks of a batch give the results of the whole batch.

Owns the calls that try it, once for each class of blocks, before the first step trains. Dropout and
gradients are off in them. They leave no trace: generators and all that the block holds are put
back, and hooks inside it are not called. The training thread enters in forward.

The trial compares two chunks with both at once. They must be equal but for rounding. So a norm or a
sum over the batch is noticed, and refused.

[Note: several rows] An argument may have several rows for each sequence, as ALiBi's biases have one
for each head. If the trial fails, it looks for such arguments:

1. The trial takes the arguments whose rows are a multiple of the batch's.
2. The trial computes the whole batch. It computes it again with other values in the argument's
   rows, for all sequences but the first chunk's.
3. The trial compares. The results for the first chunk must be the same. The results for the other
   sequences must differ.

Only such an argument is split, and the trial is repeated. Step 3 refuses rows in another order (all
sequences of the first head, then those of the second), and a table that happens to have so many
rows. The comparison of step 3 is not within rounding: a bias changes little of a block's results,
and a wrong one would pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.errors import ConfigError
from stronghold.streaming.activations.block_state import BlockState
from stronghold.streaming.activations.chunk_effects import InnerHooks, containers_of, refuse_change
from stronghold.streaming.activations.chunk_values import (
    KEY,
    NO_ROWS,
    Division,
    Path,
    Rows,
    join,
    replaced_at,
    split,
    tensors_by_path,
    tensors_of,
)
from stronghold.streaming.interrupts import run_and_restore

MIXED = 1e-2  # the share of a change from which on it has reached other sequences
# Rounding of another matrix shape, not another function: relative to the largest element.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}

# of a block that gets unexpected arguments
FAILURES = (RuntimeError, IndexError, ValueError)


class Trial:
    """Tries how a block's calls are divided.

    block_name  the block's name, for errors
    module      the block
    inner       its forward
    hooks       those on modules inside it; what they get is tried as the block's output is
    call        (args, kwargs) of the call that comes first
    sizes       the number of sequences in each of its chunks
    device      the device on which the block runs
    """

    def __init__(
        self,
        block_name: str,
        module: nn.Module,
        inner: Callable[..., Any],
        hooks: InnerHooks,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        sizes: Sequence[int],
        device: Device,
    ) -> None:
        self._block_name = block_name
        self._module = module
        self._inner = inner
        self._hooks = hooks
        self._call = call
        self._sizes = sizes
        self._batch = sum(sizes)
        self._device = device

    def division(self) -> Division:
        """Return how calls are divided. ConfigError if two chunks differ from both at once."""
        try:
            return self._try_division(NO_ROWS)
        except ConfigError as error:
            refusals: list[str] = []
            rows = self._several_rows(refusals)
            if rows:
                return self._try_division(rows)
            if not refusals:
                raise
            raise ConfigError(f"{error}. {'. '.join(refusals)}") from error

    def _try_division(self, rows: Rows) -> Division:
        """Compare the first two chunks with both at once."""
        chunk_sizes = self._sizes[:2]
        both_size = sum(chunk_sizes)
        both_sizes = [both_size, self._batch - both_size]
        both_args, both_kwargs = (
            split(arguments, self._batch, both_sizes, rows)[0] for arguments in self._call
        )
        args, kwargs = (
            split(arguments, self._batch, self._sizes, rows) for arguments in self._call
        )
        both = both_args, both_kwargs
        calls = [both, *zip(args[:2], kwargs[:2], strict=True)]
        containers = containers_of(both)
        try:
            expected, *outputs = self._outputs(calls)
        except FAILURES as error:
            raise ConfigError(
                f"{KEY}: {self._block_name} fails with {chunk_sizes[0]} of the batch's sequences "
                f"at a time ({error}): an argument with as many rows as the batch is none, or the "
                "block needs them all. Leave the key out"
            ) from error
        refuse_change(self._block_name, containers)
        shared = _shared_tensors(outputs, expected)
        joined = tensors_of(join(outputs, chunk_sizes, self._block_name, shared))
        whole = tensors_of(expected)
        if len(joined) != len(whole) or not all(map(_is_close, joined, whole)):
            raise ConfigError(
                f"{KEY}: {self._block_name} does not give for {chunk_sizes[0]} sequences at a time "
                f"what it gives for {both_size}: it mixes the sequences of a batch (a norm or a "
                f"sum over it), or an argument with {both_size} rows is no batch. Leave the key out"
            )
        return Division(rows=rows, shared=shared)

    def _several_rows(self, refusals: list[str]) -> Rows:
        """Return the arguments that have several rows for each sequence.

        `refusals` gets a sentence for each other argument whose rows are a multiple of the batch's.
        """
        candidates: dict[Path, int] = {}
        for arguments in self._call:
            for path, tensor in tensors_by_path(arguments):
                if not tensor.dim():
                    continue
                num_rows = tensor.size(0)
                if num_rows > self._batch and num_rows % self._batch == 0:
                    candidates[path] = num_rows // self._batch
        several: dict[Path, int] = {}
        for path, rows_per_sequence in candidates.items():
            objection = self._objection(path, rows_per_sequence)
            if not objection:
                several[path] = rows_per_sequence
                continue
            refusals.append(
                f"Its argument {'.'.join(map(str, path))} has {rows_per_sequence} rows for each "
                f"sequence, but cannot be split: {objection}"
            )
        return several

    def _objection(self, path: Path, rows_per_sequence: int) -> str:
        """Return why the argument cannot be split ([Note: several rows], step 3); "": it can."""
        changed_call = self._with_other_values(path, rows_per_sequence)
        try:
            (expected, _), (output, _) = self._outputs([self._call, changed_call])
        except FAILURES as error:
            return f"with other values in it the block fails ({error})"
        first_change, later_change = self._changes(expected, output)
        if later_change == 0.0:
            return "other values in it change nothing that the block gives"
        if first_change > MIXED * later_change:
            return "the rows of some sequences change what the block gives for others"
        return ""

    def _with_other_values(self, path: Path, rows_per_sequence: int) -> list[Any]:
        """Return the call with other values in the argument's rows after the first chunk's."""
        tensors: dict[Path, torch.Tensor] = {}
        for arguments in self._call:
            tensors.update(tensors_by_path(arguments))
        tensor = tensors[path]
        begin = rows_per_sequence * self._sizes[0]
        changed = torch.cat([tensor[:begin], _other_values(tensor[begin:])])
        return [replaced_at(arguments, path, changed) for arguments in self._call]

    def _changes(self, expected: Any, output: Any) -> tuple[float, float]:
        """Return the largest difference of two results: in the first chunk, and in the others."""
        first_change = later_change = 0.0
        pairs = zip(tensors_of(expected), tensors_of(output), strict=True)
        for tensor, other in pairs:
            if not tensor.dim() or not tensor.numel() or tensor.size(0) % self._batch:
                continue
            distance = (tensor.float() - other.float()).abs().nan_to_num(0.0)
            begin = tensor.size(0) // self._batch * self._sizes[0]
            first_change = max(first_change, distance[:begin].max().item())
            later_change = max(later_change, distance[begin:].max().item())
        return first_change, later_change

    def _outputs(self, calls: Iterable[Any]) -> list[Any]:
        """Return the block's output for each (args, kwargs), without dropout, with the records of
        its hooks. Nothing of the calls stays."""
        device = self._device.torch_device
        state, random = BlockState(self._module), random_state(device)

        def run() -> list[Any]:
            for submodule in self._module.modules():
                submodule.training = False
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return [self._hooks.run(self._inner, *call) for call in calls]

        def restore() -> None:
            state.restore()
            if random is not None:
                set_random_state(device, random)

        outputs = run_and_restore(run, restore)
        refuse_change(self._block_name, state)  # written in place
        return outputs


def _shared_tensors(outputs: Sequence[Any], expected: Any) -> frozenset[int]:
    """Return the numbers of returned tensors with the same shape for a chunk and for both.

    A table of relative positions, say, is one for all chunks.
    """
    shared = set()
    columns = zip(*map(tensors_of, outputs), strict=False)
    pairs = zip(columns, tensors_of(expected), strict=False)
    for number, (column, whole) in enumerate(pairs):
        if all(tensor.shape == whole.shape for tensor in column):
            shared.add(number)
    return frozenset(shared)


def _is_close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the tensors are equal but for rounding. NaN is no difference."""
    if tensor.shape != expected.shape or not tensor.is_floating_point():
        return tensor.shape == expected.shape
    limit = TOLERANCE.get(tensor.dtype, 1e-3)
    scale = expected.float().abs().max().clamp_min(1e-6)
    is_apart = (tensor.float() - expected.float()).abs() > limit * scale
    return not is_apart.any()


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return values that differ from these and are as valid, with the same shape and dtype.

    Floats move a little. Integers change their order, since they may be indices.
    """
    generator = torch.Generator().manual_seed(0)
    if tensor.is_floating_point():
        return tensor + torch.randn(tensor.shape, generator=generator).to(tensor)
    if tensor.dtype is torch.bool:
        flips = torch.rand(tensor.shape, generator=generator) < 0.5
        return tensor ^ flips.to(tensor.device)
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.flatten()[order].view(tensor.shape)
