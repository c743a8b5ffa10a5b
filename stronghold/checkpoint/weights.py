"""The weights alone, for programs that read no checkpoint of ours.

Owns the view of the host arrays that other savers take for an ordinary state dict. Owns also the
directory that `from_pretrained` opens, with its shards and their index. It copies only buffers and
arrays on the GPU. An export copies from file to file, a piece of one tensor at a time. The training
thread enters, and `stronghold export`, which needs no engine and no model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stronghold.checkpoint import directory
from stronghold.checkpoint.files import (
    Entry,
    HeldFile,
    entry_of,
    raw_bytes,
    write_durably,
    write_tensors,
)
from stronghold.checkpoint.load import PIECE_NUMEL, masters
from stronghold.checkpoint.manifest import (
    BUFFERS,
    CONFIG,
    LARGEST,
    LOW,
    MANIFEST,
    WEIGHTS,
    TensorRecord,
)
from stronghold.checkpoint.tag import OpenTag
from stronghold.errors import CheckpointError, ConfigError
from stronghold.model.inner_tensors import is_wrapper
from stronghold.plan.homes import GPU
from stronghold.streaming.stack import Stack
from stronghold.train.job import Job

INDEX = "model.safetensors.index.json"
Item = TypeVar("Item")
SMALL_FILES = (".json", ".txt", ".model", ".jinja")  # configuration and tokenizer


# -- of a live engine -----------------------------------------------------------------------------
def live_weights(stack: Stack | Job, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return the model's state dict. The caller has waited for pending updates.

    Parameters are CPU tensors over the host arrays, without a copy. Each has a storage of its own
    size. So a saver neither copies the whole array nor takes neighbours for tied weights. Arrays on
    the GPU are copied. Tied names share a tensor. A packed parameter stands for itself: a read of
    its values decodes its layer. So does a quantised one.
    """
    if isinstance(stack, Job):
        of_job = _of_job(stack, exclude_frozen=exclude_frozen)
        return _state_dict(stack.partition.model, of_job, (), exclude_frozen)
    packed = {each.parameter for state in stack.host.layers for each in state.packed}
    tensors: dict[torch.Tensor, torch.Tensor] = {}
    for state, layer in zip(stack.host.layers, stack.partition.layers, strict=True):
        for part, named in zip(state.layout.slices, layer.parameters, strict=True):
            if part.trainable or not exclude_frozen:
                values = state.maps["weights"].parameter(state.weights, part)
                is_on_gpu = state.home is GPU
                tensors[named.parameter] = values.cpu() if is_on_gpu else _own_storage(values)
    return _state_dict(stack.partition.model, tensors, packed, exclude_frozen)


def _of_job(job: Job, *, exclude_frozen: bool) -> dict[torch.Tensor, torch.Tensor]:
    """Values of each parameter on the CPU."""
    tensors: dict[torch.Tensor, torch.Tensor] = {}
    for layer in job.layers:
        buffer = job.trainer.arrays.buffer(layer)
        views = layer.views(buffer.cpu() if layer.is_on_gpu else buffer)
        count = layer.num_trained if exclude_frozen else len(views)
        for parameter, values in zip(layer.parameters[:count], views[:count], strict=True):
            tensors[parameter] = _own_storage(values)
    return tensors


def _state_dict(
    model: nn.Module,
    tensors: dict[torch.Tensor, torch.Tensor],
    packed: Collection[torch.Tensor],
    exclude_frozen: bool,
) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            weights[name] = value
        elif value in tensors:
            weights[name] = tensors[value]
        elif not (exclude_frozen and isinstance(value, nn.Parameter)):
            stands_for_itself = value in packed or is_wrapper(value)
            weights[name] = value if stands_for_itself else _on_cpu(value)
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
    with directory.hidden_directory(save_dir, filename) as hidden:
        if filename.endswith(".safetensors"):
            # by tensor: the first of tied names is the last here
            entries: dict[int, Entry] = {}
            for name, value in reversed(weights.items()):
                entries[id(value)] = entry_of(name, value.detach())
            write_tensors(hidden / filename, list(reversed(entries.values())))
        else:
            torch.save(weights, hidden / filename)
        (hidden / filename).replace(save_dir / filename)


