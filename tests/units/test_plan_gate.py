"""When updates begin, as `stronghold plan` sees it: what waits for the gate is named, and what need
not wait is deferred where that pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stronghold.errors import ConfigError
from stronghold.forecast.answer import outlook
from stronghold.plan.machine import MachineProfile
from tests.support.forecasts import SIZES, asked, run


def slow_adam(path: Path, gbps: float) -> str:
    """A machine's profile, but for the CPU's Adam."""
    machine = replace(MachineProfile.load("rtx4090"), adam_gbps={1: gbps})
    machine.save(path / "slow.json")
    return str(path / "slow.json")


def test_updates_that_wait_for_the_gate_are_named_where_the_step_waits_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [*SIZES, "--machine", slow_adam(tmp_path, 0.5), "--gpu", "20MB", "--batch", "8"]
    _, gated, _ = run(*call, capsys=capsys)
    assert "updates wait for the end of backward, since clipping decides" in " ".join(gated.split())
    _, checked, _ = run(*call, "--clipping", "0", capsys=capsys)
    assert "the overflow check decides" in " ".join(checked.split())
    _, early, _ = run(*call, "--clipping", "0", "--no-overflow-check", capsys=capsys)
    assert "updates wait" not in early
    _, fast, _ = run(*SIZES, "--machine", "h200", "--batch", "8", capsys=capsys)
    assert "updates wait" not in fast


def test_the_config_defers_what_the_plan_does(tmp_path: Path) -> None:
    machine = slow_adam(tmp_path, 60.0)
    changes = {"layers": 24, "hidden": 1024, "batch": 4, "seq": 512, "gpu": "600MB"}
    found = outlook(asked(machine=machine, clipping=0.0, no_overflow_check=True, **changes))
    assert found.config is not None
    deferred = found.config["stronghold"]["deferred_layers"]
    assert deferred > 0
    assert any(f"{deferred} of 24 blocks are updated while" in reason for reason in found.reasons)
    assert found.config["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert found.tiers["host"][1]["deferred gradients"] > 0


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_overflow_check_is_left_out_of_bf16_alone(precision: str) -> None:
    with pytest.raises(ConfigError, match="--no-overflow-check"):
        asked(precision=precision, no_overflow_check=True)
