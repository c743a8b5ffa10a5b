"""What a tag holds: tensors by parameter name, and everything else; and a tag while it is read.

Owns `manifest.json` and its checks, the file of what is no tensor (`ClientState`), and a tag's
files from before they are verified until the last of them is read. A checkpoint knows nothing of
windows, tiers, policies or the partition into layers: tensors are whole and named as the model
names them. The training thread alone enters.

Files of a tag: `weights-N` (parameters in the compute dtype, N the saving engine's layer),
`masters-N` (what makes the master of them: bf16's 16-bit remainders, with lean states 8-bit ones,
or fp16's fp32 masters), `moments-N` (`MOMENT.NAME` for each of the optimizer's moments, and with
lean states its flat scales `MOMENT_scale.NAME`: `stronghold.optim.states`), `buffers`, all
`.safetensors`; `config.json` (of a Hugging Face model); `mp_rank_00_model_states.pt` (everything
else, a pickle under DeepSpeed's name for it). Of a model that is split over model-parallel ranks
each has these files for its slices, under names that say whose (`Slices`).

[Note: one save] A tag may be replaced while it is read, and often is while training goes on: its
directory and its files are opened once and read by descriptor, so that all is of one save.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from stronghold.checkpoint.tensorfile import (
    DTYPES,
    NAMES,
    FileRecord,
    HeldFile,
    MissingError,
    TensorFile,
    write_durably,
)
from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.errors import CheckpointError, ConfigError, explain
from stronghold.native import Closeable
from stronghold.optim import DEFAULT, OPTIMIZERS, optimizer_named
from stronghold.optim.states import (
    EXACT,
    LEAN,
    LOW_DTYPE,
    StateKind,
    States,
    group_size,
    num_items,
    states_of,
)

logger = logging.getLogger("stronghold")

MANIFEST = "manifest.json"
STATE = "mp_rank_00_model_states.pt"  # DeepSpeed's name: what looks for its tags looks for this
CONFIG = "config.json"
BUFFERS = "buffers.safetensors"
FORMAT = "stronghold checkpoint"
VERSION = 1
LARGEST = 256 << 20  # bytes of a manifest: a million tensors
ATTEMPTS = 100  # each fails only when the tag was replaced within the milliseconds of one
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
GAS = "gradient_accumulation_steps"


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


def _one_name(name: str) -> str:
    """Of a file beside the manifest, and nowhere else."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("expected the name of a file in this directory")
    return name


def _storable(value: Any) -> torch.dtype:
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}")
    return dtype


def _floating(value: Any) -> torch.dtype:
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in LOW_DTYPE:
        raise ValueError(f"expected one of {', '.join(NAMES[dtype] for dtype in LOW_DTYPE)}")
    return dtype


def _optimizer_name(value: Any) -> str:
    names = [cls.name for cls in OPTIMIZERS]
    if value not in names:
        raise ValueError(f"expected one of {', '.join(names)}")
    return str(value)


