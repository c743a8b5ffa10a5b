"""Saving: each layer's arrays to files, while they are not written.

Owns the contents of each file and the order of the files. Copies no array: bytes go from where they
lie to the file, through a piece of host memory where they lie on the GPU or in a file. The training
thread collects; the jobs run on it or on the io lane.

[Note: snapshot]

1. A job reads a layer after its newest update, and the layer's next update waits for the job.
2. So a save beside the next steps writes exactly the bytes that a save that stops them writes.
3. Buffers, counters and schedules are copied when the save is asked for.
4. A program that writes weights in place meanwhile waits for nothing: such a save fails.

[Note: one tag]

1. The leader makes the hidden directory, which all ranks must see.
2. Every rank writes its share of each layer into files of its own.
3. The ranks exchange where each item lies. The first rank of those that share slices of the model
   writes the small files and the manifest.
4. The leader publishes the directory. An error on any rank is raised on all, and leaves no trace.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from stronghold.checkpoint import directory
from stronghold.checkpoint.directory import Team
from stronghold.checkpoint.files import (
    NAMES,
    Entry,
    FileRecord,
    entry_of,
    write_durably,
    write_tensors,
)
from stronghold.checkpoint.manifest import (
    BUFFERS,
    CONFIG,
    LOW,
    WEIGHTS,
    Manifest,
    StoredPiece,
    TensorRecord,
    stored_as,
)
from stronghold.checkpoint.state import ClientState, pack_state
from stronghold.devices.base import Fence, surfacing
from stronghold.devices.lane_name import LaneName
from stronghold.errors import CheckpointError, ConfigError, LaneError
from stronghold.model.arrays import array_dtype, moment_arrays
from stronghold.model.layout import ParameterSlice
from stronghold.optim import DEFAULT
from stronghold.optim.states import items
from stronghold.plan.homes import GPU
from stronghold.plan.schedule import update_order
from stronghold.streaming.optimizer import EngineOptimizer
from stronghold.streaming.patches.modules import transient_buffers
from stronghold.streaming.stack import Stack

PACKAGES = ("stronghold", "deepspeed", "torch")


def versions() -> dict[str, str]:
    """Of the packages that made a checkpoint."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


class WrittenPiece(NamedTuple):
    """Items [begin, end) of one array of the parameter `name`, which one rank has written."""

    name: str
    array: str
    begin: int
    end: int
    file: str


class Written(NamedTuple):
    """The files of tensors that one rank has written."""

    files: dict[str, FileRecord]
    pieces: list[WrittenPiece]


