"""Text files that a reader sees whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def partial_of(path: Path) -> Path:
    """Name of the file that this process writes before it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file by a temporary name and a rename. Make missing directories."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(target)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
