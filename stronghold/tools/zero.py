"""DeepSpeed's ZeRO checkpoints: `stronghold import` and `stronghold export --to zero-stage2`.

Owns the knowledge of DeepSpeed's layouts (stages 0 to 3, as 0.19 writes them): which rank's file
has which part of which parameter, and the two pickles that `zero_to_fp32.py`, the
universal-checkpoint converter and DeepSpeed's own `load_checkpoint` read. Files are mapped, also
those in which an export builds its flat groups: host memory holds a piece of a tensor at a time.
Reads pickles, safely where torch can: import only what you trust.
"""

from __future__ import annotations

import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

# Of a model-states file; every other key at its top is the client's.
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
Views = list[torch.Tensor]  # flat, one behind the other


class ZeroParameter(NamedTuple):
    """`master` and each of `moments`, by name (None before the first step), are flat views in
    order."""

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


class ZeroCheckpoint(NamedTuple):
    """`model` is rank 0's model state; `aliases` maps tied names to the one that is stored;
    `loss_scale` is as `scaler_state` gives it, of stages 1 to 3."""

    model: dict[str, Any]
    parameters: list[ZeroParameter]
    groups: list[dict[str, Any]]
    aliases: dict[str, str]
    loss_scale: dict[str, Any] | None = None


# -- import ---------------------------------------------------------------------------------------
def import_zero(source: Path, out: Path, tag: str) -> Path:
    """Convert the tag's directory `source` into `out/tag`, and let `out/latest` name it. Masters
    and moments keep every bit; weights are rounded from the masters as updates round, which differs
    from DeepSpeed's in exact ties. Random states are not there: loading leaves the program's own.
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
    trained = any(parameter.moments is not None for parameter in zero.parameters)
    optimizer = _optimizer_of(zero)
    for number, batch in enumerate(shards(zero.parameters, FILE_NUMEL, lambda p: p.numel)):
        kinds: dict[str, list[Entry]] = {"weights": [], "masters": [], "moments": []}
        for parameter in batch:
            for kind, entry in _entries(parameter, dtype, optimizer if trained else None):
                kinds[kind].append(entry)
        names = {kind: f"{kind}-{number:05d}.safetensors" for kind in kinds}
        for kind, entries in kinds.items():
            if entries:
                files[names[kind]] = write_tensors(out / names[kind], entries)
        for p in batch:
            arrays = {WEIGHTS: "weights"}
            if p.trainable and trained:
                arrays |= {LOW: "masters"} if LOW_DTYPE[dtype] else {}
                arrays |= {moment.name: "moments" for moment in optimizer.possible_moments}
            records.append(
                TensorRecord(
                    name=p.name,
                    aliases=(p.name, *(a for a, name in zero.aliases.items() if name == p.name)),
                    shape=p.shape,
                    dtype=dtype,
                    trainable=p.trainable,
                    step=p.step,
                    optimizer=optimizer.name,
                    pieces={
                        array: (StoredPiece(file=names[kind], begin=0, end=p.numel),)
                        for array, kind in arrays.items()
                    },
                )
            )
    buffers = _buffers(zero.model)
    if buffers:
        entries = [entry_of(name, value.contiguous()) for name, value in buffers.items()]
        files[BUFFERS] = write_tensors(out / BUFFERS, entries)
    steps = int(zero.model["global_steps"])
    gas = int((zero.model.get("ds_config") or {}).get(GAS) or 1)
    counters = {
        "global_steps": steps,
        "global_samples": int(zero.model.get("global_samples", 0)),
        "micro_steps": steps * gas,
        "skipped_steps": int(zero.model.get("skipped_steps", 0)),
        GAS: gas,
    }
    client = ClientState(
        scheduler=zero.model.get("lr_scheduler"),
        loader=zero.model.get("data_sampler"),
        loss_scale=zero.loss_scale,
        client={key: value for key, value in zero.model.items() if key not in OWN_KEYS},
    )
    made_by = versions()
    files[STATE] = write_durably(out / STATE, pack_state(client, counters, made_by))
    Manifest(
        dtype=dtype,
        counters=counters,
        tensors=tuple(records),
        buffers={name: tuple(value.shape) for name, value in buffers.items()},
        groups=tuple(zero.groups),
        files=files,
        versions=made_by,
    ).write(out)


def _entries(
    parameter: ZeroParameter, dtype: torch.dtype, optimizer: type[Optimizer] | None
) -> Iterator[tuple[str, Entry]]:
    """(kind of file, entry) of a parameter; with an `optimizer` masters and moments, too."""

    def entry(
        name: str, to: torch.dtype, views: Views, convert: Callable[[torch.Tensor], Any]
    ) -> Entry:
        def pieces() -> Iterator[torch.Tensor]:
            for view in views:
                for piece in view.split(PIECE_BYTES // 4):
                    yield convert(piece).contiguous()

        return Entry(name=name, dtype=to, shape=parameter.shape, pieces=pieces)

    def half(which: int) -> Callable[[torch.Tensor], Any]:
        return lambda master: split_master(master.float(), dtype)[which]

    name, low_dtype = parameter.name, LOW_DTYPE[dtype]
    rounded = half(0) if parameter.trainable else partial(torch.Tensor.to, dtype=dtype)
    yield "weights", entry(name, dtype, parameter.master, rounded)
    if not parameter.trainable or optimizer is None:
        return
    if low_dtype is not None:
        yield "masters", entry(name, low_dtype, parameter.master, half(1))
    zeros = [torch.zeros(1).expand(parameter.numel)]  # never had a gradient
    for moment in optimizer.possible_moments:
        views = (parameter.moments or {}).get(moment.name, zeros)
        yield "moments", entry(f"{moment.name}.{name}", torch.float32, views, torch.Tensor.float)


def _optimizer_of(zero: ZeroCheckpoint) -> type[Optimizer]:
    """The optimizer that has trained the parameters, by the names of their moments."""
    return optimizer_of_state({name for p in zero.parameters for name in p.moments or ()})


# -- reading --------------------------------------------------------------------------------------
def read_zero(path: Path) -> ZeroCheckpoint:
    """Read the tag's directory. CheckpointError when it is no ZeRO checkpoint, or is incomplete."""
    models = sorted(path.glob("*_model_states.pt"), key=_natural)
    optims = sorted(path.glob("*_optim_states.pt"), key=_natural)
    if not models:
        raise CheckpointError(f"{path}: has no {STATE}; not a checkpoint of DeepSpeed's")
    if len(list(path.glob("mp_rank_*_model_states.pt"))) > 1:
        raise CheckpointError(f"{path}: of several model-parallel ranks; only one can be imported")
    states = [_load(file) for file in models]
    try:
        if not optims:
            return _stage_0(path, states[0])
        shards = [_load(file)["optimizer_state_dict"] for file in optims]
        return _sharded(path, states, shards)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not laid out as DeepSpeed does: {error!r}") from error


