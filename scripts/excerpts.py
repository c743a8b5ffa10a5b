"""Code of the package in pages: a marker names a function, and the block below it has its source.

    <!-- code: streaming/executor.py Executor.gradient_arrived -->
    ```python
    ...
    ```

`refreshed` writes the block anew. A function that no longer exists is an error that names the page.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "stronghold"
EXCERPT = re.compile(
    r"^(<!-- code: (?P<file>\S+) (?P<name>\S+) -->\n```python\n)(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def refreshed(page: Path) -> str:
    """Return the page's text with the present source in each excerpt.

    Raises ValueError for an excerpt whose file or function is gone.
    """

    def with_source(match: re.Match[str]) -> str:
        try:
            source = source_of(PACKAGE / match["file"], match["name"])
        except (OSError, LookupError) as error:
            raise ValueError(f"{page.name}: {match['file']} {match['name']}: {error}") from error
        return f"{match[1]}{source}```"

    return EXCERPT.sub(with_source, page.read_text(encoding="utf-8"))


def source_of(path: Path, name: str) -> str:
    """Return the source of a function or a method ("Class.method"), without indentation.

    Raises LookupError if the file has no such function.
    """
    text = path.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        matches = [item for item in body if isinstance(item, kinds) and item.name == part]
        if not matches:
            raise LookupError(f"there is no {part}")
        node, body = matches[0], matches[0].body
    assert node is not None
    assert node.end_lineno is not None
    lines = text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines))
