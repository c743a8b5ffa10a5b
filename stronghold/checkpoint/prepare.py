"""Writes a prepared base: the blocks of a Hugging Face directory, packed, layer by layer.

Owns the order of reads, packing and writes, and the figures that a user gets. `checkpoint.base` has
the format and reads it. It needs no engine and no GPU. The calling thread alone enters.

[Note: prepare]

1. Two slabs, each as large as the largest packed layer, and two buffers, each as large as the
   largest weight in the compute dtype.
2. The reader's thread reads the next weight into one buffer. The system reads the one after it
   ahead. Meanwhile the caller's thread packs the weight in the other buffer into its place in a
   slab, with the threads of the kernel.
3. The writer's thread gives a full slab to the queue of files and takes the checksums. Meanwhile
   the next layer is packed into the other slab.
4. A slab is filled again when its layer is written: the reader gets the layer after the next one
   then. A buffer is filled again when its weight is packed.
5. All files lie in a hidden directory. It gets its name when they and the manifest are durable
   (`checkpoint.directory`, [Note: publication]). A killed process leaves no base, and the next one
   removes the hidden directory.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from stronghold.checkpoint import directory
from stronghold.checkpoint.base import (
    BaseManifest,
    LayerRecord,
    StoredPlace,
    StoredTensorRecord,
    source_mark,
    stored_place,
    view_of,
)
from stronghold.checkpoint.files import raw_bytes
from stronghold.checkpoint.pretrained import DirectorySource, from_pretrained, open_source
from stronghold.checkpoint.save import versions
from stronghold.devices.worker import open_worker
from stronghold.errors import ConfigError, did_you_mean, format_size
from stronghold.memory.slab import map_slab
from stronghold.model.arrays import weight_map
from stronghold.model.layout import layout
from stronghold.model.packed_formats import FORMATS, PackedFormat, PackingError
from stronghold.model.packing import choose_packed, kind_of_weight, sum_of_errors
from stronghold.model.partition import partition, why_no_blocks
from stronghold.model.stored_tensors import PackedParameter, stored_tensors
from stronghold.native import IoFile, IoQueue, Pool, available_cores
from stronghold.optim.states import EXACT
from stronghold.streaming.formats import CAST, COMPUTED, model_formats, page_items

MAX_FILE_BYTES = 16 << 30
NUM_SLABS = 2
DEPTH = 16  # blocks in flight
BLOCK_BYTES = 1 << 20
Result = TypeVar("Result")
PROGRESS_S = 1.0  # between two lines of progress, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class KindError:
    """The error of packing, of all weights of one kind of layer.

    kind        name of the weight in its block, such as "self_attn.q_proj"
    num_weights number of weights
    error       of all of them together
    """

    kind: str
    num_weights: int
    error: PackingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Figures of a base that was written.

    num_parameters  of the blocks, packed or as they came
    num_bytes       of the files
    packing_s       seconds in which weights were packed
    waiting_s       seconds in which the packing thread waited for reads and writes
    seconds         from the first read to the last fsync
    """

    path: Path
    num_layers: int
    num_parameters: int
    num_bytes: int
    errors: tuple[KindError, ...]
    packing_s: float
    waiting_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerPlan:
    """One layer of the base, and its place in a file.

    packed      the parameters that are packed
    as_came     the stored tensors that are parameters, as they came, by name
    places      of all stored tensors, in order
    """

    name: str
    file: str
    offset: int
    num_bytes: int
    packed: tuple[PackedParameter, ...]
    as_came: dict[str, nn.Parameter]
    places: tuple[StoredPlace, ...]


@dataclass(slots=True, kw_only=True)
class _Clock:
    """Seconds that the caller's thread spent, by what it did."""

    begun: float = field(default_factory=time.perf_counter)
    packing_s: float = 0.0
    waiting_s: float = 0.0


