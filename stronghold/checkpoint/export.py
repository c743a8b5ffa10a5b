"""A checkpoint as a model directory that `from_pretrained` opens.

Owns the shards and their index. Holds a piece of one tensor at a time: bytes go from file to file.
Needs no engine and no model. Entered by the command.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stronghold.checkpoint import directory
from stronghold.checkpoint.held import HeldFile
from stronghold.checkpoint.manifest import BUFFERS, CONFIG, LARGEST, MANIFEST
from stronghold.checkpoint.tag import OpenTag
from stronghold.checkpoint.tensorfile import Entry, write_durably, write_tensors
from stronghold.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
SMALL_FILES = (".json", ".txt", ".model", ".jinja")  # configuration and tokenizer
DTYPE_WORDS = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32"}


def locate(path: Path, tag: str | None) -> Path:
    """The tag's directory: `path` itself when it is one, else `tag` in it, else what `latest`
    names.
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
    """Write the weights of the checkpoint directory `source` as sharded safetensors with their
    index into the new directory `out`; returns its files.

    Of tied names the first is written, as transformers does. `config.json` is the checkpoint's own,
    or comes with the tokenizer from `model_dir`. `out` appears complete or not at all.
    """
    check_new(out)
    with OpenTag(source) as tag:
        manifest = tag.manifest
        if manifest.excluded:
            raise ConfigError(
                f"{source}: was saved without its {len(manifest.excluded)} frozen parameters "
                f"({manifest.excluded[0]}, ...): there is no whole model to export"
            )
        small = {CONFIG} & manifest.files.keys()
        tag.check({record.weights for record in manifest.tensors} | small)
        for record in manifest.tensors:
            tag.check_tensor(record, state=False)
        entries = [tag.tensors(r.weights).entry(r.name) for r in manifest.tensors]
        if manifest.buffers:
            tag.check({BUFFERS})
            tag.check_buffers(BUFFERS)
            entries += [tag.tensors(BUFFERS).entry(name) for name in manifest.buffers]
        described = _read_config(tag.file(CONFIG)) if small and model_dir is None else None
        hidden = directory.begin(out.parent, out.name)
        try:
            _write_shards(hidden, shards(entries, max_shard_bytes))
            tag.check_unchanged()
            _write_small_files(hidden, described, model_dir, DTYPE_WORDS[str(manifest.dtype)])
            directory.publish(hidden, out)
        except BaseException:
            directory.remove(hidden)
            raise
    return sorted(out.iterdir())


def check_new(out: Path) -> None:
    """ConfigError when `out` holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not empty; name a new directory")


def shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Entries in order, filled into shards of at most `max_bytes`; a larger tensor has its own."""
    filled: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not filled or entry.num_bytes > room:
            filled.append([])
            room = max_bytes
        filled[-1].append(entry)
        room -= entry.num_bytes
    return filled


def _write_shards(out: Path, filled: list[list[Entry]]) -> None:
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
    write_durably(out / INDEX, [json.dumps(index, indent=2).encode()])


def _write_small_files(
    out: Path, described: dict[str, Any] | None, model_dir: Path | None, dtype: str
) -> None:
    if model_dir is not None:
        for path in sorted(model_dir.iterdir()):
            if path.suffix in SMALL_FILES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, out / path.name)
        if not (model_dir / CONFIG).exists():
            raise ConfigError(f"{model_dir}: has no {CONFIG}")
        described = _read_config(HeldFile(model_dir / CONFIG))
    if described is None:
        return  # no model of Hugging Face's: the weights are all there is
    described["dtype"] = dtype
    described.pop("torch_dtype", None)
    (out / CONFIG).unlink(missing_ok=True)
    write_durably(out / CONFIG, [json.dumps(described, indent=2).encode()])


def _read_config(file: HeldFile) -> dict[str, Any]:
    try:
        described = json.loads(file.read(LARGEST))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: cannot be read as JSON: {error}") from error
    if not isinstance(described, dict):
        raise CheckpointError(f"{file.path}: got {type(described).__name__}, expected an object")
    return described
