"""Saving: writes each layer's arrays to files, between two updates of the layer.

Owns the contents of each file and the order of the files. It copies no array in host memory. Bytes
on the GPU or in a file pass a piece of host memory. The training thread collects. Jobs run on that
thread or on the io lane.

[Note: snapshot] The hazard: a layer's next update writes arrays that a save reads.

1. The constructor copies buffers, counters and schedules.
2. A job reads a layer after the layer's newest update. The next update waits for the job.
3. A gate may commit an early update before the job runs: other memory becomes the layer's arrays.
   The job reads the memory of step 1. The next early update writes that memory, and waits for the
   job.
4. So an asynchronous save writes the same bytes as a save that stops training.
5. A program that writes weights in place waits for no job. A save fails if its versions differ.

[Note: one tag]

1. The leader makes the hidden directory, which all ranks must see.
2. Every rank writes its share of each layer into files of its own.
3. The ranks exchange the file of each item (all-gather). The leader writes the small files and the
   manifest.
4. The leader publishes the directory. An error on any rank is raised on all, and leaves no trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stronghold.checkpoint import directory
from stronghold.checkpoint.directory import CheckpointRanks
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
    STATE,
    WEIGHTS,
    Manifest,
    StoredPiece,
    TensorRecord,
    stored_as,
)
from stronghold.checkpoint.saving import model_config, named_groups, persistent_buffers, versions
from stronghold.checkpoint.state import ClientState, pack_state
from stronghold.devices.base import Fence, surfacing
from stronghold.devices.lane_name import LaneName
from stronghold.errors import CheckpointError, ConfigError, LaneError
from stronghold.memory.access import ArrayAccess
from stronghold.model.arrays import array_dtype, moment_arrays
from stronghold.model.layout import ParameterSlice
from stronghold.optim import DEFAULT
from stronghold.optim.states import items
from stronghold.plan.homes import GPU
from stronghold.plan.schedule import update_order
from stronghold.streaming.optimizer import EngineOptimizer
from stronghold.streaming.stack import Stack


class WrittenPiece(NamedTuple):
    """Items [begin, end) of one array of the parameter `name`, in the file of one rank."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldItems:
    """`Entry.pieces` of one array of a layer: elements [begin, end), wherever the array lies.

    `memory`: as in `ArrayAccess.pieces`.
    """

    access: ArrayAccess
    layer: int
    array: str
    begin: int
    end: int
    memory: Mapping[str, torch.Tensor] | None

    def __call__(self) -> Iterator[torch.Tensor]:
        for _, views in self.access.pieces(
            self.layer, (self.array,), self.begin, self.end, memory=self.memory
        ):
            yield views[self.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerJob:
    """Job of the io lane that writes one layer, as it was when the job was queued.

    versions  of its parameters
    memory    its arrays in memory, by name
    """

    save: Save
    layer: int
    versions: list[int]
    memory: Mapping[str, torch.Tensor]

    def __call__(self) -> None:
        self.save.write_guarded(self.layer, self)


class Save:
    """One checkpoint on its way to disk.

    Call `run`, or `start` and later `wait`.

    path            directory of the tag
    client          state without tensors
    counters        the engine's counters, by name
    exclude_frozen  leave frozen parameters out
    team            the ranks that save together
    latest          make the file `latest` name the tag
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: EngineOptimizer | None,
        path: Path,
        *,
        client: ClientState,
        counters: dict[str, int],
        exclude_frozen: bool,
        team: CheckpointRanks,
        latest: bool,
    ) -> None:
        self._stack = stack
        self._team = team
        self._save_dir, self._tag = path.parent, path.name
        self._latest = latest
        self._counters = counters
        self._exclude_frozen = exclude_frozen
        self._versions = versions()
        self._written = Written({}, [])
        model = stack.partition.model
        self._buffers = {
            name: buffer.detach().to("cpu", copy=True).contiguous()
            for name, buffer in persistent_buffers(stack.partition)
        }
        self._state = pack_state(client, counters, self._versions)
        self._config = model_config(model)
        self._groups = named_groups(stack.partition, optimizer)
        num_layers = len(stack.host.layers)
        self._saved = [self._saved_parameters(layer) for layer in range(num_layers)]
        # removes the hidden directory, of the leader
        self._cleanup = contextlib.ExitStack()
        self._hidden = self._make_hidden()
        self._failure: BaseException | None = None
        self._jobs: list[Fence] = []
        self._published: Fence | None = None
        # The order of the next updates, so that they wait least. Then layers without an update.
        updated = update_order(stack.plan.updates)
        others = [layer for layer in range(num_layers) if layer not in updated]
        self.order = [*updated, *others]

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
        """Save on the calling thread. Waits for each layer's pending update, and for the disk.

        Raises OSError, and then leaves no trace on disk.
        """
        for layer in self.order:
            self.write_guarded(layer)
        self._finish()

    def start(self) -> None:
        """Queue the save on the io lane. Training may go on at once ([Note: snapshot]).

        `wait` raises the save's errors.
        """
        stack = self._stack
        lane = stack.device.lane(LaneName.IO)
        try:
            for layer in self.order:
                state = stack.host.layers[layer]
                name = f"save {state.layout.name or 'root'}"
                work = _LayerJob(
                    save=self,
                    layer=layer,
                    versions=stack.runtime.versions_of(layer),
                    memory=state.all_arrays(),
                )
                # The layer's next update waits for this reader: a snapshot without a copy.
                reads = state.records_of(state.changed)
                self._jobs.append(lane.submit(name, work, reads=reads))
        except BaseException as error:  # queued jobs write nothing more
            self._failure = error
            lane.submit(f"drop {self._tag}", self._cleanup.close)
            raise
        self._published = lane.submit(f"publish {self._tag}", self._finish_guarded)

    @property
    def ended(self) -> bool:
        """True if a started save has ended, so that `wait` returns or raises at once."""
        return self._published is not None and self._published.done

    def wait(self) -> None:
        """Block until a started save has ended.

        Raises LaneError, whose cause is the save's error.
        """
        if self._published is not None:
            self._published.wait()
        # an update failed: layers of different steps
        if isinstance(self._failure, LaneError):
            raise surfacing(self._failure)
        if self._failure is not None:
            raise LaneError(LaneName.IO, f"publish {self._tag}", self._failure) from self._failure

    def write_guarded(self, layer: int, job: _LayerJob | None = None) -> None:
        """Write a layer, and keep its error for `_finish`.

        So no update fails with the save, and every rank comes to the end. `job`: the layer at
        `start`. None: wait for the layer's pending update, and write the layer as it is then.
        """
        if self._failure is not None:
            return
        try:
            if job is None:
                self._stack.host.layers[layer].wait()
                self._write_layer(layer, None)
            else:
                self._write_layer(layer, job.memory)
                self._check_unwritten(layer, job.versions)
        except BaseException as error:
            self._failure = error

    def _check_unwritten(self, layer: int, versions: list[int]) -> None:
        """Raise ConfigError if the program has written a parameter since `start`."""
        stack = self._stack
        state = stack.host.layers[layer]
        if layer in stack.plan.resident and state.home is not GPU:
            # a program writes such weights in their slot, and the save reads host arrays
            return
        present = stack.runtime.versions_of(layer)
        for part, before, now in zip(state.layout.slices, versions, present, strict=True):
            if before != now:
                raise ConfigError(
                    f"{part.name} was written in place while a checkpoint was saved beside "
                    "training, which would have values of two states: call "
                    "engine.wait_for_checkpoint() before such writes, or set "
                    "stronghold.async_checkpoint to false"
                )

    def _finish_guarded(self) -> None:
        """Finish, and keep the error. An error of the disk must not end the lane."""
        try:
            self._finish()
        except BaseException as error:
            self._failure = error

    def _finish(self) -> None:
        """Publish the files of every rank, if no rank has failed ([Note: one tag])."""
        team = self._team
        with self._cleanup:
            of_all = team.exchange(team.all_or_raise(self._end_of_jobs), "files and pieces")
            team.all_or_raise(self._describe, of_all)
            team.all_or_raise(self._publish)

    def _end_of_jobs(self) -> Written:
        """Wait for this rank's jobs. Returns its files, or raises the first error."""
        for job in self._jobs:  # a job whose update failed never ran: its fence raises
            job.wait()
        if self._failure is not None:
            raise self._failure
        return self._written

    # -- one layer --------------------------------------------------------------------------------
    def _saved_parameters(self, index: int) -> list[SavedParameter]:
        """The parameters of a layer that are saved. ConfigError for a dtype that no file has."""
        stack = self._stack
        state = stack.host.layers[index]
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
        """Names of the arrays that the parameter has now."""
        host = self._stack.host
        yield WEIGHTS
        if part.trainable:
            for array in host.formats[part.format].trained.dtypes:
                if array != WEIGHTS and host.access.has(index, array):
                    yield array

    def _write_layer(self, index: int, memory: Mapping[str, torch.Tensor] | None) -> None:
        """Write this rank's share of a layer, in a file for each kind of arrays.

        `memory`: as in `ArrayAccess.pieces`.
        """
        kinds = {
            "weights": (WEIGHTS,),
            "masters": (LOW,),
            "moments": moment_arrays(self._stack.host.formats),
        }
        rank = f"-{self._team.rank:05d}" if self._team.num_ranks > 1 else ""
        for kind, arrays in kinds.items():
            file = f"{kind}-{index:05d}{rank}.safetensors"
            entries = []
            for saved in self._saved[index]:
                for array in arrays:
                    if array not in saved.arrays:
                        continue
                    for begin, end in self._shares(index, saved.part):
                        entries.append(self._entry(index, array, saved.part, begin, end, memory))
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

    def _entry(
        self,
        index: int,
        array: str,
        part: ParameterSlice,
        begin: int,
        end: int,
        memory: Mapping[str, torch.Tensor] | None,
    ) -> Entry:
        """Entry of a parameter's elements [begin, end) of an array.

        Its pieces are views of host memory, or copies from a file or the GPU.
        """
        host = self._stack.host
        span = items(array, begin, end)
        name, shape = stored_as(array, part.name, part.shape, span.start, span.stop)
        dtype = array_dtype(host.formats[part.format], array)
        pieces = _HeldItems(
            access=host.access,
            layer=index,
            array=array,
            begin=part.offset + begin,
            end=part.offset + end,
            memory=memory,
        )
        return Entry(name=name, dtype=dtype, shape=shape, pieces=pieces)

    # -- the end ----------------------------------------------------------------------------------
    def _describe(self, of_ranks: list[Written]) -> None:
        """Write the small files and the manifest, on the leader."""
        if not self._team.leader:
            return
        stack = self._stack
        files: dict[str, FileRecord] = {}
        for written in of_ranks:
            files.update(written.files)
        files.update(self._write_small_files())
        pieces = _pieces_by_name(of_ranks)
        records = []
        for layer in self._saved:
            for saved in layer:
                records.append(TensorRecord(**saved.described, pieces=pieces[saved.part.name]))
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
        ).write(self._hidden)

    def _write_small_files(self) -> dict[str, FileRecord]:
        """Write buffers, state and configuration. Returns their records by name."""
        files: dict[str, FileRecord] = {}
        if self._buffers:
            entries = [entry_of(*item) for item in self._buffers.items()]
            files[BUFFERS] = write_tensors(self._hidden / BUFFERS, entries)
        for name, data in {STATE: self._state, CONFIG: self._config}.items():
            if data is not None:
                files[name] = write_durably(self._hidden / name, data)
        return files

    def _publish(self) -> None:
        """Make the tag visible, on the leader, and then `latest`."""
        if not self._team.leader:
            return
        directory.publish(self._hidden, self._save_dir / self._tag)
        if self._latest:
            directory.write_latest(self._save_dir, self._tag)


def _pieces_by_name(of_ranks: list[Written]) -> dict[str, dict[str, tuple[StoredPiece, ...]]]:
    """The pieces of all ranks by parameter and array, in the order of their items."""
    written_pieces: list[WrittenPiece] = []
    for written in of_ranks:
        written_pieces += written.pieces
    pieces: dict[str, dict[str, tuple[StoredPiece, ...]]] = {}
    for name, array, begin, end, file in sorted(written_pieces):
        arrays = pieces.setdefault(name, {})
        piece = StoredPiece(file=file, begin=begin, end=end)
        arrays[array] = (*arrays.get(array, ()), piece)
    return pieces
