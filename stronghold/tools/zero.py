"""DeepSpeed's ZeRO checkpoints: `stronghold import` and `stronghold export --to zero-stage2`.

Owns the knowledge of DeepSpeed's layouts (stages 0 to 3, as 0.19 writes them): which rank's file
holds which elements of which parameter. It writes the two pickles that `zero_to_fp32.py`, the
universal-checkpoint converter and DeepSpeed's `load_checkpoint` read. Files are mapped, also those
in which an export builds its flat groups. So host memory holds one piece of a tensor at a time. It
reads pickles, with torch's safe reader if that can: import only files that you trust.
"""

from __future__ import annotations

import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint import directory
from stronghold.checkpoint.files import (
    PIECE_BYTES,
    Entry,
    FileRecord,
    entry_of,
    write_durably,
    write_tensors,
)
from stronghold.checkpoint.load import PIECE_NUMEL, masters, moments_of
from stronghold.checkpoint.manifest import (
    BUFFERS,
    GAS,
    LOW,
    STATE,
    WEIGHTS,
    Manifest,
    StoredPiece,
    TensorRecord,
)
from stronghold.checkpoint.save import plain_group, versions
from stronghold.checkpoint.state import ClientState, pack_state, unpack_state, unsafe_reason
from stronghold.checkpoint.tag import OpenTag
from stronghold.checkpoint.weights import shards
from stronghold.errors import CheckpointError, ConfigError
from stronghold.optim import hyperparameter_names, optimizer_named, optimizer_of_state
from stronghold.optim.contract import Optimizer
from stronghold.optim.states import LOW_DTYPE, split_master
from stronghold.streaming.optimizer import deepspeeds_scaler, scaler_state

logger = logging.getLogger("stronghold")

