"""Whatever a program does, and wherever layers are meanwhile: the bits are plain PyTorch's, or the
engine refuses. `python -m tests.programs FIRST END` runs more seeds.
"""

from __future__ import annotations

import collections

import pytest

from tests.programs import DRAWN, check


@pytest.mark.parametrize("seed", [*range(24), *range(DRAWN, DRAWN + 8)])
def test_a_program_that_nobody_wrote_is_exact_or_refused(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", [*range(1000, 2000, 50), *range(DRAWN, DRAWN + 500, 50)])
def test_hundreds_of_programs_are_exact_or_refused(first: int) -> None:
    kinds = collections.Counter(check(seed)[0] for seed in range(first, first + 50))
    assert kinds["equal"] > 25, kinds
