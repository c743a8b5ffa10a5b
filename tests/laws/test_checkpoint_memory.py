"""Saving and loading cost the host less than one layer: peaks of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.train.arrays import BLOCK_BYTES

VOCABULARY = 512


def status(key: str) -> int:
    """A size of /proc/self/status, in bytes: VmRSS is resident memory, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def measure(work: Path, hidden: int, intermediate: int, num_layers: int) -> dict[str, int]:
    """Growth of peak resident memory over steady state, in bytes, of each way to save and load."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import stronghold
    from stronghold.tools.cli import main

    torch.set_num_threads(1)
    heads = hidden // 64
    shape = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        vocab_size=VOCABULARY,
        use_cache=False,
        dtype="bfloat16",
    )
    found: dict[str, int] = {}

    def peak(what: str, work: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = status("VmRSS")
        result = work()
        found[what] = status("VmHWM") - before
        return result

    def engine_of(model: Any, asynchronous: bool = False) -> Any:
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "stronghold": {
                "device": "emulated",
                "window": 2,
                "activations": "recompute",
                "emulated": {"poison": False},
                "async_checkpoint": asynchronous,
            },
        }
        return stronghold.initialize(
            model=model, config=settings, model_parameters=model.parameters()
        )[0]

    def step(engine: Any) -> None:
        tokens = torch.arange(4).view(1, 4)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.synchronize()

    # Random weights, written without ever making the model.
    write_model(shape, work / "model")
    model = AutoModelForCausalLM.from_pretrained(work / "model").train()
    engines: list[Any] = []
    before = status("RssAnon")
    highest = before + grown(lambda: engines.append(engine_of(model)))
    found["initialize"] = highest - status("RssAnon")  # the model itself is pages of its file
    engine = engines[0]
    step(engine), step(engine)
    peak("save", lambda: engine.save_checkpoint(work / "saved"))
    peak("load", lambda: engine.load_checkpoint(work / "saved"))
    step(engine)
    peak("save again", lambda: engine.save_checkpoint(work / "saved"))
    peak("save_16bit_model", lambda: engine.save_16bit_model(work / "bin"))
    engine.settings.stronghold.__dict__["async_checkpoint"] = True

    def beside() -> None:
        engine.save_checkpoint(work / "beside")
        step(engine)
        engine.wait_for_checkpoint()

    peak("save beside a step", beside)
    largest = max(state.layout.trained_numel for state in engine.inspect().layers)
    slabs = engine.memory_report().host_peak
    engine.destroy()
    peak("export hf", lambda: main(["export", str(work / "saved"), str(work / "hf")]))
    found |= {"layer": 12 * largest, "layer's weights": 2 * largest, "slabs": slabs}
    return found


def write_model(shape: Any, out: Path) -> None:
    """A model directory of small random weights, a parameter at a time."""
    from transformers import LlamaForCausalLM

    from stronghold.checkpoint.files import TensorHeader, bytes_of, write_tensors
    from stronghold.devices.threads import Workers

    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    headers = [
        TensorHeader(name, torch.bfloat16, tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    ]

    def data() -> Iterator[torch.Tensor]:
        for header in headers:
            yield bytes_of((torch.randn(header.shape) * 0.02).to(header.dtype))

    out.mkdir()
    shape.save_pretrained(out)
    with Workers("model", 1) as threads:
        write_tensors(out / "model.safetensors", headers, data(), threads)


def in_a_process(measure: Callable[..., dict[str, int]], work: Path, *sizes: int) -> dict[str, int]:
    """What `measure` returns in a process of its own. Tests are no package where pytest reads them:
    there a file's module has the file's name alone."""
    file = measure.__module__.rpartition(".")[2]
    code = (
        f"import json, sys, pathlib; from tests.laws.{file} import {measure.__name__} as found; "
        "print(json.dumps(found(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))))"
    )
    root = Path(__file__).resolve().parents[2]
    # One arena: memory that other threads freed would otherwise count as grown.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(work), *map(str, sizes)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_300_million_parameters_are_saved_and_loaded_within_one_layer(tmp_path: Path) -> None:
    grown = in_a_process(measure, tmp_path, 1024, 2816, 24)
    print("\n".join(f"{what:32} {size / 2**20:9.1f} MiB" for what, size in grown.items()))
    layer = grown["layer"]
    for what, size in grown.items():
        assert what in ("layer", "layer's weights", "slabs") or size <= layer, (what, size)


# -- of what lies in files: it never passes through RAM --------------------------------------------
LAYERS, WIDTH = 12, 1024  # a layer's state is 14 MiB, the model's 168 MiB


def grown(work: Callable[[], object]) -> int:
    """How far the process's own memory rises above what it had, looked at each millisecond."""
    before, peak, ended = status("RssAnon"), [0], threading.Event()

    def look() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], status("RssAnon") - before)
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


def measure_spilled(work: Path) -> dict[str, int]:
    import stronghold
    from tests.support.training import config

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
    found = in_a_process(measure_spilled, tmp_path)
    print(found)
    for what, size in found.items():
        # a file passes five blocks of 16 MiB: a layer's, or that of all weights
        file = WIDTH * WIDTH * (2 * LAYERS if what == "save_16bit_model" else 14)
        assert size <= file + BLOCK_BYTES, (what, found)  # and arrays in files pass a block
