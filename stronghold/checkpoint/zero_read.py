"""What DeepSpeed's ZeRO checkpoints hold, parameter by parameter.

Owns the knowledge of DeepSpeed's layouts (stages 0 to 3, as 0.19 writes them): which rank's file
has which part of which parameter. Files are mapped, not read: a parameter is a list of views. Reads
pickles, safely where torch can: import only what you trust. Entered by the command.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint import state
from stronghold.checkpoint.manifest import STATE
from stronghold.errors import CheckpointError

logger = logging.getLogger("stronghold")

# Of a model-states file; every other key at its top is the client's.
_OWN = """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params
    frozen_param_fragments lr_scheduler data_sampler random_ltd sparse_tensor_module_names
    skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version
    checkpoint_parallel_dimensions universal_checkpoint_info
"""
OWN_KEYS = frozenset(_OWN.split())
HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "initial_lr", "bias_correction")
Views = list[torch.Tensor]  # flat, one behind the other


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroParameter:
    """`master` and the moments are flat views in order; moments are None before the first step."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    master: Views
    moments: tuple[Views, Views] | None
    step: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCheckpoint:
    """`model` is rank 0's model state; `aliases` maps tied names to the one that is stored."""

    stage: int
    model: dict[str, Any]
    parameters: list[ZeroParameter]
    groups: list[dict[str, Any]]
    aliases: dict[str, str]
    buffers: dict[str, torch.Tensor]

    @property
    def client(self) -> dict[str, Any]:
        """What the caller of DeepSpeed's save_checkpoint gave."""
        return {key: value for key, value in self.model.items() if key not in OWN_KEYS}


def read_zero(path: Path) -> ZeroCheckpoint:
    """Read the tag's directory `path`. CheckpointError when it is no ZeRO checkpoint, a file is
    missing, or sizes contradict each other.
    """
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
    """With torch's safe reader where the file holds nothing but tensors and types of DeepSpeed's;
    else as DeepSpeed itself does, and the log says so."""
    load = partial(torch.load, file, map_location="cpu", mmap=True)
    found: dict[str, Any]
    try:
        with torch.serialization.safe_globals(_types_of_deepspeeds()):
            found = load(weights_only=True)
    except OSError:
        raise
    except Exception as error:  # that reader has no one type of error
        logger.warning(
            "%s: code of its own may run while it is read, as when DeepSpeed loads it: %s",
            file,
            state.unsafe_reason(error),
        )
        try:
            found = load(weights_only=False)
        except Exception as cause:
            raise CheckpointError(f"{file}: {cause!r}") from cause
    return found


def _types_of_deepspeeds() -> list[Any]:
    """What its own code puts into the files."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


# -- stages 1 to 3 --------------------------------------------------------------------------------
def _sharded(
    path: Path, states: list[dict[str, Any]], shards: list[dict[str, Any]]
) -> ZeroCheckpoint:
    stage = int(shards[0]["zero_stage"])
    count = shards[0]["partition_count"]
    ranks = max(count) if isinstance(count, list) else int(count)
    if ranks != len(shards):
        raise CheckpointError(f"{path}: {len(shards)} files *_optim_states.pt, expected {ranks}")
    model = states[0]
    shapes = model["param_shapes"]
    parameters: list[ZeroParameter] = []
    if stage == 3:
        parameters += _stage_3(shapes, shards, model, path)
    else:
        for group, of_group in enumerate(shapes):
            parameters += _stage_2(group, of_group, shards, model, path)
    parameters += _frozen(states, {p.name for p in parameters}, ranks if stage == 3 else 1)
    return ZeroCheckpoint(
        stage=stage,
        model=model,
        parameters=parameters,
        groups=_groups(shards[0], shapes),
        aliases=dict(model.get("shared_params") or {}),
        buffers=_buffers(model),
    )


def _stage_2(
    group: int, shapes: dict[str, Any], shards: list[dict[str, Any]], model: Any, path: Path
) -> Iterator[ZeroParameter]:
    """Stages 1 and 2: each rank has a part of the group's parameters, one behind the other."""
    fp32 = [shard["single_partition_of_fp32_groups"][group] for shard in shards]
    states = [_group_state(shard, group) for shard in shards]
    paddings = shards[0].get("param_alignment_paddings")
    begin = 0
    for k, (name, shape) in enumerate(shapes.items()):
        numel = math.prod(shape)
        yield ZeroParameter(
            name=name,
            shape=tuple(shape),
            dtype=model["module"][name].dtype,
            trainable=True,
            master=_joined(fp32, begin, numel, path),
            moments=_moments(states, lambda f, b=begin, n=numel: _joined(f, b, n, path)),
            step=_step(states[0], shards[0]),
        )
        begin += numel + (paddings[group][k] if paddings is not None else 0)