def prepare(
    model_dir: Path,
    out: Path,
    *,
    frozen: str,
    dtype: torch.dtype = torch.bfloat16,
    layers: str | Sequence[str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    report: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Write the base `out` of the model in `model_dir`.

    frozen          a packed format: a name in `FORMATS`
    dtype           the run's compute dtype. Weights are cast to it before they are packed
    layers          paths of the blocks, as in the config key `stronghold.layers`
    max_file_bytes  a file has at most so many bytes, and at least one layer
    report          gets lines of progress

    Waits for the disk. Raises ConfigError for an unknown format, a model without blocks, a
    directory `out` that exists, and weights that cannot be packed. Raises OSError, with the file's
    name, if the disk is full. After any error `out` does not exist.
    """
    packed_format = _format_named(frozen)
    directory.check_new(out)
    model = from_pretrained(model_dir).requires_grad_(False)
    source = open_source(model)
    plans = _plan(model, layers, packed_format, dtype, max_file_bytes)
    num_bytes = sum(plan.num_bytes for plan in plans)
    report(f"{len(plans)} layers, {format_size(num_bytes)} in {frozen}")
    mark = source_mark(model_dir)
    with directory.appearing(out) as hidden:
        writer = _Writer(source, packed_format, dtype, report)
        records = writer.write(hidden, plans)
        manifest = BaseManifest(
            frozen=frozen,
            dtype=dtype,
            source=mark,
            versions=versions(),
            layers=tuple(records),
            files=_file_sizes(plans),
        )
        manifest.write(hidden)
    clock = writer.clock
    return Prepared(
        path=out,
        num_layers=len(plans),
        num_parameters=sum(_num_parameters(plan) for plan in plans),
        num_bytes=num_bytes,
        errors=writer.errors(),
        packing_s=clock.packing_s,
        waiting_s=clock.waiting_s,
        seconds=time.perf_counter() - clock.begun,
    )


def _format_named(name: str) -> PackedFormat:
    if name not in FORMATS:
        raise ConfigError(
            f"got {name!r}, expected one of {', '.join(FORMATS)}.{did_you_mean(name, FORMATS)}"
        )
    return FORMATS[name]


# -- which weights, and where ----------------------------------------------------------------------
def _plan(
    model: nn.Module,
    layers: str | Sequence[str] | None,
    packed_format: PackedFormat,
    dtype: torch.dtype,
    max_file_bytes: int,
) -> list[_LayerPlan]:
    """The places of all blocks. Files follow each other in the order of the model."""
    blocks = partition(model, layers)
    if not blocks.streamed:
        raise ConfigError(why_no_blocks(model))
    packed = choose_packed(blocks, packed_format, partial(_computing_dtype, dtype))
    formats = model_formats(
        stored_tensors(model, packed),
        dtype=dtype,
        kind=EXACT,
        rule=CAST,
        optimizers={},
        default=None,
    )
    parts = partition(model, layers, formats.of, packed)
    page = page_items(formats.formats, in_files=True)
    plans: list[_LayerPlan] = []
    number, end = 0, 0
    for layer, placed in zip(parts.layers, layout(parts, 1, page, formats.of).layers, strict=True):
        if not layer.streamed:
            continue
        weights = weight_map(placed, formats.formats)
        if end and end + weights.nbytes > max_file_bytes:
            number, end = number + 1, 0
        plans.append(
            _LayerPlan(
                name=layer.name,
                file=f"layers-{number:05d}.bin",
                offset=end,
                num_bytes=weights.nbytes,
                packed=layer.packed,
                as_came={
                    named.name: named.parameter
                    for named in layer.parameters
                    if isinstance(named.parameter, nn.Parameter)
                },
                places=tuple(stored_place(weights, part) for part in placed.slices),
            )
        )
        end += weights.nbytes
    return plans


def _computing_dtype(dtype: torch.dtype, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which a weight computes in runs of this dtype (`streaming.formats`)."""
    return dtype if weight.dtype in COMPUTED else weight.dtype


def _num_parameters(plan: _LayerPlan) -> int:
    parameters = [packed.parameter for packed in plan.packed]
    return sum(parameter.numel() for parameter in (*parameters, *plan.as_came.values()))


def _file_sizes(plans: Sequence[_LayerPlan]) -> dict[str, int]:
    """The bytes of each file."""
    sizes: dict[str, int] = {}
    for plan in plans:
        sizes[plan.file] = plan.offset + plan.num_bytes
    return sizes


# -- reading, packing and writing ------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """A weight that is packed. `values` is a view of a buffer, in the weight's shape."""

    packed: PackedParameter
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Stored tensors that the reader reads at once: one weight to pack, or all as they came.

    plan     the layer
    slab     its bytes
    views    of the slab, by the names of the stored tensors
    weight   None: all stored tensors that stay as they came. They are a layer's first part
    is_last  the last part of its layer
    """

    plan: _LayerPlan
    slab: torch.Tensor
    views: dict[str, torch.Tensor]
    weight: _Weight | None
    is_last: bool


class _Writer:
    """Packs layers into two slabs in turn, and writes them ([Note: prepare])."""

    def __init__(
        self,
        source: DirectorySource,
        packed_format: PackedFormat,
        dtype: torch.dtype,
        report: Callable[[str], None],
    ) -> None:
        self.clock = _Clock()
        self._source = source
        self._format = packed_format
        self._dtype = dtype
        self._report = report
        self._reported_s = time.perf_counter()
        self._errors: dict[str, list[PackingError]] = {}

    def write(self, hidden: Path, plans: Sequence[_LayerPlan]) -> list[LayerRecord]:
        """Write the files of all layers into the directory `hidden`, durably."""
        parts = self._parts(plans)
        written: list[Future[LayerRecord]] = []
        with (
            closing(IoQueue(DEPTH, BLOCK_BYTES)) as queue,
            Pool(available_cores()) as pool,
            open_worker("writer") as writer,
            open_worker("reader") as reader,
        ):
            files = {
                name: _create(queue, hidden / name, num_bytes)
                for name, num_bytes in _file_sizes(plans).items()
            }
            read = reader.submit(self._read, parts[0], parts[1:2])
            for number, part in enumerate(parts):
                self._wait(read)
                for following in parts[number + 1 : number + 2]:
                    if following.weight is None and len(written) >= NUM_SLABS - 1:
                        self._wait(written[1 - NUM_SLABS])
                    read = reader.submit(self._read, following, parts[number + 2 : number + 3])
                if part.weight is not None:
                    self._pack(part, part.weight, pool)
                if part.is_last:
                    file = files[part.plan.file]
                    written.append(writer.submit(_write, queue, file, part.plan, part.slab))
                    self._progress(len(written), plans)
            records = [self._wait(layer) for layer in written]
        for name in files:
            _sync(hidden / name)
        return records

    def errors(self) -> tuple[KindError, ...]:
        """The errors of all packed weights, by their kind."""
        return tuple(
            KindError(kind=kind, num_weights=len(errors), error=sum_of_errors(errors))
            for kind, errors in self._errors.items()
        )

    def _parts(self, plans: Sequence[_LayerPlan]) -> list[_Part]:
        """All parts of all layers, in the order in which they are read and packed."""
        largest = max(plan.num_bytes for plan in plans)
        slabs = [map_slab(largest, torch.uint8) for _ in range(min(NUM_SLABS, len(plans)))]
        sizes = [packed.parameter.numel() for plan in plans for packed in plan.packed]
        buffers = [map_slab(max(sizes, default=0), self._dtype) for _ in range(2)]
        parts: list[_Part] = []
        for number, plan in enumerate(plans):
            slab = slabs[number % len(slabs)][: plan.num_bytes]
            views = {place.name: view_of(slab, place) for place in plan.places}
            weights: list[_Weight | None] = [None]
            for packed in plan.packed:
                # Parts alternate between the buffers. The first part of a layer needs none.
                buffer = buffers[(len(parts) + len(weights)) % len(buffers)]
                values = buffer[: packed.parameter.numel()].view(packed.shape)
                weights.append(_Weight(packed=packed, values=values))
            parts += [
                _Part(
                    plan=plan, slab=slab, views=views, weight=weight, is_last=weight is weights[-1]
                )
                for weight in weights
            ]
        return parts

    def _read(self, part: _Part, following: Sequence[_Part]) -> None:
        """Read a part. The system reads the weight of the following one ahead."""
        for ahead in following:
            if ahead.weight is not None:
                self._source.will_read(ahead.weight.packed.parameter)
        if part.weight is not None:
            self._source.read_into(part.weight.packed.parameter, part.weight.values)
            return
        _clear_gaps(part.slab, part.plan.places)
        for name, parameter in part.plan.as_came.items():
            self._source.read_into(parameter, part.views[name])

    def _pack(self, part: _Part, weight: _Weight, pool: Pool) -> None:
        packed = weight.packed
        inner = {key: part.views[f"{packed.name}.{key}"] for key in packed.inner}
        begun = time.perf_counter()
        try:
            error = self._format.encode(weight.values, inner, pool)
        except ConfigError as reason:
            raise ConfigError(f"{packed.name}: {reason}") from reason
        self.clock.packing_s += time.perf_counter() - begun
        self._errors.setdefault(kind_of_weight(part.plan.name, packed.name), []).append(error)

    def _wait(self, call: Future[Result]) -> Result:
        """Return the result of a call of another thread. Raises what it raised."""
        begun = time.perf_counter()
        result = call.result()
        self.clock.waiting_s += time.perf_counter() - begun
        return result

    def _progress(self, num_done: int, plans: Sequence[_LayerPlan]) -> None:
        now = time.perf_counter()
        if now - self._reported_s < PROGRESS_S and num_done < len(plans):
            return
        self._reported_s = now
        done_bytes = sum(plan.num_bytes for plan in plans[:num_done])
        left_s = (now - self.clock.begun) / num_done * (len(plans) - num_done)
        self._report(
            f"{num_done} of {len(plans)} layers, {format_size(done_bytes)}, {left_s:.0f} s left"
        )


def _write(queue: IoQueue, file: IoFile, plan: _LayerPlan, slab: torch.Tensor) -> LayerRecord:
    """Write a layer's slab to its place in the file. Returns the layer's record."""
    ticket = queue.write(file, plan.offset, slab.data_ptr(), plan.num_bytes)
    data = raw_bytes(slab)
    tensors = [
        StoredTensorRecord(
            name=place.name,
            dtype=place.dtype,
            shape=place.shape,
            offset=place.offset,
            crc32=zlib.crc32(data[place.offset : place.end]),
        )
        for place in plan.places
    ]
    queue.wait(ticket)
    return LayerRecord(
        name=plan.name,
        file=plan.file,
        offset=plan.offset,
        num_bytes=plan.num_bytes,
        tensors=tuple(tensors),
    )


def _clear_gaps(slab: torch.Tensor, places: Sequence[StoredPlace]) -> None:
    """Fill the bytes between tensors with zeros: another layer had the slab before."""
    end = 0
    for place in places:
        slab[end : place.offset].zero_()
        end = place.end
    slab[end:].zero_()


def _create(queue: IoQueue, path: Path, num_bytes: int) -> IoFile:
    """Make a file with the mode of the user's other files, and open it in the queue."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    return queue.open(path, num_bytes, create=False)


def _sync(path: Path) -> None:
    """Make a file's contents durable. Waits for the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