# Top-level keys of a model-states file. Every other key is the client's.
_OWN = """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params
    frozen_param_fragments lr_scheduler data_sampler random_ltd sparse_tensor_module_names
    skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version
    checkpoint_parallel_dimensions universal_checkpoint_info
"""
OWN_KEYS = frozenset(_OWN.split())
HYPER_PARAMETERS = (*sorted(hyperparameter_names()), "initial_lr", "bias_correction")
FILE_NUMEL = 1 << 28  # parameters in one imported file: a layer of a large model
ALIGNMENT = 2  # DeepSpeed pads a group's flat tensor to twice the number of ranks
Views = list[torch.Tensor]  # flat, in order; together they are one flat tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroParameter:
    """A parameter of a ZeRO checkpoint.

    `master` holds its flat fp32 views. `moments` has such views by the moment's name, or is None
    before the first step.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    master: Views
    moments: dict[str, Views] | None
    step: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCheckpoint:
    """A ZeRO checkpoint.

    `model` is rank 0's model state. `aliases` maps tied names to the name that is stored.
    `loss_scale` comes from `scaler_state`; stage 0 has none.
    """

    model: dict[str, Any]
    parameters: list[ZeroParameter]
    groups: list[dict[str, Any]]
    aliases: dict[str, str]
    loss_scale: dict[str, Any] | None = None


# -- import ---------------------------------------------------------------------------------------
def import_zero(source: Path, out: Path, tag: str) -> Path:
    """Convert the tag's directory `source` into `out/tag`, and let `out/latest` name it.

    Masters and moments keep every bit. Weights are rounded from the masters as updates round, which
    differs from DeepSpeed's rounding in exact ties. The result has no random states, so loading
    leaves those of the program.

    Returns `out/tag`. Raises CheckpointError if `source` cannot be converted.
    """
    zero = read_zero(source)
    dtypes = {parameter.dtype for parameter in zero.parameters if parameter.trainable}
    if len(dtypes) != 1 or not dtypes <= LOW_DTYPE.keys():
        raise CheckpointError(f"{source}: weights in {dtypes}, expected one floating-point type")
    with directory.appearing(out / directory.check_tag(tag)) as hidden:
        _write_imported(zero, hidden, dtypes.pop())
    directory.write_latest(out, tag)
    return out / tag


def _write_imported(zero: ZeroCheckpoint, out: Path, dtype: torch.dtype) -> None:
    files: dict[str, FileRecord] = {}
    records: list[TensorRecord] = []
    has_moments = any(parameter.moments is not None for parameter in zero.parameters)
    optimizer = _optimizer_of(zero)
    for number, batch in enumerate(shards(zero.parameters, FILE_NUMEL, _numel)):
        entries_of_kinds: dict[str, list[Entry]] = {"weights": [], "masters": [], "moments": []}
        for parameter in batch:
            for kind, entry in _entries(parameter, dtype, optimizer if has_moments else None):
                entries_of_kinds[kind].append(entry)
        names = {kind: f"{kind}-{number:05d}.safetensors" for kind in entries_of_kinds}
        for kind, entries in entries_of_kinds.items():
            if entries:
                files[names[kind]] = write_tensors(out / names[kind], entries)
        for parameter in batch:
            kinds_of_arrays = {WEIGHTS: "weights"}
            if parameter.trainable and has_moments:
                if LOW_DTYPE[dtype]:
                    kinds_of_arrays[LOW] = "masters"
                for moment in optimizer.possible_moments:
                    kinds_of_arrays[moment.name] = "moments"
            pieces: dict[str, tuple[StoredPiece, ...]] = {
                array: (StoredPiece(file=names[kind], begin=0, end=parameter.numel),)
                for array, kind in kinds_of_arrays.items()
            }
            tied = [alias for alias, name in zero.aliases.items() if name == parameter.name]
            records.append(
                TensorRecord(
                    name=parameter.name,
                    aliases=(parameter.name, *tied),
                    shape=parameter.shape,
                    dtype=dtype,
                    trainable=parameter.trainable,
                    step=parameter.step,
                    optimizer=optimizer.name,
                    pieces=pieces,
                )
            )
    buffers = _buffers(zero.model)
    if buffers:
        entries = [entry_of(name, value.contiguous()) for name, value in buffers.items()]
        files[BUFFERS] = write_tensors(out / BUFFERS, entries)
    counters = _counters(zero.model)
    client = ClientState(
        scheduler=zero.model.get("lr_scheduler"),
        loader=zero.model.get("data_sampler"),
        loss_scale=zero.loss_scale,
        client={key: value for key, value in zero.model.items() if key not in OWN_KEYS},
    )
    made_by = versions()
    files[STATE] = write_durably(out / STATE, pack_state(client, counters, made_by))
    manifest = Manifest(
        dtype=dtype,
        counters=counters,
        tensors=tuple(records),
        buffers={name: tuple(value.shape) for name, value in buffers.items()},
        groups=tuple(zero.groups),
        files=files,
        versions=made_by,
    )
    manifest.write(out)


def _numel(parameter: ZeroParameter) -> int:
    return parameter.numel


def _counters(model: dict[str, Any]) -> dict[str, int]:
    """Return the counters of a manifest, from a model state."""
    num_steps = int(model["global_steps"])
    config = model.get("ds_config") or {}
    accumulation = int(config.get(GAS) or 1)
    return {
        "global_steps": num_steps,
        "global_samples": int(model.get("global_samples", 0)),
        "micro_steps": num_steps * accumulation,
        "skipped_steps": int(model.get("skipped_steps", 0)),
        GAS: accumulation,
    }


class _Pieces:
    """The elements of flat views, converted piece by piece, for an `Entry`."""

    def __init__(self, views: Views, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._views = views
        self._convert = convert

    def __call__(self) -> Iterator[torch.Tensor]:
        for view in self._views:
            for piece in view.split(PIECE_BYTES // 4):
                yield self._convert(piece).contiguous()


class _MasterConversion:
    """The conversions from a master or a weight to `dtype`, and to the remainder of a master."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def cast(self, weight: torch.Tensor) -> torch.Tensor:
        """Cast a frozen parameter's weight."""
        return weight.to(dtype=self._dtype)

    def round(self, master: torch.Tensor) -> torch.Tensor:
        """Round a master to a weight, as updates do."""
        weight, _ = split_master(master.float(), self._dtype)
        return weight

    def remainder(self, master: torch.Tensor) -> torch.Tensor:
        """Return the exact remainder of a master. The dtype has one (`LOW_DTYPE`)."""
        _, low = split_master(master.float(), self._dtype)
        assert low is not None
        return low


