"""Cases of several axes. The default run has each pair of values (`pairs`), or each value (`each`);
the rest are slow."""

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
    return _parameters(named, set(covering([list(axis) for axis in named])))


def each(*axes: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """Like `pairs`, but the default run has each value of each axis once or more, not each pair."""
    named = [_by_name(axis) for axis in axes]
    longest = max(map(len, named))
    chosen = {tuple(list(axis)[k % len(axis)] for axis in named) for k in range(longest)}
    return _parameters(named, chosen)


def _parameters(named: list[dict[str, Any]], chosen: set[Case]) -> list[Any]:
    """The whole product as parameters; cases that are not `chosen` are slow."""
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


def thinned(array: list[Case], axis: int, *, least: int) -> list[Case]:
    """Fewer cases of a covering array: each pair of values of the other axes that it has, and each
    value of `axis` in at least `least` cases."""
    covered: set[Any] = set()
    taken: Counter[str] = Counter()
    chosen = []
    for case in array:
        others = [(number, value) for number, value in enumerate(case) if number != axis]
        new = set(combinations(others, 2)) - covered
        if new or taken[case[axis]] < least:
            covered |= new
            taken[case[axis]] += 1
            chosen.append(case)
    return chosen


def _by_name(axis: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    if isinstance(axis, Mapping):
        return dict(axis)
    return {getattr(value, "__name__", str(value)): value for value in axis}
