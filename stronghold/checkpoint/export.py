"""The weights of a checkpoint, for programs that read no checkpoint of ours.

Tensors pass from file to file, a piece of one at a time. No engine and no model is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stronghold.checkpoint import directory
from stronghold.checkpoint.files import DTYPES, write_durably
from stronghold.checkpoint.format import BUFFERS, CONFIG, LOW, WEIGHTS, StoredParameter
from stronghold.checkpoint.held_tag import Tag, pieces
from stronghold.checkpoint.tensor_files import NUM_THREADS, TensorHeader, bytes_of, write_tensors
from stronghold.checkpoint.weights import INDEX, read_config, shards, write_small_files
from stronghold.devices.workers import Workers
from stronghold.errors import ConfigError

Export = tuple[TensorHeader, Callable[[], Iterable[Tensor]]]
"""A tensor to be written, and what yields its bytes."""


def export_hf(
    source: Path, out: Path, *, max_shard_bytes: int, model_dir: Path | None = None
) -> list[Path]:
    """Write the weights of a checkpoint as sharded safetensors with their index.

    source           directory of the checkpoint
    out              new directory, which appears complete or not at all
    max_shard_bytes  largest size of a shard
    model_dir        source of `config.json` and of the tokenizer; None: the checkpoint's config

    The first of tied names is written, as transformers does. Returns the files. Raises
    CheckpointError for a damaged checkpoint, and ConfigError for one without its frozen parameters.
    """
    directory.check_new(out)
    with Tag(source) as tag, Workers("export", NUM_THREADS) as threads:
        manifest = tag.manifest
        if manifest.excluded:
            raise ConfigError(
                f"{source}: was saved without its {len(manifest.excluded)} frozen parameters "
                f"({manifest.excluded[0]}, ...): there is no whole model to export"
            )
        has_config = CONFIG in manifest.files
        tag.check(manifest.parameters, {WEIGHTS}, [CONFIG] if has_config else [])
        described = read_config(tag.file(CONFIG)) if has_config and model_dir is None else None
        with directory.appearing(out) as hidden:
            exports = list(_exports(tag))
            _write_shards(hidden, shards(exports, max_shard_bytes, _num_bytes), threads)
            tag.check_unchanged()
            dtype = str(DTYPES[manifest.dtype]).removeprefix("torch.")
            write_small_files(hidden, described, model_dir, {"dtype": dtype})
    return sorted(out.iterdir())


def _exports(tag: Tag) -> Iterator[Export]:
    """All weights, and all buffers."""
    for saved in tag.manifest.parameters:

        def data(saved: StoredParameter = saved) -> Iterator[Tensor]:
            for elements in pieces(saved.numel):
                yield bytes_of(tag.read(saved, WEIGHTS, elements))

        yield TensorHeader(saved.name, saved.dtype, saved.shape), data
    for name in tag.manifest.buffers:
        buffer = tag.tensors(BUFFERS).read(name)
        header = TensorHeader(name, buffer.dtype, tuple(buffer.shape))
        yield header, lambda buffer=buffer: [bytes_of(buffer)]  # type: ignore[misc]


def _num_bytes(export: Export) -> int:
    return export[0].num_bytes


def _write_shards(out: Path, filled: list[list[Export]], threads: Executor) -> None:
    """Write one file, or several with their index, by transformers' names."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(filled, start=1):
        name = "model.safetensors"
        if len(filled) > 1:
            name = f"model-{number:05d}-of-{len(filled):05d}.safetensors"
        headers = [header for header, _ in shard]
        data = (piece for _, pieces_of in shard for piece in pieces_of())
        write_tensors(out / name, headers, data, threads)
        weight_map |= dict.fromkeys((header.name for header in headers), name)
    if len(filled) > 1:
        total = sum(_num_bytes(export) for shard in filled for export in shard)
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_durably(out / INDEX, json.dumps(index, indent=2).encode())


def fp32_state(source: Path, *, exclude_frozen: bool = False) -> dict[str, Tensor]:
    """Return the state dict of the checkpoint directory `source`, in fp32.

    Trained parameters are the exact masters. Each parameter has all its names. Buffers keep their
    dtypes. `exclude_frozen` leaves frozen parameters out. Raises CheckpointError for a damaged
    checkpoint.
    """
    with Tag(source) as tag:
        parameters = [
            saved for saved in tag.manifest.parameters if saved.optimizer or not exclude_frozen
        ]
        tag.check(parameters, {WEIGHTS, LOW})
        tensors = {name: tag.tensors(BUFFERS).read(name) for name in tag.manifest.buffers}
        for saved in parameters:
            value = torch.empty(saved.numel)
            for elements in pieces(saved.numel):
                value[elements.start : elements.stop] = tag.master(saved, elements)
            tensors |= dict.fromkeys(saved.names, value.view(saved.shape))
    return tensors
