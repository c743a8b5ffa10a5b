"""Saving: every layer's host slabs to files, while they are not written.

Owns what goes into which file and in which order. Copies no slab: bytes go from where they lie to
the file, through a piece of host memory where they lie on the device or in a file. The training
thread collects; the jobs run on it or on the io lane.

[Note: snapshot] A job reads a layer after its newest update, and the layer's next update waits for
the job. So a save that runs beside the next steps writes exactly what a save that stops them
writes. Everything small (buffers, counters, schedules) is copied when the save is asked for.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.checkpoint import directory, state
from stronghold.checkpoint.held import PIECE_BYTES, FileRecord
from stronghold.checkpoint.manifest import BUFFERS, CONFIG, Manifest, Slices, TensorRecord
from stronghold.checkpoint.tensorfile import (
    Entry,
    entry_of,
    raw_bytes,
    staged_entry,
    write_durably,
    write_tensors,
)
from stronghold.device.fence import Fence, told
from stronghold.errors import LaneError
from stronghold.memory.host import HostStore
from stronghold.memory.layer import view
from stronghold.memory.tiers import array_dtypes
from stronghold.model.layout import ParameterSlice
from stronghold.plan.deferral import update_order
from stronghold.plan.planner import Gradients
from stronghold.runtime.optimizer import EngineOptimizer
from stronghold.runtime.stack import Stack

PACKAGES = ("stronghold", "deepspeed", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the engine gives to a save, beside the slabs; `slices`: of which model."""

    client: state.ClientState
    counters: dict[str, int]
    exclude_frozen: bool = False
    slices: Slices = field(default_factory=Slices)


def versions() -> dict[str, str]:
    """Of the packages that made a checkpoint."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


class Save:
    """One checkpoint on its way to disk: `layer` once for each of `order`, then `finish`."""

    def __init__(
        self,
        stack: Stack,
        optimizer: EngineOptimizer | None,
        save_dir: Path,
        tag: str,
        contents: Contents,
        *,
        latest: bool,
    ) -> None:
        self._stack = stack
        self._save_dir = save_dir
        self._tag = directory.check_tag(tag)
        self._latest = latest
        self._contents = contents
        self._versions = versions()
        self._files: dict[str, FileRecord] = {}
        self._buffers = copied_buffers(stack.partition.model)
        self._slices = contents.slices
        self._state = state.pack(
            contents.client,
            contents.counters,
            self._versions,
            model_parallel_size=contents.slices.size,
        )
        self._config = model_config(stack.partition.model)
        self._groups = named_groups(stack, optimizer)
        self._records = [self._layer_records(index) for index in range(len(stack.host.layers))]
        self._hidden = self._begin()
        self._failure: BaseException | None = None
        self._jobs: list[Fence] = []
        self._published: Fence | None = None
        # As the next updates will come, so that they wait least.
        self.order = update_order(
            len(self._records),
            early=stack.plan.gradients is Gradients.RING,
            deferred=stack.plan.deferred,
        )

    def _begin(self) -> Path:
        return directory.begin(self._save_dir, self._tag)

    def now(self) -> None:
        """Save on the calling thread, each layer after its pending update. Raises OSError, and then
        leaves no trace on disk.
        """
        try:
            for layer in self.order:
                self._stack.runtime.ledger.stored(layer).wait()
                self._write_layer(layer)
            self._finish()
        except BaseException:
            directory.remove(self._hidden)
            raise

    def beside(self) -> None:
        """Save on the io lane: `wait` says how it ended. Training may go on at once:
        [Note: snapshot]."""
        stack, lane = self._stack, self._stack.device.io
        ledger = stack.runtime.ledger
        try:
            for layer in self.order:
                work = partial(self._write_guarded, layer)
                after = (ledger.stored(layer),)
                name = f"save {stack.host.layers[layer].layout.name or 'root'}"
                self._jobs.append(lane.submit(name, work, after))
                ledger.update_after(layer, self._jobs[-1])
        except BaseException as error:  # what is queued writes nothing more
            self._failure = error
            lane.submit(f"drop {self._tag}", partial(directory.remove, self._hidden))
            raise
        self._published = lane.submit(f"publish {self._tag}", self._publish_guarded)

    @property
    def ended(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._published is not None and self._published.done

    def wait(self) -> None:
        """Block until a save `beside` has ended. LaneError with the save's own as its cause."""
        if self._published is not None:
            self._published.wait()
        if isinstance(self._failure, LaneError):  # an update's: the layers are of no one step
            raise told(self._failure)
        if self._failure is not None:
            raise LaneError("io", f"publish {self._tag}", self._failure) from self._failure

    def _publish_guarded(self) -> None:
        """The disk's errors are the save's alone: a lane that failed could not go on."""
        try:
            self._publish_or_raise()
        except BaseException as error:
            self._failure = error

    def _write_guarded(self, layer: int) -> None:
        """Write a layer; an error is kept for the last job, so that no update fails with it."""
        if self._failure is None:
            try:
                self._write_layer(layer)
            except BaseException as error:
                self._failure = error

    def _check_written(self) -> None:
        """Raise what kept a layer from being written. A job whose update failed never ran: only its
        fence tells."""
        for job in self._jobs:
            job.wait()
        if self._failure is not None:
            raise self._failure

    def _publish_or_raise(self) -> None:
        try:
            self._check_written()
            self._finish()
        except BaseException:
            directory.remove(self._hidden)
            raise

    # -- one layer ------------------------------------------------------------------------------
    def _layer_records(self, index: int) -> list[TensorRecord]:
        stack, layer = self._stack, self._stack.layout.layers[index]
        named = stack.partition.layers[index].parameters
        has_low, has_moments = stack.host.has(index, "low"), stack.host.has(index, "exp_avg")
        return [
            TensorRecord(
                name=part.name,
                aliases=named[k].aliases,
                shape=part.shape,
                dtype=stack.dtype,
                trainable=part.trainable,
                step=stack.adam.counts[index][k],
                weights=self._file("weights", index),
                low=self._file("masters", index) if part.trainable and has_low else None,
                moments=self._file("moments", index) if part.trainable and has_moments else None,
            )
            for k, part in enumerate(layer.slices)
            if part.trainable or not self._contents.exclude_frozen
        ]

    def _write_layer(self, index: int) -> None:
        records = self._records[index]
        parts = {part.name: part for part in self._stack.layout.layers[index].slices}
        weights = [self._entry(index, "weights", r.name, parts[r.name]) for r in records]
        masters = [self._entry(index, "low", r.name, parts[r.name]) for r in records if r.low]
        moments = [
            self._entry(index, moment, f"{moment}.{r.name}", parts[r.name])
            for r in records
            if r.moments
            for moment in ("exp_avg", "exp_avg_sq")
        ]
        for kind, entries in (("weights", weights), ("masters", masters), ("moments", moments)):
            if entries:
                self._write(self._file(kind, index), entries)

    def _file(self, kind: str, index: int) -> str:
        return self._slices.name(f"{kind}-{index:05d}.safetensors")

    def _entry(self, index: int, array: str, name: str, part: ParameterSlice) -> Entry:
        """From where the array lies: a slab, or piece by piece from a file or the device."""
        host = self._stack.host
        if host.layers[index].on_device:
            flat = getattr(host.layers[index], array)
            return staged_entry(name, view(flat, part), self._stack.device.copy_now)
        return array_entry(host, index, array, part, name)

    def _write(self, name: str, entries: Sequence[Entry]) -> None:
        self._files[name] = write_tensors(self._hidden / name, entries)

    # -- the end --------------------------------------------------------------------------------
    def _finish(self) -> None:
        self._describe()
        self._publish()

    def _describe(self) -> None:
        """Write what is small, and the manifest."""
        if self._buffers:
            buffers = [entry_of(*item) for item in self._buffers.items()]
            self._write(self._slices.name(BUFFERS), buffers)
        small = {self._slices.state: self._state}
        if self._config:
            small[self._slices.name(CONFIG)] = self._config
        for name, data in small.items():
            self._files[name] = write_durably(self._hidden / name, [data])
        stack = self._stack
        records = [record for of_layer in self._records for record in of_layer]
        kept = {record.name for record in records}
        Manifest(
            dtype=stack.dtype,
            counters=self._contents.counters,
            tensors=tuple(records),
            excluded=tuple(part.name for part in _slices(stack) if part.name not in kept),
            buffers={name: tuple(buffer.shape) for name, buffer in self._buffers.items()},
            groups=self._groups,
            files=self._files,
            versions=self._versions,
            slices=self._slices,
        ).write(self._hidden)

    def _publish(self) -> None:
        directory.publish(self._hidden, self._save_dir / self._tag)
        if self._latest:
            directory.write_latest(self._save_dir, self._tag)


