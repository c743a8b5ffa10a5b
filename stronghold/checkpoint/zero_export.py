"""`stronghold export --to zero-stage2`: a checkpoint of ours in DeepSpeed's layout for one rank.

Owns the two pickles that `zero_to_fp32.py`, the universal-checkpoint converter and DeepSpeed's own
`load_checkpoint` read. The flat groups are built in mapped files, so that host memory holds a piece
of a tensor at a time. Entered by the command.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint import directory, state
from stronghold.checkpoint.export import check_new
from stronghold.checkpoint.load import masters
from stronghold.checkpoint.manifest import BUFFERS, STATE, Manifest, TensorRecord
from stronghold.checkpoint.tag import OpenTag
from stronghold.checkpoint.zero_read import OWN_KEYS
from stronghold.errors import ConfigError

logger = logging.getLogger("stronghold")

ALIGNMENT = 2  # DeepSpeed pads a group's flat tensor to twice the number of ranks


def export_zero(source: Path, out: Path) -> list[Path]:
    """Write the checkpoint directory `source` as tag `source.name` of the new directory `out`, with
    `latest`; returns its files. ConfigError for a checkpoint without masters and moments.

    ZeRO counts steps per group: where parameters of one group have different counts (experts that
    were not always used), the largest is written, and a warning says so.
    """
    check_new(out)
    with OpenTag(source) as opened:
        manifest = opened.manifest
        if manifest.groups is None or not any(record.moments for record in manifest.tensors):
            raise ConfigError(
                f"{source}: has no masters and moments, which ZeRO's layout is made of; it was "
                "saved before the first backward or without an optimizer. Export it with --to hf"
            )
        opened.check(manifest.files)
        for record in manifest.tensors:
            opened.check_tensor(record, state=True)
        if manifest.buffers:
            opened.check_buffers(BUFFERS)
        client = state.unpack(opened.file(STATE), trusted=False)
        work = directory.begin(out.parent, out.name)
        try:
            tag = work / source.name
            tag.mkdir()
            scratch = work / ".scratch"
            scratch.mkdir()
            _write(opened, client, tag, scratch)
            opened.check_unchanged()
            directory.remove(scratch)
            directory.write_latest(work, source.name)
            directory.sync_directory(tag)
            directory.publish(work, out)
        except BaseException:
            directory.remove(work)
            raise
    return sorted((out / source.name).iterdir())


def _write(opened: OpenTag, client: state.ClientState | None, out: Path, scratch: Path) -> None:
    manifest = opened.manifest
    by_name = {alias: record for record in manifest.tensors for alias in record.aliases}
    groups = [  # frozen parameters that were left out are in a group, too
        [by_name[name] for name in group["params"] if name in by_name]
        for group in manifest.groups or ()
    ]
    ds_version = manifest.versions["deepspeed"]
    ds_config = {"gradient_accumulation_steps": manifest.counters["gradient_accumulation_steps"]}
    optimizer = _optimizer_state(opened, groups, scratch)
    prefix = "bf16_" if manifest.dtype is torch.bfloat16 else ""
    torch.save(
        {
            "optimizer_state_dict": {**optimizer, "ds_version": ds_version},
            "ds_config": ds_config,
            "ds_version": ds_version,
        },
        out / f"{prefix}zero_pp_rank_0_{STATE.replace('model_states', 'optim_states')}",
    )
    frozen = [record for record in manifest.tensors if not record.trainable]
    weights = {
        record.name: opened.tensors(record.weights).mapped(record.name)
        for record in manifest.tensors
    }
    module = {alias: weights[r.name] for r in manifest.tensors for alias in r.aliases}
    buffers = {name: opened.tensors(BUFFERS).mapped(name) for name in manifest.buffers}
    counters = {k: v for k, v in manifest.counters.items() if k in OWN_KEYS}
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
        **counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": ds_config,
        "ds_version": ds_version,
        "universal_checkpoint_info": {},
    }
    torch.save({**(client.client if client else {}), **model_state}, out / STATE)


def _shapes(records: Sequence[TensorRecord]) -> OrderedDict[str, torch.Size]:
    return OrderedDict((record.name, torch.Size(record.shape)) for record in records)


def _optimizer_state(
    opened: OpenTag,
    groups: list[list[TensorRecord]],
    scratch: Path,
) -> dict[str, Any]:
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    flats, states, mappings, paddings = [], {}, [], []
    for index, group in enumerate(groups):
        numel = sum(record.numel for record in group)
        padded = -(-numel // ALIGNMENT) * ALIGNMENT
        paddings.append(padded - numel)
        fp32 = _scratch(scratch / f"fp32-{index}", numel)
        first = _scratch(scratch / f"exp_avg-{index}", padded)
        second = _scratch(scratch / f"exp_avg_sq-{index}", padded)
        mapping, begin = OrderedDict(), 0
        for record in group:
            mapping[record.name] = fragment_address(numel=record.numel, start=begin)
            _fill(record, opened, begin, fp32, first, second)
            begin += record.numel
        flats.append(fp32)
        mappings.append(mapping)
        step = torch.tensor(float(_step(group)))
        states[index] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    return {
        "dynamic_loss_scale": False,
        "overflow": False,
        "base_optimizer_state": {"state": states, "param_groups": _groups(opened.manifest)},
        "single_partition_of_fp32_groups": flats,
        "zero_stage": ZeroStageEnum.gradients,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group) for group in groups],
        "partition_count": [1] * len(groups),
        "param_slice_mappings": mappings,
    }


def _scratch(path: Path, numel: int) -> torch.Tensor:
    """A flat fp32 tensor in a new file: zero, and written back by the system when memory is
    short."""
    return torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)


def _fill(
    record: TensorRecord,
    opened: OpenTag,
    begin: int,
    fp32: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
) -> None:
    at = begin
    for piece in masters(opened, record, exact=True):
        fp32[at : at + piece.numel()] = piece
        at += piece.numel()
    if record.moments is not None:
        for moment, flat in (("exp_avg", first), ("exp_avg_sq", second)):
            target = flat[begin : begin + record.numel]
            opened.tensors(record.moments).read_into(f"{moment}.{record.name}", target)


def _step(group: Sequence[TensorRecord]) -> int:
    steps = {record.step for record in group}
    if len(steps) > 1:
        logger.warning(
            "parameters of one group were updated %d to %d times; ZeRO keeps one count: %d",
            min(steps),
            max(steps),
            max(steps),
        )
    return max(steps, default=0)


def _groups(manifest: Manifest) -> list[dict[str, Any]]:
    """Hyper-parameters in the form of a torch optimizer's state dict: parameter i is group i."""
    return [
        {
            **{k: tuple(v) if isinstance(v, list) else v for k, v in group.items()},
            "params": [index],
        }
        for index, group in enumerate(manifest.groups or ())
    ]
