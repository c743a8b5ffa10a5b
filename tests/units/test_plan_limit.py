"""What is predicted is never faster than what is physically possible."""

from __future__ import annotations

import pytest

from stronghold.forecast.answer import outlook
from stronghold.forecast.question import understand
from stronghold.plan.machine import MachineProfile, machine_names
from tests.support.pairs import pairs

EARLY = {"clipping": 0.0, "no_overflow_check": True}
ROUNDING = 1e-6


CASES: dict[str, tuple[int, int, dict[str, str]]] = {  # batch, accumulation, tiers
    "1": (1, 1, {}),
    "4-small-gpu": (4, 1, {"gpu": "10GB"}),
    "16": (16, 1, {}),
    "2x4": (2, 4, {}),
    "4-nvme": (4, 1, {"host": "8GB", "nvme": "200GB"}),
}


@pytest.mark.parametrize(
    ("machine", "case", "updates"), pairs(machine_names(), CASES, {"gated": {}, "early": EARLY})
)
def test_no_plan_beats_the_physical_limit(
    machine: str, case: tuple[int, int, dict[str, str]], updates: dict[str, object]
) -> None:
    """Adam's host memory is the transfers' too, whichever of them was submitted first."""
    batch, accumulation, tiers = case
    if "nvme" in tiers and MachineProfile.load(machine).nvme_read_gbps is None:
        pytest.skip("the profile has no disk")
    question = understand(
        layers=8,
        hidden=2048,
        heads=16,
        vocab=50304,
        seq=2048,
        machine=machine,
        batch=batch,
        accumulation=accumulation,
        **tiers,
        **updates,
    )
    found = outlook(question)
    assert found.fits
    assert found.step_s >= found.limits.seconds * (1.0 - ROUNDING)
    assert sum(found.shares.values()) <= 1.001
