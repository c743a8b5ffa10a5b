"""The proposal for DeepSpeed in docs/upstream.md: the page's code, in the `initialize` of the
DeepSpeed that is installed."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from stronghold.engine import StrongholdEngine
from tests.support.training import config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "upstream.md").read_text(encoding="utf-8")
FILE, LINES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ANCHOR = "config = load_ds_config(config)\n"


def engines() -> Any:
    module = types.ModuleType("deepspeed.runtime.engines")
    exec(compile(FILE, "deepspeed/runtime/engines.py", "exec"), vars(module))
    return module


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is no more than its entry point."""
    info = tmp_path / "another-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepspeed.engines]\nanother = json:loads\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_section_chooses_its_engine() -> None:
    chosen_by = engines().chosen_by
    found = chosen_by({"stronghold": {}})
    assert found.name == "stronghold"
    assert chosen_by({}) is None
    assert chosen_by({"stronghold": {"enabled": False}}) is None


@pytest.mark.usefixtures("another")
def test_two_sections_that_ask_are_refused() -> None:
    chosen_by = engines().chosen_by
    assert chosen_by({"another": {}}).name == "another"
    assert chosen_by({"another": {}, "stronghold": {"enabled": False}}).name == "another"
    with pytest.raises(ValueError, match=r"several engines \(another, stronghold\)"):
        chosen_by({"another": {}, "stronghold": {}})


def test_deepspeeds_initialize_with_these_lines_gives_the_engine() -> None:
    original = inspect.getsource(inspect.unwrap(deepspeed.initialize))
    assert original.count(ANCHOR) == 1
    names = {**vars(deepspeed), "engines": engines()}
    source = original.replace(ANCHOR, ANCHOR + LINES)
    exec(compile(source, "deepspeed/__init__.py", "exec"), names)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    engine, optimizer, loader, _ = names["initialize"](model=model, config=config())
    assert isinstance(engine, StrongholdEngine)
    assert (optimizer, loader) == (engine.optimizer, None)
    weight = model[0].weight.detach().clone()
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    engine.synchronize()
    assert not torch.equal(model[0].weight, weight)
    engine.destroy()
