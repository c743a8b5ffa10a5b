"""Saving: the arrays of each layer become a file, between two updates of the layer.

[Note: beside training] An asynchronous save writes the bytes of one that stops training.
1. The constructor copies what is small: buffers, counters, schedules, numbers of updates.
2. A job of the io lane reads a layer's arrays after the layer's newest update. The record of the
   layer has the job as a reader. So the next update waits for it, and so does a program that asks
   for the parameters.
3. An error of the disk is kept for the end of the save: it must not fail an update.
4. If an update failed before its layer was read, the job never ran, and the save has failed.

[Note: one tag]
1. The leader makes a hidden directory, which all ranks must see.
2. Every rank writes the files of its layers. The ranks exchange the records of these.
3. The leader writes the small files and the manifest, and publishes the directory (`directory`).
4. An error on any rank is raised on all, and leaves no trace.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stronghold.checkpoint import directory
from stronghold.checkpoint.directory import CheckpointRanks
from stronghold.checkpoint.files import (
    NAMES,
    NUM_THREADS,
    FileRecord,
    TensorHeader,
    bytes_of,
    small_record,
    write_durably,
    write_tensors,
)
from stronghold.checkpoint.format import BUFFERS, CONFIG, STATE, WEIGHTS, Manifest, StoredParameter
from stronghold.checkpoint.state import ClientState, pack_state
from stronghold.devices.fences import Fence, LaneName, surfacing
from stronghold.devices.threads import Workers
from stronghold.errors import ConfigError, LaneError
from stronghold.model.costs import DTYPES
from stronghold.model.partition import Partition
from stronghold.train.job import Job
from stronghold.train.layer import Layer
from stronghold.train.optimizer import EngineOptimizer

PACKAGES = ("stronghold", "deepspeed", "torch")


class SavedArray(NamedTuple):
    """One array of one parameter, and its bytes in an array of the layer."""

    header: TensorHeader
    array: str
    extent: slice


class SavedLayer(NamedTuple):
    """The saved parameters of a layer. `tensors`: array by array, in the order of their extents."""

    layer: Layer
    file: str
    parameters: list[StoredParameter]
    tensors: list[SavedArray]


# The bytes of a layer's arrays, block by block, with the place of each (`Arrays.blocks`).
Sources = Mapping[str, Iterator[tuple[int, Tensor]]]


class Save:
    """One checkpoint on its way to disk. Call `run`, or `start` and later `wait`.

    path            directory of the tag
    client          state without tensors
    counters        the engine's, by name
    exclude_frozen  leave frozen parameters out
    team            the ranks that save together
    latest          make the file `latest` name the tag
    """

    def __init__(
        self,
        job: Job,
        optimizer: EngineOptimizer | None,
        path: Path,
        *,
        client: ClientState,
        counters: dict[str, int],
        exclude_frozen: bool,
        team: CheckpointRanks,
        latest: bool,
    ) -> None:
        self._job, self._team, self._latest = job, team, latest
        self._path = path
        self._counters, self._versions = counters, versions()
        self._buffers = {
            name: buffer.detach().to("cpu", copy=True).contiguous()
            for name, buffer in persistent_buffers(job.partition)
        }
        self._small_files = {
            STATE: pack_state(client, counters, self._versions),
            CONFIG: model_config(job.partition.model),
        }
        self._groups = named_groups(job.partition, optimizer)
        self._layers: list[SavedLayer] = []
        self._excluded: list[str] = []
        for layer in job.layers:
            self._add(layer, exclude_frozen=exclude_frozen)
        owns = job.trainer.arrays.owns
        self._owned = [saved for saved in self._layers if owns(saved.layer)]  # this rank's files
        self._files: dict[str, FileRecord] = {}
        self._failure: BaseException | None = None
        self._jobs: list[Fence] = []
        self._published: Fence | None = None
        with contextlib.ExitStack() as undo:  # it removes the hidden directory, on the leader
            self._threads: Executor = undo.enter_context(Workers("save", NUM_THREADS))
            self._hidden = self._make_hidden(undo)
            self._cleanup = undo.pop_all()

    def _add(self, layer: Layer, *, exclude_frozen: bool) -> None:
        """List what is saved of a layer, as it is now."""
        names = {n.parameter: n.aliases for n in self._job.partition.layers[layer.index].parameters}
        updates, kind = self._job.trainer.updates, self._job.section.states
        file = f"layer-{layer.index:05d}.safetensors"
        saved = SavedLayer(layer, file, [], [])
        for k, parameter in enumerate(layer.parameters):
            optimizer = updates.optimizers(layer)[k] if k < layer.num_trained else None
            if optimizer is None and exclude_frozen:
                self._excluded.append(layer.names[k])
                continue
            if layer.dtypes[k] not in NAMES:
                raise ConfigError(
                    f"{layer.names[k]} is {layer.dtypes[k]}, which a checkpoint's files cannot "
                    f"hold: expected one of {', '.join(map(str, NAMES))}. Show its bytes as "
                    "torch.uint8 in the module, or save without what is frozen "
                    "(exclude_frozen_parameters=True)"
                )
            arrays = {WEIGHTS: WEIGHTS} if optimizer is None else layer.arrays_of(optimizer)
            stored = StoredParameter(
                names=names[parameter],
                shape=tuple(parameter.shape),
                dtype=layer.dtypes[k],
                file=file,
                arrays=tuple(arrays),
                step=0 if optimizer is None else int(updates.counts[layer][k]),
                optimizer=None if optimizer is None else optimizer.name,
            )
            saved.parameters.append(stored)
            for own, array in arrays.items():
                header = stored.header(own, kind)
                saved.tensors.append(SavedArray(header, array, layer.extent(array, k)))
        if saved.parameters:
            order = [WEIGHTS, *(layer.states.dtypes if layer.states is not None else ())]
            saved.tensors.sort(key=lambda tensor: order.index(tensor.array))
            self._layers.append(saved)

    def _make_hidden(self, undo: contextlib.ExitStack) -> Path:
        """The hidden directory, which every rank sees. `undo` removes what the leader made."""
        team, parent = self._team, self._path.parent
        if team.leader and not parent.exists():
            undo.callback(_remove_empty, parent)
        name = team.all_or_raise(
            lambda: (
                undo.enter_context(directory.hidden_directory(self._path)).name
                if team.leader
                else ""
            )
        )
        hidden = parent / str(team.exchange(name, "directory")[0])
        team.check_seen(hidden)
        return hidden

    # -- one thread, or beside training -----------------------------------------------------------
    def run(self) -> None:
        """Save on the calling thread. Waits for pending updates, and for the disk.

        Raises OSError, and then leaves no trace on disk.
        """
        for saved in self._owned:
            self._write_guarded(saved, self._sources(saved), waits=True)
        self._finish()

    def start(self) -> None:
        """Queue the save on the io lane. Training may go on at once ([Note: beside training]).

        `wait` raises the save's errors.
        """
        lane = self._job.device.lane(LaneName.IO)
        try:
            for saved in self._owned:
                work = partial(self._write_guarded, saved, self._sources(saved))
                record = saved.layer.weight_record
                name = f"save {saved.layer.name}"
                # The users, too: the spill of moments is one.
                self._jobs.append(lane.submit(name, work, record.users, reads=(record,)))
        except BaseException as error:  # queued jobs write nothing more
            self._failure = error
            lane.submit(f"drop {self._path.name}", self._cleanup.close)
            raise
        self._published = lane.submit(f"publish {self._path.name}", self._finish_guarded)

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
        if isinstance(self._failure, LaneError):  # an update failed: layers of different steps
            raise surfacing(self._failure)
        if self._failure is not None:
            operation = f"publish {self._path.name}"
            raise LaneError(LaneName.IO, operation, self._failure) from self._failure

    def _sources(self, saved: SavedLayer) -> Sources:
        """The bytes of the layer's arrays. A step may exchange the layer's memory before they are
        written: they are those of now."""
        arrays = dict.fromkeys(tensor.array for tensor in saved.tensors)
        return {array: self._job.trainer.arrays.blocks(saved.layer, array) for array in arrays}

    def _write_guarded(self, saved: SavedLayer, sources: Sources, *, waits: bool = False) -> None:
        """Write a layer, and keep its error for `_finish`: every rank comes to the end."""
        if self._failure is not None:
            return
        try:
            if waits:
                saved.layer.weight_record.wait()
            headers = [tensor.header for tensor in saved.tensors]
            path = self._hidden / saved.file
            self._files[saved.file] = write_tensors(
                path, headers, _data(saved, sources), self._threads
            )
        except BaseException as error:
            self._failure = error

    # -- the end ----------------------------------------------------------------------------------
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
            of_all = team.exchange(team.all_or_raise(self._end_of_jobs), "files")
            team.all_or_raise(self._describe, of_all)
            team.all_or_raise(self._publish)

    def _end_of_jobs(self) -> dict[str, FileRecord]:
        for job in self._jobs:  # a job whose update failed never ran: its fence raises
            job.wait()
        if self._failure is not None:
            raise self._failure
        return self._files

    def _describe(self, of_ranks: list[dict[str, FileRecord]]) -> None:
        """Write the small files and the manifest, on the leader."""
        if not self._team.leader:
            return
        files: dict[str, FileRecord] = {}
        for of_rank in of_ranks:
            files |= of_rank
        if self._buffers:
            headers = [TensorHeader(n, b.dtype, tuple(b.shape)) for n, b in self._buffers.items()]
            data = map(bytes_of, self._buffers.values())
            files[BUFFERS] = write_tensors(self._hidden / BUFFERS, headers, data, self._threads)
        for name, content in self._small_files.items():
            if content is not None:
                write_durably(self._hidden / name, content)
                files[name] = small_record(content)
        Manifest(
            versions=self._versions,
            dtype=NAMES[DTYPES[self._job.precision]],
            states=self._job.section.states,
            counters=self._counters,
            groups=self._groups,
            excluded=tuple(self._excluded),
            buffers={name: tuple(buffer.shape) for name, buffer in self._buffers.items()},
            parameters=tuple(one for saved in self._layers for one in saved.parameters),
            files=dict(sorted(files.items())),
        ).write(self._hidden)

    def _publish(self) -> None:
        """Make the tag visible, on the leader, and then `latest`."""
        if self._team.leader:
            directory.publish(self._hidden, self._path)
            if self._latest:
                directory.write_latest(self._path.parent, self._path.name)


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


# -- what is small --------------------------------------------------------------------------------
def versions() -> dict[str, str]:
    """Return the versions of the packages that make a checkpoint."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def persistent_buffers(partition: Partition) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for each buffer that a state dict has, once."""
    transient: set[str] = set()
    for prefix, module in partition.model.named_modules():
        for name in module._non_persistent_buffers_set:
            transient.add(f"{prefix}.{name}" if prefix else name)
    for name, buffer in partition.model.named_buffers():
        if name not in transient:
            yield name, buffer