class SavedParameter(NamedTuple):
    """One parameter of a save: its arrays, and the fields of its record without `pieces`."""

    part: ParameterSlice
    arrays: tuple[str, ...]
    described: dict[str, Any]


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
        self._written = Written({}, [])
        model = stack.partition.model
        self._buffers = {
            name: buffer.detach().to("cpu", copy=True).contiguous()
            for name, buffer in persistent_buffers(model)
        }
        slices = team.slices.size
        self._state = pack_state(client, counters, self._versions, model_parallel_size=slices)
        self._config = model_config(model)
        self._groups = named_groups(stack, optimizer)
        self._saved = [self._saved_parameters(i) for i in range(len(stack.host.layers))]
        self._cleanup = contextlib.ExitStack()  # removes the hidden directory, of the leader
        self._hidden = self._make_hidden()
        self._failure: BaseException | None = None
        self._jobs: list[Fence] = []
        self._published: Fence | None = None
        # As the next updates will come, so that they wait least.
        order = update_order(stack.plan.updates)
        self.order = [*order, *(i for i in range(len(self._saved)) if i not in order)]

    def _make_hidden(self) -> Path:
        """The hidden directory, which every rank sees."""
        team, existed = self._team, self._save_dir.exists()
        name = team.exchange(team.all_or_raise(self._lead), "directory")[0]
        path: Path = self._save_dir / name
        try:
            team.check_seen(path)
        except CheckpointError:
            self._cleanup.close()
            if team.leader and not existed:
                self._save_dir.rmdir()
            raise
        return path

    def _lead(self) -> str:
        """The name of the hidden directory that the leader makes; "" on other ranks."""
        if not self._team.leader:
            return ""
        hidden = directory.hidden_directory(self._save_dir, self._tag)
        return self._cleanup.enter_context(hidden).name

    def run(self) -> None:
        """Save on the calling thread, each layer after its pending update. Raises OSError, and then
        leaves no trace on disk."""
        for layer in self.order:
            self._write_guarded(layer, after=self._stack.host.layers[layer].wait)
        self._finish()

    def start(self) -> None:
        """Save on the io lane; `wait` raises its errors. Training may go on at once:
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
        except BaseException as error:  # queued jobs write nothing more
            self._failure = error
            lane.submit(f"drop {self._tag}", self._cleanup.close)
            raise
        self._published = lane.submit(f"publish {self._tag}", self._finish_guarded)

    @property
    def ended(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._published is not None and self._published.done

    def wait(self) -> None:
        """Block until a started save has ended. LaneError whose cause is the save's error."""
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
            return  # programs write such weights in their slot, and the arrays are not read there
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
        """Publish the files of every rank, if no rank has failed ([Note: one tag])."""
        team = self._team
        with self._cleanup:
            of_all = team.exchange(team.all_or_raise(self._end_of_jobs), "files and pieces")
            of_slices = team.of_slices(of_all)
            team.all_or_raise(lambda: self._describe(of_slices) if team.rank == 0 else None)
            team.all_or_raise(lambda: self._publish() if team.leader else None)

    def _end_of_jobs(self) -> Written:
        for job in self._jobs:  # a job whose update failed never ran: its fence raises
            job.wait()
        if self._failure is not None:
            raise self._failure
        return self._written

    # -- one layer --------------------------------------------------------------------------------
    def _saved_parameters(self, index: int) -> list[SavedParameter]:
        stack, state = self._stack, self._stack.host.layers[index]
        named = stack.partition.layers[index].parameters
        optimizers = stack.steps.optimizers_of(state)
        saved = []
        for k, part in enumerate(stack.layout.layers[index].slices):
            if self._exclude_frozen and not part.trainable:
                continue
            dtype = state.sections[k].dtype
            if dtype not in NAMES:
                raise ConfigError(
                    f"{part.name} is {dtype}, which a checkpoint's "
                    f"files cannot hold: expected one of {', '.join(map(str, NAMES))}. Show its "
                    "bytes as torch.uint8 in the module, or save without what is frozen "
                    "(exclude_frozen_parameters=True)"
                )
            described = {
                "name": part.name,
                "aliases": named[k].aliases,
                "shape": part.shape,
                "dtype": dtype,
                "trainable": part.trainable,
                "step": state.optimizer.counts[k],
                "optimizer": optimizers.get(k, DEFAULT).name,
            }
            arrays = tuple(self._arrays_of(index, part))
            saved.append(SavedParameter(part=part, arrays=arrays, described=described))
        return saved

    def _arrays_of(self, index: int, part: ParameterSlice) -> Iterator[str]:
        """The arrays that the parameter has now."""
        host = self._stack.host
        yield WEIGHTS
        if part.trainable:
            for array in host.formats[part.format].trained.dtypes:
                if array != WEIGHTS and host.access.has(index, array):
                    yield array

    def _write_layer(self, index: int) -> None:
        kinds = {
            "weights": (WEIGHTS,),
            "masters": (LOW,),
            "moments": moment_arrays(self._stack.host.formats),
        }
        rank = f"-{self._team.rank:05d}" if self._team.num_ranks > 1 else ""
        for kind, arrays in kinds.items():
            file = self._team.slices.name(f"{kind}-{index:05d}{rank}.safetensors")
            entries = []
            for saved in self._saved[index]:
                for array in (array for array in arrays if array in saved.arrays):
                    for begin, end in self._shares(index, saved.part):
                        entries.append(self._entry(index, array, saved.part, begin, end))
                        span = items(array, begin, end)
                        piece = WrittenPiece(saved.part.name, array, span.start, span.stop, file)
                        self._written.pieces.append(piece)
            if entries:
                self._written.files[file] = write_tensors(self._hidden / file, entries)

    def _shares(self, index: int, part: ParameterSlice) -> Iterator[tuple[int, int]]:
        """This rank's elements of a parameter, counted from its first: none, or one span."""
        state = self._stack.host.layers[index]
        if part.numel == 0 and self._team.rank == 0:
            yield 0, 0
        for low, high in state.shards.within(state.layout, part.offset, part.offset + part.numel):
            yield low - part.offset, high - part.offset

    def _entry(self, index: int, array: str, part: ParameterSlice, begin: int, end: int) -> Entry:
        """Elements [begin, end) of a parameter's array, from where they lie: host memory, or piece
        by piece from a file or the GPU."""
        host = self._stack.host
        span = items(array, begin, end)
        name, shape = stored_as(array, part.name, part.shape, span.start, span.stop)
        dtype = array_dtype(host.formats[part.format], array)
        first, last = part.offset + begin, part.offset + end
        pieces = partial(host.access.pieces, index, (array,), first, last)
        return Entry(
            name=name,
            dtype=dtype,
            shape=shape,
            pieces=lambda: (views[array] for _, views in pieces()),
        )

    # -- the end ----------------------------------------------------------------------------------
    def _describe(self, of_ranks: list[Written]) -> None:
        """Write the small files and the manifest."""
        stack, slices = self._stack, self._team.slices
        files = {name: record for one in of_ranks for name, record in one.files.items()}
        if self._buffers:
            name = slices.name(BUFFERS)
            entries = [entry_of(*item) for item in self._buffers.items()]
            files[name] = write_tensors(self._hidden / name, entries)
        for name, data in {slices.state: self._state, slices.name(CONFIG): self._config}.items():
            if data is not None:
                files[name] = write_durably(self._hidden / name, data)
        pieces: dict[str, dict[str, tuple[StoredPiece, ...]]] = {}
        for name, array, begin, end, file in sorted(p for one in of_ranks for p in one.pieces):
            arrays = pieces.setdefault(name, {})
            piece = StoredPiece(file=file, begin=begin, end=end)
            arrays[array] = (*arrays.get(array, ()), piece)
        records = [
            TensorRecord(**saved.described, pieces=pieces[saved.part.name])
            for of_layer in self._saved
            for saved in of_layer
        ]
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
