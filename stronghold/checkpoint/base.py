"""A prepared base: packed frozen weights of a model's blocks, in files that no run ever writes.

Owns the manifest of a base, its checks, and reads of a layer's bytes. `checkpoint.prepare` writes
bases. Any number of processes may read one base at once: the page cache is shared. Any thread may
call `Base.read_into`.

[Note: a base]

1. A base is a directory: `base.json` and files of layers, in the order of the model.
2. A layer is one span of whole pages of one file. It holds the stored tensors of the block
   (`model.stored_tensors`): parameters as they came, and the packed tensors of all others.
3. They lie there as `model.layout` places the tensors of a layer in which nothing trains. A run has
   the same places unless its formats have another order or another padding. Then its frozen bytes
   are read in several pieces.
4. The manifest has a CRC-32 of each stored tensor. `Base.read_into` compares it.
5. The directory gets its name by one rename, after everything is durable. So a base is complete, or
   it does not exist.

[Note: which model]

1. A base may be used for the model alone that it was made of.
2. Two models of one architecture have equal indices, names and shapes. So `source_mark` hashes
   also small samples of each file of weights.
3. A change of values between the samples does not change the mark.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from stronghold.checkpoint.files import HeldFile, MissingError, raw_bytes, write_durably
from stronghold.checkpoint.manifest import Count, Dtype, FileName, Name, Shape
from stronghold.checkpoint.pretrained import files_of_tensors
from stronghold.errors import CheckpointError, ConfigError, StateError, did_you_mean, explain
from stronghold.model.arrays import ArrayMap
from stronghold.model.file_ranges import FileRange, FrozenFile
from stronghold.model.layout import ParameterSlice
from stronghold.model.packed_formats import FORMATS
from stronghold.native import ALIGNMENT

MANIFEST = "base.json"
FORMAT = "stronghold base"
VERSION = 1
LARGEST = 256 << 20  # bytes of a manifest
SAMPLES = 64  # of each file of weights, for the mark of a source
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlace:
    """A stored tensor and its place in a layer's frozen bytes.

    name    of the parameter; of an inner tensor "PARAMETER.INNER"
    offset  first byte, from the beginning of the layer's frozen bytes
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The byte behind the tensor."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRange:
    """Bytes [begin, end) of a run's array of weights: a range, with the places of its tensors."""

    begin: int
    end: int
    places: tuple[StoredPlace, ...]


def stored_place(weights: ArrayMap, part: ParameterSlice) -> StoredPlace:
    """The place of a stored tensor in the layer's array of weights.

    `weights`: the array's map, of all ranges.
    """
    section = weights.sections[part.range]
    offset = section.byte_of(part.offset)
    return StoredPlace(name=part.name, dtype=section.dtype, shape=part.shape, offset=offset)


def view_of(memory: torch.Tensor, place: StoredPlace) -> torch.Tensor:
    """The stored tensor in `memory`: flat contiguous bytes on the CPU."""
    return memory[place.offset : place.end].view(place.dtype).view(place.shape)


class StoredTensorRecord(BaseModel):
    """One stored tensor in the manifest: the fields of `StoredPlace`, and the CRC-32 of its
    bytes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Name
    dtype: Dtype
    shape: Shape
    offset: Count
    crc32: Count

    @property
    def place(self) -> StoredPlace:
        return StoredPlace(name=self.name, dtype=self.dtype, shape=self.shape, offset=self.offset)


class LayerRecord(BaseModel):
    """One layer: its bytes [offset, offset + num_bytes) of `file`.

    name    of the block in the model
    offset  a multiple of 4096, as is `num_bytes`
    tensors in the order of their places
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Name
    file: FileName
    offset: Count
    num_bytes: Count
    tensors: tuple[StoredTensorRecord, ...]

    @model_validator(mode="after")
    def _consistent(self) -> LayerRecord:
        if self.offset % ALIGNMENT or self.num_bytes % ALIGNMENT:
            raise ValueError(f"expected offset and num_bytes to be multiples of {ALIGNMENT}")
        end = 0
        for tensor in self.tensors:
            place = tensor.place
            if place.offset % place.dtype.itemsize or place.offset < end:
                raise ValueError(
                    f"{tensor.name}: offset: got {place.offset}, expected a multiple of "
                    f"{place.dtype.itemsize} that is at least {end}"
                )
            end = place.end
        if end > self.num_bytes:
            raise ValueError(f"num_bytes: got {self.num_bytes}, and its tensors end at {end}")
        return self


