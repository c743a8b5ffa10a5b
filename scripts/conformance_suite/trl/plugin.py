"""A pytest plugin for TRL's invariants: plain training is canonical, this engine is every member.

Owns what is different in the process of the tests. The references are recorded here, by TRL's own
commands without this engine: those of TRL are of another model. Every member, also the canonical
config, then runs with a DeepSpeed config that has the section. Attention is the eager one, where
TRL's configs name a GPU's kernel.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from conformance_suite import hub

SCRATCH = tempfile.TemporaryDirectory(prefix="conformance-trl-")
FOLDER = Path(SCRATCH.name)
os.environ.update(hub.environment(FOLDER / "hub"))

MIN_NORM = 1e-3  # of the gradients in a step of plain training
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 0},
    "stronghold": {"device": "emulated", "window": 1},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fill the hub, and fit TRL's configs to it."""
    module: Any = items[0].getparent(pytest.Module).obj
    build = [sys.executable, "-m", "conformance_suite.trl.models", str(FOLDER / "hub")]
    subprocess.run([*build, module.MODEL_REVISION], check=True)
    module.REFERENCES_DIR = FOLDER
    module._trl_commit = lambda: importlib.metadata.version("trl")
    module.is_bf16_supported = lambda: True
    for klass in module.EQUIVALENCE_CLASSES.values():
        for member in klass["members"]:
            for_the_cpu(member.args)


def for_the_cpu(arguments: dict[str, str]) -> None:
    """Change a config's arguments so that TRL runs it without a GPU."""
    arguments["attn_implementation"] = "eager"
    if arguments["bf16"] == "True":
        arguments["use_cpu"] = "True"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Record the class's reference if it is not there, then let the member run with the engine."""
    module: Any = item.getparent(pytest.Module).obj
    klass = item.callspec.params["klass"]  # type: ignore[attr-defined]
    member = item.callspec.params["config"]  # type: ignore[attr-defined]
    reference = FOLDER / f"{klass}.json"
    if not reference.exists():
        trajectory = module.run(module.EQUIVALENCE_CLASSES[klass]["members"][0])
        if min(step.grad_norm for step in trajectory.steps) < MIN_NORM:
            raise AssertionError(
                f"{klass}: the plain run has gradients of zero, so it shows nothing"
            )
        module.save(trajectory, reference)
    path = FOLDER / "ds_config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    member.args["deepspeed"] = str(path)
    yield
    del member.args["deepspeed"]
