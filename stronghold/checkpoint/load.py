"""Loading: from a checkpoint's files into the host arrays, parameter by parameter.

Owns the match between a checkpoint's names and a model's, and every check that comes before memory
changes. It never holds more than a piece of a tensor outside the arrays. The training thread alone
enters.

[Note: verified first]

1. `Load` reads the manifest and matches names and shapes.
2. It checks the size and the checksum of every file that is needed. Ranks divide the files.
3. It unpacks the state file. Every error so far leaves memory as it was.
4. `apply` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stronghold.checkpoint.directory import CheckpointRanks
from stronghold.checkpoint.loading import is_like, listed
from stronghold.checkpoint.manifest import BUFFERS, LOW, STATE, WEIGHTS, TensorRecord
from stronghold.checkpoint.saving import named_groups, persistent_buffers
from stronghold.checkpoint.state import unpack_state
from stronghold.checkpoint.tag import OpenTag
from stronghold.errors import CheckpointError, ConfigError, ErrorPage, did_you_mean
from stronghold.memory.tiers import Mode, Views
from stronghold.model.layout import ParameterSlice
from stronghold.optim.states import LOW_DTYPE, items, join_master
from stronghold.streaming.optimizer import EngineOptimizer
from stronghold.streaming.stack import Stack

PIECE_NUMEL = 1 << 20  # elements that are converted at once: a multiple of a group


class Match(NamedTuple):
    """Parameter `k` of a layer of the model, and its record in the checkpoint."""

    layer: int
    k: int
    part: ParameterSlice
    record: TensorRecord


class Load:
    """One verified checkpoint, ready to be written into `stack` ([Note: verified first]).

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
        stack: Stack,
        optimizer: EngineOptimizer | None,
        *,
        team: CheckpointRanks,
        names_must_match: bool,
        trusted: bool,
    ) -> None:
        self._path = path
        self._stack = stack
        self._optimizer = optimizer
        self._tag = OpenTag(path)
        self.mark = self._tag.mark
        try:
            self.manifest = self._tag.manifest
            # by each of a parameter's names
            self._records: dict[str, TensorRecord] = {}
            for record in self.manifest.tensors:
                self._records |= dict.fromkeys(record.aliases, record)
            self._matches = self._match(names_must_match)
            if optimizer is not None:
                self._check_optimizer(optimizer)
            # The ranks divide the files among them: none goes on when one has failed.
            needed = sorted({STATE} | self._needed())
            self._tag.check(needed[team.rank :: team.num_ranks])
            records = [match.record for match in self._matches]
            self._tag.check_headers(records, state=optimizer is not None)
            self.state = unpack_state(self._tag.file(STATE), trusted=trusted)
        except BaseException:
            self._tag.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._tag.close()

    # -- checks ---------------------------------------------------------------------------------
    def _match(self, strict: bool) -> list[Match]:
        """Every parameter that model and checkpoint both have.

        Raises ConfigError for another shape or dtype and, if `strict`, for names that differ.
        """
        known: set[str] = set()
        matches, missing = [], []
        for index, layer in enumerate(self._stack.partition.layers):
            parts = self._stack.layout.layers[index].slices
            for k, (named, part) in enumerate(zip(layer.parameters, parts, strict=True)):
                known.update(named.aliases)
                record = self._record_of(named.aliases)
                if record is not None:
                    self._check_shape(part, record)
                    self._check_dtype(part, record)
                    matches.append(Match(index, k, part, record))
                elif not (part.name in self.manifest.excluded and not part.trainable):
                    missing.append(part.name)
        buffers = {name for name, _ in persistent_buffers(self._stack.partition)}
        extra = [r.name for r in self.manifest.tensors if known.isdisjoint(r.aliases)]
        missing += sorted(buffers - self.manifest.buffers.keys())
        extra += sorted(self.manifest.buffers.keys() - buffers)
        if strict and (missing or extra):
            message = self._mismatch(missing, extra)
            raise ConfigError(message, page=ErrorPage.OTHER_MODEL)
        self._check_buffers()
        return matches

    def _record_of(self, aliases: Sequence[str]) -> TensorRecord | None:
        """The record of a parameter with these names, or None."""
        for alias in aliases:
            if alias in self._records:
                return self._records[alias]
        return None

    def _check_buffers(self) -> None:
        """Raise ConfigError for a buffer of another shape."""
        for name, buffer in persistent_buffers(self._stack.partition):
            shape = self.manifest.buffers.get(name, tuple(buffer.shape))
            if shape != tuple(buffer.shape):
                raise ConfigError(
                    f"{self._path}: the buffer {name} has the shape {list(shape)} there, and "
                    f"{list(buffer.shape)} in this model",
                    page=ErrorPage.OTHER_MODEL,
                )

    def _check_shape(self, part: ParameterSlice, record: TensorRecord) -> None:
        """Raise ConfigError for a parameter of another shape."""
        if record.shape != part.shape:
            raise ConfigError(
                f"{self._path}: {part.name} has the shape {list(record.shape)} there, and "
                f"{list(part.shape)} in this model",
                page=ErrorPage.OTHER_MODEL,
            )

    def _check_dtype(self, part: ParameterSlice, record: TensorRecord) -> None:
        """Raise ConfigError if the values of one dtype mean nothing in the other."""
        dtype = self._stack.host.formats[part.format].dtype
        if record.dtype is not dtype and not {record.dtype, dtype} <= LOW_DTYPE.keys():
            raise ConfigError(
                f"{self._path}: {part.name} is {record.dtype} there, and {dtype} in this "
                "model: quantise the model as it was when it was saved",
                page=ErrorPage.OTHER_MODEL,
            )

    def _mismatch(self, missing: list[str], extra: list[str]) -> str:
        """The error's message for names that only one of model and checkpoint has."""
        num_saved = len(self._records) + len(self.manifest.buffers)
        lines = [f"{self._path} is not of this model:"]
        if missing:
            hint = did_you_mean(missing[0], extra) if extra else ""
            lines.append(f"it has no {listed(missing)}.{hint}")
        if extra:
            lines.append(f"this model has no {listed(extra)}.")
        lines.append(
            f"{num_saved} names are there; with load_module_strict=False those that match are "
            "loaded"
        )
        return " ".join(lines)

    def _check_optimizer(self, optimizer: EngineOptimizer) -> None:
        """Raise an error unless saved groups, moments and hyper-parameters fit the optimizer."""
        advice = "pass load_optimizer_states=False to load the weights and start the optimizer anew"
        saved = self.manifest.groups
        live = named_groups(self._stack.partition, optimizer) or ()
        if saved is None:
            raise ConfigError(f"{self._path} was saved by an engine without an optimizer; {advice}")
        self._check_moments(advice)
        first_name = {alias: record.name for alias, record in self._records.items()}
        saved_names = [set(group["params"]) for group in saved]
        live_names = []
        for group in live:
            live_names.append({first_name.get(name, name) for name in group["params"]})
        if saved_names != live_names:
            saved_sizes = [len(names) for names in saved_names]
            live_sizes = [len(names) for names in live_names]
            different = sorted(set().union(*saved_names) ^ set().union(*live_names))
            hint = f"; only one of them has {listed(different)}" if different else ""
            raise ConfigError(
                f"{self._path}: its parameter groups hold {saved_sizes} parameters and this "
                f"optimizer's {live_sizes}{hint}, or in another order; {advice}"
            )
        self._check_hyper_parameters(optimizer, saved, advice)

    def _check_hyper_parameters(
        self, optimizer: EngineOptimizer, saved: tuple[dict[str, Any], ...], advice: str
    ) -> None:
        """Raise CheckpointError for a saved value that cannot take a live value's place."""
        for index, (group, stored) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
            for key, value in stored.items():
                if key in group and key != "params" and not is_like(group[key], value):
                    raise CheckpointError(
                        f"{self._path}: groups.{index}.{key}: got {value!r:.80}, expected what can "
                        f"take the place of {group[key]!r}; {advice}"
                    )

    def _check_moments(self, advice: str) -> None:
        """Raise ConfigError if saved moments belong to another optimizer than the parameter's."""
        stack = self._stack
        for index, k, part, record in self._matches:
            optimizer = stack.steps.optimizers_of(stack.host.layers[index]).get(k)
            if not record.has_moments or optimizer is None:
                continue
            if record.optimizer != optimizer.name:
                raise ConfigError(
                    f"{self._path}: {part.name} was updated by {record.optimizer}, and is updated "
                    f"by {optimizer.name} here; {advice}"
                )
            if not optimizer.moments:
                raise ConfigError(
                    f"{self._path}: {part.name} has moments of {record.optimizer} there, and "
                    f"{optimizer} keeps none; {advice}"
                )

    def _needed(self) -> set[str]:
        """Names of the files that have arrays to be loaded."""
        names = {BUFFERS} if self.manifest.buffers else set()
        arrays = {WEIGHTS} if self._optimizer is None else None
        return names.union(*(match.record.files(arrays) for match in self._matches))

    # -- writing --------------------------------------------------------------------------------
    def apply(self, custom: Callable[..., Any] | None = None) -> None:
        """Write the checkpoint into memory, and drop gradients of an unfinished step.

        It writes weights and buffers. With an optimizer it writes masters, moments, step counts and
        hyper-parameters too. `custom(src=state_dict, dst=model)` places the weights in its place,
        as in DeepSpeed: masters then become these weights.

        Waits for pending work and the disk. Raises CheckpointError if a file changed while it was
        read.
        """
        stack = self._stack
        stack.runtime.restart()
        exact = self._optimizer is not None and custom is None
        has_state = any(len(match.record.pieces) > 1 for match in self._matches)
        if self._optimizer is not None and has_state:
            stack.prepare_training()
        if custom is None:
            self._weights(exact)
        else:
            stack.runtime.settle()
            custom(src=self._state_dict(), dst=stack.partition.model)
            stack.runtime.adopt_weights()
        if self._optimizer is not None:
            self._moments()
            self._hyper_parameters(self._optimizer)
        self._tag.check_unchanged()
        if custom is None:
            stack.runtime.loaded()
        stack.runtime.settle()

    def _weights(self, exact: bool) -> None:
        """Write weights and buffers. `exact`: masters too; else masters become the weights."""
        for match in self._matches:
            self._parameter(match, with_master=exact and match.part.trainable)
        if not exact:
            self._restart_masters()
        for name, buffer in persistent_buffers(self._stack.partition):
            if name in self.manifest.buffers:
                buffer.data.copy_(self._tag.tensors(BUFFERS).read(name))

    def _parameter(self, match: Match, *, with_master: bool) -> None:
        """Write one parameter's weights and, `with_master`, its master."""
        part, record = match.part, match.record
        live = self._stack.host.formats[part.format]
        states = live.trained if part.trainable else None
        saved_kind = record.states(self.manifest.states).kind
        has_kind = states is None or states.kind == saved_kind
        if record.dtype is not live.dtype or not has_kind:
            self._convert_weights(match, with_master)
            return
        self._fill(match, WEIGHTS)
        if not with_master:
            return
        is_whole = states is not None and states.low is torch.float32
        if is_whole and not record.has_low:
            self._copy_weights_to_low(match)
        else:
            self._fill(match, LOW)

    def _restart_masters(self) -> None:
        """Make the masters of loaded parameters equal to their weights."""
        host = self._stack.host
        loaded: dict[int, set[int]] = {}
        for match in self._matches:
            loaded.setdefault(match.layer, set()).add(match.k)
        for index, positions in loaded.items():
            host.access.restart_master(index, positions)

    def _views(
        self, match: Match, arrays: tuple[str, ...], *, mode: Mode
    ) -> Iterator[tuple[slice, Views]]:
        """Yield a parameter's elements of these arrays, in pieces, as `ArrayAccess.pieces`."""
        begin = match.part.offset
        end = begin + match.part.numel
        return self._stack.host.access.pieces(match.layer, arrays, begin, end, mode=mode)

    def _convert_weights(self, match: Match, with_master: bool) -> None:
        """Write weights of another dtype or kind of states, from the values of the masters."""
        host, part = self._stack.host, match.part
        begin = 0
        for master in masters(self._tag, match.record, exact=with_master):
            end = begin + master.numel()
            if with_master and host.training:
                host.access.write_master(match.layer, part, begin, master)
            else:
                first, last = part.offset + begin, part.offset + end
                pieces = host.access.pieces(match.layer, (WEIGHTS,), first, last, mode="replace")
                for elements, views in pieces:
                    views[WEIGHTS].copy_(master[elements])
            begin = end

    def _fill(self, match: Match, array: str) -> None:
        """Read an array of a parameter into its place, wherever that is.

        An array that the checkpoint does not have becomes zeros. An array that the layer does not
        have is left out.
        """
        host, part, record = self._stack.host, match.part, match.record
        maps = host.layers[match.layer].maps
        if not host.access.has(match.layer, array) or not maps[array].has_range(part):
            return
        for elements, views in self._views(match, (array,), mode="replace"):
            if array in record.pieces:
                begin = items(array, elements.start, elements.stop).start
                self._tag.read_into(record, array, begin, views[array])
            else:
                views[array].zero_()

    def _copy_weights_to_low(self, match: Match) -> None:
        """Copy fp32 weights to their masters."""
        if self._stack.host.access.has(match.layer, LOW):
            for _, views in self._views(match, (WEIGHTS, LOW), mode="edit"):
                views[LOW].copy_(views[WEIGHTS])

    def _moments(self) -> None:
        """Write moments and step counts."""
        host = self._stack.host
        for match in self._matches:
            index, k, part, record = match
            if part.trainable:
                states = host.formats[part.format].trained
                host.layers[index].optimizer.counts[k] = record.step
                saved_kind = record.states(self.manifest.states).kind
                if record.has_moments and saved_kind != states.kind:
                    self._convert_moments(match)
                    continue
                for array in states.moment_dtypes:
                    self._fill(match, array)

    def _convert_moments(self, match: Match) -> None:
        """Write moments of another kind of states: decode the saved ones, and encode them again."""
        host = self._stack.host
        states = host.formats[match.part.format].trained
        arrays = tuple(states.moment_dtypes)
        if not all(host.access.has(match.layer, array) for array in arrays):
            return
        for elements, views in self._views(match, arrays, mode="replace"):
            for begin in range(elements.start, elements.stop, PIECE_NUMEL):
                end = min(begin + PIECE_NUMEL, elements.stop)
                decoded = moments_of(self._tag, match.record, begin, end)
                for moment in states.moments:
                    encoded = states.encode(moment, decoded[moment.name])
                    for array, values in encoded.items():
                        target = items(array, begin - elements.start, end - elements.start)
                        views[array][target].copy_(values)

    def _hyper_parameters(self, optimizer: EngineOptimizer) -> None:
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

    def _state_dict(self) -> dict[str, torch.Tensor]:
        """The saved weights and buffers in fresh memory, by every name."""
        tensors: dict[str, torch.Tensor] = {}
        for match in self._matches:
            record = match.record
            for alias in record.aliases:
                flat = self._tag.read(record, WEIGHTS, 0, record.numel)
                tensors[alias] = flat.view(record.shape)
        for name in self.manifest.buffers:
            tensors[name] = self._tag.tensors(BUFFERS).read(name)
        return tensors


def masters(tag: OpenTag, record: TensorRecord, *, exact: bool) -> Iterator[torch.Tensor]:
    """Yield a parameter in fp32, flat, in pieces.

    `exact`: the values are the exact master's, else the weights'.
    """
    for begin in range(0, record.numel, PIECE_NUMEL):
        end = min(begin + PIECE_NUMEL, record.numel)
        weights = tag.read(record, WEIGHTS, begin, end)
        low = tag.read(record, LOW, begin, end) if exact and record.has_low else None
        yield join_master(weights, low)


def moments_of(tag: OpenTag, record: TensorRecord, begin: int, end: int) -> dict[str, torch.Tensor]:
    """Return the moments of a parameter's elements [begin, end), by name, flat, in fp32.

    `begin` is a multiple of a group. Empty if the record has no moments.
    """
    if not record.has_moments:
        return {}
    states = record.states(tag.manifest.states)
    arrays = {}
    for array in states.moment_dtypes:
        span = items(array, begin, end)
        arrays[array] = tag.read(record, array, span.start, span.stop)
    return {moment.name: states.decode(moment, arrays) for moment in states.moments}