class BaseManifest(BaseModel):
    """Contents of `base.json`.

    frozen    the packed format of the base: a name in `model.packed_formats.FORMATS`
    dtype     the compute dtype: of parameters as they came, and of weights before they were packed
    source    mark of the directory of which it was made (`source_mark`)
    versions  of the packages that made it
    layers    in the order of the model
    files     the bytes of each file
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    frozen: str
    dtype: Dtype
    source: Name
    versions: dict[str, str]
    layers: tuple[LayerRecord, ...]
    files: dict[FileName, Count]

    @model_validator(mode="after")
    def _consistent(self) -> BaseManifest:
        if self.frozen not in FORMATS:
            raise ValueError(
                f"frozen: got {self.frozen!r}, expected one of {', '.join(FORMATS)}."
                f"{did_you_mean(self.frozen, FORMATS)}"
            )
        ends = dict.fromkeys(self.files, 0)
        for layer in self.layers:
            if layer.file not in ends:
                raise ValueError(f"files: {layer.file} is missing, which holds {layer.name}")
            if layer.offset != ends[layer.file]:
                raise ValueError(
                    f"layers: {layer.name} begins at {layer.offset} of {layer.file}, expected "
                    f"{ends[layer.file]}"
                )
            ends[layer.file] += layer.num_bytes
        for name, num_bytes in self.files.items():
            if ends[name] != num_bytes:
                raise ValueError(f"files: {name} has {num_bytes} bytes, its layers {ends[name]}")
        return self

    def write(self, directory: Path) -> None:
        """Write the manifest into a directory that has all its files. Waits for the disk."""
        body = {"format": FORMAT, "version": VERSION, **self.model_dump(mode="json")}
        text = json.dumps({"crc32": _checksum(body), "base": body}, indent=1)
        write_durably(directory / MANIFEST, text.encode())


def _checksum(body: object) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


# -- reading ---------------------------------------------------------------------------------------
class Base:
    """An open base. It holds its files open until `close`, and never writes them."""

    def __init__(self, path: Path, manifest: BaseManifest) -> None:
        self.path = path
        self.manifest = manifest
        self._files: dict[str, HeldFile] = {}
        try:
            for name, num_bytes in manifest.files.items():
                file = HeldFile(path / name)
                self._files[name] = file
                if file.num_bytes != num_bytes:
                    raise CheckpointError(
                        f"{file.path}: {file.num_bytes} bytes, expected {num_bytes}: the base is "
                        "cut off or was changed. Prepare it again"
                    )
        except CheckpointError:
            self.close()
            raise

    @property
    def layers(self) -> tuple[LayerRecord, ...]:
        """The layers in the order of the model: the file, offset and length of each."""
        return self.manifest.layers

    def read_into(
        self, layer: int, memory: torch.Tensor, places: Sequence[StoredPlace] | None = None
    ) -> None:
        """Fill `memory` with a layer's stored tensors, and compare their checksums.

        memory  a flat contiguous uint8 CPU tensor. Bytes between the tensors may be changed, too
        places  of the tensors in `memory`. None: as in the file. Then it has the layer's
                `num_bytes`, and one read fills it

        Waits for the disk. Raises CheckpointError if the file ends before, or if its contents have
        changed. Raises ConfigError if the layer has other tensors, and StateError for memory into
        which they do not fit.
        """
        record = self.layers[layer]
        if places is None:
            stored = [tensor.place for tensor in record.tensors]
            pairs = list(zip(stored, stored, strict=True))
            runs = [(0, record.num_bytes, 0)]
        else:
            pairs = self._paired(layer, places)
            runs = list(_runs(pairs))
        view = _bytes_of(record, memory, max((end + shift for _, end, shift in runs), default=0))
        file = self._files[record.file]
        for begin, end, distance in runs:
            piece = view[begin + distance : end + distance]
            file.read_into(piece, record.offset + begin, record.name)
        checksums = {tensor.name: tensor.crc32 for tensor in record.tensors}
        for place, to in pairs:
            if zlib.crc32(view[to.offset : to.end]) != checksums[place.name]:
                raise CheckpointError(
                    f"{file.path}: {place.name}: its checksum is not that of the manifest: the "
                    "base changed after it was written. Prepare it again"
                )

    def has(self, layer: int, name: str) -> bool:
        """True if the layer has a stored tensor of this name, without the wrappers of adapters."""
        by_name = self._places_by_name(layer)
        return _ending(by_name, _without_wrappers(name)) is not None

    def has_layout(self, layer: int, places: Sequence[StoredPlace]) -> bool:
        """True if the layer's stored tensors have these places in the file.

        Then the file's bytes may be mapped, or read at once. Raises ConfigError if the layer has
        other tensors.
        """
        return all(place.offset == to.offset for place, to in self._paired(layer, places))

    def file_ranges(
        self, layer: int, ranges: Sequence[PlacedRange]
    ) -> tuple[FileRange, ...] | None:
        """The file's bytes that are these ranges of a run's array of weights.

        ranges  all frozen ranges of the layer

        The paddings between ranges, and their order, may be others in the file. None if a range has
        its tensors at other distances there. Raises ConfigError if the layer has other tensors.
        """
        record = self.layers[layer]
        pairs = self._paired(layer, [place for placed in ranges for place in placed.places])
        distances = {to.name: place.offset - to.offset for place, to in pairs if to.end > to.offset}
        ends = {to.name: place.end for place, to in pairs}
        held = self._files[record.file]
        file = FrozenFile(path=str(held.path), opened=held.system_path, num_bytes=held.num_bytes)
        result: list[FileRange] = []
        for placed in ranges:
            of_range = {distances[to.name] for to in placed.places if to.name in distances}
            if len(of_range) != 1:
                return None
            begin = placed.begin + of_range.pop()
            if begin % ALIGNMENT:
                return None
            end = max(ends[to.name] for to in placed.places)
            end += -end % ALIGNMENT
            result.append(
                FileRange(
                    file=file,
                    offset=record.offset + begin,
                    begin=placed.begin,
                    end=placed.end,
                    num_stored=end - begin,
                )
            )
        return tuple(result)

    def _paired(
        self, layer: int, places: Sequence[StoredPlace]
    ) -> list[tuple[StoredPlace, StoredPlace]]:
        """Each stored tensor's place in the file, with its place of `places`."""
        record = self.layers[layer]
        by_name = self._places_by_name(layer)
        pairs: list[tuple[StoredPlace, StoredPlace]] = []
        for to in places:
            place = _ending(by_name, _without_wrappers(to.name))
            if place is None:
                raise self._foreign(record, f"has no {to.name}")
            if (place.dtype, place.shape) != (to.dtype, to.shape):
                raise self._foreign(
                    record,
                    f"has {place.name} in {place.dtype} of shape {list(place.shape)}, expected "
                    f"{to.dtype} of shape {list(to.shape)}",
                )
            pairs.append((place, to))
        if len({place.name for place, _ in pairs}) != len(record.tensors):
            raise self._foreign(
                record, f"has {len(record.tensors)} stored tensors, expected {len(places)}"
            )
        return sorted(pairs, key=lambda pair: pair[0].offset)

    def _places_by_name(self, layer: int) -> dict[str, StoredPlace]:
        """The layer's stored tensors by name, without the wrappers of adapters."""
        return {
            _without_wrappers(tensor.name): tensor.place for tensor in self.layers[layer].tensors
        }

    def _foreign(self, record: LayerRecord, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: layer {record.name} {problem}. The run freezes or stores other weights "
            "than the base has: prepare a base of this model with this config's formats"
        )

    def check_contents(self) -> None:
        """Raise CheckpointError unless every layer has its checksum. Reads the whole base."""
        largest = max((record.num_bytes for record in self.layers), default=0)
        memory = torch.empty(largest, dtype=torch.uint8)
        for number, record in enumerate(self.layers):
            self.read_into(number, memory[: record.num_bytes])

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> Base:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bytes_of(record: LayerRecord, memory: torch.Tensor, num_bytes: int) -> memoryview:
    """The bytes of `memory`. Raises StateError if it has fewer than `num_bytes`."""
    is_flat = memory.dtype is torch.uint8 and memory.dim() == 1 and memory.is_contiguous()
    if not is_flat or memory.device.type != "cpu" or memory.numel() < num_bytes:
        raise StateError(
            f"layer {record.name}: got {memory.dtype} of shape {list(memory.shape)} on "
            f"{memory.device}, expected at least {num_bytes} flat bytes on the CPU"
        )
    return raw_bytes(memory)


