"""Loading: a checkpoint's files become the arrays of the layers, wherever these lie.

[Note: verified first]
1. `Load` reads the manifest, and matches names and shapes.
2. It reads every file that is needed for its checksums. Ranks divide the files.
3. It unpacks the state file. Every error so far leaves memory as it was.
4. `apply` writes. Until it ends, nothing else can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stronghold.checkpoint.directory import CheckpointRanks
from stronghold.checkpoint.format import BUFFERS, LOW, STATE, WEIGHTS, StoredParameter
from stronghold.checkpoint.saving import named_groups, persistent_buffers
from stronghold.checkpoint.state import unpack_state
from stronghold.checkpoint.tag import PIECE_NUMEL, Tag
from stronghold.errors import ConfigError, ErrorPage, did_you_mean
from stronghold.optim.contract import Optimizer
from stronghold.optim.states import LOW_DTYPE, States, group_size
from stronghold.train.job import Job
from stronghold.train.layer import Layer
from stronghold.train.optimizer import EngineOptimizer

SHOWN = 5  # names in an error; the others are counted
ANEW = "pass load_optimizer_states=False to load the weights and start the optimizer anew"


class Match(NamedTuple):
    """A parameter of the model, by its position in a layer, and its record in the checkpoint."""

    layer: Layer
    position: int
    saved: StoredParameter
    optimizer: Optimizer | None  # None: the model's parameter is frozen

    @property
    def name(self) -> str:
        return self.layer.names[self.position]

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtypes[self.position]

    @property
    def states(self) -> States | None:
        if self.optimizer is None:
            return None
        assert self.layer.states is not None
        return self.layer.states.of(self.optimizer.moments)

    def name_of(self, array: str) -> str | None:
        """The optimizer's name for an array of the layer; None: it does not use the array."""
        if self.optimizer is None:
            return WEIGHTS if array == WEIGHTS else None
        names = {shared: own for own, shared in self.layer.arrays_of(self.optimizer).items()}
        return names.get(array)

    def dtype_of(self, own: str) -> torch.dtype:
        states = self.states
        return self.dtype if states is None or own == WEIGHTS else states.dtypes[own]


