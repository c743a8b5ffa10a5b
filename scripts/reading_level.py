"""Prints the reading level of each page: the grade of Flesch and Kincaid, by textstat.

The grade is the number of school years that a reader needs. The README and *Get started* may have
at most 9, other pages at most 11. Only sentences count: no code, no tables, no headings.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EASY_PAGES = {"README.md", "index.md", "your_model.md", "plan.md", "trouble.md"}
EASY_GRADE, OTHER_GRADE = 9.0, 11.0

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)
"""A fenced block of a page."""


def prose_of(text: str) -> str:
    """A page's sentences. Code inside of a sentence becomes "it". A list's entry is a sentence."""
    text = FENCE.sub("", text)
    text = re.sub(r"^ *(\||#|!\[|:::|!!!|<!--).*$", "", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "it", text).replace("**", "")
    sentences = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        words = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", " ".join(paragraph.split()))
        if words:
            sentences.append(words if words[-1] in ".!?" else words.rstrip(":;,") + ".")
    return "\n".join(sentences)


def main() -> int:
    import textstat

    too_hard = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = str(path.relative_to(ROOT))
        grade = textstat.flesch_kincaid_grade(prose_of(path.read_text(encoding="utf-8")))
        most = EASY_GRADE if path.name in EASY_PAGES else OTHER_GRADE
        if grade > most:
            too_hard.append(name)
        print(f"{grade:5.1f} of at most {most:.0f}  {name}")
    if too_hard:
        print(f"too hard to read: {', '.join(too_hard)}", file=sys.stderr)
    return 1 if too_hard else 0


if __name__ == "__main__":
    sys.exit(main())