def _runs(pairs: Sequence[tuple[StoredPlace, StoredPlace]]) -> Iterator[tuple[int, int, int]]:
    """Bytes of the layer that one read fills: (begin, end, distance to their place in memory).

    `pairs` are in the order of the file. Neighbours at one distance are read together, with the
    bytes between them.
    """
    begin = end = distance = 0
    for place, to in pairs:
        if end > begin and to.offset - place.offset != distance:
            yield begin, end, distance
            begin = end = place.offset
        if end == begin:
            begin = place.offset
            distance = to.offset - place.offset
        end = place.end
    if end > begin:
        yield begin, end, distance


def open_base(
    path: str | Path,
    *,
    frozen: str | None = None,
    source: str | None = None,
    layers: Sequence[Sequence[StoredPlace]] | None = None,
) -> Base:
    """Open a base, and check that it belongs to this run. None: no check.

    frozen  the config's packed format
    source  `source_mark` of the model's directory
    layers  for each block of the model, in order: the places of its frozen stored tensors

    It reads the manifest and the sizes of the files; `Base.read_into` checks contents.

    Raises CheckpointError for a base that is missing, damaged or cut off. Raises ConfigError for a
    base of another model or format, or of other stored tensors. Both name the directory and the
    difference. Places may differ (`Base.has_layout`).
    """
    base = Base(Path(path), _read_manifest(Path(path)))
    try:
        manifest = base.manifest
        if frozen is not None and manifest.frozen != frozen:
            raise ConfigError(
                f'{path}: is a base in {manifest.frozen}, and stronghold.frozen is "{frozen}". '
                f"Set it to {manifest.frozen!r}, or prepare another base"
            )
        if source is not None and manifest.source != source:
            raise ConfigError(
                f"{path}: is a base of another model: its source has the mark "
                f"{manifest.source[:16]}, and this model's directory {source[:16]}. Prepare a base "
                "of this model"
            )
        if layers is not None and len(layers) != len(base.layers):
            raise ConfigError(
                f"{path}: has {len(base.layers)} layers, and the model has {len(layers)} blocks. "
                "Prepare a base of this model"
            )
        for number, places in enumerate(layers or ()):
            base.has_layout(number, places)
    except ConfigError:
        base.close()
        raise
    return base


