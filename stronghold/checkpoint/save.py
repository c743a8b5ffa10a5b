"""Saving: every layer's host slabs to files, while they are not written.

Owns what goes into which file and in which order. Copies no slab: bytes go from where they lie to
the file, through a piece of host memory where they lie on the device or in a file. The training
thread collects; the jobs run on it or on the io lane.

[Note: snapshot] A job reads a layer after its newest update, and the layer's next update waits for
the job. So a save that runs beside the next steps writes exactly what a save that stops them
writes. Everything small (buffers, counters, schedules) is copied when the save is asked for. A
program that writes weights in place meanwhile waits for nobody: such a save fails.

[Note: one tag] All ranks of the team write at once, each its own elements of the same files. The
leader makes the hidden directory, which all must see, and publishes it; of the ranks that share
slices of the model the first writes what is small. A failure on any rank is raised on all, and
leaves no trace.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.checkpoint import directory
from stronghold.checkpoint.directory import Team
from stronghold.checkpoint.manifest import (
    BUFFERS,
    CONFIG,
    ClientState,
    Manifest,
    TensorRecord,
    pack_state,
    shape_of,
)
from stronghold.checkpoint.tensorfile import (
    NAMES,
    Entry,
    Part,
    cut,
    entry_of,
    raw_bytes,
    record_of,
    write_durably,
    write_parts,
    write_tensors,
)
from stronghold.devices.base import Fence, surfacing
from stronghold.devices.lane_name import LaneName
from stronghold.errors import CheckpointError, ConfigError, LaneError
from stronghold.model.arrays import array_dtype, moment_arrays
from stronghold.model.layout import ParameterSlice
from stronghold.optim import DEFAULT
from stronghold.optim.states import group_size
from stronghold.plan.homes import GPU
from stronghold.plan.schedule import update_order
from stronghold.runtime.optimizer import EngineOptimizer
from stronghold.runtime.patches.modules import transient_buffers
from stronghold.runtime.stack import Stack

PACKAGES = ("stronghold", "deepspeed", "torch")


def versions() -> dict[str, str]:
    """Of the packages that made a checkpoint."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


