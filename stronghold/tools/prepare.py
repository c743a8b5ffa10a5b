"""`stronghold prepare`: packs the blocks of a model once, for any number of runs.

Owns the table that it prints. `checkpoint.prepare` does the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch

from stronghold.checkpoint.prepare import KindError, Prepared, prepare
from stronghold.config.section import parse_bytes
from stronghold.errors import ConfigError, format_size
from stronghold.tools.answer import Answer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run(arguments: argparse.Namespace, report: Callable[[str], None]) -> Answer:
    """Write a prepared base. The answer has its figures, and the error of each kind of layer."""
    try:
        max_file_bytes = parse_bytes(arguments.max_file_size)
    except ValueError as error:
        raise ConfigError(f"--max-file-size {arguments.max_file_size}: {error}") from error
    prepared = prepare(
        arguments.model_dir,
        arguments.output,
        frozen=arguments.frozen,
        dtype=DTYPES[arguments.precision],
        layers=arguments.layers,
        max_file_bytes=max_file_bytes,
        report=report,
    )
    return Answer(text="\n".join(_lines(prepared, arguments.frozen)))


def _lines(prepared: Prepared, frozen: str) -> Iterable[str]:
    """The figures of a base, and its table of errors."""
    per_parameter = prepared.num_bytes / max(prepared.num_parameters, 1)
    yield (
        f"{prepared.path}: {prepared.num_layers} layers in {frozen}, "
        f"{format_size(prepared.num_bytes)}, {per_parameter:.3f} bytes per parameter"
    )
    yield (
        f"{prepared.seconds:.1f} s, of these {prepared.packing_s:.1f} s packing and "
        f"{prepared.waiting_s:.1f} s waiting for the disk"
    )
    if not prepared.errors:
        yield "no weight was packed: each would be larger packed than as it came"
        return
    width = max(len(error.kind) for error in prepared.errors)
    yield f"{'kind of layer':{max(width, 13)}}  weights  rms error  largest error"
    for kind_error in prepared.errors:
        yield _row(kind_error, max(width, 13))


def _row(kind_error: KindError, width: int) -> str:
    error = kind_error.error
    return (
        f"{kind_error.kind:{width}}  {kind_error.num_weights:7d}  {error.rms:9.2e}  "
        f"{error.largest:13.2e}"
    )
