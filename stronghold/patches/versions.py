"""The log line about package versions with which the table of replacements was not tested.

Owns nothing, and refuses nothing: a release that was not tested may still work. Any thread may
enter.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Iterable

from stronghold.patches.table import PACKAGES, Package

logger = logging.getLogger("stronghold")


@functools.cache
def report_untried() -> None:
    """Log one line, once in this process, if an imported package has an untried version."""
    imported = [package for package in PACKAGES if package.name in sys.modules]
    untried = untried_versions(imported, importlib.metadata.version)
    if untried:
        logger.warning(
            "untried versions: %s. stronghold replaces names in these packages: before you trust a "
            "run, see docs/patches.md and run tests/border/test_patches.py",
            "; ".join(untried),
        )


def untried_versions(packages: Iterable[Package], version_of: Callable[[str], str]) -> list[str]:
    """Return a phrase for each package whose version was not tried.

    Tried versions are those from the oldest to the newest of `Package.tried`. Patch releases of one
    minor version count as one.
    """
    untried = []
    for package in packages:
        version = version_of(package.name)
        oldest, newest = package.tried[0], package.tried[-1]
        if not _minor(oldest) <= _minor(version) <= _minor(newest):
            tried = oldest if oldest == newest else f"{oldest} to {newest}"
            untried.append(f"{package.name} {version} (tried: {tried})")
    return untried


def _minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version. A missing number is 0."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (*numbers, 0, 0)[:2]
