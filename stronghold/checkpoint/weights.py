"""The weights of a live engine, for programs that read no checkpoint of ours.

Owns the view of the host arrays that other savers take for an ordinary state dict. It copies only
buffers and arrays on the GPU. The training thread enters.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from stronghold.checkpoint import directory
from stronghold.checkpoint.files import raw_bytes
from stronghold.checkpoint.tensor_files import NUM_THREADS, TensorHeader, bytes_of, write_tensors
from stronghold.devices.threads import Workers
from stronghold.model.inner_tensors import is_wrapper
from stronghold.train.job import Job


def live_weights(job: Job, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return the model's state dict. The caller has waited for pending updates.

    Parameters are CPU tensors over the host arrays, without a copy. Each has a storage of its own
    size. So a saver neither copies the whole array nor takes neighbours for tied weights. Arrays on
    the GPU are copied. Tied names share a tensor. A quantised parameter stands for itself.
    """
    tensors: dict[torch.Tensor, torch.Tensor] = {}
    for layer in job.layers:
        buffer = job.trainer.arrays.buffer(layer)
        views = layer.views(buffer.cpu() if layer.is_on_gpu else buffer)
        count = layer.num_trained if exclude_frozen else len(views)
        for parameter, values in zip(layer.parameters[:count], views[:count], strict=True):
            tensors[parameter] = _own_storage(values)
    weights: dict[str, torch.Tensor] = {}
    for name, value in job.partition.model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            weights[name] = value
        elif value in tensors:
            weights[name] = tensors[value]
        elif not (exclude_frozen and isinstance(value, nn.Parameter)):
            weights[name] = value if is_wrapper(value) else _on_cpu(value)
    return weights


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """A buffer, or an entry of a module's own (bitsandbytes' scales lie in a layer's buffer)."""
    value = value.detach().cpu().contiguous()
    is_whole = value.untyped_storage().nbytes() == value.nbytes
    return value if is_whole else _own_storage(value)


def _own_storage(values: torch.Tensor) -> torch.Tensor:
    """The same memory in a storage of the tensor's own size."""
    if not values.numel():
        return values.clone()
    return torch.frombuffer(raw_bytes(values), dtype=values.dtype).view(values.shape)


def write_weights(weights: dict[str, torch.Tensor], save_dir: Path, filename: str) -> None:
    """Write a state dict to one file, which appears complete or not at all. Waits for the disk.

    safetensors knows no ties: it gets the first of tied names. torch's format keeps ties.
    """
    with directory.hidden_directory(save_dir / filename) as hidden:
        if filename.endswith(".safetensors"):
            first: dict[int, str] = {}
            for name, value in weights.items():
                first.setdefault(id(value), name)
            named = [(name, weights[name].detach()) for name in first.values()]
            headers = [TensorHeader(name, value.dtype, value.shape) for name, value in named]
            data = (bytes_of(value) for _, value in named)
            with Workers("save", NUM_THREADS) as threads:
                write_tensors(hidden / filename, headers, data, threads)
        else:
            torch.save(weights, hidden / filename)
        (hidden / filename).replace(save_dir / filename)
