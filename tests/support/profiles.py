"""Profiles of machines, for plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import MACHINE


def use_slow_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans know the tests' machine with a link of 3 MB/s: whatever stays on the device pays.

    folder  for the profile
    """
    slow = dict.fromkeys(("fetch_gbps", "offload_gbps", "duplex_gbps"), 0.003)
    path = folder / "slow_link.json"
    profile = json.loads(MACHINE.read_text(encoding="utf-8"))
    path.write_text(json.dumps(profile | slow), encoding="utf-8")
    monkeypatch.setenv("STRONGHOLD_PROFILE", str(path))
