"""Sizes as the package's messages write them, read back."""

from __future__ import annotations

import re

from stronghold.config.section import parse_bytes


def named_size(text: str, before: str) -> int:
    """The bytes of the first size that follows the pattern `before`, across line ends."""
    found = re.search(rf"{before}\s+([0-9.]+)\s+(GiB|MiB|bytes)", text)
    assert found, text
    return parse_bytes(found[1] + found[2].replace("bytes", "B"))
