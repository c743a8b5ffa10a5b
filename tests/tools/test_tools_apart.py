"""Laws of the room `tools`: training loads none of it, and help loads none of what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import sys

import torch
from torch import nn

import stronghold

torch.manual_seed(0)
model = nn.Sequential()
model.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
model.forward = lambda x: [x := layer(x) for layer in model.layers][-1].square().mean()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "stronghold": {"device": "emulated", "gpu_memory": 4 << 20},
}
engine, *_ = stronghold.initialize(
    model=model, config=config, model_parameters=model.parameters()
)
before = [weight.clone() for weight in model.parameters()]
engine.backward(engine(torch.randn(2, 16)))
engine.step()
after = [weight.clone() for weight in model.parameters()]
engine.destroy()
assert not any(map(torch.equal, before, after)), "it trained nothing"
print(*sys.modules)
"""
HELP = """
import sys

from stronghold.tools import cli

try:
    cli.main(sys.argv[1:])
except SystemExit as stopped:
    assert stopped.code == 0
print()
print(*sys.modules)
"""


def modules_after(program: str, *arguments: str) -> set[str]:
    """The modules that `program` has loaded; it prints them in its last line."""
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_a_step_of_training_loads_no_tool() -> None:
    modules = modules_after(TRAIN)
    assert "stronghold.train.trainer" in modules
    assert not {name for name in modules if name.startswith("stronghold.tools")}
    assert "matplotlib" not in modules  # only pictures need it


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["doctor", "--help"], ["version"]], ids=str
)
def test_help_loads_neither_torch_nor_deepspeed(arguments: list[str]) -> None:
    modules = modules_after(HELP, *arguments)
    assert "stronghold.tools.cli" in modules
    assert not modules & {"torch", "deepspeed", "transformers", "matplotlib"}
