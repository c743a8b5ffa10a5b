"""Checkpoints of spilled state never pass it through RAM: a peak of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

LAYERS, WIDTH = 12, 1024  # a layer's state is 14 MiB, the model's 168 MiB


def anonymous_bytes() -> int:
    """Resident memory that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("RssAnon")


def grown(work: Callable[[], object]) -> int:
    """How far the process's own memory rises above what it had, looked at each millisecond."""
    before, peak, ended = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], anonymous_bytes() - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    return peak[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def measure(work: Path) -> dict[str, int]:
    import stronghold
    from tests.training import config

    torch.set_num_threads(1)
    model = Model()
    section = {"window": 2, "nvme": {"path": str(work), "spill": "weights"}}
    settings = config(precision="bf16", section=section)
    engine = stronghold.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )[0]
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()
        engine.synchronize()

    found: dict[str, int] = {}
    step(), step()
    found["save"] = grown(lambda: engine.save_checkpoint(work / "saved"))
    found["load"] = grown(lambda: engine.load_checkpoint(work / "saved"))
    found["save_16bit_model"] = grown(
        lambda: engine.save_16bit_model(work / "bin", "model.safetensors")
    )
    found["step"] = grown(step)
    engine.destroy()
    return found


@pytest.mark.slow
def test_spilled_state_is_saved_and_loaded_within_one_layer(tmp_path: Path) -> None:
    code = (
        "import json, sys, pathlib; from tests.test_nvme_checkpoint_memory import measure; "
        "print(json.dumps(measure(pathlib.Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    for what, size in found.items():
        assert size <= 14 * WIDTH * WIDTH, (what, found)
