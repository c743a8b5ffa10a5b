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
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator

from stronghold.checkpoint.files import (
    DTYPES,
    NAMES,
    FileRecord,
    HeldFile,
    MissingError,
    TensorHeader,
    write_durably,
)
from stronghold.errors import CheckpointError
from stronghold.optim import optimizer_named
from stronghold.optim.states import EXACT, StateKind, States, group_size, num_items, states_of

MANIFEST = "manifest.json"
STATE = "mp_rank_00_model_states.pt"
CONFIG = "config.json"
BUFFERS = "buffers.safetensors"
FORMAT = "stronghold checkpoint"
VERSION = 3
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
GAS = "gradient_accumulation_steps"
WEIGHTS, LOW = "weights", "low"


def _dtype(value: Any) -> torch.dtype:
    return DTYPES[value] if isinstance(value, str) else value


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

    model_config = ConfigDict(frozen=True)

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Dtype
    file: str
    arrays: tuple[str, ...]
    step: int = 0
    optimizer: str | None = None

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


class Manifest(BaseModel):
    """Contents of `manifest.json`. Values are not checked: a change would change the checksum.

    versions  of the packages that wrote it
    dtype     precision of the config
    states    kind of masters and moments
    groups    of the optimizer: "params" are names, other keys hyper-parameters. None without one
    excluded  frozen parameters that were left out on request
    buffers   shapes
    """

    model_config = ConfigDict(frozen=True)

    versions: dict[str, str]
    dtype: str
    states: Literal["exact", "lean"]
    counters: dict[str, int]
    groups: tuple[dict[str, Any], ...] | None
    excluded: tuple[str, ...]
    buffers: dict[str, tuple[int, ...]]
    parameters: tuple[StoredParameter, ...]
    files: dict[str, FileRecord]

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
            document = json.loads(file.read())
            body = document["manifest"]
            if document["crc32"] != zlib.crc32(json.dumps(body, sort_keys=True).encode()):
                raise CheckpointError(f"{path}: its checksum is not that of its contents")
            found = f"{body['format']} version {body['version']}"
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: not a readable manifest: {error!r}") from error
        finally:
            file.close()
        if found != f"{FORMAT} version {VERSION}":
            raise CheckpointError(
                f"{path}: {found}, expected {FORMAT} version {VERSION}: read it with the "
                f"stronghold that wrote it, {body.get('versions')}"
            )
        return Manifest.model_validate(body)


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