def _stage_3(
    shapes: Sequence[dict[str, Any]], shards: list[dict[str, Any]], model: Any, path: Path
) -> Iterator[ZeroParameter]:
    """Each rank has an equal part of every parameter; parts lie one behind the other over all of
    the rank's sub-groups.
    """
    ranks = len(shards)
    states = [shard["optimizer_state_dict"]["state"] for shard in shards]
    begin = 0
    for of_group in shapes:
        for name, shape in of_group.items():
            numel = math.prod(shape)
            part = -(-numel // ranks)

            def over_ranks(
                flats: list[Any], b: int = begin, p: int = part, n: int = numel
            ) -> Views:
                views = [view for flat in flats for view in _joined(flat, b, p, path)]
                return _trimmed(views, n)

            moments = None
            if states[0]:
                first, second = (
                    over_ranks([[state[g][key] for g in sorted(state)] for state in states])
                    for key in ("exp_avg", "exp_avg_sq")
                )
                moments = first, second
            yield ZeroParameter(
                name=name,
                shape=tuple(shape),
                dtype=model["module"][name].dtype,
                trainable=True,
                master=over_ranks([shard["fp32_flat_groups"] for shard in shards]),
                moments=moments,
                step=_step(states[0].get(0, {}), shards[0]["optimizer_state_dict"]),
            )
            begin += part


def _group_state(shard: dict[str, Any], group: int) -> dict[str, Any]:
    base = shard["base_optimizer_state"]
    state: dict[str, Any] = base["state"].get(group, {}) if isinstance(base, dict) else base[group]
    return state


def _moments(states: list[dict[str, Any]], joined: Any) -> tuple[Views, Views] | None:
    if not all("exp_avg" in state for state in states):
        return None
    return joined([s["exp_avg"] for s in states]), joined([s["exp_avg_sq"] for s in states])


def _step(state: dict[str, Any], shard: dict[str, Any]) -> int:
    """Adam's count: torch keeps it with the state, fused optimizers with the group."""
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
    """Hyper-parameters with the names of each group. Stage 3's sub-groups are not its groups: there
    they are one."""
    base = shard.get("base_optimizer_state", shard.get("optimizer_state_dict"))
    listed = base["param_groups"] if isinstance(base, dict) else [{} for _ in shapes]
    if len(listed) != len(shapes):
        shapes = [{name: None for of_group in shapes for name in of_group}]
    if len(listed) != len(shapes):
        raise CheckpointError(
            f"{len(listed)} parameter groups in stage 3 cannot be told apart; convert the "
            "checkpoint with DeepSpeed's stage 2 first"
        )
    return [_plain_group(g, list(names)) for g, names in zip(listed, shapes, strict=True)]


def _plain_group(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    kept = {key: group[key] for key in HYPER_PARAMETERS if key in group}
    plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
    return {**plain, "params": names}


# -- stage 0 --------------------------------------------------------------------------------------
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
            f"{path}: {len(names)} parameters and {count} in the optimizer: frozen ones "
            "cannot be told apart in ZeRO stage 0"
        )
    parameters = []
    for k, name in enumerate(names):
        weight, state = model["module"][name], base["state"].get(k, {})
        if "exp_avg" in state and state["exp_avg"].shape != weight.shape:
            raise CheckpointError(f"{path}: {name} and the moments at its place differ in shape")
        moments = ([state[m].reshape(-1)] for m in ("exp_avg", "exp_avg_sq") if m in state)
        parameters.append(
            ZeroParameter(
                name=name,
                shape=tuple(weight.shape),
                dtype=weight.dtype,
                trainable=True,
                master=[(fp32[0][k] if fp32 else weight).detach().reshape(-1)],
                moments=tuple(moments) or None,  # type: ignore[arg-type]
                step=_step(state, {"base_optimizer_state": base}),
            )
        )
    groups = [_plain_group(base["param_groups"][0], names)]
    return ZeroCheckpoint(
        stage=0, model=model, parameters=parameters, groups=groups, aliases=aliases, buffers=buffers
    )


def _shared(module: dict[str, Any]) -> dict[str, str]:
    """Tied names: those whose memory an earlier one has already."""
    first: dict[tuple[int, torch.Size], str] = {}
    found = {}
    for name, value in module.items():
        key = value.data_ptr(), value.shape
        if value.numel() and first.setdefault(key, name) != name:
            found[name] = first[key]
    return found
