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
import os
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from stronghold.checkpoint.held import FileRecord, HeldFile, MissingError
from stronghold.checkpoint.tensorfile import DTYPES, NAMES, write_durably
from stronghold.errors import CheckpointError, ConfigError
from stronghold.memory.tiers import LOW_DTYPE

MANIFEST = "manifest.json"
STATE = "mp_rank_00_model_states.pt"  # DeepSpeed's name: what looks for its tags looks for this
CONFIG = "config.json"
BUFFERS = "buffers.safetensors"
FORMAT = "stronghold checkpoint"
VERSION = 1
LARGEST = 256 << 20  # bytes of a manifest: a million tensors


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
        crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        text = json.dumps({"crc32": crc32, "manifest": body}, indent=1)
        write_durably(directory / self.slices.name(MANIFEST), [text.encode()])

    @staticmethod
    def read(directory: Path, slices: Slices | None = None, within: int | None = None) -> Manifest:
        """That of `slices` (a whole model without), in `directory` or, where that name may be
        another's by now, in the directory whose descriptor is `within`. CheckpointError when there
        is none, it was changed, or it is not one that this version writes; ConfigError when the
        model was split otherwise."""
        slices = slices or Slices()
        path = directory / slices.name(MANIFEST)
        _check_split(directory, slices, os.listdir(directory if within is None else within))
        try:
            file = HeldFile(path, within)
        except MissingError as error:
            raise MissingError(_foreign(directory)) from error
        try:
            document = json.loads(file.read(LARGEST))
            body = document["manifest"]
            text = json.dumps(body, sort_keys=True).encode()
            if document["crc32"] != zlib.crc32(text):
                raise CheckpointError(f"{path}: its checksum is not that of its contents")
            version = body["format"], body["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a readable manifest: {error!r}") from error
        finally:
            file.close()
        if version != (FORMAT, VERSION):
            raise CheckpointError(
                f"{path}: {version[0]} version {version[1]}, expected {FORMAT} version {VERSION}: "
                f"read it with the stronghold that wrote it, {body.get('versions')}"
            )
        try:
            checked = _Body.model_validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"{path}: {_explain(error)}") from error
        if checked.model_parallel != slices:
            raise CheckpointError(
                f"{path}: model_parallel: got {checked.model_parallel}, expected {slices}"
            )
        return checked.manifest()


# -- what a manifest may say ----------------------------------------------------------------------
def _one_name(name: str) -> str:
    """Of a file beside the manifest, and nowhere else."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("expected the name of a file in this directory")
    return name


Count = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, AfterValidator(_one_name)]
Shape = tuple[Count, ...]
Floating = Literal["F32", "BF16", "F16"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Tensor(_Strict):
    name: Name
    aliases: tuple[Name, ...]
    shape: Shape
    dtype: Floating
    trainable: bool
    step: Count
    weights: FileName
    low: FileName | None
    moments: FileName | None

    @model_validator(mode="after")
    def _consistent(self) -> _Tensor:
        if self.aliases[:1] != (self.name,):
            raise ValueError("expected its name as the first of its aliases")
        if not self.trainable and (self.low or self.moments):
            raise ValueError("expected neither masters nor moments of a frozen parameter")
        if self.low and LOW_DTYPE[DTYPES[self.dtype]] is None:
            raise ValueError(f"expected no masters beside {self.dtype}")
        return self

    def record(self) -> TensorRecord:
        return TensorRecord(**{**dict(self), "dtype": DTYPES[self.dtype]})


class _Counters(_Strict):
    model_config = ConfigDict(extra="ignore")

    global_steps: Count
    global_samples: Count
    micro_steps: Count
    skipped_steps: Count
    gradient_accumulation_steps: Annotated[Count, Field(ge=1)]


class _Group(_Strict):
    """The rest are hyper-parameters, which the optimizer that takes them over knows."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    params: tuple[Name, ...]


class _File(_Strict):
    num_bytes: Count
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


class _Body(_Strict):
    model_config = ConfigDict(extra="ignore")

    versions: dict[str, str]
    dtype: Floating
    counters: _Counters
    groups: tuple[_Group, ...] | None
    excluded: tuple[Name, ...]
    buffers: dict[Name, Shape]
    tensors: tuple[_Tensor, ...]
    files: dict[FileName, _File]
    model_parallel: Slices = Slices()

    @model_validator(mode="after")
    def _consistent(self) -> _Body:
        names = [alias for tensor in self.tensors for alias in tensor.aliases]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"tensors: {repeated[0]} is there more than once")
        known = {*names, *self.excluded}
        if unknown := {name for group in self.groups or () for name in group.params} - known:
            raise ValueError(f"groups: {min(unknown)} is none of the tensors")
        for tensor in self.tensors:
            for file in (tensor.weights, tensor.low, tensor.moments):
                if file is not None and file not in self.files:
                    raise ValueError(f"files: {file} is missing, which holds {tensor.name}")
        return self

    def manifest(self) -> Manifest:
        return Manifest(
            dtype=DTYPES[self.dtype],
            counters=self.counters.model_dump(),
            tensors=tuple(tensor.record() for tensor in self.tensors),
            excluded=self.excluded,
            buffers=self.buffers,
            groups=None if self.groups is None else tuple(g.model_dump() for g in self.groups),
            files={name: FileRecord(**dict(file)) for name, file in self.files.items()},
            versions=self.versions,
            slices=self.model_parallel,
        )


def _explain(error: ValidationError) -> str:
    """Where the first of what is wrong stands, what was got and what was expected."""
    first, *more = error.errors(include_url=False)
    where = ".".join(map(str, first["loc"])) or "the manifest"
    value, expected = first["input"], first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        said = f"{where}: missing"
    elif isinstance(value, dict | list | BaseModel):
        said = f"{where}: {expected}"
    else:
        said = f"{where}: got {value!r:.80}. {expected}"
    return f"{said}; {len(more)} more" if more else said


def _check_split(directory: Path, slices: Slices, names: list[str]) -> None:
    """ConfigError unless the tag has slices of as many model-parallel ranks."""
    parts = len([name for name in names if fnmatch(name, f"mp_rank_*_{MANIFEST}")])
    there = 1 if MANIFEST in names else parts
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
