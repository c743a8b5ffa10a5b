"""Laws of extents: every byte of every array has one place, and disks share the work by rate."""

from __future__ import annotations

import pytest

from stronghold.errors import ConfigError
from stronghold.memory.nvme import PERIOD_UNITS, Striping

PAGE = 4096
RATES = [[1.0], [2.0, 2.0], [3.0, 1.0], [7.1, 3.4, 0.6], [1.0, 1000.0], [1.0] * 5]


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("unit_pages", [1, 3])
@pytest.mark.parametrize("total_pages", [0, 1, 15, 17, 64, 611])
def test_every_page_has_one_place_and_files_have_no_gaps(
    rates: list[float], unit_pages: int, total_pages: int
) -> None:
    striping = Striping(rates, unit_pages * PAGE)
    sizes = striping.file_bytes(total_pages * PAGE)
    assert sum(sizes) == total_pages * PAGE
    places = []
    for page in range(total_pages):
        (segment,) = striping.segments(page * PAGE, PAGE)
        assert (segment.begin, segment.nbytes) == (0, PAGE)
        places.append((segment.file, segment.offset))
    everywhere = [(f, offset) for f, size in enumerate(sizes) for offset in range(0, size, PAGE)]
    assert sorted(places) == everywhere


@pytest.mark.parametrize("rates", RATES)
def test_files_are_as_large_as_their_disks_are_fast(rates: list[float]) -> None:
    units = 100 * PERIOD_UNITS
    striping = Striping(rates, PAGE)
    sizes = striping.file_bytes(units * PAGE)
    for rate, size in zip(rates, sizes, strict=True):
        share = rate / sum(rates)
        # rounded to a 64th
        assert abs(size / (units * PAGE) - share) <= 1.2 / PERIOD_UNITS
        assert size > 0
    # Evenly: also a short range finds each disk near its share, not one disk first.
    for begin in range(3 * PERIOD_UNITS):
        part = [0] * len(rates)
        for segment in striping.segments(begin * PAGE, PERIOD_UNITS // 2 * PAGE):
            part[segment.file] += segment.nbytes // PAGE
        for count, size in zip(part, sizes, strict=True):
            assert abs(count - PERIOD_UNITS / 2 * size / (units * PAGE)) < 2


@pytest.mark.parametrize("rates", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_a_rate_is_a_positive_number(rates: list[float]) -> None:
    with pytest.raises(ConfigError, match="rates"):
        Striping(rates, PAGE)


def test_a_unit_is_whole_pages() -> None:
    for unit_bytes in (0, 1, PAGE + 512):
        with pytest.raises(ConfigError, match="unit_bytes"):
            Striping([1.0], unit_bytes)