class Save:
    """One checkpoint on its way to disk: `run`, or `start` beside training and then `wait`."""

    def __init__(
        self,
        stack: Stack,
        optimizer: EngineOptimizer | None,
        save_dir: Path,
        tag: str,
        *,
        client: ClientState,
        counters: dict[str, int],
        exclude_frozen: bool,
        team: Team,
        latest: bool,
    ) -> None:
        self._stack = stack
        self._team = team
        self._save_dir = save_dir
        self._tag = directory.check_tag(tag)
        self._latest = latest
        self._counters = counters
        self._exclude_frozen = exclude_frozen
        self._versions = versions()
        self._parts: dict[str, list[Part]] = {}  # of each file of tensors, what this rank wrote
        model = stack.partition.model
        self._buffers = {
            name: buffer.detach().to("cpu", copy=True).contiguous()
            for name, buffer in persistent_buffers(model)
        }
        slices = team.slices.size
        self._state = pack_state(client, counters, self._versions, model_parallel_size=slices)
        self._config = model_config(model)
        self._groups = named_groups(stack, optimizer)
        self._records = [self._layer_records(index) for index in range(len(stack.host.layers))]
        self._hidden = self._begin()
        self._failure: BaseException | None = None
        self._jobs: list[Fence] = []
        self._published: Fence | None = None
        # As the next updates will come, so that they wait least.
        order = update_order(stack.plan.updates)
        self.order = [*order, *(i for i in range(len(self._records)) if i not in order)]

    def _begin(self) -> Path:
        """The hidden directory, which every rank sees."""
        team, existed = self._team, self._save_dir.exists()

        def make() -> str:
            return directory.begin(self._save_dir, self._tag).name if team.leader else ""

        path: Path = self._save_dir / team.exchange(team.all_or_raise(make), "directory")[0]
        try:
            team.check_seen(path)
        except CheckpointError:
            if team.leader:
                directory.remove(path)
                if not existed:
                    path.parent.rmdir()
            raise
        return path

    def run(self) -> None:
        """Save on the calling thread, each layer after its pending update. Raises OSError, and then
        leaves no trace on disk."""
        for layer in self.order:
            self._write_guarded(layer, self._stack.host.layers[layer].wait)
        self._finish()

    def start(self) -> None:
        """Save on the io lane: `wait` says how it ended. Training may go on at once:
        [Note: snapshot]."""
        stack, lane = self._stack, self._stack.device.lane(LaneName.IO)
        try:
            for layer in self.order:
                state = stack.host.layers[layer]
                name = f"save {state.layout.name or 'root'}"
                before = stack.runtime.versions_of(layer)
                work = partial(self._write_guarded, layer, before=before)
                # The layer's next update waits for it: a snapshot without a copy.
                self._jobs.append(lane.submit(name, work, reads=state.records_of(state.changed)))
        except BaseException as error:  # what is queued writes nothing more
            self._failure = error
            lane.submit(f"drop {self._tag}", partial(directory.remove, self._hidden))
            raise
        self._published = lane.submit(f"publish {self._tag}", self._finish_guarded)

    @property
    def ended(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._published is not None and self._published.done

    def wait(self) -> None:
        """Block until what was started has ended. LaneError with the save's own as its cause."""
        if self._published is not None:
            self._published.wait()
        if isinstance(self._failure, LaneError):  # an update's: the layers are of no one step
            raise surfacing(self._failure)
        if self._failure is not None:
            raise LaneError(LaneName.IO, f"publish {self._tag}", self._failure) from self._failure

    def _write_guarded(
        self,
        layer: int,
        after: Callable[[], None] = lambda: None,
        before: list[int] | None = None,
    ) -> None:
        """Write a layer; an error is kept for the end, so that no update fails with it and every
        rank comes to the end. `before`: the versions of its parameters that are saved."""
        if self._failure is None:
            try:
                after()
                self._write_layer(layer)
                self._check_unwritten(layer, before)
            except BaseException as error:
                self._failure = error

    def _check_unwritten(self, layer: int, before: list[int] | None) -> None:
        stack, state = self._stack, self._stack.host.layers[layer]
        if before is None or (layer in stack.plan.resident and state.home is not GPU):
            return  # written in a slot, from which they come when nobody reads the arrays
        for part, old, new in zip(
            state.layout.slices, before, stack.runtime.versions_of(layer), strict=True
        ):
            if old != new:
                raise ConfigError(
                    f"{part.name} was written in place while a checkpoint was saved beside "
                    "training, which would have values of two states: call "
                    "engine.wait_for_checkpoint() before such writes, or set "
                    "stronghold.async_checkpoint to false"
                )

    def _finish_guarded(self) -> None:
        """The disk's errors are the save's alone: a lane that failed could not go on."""
        try:
            self._finish()
        except BaseException as error:
            self._failure = error

    def _finish(self) -> None:
        """Publish what every rank has written, if none has failed ([Note: one tag])."""
        team = self._team
        try:
            of_all = team.exchange(team.all_or_raise(self._written), "parts of files")
            parts = team.of_slices(of_all)
            team.all_or_raise(lambda: self._describe(parts) if team.rank == 0 else None)
            team.all_or_raise(lambda: self._publish() if team.leader else None)
        except BaseException:
            if team.leader:
                directory.remove(self._hidden)
            raise

    def _written(self) -> dict[str, list[Part]]:
        for job in self._jobs:  # one whose update failed never ran: only its fence tells
            job.wait()
        if self._failure is not None:
            raise self._failure
        return self._parts

    # -- one layer --------------------------------------------------------------------------------
    def _layer_records(self, index: int) -> list[TensorRecord]:
        stack, layer = self._stack, self._stack.layout.layers[index]
        named = stack.partition.layers[index].parameters
        host, state = stack.host, stack.host.layers[index]
        optimizers = stack.steps.optimizers_of(state)

        def has(part: ParameterSlice, arrays: Iterable[str]) -> bool:
            dtypes = host.formats[part.format].trained.dtypes if part.trainable else {}
            return any(array in dtypes and host.access.has(index, array) for array in arrays)

        moments = moment_arrays(host.formats)
        kept = [k for k, p in enumerate(layer.slices) if p.trainable or not self._exclude_frozen]
        for k in kept:
            if state.sections[k].dtype not in NAMES:
                raise ConfigError(
                    f"{layer.slices[k].name} is {state.sections[k].dtype}, which a checkpoint's "
                    f"files cannot hold: expected one of {', '.join(map(str, NAMES))}. Show its "
                    "bytes as torch.uint8 in the module, or save without what is frozen "
                    "(exclude_frozen_parameters=True)"
                )
        return [
            TensorRecord(
                name=part.name,
                aliases=named[k].aliases,
                shape=part.shape,
                dtype=state.sections[k].dtype,
                trainable=part.trainable,
                step=state.optimizer.counts[k],
                weights=self._file("weights", index),
                low=self._file("masters", index) if has(part, ["low"]) else None,
                moments=self._file("moments", index) if has(part, moments) else None,
                optimizer=optimizers.get(k, DEFAULT).name,
            )
            for k, part in ((k, layer.slices[k]) for k in kept)
        ]

    def _file(self, kind: str, index: int) -> str:
        return self._team.slices.name(f"{kind}-{index:05d}.safetensors")

    def _write_layer(self, index: int) -> None:
        parts = {part.name: part for part in self._stack.layout.layers[index].slices}
        maps = self._stack.host.layers[index].maps
        moments = moment_arrays(self._stack.host.formats)
        kinds = {"weights": ["weights"], "masters": ["low"], "moments": moments}
        for kind, arrays in kinds.items():
            name = self._file(kind, index)
            entries = [
                self._entry(index, array, parts[r.name], f"{array}.{r.name}")
                if kind == "moments"
                else self._entry(index, array, parts[r.name], r.name)
                for r in self._records[index]
                if name in (r.weights, r.low, r.moments)
                for array in arrays
                if array in maps and maps[array].has_range(parts[r.name])
            ]
            if entries:
                first = self._team.rank == 0
                self._parts[name] = write_parts(self._hidden / name, entries, first=first)

    def _entry(self, index: int, array: str, part: ParameterSlice, name: str) -> Entry:
        """A parameter's part of one array, from where it lies: a slab, or piece by piece from a
        file or the device. Of several ranks each writes its own elements."""
        host, begin, end = self._stack.host, part.offset, part.offset + part.numel
        shape = shape_of(array, part.shape)
        dtype = array_dtype(host.formats[part.format], array)

        def pieces() -> Iterator[tuple[int, memoryview]]:
            for own, found in host.access.pieces(index, (array,), begin, end):
                at = own.start // group_size(array) * dtype.itemsize
                yield from cut(raw_bytes(found[array]), at)

        return Entry(name=name, dtype=dtype, shape=shape, pieces=pieces)

    # -- the end ----------------------------------------------------------------------------------
    def _describe(self, of_ranks: list[dict[str, list[Part]]]) -> None:
        """Write what is small, and the manifest."""
        stack, slices = self._stack, self._team.slices
        files = {
            name: record_of(name, [part for parts in of_ranks for part in parts[name]])
            for name in self._parts
        }
        if self._buffers:
            name = slices.name(BUFFERS)
            entries = [entry_of(*item) for item in self._buffers.items()]
            files[name] = write_tensors(self._hidden / name, entries)
        for name, data in {slices.state: self._state, slices.name(CONFIG): self._config}.items():
            if data is not None:
                files[name] = write_durably(self._hidden / name, data)
        records = [record for of_layer in self._records for record in of_layer]
        kept = {record.name for record in records}
        parameters = [part for layer in stack.layout.layers for part in layer.slices]
        Manifest(
            dtype=stack.dtype,
            states=stack.states.kind,
            counters=self._counters,
            tensors=tuple(records),
            excluded=tuple(part.name for part in parameters if part.name not in kept),
            buffers={name: tuple(buffer.shape) for name, buffer in self._buffers.items()},
            groups=self._groups,
            files=files,
            versions=self._versions,
            model_parallel=slices,
        ).write(self._hidden)

    def _publish(self) -> None:
        directory.publish(self._hidden, self._save_dir / self._tag)
        if self._latest:
            directory.write_latest(self._save_dir, self._tag)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict has, each once, by name."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in transient_buffers(module)
    }
    yield from ((n, b) for n, b in model.named_buffers() if n not in transient)


def model_config(model: nn.Module) -> bytes | None:
    """The JSON of a Hugging Face model's configuration, from which an export needs no other
    directory; None for another model."""
    config: Any = getattr(model, "config", None)
    to_json: Callable[..., str] | None = getattr(config, "to_json_string", None)
    return None if to_json is None else to_json(use_diff=False).encode()


def named_groups(
    stack: Stack, optimizer: EngineOptimizer | None
) -> tuple[dict[str, Any], ...] | None:
    """The optimizer's live groups, with parameters by name and numbers that JSON knows."""
    if optimizer is None:
        return None
    names = {n.parameter: n.name for layer in stack.partition.layers for n in layer.parameters}
    return tuple(
        plain_group(group, [names[p] for p in group["params"] if p in names])
        for group in optimizer.param_groups
    )


def plain_group(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A parameter group of a manifest: hyper-parameters as JSON has them."""
    kept = {key: _plain(value) for key, value in group.items() if key != "params"}
    return {**kept, "params": names}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)