def _slices(stack: Stack) -> Iterator[ParameterSlice]:
    for layer in stack.layout.layers:
        yield from layer.slices


def array_entry(host: HostStore, index: int, array: str, part: ParameterSlice, name: str) -> Entry:
    """An entry that writes a parameter's part of one array from where it lies."""

    def pieces() -> Iterator[memoryview]:
        begin, end = part.offset, part.offset + part.numel
        for _, _, found in host.pieces(index, (array,), begin, end):
            data = raw_bytes(found[array])
            for at in range(0, len(data), PIECE_BYTES):
                yield data[at : at + PIECE_BYTES]

    dtype = array_dtypes(host.dtype)[array]
    return Entry(name=name, dtype=dtype, shape=part.shape, pieces=pieces)


def copied_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, on the CPU, of the buffers that a state dict has."""
    return {
        name: buffer.detach().to("cpu", copy=True).contiguous()
        for name, buffer in persistent_buffers(model)
    }


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict has, each once, by name."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((n, b) for n, b in model.named_buffers() if n not in transient)


def model_config(model: nn.Module) -> bytes | None:
    """The JSON of a Hugging Face model's configuration, from which `export` needs no other
    directory; None for another model.
    """
    config: Any = getattr(model, "config", None)
    to_json: Callable[..., str] | None = getattr(config, "to_json_string", None)
    if to_json is None:
        return None
    return to_json(use_diff=False).encode()


def named_groups(
    stack: Stack, optimizer: EngineOptimizer | None
) -> tuple[dict[str, Any], ...] | None:
    """The optimizer's live groups, with parameters by name and numbers that JSON knows."""
    if optimizer is None:
        return None
    names = {
        named.parameter: named.name
        for layer in stack.partition.layers
        for named in layer.parameters
    }
    return tuple(
        {
            **{key: _plain(value) for key, value in group.items() if key != "params"},
            "params": [names[parameter] for parameter in group["params"] if parameter in names],
        }
        for group in optimizer.param_groups
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)