# -- of a checkpoint ------------------------------------------------------------------------------
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
    with OpenTag(source) as tag:
        manifest = tag.manifest
        if manifest.excluded:
            raise ConfigError(
                f"{source}: was saved without its {len(manifest.excluded)} frozen parameters "
                f"({manifest.excluded[0]}, ...): there is no whole model to export"
            )
        has_config = CONFIG in manifest.files
        needed = {CONFIG} if has_config else set()
        if manifest.buffers:
            needed.add(BUFFERS)
        for record in manifest.tensors:
            needed |= record.files({WEIGHTS})
        tag.check(needed)
        tag.check_headers(manifest.tensors, state=False)
        entries = [_entry(tag, record) for record in manifest.tensors]
        for name in manifest.buffers:
            entries.append(entry_of(name, tag.tensors(BUFFERS).mapped(name)))
        described = None
        if has_config and model_dir is None:
            described = read_config(tag.file(CONFIG))
        with directory.appearing(out) as hidden:
            write_shards(hidden, shards(entries, max_shard_bytes, _num_bytes))
            tag.check_unchanged()
            dtype = str(manifest.dtype).removeprefix("torch.")
            write_small_files(hidden, described, model_dir, {"dtype": dtype})
    return sorted(out.iterdir())


def fp32_state(source: Path, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return the state dict of the checkpoint directory `source`, in fp32.

    Trained parameters are the exact masters. Each parameter has all its names. Buffers keep their
    dtypes. `exclude_frozen` leaves frozen parameters out. Raises CheckpointError for a damaged
    checkpoint.
    """
    with OpenTag(source) as tag:
        manifest = tag.manifest
        wanted = [record for record in manifest.tensors if record.trainable or not exclude_frozen]
        needed = {BUFFERS} if manifest.buffers else set()
        for record in wanted:
            needed |= record.files({WEIGHTS, LOW})
        tag.check(needed)
        tag.check_headers(wanted, state=True)
        tensors = {name: tag.tensors(BUFFERS).read(name) for name in manifest.buffers}
        for record in wanted:
            pieces = masters(tag, record, exact=True)
            value = torch.cat([torch.empty(0), *pieces]).view(record.shape)
            tensors |= dict.fromkeys(record.aliases, value)
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredWeights:
    """`Entry.pieces` of a parameter's weights in a tag."""

    tag: OpenTag
    record: TensorRecord

    def __call__(self) -> Iterator[torch.Tensor]:
        numel = self.record.numel
        for begin in range(0, numel, PIECE_NUMEL):
            end = min(begin + PIECE_NUMEL, numel)
            yield self.tag.read(self.record, WEIGHTS, begin, end)


def _entry(tag: OpenTag, record: TensorRecord) -> Entry:
    """An entry that copies a parameter's weights from the tag to another file."""
    pieces = _StoredWeights(tag=tag, record=record)
    return Entry(name=record.name, dtype=record.dtype, shape=record.shape, pieces=pieces)


def _num_bytes(entry: Entry) -> int:
    return entry.num_bytes


def shards(items: Sequence[Item], most: int, size: Callable[[Item], int]) -> list[list[Item]]:
    """Divide items, in order, into shards whose sizes add up to at most `most`.

    An item that is larger has a shard of its own.
    """
    filled: list[list[Item]] = []
    room = 0
    for item in items:
        if not filled or size(item) > room:
            filled.append([])
            room = most
        filled[-1].append(item)
        room -= size(item)
    return filled


def write_shards(out: Path, filled: list[list[Entry]]) -> None:
    """Write one file, or several with their index, by transformers' names."""
    if len(filled) == 1:
        write_tensors(out / "model.safetensors", filled[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(filled, start=1):
        name = f"model-{number:05d}-of-{len(filled):05d}.safetensors"
        write_tensors(out / name, shard)
        weight_map.update({entry.name: name for entry in shard})
    total = sum(entry.num_bytes for shard in filled for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_durably(out / INDEX, json.dumps(index, indent=2).encode())


def write_small_files(
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
        described = read_config(HeldFile(model_dir / CONFIG))
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


def read_config(file: HeldFile) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError for another content."""
    try:
        described = json.loads(file.read(LARGEST))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: cannot be read as JSON: {error}") from error
    if not isinstance(described, dict):
        raise CheckpointError(f"{file.path}: got {type(described).__name__}, expected an object")
    return described
