"""Cases of several axes: each pair of values is in the default run, the rest of them slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest


def pairs(*axes: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """The product as parameters of a test; an axis is of values, or of values by their names."""
    named = [_by_name(axis) for axis in axes]
    cases = [tuple(case) for case in product(*named)]
    left = {pair for case in cases for pair in combinations(enumerate(case), 2)}
    chosen = set()
    while left:
        best = max(cases, key=lambda case: len(left.intersection(_pairs_of(case))))
        chosen.add(best)
        left.difference_update(_pairs_of(best))
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(named, case, strict=True)),
            id="-".join(case),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in cases
    ]


def _pairs_of(case: tuple[str, ...]) -> Iterable[Any]:
    return combinations(enumerate(case), 2)


def _by_name(axis: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    if isinstance(axis, Mapping):
        return dict(axis)
    return {getattr(value, "__name__", str(value)): value for value in axis}