def _entries(
    parameter: ZeroParameter, dtype: torch.dtype, optimizer: type[Optimizer] | None
) -> Iterator[tuple[str, Entry]]:
    """Yield the kind of file and the entry of each array of a parameter.

    With an `optimizer` these include masters and moments.
    """
    name, shape, master = parameter.name, parameter.shape, parameter.master
    conversion = _MasterConversion(dtype)
    convert = conversion.round if parameter.trainable else conversion.cast
    pieces = _Pieces(master, convert)
    yield "weights", Entry(name=name, dtype=dtype, shape=shape, pieces=pieces)
    if not parameter.trainable or optimizer is None:
        return
    low_dtype = LOW_DTYPE[dtype]
    if low_dtype is not None:
        pieces = _Pieces(master, conversion.remainder)
        yield "masters", Entry(name=name, dtype=low_dtype, shape=shape, pieces=pieces)
    # for a parameter that never had a gradient
    zeros = [torch.zeros(1).expand(parameter.numel)]
    for moment in optimizer.possible_moments:
        views = (parameter.moments or {}).get(moment.name, zeros)
        pieces = _Pieces(views, torch.Tensor.float)
        moment_name = f"{moment.name}.{name}"
        yield ("moments", Entry(name=moment_name, dtype=torch.float32, shape=shape, pieces=pieces))


def _optimizer_of(zero: ZeroCheckpoint) -> type[Optimizer]:
    """Return the optimizer that has trained the parameters, by the names of their moments."""
    names: set[str] = set()
    for parameter in zero.parameters:
        names.update(parameter.moments or ())
    return optimizer_of_state(names)


# -- reading --------------------------------------------------------------------------------------
def read_zero(path: Path) -> ZeroCheckpoint:
    """Read a tag's directory.

    Raises CheckpointError if it is no ZeRO checkpoint, or if files are missing.
    """
    models = sorted(path.glob("*_model_states.pt"), key=_natural)
    optims = sorted(path.glob("*_optim_states.pt"), key=_natural)
    if not models:
        raise CheckpointError(f"{path}: has no {STATE}; not a checkpoint of DeepSpeed's")
    if not optims and (path / "zero").is_dir():
        raise CheckpointError(
            f"{path}: a universal checkpoint; import the ZeRO checkpoint of which it was made"
        )
    if len(list(path.glob("mp_rank_*_model_states.pt"))) > 1:
        raise CheckpointError(
            f"{path}: several model-parallel ranks have saved it; expected one such rank"
        )
    states = [_load(file) for file in models]
    try:
        if not optims:
            return _stage_0(path, states[0])
        optimizer_states = [_load(file)["optimizer_state_dict"] for file in optims]
        return _sharded(path, states, optimizer_states)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not laid out as DeepSpeed does: {error!r}") from error


def _natural(path: Path) -> list[int]:
    """Return the numbers in a file's name, as a key for sorting."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _load(file: Path) -> dict[str, Any]:
    """Read a file with torch's safe reader, if it holds only tensors and DeepSpeed's types.

    Else it is read as DeepSpeed reads it, with a warning in the log.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    options: dict[str, Any] = {"map_location": "cpu", "mmap": True}
    known = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(known):
            state: dict[str, Any] = torch.load(file, weights_only=True, **options)
    except OSError:
        raise
    except Exception as error:  # torch's safe reader raises many types
        logger.warning(
            "%s: code of its own may run while it is read, as when DeepSpeed loads it: %s",
            file,
            unsafe_reason(error),
        )
        try:
            state = torch.load(file, weights_only=False, **options)
        except Exception as cause:
            raise CheckpointError(f"{file}: {cause!r}") from cause
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class _OptimizerState:
    """One parameter in the optimizer's files. `master` and `moments` are flat views."""

    name: str
    shape: tuple[int, ...]
    master: Views
    moments: dict[str, Views] | None
    step: int


def _sharded(
    path: Path, states: list[dict[str, Any]], shards: list[dict[str, Any]]
) -> ZeroCheckpoint:
    """Assemble a checkpoint of stages 1 to 3 from model states and optimizer states of ranks."""
    stage = int(shards[0]["zero_stage"])
    count = shards[0]["partition_count"]
    num_ranks = max(count) if isinstance(count, list) else int(count)
    if num_ranks != len(shards):
        raise CheckpointError(
            f"{path}: {len(shards)} files *_optim_states.pt, expected {num_ranks}"
        )
    model = states[0]
    shapes = model["param_shapes"]
    read = _stage_3 if stage == 3 else _stage_2
    parameters = [
        ZeroParameter(
            name=state.name,
            shape=state.shape,
            dtype=model["module"][state.name].dtype,
            trainable=True,
            master=state.master,
            moments=state.moments,
            step=state.step,
        )
        for state in read(shapes, shards, path)
    ]
    trained = {parameter.name for parameter in parameters}
    parameters += _frozen(states, trained, num_ranks if stage == 3 else 1)
    scaler = shards[0].get("loss_scaler")
    return ZeroCheckpoint(
        model=model,
        parameters=parameters,
        groups=_groups(shards[0], shapes),
        aliases=dict(model.get("shared_params") or {}),
        loss_scale=None if scaler is None else scaler_state(scaler),
    )


