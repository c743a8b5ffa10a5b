"""Extents: which bytes of which file hold an array of a layer. Pure arithmetic, no file is touched.

Owns the order of the arrays in one linear space and the way that space is striped over the files.
Made once, frozen; any thread may read it.

[Note: striping] All extents lie one after another in one linear space. It is cut into units, which
go around the files in a fixed order that repeats: a file of twice the rate has twice the units of a
period, spread evenly. So any long range of any extent is transferred by all disks at once, each in
the share that it does in the same time, and a single file is simply the space itself. Units of one
file are neighbours in it, without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stronghold.errors import ConfigError, StateError
from stronghold.native_io import ALIGNMENT

ARRAYS = ("exp_avg", "exp_avg_sq", "low", "weights", "gradients", "accumulated")

# Units of a period: rates are matched to a 64th. Two paths of equal disks, measured a few percent
# apart, then differ by a unit or two, which costs as many percent.
PERIOD_UNITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentRequest:
    """`nbytes` of file for one array of one layer: `array` is one of `ARRAYS`."""

    layer: int
    array: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One array of one layer, from `begin` on in the linear space."""

    layer: int
    array: str
    begin: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.array} of layer {self.layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`nbytes` of file number `file` from `offset` on are those of a range from `begin` on."""

    file: int
    offset: int
    begin: int
    nbytes: int


def lay_out(requests: Sequence[ExtentRequest]) -> dict[tuple[int, str], Extent]:
    """The extents by (layer, array), one after another as requested.

    Raises StateError for an unknown array, one that is requested twice, or a size that is no
    multiple of 4096.
    """
    extents: dict[tuple[int, str], Extent] = {}
    begin = 0
    for request in requests:
        key = (request.layer, request.array)
        if request.array not in ARRAYS or key in extents:
            raise StateError(f"extent {key}: unknown array, or requested twice")
        if request.nbytes < 0 or request.nbytes % ALIGNMENT:
            raise StateError(f"extent {key}: got {request.nbytes} bytes, expected n * {ALIGNMENT}")
        extents[key] = Extent(
            layer=request.layer, array=request.array, begin=begin, nbytes=request.nbytes
        )
        begin += request.nbytes
    return extents


class Striping:
    """The linear space over the files, `rates[i]` being the weight of file i ([Note: striping])."""

    def __init__(self, rates: Sequence[float], unit_bytes: int) -> None:
        if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ConfigError(f"rates: got {list(rates)}, expected a number > 0 for each path")
        if unit_bytes < ALIGNMENT or unit_bytes % ALIGNMENT:
            raise ConfigError(f"unit_bytes: got {unit_bytes}, expected n * {ALIGNMENT}")
        self._unit_bytes = unit_bytes
        self._weights = _weights(rates)
        self._period = _spread(self._weights)
        # Units of each file before the k-th unit of a period, for each k including the end.
        self._before = [[0] * len(rates)]
        for file in self._period:
            counts = list(self._before[-1])
            counts[file] += 1
            self._before.append(counts)

    def file_bytes(self, total_bytes: int) -> list[int]:
        """The size of each file when the space is `total_bytes` long; they add up to it."""
        units, rest = divmod(total_bytes, self._unit_bytes)
        sizes = [self._units_before(file, units) * self._unit_bytes for file in self._files()]
        sizes[self._file_of(units)] += rest
        return sizes

    def segments(self, begin: int, nbytes: int) -> Iterator[Segment]:
        """Where the `nbytes` from `begin` on lie, in their order; neighbours are joined."""
        if len(self._weights) == 1 and nbytes:
            yield Segment(file=0, offset=begin, begin=0, nbytes=nbytes)
            return
        at, end = begin, begin + nbytes
        while at < end:
            first, unit = at, at // self._unit_bytes
            file = self._file_of(unit)
            while at < end and self._file_of(unit) == file:
                unit += 1
                at = min(end, unit * self._unit_bytes)
            start, within = divmod(first, self._unit_bytes)
            offset = self._units_before(file, start) * self._unit_bytes + within
            yield Segment(file=file, offset=offset, begin=first - begin, nbytes=at - first)

    def _files(self) -> range:
        return range(len(self._weights))

    def _file_of(self, unit: int) -> int:
        return self._period[unit % len(self._period)]

    def _units_before(self, file: int, unit: int) -> int:
        periods, rest = divmod(unit, len(self._period))
        return periods * self._weights[file] + self._before[rest][file]


def _weights(rates: Sequence[float]) -> list[int]:
    """Small integers in proportion to the rates; every file gets some."""
    total = math.fsum(rates)
    weights = [max(1, round(PERIOD_UNITS * rate / total)) for rate in rates]
    divisor = math.gcd(*weights)
    return [weight // divisor for weight in weights]


def _spread(weights: Sequence[int]) -> tuple[int, ...]:
    """A period in which file i occurs `weights[i]` times, as evenly as can be: the file that is
    farthest behind its share is next."""
    behind = [0] * len(weights)
    period = []
    for _ in range(sum(weights)):
        behind = [debt + weight for debt, weight in zip(behind, weights, strict=True)]
        file = max(range(len(weights)), key=behind.__getitem__)
        behind[file] -= sum(weights)
        period.append(file)
    return tuple(period)
