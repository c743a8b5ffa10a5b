"""`stronghold doctor` on a real GPU: the same laws, and figures that only a GPU reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.devices import cuda
from stronghold.tools.doctor.examine import examine, gpu_name
from stronghold.tools.doctor.page import problems_of
from tests.models import MODELS
from tests.support.training import config, initialized

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # they measure

MIB = 1 << 20
NVIDIA = "0x10de"  # the vendor's number on the bus


def test_a_gpu_is_measured_as_what_it_is(tmp_path: Path) -> None:
    findings = examine("cuda", tmp_path)
    machine = findings.profile
    properties = torch.cuda.get_device_properties(0)
    assert not findings.profile.emulated
    assert machine.name.startswith(properties.name)
    assert gpu_name() == properties.name
    assert machine.gpu_memory_bytes == properties.total_memory
    assert machine.num_gpus == torch.cuda.device_count()
    assert findings.pin_error == ""
    # Copies take milliseconds: wide bounds.
    assert machine.duplex_gbps <= 1.2 * (machine.fetch_gbps + machine.offload_gbps)
    assert machine.gpu_memory_gbps > machine.fetch_gbps
    assert machine.flops["fp16"] > machine.flops["fp32"]
    assert list(tmp_path.iterdir()) == []


def test_the_address_is_one_of_the_pci_buss() -> None:
    address = cuda.identity(0)[2]
    folder = Path("/sys/bus/pci/devices")
    vendors = {found.parent.name: found.read_text().strip() for found in folder.glob("*/vendor")}
    if NVIDIA not in vendors.values():
        pytest.skip("the system shows no GPU on a PCI bus")
    assert vendors[address] == NVIDIA


@pytest.mark.parametrize("integrated", [False, True])
def test_a_gpu_that_has_the_hosts_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, integrated: bool
) -> None:
    """As of a GB10 or a Jetson: `is_integrated` is all that says so."""
    properties = torch.cuda.get_device_properties

    class Properties:
        is_integrated = integrated

        def __getattr__(self, name: str) -> Any:
            return getattr(properties(0), name)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties())
    problems = problems_of(examine("cuda"))
    assert ("CPU and GPU share one memory" in [each.what for each in problems]) == integrated


def test_an_engine_without_a_profile_measures_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives back all that it took for this."""
    monkeypatch.delenv("STRONGHOLD_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    section = {"device": "cuda", "gpu_memory": 1 << 20, "cpu_threads": 1}
    model, _ = MODELS["llama"]()
    examine("cuda")  # the libraries' own memory, which stays
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    engine = initialized(model, config(section=section))
    try:
        machine = engine._job.machine
        taken_bytes = torch.cuda.memory_reserved() - before_bytes
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    finally:
        engine.destroy()
    assert machine.name.startswith(torch.cuda.get_device_properties(0).name)
    assert not machine.emulated
    assert machine.fetch_gbps > 0
    assert max(taken_bytes, peak_bytes) < 32 * MIB