class Load:
    """One verified checkpoint, ready to be written into `job` ([Note: verified first]).

    It holds the files open until `close`.

    optimizer         None: a load of weights alone
    names_must_match  DeepSpeed's strictness; shapes always must match
    trusted           as for `unpack_state`
    mark              another number for a tag that takes this one's place

    Raises CheckpointError for damaged files, and ConfigError for a checkpoint of another model.
    """

    def __init__(
        self,
        path: Path,
        job: Job,
        optimizer: EngineOptimizer | None,
        *,
        team: CheckpointRanks,
        names_must_match: bool,
        trusted: bool,
    ) -> None:
        self._path, self._job, self._optimizer = path, job, optimizer
        self._tag = Tag(path)
        self.mark, self.manifest = self._tag.mark, self._tag.manifest
        try:
            self._by_name = {
                name: saved for saved in self.manifest.parameters for name in saved.names
            }
            self._matches = self._match(strict=names_must_match)
            if optimizer is not None:
                self._check_optimizer(optimizer)
            self._check_files(team)
            self.state = unpack_state(self._tag.file(STATE), trusted=trusted)
        except BaseException:
            self._tag.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._tag.close()

    # -- checks -----------------------------------------------------------------------------------
    def _match(self, *, strict: bool) -> list[Match]:
        """Every parameter that model and checkpoint both have.

        Raises ConfigError for another shape or dtype and, if `strict`, for names that differ.
        """
        known: set[str] = set()
        matches, missing = [], []
        for layer, part in zip(self._job.layers, self._job.partition.layers, strict=True):
            optimizers = self._job.trainer.updates.optimizers(layer)
            names = {named.parameter: named.aliases for named in part.parameters}
            for k, parameter in enumerate(layer.parameters):
                own = names[parameter]
                known.update(own)
                saved = next((self._by_name[name] for name in own if name in self._by_name), None)
                if saved is not None:
                    trains = k < layer.num_trained
                    match = Match(layer, k, saved, optimizers[k] if trains else None)
                    self._check_match(match)
                    matches.append(match)
                elif k < layer.num_trained or layer.names[k] not in self.manifest.excluded:
                    missing.append(layer.names[k])
        buffers = dict(persistent_buffers(self._job.partition))
        extra = [one.name for one in self.manifest.parameters if known.isdisjoint(one.names)]
        missing += sorted(buffers.keys() - self.manifest.buffers.keys())
        extra += sorted(self.manifest.buffers.keys() - buffers.keys())
        if strict and (missing or extra):
            raise ConfigError(self._mismatch(missing, extra), page=ErrorPage.OTHER_MODEL)
        for name, buffer in buffers.items():
            self._check_shape(name, self.manifest.buffers.get(name, buffer.shape), buffer)
        return matches

    def _check_match(self, match: Match) -> None:
        """Raise ConfigError for another shape, and for values that mean nothing in the dtype."""
        name, saved = match.name, match.saved
        self._check_shape(name, saved.shape, match.layer.parameters[match.position])
        if saved.dtype is not match.dtype and not {saved.dtype, match.dtype} <= LOW_DTYPE.keys():
            raise ConfigError(
                f"{self._path}: {name} is {saved.dtype} there, and {match.dtype} in this model: "
                "quantise the model as it was when it was saved",
                page=ErrorPage.OTHER_MODEL,
            )

    def _check_shape(self, name: str, shape: Sequence[int], live: Tensor) -> None:
        if tuple(shape) != tuple(live.shape):
            raise ConfigError(
                f"{self._path}: {name} has the shape {list(shape)} there, and {list(live.shape)} "
                "in this model",
                page=ErrorPage.OTHER_MODEL,
            )

    def _mismatch(self, missing: list[str], extra: list[str]) -> str:
        """The error's message for names that only one of model and checkpoint has."""
        lines = [f"{self._path} is not of this model:"]
        if missing:
            hint = did_you_mean(missing[0], extra) if extra else ""
            lines.append(f"it has no {listed(missing)}.{hint}")
        if extra:
            lines.append(f"this model has no {listed(extra)}.")
        lines.append(
            f"{len(self._by_name) + len(self.manifest.buffers)} names are there; with "
            "load_module_strict=False those that match are loaded"
        )
        return " ".join(lines)

    def _check_optimizer(self, optimizer: EngineOptimizer) -> None:
        """Raise an error unless saved groups, moments and hyper-parameters fit the optimizer."""
        groups = self.manifest.groups
        if groups is None:
            raise ConfigError(f"{self._path} was saved by an engine without an optimizer; {ANEW}")
        self._check_moments()
        first = {name: saved.name for name, saved in self._by_name.items()}
        saved_names = [set(group["params"]) for group in groups]
        live_names = [
            {first.get(name, name) for name in group["params"]}
            for group in named_groups(self._job.partition, optimizer) or ()
        ]
        if saved_names != live_names:
            different = sorted(set().union(*saved_names) ^ set().union(*live_names))
            hint = f"; only one of them has {listed(different)}" if different else ""
            raise ConfigError(
                f"{self._path}: its parameter groups hold {list(map(len, saved_names))} parameters "
                f"and this optimizer's {list(map(len, live_names))}{hint}, or in another order; "
                f"{ANEW}"
            )

    def _check_moments(self) -> None:
        """Raise ConfigError if moments of another optimizer than the parameter's were saved."""
        for match in self._matches:
            own, saved = match.optimizer, match.saved
            if own is None or not saved.has_moments or not saved.step:
                continue
            if saved.optimizer != own.name:
                raise ConfigError(
                    f"{self._path}: {match.name} was updated by {saved.optimizer}, and is updated "
                    f"by {own.name} here; {ANEW}"
                )
            if not own.moments:
                raise ConfigError(
                    f"{self._path}: {match.name} has moments of {saved.optimizer} there, and {own} "
                    f"keeps none; {ANEW}"
                )

    def _check_files(self, team: CheckpointRanks) -> None:
        """Raise CheckpointError unless the arrays that are needed are as they were written."""
        files = sorted({match.saved.file for match in self._matches})[team.rank :: team.num_ranks]
        saved = [match.saved for match in self._matches if match.saved.file in files]
        self._tag.check(saved, {WEIGHTS} if self._optimizer is None else None, [STATE])

    # -- writing ----------------------------------------------------------------------------------
    def apply(self, custom: Callable[..., Any] | None = None) -> None:
        """Write the checkpoint into memory. The caller has waited for all operations.

        It writes weights and buffers. With an optimizer it writes masters, moments, numbers of
        updates and hyper-parameters too. `custom(src=state_dict, dst=model)` places the weights in
        its place, as in DeepSpeed: masters then become these weights.

        Waits for the disk.
        """
        job, loads_states = self._job, self._optimizer is not None
        if custom is not None:
            custom(src=self._state_dict(), dst=job.partition.model)
            job.adopt_weights()
        of_layers: dict[Layer, list[Match]] = {}
        for match in self._matches:
            of_layers.setdefault(match.layer, []).append(match)
        for layer, matches in of_layers.items():
            for array in filter(partial(job.trainer.arrays.fills, layer), _arrays(layer)):
                is_weight = array in (WEIGHTS, LOW)
                if custom is None if is_weight else loads_states:
                    self._fill(layer, array, matches)
            if loads_states:
                for match in matches:
                    if match.optimizer is not None:
                        job.trainer.updates.counts[layer][match.position] = match.saved.step
        if custom is None:
            for name, buffer in persistent_buffers(job.partition):
                if name in self.manifest.buffers:
                    buffer.data.copy_(self._tag.tensors(BUFFERS).read(name))
        if self._optimizer is not None:
            self._load_groups(self._optimizer)

    def _fill(self, layer: Layer, array: str, matches: Sequence[Match]) -> None:
        """Write one array of these parameters of a layer."""
        own_names = [(match, match.name_of(array)) for match in matches]
        for begin, block in self._job.trainer.arrays.blocks(layer, array, writes=True):
            for match, own in own_names:
                extent = layer.extent(array, match.position)
                first, last = max(extent.start, begin), min(extent.stop, begin + block.numel())
                if own is not None and first < last:
                    dtype = match.dtype_of(own)
                    target = block[first - begin : last - begin].view(dtype)
                    self._read(match, own, (first - extent.start) // dtype.itemsize, target)

    def _read(self, match: Match, array: str, begin: int, target: Tensor) -> None:
        """Fill `target` with the parameter's items of an array, from `begin` on, as the layer keeps
        them. Moments that the checkpoint does not have are zeros."""
        saved, states = match.saved, match.states
        is_same = saved.dtype is match.dtype and (
            states is None
            or saved.optimizer is None
            or saved.states(self.manifest.states).kind == states.kind
        )
        is_exact = self._optimizer is not None or array == WEIGHTS
        if is_same and is_exact and array in saved.arrays:
            self._tag.read_into(saved, array, begin, target)
        elif array not in (WEIGHTS, LOW) and not (saved.has_moments and saved.step):
            target.zero_()
        else:
            size = group_size(array)
            for first in range(0, target.numel(), PIECE_NUMEL // size):
                part = target[first : first + PIECE_NUMEL // size]
                end = min((begin + first + part.numel()) * size, saved.numel)
                elements = range((begin + first) * size, end)
                part.copy_(self._converted(match, array, elements))

    def _converted(self, match: Match, array: str, elements: range) -> Tensor:
        """Items of an array for these elements, computed from the saved master or moment."""
        saved, states = match.saved, match.states
        if array not in (WEIGHTS, LOW):
            assert states is not None
            stored = saved.states(self.manifest.states)
            moment = next(m for m in states.moments if array in states.arrays_of(m))
            arrays = {a: self._tag.read(saved, a, elements) for a in stored.arrays_of(moment)}
            return states.encode(moment, stored.decode(moment, arrays))[array]
        if self._optimizer is None:  # the saved weights become the masters
            master = self._tag.read(saved, WEIGHTS, elements).to(match.dtype).float()
        else:
            master = self._tag.master(saved, elements)
        if states is None:
            return master.to(match.dtype)
        weights, low = states.split(master)
        return weights if array == WEIGHTS or low is None else low

    def _load_groups(self, optimizer: EngineOptimizer) -> None:
        """Write saved hyper-parameters into the live groups. A tensor keeps its identity."""
        for group, saved in zip(optimizer.param_groups, self.manifest.groups or (), strict=True):
            for key, value in saved.items():
                live = group.get(key)
                if key == "params":
                    continue
                if isinstance(live, torch.Tensor):
                    live.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(live, tuple) else value

    def _state_dict(self) -> dict[str, Tensor]:
        """The saved weights and buffers in fresh memory, by every name."""
        tensors = {name: self._tag.tensors(BUFFERS).read(name) for name in self.manifest.buffers}
        for match in self._matches:
            saved = match.saved
            for name in saved.names:
                flat = self._tag.read(saved, WEIGHTS, range(saved.numel))
                tensors[name] = flat.view(saved.shape)
        return tensors


def _arrays(layer: Layer) -> Iterator[str]:
    yield WEIGHTS
    if layer.states is not None:
        yield from (array for array in layer.states.dtypes if array != WEIGHTS)


def listed(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