def _natural(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _load(file: Path) -> dict[str, Any]:
    """Read a file with torch's safe reader, if it holds only tensors and DeepSpeed's types.

    Else it is read as DeepSpeed reads it, with a warning in the log.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    load = partial(torch.load, file, map_location="cpu", mmap=True)
    known = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(known):
            state: dict[str, Any] = load(weights_only=True)
    except OSError:
        raise
    except Exception as error:  # that reader has no one type of error
        logger.warning(
            "%s: code of its own may run while it is read, as when DeepSpeed loads it: %s",
            file,
            unsafe_reason(error),
        )
        try:
            state = load(weights_only=False)
        except Exception as cause:
            raise CheckpointError(f"{file}: {cause!r}") from cause
    return state


def _sharded(
    path: Path, states: list[dict[str, Any]], shards: list[dict[str, Any]]
) -> ZeroCheckpoint:
    """Stages 1 to 3."""
    stage = int(shards[0]["zero_stage"])
    count = shards[0]["partition_count"]
    ranks = max(count) if isinstance(count, list) else int(count)
    if ranks != len(shards):
        raise CheckpointError(f"{path}: {len(shards)} files *_optim_states.pt, expected {ranks}")
    model = states[0]
    shapes = model["param_shapes"]
    read = _stage_3 if stage == 3 else _stage_2
    parameters = [
        ZeroParameter(name, shape, model["module"][name].dtype, True, *rest)
        for name, shape, *rest in read(shapes, shards, path)
    ]
    parameters += _frozen(states, {p.name for p in parameters}, ranks if stage == 3 else 1)
    aliases = dict(model.get("shared_params") or {})
    scaler = shards[0].get("loss_scaler")
    loss_scale = None if scaler is None else scaler_state(scaler)
    return ZeroCheckpoint(model, parameters, _groups(shards[0], shapes), aliases, loss_scale)


def _stage_2(
    shapes: Sequence[dict[str, Any]], shards: list[dict[str, Any]], path: Path
) -> Iterator[tuple[Any, ...]]:
    """Name, shape, master, moments and step of each parameter in stages 1 and 2: each rank has a
    part of a group's parameters, one behind the other."""
    paddings = shards[0].get("param_alignment_paddings")
    for group, of_group in enumerate(shapes):
        fp32 = [shard["single_partition_of_fp32_groups"][group] for shard in shards]
        states = []
        for shard in shards:
            base = shard["base_optimizer_state"]
            states.append(base["state"].get(group, {}) if isinstance(base, dict) else base[group])
        keys = _moment_names(states)
        flats = {key: [state[key] for state in states] for key in keys}
        begin, step = 0, _step(states[0], shards[0])
        for k, (name, shape) in enumerate(of_group.items()):
            numel = math.prod(shape)
            moments = {key: _joined(flat, begin, numel, path) for key, flat in flats.items()}
            yield name, tuple(shape), _joined(fp32, begin, numel, path), moments or None, step
            begin += numel + (paddings[group][k] if paddings is not None else 0)


def _stage_3(
    shapes: Sequence[dict[str, Any]], shards: list[dict[str, Any]], path: Path
) -> Iterator[tuple[Any, ...]]:
    """The parameters of stage 3. Each rank has an equal part of every parameter, in order."""
    states = [shard["optimizer_state_dict"]["state"] for shard in shards]
    step = _step(states[0].get(0, {}), shards[0]["optimizer_state_dict"])
    fp32 = [shard["fp32_flat_groups"] for shard in shards]
    keys = _moment_names([of_group for state in states for of_group in state.values()])
    flats = [[[state[g][key] for g in sorted(state)] for state in states] for key in keys]
    begin = 0
    for name, shape in ((n, s) for of_group in shapes for n, s in of_group.items()):
        numel = math.prod(shape)
        part = -(-numel // len(shards))
        master, *moments = (
            _trimmed([v for flat in of_ranks for v in _joined(flat, begin, part, path)], numel)
            for of_ranks in (fp32, *flats)
        )
        yield name, tuple(shape), master, dict(zip(keys, moments, strict=True)) or None, step
        begin += part


def _moment_names(states: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the tensors that every one of an optimizer's states has, beside its step."""
    named = [{k for k, v in s.items() if k != "step" and torch.is_tensor(v)} for s in states]
    return sorted(set.intersection(*named)) if named else []


def _step(state: dict[str, Any], shard: dict[str, Any]) -> int:
    """The optimizer's count: torch keeps it with the state, fused optimizers with the group."""
    if "step" in state:
        return int(state["step"])
    base = shard.get("base_optimizer_state", shard)
    groups = base.get("param_groups", [{}]) if isinstance(base, dict) else [{}]
    return int(groups[0].get("step", shard.get("base_optimizer_state_step", 0)))


def _joined(flats: Sequence[torch.Tensor], begin: int, numel: int, path: Path) -> Views:
    """Views of `numel` elements from `begin` on of `flats`, as if they were one tensor."""
    views, at = [], 0
    for flat in flats:
        low, high = max(begin, at), min(begin + numel, at + flat.numel())
        if low < high:
            views.append(flat.detach()[low - at : high - at])
        at += flat.numel()
    if sum(view.numel() for view in views) != numel:
        raise CheckpointError(f"{path}: the partitions end at {at}, within a parameter")
    return views


def _trimmed(views: Views, numel: int) -> Views:
    kept: Views = []
    for view in views:
        kept.append(view[:numel])
        numel -= kept[-1].numel()
    return kept


def _frozen(states: list[dict[str, Any]], trained: set[str], ranks: int) -> Iterator[ZeroParameter]:
    """Parameters that no optimizer owns: from the fragments (stages 2 and 3), else the module."""
    model = states[0]
    shapes = model.get("frozen_param_shapes")
    if shapes is None:
        known = trained | set(_buffers(model)) | set(model.get("shared_params") or {})
        stored = {k: v for k, v in model["module"].items() if k not in known}
        shapes = {name: tuple(value.shape) for name, value in stored.items()}
        fragments = [stored]
    else:
        fragments = [state["frozen_param_fragments"] for state in states[:ranks]]
    for name, shape in shapes.items():
        views = [fragment[name].detach().reshape(-1) for fragment in fragments]
        master = _trimmed(views, math.prod(shape))
        yield ZeroParameter(name, tuple(shape), views[0].dtype, False, master, None, 0)


def _buffers(model: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: model["module"][name] for name in model["buffer_names"] or ()}


def _groups(shard: dict[str, Any], shapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hyper-parameters with the names of each group. Stage 3's sub-groups are not its groups: there
    they are one."""
    base = shard.get("base_optimizer_state", shard.get("optimizer_state_dict"))
    listed = base["param_groups"] if isinstance(base, dict) else [{} for _ in shapes]
    if len(listed) != len(shapes):
        shapes = [{name: None for of_group in shapes for name in of_group}]
    if len(listed) != len(shapes):
        raise CheckpointError(
            f"the parameters of {len(listed)} groups in stage 3 have no group; convert the "
            "checkpoint with DeepSpeed's stage 2 first"
        )
    return [_hyper(group, list(names)) for group, names in zip(listed, shapes, strict=True)]


def _hyper(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return plain_group({key: group[key] for key in HYPER_PARAMETERS if key in group}, names)


def _stage_0(path: Path, model: dict[str, Any]) -> ZeroCheckpoint:
    """An ordinary optimizer over whole parameters, in the module's order."""
    optimizer = model["optimizer"]
    if optimizer is None:
        raise CheckpointError(f"{path}: holds no optimizer state and no *_optim_states.pt")
    base = optimizer.get("optimizer_state_dict", optimizer)
    fp32 = optimizer.get("fp32_groups")  # 16-bit training keeps its masters here
    if len(base["param_groups"]) != 1:
        raise CheckpointError(
            f"{path}: ZeRO stage 0 with {len(base['param_groups'])} parameter groups does not say "
            "which parameter is in which"
        )
    buffers = _buffers(model)
    aliases = _shared(model["module"])
    names = [name for name in model["module"] if name not in buffers and name not in aliases]
    count = len(base["param_groups"][0]["params"])
    if len(names) != count:
        raise CheckpointError(
            f"{path}: {len(names)} parameters and {count} in the optimizer: ZeRO stage 0 does "
            "not name the frozen ones"
        )
    parameters = []
    for k, name in enumerate(names):
        weight, state = model["module"][name], base["state"].get(k, {})
        saved = {moment: state[moment] for moment in _moment_names([state])}
        if any(moment.shape != weight.shape for moment in saved.values()):
            raise CheckpointError(f"{path}: {name} and the moments at its place differ in shape")
        moments = {moment: [value.reshape(-1)] for moment, value in saved.items()} or None
        master = [(fp32[0][k] if fp32 else weight).detach().reshape(-1)]
        step, shape = _step(state, {"base_optimizer_state": base}), tuple(weight.shape)
        parameters.append(ZeroParameter(name, shape, weight.dtype, True, master, moments, step))
    return ZeroCheckpoint(model, parameters, [_hyper(base["param_groups"][0], names)], aliases)


def _shared(module: dict[str, Any]) -> dict[str, str]:
    """The tied names: each maps to an earlier name with the same memory."""
    first: dict[tuple[int, torch.Size], str] = {}
    tied = {}
    for name, value in module.items():
        key = value.data_ptr(), value.shape
        if value.numel() and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


# -- export ---------------------------------------------------------------------------------------
def export_zero(source: Path, out: Path) -> list[Path]:
    """Write the checkpoint directory `source` in the layout for one rank, as tag `source.name` of
    the new directory `out`, with `latest`; returns its files. ConfigError without masters and
    moments. ZeRO counts steps per group: of different counts (experts that were not always used)
    the largest is written, with a warning."""
    directory.check_new(out)
    with OpenTag(source) as opened:
        manifest = opened.manifest
        if manifest.groups is None or not any(record.has_moments for record in manifest.tensors):
            raise ConfigError(
                f"{source}: has no masters and moments, which ZeRO's layout is made of; it was "
                "saved before the first backward or without an optimizer. Export it with --to hf"
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
    manifest = opened.manifest
    by_name = {alias: record for record in manifest.tensors for alias in record.aliases}
    groups = [  # frozen parameters that were left out are in a group, too
        [by_name[name] for name in group["params"] if name in by_name]
        for group in manifest.groups or ()
    ]
    described = {
        "ds_config": {GAS: manifest.counters[GAS]},
        "ds_version": manifest.versions["deepspeed"],
    }
    optimizer = _optimizer_state(opened, groups, scratch)
    if manifest.dtype is torch.float16:
        scaler = deepspeeds_scaler((client and client.loss_scale) or {})
        if scaler is None:
            logger.warning(
                "%s does not say the whole loss scale: DeepSpeed begins with that of its config",
                STATE,
            )
        else:
            optimizer |= {"loss_scaler": scaler, "dynamic_loss_scale": scaler.dynamic}
    prefix = "bf16_" if manifest.dtype is torch.bfloat16 else ""
    torch.save(
        {
            "optimizer_state_dict": {**optimizer, "ds_version": described["ds_version"]},
            **described,
        },
        out / f"{prefix}zero_pp_rank_0_{STATE.replace('model_states', 'optim_states')}",
    )
    frozen = [record for record in manifest.tensors if not record.trainable]
    weights = {record.name: opened.weights(record) for record in manifest.tensors}
    module = {alias: weights[r.name] for r in manifest.tensors for alias in r.aliases}
    buffers = {name: opened.tensors(BUFFERS).mapped(name) for name in manifest.buffers}
    model_state: dict[str, Any] = {
        "module": OrderedDict({**module, **buffers}),
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [_shapes(group) for group in groups],
        "frozen_param_shapes": _shapes(frozen),
        "frozen_param_fragments": OrderedDict((r.name, weights[r.name]) for r in frozen),
        "shared_params": {a: r.name for r in manifest.tensors for a in r.aliases if a != r.name},
        "lr_scheduler": client.scheduler if client else None,
        "data_sampler": client.loader if client else None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        **{key: value for key, value in manifest.counters.items() if key in OWN_KEYS},
        "dp_world_size": 1,
        "mp_world_size": 1,
        **described,
        "universal_checkpoint_info": {},
    }
    torch.save({**(client.client if client else {}), **model_state}, out / STATE)


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
        padded = -(-numel // ALIGNMENT) * ALIGNMENT
        paddings.append(padded - numel)
        fp32 = _scratch(scratch / f"fp32-{index}", numel)
        optimizers = {record.optimizer for record in group if record.has_moments}
        names = [m.name for o in sorted(optimizers) for m in optimizer_named(o).possible_moments]
        moments = {name: _scratch(scratch / f"{name}-{index}", padded) for name in names}
        mapping, begin = OrderedDict(), 0
        for record in group:
            mapping[record.name] = fragment_address(numel=record.numel, start=begin)
            at = begin
            for piece in masters(opened, record, exact=True):
                fp32[at : at + piece.numel()] = piece
                at += piece.numel()
            if record.has_moments:
                for at in range(0, record.numel, PIECE_NUMEL):
                    end = min(at + PIECE_NUMEL, record.numel)
                    values = moments_of(opened, record, at, end)
                    for moment, flat in moments.items():
                        flat[begin + at : begin + end] = values[moment]
            begin += record.numel
        flats.append(fp32)
        mappings.append(mapping)
        states[index] = {"step": torch.tensor(float(_largest_step(group))), **moments}
    hyper = [  # in the form of a torch optimizer's state dict: parameter i is group i
        {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} | {"params": [index]}
        for index, group in enumerate(opened.manifest.groups or ())
    ]
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


def _scratch(path: Path, numel: int) -> torch.Tensor:
    """Zeros in a new file, which the system writes back when memory is short."""
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
