"""The format of a checkpoint. A tag is a directory:

    manifest.json               names, shapes and dtypes of the model, the optimizer's groups, the
                                counters, and the checksums of all other files
    layer-00003.safetensors     the arrays of the parameters of layer 3
    buffers.safetensors         of the model
    config.json                 of a Hugging Face model
    mp_rank_00_model_states.pt  what is no tensor (`state`), by DeepSpeed's name

A tensor of a layer's file is an array of a parameter, "ARRAY/NAME" (`optim.states`):

    weights/NAME       in the dtype of the compute
    low/NAME           beside a 16-bit weight: what makes it an fp32 master
    MOMENT/NAME        with lean states: its codes
    MOMENT_scale/NAME  with lean states: one item for each group of elements, flat

A checkpoint knows nothing of windows, tiers and levels. Layers matter only as files.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable
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

from stronghold.checkpoint.files import DTYPES, NAMES, HeldFile, MissingError, write_durably
from stronghold.checkpoint.tensor_files import FileRecord, TensorHeader
from stronghold.errors import CheckpointError, explain
from stronghold.optim import OPTIMIZERS, optimizer_named
from stronghold.optim.states import (
    EXACT,
    LOW_DTYPE,
    StateKind,
    States,
    group_size,
    num_items,
    states_of,
)

MANIFEST = "manifest.json"
STATE = "mp_rank_00_model_states.pt"
CONFIG = "config.json"
BUFFERS = "buffers.safetensors"
FORMAT = "stronghold checkpoint"
VERSION = 3
LARGEST_BYTES = 256 << 20  # of a manifest: a million tensors
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
GAS = "gradient_accumulation_steps"
WEIGHTS, LOW = "weights", "low"


def _one_of(values: Callable[[], tuple[str, ...]]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in values():
            raise ValueError(f"expected one of {', '.join(values())}")
        return value

    return AfterValidator(check)


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("expected the name of a file in this directory")
    return name


def _dtype(value: Any) -> torch.dtype:
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}")
    return dtype


Count = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, AfterValidator(_file_name)]
OptimizerName = Annotated[str, _one_of(lambda: tuple(cls.name for cls in OPTIMIZERS))]
Precision = Annotated[str, _one_of(lambda: tuple(NAMES[dtype] for dtype in LOW_DTYPE))]
Shape = tuple[Count, ...]
Dtype = Annotated[torch.dtype, PlainValidator(_dtype), PlainSerializer(NAMES.__getitem__)]


def tensor_name(array: str, name: str) -> str:
    """The name of a parameter's array in a file."""
    return f"{array}/{name}"


