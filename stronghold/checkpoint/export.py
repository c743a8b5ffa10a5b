"""Weights for programs that read no checkpoint of ours: those of a checkpoint, or of a live engine.

The tensors of a checkpoint pass from file to file, a piece of one at a time. No engine and no model
is needed. Those of an engine are views of its host arrays, which other savers take for an ordinary
state dict: only what lies on the GPU is copied. The training thread enters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.checkpoint import directory
from stronghold.checkpoint.files import (
    DTYPES,
    NUM_THREADS,
    HeldFile,
    TensorHeader,
    bytes_of,
    write_durably,
    write_tensors,
)
from stronghold.checkpoint.format import BUFFERS, CONFIG, LOW, MANIFEST, WEIGHTS, StoredParameter
from stronghold.checkpoint.tag import Tag, pieces
from stronghold.devices.threads import Workers
from stronghold.errors import CheckpointError, ConfigError
from stronghold.model.inner_tensors import is_wrapper
from stronghold.private import with_own_storage

Export = tuple[TensorHeader, Callable[[], Iterable[Tensor]]]
"""A tensor to be written, and what yields its bytes."""

INDEX = "model.safetensors.index.json"
SMALL_FILES = (".json", ".txt", ".model", ".jinja")  # configuration and tokenizer


def locate(path: Path, tag: str | None) -> Path:
    """Return the tag's directory.

    It is `path` itself if `path` is a checkpoint, else `tag` in it, else the tag that `latest`
    names. Raises CheckpointError if there is none.
    """
    if tag is None and ((path / MANIFEST).exists() or any(path.glob("*_optim_states.pt"))):
        return path
    tag = tag or directory.read_latest(path)
    if tag is None:
        raise CheckpointError(f"{path}: neither a checkpoint nor a directory with a file latest")
    return directory.resolve(path, directory.check_tag(tag))


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
        described = _read_config(tag.file(CONFIG)) if has_config and model_dir is None else None
        with directory.appearing(out) as hidden:
            _write_shards(hidden, _shards(_exports(tag), max_shard_bytes), threads)
            dtype = str(DTYPES[manifest.dtype]).removeprefix("torch.")
            _write_small_files(hidden, described, model_dir, {"dtype": dtype})
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


def _shards(exports: Iterable[Export], most_bytes: int) -> list[list[Export]]:
    """Divide tensors, in order, into shards of at most `most_bytes`. A larger tensor has a shard of
    its own."""
    filled: list[list[Export]] = []
    room = 0
    for export in exports:
        size = export[0].num_bytes
        if not filled or size > room:
            filled.append([])
            room = most_bytes
        filled[-1].append(export)
        room -= size
    return filled


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
        total = sum(header.num_bytes for shard in filled for header, _ in shard)
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_durably(out / INDEX, json.dumps(index, indent=2).encode())


def _write_small_files(
    out: Path, described: dict[str, Any] | None, model_dir: Path | None, changes: dict[str, Any]
) -> None:
    """Write `config.json` with `changes`. Copy the tokenizer's files of `model_dir`.

    described  the configuration, if there is no `model_dir`. None: no `config.json`
    changes    entries of the configuration, such as the weights' dtype

    The weights that are written are floats: a configuration loses its `quantization_config`.
    """
    if model_dir is not None:
        for path in sorted(model_dir.iterdir()):
            if path.suffix in SMALL_FILES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, out / path.name)
        if not (model_dir / CONFIG).exists():
            raise ConfigError(f"{model_dir}: has no {CONFIG}")
        described = _read_config(HeldFile(model_dir / CONFIG))
    if described is None:
        return  # not a Hugging Face model: it has weights alone
    described |= changes
    described.pop("torch_dtype", None)
    # the model's configuration, or its text part's
    for part in (described, *described.values()):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    (out / CONFIG).unlink(missing_ok=True)
    write_durably(out / CONFIG, json.dumps(described, indent=2).encode())


def _read_config(file: HeldFile) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError if it cannot be read."""
    try:
        described: dict[str, Any] = json.loads(file.read())
    except ValueError as error:
        raise CheckpointError(f"{file.path}: cannot be read as JSON: {error}") from error
    return described


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


# -- of a live engine -----------------------------------------------------------------------------
def live_weights(model: nn.Module, *, exclude_frozen: bool = False) -> dict[str, Tensor]:
    """Return the state dict of an engine's model, on the CPU. Waits for pending updates.

    Parameters are tensors over the engine's host memory, without a copy. Each has a storage of its
    own size. So a saver neither copies the whole array nor takes neighbours for tied weights.
    Tensors on the GPU are copied. Tied names share a tensor. A quantised parameter stands for
    itself.
    """
    weights: dict[str, Tensor] = {}
    on_cpu: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad:
            continue
        if isinstance(value, Tensor) and not is_wrapper(value):
            if id(value) not in on_cpu:
                on_cpu[id(value)] = _on_cpu(value)
            value = on_cpu[id(value)]
        weights[name] = value
    return weights


def _on_cpu(value: Tensor) -> Tensor:
    value = value.detach().cpu().contiguous()
    is_whole = value.untyped_storage().nbytes() == value.nbytes
    return value if is_whole or not value.numel() else with_own_storage(value)


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
