"""Pages of counts under docs/conformance, one for each suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "conformance"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], align: str) -> list[str]:
    """Return the lines of a Markdown table. `align`: "l" or "r" for each column."""
    rule = "|".join("---:" if side == "r" else "---" for side in align)
    lines = [f"| {' | '.join(header)} |", f"|{rule}|"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return lines


def write_page(name: str, lines: Sequence[str], folder: Path) -> None:
    """Write the page of suite `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