class StoredParameter(BaseModel):
    """One parameter.

    names      all of them; files have the first
    arrays     that the file has, the weights first
    step       number of its updates
    optimizer  None: it is frozen
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    names: Annotated[tuple[Name, ...], Field(min_length=1)]
    shape: Shape
    dtype: Dtype
    file: FileName
    arrays: tuple[Name, ...]
    step: Count = 0
    optimizer: OptimizerName | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def has_moments(self) -> bool:
        return not set(self.arrays) <= {WEIGHTS, LOW}

    def states(self, kind: StateKind) -> States:
        """The arrays of its optimizer, in a checkpoint with states of `kind`."""
        assert self.optimizer is not None
        moments = optimizer_named(self.optimizer).possible_moments
        return states_of(self.dtype, kind if self.dtype is torch.bfloat16 else EXACT, moments)

    def header(self, array: str, kind: StateKind) -> TensorHeader:
        """Name, dtype and shape of one of its arrays in the file."""
        shape = self.shape if group_size(array) == 1 else (num_items(array, self.numel),)
        dtype = self.dtype if array == WEIGHTS else self.states(kind).dtypes[array]
        return TensorHeader(tensor_name(array, self.name), dtype, shape)

    def check(self, kind: StateKind) -> None:
        """Raise ValueError unless the arrays are those of its optimizer, or lack the moments."""
        wanted = {WEIGHTS}
        if self.optimizer is not None:
            if self.dtype not in LOW_DTYPE:
                raise ValueError(f"{self.name}: trains, and is {self.dtype}")
            states = self.states(kind)
            wanted = set(states.dtypes)
            if not self.has_moments:
                wanted -= states.moment_dtypes.keys()
        if len(self.arrays) != len(wanted) or set(self.arrays) != wanted:
            raise ValueError(
                f"{self.name}: has the arrays {', '.join(self.arrays)}, expected "
                f"{', '.join(sorted(wanted))}"
            )


class Manifest(BaseModel):
    """Contents of `manifest.json`.

    versions  of the packages that wrote it
    dtype     precision of the config
    states    kind of masters and moments
    groups    of the optimizer: "params" are names, other keys hyper-parameters. None without one
    excluded  frozen parameters that were left out on request
    buffers   shapes
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    versions: dict[str, str]
    dtype: Precision
    states: Literal["exact", "lean"]
    counters: dict[str, Count]
    groups: tuple[dict[str, Any], ...] | None
    excluded: tuple[Name, ...]
    buffers: dict[Name, Shape]
    parameters: tuple[StoredParameter, ...]
    files: dict[FileName, FileRecord]

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if missing := {*COUNTERS, GAS} - self.counters.keys():
            raise ValueError(f"counters: {min(missing)} is missing")
        if self.counters[GAS] < 1:
            raise ValueError(f"counters.{GAS}: got {self.counters[GAS]}, expected at least 1")
        for parameter in self.parameters:
            parameter.check(self.states)
        self._check_names()
        used = {STATE, *(parameter.file for parameter in self.parameters)}
        if self.buffers:
            used.add(BUFFERS)
        if unlisted := used - self.files.keys():
            raise ValueError(f"files: {min(unlisted)} is missing")
        return self

    def _check_names(self) -> None:
        names = [name for parameter in self.parameters for name in parameter.names]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"parameters: {repeated[0]} is there more than once")
        known = {*names, *self.excluded}
        for index, group in enumerate(self.groups or ()):
            listed = group.get("params")
            if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
                raise ValueError(f"groups.{index}.params: expected a list of names")
            if unknown := set(listed) - known:
                raise ValueError(f"groups: {min(unknown)} is no parameter")

    def write(self, directory: Path) -> None:
        """Write it into a directory that has all other files. Waits for the disk."""
        body = {"format": FORMAT, "version": VERSION, **self.model_dump(mode="json")}
        crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        text = json.dumps({"crc32": crc32, "manifest": body}, indent=1)
        write_durably(directory / MANIFEST, text.encode())

    @staticmethod
    def read(directory: Path, within: int) -> Manifest:
        """Read it. `within`: a descriptor of the directory, whose name another one may have by now.

        Raises MissingError without the file, and CheckpointError for another content.
        """
        path = directory / MANIFEST
        try:
            file = HeldFile(path, within)
        except MissingError as error:
            raise MissingError(_foreign(directory)) from error
        try:
            document = json.loads(file.read(LARGEST_BYTES))
            body = document["manifest"]
            if document["crc32"] != zlib.crc32(json.dumps(body, sort_keys=True).encode()):
                raise CheckpointError(f"{path}: its checksum is not that of its contents")
            found = f"{body['format']} version {body['version']}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a readable manifest: {error!r}") from error
        finally:
            file.close()
        if found != f"{FORMAT} version {VERSION}":
            raise CheckpointError(
                f"{path}: {found}, expected {FORMAT} version {VERSION}: read it with the "
                f"stronghold that wrote it, {body.get('versions')}"
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
            f"{directory}: weights without {MANIFEST}; load them with the model's own loader "
            "before initialize"
        )
    return f"{directory / MANIFEST}: the file is missing; not a checkpoint of stronghold's"
