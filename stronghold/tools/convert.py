"""`stronghold export` and `stronghold import`: checkpoints of one format become another.

Owns the choice of the format. `checkpoint.weights` writes model directories; `tools.zero` reads and
writes DeepSpeed's checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from stronghold.checkpoint import weights
from stronghold.config.section import parse_bytes
from stronghold.errors import ConfigError
from stronghold.tools import zero
from stronghold.tools.answer import Answer


def run_export(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Write a checkpoint of stronghold in another format. The answer has one path per line."""
    source = weights.locate(arguments.checkpoint, arguments.tag)
    if arguments.to == "zero-stage2":
        files = zero.export_zero(source, arguments.out)
    else:
        try:
            size = parse_bytes(arguments.max_shard_size)
        except ValueError as error:
            raise ConfigError(f"--max-shard-size {arguments.max_shard_size}: {error}") from error
        files = weights.export_hf(
            source, arguments.out, max_shard_bytes=size, model_dir=arguments.model_dir
        )
    return Answer(text="\n".join(str(path) for path in files))


def run_import(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Convert a checkpoint of DeepSpeed. The answer is the directory of the new tag."""
    source = weights.locate(arguments.checkpoint, arguments.tag)
    return Answer(text=str(zero.import_zero(source, arguments.out, source.name)))