def _data(saved: SavedLayer, sources: Sources) -> Iterator[Tensor]:
    """The bytes of the layer's tensors, in order."""
    for array, blocks in sources.items():
        extents = [tensor.extent for tensor in saved.tensors if tensor.array == array]
        for begin, block in blocks:
            for extent in extents:
                first = max(extent.start - begin, 0)
                last = min(extent.stop - begin, block.numel())
                if first < last:
                    yield block[first:last]


def model_config(model: nn.Module) -> bytes | None:
    """Return the JSON of a Hugging Face model's configuration, for exports of the checkpoint.

    None for another model.
    """
    config: Any = getattr(model, "config", None)
    to_json: Callable[..., str] | None = getattr(config, "to_json_string", None)
    return None if to_json is None else to_json(use_diff=False).encode()


def named_groups(
    partition: Partition, optimizer: EngineOptimizer | None
) -> tuple[dict[str, Any], ...] | None:
    """Return the optimizer's live groups, with parameters by name and values as JSON has them."""
    if optimizer is None:
        return None
    names: dict[torch.Tensor, str] = {}
    for layer in partition.layers:
        for named in layer.parameters:
            names[named.parameter] = named.name
    groups = []
    for group in optimizer.param_groups:
        listed = [names[parameter] for parameter in group["params"] if parameter in names]
        groups.append(plain_group(group, listed))
    return tuple(groups)


def plain_group(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return a parameter group for a manifest: names, and hyper-parameters as JSON has them."""
    kept = {key: _plain(value) for key, value in group.items() if key != "params"}
    return {**kept, "params": names}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)
