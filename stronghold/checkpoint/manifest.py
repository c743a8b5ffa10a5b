"""The manifest: what a checkpoint holds, by parameter name, and what each of its files must be.

Owns `manifest.json` and its checks. A checkpoint knows nothing of windows, tiers, policies or the
partition into layers: tensors are whole and named as the model names them. Never reads a tensor.

Files of a tag: `weights-N` (parameters in the compute dtype, N the saving engine's layer),
`masters-N` (what makes the fp32 master of them: bf16's 16-bit remainders or fp16's fp32 masters),
`moments-N` (`exp_avg.NAME`, `exp_avg_sq.NAME`), `buffers`, all `.safetensors`; `config.json` (of a
Hugging Face model); `mp_rank_00_model_states.pt` (everything else: see `state`). Of a model that is
split over model-parallel ranks each has these files for its slices, under names that say whose
(`Slices`).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint.tensorfile import DTYPES, NAMES, FileRecord, check_file, write_durably
from stronghold.errors import CheckpointError, ConfigError

MANIFEST = "manifest.json"
STATE = "mp_rank_00_model_states.pt"  # DeepSpeed's name: what looks for its tags looks for this
CONFIG = "config.json"
BUFFERS = "buffers.safetensors"
FORMAT = "stronghold checkpoint"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Which slices of a model: those of model-parallel rank `rank` of `size`; whole, of one."""

    rank: int = 0
    size: int = 1

    def name(self, file: str) -> str:
        """The file's name in a tag that all model-parallel ranks share."""
        return f"mp_rank_{self.rank:02d}_{file}" if self.size > 1 else file

    @property
    def state(self) -> str:
        """As DeepSpeed names it."""
        return f"mp_rank_{self.rank:02d}_model_states.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One parameter. `aliases`: all its names, `name` first. `step`: Adam's count. `weights`,
    `low`, `moments`: the files that hold it; None where it has no such state.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    step: int
    weights: str
    low: str | None
    moments: str | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`groups`: the optimizer's parameter groups, "params" being names. `excluded`: frozen
    parameters that were left out on request. `counters`: steps, samples and micro-batches.
    """

    dtype: torch.dtype
    counters: dict[str, int]
    tensors: tuple[TensorRecord, ...]
    excluded: tuple[str, ...] = ()
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    slices: Slices = field(default_factory=Slices)

    def write(self, directory: Path) -> None:
        """Write the manifest into a directory that has all its files."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "versions": self.versions,
            "dtype": NAMES[self.dtype],
            "counters": self.counters,
            "groups": self.groups,
            "excluded": self.excluded,
            "buffers": self.buffers,
            "tensors": [{**asdict(t), "dtype": NAMES[t.dtype]} for t in self.tensors],
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
        }
        if self.slices.size > 1:
            body["model_parallel"] = asdict(self.slices)
        text = json.dumps({"crc32": _checksum(body), "manifest": body}, indent=1)
        write_durably(directory / self.slices.name(MANIFEST), [text.encode()])

    @staticmethod
    def read(directory: Path, slices: Slices | None = None) -> Manifest:
        """That of `slices` (a whole model without). CheckpointError when there is none, it was
        changed, or it is from another version; ConfigError when the model was split otherwise."""
        slices = slices or Slices()
        _check_split(directory, slices)
        path = directory / slices.name(MANIFEST)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            body = document["manifest"]
            if document["crc32"] != _checksum(body):
                raise CheckpointError(f"{path}: its checksum is not that of its contents")
            return _parse(body, path)
        except FileNotFoundError as error:
            raise CheckpointError(_foreign(directory)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a readable manifest: {error!r}") from error

    def check(self, directory: Path, names: Mapping[str, object] | set[str] | None = None) -> None:
        """CheckpointError unless the files (all, or `names`) are there, whole and unchanged."""
        for name, record in self.files.items():
            if names is None or name in names:
                check_file(directory / name, record)


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _parse(body: dict[str, Any], path: Path) -> Manifest:
    if body["format"] != FORMAT or body["version"] != VERSION:
        raise CheckpointError(
            f"{path}: {body['format']} version {body['version']}, expected {FORMAT} version "
            f"{VERSION}: read it with the stronghold that wrote it, {body.get('versions')}"
        )
    tensors = [
        TensorRecord(
            **{
                **tensor,
                "dtype": DTYPES[tensor["dtype"]],
                "aliases": tuple(tensor["aliases"]),
                "shape": tuple(tensor["shape"]),
            }
        )
        for tensor in body["tensors"]
    ]
    return Manifest(
        dtype=DTYPES[body["dtype"]],
        counters=body["counters"],
        tensors=tuple(tensors),
        excluded=tuple(body["excluded"]),
        buffers={name: tuple(shape) for name, shape in body["buffers"].items()},
        groups=None if body["groups"] is None else tuple(body["groups"]),
        files={name: FileRecord(**record) for name, record in body["files"].items()},
        versions=body["versions"],
        slices=Slices(**body.get("model_parallel", {})),
    )


def _check_split(directory: Path, slices: Slices) -> None:
    """ConfigError unless the tag has slices of as many model-parallel ranks."""
    parts = len(list(directory.glob(f"mp_rank_*_{MANIFEST}")))
    there = 1 if (directory / MANIFEST).exists() else parts
    if there not in (0, slices.size):
        advice = "each model-parallel rank reads its own slices: load it under as many"
        if slices.size == 1:
            advice += ", and export it from the model that you put together of them"
        raise ConfigError(
            f"{directory}: saved by {there} model-parallel ranks, expected {slices.size}; {advice}"
        )


def _foreign(directory: Path) -> str:
    """What a directory without a manifest seems to be."""
    if any(directory.glob("*_optim_states.pt")) or (directory / STATE).exists():
        return (
            f"{directory}: a checkpoint of DeepSpeed's, without {MANIFEST}; convert it with "
            f"`stronghold import {directory.parent} OUT`"
        )
    if any(directory.glob("*.safetensors")):
        return (
            f"{directory}: weights without {MANIFEST}; load them with stronghold.from_pretrained "
            "or the model's own loader"
        )
    return f"{directory / MANIFEST}: the file is missing; not a checkpoint of stronghold's"
