"""Lean states: as any states, but 5.125 bytes per parameter; exact ones and they load each other.

That nothing changes a bit of them, `test_bits` shows on small layers; here are layers of several
pieces, the bytes, files of either kind, what is refused and what is said.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import BudgetError, ConfigError
from stronghold.optim.states import (
    decode_root,
    decode_signed,
    join_master,
    page_numel,
    split_lean_master,
)
from tests.support.states import MOMENTS
from tests.support.training import ADAM, config, initialized

DECODED = {"exp_avg": decode_signed, "exp_avg_sq": decode_root}
HIDDEN = 384  # 147,456 elements a weight: more than two pages of every array
PARAMETERS = 3 * (HIDDEN * HIDDEN + HIDDEN)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(number)).bfloat16()


def engine_of(section: dict[str, Any], *, clipping: float = 0.0, **more: Any) -> Any:
    section = {"window": 1, **section}
    settings = config(clipping=clipping, precision="lean", section=section)
    settings["bf16"]["check_grad_overflow"] = False
    model = Stack()
    return initialized(model, {**settings, **more})


def train(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(engine(batch(step)))
        engine.step()


def arrays_of(engine: Any) -> dict[str, torch.Tensor]:
    """All that a step depends on."""
    engine.synchronize()
    now, found = engine.inspect(), {}
    for layer in now.layers:
        layer.wait()
        for name in layer.trained:
            for array in now.states.dtypes:
                found[f"{array} of {name}"] = layer.read(array, name)
    return found


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """Four steps of `CPUAdam(states="lean")` in a plain loop."""
    model = Stack().bfloat16()
    adam = stronghold.CPUAdam(model.parameters(), **ADAM, states="lean")
    for step in range(4):
        model(batch(step)).backward()
        adam.step()
        adam.zero_grad()
    found = {}
    for name, parameter in model.named_parameters():
        state = adam.state[parameter]
        found[f"weights of {name}"] = parameter.detach().flatten()
        for array in ("low", *MOMENTS, "exp_avg_scale", "exp_avg_sq_scale"):
            found[f"{array} of {name}"] = state[array].flatten()
    return found


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("home", ["moments", "masters", "weights"])
def test_pieces_change_no_bit_of_the_plain_loops(
    home: str,
    pages: int,
    plain: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From two steps on the other half runs in memory, from a checkpoint."""
    page_bytes = page_numel("lean") * (2 + 1 + 2) + 2 * 4096
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", pages * page_bytes)
    engine = engine_of({"nvme": {"path": str(tmp_path), "spill": home}})
    try:
        train(engine, range(2))
        engine.save_checkpoint(tmp_path / "saved")
        train(engine, range(2, 4))
        assert_same(arrays_of(engine), plain)
        report = engine.memory_report()
        assert (report.host_peak, report.nvme_peak) == (report.host_planned, report.nvme_planned)
        # with gradients
        kept = {"moments": 5.0, "masters": 4.0, "weights": 2.0}[home]
        rings = sum(n for k, n in engine.plan.host_bytes.items() if "ring" in k)
        padded = sum(layer.trained_numel for layer in engine.inspect().layout.layers)
        assert report.host_peak == kept * padded + rings
    finally:
        engine.destroy()
    engine = engine_of({})
    try:
        engine.load_checkpoint(tmp_path / "saved")
        train(engine, range(2, 4))
        assert_same(arrays_of(engine), plain)
    finally:
        engine.destroy()


def test_exact_and_lean_states_load_each_other_by_their_values(tmp_path: Path) -> None:
    folder = {"lean": tmp_path / "lean", "exact": tmp_path / "exact", "again": tmp_path / "again"}
    engine = engine_of({})
    train(engine, range(2))
    engine.save_checkpoint(folder["lean"], tag="a")
    found = arrays_of(engine)
    engine.destroy()
    said = json.loads((folder["lean"] / "a" / "manifest.json").read_text())["manifest"]
    assert said["states"] == "lean"
    exact = engine_of({"states": "exact"})
    exact.load_checkpoint(folder["lean"])
    for layer in exact.inspect().layers:
        for name in layer.trained:
            of = {a: found[f"{a} of {name}"] for a in ("weights", "low")}
            expected = join_master(of["weights"], of["low"])
            assert torch.equal(layer.master(name).flatten(), expected)
            for moment in MOMENTS:
                codes, scales = (found[f"{moment}{s} of {name}"] for s in ("", "_scale"))
                decoded = DECODED[moment](codes, scales)
                assert torch.equal(layer.read(moment, name), decoded)
    exact.save_checkpoint(folder["exact"], tag="a")
    exact.destroy()
    said = json.loads((folder["exact"] / "a" / "manifest.json").read_text())["manifest"]
    assert said["states"] == "exact"
    again = engine_of({})
    again.load_checkpoint(folder["exact"])
    back = arrays_of(again)
    again.destroy()
    # codes are the codes, but for the scale's last bit
    for name, value in found.items():
        if "scale" in name:
            torch.testing.assert_close(back[name], value, rtol=2e-7, atol=0)
        else:
            assert torch.equal(back[name], value), name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_lean_states_of_other_weights_are_refused(precision: str) -> None:
    settings = config(precision=precision, section={"states": "lean"})
    model = Stack()
    with pytest.raises(ConfigError, match=f"weights are {precision}: lean states are a layout of"):
        stronghold.initialize(model=model, config=settings, model_parameters=model.parameters())


def test_a_lean_optimizer_needs_a_lean_engine() -> None:
    model = Stack().bfloat16()
    adam = stronghold.CPUAdam(model.parameters(), states="lean")
    settings = config(precision="bf16")
    with pytest.raises(ConfigError, match='set that to "lean"'):
        stronghold.initialize(model=model, optimizer=adam, config=settings)
    settings["stronghold"]["states"] = "lean"
    stronghold.initialize(model=model, optimizer=adam, config=settings)[0].destroy()


def test_a_plan_that_does_not_fit_says_what_lean_states_would_save() -> None:
    with pytest.raises(BudgetError, match=r'stronghold.states to "lean".*saves about [0-9.]+ '):
        engine_of({"states": "exact", "host_memory": 10 * PARAMETERS})
    engine_of({"host_memory": 10 * PARAMETERS}).destroy()


@pytest.mark.parametrize("rate", [1e-5, 2.0**-17, 3e-4])
def test_a_learning_rate_that_does_not_move_the_largest_weights_is_said_once(
    rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Not while it rises. The bound is that of a master: of the layer's weights those stand still
    that a step of the rate leaves as they are."""
    sizes = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0, 16.0, 64.0]).repeat(HIDDEN)[:HIDDEN]
    masters = [join_master(*split_lean_master(w)) for w in (sizes, sizes + rate)]
    standing = int((masters[0] == masters[1]).sum())
    warmup = {"warmup_max_lr": rate, "warmup_num_steps": 3, "warmup_type": "linear"}
    engine = engine_of({}, scheduler={"type": "WarmupLR", "params": warmup})
    try:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()
            engine.module.blocks[1].inner.bias.copy_(sizes)
        said: list[int] = []
        with caplog.at_level(logging.WARNING, "stronghold"):
            for step in range(6):
                engine.backward(engine(batch(step)))
                engine.step()
                said.append(sum("does not move" in r.message for r in caplog.records))
    finally:
        engine.destroy()
    assert said[:3] == [0] * 3
    assert said[-1] == bool(standing)
    assert standing == 0 or f"{standing} of {PARAMETERS // 3} in blocks.1" in caplog.text
