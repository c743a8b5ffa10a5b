"""The manifest of a tag: every tensor, where its elements lie, and every file.

Owns `manifest.json` and its checks. It never opens another file. The training thread alone enters.

A checkpoint knows nothing of windows, homes, policies or the partition into layers. A tensor has
the model's name and its whole shape. Its arrays lie in one file or, when several ranks have saved,
in one file for each rank: `StoredPiece`. The arrays are

    weights        the parameter in the compute dtype
    low            what makes an fp32 master of it: bf16's 16-bit remainder, with lean states an
                   8-bit one, or fp16's fp32 master; fp32 has none
    MOMENT         each of the optimizer's moments, with lean states its codes
    MOMENT_scale   with lean states: a scale for each group of elements (`stronghold.optim.states`)

Files of a tag, beside the manifest: `weights-N`, `masters-N` and `moments-N.safetensors` (N is the
layer that wrote them, then the rank if there are several); `buffers.safetensors`; `config.json` of
a Hugging Face model; and `mp_rank_00_model_states.pt`, DeepSpeed's name, for all other state.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

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

from stronghold.checkpoint.files import (
    DTYPES,
    NAMES,
    FileRecord,
    HeldFile,
    MissingError,
    write_durably,
)
from stronghold.errors import CheckpointError, explain
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

MANIFEST = "manifest.json"
# programs that look for DeepSpeed's tags look for this name
STATE = "mp_rank_00_model_states.pt"
CONFIG = "config.json"
BUFFERS = "buffers.safetensors"
FORMAT = "stronghold checkpoint"
VERSION = 2
LARGEST = 256 << 20  # bytes of a manifest: a million tensors
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
GAS = "gradient_accumulation_steps"
WEIGHTS, LOW = "weights", "low"


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("expected the name of a file in this directory")
    return name


def _dtype_of(value: Any) -> torch.dtype:
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}")
    return dtype


def _trained_dtype_of(value: Any) -> torch.dtype:
    dtype = _dtype_of(value)
    if dtype not in LOW_DTYPE:
        raise ValueError(f"expected one of {', '.join(NAMES[dtype] for dtype in LOW_DTYPE)}")
    return dtype


def _optimizer_name(value: Any) -> str:
    names = [cls.name for cls in OPTIMIZERS]
    if value not in names:
        raise ValueError(f"expected one of {', '.join(names)}")
    return str(value)


Count = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, AfterValidator(_file_name)]
OptimizerName = Annotated[str, AfterValidator(_optimizer_name)]
Shape = tuple[Count, ...]
Dtype = Annotated[torch.dtype, PlainValidator(_dtype_of), PlainSerializer(NAMES.__getitem__)]
TrainedDtype = Annotated[
    torch.dtype, PlainValidator(_trained_dtype_of), PlainSerializer(NAMES.__getitem__)
]


class StoredPiece(BaseModel):
    """Items [begin, end) of one array of one parameter, in `file`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    file: FileName
    begin: Count
    end: Count


