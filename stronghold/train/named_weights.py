"""Gives the newest weights of a live engine to another program, one tensor at a time.

A generation server takes (name, tensor) pairs after each optimizer step. This file owns the order
in which it gets them, and the copy of one tensor that it makes on the way. There is no second copy
of the model. The training thread alone enters, between two passes.

[Note: one step]
1. A layer is given out when its update has ended. Updates run in the order of the model, so the
   server loads the first layers while the last ones are updated.
2. Hazard: a program takes a step, or loads a checkpoint, and goes on with the same iterator. The
   server would then have layers of two steps.
3. `num_changes` counts steps and loads. The iterator raises when it has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import format_of
from stronghold.model.packed_weight import PackedWeight
from stronghold.private import with_own_storage
from stronghold.train.layer import point

if TYPE_CHECKING:
    from stronghold.train.job import Job


def named_weights(
    job: Job, device: torch.device | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over (name, newest values) of the model's state dict.

    See `StrongholdEngine.named_weights`. Raises ConfigError within a forward or backward, and while
    arrays belong to two steps.
    """
    job.check_process("engine.named_weights")
    job.trainer.check()
    job.trainer.check_between_passes("engine.named_weights")
    return _give(job, device, dtype, job.trainer.num_changes)


def _give(
    job: Job, device: torch.device | None, dtype: torch.dtype | None, num_changes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    layer_of = job.layer_of_tensors()
    given: set[int] = set()  # tensors of modules. Tied ones come once, under their first name
    for prefix, module in job.partition.model.named_modules():
        _check_same_step(job, num_changes)
        held = list(module.parameters(recurse=False))
        job.settle(_layers_of(job, layer_of, held))
        # Codes and scales of a weight that a library has quantised keep their dtypes.
        is_quantised = any(map(_has_library_format, held))
        own = {id(tensor) for tensor in (*held, *module.buffers(recurse=False))}
        tensors: dict[str, Any] = {}
        module._save_to_state_dict(tensors, f"{prefix}." if prefix else "", True)
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in given:
                given |= own & {id(tensor)}
                _check_same_step(job, num_changes)
                # No name refers to the copy, so that the caller alone keeps it alive.
                casts = tensor.is_floating_point() and not is_quantised
                yield name, _shown(tensor).to(device=device, dtype=dtype if casts else None)


def _layers_of(
    job: Job, layer_of: dict[int, int], parameters: Sequence[nn.Parameter]
) -> Sequence[int]:
    """The layers to wait for before these parameters are read: all layers, for one that a library
    has put together from stored tensors."""
    if any(id(parameter) not in layer_of for parameter in parameters):
        return range(len(job.layers))
    return sorted({layer_of[id(parameter)] for parameter in parameters})


def _check_same_step(job: Job, num_changes: int) -> None:
    """Raise ConfigError if weights have changed since the iterator was made ([Note: one step])."""
    if job.trainer.num_changes != num_changes:
        raise ConfigError(
            "engine.named_weights: a step was taken, or weights were loaded, since this iterator "
            "was made: its layers would be of two steps. Call engine.named_weights again"
        )


def _shown(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that autograd does not know. A packed weight is decoded.

    A tensor in host memory has a storage of its own size. So a program that saves or shares it
    takes no other parameter along.
    """
    values = tensor.decode() if isinstance(tensor, PackedWeight) else tensor.detach()
    is_plain = type(values) is torch.Tensor and values.is_cpu and values.is_contiguous()
    if is_plain and values.numel():
        point(values, with_own_storage(values.detach()))
    return values


def _has_library_format(parameter: nn.Parameter) -> bool:
    """True for a weight that a library has quantised. The engine decodes its own packed ones."""
    return format_of(parameter) is not None and not isinstance(parameter, PackedWeight)
