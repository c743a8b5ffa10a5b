"""Laws of machine profiles: what is written is what is read, and nothing else is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold import native
from stronghold.errors import ConfigError
from stronghold.model.operators import Counts
from stronghold.optim.states import States, num_items
from stronghold.plan import machine as profile
from stronghold.plan.machine import MachineProfile
from tests.support.states import adam_states

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = dict.fromkeys(("bf16", "fp16", "fp32"), 2e14)


def of(**changes: Any) -> MachineProfile:
    """A profile of round numbers."""
    fields: dict[str, Any] = {
        "name": "a machine",
        "measured": "2026-01-31",
        "sources": (),
        "gpu_memory_bytes": 24 << 30,
        "host_memory_bytes": 128 << 30,
        "num_cores": 8,
        "fetch_gbps": 24.0,
        "offload_gbps": 25.0,
        "duplex_gbps": 44.0,
        "memory_gbps": 60.0,
        "adam_gbps": 57.0,
        "adam_thread_gbps": 18.0,
        "flops": {"bf16": 1e14, "fp16": 1e14, "fp32": 2e13},
        "gpu_memory_gbps": 900.0,
    }
    return MachineProfile(**{**fields, **changes})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(profile.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "more", [{}, {"nvme_read_gbps": 3.1, "nvme_path": "/disk"}, {"attention_flops": ATTENTION}]
)
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, more: dict[str, Any]) -> None:
    saved = of(sources=("a data sheet", "täglich gemessen"), **more)
    saved.save(tmp_path / "new" / "profile.json")
    assert MachineProfile.load(tmp_path / "new" / "profile.json") == saved
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version: got 1, expected 2"),
        ({"fetch_gbp": 3.0}, 'profile.fetch_gbp: unknown key. Did you mean "fetch_gbps"'),
        ({"fetch_gbps": 0}, "profile.fetch_gbps: got 0. Input should be greater than 0"),
        ({"fetch_gbps": None}, "profile.fetch_gbps: got None"),
        ({"fetch_gbps": float("nan")}, "profile.fetch_gbps: got nan"),
        ({"num_cores": 0}, "profile.num_cores: got 0. Input should be greater than or equal to 1"),
        ({"fetch_gbps": 10**400}, "profile.fetch_gbps: got 1000"),
        ({"adam_gbps": {"1": 57.0}}, "profile.adam_gbps: Input should be a valid number"),
        (
            {"attention_flops": {}},
            "profile.attention_flops: Dictionary should have at least 1 item",
        ),
        (
            {"flops": {"bf16": 1.0, "fp16": 1.0}},
            "profile.flops: Dictionary should have at least 3 items",
        ),
        (
            {"flops": {"bf16": 1.0, "fp16": 1.0, "fp32": 1.0, "int8": 1.0}},
            "profile.flops.int8.[key]: got 'int8'",
        ),
        ({"sources": "a data sheet"}, "profile.sources: got 'a data sheet'"),
    ],
)
def test_other_versions_unknown_keys_and_wrong_values_are_refused(
    change: dict[str, Any], message: str
) -> None:
    raw = {**json.loads(of().to_json()), **change}
    with pytest.raises(ConfigError) as refused:
        MachineProfile.from_json(json.dumps(raw), "box.json")
    assert str(refused.value).startswith("box.json: ")
    assert message in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 1}', "[" * 100_000])
def test_what_is_no_profile_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"box\.json.*stronghold doctor"):
        MachineProfile.from_json(text, "box.json")


@pytest.mark.parametrize("field", ["name", "fetch_gbps", "adam_gbps", "flops", "sources"])
def test_a_missing_key_is_named(field: str) -> None:
    raw = json.loads(of().to_json())
    del raw[field]
    with pytest.raises(ConfigError, match=rf"profile\.{field}: missing"):
        MachineProfile.from_json(json.dumps(raw), "box.json")


@pytest.mark.parametrize(("threads", "rate"), [(1, 18.0), (3, 54.0), (4, 57.0), (400, 57.0)])
def test_threads_add_their_rates_up_to_that_of_all(threads: int, rate: float) -> None:
    assert of().adam_rate(threads) == rate
    assert of(adam_lean_gbps=28.5).adam_rate(threads, "lean") == rate / 2


def test_a_profile_without_lean_states_has_a_share_of_the_exact_rate() -> None:
    assert of().adam_rate(2, "lean") == profile.LEAN_RATE * of().adam_rate(2)
    other = of(adam_lean_gbps=5.0)
    assert profile.rates_of(other, 8, states="lean").update_gbps == 5.0
    assert profile.rates_of(other, 8).update_gbps == other.adam_rate(8)


def test_ranks_of_a_node_divide_the_rate_of_all_its_cores() -> None:
    assert profile.rates_of(of(), 2, sharing=4).update_gbps == 57.0 / 4
    assert profile.rates_of(of(), 1, sharing=2).update_gbps == 18.0


def test_attention_has_a_rate_of_its_own() -> None:
    """Of pairs of tokens, half of which a causal mask leaves out."""
    slow = dict.fromkeys(ATTENTION, 1e14)
    machine = of(attention_flops=ATTENTION, attention_backward_flops=slow)
    causal = Counts(attention_flops=2e14, causal_flops=2e14)
    assert machine.attention_s("bf16", causal) == (1.0, 4.0)
    assert machine.attention_s("bf16", Counts(attention_flops=2e14)) == (2.0, 8.0)


@pytest.mark.parametrize("causal_flops", [0.0, 1e14])
def test_a_profile_without_attention_takes_the_rate_of_products(causal_flops: float) -> None:
    counts = Counts(attention_flops=1e14, causal_flops=causal_flops)
    in_another = {"fp16": 2e14}
    others = {"attention_flops": in_another, "attention_backward_flops": in_another}
    for changes in ({}, {"attention_flops": ATTENTION}, others):
        assert of(**changes).attention_s("bf16", counts) == (1.0, 2.0)


def test_figures_that_need_not_be_there_may_be_left_out() -> None:
    raw = json.loads(of().to_json())
    assert raw.pop("emulated") is False
    for name in ("attention_flops", "attention_backward_flops", "adam_lean_gbps"):
        assert raw.pop(name) is None
    assert MachineProfile.from_json(json.dumps(raw), "box.json") == of()


@pytest.mark.parametrize("name", profile.machine_names())
def test_shipped_machines_load_and_say_where_their_rates_come_from(name: str) -> None:
    machine = MachineProfile.load(name)
    assert machine.measured == ""
    for part in ("GPU", "Link", "Host", "Disk", "Adam"):
        assert any(source.startswith(part) for source in machine.sources), part
    assert machine.duplex_gbps <= machine.fetch_gbps + machine.offload_gbps
    assert max(machine.fetch_gbps, machine.offload_gbps) <= machine.duplex_gbps
    assert machine.flops["fp32"] < machine.flops["fp16"]
    assert machine.gpu_memory_gbps > machine.memory_gbps >= machine.adam_gbps
    assert machine.adam_thread_gbps < machine.adam_gbps < 64 * machine.adam_thread_gbps


def test_an_unknown_machine_gets_a_hint_and_the_list() -> None:
    with pytest.raises(ConfigError) as refused:
        MachineProfile.load("rtx409")
    message = str(refused.value)
    assert 'Did you mean "rtx4090"?' in message
    assert all(name in message for name in profile.machine_names())


def test_a_directory_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        MachineProfile.load(tmp_path)


@pytest.mark.parametrize(
    ("states", "nbytes"),
    [
        (adam_states(torch.bfloat16), profile.ADAM_BF16_BYTES),
        (adam_states(torch.float16), 30),
        (adam_states(torch.float32), 28),
        (adam_states(torch.bfloat16, "lean"), profile.ADAM_LEAN_BYTES),
    ],
)
def test_adams_bytes_are_those_of_its_arrays(states: States, nbytes: float) -> None:
    """Every array that a segment names is read, and all but the gradient are written."""
    assert len(states.kernel_arrays) == 2 + 2 * native.MAX_MOMENTS
    numel = 1 << 16
    written = sum(num_items(a, numel) * dtype.itemsize for a, dtype in states.dtypes.items())
    moved = (2 * written + numel * states.dtype.itemsize) / numel
    assert nbytes == moved == states.update_bytes(states.dtype)


# -- where a machine's own profile lies -----------------------------------------------------------


def test_each_kind_of_gpu_has_a_file_of_its_own(own_cache: Path) -> None:
    paths = {profile.default_path(gpu) for gpu in (None, "NVIDIA H200", "NVIDIA A100")}
    assert len(paths) == 3
    assert {path.parent for path in paths} == {own_cache / "stronghold"}
    assert profile.default_path("NVIDIA H200").name.endswith("-nvidia-h200.json")


def test_a_gpus_profile_is_found_before_the_emulated_devices() -> None:
    of(name="gpu").save(profile.default_path("NVIDIA H200"))
    of(name="emulated").save(profile.default_path())
    os.utime(profile.default_path("NVIDIA H200"), (0, 0))
    assert profile.find_profile() == of(name="gpu")
    assert profile.profile_of("NVIDIA H200") == of(name="gpu")
    assert profile.profile_of(None) == of(name="emulated")
    assert profile.profile_of("NVIDIA A100") is None


def test_the_environment_names_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of(name="cached").save(profile.default_path())
    monkeypatch.setenv(profile.ENVIRONMENT, str(tmp_path / "mine.json"))
    assert profile.default_path("NVIDIA H200") == tmp_path / "mine.json"
    with pytest.raises(ConfigError, match=r"mine\.json"):
        profile.find_profile()
    of(name="mine").save(profile.default_path())
    assert profile.find_profile() == of(name="mine")
    monkeypatch.setenv(profile.ENVIRONMENT, "h200")
    assert profile.find_profile() == MachineProfile.load("h200")
    assert profile.default_path().parent == tmp_path / "cache" / "stronghold"


def test_a_damaged_cache_is_as_good_as_none_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    path = profile.default_path()
    path.parent.mkdir(parents=True)
    path.write_text('{"version": 0}')
    assert profile.find_profile() is None
    assert str(path) in caplog.text
    caplog.clear()
    assert profile.profile_of(None) is None
    assert str(path) in caplog.text


def test_a_profile_is_read_without_torch() -> None:
    """The rates are plain data: planning without a GPU starts at once."""
    code = (
        "import sys, types; package = types.ModuleType('stronghold');"
        f"package.__path__ = [{str(ROOT / 'stronghold')!r}]; sys.modules['stronghold'] = package;"
        "from stronghold.plan.machine import MachineProfile; MachineProfile.load('h200');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
