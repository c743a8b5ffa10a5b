"""`stronghold export`: a checkpoint, or adapters with their base, becomes a model directory.

`checkpoint.weights` writes directories of checkpoints; `tools.merge` those of adapters.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from stronghold.checkpoint import weights
from stronghold.config.section import parse_bytes
from stronghold.errors import ConfigError
from stronghold.tools import merge
from stronghold.tools.answer import Answer


def run_export(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Write a checkpoint's weights as a model directory, or adapters merged with their base.

    The answer has one path per line.
    """
    try:
        size = parse_bytes(arguments.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {arguments.max_shard_size}: {error}") from error
    out, model_dir = arguments.out, arguments.model_dir
    if arguments.merge:
        if arguments.tag:
            raise ConfigError("--tag: is of checkpoints, and --merge takes adapters")
        adapters = arguments.checkpoint
        files = merge.export_merged(adapters, out, max_shard_bytes=size, model_dir=model_dir)
        return Answer(text="\n".join(str(path) for path in files))
    source = weights.locate(arguments.checkpoint, arguments.tag)
    files = weights.export_hf(source, out, max_shard_bytes=size, model_dir=model_dir)
    return Answer(text="\n".join(str(path) for path in files))