def shape_of(array: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter's array. It is flat if it has one item per group."""
    return shape if group_size(array) == 1 else (num_items(array, math.prod(shape)),)


def stored_name(array: str, name: str) -> str:
    """Return the name that an array of the parameter `name` has in files."""
    return name if array in (WEIGHTS, LOW) else f"{array}.{name}"


def stored_as(
    array: str, name: str, shape: tuple[int, ...], begin: int, end: int
) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of items [begin, end) of an array in a file.

    All items have the array's name and shape. Some of them are flat, with the range in the name.
    """
    stored, whole = stored_name(array, name), shape_of(array, shape)
    if (begin, end) == (0, math.prod(whole)):
        return stored, whole
    return f"{stored}[{begin}:{end}]", (end - begin,)


class TensorRecord(BaseModel):
    """One parameter.

    aliases  all its names, `name` first
    step     number of its updates by `optimizer`
    pieces   by array, in order; together they have every item
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Name
    aliases: tuple[Name, ...]
    shape: Shape
    dtype: Dtype
    trainable: bool
    step: Count
    optimizer: OptimizerName = DEFAULT.name
    pieces: dict[str, tuple[StoredPiece, ...]]

    def states(self, kind: StateKind) -> States:
        """Return the arrays that hold its training state, with states of `kind`."""
        kind = kind if self.dtype is torch.bfloat16 else EXACT
        return states_of(self.dtype, kind, optimizer_named(self.optimizer).possible_moments)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def has_low(self) -> bool:
        return LOW in self.pieces

    @property
    def has_moments(self) -> bool:
        return not self.pieces.keys() <= {WEIGHTS, LOW}

    def dtype_of(self, array: str, kind: StateKind) -> torch.dtype:
        """Return the dtype of an array's items, with states of `kind`."""
        return self.dtype if array == WEIGHTS else self.states(kind).dtypes[array]

    def files(self, arrays: set[str] | None = None) -> set[str]:
        """Return the files that hold these arrays. None: all arrays."""
        files: set[str] = set()
        for array, pieces in self.pieces.items():
            if arrays is None or array in arrays:
                files.update(piece.file for piece in pieces)
        return files

    @model_validator(mode="after")
    def _consistent(self) -> TensorRecord:
        if self.aliases[:1] != (self.name,):
            raise ValueError("expected its name as the first of its aliases")
        if WEIGHTS not in self.pieces:
            raise ValueError("pieces: weights are missing")
        if not self.trainable and len(self.pieces) > 1:
            raise ValueError("expected neither masters nor moments of a frozen parameter")
        if self.trainable and self.dtype not in LOW_DTYPE:
            names = ", ".join(NAMES[dtype] for dtype in LOW_DTYPE)
            raise ValueError(f"expected one of {names} of what trains, got {NAMES[self.dtype]}")
        if self.has_low and LOW_DTYPE[self.dtype] is None:
            raise ValueError(f"expected no masters beside {NAMES[self.dtype]}")
        for array, pieces in self.pieces.items():
            self._check_pieces(array, pieces)
        return self

    def _check_pieces(self, array: str, pieces: tuple[StoredPiece, ...]) -> None:
        """Raise ValueError unless the pieces have every item once, in order."""
        end = 0
        for piece in pieces:
            if piece.begin != end or piece.end < end:
                raise ValueError(
                    f"pieces.{array}: expected a piece that begins at {end}, got "
                    f"[{piece.begin}, {piece.end})"
                )
            end = piece.end
        if not pieces or end != math.prod(shape_of(array, self.shape)):
            raise ValueError(f"pieces.{array}: the last item is in no file")


class Manifest(BaseModel):
    """Contents of `manifest.json`.

    states    kind of masters and moments
    groups    the optimizer's parameter groups: "params" are names, other keys hyper-parameters
    excluded  frozen parameters that were left out on request
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    versions: dict[str, str]
    dtype: TrainedDtype
    states: Literal["exact", "lean"] = "exact"
    counters: dict[str, Count]
    groups: tuple[dict[str, Any], ...] | None
    excluded: tuple[Name, ...] = ()
    buffers: dict[Name, Shape]
    tensors: tuple[TensorRecord, ...]
    files: dict[FileName, FileRecord]

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if missing := {*COUNTERS, GAS} - self.counters.keys():
            raise ValueError(f"counters: {min(missing)} is missing")
        if self.counters[GAS] < 1:
            raise ValueError(f"counters.{GAS}: got {self.counters[GAS]}, expected at least 1")
        if self.states == LEAN and self.dtype is not torch.bfloat16:
            raise ValueError("states: expected exact ones of weights that are not bf16")
        self._check_groups()
        for tensor in self.tensors:
            self._check_tensor(tensor)
        return self

    def _check_groups(self) -> None:
        """Raise ValueError for a repeated name, and for a group with a name of no tensor."""
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

    def _check_tensor(self, tensor: TensorRecord) -> None:
        """Raise ValueError for arrays that are not its optimizer's, and for files not listed."""
        moments = tensor.states(self.states).moment_dtypes.keys() if tensor.trainable else ()
        others = tensor.pieces.keys() - {WEIGHTS, LOW}
        if tensor.has_moments and others != set(moments):
            raise ValueError(
                f"tensors: {tensor.name} has the arrays {', '.join(tensor.pieces)}, and its "
                f"moments are {', '.join(moments)}"
            )
        if unlisted := tensor.files() - self.files.keys():
            raise ValueError(f"files: {min(unlisted)} is missing, which holds {tensor.name}")

    def write(self, directory: Path) -> None:
        """Write the manifest into a directory that has all its files. Waits for the disk."""
        body = {"format": FORMAT, "version": VERSION, **self.model_dump(mode="json")}
        body["files"] = dict(sorted(body["files"].items()))
        crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        text = json.dumps({"crc32": crc32, "manifest": body}, indent=1)
        write_durably(directory / MANIFEST, text.encode())

    @staticmethod
    def read(directory: Path, within: int | None = None) -> Manifest:
        """Read the manifest in `directory`.

        `within` is the directory's descriptor, if another directory may have its name by now.

        Raises CheckpointError if the manifest is missing or damaged.
        """
        path = directory / MANIFEST
        try:
            file = HeldFile(path, within)
        except MissingError as error:
            raise MissingError(_foreign(directory)) from error
        try:
            document = json.loads(file.read(LARGEST))
            body = document["manifest"]
            if document["crc32"] != zlib.crc32(json.dumps(body, sort_keys=True).encode()):
                raise CheckpointError(f"{path}: its checksum is not that of its contents")
            version = body["format"], body["version"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a readable manifest: {error!r}") from error
        finally:
            file.close()
        if version != (FORMAT, VERSION):
            raise CheckpointError(
                f"{path}: {version[0]} version {version[1]}, expected {FORMAT} version "
                f"{VERSION}: read it with the stronghold that wrote it, {body.get('versions')}"
            )
        try:
            return Manifest.model_validate_json(json.dumps(body))
        except ValidationError as error:
            raise CheckpointError(f"{path}: {explain(error, 'manifest')}") from error


def _foreign(directory: Path) -> str:
    """The error's message for a directory without a manifest, by the files that it has."""
    if any(directory.glob("*_optim_states.pt")) or (directory / STATE).exists():
        return (
            f"{directory}: a checkpoint of DeepSpeed's, without {MANIFEST}; write its weights with "
            "DeepSpeed's zero_to_fp32.py, and load them into the model before initialize"
        )
    if any(directory.glob("*.safetensors")):
        return (
            f"{directory}: weights without {MANIFEST}; load them with Transformers' "
            "from_pretrained or the model's own loader"
        )
    return f"{directory / MANIFEST}: the file is missing; not a checkpoint of stronghold's"
