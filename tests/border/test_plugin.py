"""Selection: a "stronghold" section in the config, and nothing else, decides which engine runs."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import logger as deepspeed_logger

import stronghold
from stronghold import plugin, run
from stronghold.engine import StrongholdEngine
from stronghold.errors import ConfigError
from tests.models import MODELS
from tests.support.training import config

ROOT = Path(__file__).resolve().parents[2]


class DeepSpeeds:
    """Stands where DeepSpeed's own `initialize` does, and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(
        self,
        args: Any = None,
        model: Any = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        config: Any = None,
        config_params: Any = None,
        **others: Any,
    ) -> str:
        given = {"args": args, "model": model, "optimizer": optimizer}
        given |= {"model_parameters": model_parameters, "config": config}
        self.calls.append(((), {**given, "config_params": config_params, **others}))
        return "DeepSpeed's own"


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeepSpeeds]:
    plugin.disable()
    stand_in = DeepSpeeds()
    monkeypatch.setattr(deepspeed, "initialize", stand_in)
    plugin.enable()
    yield stand_in
    plugin.disable()


def engine_from(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize(...)[0]`, closed after a look at it."""
    engine = deepspeed.initialize(*args, **kwargs)[0]
    engine.destroy()
    return engine


# --- deepspeed.initialize -------------------------------------------------------------------------


def test_an_enabled_section_gets_strongholds_engine(original: DeepSpeeds) -> None:
    model, _ = MODELS["gpt"]()
    engine = engine_from(model=model, config=config(), model_parameters=model.parameters())
    assert isinstance(engine, StrongholdEngine)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert original.calls == []


def test_deepspeeds_log_names_its_version(
    original: DeepSpeeds, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs look for DeepSpeed's line of information, as Transformers' tests do."""
    with caplog.at_level("INFO", "DeepSpeed"):
        deepspeed_logger.addHandler(caplog.handler)
        try:
            engine_from(model=MODELS["gpt"]()[0], config=config())
        finally:
            deepspeed_logger.removeHandler(caplog.handler)
    assert f"DeepSpeed info: version={deepspeed.__version__}, engine=stronghold" in caplog.text


def test_every_way_to_pass_a_config_is_seen(original: DeepSpeeds, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config()))
    args = Namespace(deepspeed_config=str(path), local_rank=0)
    model, _ = MODELS["gpt"]()
    for given, named in (
        ((None, model), {"config": str(path)}),
        ((None, model), {"config_params": config()}),
        ((args, model, None, list(model.parameters())), {}),
    ):
        assert isinstance(engine_from(*given, **named), StrongholdEngine)
    assert original.calls == []


@pytest.mark.parametrize(
    "section", [None, {"enabled": False}, False], ids=["absent", "disabled", "false"]
)
def test_without_an_enabled_section_deepspeed_gets_the_call_untouched(
    original: DeepSpeeds, section: Any
) -> None:
    settings = config()
    del settings["stronghold"]
    if section is not None:
        settings["stronghold"] = section
    model, _ = MODELS["gpt"]()
    assert deepspeed.initialize(None, model, config=settings) == "DeepSpeed's own"
    [(_, given)] = original.calls
    assert given["model"] is model
    assert given["config"] is settings


@pytest.mark.parametrize("settings", [None, "no/such/file.json", 17, {}])
def test_what_deepspeed_refuses_is_refused_in_its_own_words(
    original: DeepSpeeds, settings: Any
) -> None:
    assert deepspeed.initialize(model=None, config=settings) == "DeepSpeed's own"


def test_a_malformed_section_is_refused_in_ours(original: DeepSpeeds) -> None:
    with pytest.raises(ConfigError, match="stronghold"):
        deepspeed.initialize(model=None, config={**config(), "stronghold": "yes"})
    assert original.calls == []


def test_strongholds_own_initialize_reaches_deepspeed_once(
    original: DeepSpeeds, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so: what DeepSpeed asks for next (a launcher, MPI) is else a riddle."""
    settings = config()
    del settings["stronghold"]
    caplog.set_level("INFO", "stronghold")
    assert stronghold.initialize(config=settings) == "DeepSpeed's own"
    assert len(original.calls) == 1
    assert 'no enabled "stronghold" section' in caplog.text


# --- idempotent, reversible -----------------------------------------------------------------------


def test_enabling_twice_is_enabling_once(original: DeepSpeeds) -> None:
    installed = deepspeed.initialize
    plugin.enable()
    assert deepspeed.initialize is installed
    assert inspect.signature(installed) == inspect.signature(original)


def test_disabling_gives_the_very_function_back(original: DeepSpeeds) -> None:
    plugin.disable()
    assert deepspeed.initialize is original
    assert not plugin.enabled()
    plugin.disable()
    assert deepspeed.initialize is original
    plugin.enable()
    assert deepspeed.initialize is not original
    assert plugin.enabled()


def test_a_wrapper_put_on_later_stays_and_ours_passes_on(
    original: DeepSpeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = deepspeed.initialize

    def wrapper(**kwargs: Any) -> Any:
        return ours(**kwargs)

    monkeypatch.setattr(deepspeed, "initialize", wrapper)
    model, _ = MODELS["gpt"]()
    plugin.disable()
    assert deepspeed.initialize is wrapper
    assert deepspeed.initialize(model=model, config=config()) == "DeepSpeed's own"
    plugin.enable()
    assert isinstance(engine_from(model=model, config=config()), StrongholdEngine)
    monkeypatch.setattr(deepspeed, "initialize", ours)


def test_an_engine_outlives_disable(original: DeepSpeeds) -> None:
    model, make_batch = MODELS["gpt"]()
    engine, *_ = deepspeed.initialize(
        model=model, config=config(), model_parameters=model.parameters()
    )
    plugin.disable()
    engine.backward(engine(**make_batch(0)))
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


# --- python -m stronghold.run ---------------------------------------------------------------------

SHOW = """
import json, os, sys
import deepspeed, torch
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "stronghold": {"device": "emulated"},
}
several = int(os.environ.get("WORLD_SIZE", 1)) > 1
engine, *_ = deepspeed.initialize(
    model=model, config=config, model_parameters=model.parameters(), dist_init_required=several
)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
found = {"argv": sys.argv, "name": __name__, "path": sys.path[0], "steps": engine.global_steps}
found |= {"engine": type(engine).__name__, "ranks": engine.world_size}
print("FOUND" + json.dumps(found), flush=True)
engine.destroy()
"""


@pytest.fixture(autouse=True)
def disabled_afterwards() -> Iterator[None]:
    yield
    plugin.disable()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "script.py"
    path.parent.mkdir()
    path.write_text(SHOW)
    return path


def found_in(output: str) -> dict[str, Any]:
    [line] = [line for line in output.splitlines() if line.startswith("FOUND")]
    return json.loads(line.removeprefix("FOUND"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], []),
        ([], ["--lr", "1", "--local_rank=3"]),
        (["--local_rank=0"], ["--lr", "1"]),
        (["--local-rank=0"], []),
        (["--local_rank", "0"], ["x"]),
    ],
)
def test_a_script_sees_its_own_command_line(
    script: Path,
    before: list[str],
    after: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["stronghold.run"])
    monkeypatch.setattr(sys, "path", ["elsewhere", *sys.path])
    run.main([*before, str(script), *after])
    assert found_in(capsys.readouterr().out) == {
        "argv": [str(script), *before, *after],
        "name": "__main__",
        "path": str(script.parent),
        "steps": 1,
        "engine": "StrongholdEngine",
        "ranks": 1,
    }


def test_a_module_runs_as_with_python_m(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stronghold.run"])
    monkeypatch.syspath_prepend(script.parent)
    run.main(["--local_rank=0", "-m", "script", "--lr"])
    found = found_in(capsys.readouterr().out)
    assert found["argv"] == [str(script), "--local_rank=0", "--lr"]
    assert found["name"] == "__main__"


@pytest.mark.parametrize("words", [[], ["--local_rank=0"], ["--lr", "1"], ["-m"], ["missing.py"]])
def test_a_command_line_without_a_script_ends_with_the_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"usage: python -m stronghold\.run"):
        run.main(words)


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "stronghold.run"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus=2", "--module", "stronghold.run"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes=2"),
        *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
        *("--module", "stronghold.run"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed", "torchrun"])
def test_launchers_start_a_script_through_run(launcher: str, script: Path) -> None:
    """In two processes, which share the state of one model."""
    from tests.conftest import free_port

    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks need two GPUs, or none")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del environment[name]
    command = [sys.executable, *LAUNCHERS[launcher]]
    port = {"torchrun": "--master_port", "deepspeed": "--master_port"}.get(launcher)
    if port:
        command.insert(3, f"{port}={free_port()}")
    if launcher == "accelerate":
        command.insert(3, f"--main_process_port={free_port()}")
    ended = subprocess.run(
        [*command, str(script), "--lr", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    of_ranks = [json.loads(text) for text in re.findall(r"FOUND(\{.*?\})", ended.stdout)]
    assert len(of_ranks) == 2, ended.stdout
    for found in of_ranks:
        assert found["engine"] == "StrongholdEngine"
        assert found["ranks"] == 2
        words = [word for word in found["argv"] if "local_rank" not in word]
        assert words == [str(script), "--lr", "1"]
        assert found["path"] == str(script.parent)


# --- what an import changes -----------------------------------------------------------------------

PROBE = """
import sys
finders = list(sys.meta_path)
import stronghold
assert sys.meta_path == finders
assert "deepspeed" not in sys.modules and "torch" not in sys.modules
import deepspeed
{first}
plain = deepspeed.initialize
import stronghold
assert deepspeed.initialize is plain
import stronghold.plugin
assert deepspeed.initialize is not plain and stronghold.plugin.enabled()
from accelerate.utils.deepspeed import HfDeepSpeedConfig
for section, stage in (({"stronghold": {}}, 2), ({}, 3), ({"stronghold": {}}, 2)):
    read = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, **section})
    assert read.get_value("zero_optimization.stage") == stage
"""


@pytest.mark.parametrize("first", ["", "import accelerate.utils.deepspeed"])
def test_the_plugin_alone_changes_names_of_other_packages(first: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROBE.replace("{first}", first)],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