def _read_manifest(path: Path) -> BaseManifest:
    """The manifest of the base in `path`. Raises CheckpointError if it is missing or damaged."""
    where = path / MANIFEST
    try:
        file = HeldFile(where)
    except MissingError as error:
        raise MissingError(
            f"{where}: missing: {path} is no prepared base. Make one with `stronghold prepare`"
        ) from error
    try:
        document = json.loads(file.read(LARGEST))
        body = dict(document["base"])
        if document["crc32"] != _checksum(body):
            raise CheckpointError(f"{where}: its checksum is not that of its contents")
        version = body.pop("format"), body.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not a readable manifest: {error!r}") from error
    finally:
        file.close()
    if version != (FORMAT, VERSION):
        raise CheckpointError(
            f"{where}: {version[0]} version {version[1]}, expected {FORMAT} version {VERSION}: "
            f"use the stronghold that wrote it, {body.get('versions')}, or prepare it again"
        )
    try:
        return BaseManifest.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise CheckpointError(f"{where}: {explain(error, 'base')}") from error


# -- names and marks -------------------------------------------------------------------------------
def _without_wrappers(name: str) -> str:
    """A parameter's name without the modules that adapters put around its module."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _ending(by_name: dict[str, StoredPlace], name: str) -> StoredPlace | None:
    """The tensor of this name. A wrapped model has further modules in front of it."""
    while name not in by_name:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return by_name[name]


def source_mark(directory: Path) -> str:
    """The mark of a model's directory: a SHA-256 in hexadecimal ([Note: which model]).

    It covers the names, sizes and headers of the files of weights, and samples of their contents.
    Reads at most 256 KiB of each file, and the headers. Raises what `from_pretrained` raises for a
    directory without weights.
    """
    mark = hashlib.sha256()
    tensors = files_of_tensors(directory)
    for file in dict.fromkeys(tensors[name] for name in sorted(tensors)):
        held = HeldFile(file.path)
        for name, info in sorted(file.tensors.items()):
            mark.update(f"{name} {info.dtype} {info.shape} {info.begin}\n".encode())
        last = max(held.num_bytes - SAMPLE_BYTES, 0)
        for begin in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
            sample = bytearray(min(SAMPLE_BYTES, held.num_bytes - begin))
            held.read_into(memoryview(sample), begin, "a sample")
            mark.update(sample)
        held.close()
    return mark.hexdigest()
