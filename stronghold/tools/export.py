"""`stronghold export`: a checkpoint's weights become a model directory for `from_pretrained`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from stronghold.checkpoint import export
from stronghold.config.section import parse_bytes
from stronghold.errors import ConfigError
from stronghold.tools import Answer


def run(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Write the weights. The answer has one path per line."""
    try:
        size = parse_bytes(arguments.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {arguments.max_shard_size}: {error}") from error
    source = export.locate(arguments.checkpoint, arguments.tag)
    files = export.export_hf(
        source, arguments.out, max_shard_bytes=size, model_dir=arguments.model_dir
    )
    return Answer(text="\n".join(str(path) for path in files))
