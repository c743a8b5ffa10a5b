"""Programs around the engine: the command, estimates, the doctor, pictures and conversions.

This room imports every other room. The engine imports nothing of it: training needs no tool.

Here: answers of commands, and files that a command writes beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stronghold.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The text that a command prints, and the status of the process: 0, 1 or 2 (`cli.main`)."""

    text: str
    status: int = 0


def write_text(option: str, path: Path, text: str) -> None:
    """Write `text` to `path`, with the directories that are missing.

    Raises ConfigError, with the name of the option that named the path.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from error
