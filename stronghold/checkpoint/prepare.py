"""Writes a prepared base: the blocks of a Hugging Face directory, packed, layer by layer.

Owns the order of reads, packing and writes, and the figures that a user gets. `checkpoint.base` has
the format and reads it. It needs no engine and no GPU. The calling thread alone enters; the queue
of files has threads of its own.

[Note: prepare]

1. Two slabs, each as large as the largest packed layer, and one weight in the compute dtype.
2. The caller's thread reads a weight into the buffer, and packs it into its place in a slab. The
   system reads the next weights ahead meanwhile: the following one, or the next layer's first.
3. A full slab is written by the queue while the next layer is packed into the other slab.
4. All files lie in a hidden directory. It gets its name when they and the manifest are durable
   (`checkpoint.directory`, [Note: publication]). A killed process leaves no base, and the next one
   removes the hidden directory.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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
DEPTH = 16  # blocks in flight
BLOCK_BYTES = 1 << 20
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
    waiting_s       seconds in which the caller waited for writes
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


# -- packing and writing ---------------------------------------------------------------------------
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
        self._pool: Pool | None = None

    def write(self, hidden: Path, plans: Sequence[_LayerPlan]) -> list[LayerRecord]:
        """Write the files of all layers into the directory `hidden`, durably."""
        slabs = self._make_slabs(plans)
        weight = self._make_buffer(plans)
        records: list[LayerRecord] = []
        with closing(IoQueue(DEPTH, BLOCK_BYTES)) as queue, Pool(available_cores()) as pool:
            self._pool = pool
            files = {
                name: _create(queue, hidden / name, num_bytes)
                for name, num_bytes in _file_sizes(plans).items()
            }
            tickets: list[int | None] = [None] * len(slabs)
            for number, plan in enumerate(plans):
                turn = number % len(slabs)
                self._wait(queue, tickets[turn])
                slab = slabs[turn][: plan.num_bytes]
                following = plans[number + 1 : number + 2]
                records.append(self._fill(plan, slab, weight, following))
                file, address = files[plan.file], slab.data_ptr()
                tickets[turn] = queue.write(file, plan.offset, address, plan.num_bytes)
                self._progress(number + 1, plans)
            for ticket in tickets:
                self._wait(queue, ticket)
        for name in files:
            _sync(hidden / name)
        return records

    def errors(self) -> tuple[KindError, ...]:
        """The errors of all packed weights, by their kind."""
        return tuple(
            KindError(kind=kind, num_weights=len(errors), error=sum_of_errors(errors))
            for kind, errors in self._errors.items()
        )

    def _make_slabs(self, plans: Sequence[_LayerPlan]) -> list[torch.Tensor]:
        largest = max(plan.num_bytes for plan in plans)
        return [map_slab(largest, torch.uint8) for _ in range(min(2, len(plans)))]

    def _make_buffer(self, plans: Sequence[_LayerPlan]) -> torch.Tensor:
        """Memory for the largest weight that is packed, in the compute dtype."""
        sizes = [packed.parameter.numel() for plan in plans for packed in plan.packed]
        return map_slab(max(sizes, default=0), self._dtype)

    def _fill(
        self,
        plan: _LayerPlan,
        slab: torch.Tensor,
        weight: torch.Tensor,
        following: Sequence[_LayerPlan],
    ) -> LayerRecord:
        """Write a layer's stored tensors into its slab. Returns its record.

        `following`: the next layer, if there is one. Its first weight is read ahead.
        """
        _clear_gaps(slab, plan.places)
        views = {place.name: view_of(slab, place) for place in plan.places}
        for name, parameter in plan.as_came.items():
            self._source.read_into(parameter, views[name])
        next_packed = [*plan.packed[1:], *(layer.packed[0] for layer in following if layer.packed)]
        for number, packed in enumerate(plan.packed):
            values = weight[: packed.parameter.numel()].view(packed.shape)
            self._source.read_into(packed.parameter, values)
            for ahead in next_packed[number : number + 1]:
                self._source.will_read(ahead.parameter)
            inner = {key: views[f"{packed.name}.{key}"] for key in packed.inner}
            self._pack(plan, packed, values, inner)
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
        return LayerRecord(
            name=plan.name,
            file=plan.file,
            offset=plan.offset,
            num_bytes=plan.num_bytes,
            tensors=tuple(tensors),
        )

    def _pack(
        self,
        plan: _LayerPlan,
        packed: PackedParameter,
        values: torch.Tensor,
        inner: dict[str, torch.Tensor],
    ) -> None:
        begun = time.perf_counter()
        try:
            error = self._format.encode(values, inner, self._pool)
        except ConfigError as reason:
            raise ConfigError(f"{packed.name}: {reason}") from reason
        self.clock.packing_s += time.perf_counter() - begun
        self._errors.setdefault(kind_of_weight(plan.name, packed.name), []).append(error)

    def _wait(self, queue: IoQueue, ticket: int | None) -> None:
        """Wait for a write, so that its slab may be filled again."""
        if ticket is not None:
            begun = time.perf_counter()
            queue.wait(ticket)
            self.clock.waiting_s += time.perf_counter() - begun

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
