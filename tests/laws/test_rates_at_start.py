"""An engine knows the rates of its machine before the first step: from a profile, or measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.errors import ConfigError
from stronghold.plan.machine import MachineProfile, default_path
from tests.conftest import MACHINE
from tests.models import MODELS
from tests.support.quiet import law_of_time, on_time
from tests.support.training import config, initialized

OPEN = {"gpu_memory": 1 << 20}  # the model does not fit whole, and layers may stay
PINNED = {**OPEN, "window": 1, "resident_layers": 0, "activations": "recompute"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of profiles, empty."""
    monkeypatch.delenv("STRONGHOLD_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    caplog.set_level("INFO", "stronghold")
    return lambda: [record.getMessage() for record in caplog.records]


def machine_of(section: dict[str, Any]) -> MachineProfile | None:
    """The rates with which an engine starts. The random numbers of the program do not change."""
    model, _ = MODELS["llama"]()
    random_before = torch.get_rng_state()
    engine = initialized(model, config(section=section))
    try:
        assert torch.equal(torch.get_rng_state(), random_before)
        assert engine.memory_report().gpu_peak <= section["gpu_memory"]
        return engine._job.machine
    finally:
        engine.destroy()


@pytest.mark.usefixtures("cache")
@law_of_time
def test_without_a_profile_the_rates_are_measured_in_five_seconds(
    messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Arrays are twice the caches. A virtual machine may name its whole host's caches, and get new
    # memory from it at less than 1 GB/s.
    monkeypatch.setattr("stronghold.train.rates.last_cache_bytes", lambda: 64 << 20)
    section = {**OPEN, "emulated": {"link_gbps": 0.5}}  # a slow one
    machine = machine_of(section)
    assert machine is not None
    assert machine.emulated
    assert machine.attention_flops is not None
    assert list(machine.attention_flops) == ["fp32"]
    assert max(machine.fetch_gbps, machine.offload_gbps) <= 0.5  # the engine's own device
    said = [message for message in messages() if "this machine has no profile" in message][-1]
    assert f"link {machine.fetch_gbps:.3g}" in said
    on_time(machine.fetch_gbps > 0.4, machine)
    (seconds,) = re.findall(r"Measured in (\S+) s", said)
    on_time(float(seconds) < 5, seconds)


def test_a_profile_of_this_device_is_taken(cache: Path, messages: Any) -> None:
    expected = MachineProfile.load(MACHINE)
    expected.save(default_path())
    MachineProfile.load("h200").save(default_path("another GPU"))  # newer
    assert machine_of(OPEN) == expected
    assert any(repr(expected.name) in message for message in messages())


def test_a_named_profile_comes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MachineProfile.load(MACHINE).save(default_path())
    monkeypatch.setenv("STRONGHOLD_PROFILE", "h200")
    assert machine_of(OPEN) == MachineProfile.load("h200")
    monkeypatch.setenv("STRONGHOLD_PROFILE", str(cache / "nothing.json"))
    with pytest.raises(ConfigError, match=r"nothing\.json.*no such file"):
        machine_of(OPEN)


@pytest.mark.usefixtures("cache")
def test_nothing_is_measured_where_the_rules_choose_nothing(messages: Any) -> None:
    assert machine_of(PINNED) is None
    settings = config(section=OPEN)
    del settings["optimizer"]
    engine = initialized(MODELS["llama"]()[0], settings)  # it only runs forward
    engine.destroy()
    assert not any("profile" in message for message in messages())
