"""Cases of several axes: each pair of values is in the default run, the rest of them slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[str, ...]


def pairs(*axes: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """The product as parameters of a test; an axis is of values, or of values by their names."""
    named = [_by_name(axis) for axis in axes]
    chosen = set(covering([list(axis) for axis in named]))
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(named, case, strict=True)),
            id="-".join(case),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in product(*named)
    ]


def covering(axes: list[list[str]], never: Callable[..., bool] = lambda *_: False) -> list[Case]:
    """Few cases that together have every pair of values: an array of strength two. A new case
    begins with a pair that is missing, and takes on each further axis the value that brings most
    missing pairs, of these the one that was taken least. `never` tells of two values that they
    cannot meet.
    """
    taken: Counter[Any] = Counter()
    places = [[(axis, value) for value in values] for axis, values in enumerate(axes)]
    left = {
        frozenset(pair): pair
        for one, other in combinations(places, 2)
        for pair in product(one, other)
        if not never(pair[0][1], pair[1][1])
    }
    found: list[Case] = []
    while left:
        case = list(next(iter(left.values())))
        for place in sorted(places, key=len, reverse=True):
            if any(value in case for value in place):
                continue
            possible = [v for v in place if not any(never(v[1], o[1]) for o in case)]
            gains = [sum(frozenset((v, other)) in left for other in case) for v in possible]
            best = [v for v, gain in zip(possible, gains, strict=True) if gain == max(gains)]
            case.append(min(best, key=taken.__getitem__))
        taken.update(case)
        for pair in combinations(case, 2):
            left.pop(frozenset(pair), None)
        found.append(tuple(value for _, value in sorted(case)))
    return found


def _by_name(axis: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    if isinstance(axis, Mapping):
        return dict(axis)
    return {getattr(value, "__name__", str(value)): value for value in axis}
