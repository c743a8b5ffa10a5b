"""A law of time forgives lateness, and where others use the machine alone; nothing else."""

from __future__ import annotations

import pytest

from tests import quiet


def test_a_late_law_is_tried_again() -> None:
    tries = []

    @quiet.law_of_time
    def law() -> None:
        tries.append(1)
        quiet.on_time(len(tries) == quiet.ATTEMPTS, "late")

    law()
    assert len(tries) == quiet.ATTEMPTS


@pytest.mark.parametrize(
    ("reason", "outcome"), [(None, quiet.Late), ("others work here", pytest.skip.Exception)]
)
def test_a_law_that_is_always_late_fails_where_the_machine_is_quiet(
    reason: str | None, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "busy", lambda: reason)

    @quiet.law_of_time
    def law() -> None:
        quiet.on_time(False, "late")

    with pytest.raises(outcome):
        law()


def test_another_failure_is_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "busy", lambda: "others work here")
    tries = []

    @quiet.law_of_time
    def law() -> None:
        tries.append(1)
        assert tries == []

    with pytest.raises(AssertionError):
        law()
    assert len(tries) == 1