def _stage_2(
    shapes: Sequence[dict[str, Any]], shards: list[dict[str, Any]], path: Path
) -> Iterator[_OptimizerState]:
    """Yield the parameters of stages 1 and 2.

    A group's parameters are one flat tensor. Each rank holds one range of it.
    """
    paddings = shards[0].get("param_alignment_paddings")
    for group, group_shapes in enumerate(shapes):
        fp32 = [shard["single_partition_of_fp32_groups"][group] for shard in shards]
        states = []
        for shard in shards:
            base = shard["base_optimizer_state"]
            states.append(base["state"].get(group, {}) if isinstance(base, dict) else base[group])
        flats = {name: [state[name] for state in states] for name in _moment_names(states)}
        step = _step(states[0], shards[0])
        begin = 0
        for index, (name, shape) in enumerate(group_shapes.items()):
            numel = math.prod(shape)
            moments = {moment: _joined(flat, begin, numel, path) for moment, flat in flats.items()}
            yield _OptimizerState(
                name=name,
                shape=tuple(shape),
                master=_joined(fp32, begin, numel, path),
                moments=moments or None,
                step=step,
            )
            padding = 0 if paddings is None else paddings[group][index]
            begin += numel + padding


def _stage_3(
    shapes: Sequence[dict[str, Any]], shards: list[dict[str, Any]], path: Path
) -> Iterator[_OptimizerState]:
    """Yield the parameters of stage 3.

    A rank holds one range of every parameter, in order. All ranges of a parameter are equal: the
    last is padded.
    """
    states = [shard["optimizer_state_dict"]["state"] for shard in shards]
    step = _step(states[0].get(0, {}), shards[0]["optimizer_state_dict"])
    fp32 = [shard["fp32_flat_groups"] for shard in shards]
    group_states = [group_state for state in states for group_state in state.values()]
    # The flat tensors of each rank's groups, by moment.
    flats: dict[str, list[list[torch.Tensor]]] = {}
    for name in _moment_names(group_states):
        flats[name] = [[state[group][name] for group in sorted(state)] for state in states]
    begin = 0
    for group_shapes in shapes:
        for name, shape in group_shapes.items():
            numel = math.prod(shape)
            rank_numel = -(-numel // len(shards))
            moments = {
                moment: _gathered(flats_of_ranks, begin, rank_numel, numel, path)
                for moment, flats_of_ranks in flats.items()
            }
            yield _OptimizerState(
                name=name,
                shape=tuple(shape),
                master=_gathered(fp32, begin, rank_numel, numel, path),
                moments=moments or None,
                step=step,
            )
            begin += rank_numel


def _gathered(
    flats_of_ranks: Sequence[Sequence[torch.Tensor]],
    begin: int,
    rank_numel: int,
    numel: int,
    path: Path,
) -> Views:
    """Return the first `numel` elements of all ranks' ranges [begin, begin + rank_numel)."""
    views: Views = []
    for flats in flats_of_ranks:
        views += _joined(flats, begin, rank_numel, path)
    return _trimmed(views, numel)


def _moment_names(states: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the tensors, beside the step, that all states of an optimizer have."""
    names_of_states = []
    for state in states:
        tensors = {name for name, value in state.items() if torch.is_tensor(value)}
        names_of_states.append(tensors - {"step"})
    return sorted(set.intersection(*names_of_states)) if names_of_states else []


def _step(state: dict[str, Any], shard: dict[str, Any]) -> int:
    """Return the optimizer's count of steps.

    Torch keeps it in the state, fused optimizers in the group.
    """
    if "step" in state:
        return int(state["step"])
    base = shard.get("base_optimizer_state", shard)
    groups = base.get("param_groups", [{}]) if isinstance(base, dict) else [{}]
    return int(groups[0].get("step", shard.get("base_optimizer_state_step", 0)))


def _joined(flats: Sequence[torch.Tensor], begin: int, numel: int, path: Path) -> Views:
    """Return views of `numel` elements from `begin` on. `flats` count as one flat tensor."""
    end = begin + numel
    views: Views = []
    flat_begin = 0
    for flat in flats:
        flat_end = flat_begin + flat.numel()
        low = max(begin, flat_begin)
        high = min(end, flat_end)
        if low < high:
            views.append(flat.detach()[low - flat_begin : high - flat_begin])
        flat_begin = flat_end
    if sum(view.numel() for view in views) != numel:
        raise CheckpointError(f"{path}: the partitions end at {flat_begin}, within a parameter")
    return views


def _trimmed(views: Views, numel: int) -> Views:
    """Return views of the first `numel` elements."""
    kept: Views = []
    for view in views:
        kept.append(view[:numel])
        numel -= kept[-1].numel()
    return kept


def _frozen(
    states: list[dict[str, Any]], trained: set[str], num_ranks: int
) -> Iterator[ZeroParameter]:
    """Yield the parameters that no optimizer owns.

    Stages 2 and 3 keep fragments of them, of `num_ranks` ranks. Else the module has them.
    """
    model = states[0]
    shapes = model.get("frozen_param_shapes")
    if shapes is None:
        known = trained | set(_buffers(model)) | set(model.get("shared_params") or {})
        stored = {name: value for name, value in model["module"].items() if name not in known}
        shapes = {name: tuple(value.shape) for name, value in stored.items()}
        fragments = [stored]
    else:
        fragments = [state["frozen_param_fragments"] for state in states[:num_ranks]]
    for name, shape in shapes.items():
        views = [fragment[name].detach().reshape(-1) for fragment in fragments]
        yield ZeroParameter(
            name=name,
            shape=tuple(shape),
            dtype=views[0].dtype,
            trainable=False,
            master=_trimmed(views, math.prod(shape)),
            moments=None,
            step=0,
        )


def _buffers(model: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: model["module"][name] for name in model["buffer_names"] or ()}


def _groups(shard: dict[str, Any], shapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each group's hyper-parameters, with the names of its parameters.

    Stage 3 lists names by sub-groups, not by groups. With one group these are all its names.
    """
    base = shard.get("base_optimizer_state", shard.get("optimizer_state_dict"))
    groups = base["param_groups"] if isinstance(base, dict) else [{} for _ in shapes]
    names_of_groups = [list(group_shapes) for group_shapes in shapes]
    if len(groups) != len(names_of_groups):
        names_of_groups = [[name for names in names_of_groups for name in names]]
    if len(groups) != len(names_of_groups):
        raise CheckpointError(
            f"the parameters of {len(groups)} groups in stage 3 have no group; convert the "
            "checkpoint with DeepSpeed's stage 2 first"
        )
    return [_hyper(group, names) for group, names in zip(groups, names_of_groups, strict=True)]


def _hyper(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return plain_group({key: group[key] for key in HYPER_PARAMETERS if key in group}, names)


def _stage_0(path: Path, model: dict[str, Any]) -> ZeroCheckpoint:
    """Read stage 0: an ordinary optimizer of whole parameters, in the module's order."""
    optimizer = model["optimizer"]
    if optimizer is None:
        raise CheckpointError(f"{path}: holds no optimizer state and no *_optim_states.pt")
    base = optimizer.get("optimizer_state_dict", optimizer)
    groups = base["param_groups"]
    if len(groups) != 1:
        raise CheckpointError(
            f"{path}: ZeRO stage 0 with {len(groups)} parameter groups does not name "
            "the parameters of each group"
        )
    module = model["module"]
    buffers = _buffers(model)
    aliases = _shared(module)
    names = [name for name in module if name not in buffers and name not in aliases]
    count = len(groups[0]["params"])
    if len(names) != count:
        raise CheckpointError(
            f"{path}: {len(names)} parameters and {count} in the optimizer: ZeRO stage 0 does "
            "not name the frozen ones"
        )
    fp32_groups = optimizer.get("fp32_groups")  # the masters of 16-bit training
    parameters = []
    for index, name in enumerate(names):
        weight = module[name]
        state = base["state"].get(index, {})
        moments: dict[str, Views] = {}
        for moment in _moment_names([state]):
            if state[moment].shape != weight.shape:
                raise CheckpointError(
                    f"{path}: {name} and the moments at its place differ in shape"
                )
            moments[moment] = [state[moment].reshape(-1)]
        master = fp32_groups[0][index] if fp32_groups else weight
        parameters.append(
            ZeroParameter(
                name=name,
                shape=tuple(weight.shape),
                dtype=weight.dtype,
                trainable=True,
                master=[master.detach().reshape(-1)],
                moments=moments or None,
                step=_step(state, {"base_optimizer_state": base}),
            )
        )
    return ZeroCheckpoint(
        model=model, parameters=parameters, groups=[_hyper(groups[0], names)], aliases=aliases
    )


def _shared(module: dict[str, Any]) -> dict[str, str]:
    """Return the tied names. Each maps to an earlier name with the same memory."""
    first_names: dict[tuple[int, torch.Size], str] = {}
    aliases = {}
    for name, value in module.items():
        memory = value.data_ptr(), value.shape
        if value.numel() and first_names.setdefault(memory, name) != name:
            aliases[name] = first_names[memory]
    return aliases


# -- export ---------------------------------------------------------------------------------------
def export_zero(source: Path, out: Path) -> list[Path]:
    """Write the checkpoint directory `source` in the layout of ZeRO stage 2 with one rank.

    The new directory `out` gets the tag `source.name`, and `latest`. ZeRO counts steps per group.
    If the counts of a group differ (experts that not every step used), it gets the largest, with a
    warning. Sums over the micro-batches of a step that had not ended are left out, with a warning.

    Returns the files of the tag. Raises ConfigError if the checkpoint has no masters and moments.
    """
    directory.check_new(out)
    with OpenTag(source) as opened:
        manifest = opened.manifest
        if manifest.groups is None or not any(record.has_moments for record in manifest.tensors):
            raise ConfigError(
                f"{source}: has no masters and moments, which ZeRO's layout needs; it was saved "
                "before the first backward or without an optimizer. Export it with --to hf"
            )
        if manifest.has_sums:
            logger.warning(
                "%s was saved between the micro-batches of a step. ZeRO's layout has no sums over "
                "the micro-batches: they are left out, and the next micro-batch begins a step",
                source,
            )
        opened.check(manifest.files)
        opened.check_headers(manifest.tensors, state=True)
        client = unpack_state(opened.file(STATE), trusted=False)
        with directory.appearing(out) as work:
            tag, scratch = work / source.name, work / ".scratch"
            tag.mkdir()
            scratch.mkdir()
            _write_zero(opened, client, tag, scratch)
            opened.check_unchanged()
            directory.remove(scratch)
            directory.write_latest(work, source.name)
            directory.sync_directory(tag)
    return sorted((out / source.name).iterdir())


def _write_zero(opened: OpenTag, client: ClientState | None, out: Path, scratch: Path) -> None:
    """Write both pickles of DeepSpeed to `out`."""
    manifest = opened.manifest
    record_of_name = {alias: record for record in manifest.tensors for alias in record.aliases}
    groups = []
    for group in manifest.groups or ():
        # A group also names frozen parameters that the checkpoint left out.
        records = [record_of_name[name] for name in group["params"] if name in record_of_name]
        groups.append(records)
    origin = {
        "ds_config": {GAS: manifest.counters[GAS]},
        "ds_version": manifest.versions["deepspeed"],
    }
    optimizer = _optimizer_state(opened, groups, scratch)
    if manifest.dtype is torch.float16:
        scaler = deepspeeds_scaler((client and client.loss_scale) or {})
        if scaler is None:
            logger.warning(
                "%s does not hold the whole loss scale: DeepSpeed begins with its config's", STATE
            )
        else:
            optimizer |= {"loss_scaler": scaler, "dynamic_loss_scale": scaler.dynamic}
    optimizer["ds_version"] = origin["ds_version"]
    prefix = "bf16_" if manifest.dtype is torch.bfloat16 else ""
    optimizer_file = f"{prefix}zero_pp_rank_0_{STATE.replace('model_states', 'optim_states')}"
    torch.save({"optimizer_state_dict": optimizer, **origin}, out / optimizer_file)
    model_state = _model_state(opened, client, groups)
    user_state = client.client if client else {}
    torch.save(
        {**user_state, **model_state, **origin, "universal_checkpoint_info": {}}, out / STATE
    )


def _model_state(
    opened: OpenTag, client: ClientState | None, groups: list[list[TensorRecord]]
) -> dict[str, Any]:
    """Return DeepSpeed's model state, with weights and buffers as mapped tensors."""
    manifest = opened.manifest
    weights = {record.name: opened.weights(record) for record in manifest.tensors}
    buffers = {name: opened.tensors(BUFFERS).mapped(name) for name in manifest.buffers}
    frozen = [record for record in manifest.tensors if not record.trainable]
    module: OrderedDict[str, torch.Tensor] = OrderedDict()
    shared_names = {}
    for record in manifest.tensors:
        for alias in record.aliases:
            module[alias] = weights[record.name]
            if alias != record.name:
                shared_names[alias] = record.name
    module.update(buffers)
    counters = {key: value for key, value in manifest.counters.items() if key in OWN_KEYS}
    return {
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [_shapes(group) for group in groups],
        "frozen_param_shapes": _shapes(frozen),
        "frozen_param_fragments": OrderedDict(
            (record.name, weights[record.name]) for record in frozen
        ),
        "shared_params": shared_names,
        "lr_scheduler": client.scheduler if client else None,
        "data_sampler": client.loader if client else None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        **counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
    }


def _shapes(records: Sequence[TensorRecord]) -> OrderedDict[str, torch.Size]:
    return OrderedDict((record.name, torch.Size(record.shape)) for record in records)


def _optimizer_state(
    opened: OpenTag, groups: list[list[TensorRecord]], scratch: Path
) -> dict[str, Any]:
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    flats, states, mappings, paddings = [], {}, [], []
    for index, group in enumerate(groups):
        numel = sum(record.numel for record in group)
        padded_numel = -(-numel // ALIGNMENT) * ALIGNMENT
        paddings.append(padded_numel - numel)
        fp32 = _scratch(scratch / f"fp32-{index}", numel)
        moments = {
            name: _scratch(scratch / f"{name}-{index}", padded_numel)
            for name in _moment_names_of(group)
        }
        mapping: OrderedDict[str, fragment_address] = OrderedDict()
        begin = 0
        for record in group:
            mapping[record.name] = fragment_address(numel=record.numel, start=begin)
            _copy_master(opened, record, fp32[begin : begin + record.numel])
            if record.has_moments:
                _copy_moments(opened, record, moments, begin)
            begin += record.numel
        flats.append(fp32)
        mappings.append(mapping)
        states[index] = {"step": torch.tensor(float(_largest_step(group))), **moments}
    hyper = []  # as in a torch optimizer's state dict: parameter i is group i
    for index, settings in enumerate(opened.manifest.groups or ()):
        values = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in settings.items()
        }
        hyper.append(values | {"params": [index]})
    return {
        "overflow": False,
        "base_optimizer_state": {"state": states, "param_groups": hyper},
        "single_partition_of_fp32_groups": flats,
        "zero_stage": ZeroStageEnum.gradients,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group) for group in groups],
        "partition_count": [1] * len(groups),
        "param_slice_mappings": mappings,
    }


def _moment_names_of(group: Sequence[TensorRecord]) -> list[str]:
    """Return the names of all moments of a group's optimizers."""
    optimizers = {record.optimizer for record in group if record.has_moments}
    names = []
    for optimizer in sorted(optimizers):
        names += [moment.name for moment in optimizer_named(optimizer).possible_moments]
    return names


def _copy_master(opened: OpenTag, record: TensorRecord, target: torch.Tensor) -> None:
    """Copy a parameter's exact master into the flat fp32 `target`, piece by piece."""
    begin = 0
    for piece in masters(opened, record, exact=True):
        end = begin + piece.numel()
        target[begin:end] = piece
        begin = end


def _copy_moments(
    opened: OpenTag, record: TensorRecord, targets: dict[str, torch.Tensor], first: int
) -> None:
    """Copy a parameter's moments into the flat fp32 `targets`, from element `first` on."""
    for begin in range(0, record.numel, PIECE_NUMEL):
        end = min(begin + PIECE_NUMEL, record.numel)
        values = moments_of(opened, record, begin, end)
        for moment, target in targets.items():
            target[first + begin : first + end] = values[moment]


def _scratch(path: Path, numel: int) -> torch.Tensor:
    """Return zeros in a new file. The system writes them back when memory is short."""
    return torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)


def _largest_step(group: Sequence[TensorRecord]) -> int:
    steps = sorted({record.step for record in group}) or [0]
    if len(steps) > 1:
        logger.warning(
            "parameters of one group were updated %d to %d times; ZeRO keeps one count: %d",
            steps[0],
            steps[-1],
            steps[-1],
        )
    return steps[-1]