def shape_of(array: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of an array of a parameter of `shape`: of its items, flat, where they are of groups."""
    return shape if group_size(array) == 1 else (num_items(array, math.prod(shape)),)


Count = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, AfterValidator(_one_name)]
OptimizerName = Annotated[str, AfterValidator(_optimizer_name)]
Shape = tuple[Count, ...]
Storable = Annotated[torch.dtype, PlainValidator(_storable), PlainSerializer(NAMES.__getitem__)]
Floating = Annotated[torch.dtype, PlainValidator(_floating), PlainSerializer(NAMES.__getitem__)]


class TensorRecord(BaseModel):
    """One parameter. `aliases`: all its names, `name` first. `step`: how often it was updated, and
    `optimizer` by which optimizer. `weights`, `low`, `moments`: the files that hold it; None where
    it has no such state."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Name
    aliases: tuple[Name, ...]
    shape: Shape
    dtype: Storable
    trainable: bool
    step: Count
    weights: FileName
    low: FileName | None
    moments: FileName | None
    optimizer: OptimizerName = DEFAULT.name

    def states(self, kind: StateKind) -> States:
        """The arrays that hold its training state, with states of `kind`."""
        kind = kind if self.dtype is torch.bfloat16 else EXACT
        return states_of(self.dtype, kind, optimizer_named(self.optimizer).possible_moments)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @model_validator(mode="after")
    def _consistent(self) -> TensorRecord:
        if self.aliases[:1] != (self.name,):
            raise ValueError("expected its name as the first of its aliases")
        if not self.trainable and (self.low or self.moments):
            raise ValueError("expected neither masters nor moments of a frozen parameter")
        if self.trainable and self.dtype not in LOW_DTYPE:
            names = ", ".join(NAMES[dtype] for dtype in LOW_DTYPE)
            raise ValueError(f"expected one of {names} of what trains, got {NAMES[self.dtype]}")
        if self.low and LOW_DTYPE[self.dtype] is None:
            raise ValueError(f"expected no masters beside {NAMES[self.dtype]}")
        return self


class Manifest(BaseModel):
    """`states`: the kind of masters and moments. `groups`: the optimizer's parameter groups,
    "params" being names, the rest hyper-parameters. `excluded`: frozen parameters left out on
    request."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    versions: dict[str, str]
    dtype: Floating
    states: Literal["exact", "lean"] = "exact"
    counters: dict[str, Count]
    groups: tuple[dict[str, Any], ...] | None
    excluded: tuple[Name, ...] = ()
    buffers: dict[Name, Shape]
    tensors: tuple[TensorRecord, ...]
    files: dict[FileName, FileRecord]
    model_parallel: Slices = Slices()

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if missing := {*COUNTERS, GAS} - self.counters.keys():
            raise ValueError(f"counters: {min(missing)} is missing")
        if self.counters[GAS] < 1:
            raise ValueError(f"counters.{GAS}: got {self.counters[GAS]}, expected at least 1")
        if self.states == LEAN and self.dtype is not torch.bfloat16:
            raise ValueError("states: expected exact ones of weights that are not bf16")
        names = [alias for tensor in self.tensors for alias in tensor.aliases]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"tensors: {repeated[0]} is there more than once")
        known = {*names, *self.excluded}
        for index, group in enumerate(self.groups or ()):
            listed = group.get("params")
            if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
                raise ValueError(f"groups.{index}.params: expected a list of names")
            if unknown := set(listed) - known:
                raise ValueError(f"groups: {min(unknown)} is none of the tensors")
        for tensor in self.tensors:
            for file in (tensor.weights, tensor.low, tensor.moments):
                if file is not None and file not in self.files:
                    raise ValueError(f"files: {file} is missing, which holds {tensor.name}")
        return self

    def write(self, directory: Path) -> None:
        """Write the manifest into a directory that has all its files."""
        body = {"format": FORMAT, "version": VERSION, **self.model_dump(mode="json")}
        body["files"] = dict(sorted(body["files"].items()))
        if self.model_parallel.size == 1:
            del body["model_parallel"]
        if self.states == EXACT:
            del body["states"]
        for tensor in body["tensors"]:  # earlier releases read what has no new key
            if tensor["optimizer"] == DEFAULT.name:
                del tensor["optimizer"]
        crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        text = json.dumps({"crc32": crc32, "manifest": body}, indent=1)
        write_durably(directory / self.model_parallel.name(MANIFEST), text.encode())

    @staticmethod
    def read(directory: Path, slices: Slices | None = None, within: int | None = None) -> Manifest:
        """That of `slices` (a whole model without), in `directory`, or in the one whose descriptor
        is `within`, where that name may be another's by now. CheckpointError when there is none, or
        it is not one that this version writes; ConfigError when the model was split otherwise."""
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
            manifest = Manifest.model_validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"{path}: {explain(error, 'manifest')}") from error
        if manifest.model_parallel != slices:
            raise CheckpointError(
                f"{path}: model_parallel: got {manifest.model_parallel}, expected {slices}"
            )
        return manifest


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


class OpenTag(Closeable):
    """`manifest`, and every file that it lists, of the directory `path`: [Note: one save]. Raises
    as `Manifest.read`. `mark` is the same on ranks that have opened the same save."""

    def __init__(self, path: Path, slices: Slices | None = None) -> None:
        self.path = path
        self._held: dict[str, HeldFile] = {}
        self._tensors: dict[str, TensorFile] = {}
        for _ in range(ATTEMPTS):
            if self._open(slices or Slices()):
                return
            self.close()
            time.sleep(0.01)
        raise CheckpointError(f"{path}: is replaced again and again; nothing of it can be read")

    def close(self) -> None:
        """Let go of every file."""
        for file in self._held.values():
            file.close()
        self._held.clear()
        self._tensors.clear()

    def _open(self, slices: Slices) -> bool:
        """False when the tag was replaced before everything was open."""
        try:
            within = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            self.manifest = Manifest.read(self.path, slices, within)
            first = HeldFile(self.path / Slices(size=slices.size).name(MANIFEST), within)
            self.mark = zlib.crc32(first.read(LARGEST))
            first.close()
            for name in self.manifest.files:
                # One that nobody has removed with its tag may not be needed: `check` will say.
                with contextlib.suppress(MissingError):
                    self._held[name] = HeldFile(self.path / name, within)
            complete = len(self._held) == len(self.manifest.files)
            return complete or self._is_at_path(within)
        except MissingError:  # the manifest
            if self._is_at_path(within):
                raise
            return False
        except BaseException:
            self.close()
            raise
        finally:
            os.close(within)

    def _is_at_path(self, within: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(within))
        except FileNotFoundError:
            return False

    def check(self, names: Iterable[str]) -> None:
        """CheckpointError unless the files are there, whole and as they were written."""
        for name in sorted(names):
            self.file(name).check(self.manifest.files[name])

    def check_headers(self, records: Iterable[TensorRecord], *, state: bool) -> None:
        """CheckpointError unless the headers say of the parameters' weights, of their masters and
        moments with `state`, and of the buffers, what the manifest says."""
        for record in records:
            self._check_header(record.weights, record.name, record.dtype, record.shape)
            if state and record.low is not None:
                low = record.states(self.manifest.states).low
                self._check_header(record.low, record.name, low, record.shape)
            if state and record.moments is not None:
                states = record.states(self.manifest.states)
                for array, dtype in states.moment_dtypes.items():
                    name, shape = f"{array}.{record.name}", shape_of(array, record.shape)
                    self._check_header(record.moments, name, dtype, shape)
        for name, shape in self.manifest.buffers.items():
            self._check_header(self.buffers, name, None, shape)

    def _check_header(
        self, file: str, name: str, dtype: torch.dtype | None, shape: tuple[int, ...]
    ) -> None:
        info = self.tensors(file).info(name)
        if info.dtype is not (dtype or info.dtype) or info.shape != shape:
            raise CheckpointError(
                f"{self.path / file}: {name} is {info.dtype} {list(info.shape)}, and the manifest "
                f"says {dtype or info.dtype} {list(shape)}"
            )

    def check_unchanged(self) -> None:
        """CheckpointError when somebody has written into the files themselves since."""
        for file in self._held.values():
            file.check_unchanged()

    @property
    def buffers(self) -> str:
        """The file of the buffers."""
        return self.manifest.model_parallel.name(BUFFERS)

    def file(self, name: str) -> HeldFile:
        """CheckpointError when the manifest does not list it, or it is not there."""
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.path}: the manifest does not list {name}")
        if name not in self._held:
            raise MissingError(f"{self.path / name}: the file is missing")
        return self._held[name]

    def tensors(self, name: str) -> TensorFile:
        """The file as one of tensors."""
        if name not in self._tensors:
            self._tensors[name] = TensorFile(self.file(name))
        return self._tensors[name]


# -- what is no tensor -----------------------------------------------------------------------------
NOTE = "the weights are in the .safetensors files beside this one: see `stronghold export`"
# Of each key in the file, which older ones may lack: the field, and the types that can be taken.
STORED: dict[str, tuple[str, tuple[type, ...]]] = {
    "lr_scheduler": ("scheduler", (dict, type(None))),
    "data_sampler": ("loader", (object,)),
    "loss_scaler": ("loss_scale", (dict, type(None))),
    "client_state": ("client", (dict,)),
    "random": ("random", (dict, type(None))),
    "random_of_ranks": ("random_of_ranks", (list, type(None))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    """`scheduler`, `loader`: state dicts, or None where there is none. `client`: what the caller
    gave. `loss_scale`: the optimizer's scaler, or None. `random`: None in an imported checkpoint;
    `random_of_ranks`: of every rank, `random` being the first's."""

    scheduler: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    client: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    random: dict[str, Any] | None = None
    random_of_ranks: list[Any] | None = None


def random_states(device: Device) -> dict[str, Any]:
    """Python's, NumPy's, torch's and the device's generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": random_state(device.torch_device),
    }


def restore_random_states(states: dict[str, Any] | None, device: Device) -> None:
    """Set every generator; one that the checkpoint does not have is left."""
    if states is None:
        return
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        set_random_state(device.torch_device, states["device"])


def pack_state(
    state: ClientState,
    counters: dict[str, int],
    versions: dict[str, str],
    *,
    model_parallel_size: int = 1,
) -> bytes:
    """The file's contents, made now: later changes of live state dicts do not reach it."""
    stored = {
        **counters,
        "module": None,
        "note": NOTE,
        **{key: getattr(state, name) for key, (name, _) in STORED.items()},
        "dp_world_size": 1,
        "mp_world_size": model_parallel_size,
        "ds_version": versions["deepspeed"],
    }
    buffer = io.BytesIO()
    torch.save(stored, buffer)
    return buffer.getvalue()


def unpack_state(file: HeldFile, *, trusted: bool) -> ClientState | None:
    """Read the file back; CheckpointError when it cannot be, or holds other things than
    `pack_state` put there. No code of the file's runs where torch can do without (`weights_only`):
    only objects of own classes in a client state, a schedule or a data loader need it. Such a file
    is unpickled as DeepSpeed's are when it is `trusted`; else None, and the log says what is not
    read."""
    try:
        return _checked(_load(file, weights_only=True))
    except Exception as error:  # torch's own unpickler has no one type of error
        if not trusted:
            logger.warning(
                "%s is not read: code of its own would run, and weights need none. Load the whole "
                "checkpoint for the client state, if you trust it (%s)",
                file.path,
                unsafe_reason(error),
            )
            return None
    try:
        return _checked(_load(file, weights_only=False))
    except CheckpointError:
        raise
    except Exception as error:  # code of the file's raises what it likes
        raise CheckpointError(f"{file.path}: {error!r}") from error


def unsafe_reason(error: Exception) -> str:
    """Which type it is that torch's safe reader refuses, or what else it says."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else next(iter(str(error).splitlines()), repr(error))


def _load(file: HeldFile, *, weights_only: bool) -> Any:
    # What NumPy's generator state is made of; the names are those of NumPy 2 and of NumPy 1.
    rebuild = np.empty(0).__reduce__()[0]
    arrays: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core")]
    allowed = [*arrays, *((rebuild, name) for name in names)]
    with file.reader() as stream, torch.serialization.safe_globals(allowed):
        return torch.load(stream, map_location="cpu", weights_only=weights_only)


def _checked(stored: Any) -> ClientState:
    """ValueError, KeyError or TypeError for what no save writes."""
    for key, (_, types) in STORED.items():
        if not isinstance(stored.get(key), types):
            raise ValueError(f"{key}: got {type(stored.get(key)).__name__}")
    found = ClientState(**{name: stored.get(key) for key, (name, _) in STORED.items()})
    for key, number in (found.loss_scale or {}).items():
        if not isinstance(number, int | float):
            raise ValueError(f"loss_scaler.{key}: got {number!r}, expected a number")
    for states in (found.random, *(found.random_of_ranks or ())):
        if states is not None:
            random.Random().setstate(states["python"])
            np.random.RandomState().set_state(states["numpy"])
            torch.Generator().set_state(states["torch"])
            if not isinstance(states["device"], torch.Tensor | None):
                raise ValueError("random.device: expected a tensor")
    return found
