"""Laws of `stronghold doctor --report`: what it says, and what it never says."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.plan import machine
from stronghold.tools import cli
from stronghold.tools.doctor.report import Scrubber

TOKEN = "hf_abcDEF123abcDEF123"
HOME, USER, HOST = "/home/jane.doe", "jane.doe", "gpu-box-17"
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 3,
    "zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "wandb": {"enabled": True, "team": "moonshot", "project": "deep-thought"},
    "comet": {"api_key": "correct horse battery"},
    "my_section": {"password": 12345, "note": f"mail {USER}@example.org, token {TOKEN}"},
    "stronghold": {"nvme": {"path": f"{HOME}/states"}, "trace": "runs/secret-project/trace.json"},
}
PRIVATE = [TOKEN, HOME, USER, HOST, "moonshot", "deep-thought", "correct horse", "12345"]
PRIVATE += ['states"', "secret-project", "example.org", "other value"]


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config's file, in a process of a user who has secrets."""
    values = {"HF_TOKEN": TOKEN, "HOME": HOME, "USER": USER, "LOGNAME": USER}
    values |= {"SOME_API_KEY": "other value", "STRONGHOLD_ISA": "scalar"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "node", lambda: HOST)
    profile = machine.MachineProfile.load("rtx4090")
    facts = json.loads(profile.to_json()) | {"name": f"emulated on a CPU, {HOST}"}
    facts |= {"nvme_path": f"{HOME}/disk"}
    (tmp_path / "profile.json").write_text(json.dumps(facts))
    monkeypatch.setenv(machine.ENVIRONMENT, str(tmp_path / "profile.json"))
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG | {"other": ["other value"]}))
    return tmp_path / "ds.json"


def test_a_report_has_versions_machine_profile_and_config(
    made_up: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--report", "--config", str(made_up)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["python"] == platform.python_version()
    assert report["machine"]["limits"]["num_cores"] >= 1
    assert report["machine"]["kernels"].startswith("scalar of ")
    assert report["profile"]["name"] == "emulated on a CPU, <host>"
    assert report["profile"]["nvme_path"] == "<path>"
    assert "STRONGHOLD_ISA" in report["environment"]
    config = report["config"]
    assert config["optimizer"] == CONFIG["optimizer"]
    assert config["zero_optimization"] == CONFIG["zero_optimization"]
    assert config["stronghold"] == {"nvme": {"path": "<path>"}, "trace": "<path>"}
    assert config["wandb"] == {"enabled": True, "team": "<removed>", "project": "<removed>"}
    assert config["other"] == ["<secret>"]


def test_a_report_has_nothing_private(
    made_up: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert cli.main(["doctor", "--report", "--config", str(made_up), "-o", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    text = file.read_text()
    assert [word for word in PRIVATE if word in text] == []
    assert str(tmp_path) not in text


@pytest.mark.parametrize("content", [None, '{"a": '])
def test_a_config_that_cannot_be_read_leaves_its_error_without_its_path(
    content: str | None, made_up: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up.unlink()
    if content is not None:
        made_up.write_text(content)
    assert cli.main(["doctor", "--report", "--config", str(made_up)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report["config"], str)
    assert str(made_up.parent) not in report["config"]


@pytest.mark.parametrize(
    "text",
    ["scalar of avx512, avx2, scalar", "Linux 5.15.167.4-microsoft-standard-WSL2 x86_64", "24GiB"],
)
def test_ordinary_words_stay(text: str) -> None:
    assert Scrubber({"MY_TOKEN": "short"}, "", "/", "").text(text) == text


def test_a_value_is_hidden_wherever_it_stands() -> None:
    scrubber = Scrubber({"DB_PASSWORD": "open sesame"}, "ann", "/home/ann", "box")
    assert scrubber.text("ann on box: open sesame") == "<user> on <host>: <secret>"
    assert scrubber.text("banner, annual") == "banner, annual"
    assert (
        scrubber.text(r"C:\Users\ann\x and ~/x and https://a:b@c/d")
        == "<path> and <path> and <path>"
    )
    assert scrubber.value({"/home/ann/m": 1, "password": [1, {"a": "b"}]}) == {
        "<path>": 1,
        "password": ["<removed>", {"a": "<removed>"}],
    }


@pytest.mark.parametrize("option", ["--config", "--output"])
def test_options_of_a_report_need_it(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", option, "a.json"]) == 2
    assert "--report" in capsys.readouterr().err
