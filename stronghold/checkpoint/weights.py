"""The weights alone, as a state dict that owns no memory.

Owns the view of the host slabs that other savers (torch, safetensors, transformers) take for
ordinary tensors. Copies nothing but buffers and what is on the device. The training thread alone
enters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.checkpoint import directory
from stronghold.checkpoint.tensorfile import entry_of, raw_bytes, write_tensors
from stronghold.memory.layer import view
from stronghold.runtime.stack import Stack


def live_weights(stack: Stack, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """The model's state dict: parameters as CPU tensors over the slabs, each with a storage of its
    own size, so that a saver neither copies the rest of a slab nor takes neighbours for tied. What
    lies on the device is copied.

    Tied names share one tensor. The caller has waited for pending updates.
    """
    tensors: dict[nn.Parameter, torch.Tensor] = {}
    for slabs, layer in zip(stack.host.layers, stack.partition.layers, strict=True):
        for part, named in zip(slabs.layout.slices, layer.parameters, strict=True):
            if part.trainable or not exclude_frozen:
                values = view(slabs.weights, part)
                tensors[named.parameter] = (
                    values.to("cpu", copy=True) if slabs.on_device else alone(values)
                )
    found: dict[str, torch.Tensor] = {}
    for name, value in stack.partition.model.state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter):
            found[name] = _on_cpu(value)
        elif value in tensors:
            found[name] = tensors[value]
    return found


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().contiguous() if isinstance(value, torch.Tensor) else value


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage is no larger than itself."""
    if tensor.numel() == 0:
        return tensor.clone()
    return torch.frombuffer(raw_bytes(tensor), dtype=tensor.dtype).view(tensor.shape)


def write_weights(weights: dict[str, torch.Tensor], save_dir: Path, filename: str) -> None:
    """Write a state dict to one file, which appears complete or not at all. Of tied names the first
    is written to safetensors, which knows no ties; torch's format keeps them."""
    save_dir.mkdir(parents=True, exist_ok=True)
    directory.remove_leftovers(save_dir)
    hidden = save_dir / directory.hidden_name(filename)
    try:
        if filename.endswith(".safetensors"):
            entries = {
                id(value): entry_of(name, value) for name, value in reversed(weights.items())
            }
            write_tensors(hidden, list(reversed(entries.values())))
        else:
            torch.save(weights, hidden)
        hidden.replace(save_dir / filename)
    except BaseException:
        directory.remove(hidden)
        raise
