"""JSON documents with one thing changed, as a hostile or careless hand would."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

DEEP: Any = []
for _ in range(250):  # more would be too deep for `copy`, and for writing it as JSON
    DEEP = [DEEP]
ODD = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**64, 10**400, -(10**400)),
    *(1.5, float("nan"), float("inf"), -0.0, 1e308),
    *("", "x", "0", "../x", "/etc/passwd", "a\0b", "\ud800", "F32", "F64", "é" * 300),
    *([], {}, [[]], [1], {"x": 1}, [-1, -24], DEEP),
)


def mutated(document: Any, chosen: random.Random) -> Any:
    """A copy in which a place is deleted, doubled, renamed, or has another's or an odd value."""
    document = copy.deepcopy(document)
    places = list(_places(document))
    parent, key = chosen.choice(places)
    other, other_key = chosen.choice(places)
    match chosen.randrange(6):
        case 0:
            del parent[key]
        case 1:
            parent[key] = copy.deepcopy(other[other_key])
        case 2 if isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        case 2:
            parent[f"{key}_"] = parent.pop(key)
        case _:
            parent[key] = copy.deepcopy(chosen.choice(ODD))
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of everything in a document."""
    keys = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in keys:
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)
