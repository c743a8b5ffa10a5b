"""Pages of the documentation as text: their fenced blocks and their commands."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PERFORMED = [*sorted((DOCS / "how_to").glob("*.md")), DOCS / "several_gpus.md"]
"""Pages that a test performs from top to bottom."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)


class Block(NamedTuple):
    """A fenced block of a page. `language` is "" if the page names none."""

    language: str
    body: str


def name_of(path: Path) -> str:
    """A page's name in these tests: its path in docs/, or README.md."""
    return str(path.relative_to(DOCS)) if path.is_relative_to(DOCS) else path.name


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for match in _FENCE.finditer(text):
        yield Block(match["language"], textwrap.dedent(match["body"]))


def fenced(text: str, language: str) -> list[str]:
    """The bodies of a page's fenced blocks in one language."""
    return [block.body for block in blocks_of(text) if block.language == language]


def commands_of(body: str) -> list[str]:
    """The commands of a `bash` block, each as one line, without comments."""
    joined = re.sub(r"\s*\\\n\s*", " ", body)
    lines = (line.split(" #")[0].strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
