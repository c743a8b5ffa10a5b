"""`stronghold import`: a ZeRO checkpoint of DeepSpeed's becomes one of ours.

Owns the way from fp32 masters to weights and remainders, file by file: nothing larger than a piece
of a tensor is held. Entered by the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint import directory, state
from stronghold.checkpoint.held import PIECE_BYTES, FileRecord
from stronghold.checkpoint.manifest import BUFFERS, STATE, Manifest, TensorRecord
from stronghold.checkpoint.save import versions
from stronghold.checkpoint.tensorfile import (
    Entry,
    entry_of,
    raw_bytes,
    write_durably,
    write_tensors,
)
from stronghold.checkpoint.zero_read import Views, ZeroCheckpoint, ZeroParameter, read_zero
from stronghold.errors import CheckpointError
from stronghold.memory.masters import split_master
from stronghold.memory.tiers import LOW_DTYPE

FILE_NUMEL = 1 << 28  # parameters in one file: a layer of a large model
PIECE_NUMEL = PIECE_BYTES // 4


def import_zero(source: Path, out: Path, tag: str) -> Path:
    """Convert the tag's directory `source` into `out/tag`, and let `out/latest` name it.

    Masters and moments keep every bit. Weights are rounded from the masters as updates round, which
    differs from DeepSpeed's in exact ties. Random states are not in such a checkpoint: loading it
    leaves the program's own.
    """
    zero = read_zero(source)
    dtypes = {parameter.dtype for parameter in zero.parameters if parameter.trainable}
    if len(dtypes) != 1 or not dtypes <= LOW_DTYPE.keys():
        raise CheckpointError(f"{source}: weights in {dtypes}, expected one floating-point type")
    hidden = directory.begin(out, directory.check_tag(tag))
    try:
        _write(zero, hidden, dtypes.pop())
        directory.publish(hidden, out / tag)
        directory.write_latest(out, tag)
    except BaseException:
        directory.remove(hidden)
        raise
    return out / tag


def _write(zero: ZeroCheckpoint, out: Path, dtype: torch.dtype) -> None:
    files: dict[str, FileRecord] = {}
    records: list[TensorRecord] = []
    trained = any(parameter.moments is not None for parameter in zero.parameters)
    for number, batch in enumerate(_batches(zero.parameters)):
        names = {kind: f"{kind}-{number:05d}.safetensors" for kind in _KINDS}
        for kind, entries_of in _KINDS.items():
            entries = [entry for p in batch for entry in entries_of(p, dtype)]
            if entries and (trained or kind == "weights"):
                files[names[kind]] = write_tensors(out / names[kind], entries)
        records += [_record(p, names, dtype, zero, trained) for p in batch]
    if zero.buffers:
        entries = [entry_of(name, value.contiguous()) for name, value in zero.buffers.items()]
        files[BUFFERS] = write_tensors(out / BUFFERS, entries)
    counters = _counters(zero.model)
    client = state.ClientState(
        scheduler=zero.model.get("lr_scheduler"),
        loader=zero.model.get("data_sampler"),
        client=zero.client,
        loss_scale=None,
        random=None,
    )
    made_by = versions()
    files[STATE] = write_durably(out / STATE, [state.pack(client, counters, made_by)])
    Manifest(
        dtype=dtype,
        counters=counters,
        tensors=tuple(records),
        buffers={name: tuple(value.shape) for name, value in zero.buffers.items()},
        groups=tuple(zero.groups),
        files=files,
        versions=made_by,
    ).write(out)


def _batches(parameters: list[ZeroParameter]) -> Iterator[list[ZeroParameter]]:
    batch: list[ZeroParameter] = []
    for parameter in parameters:
        if batch and sum(p.numel for p in batch) + parameter.numel > FILE_NUMEL:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch


def _record(
    parameter: ZeroParameter,
    names: dict[str, str],
    dtype: torch.dtype,
    zero: ZeroCheckpoint,
    trained: bool,
) -> TensorRecord:
    tied = [alias for alias, stored in zero.aliases.items() if stored == parameter.name]
    has_state = parameter.trainable and trained
    return TensorRecord(
        name=parameter.name,
        aliases=(parameter.name, *tied),
        shape=parameter.shape,
        dtype=dtype,
        trainable=parameter.trainable,
        step=parameter.step,
        weights=names["weights"],
        low=names["masters"] if has_state and LOW_DTYPE[dtype] is not None else None,
        moments=names["moments"] if has_state else None,
    )


def _counters(model: dict[str, Any]) -> dict[str, int]:
    steps = int(model["global_steps"])
    gas = int((model.get("ds_config") or {}).get("gradient_accumulation_steps") or 1)
    return {
        "global_steps": steps,
        "global_samples": int(model.get("global_samples", 0)),
        "micro_steps": steps * gas,
        "skipped_steps": int(model.get("skipped_steps", 0)),
        "gradient_accumulation_steps": gas,
    }


# -- entries --------------------------------------------------------------------------------------
def _pieces(views: Views) -> Iterator[torch.Tensor]:
    for view in views:
        for begin in range(0, view.numel(), PIECE_NUMEL):
            yield view[begin : begin + PIECE_NUMEL]


def _entry(
    name: str,
    parameter: ZeroParameter,
    dtype: torch.dtype,
    views: Views,
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> Entry:
    return Entry(
        name=name,
        dtype=dtype,
        shape=parameter.shape,
        pieces=lambda: (raw_bytes(convert(piece).contiguous()) for piece in _pieces(views)),
    )


def _weights(parameter: ZeroParameter, dtype: torch.dtype) -> list[Entry]:
    def rounded(master: torch.Tensor) -> torch.Tensor:
        return split_master(master.float(), dtype)[0] if parameter.trainable else master.to(dtype)

    return [_entry(parameter.name, parameter, dtype, parameter.master, rounded)]


def _masters(parameter: ZeroParameter, dtype: torch.dtype) -> list[Entry]:
    low_dtype = LOW_DTYPE[dtype]
    if low_dtype is None or not parameter.trainable:
        return []

    def low(master: torch.Tensor) -> torch.Tensor:
        found = split_master(master.float(), dtype)[1]
        assert found is not None
        return found

    return [_entry(parameter.name, parameter, low_dtype, parameter.master, low)]


def _moments(parameter: ZeroParameter, dtype: torch.dtype) -> list[Entry]:
    if not parameter.trainable:
        return []
    zeros = [torch.zeros(1).expand(parameter.numel)]  # never had a gradient
    return [
        _entry(f"{key}.{parameter.name}", parameter, torch.float32, views, torch.Tensor.float)
        for key, views in zip(
            ("exp_avg", "exp_avg_sq"), parameter.moments or (zeros, zeros), strict=True
        )
    ]


_KINDS: dict[str, Callable[[ZeroParameter, torch.dtype], list[Entry]]] = {
    "weights": _weights,
    "masters": _masters,
    "moments": _moments,
}
