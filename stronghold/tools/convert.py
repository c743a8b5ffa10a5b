"""`stronghold export` and `stronghold import`: checkpoints of one format become another.

Owns the choice of the format. `checkpoint.weights` writes model directories; `tools.merge` writes
those of adapters with their base; `tools.zero` reads and writes DeepSpeed's checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from stronghold.checkpoint import weights
from stronghold.config.section import parse_bytes
from stronghold.errors import ConfigError
from stronghold.tools import merge, zero
from stronghold.tools.answer import Answer

HF = "hf"  # of --to: a model directory


def run_export(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Write a checkpoint of stronghold in another format, or adapters merged with their base.

    The answer has one path per line.
    """
    try:
        size = parse_bytes(arguments.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {arguments.max_shard_size}: {error}") from error
    out, model_dir = arguments.out, arguments.model_dir
    if arguments.merge:
        for option, is_given in (("tag", arguments.tag), ("to", arguments.to != HF)):
            if is_given:
                raise ConfigError(f"--{option}: is of checkpoints, and --merge takes adapters")
        adapters = arguments.checkpoint
        files = merge.export_merged(adapters, out, max_shard_bytes=size, model_dir=model_dir)
        return Answer(text="\n".join(str(path) for path in files))
    source = weights.locate(arguments.checkpoint, arguments.tag)
    if arguments.to == HF:
        files = weights.export_hf(source, out, max_shard_bytes=size, model_dir=model_dir)
    else:
        files = zero.export_zero(source, out)
    return Answer(text="\n".join(str(path) for path in files))


def run_import(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Convert a checkpoint of DeepSpeed. The answer is the directory of the new tag."""
    source = weights.locate(arguments.checkpoint, arguments.tag)
    return Answer(text=str(zero.import_zero(source, arguments.out, source.name)))
