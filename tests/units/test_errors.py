"""What error messages are made of."""

from __future__ import annotations

import pickle

import pytest

from stronghold.config.section import parse_bytes
from stronghold.errors import BudgetError, format_size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (100, "100 bytes"),
        ((1 << 20) - 1, "1048575 bytes"),
        (1 << 20, "1.00 MiB"),
        (1 << 30, "1.00 GiB"),
        (45894320152, "42.74 GiB"),
    ],
)
def test_a_size_is_written_in_the_unit_that_a_person_reads(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize("nbytes", [1, 999, (1 << 20) + 1, 123456789, (1 << 30) + 1, 45894320152])
def test_a_size_that_is_rounded_up_suffices(nbytes: int) -> None:
    text = format_size(nbytes, round_up=True)
    assert nbytes <= parse_bytes(text.replace("bytes", "B")) <= 1.01 * nbytes + 1


def test_the_bytes_that_are_needed_come_from_another_process_too() -> None:
    error = pickle.loads(pickle.dumps(BudgetError("too small", need_bytes=7)))
    assert (str(error), error.need_bytes) == ("too small", 7)
