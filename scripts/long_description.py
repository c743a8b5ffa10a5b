"""The package's page: README.md with the text of its relative links, which lead nowhere there.

What the build asks for the `readme` of pyproject.toml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
RELATIVE = re.compile(r"!?\[([^\]]*)\]\((?!https?://|#)[^)]*\)")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The field, as `[[tool.dynamic-metadata]]` defines it."""
    text = RELATIVE.sub(r"\1", README.read_text(encoding="utf-8"))
    return {"readme": {"content-type": "text/markdown", "text": text}}
