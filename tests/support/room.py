"""The room that engines of this test run train on: `pytest --room`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from stronghold.config import StrongholdConfig
from stronghold.plan.cost import LEVELS as ALL_LEVELS
from stronghold.train.job import MISSING
from stronghold.train.layer import Level

OWN = {level.value for level in Level}
LEVELS = {level: level if level in OWN else "recompute" for level in ALL_LEVELS}


def is_next() -> bool:
    """True on the room `train`. Its abilities are fewer so far."""
    return StrongholdConfig().room == "train"


def without_missing(section: dict[str, Any], but: Sequence[str] = ()) -> None:
    """Take out of a "stronghold" section what the room `train` lacks, but for these dotted keys."""
    for key in MISSING:
        if f"stronghold.{key}" not in but:
            section.pop(key, None)
    levels = section.get("activations")
    if "stronghold.activations" in but or levels in (None, "auto"):
        return
    if isinstance(levels, str):
        section["activations"] = LEVELS[levels]
        return
    counts: Counter[str] = Counter()
    for level, count in levels.items():
        counts[LEVELS[level]] += count
    section["activations"] = dict(counts)
