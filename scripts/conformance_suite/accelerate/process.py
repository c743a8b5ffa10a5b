"""What is different in a process of Accelerate's tests, and in each process that they launch.

Owns four differences. The process has a device. Every config that Accelerate reads gets a
"stronghold" section. The class of the engine has DeepSpeed's name where tests compare classes. And
DeepSpeed's warm-up takes 0 steps as 1, as it did when these tests were written. `prepare` runs
before the process imports torch.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance_suite import hub

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
SITE = Path(__file__).resolve().parent / "site"
HUB = ROOT / "build" / "conformance" / "accelerate"

DEVICE = "STRONGHOLD_CONFORMANCE_DEVICE"
PRETENDED = "pretended"  # the GPU of tests/pretended


def environment() -> dict[str, str]:
    """Return the variables under which Python processes call `prepare`."""
    path = [str(SITE), str(SCRIPTS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        DEVICE: PRETENDED,
        "DS_ACCELERATOR": "cuda",
        "TOKENIZERS_PARALLELISM": "false",
        **hub.environment(HUB),
    }


class Section:
    """The section that every config of this process gets, while `enabled`."""

    def __init__(self) -> None:
        self.enabled = True

    def write(self, config: dict[str, Any]) -> None:
        """Add the section to a config that has none."""
        if self.enabled:
            # layers move, though they would fit
            config.setdefault("stronghold", {"window": 1})


section = Section()


def prepare() -> None:
    """Give this process the device and the differences."""
    _pretend()
    _replace_names()


def build_hub() -> None:
    """Fill the hub's folder in a process of its own, unless these sources have filled it."""
    here = Path(__file__).resolve().parent
    sources = (here / "models.py", here / "metric.py", here.parent / "hub.py")
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = HUB / "sources"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != content:
        plain = {name: value for name, value in os.environ.items() if name != DEVICE}
        command = [sys.executable, "-m", "conformance_suite.accelerate.models", str(HUB)]
        subprocess.run(command, env=plain, check=True)
        stamp.write_text(content, encoding="utf-8")


def _pretend() -> None:
    """Install the pretended GPU. A program that has several ranks finds one for each."""
    if "LOCAL_RANK" in os.environ:
        os.environ["LOCAL_RANK"] = "0"
    # A foreign project has a package of this name, too: it is found again afterwards.
    tests = ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests
    from tests.pretended import install

    extension = install.install()
    from tests.pretended import kernels, process_groups

    kernels.install(extension)
    process_groups.install()
    del sys.modules["tests"]


def _replace_names() -> None:
    import deepspeed.ops.adam
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime import engine, lr_schedules

    import stronghold.plugin

    # Accelerate makes one of a torch.optim.AdamW. DeepSpeed would compile its own for minutes.
    deepspeed.ops.adam.DeepSpeedCPUAdam = stronghold.CPUAdam
    engine.DeepSpeedEngine = stronghold.StrongholdEngine
    _replace(lr_schedules.WarmupLR, "__init__", _warm_up)
    _replace(HfDeepSpeedConfig, "set_stage_and_offload", _read_config)


def _replace(owner: Any, name: str, call: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)  # the engine reads the signature of a schedule
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, replacement)


def _warm_up(original: Any, schedule: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("warmup_num_steps") == 0:
        kwargs["warmup_num_steps"] = 1
    original(schedule, *args, **kwargs)


def _read_config(original: Any, config: Any) -> None:
    section.write(config.config)
    original(config)
