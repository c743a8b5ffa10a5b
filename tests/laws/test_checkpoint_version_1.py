"""Checkpoints of version 1 are read to the bit. `tests/support/version_1` has two, which the last
release that wrote them has made of `Small`: after three steps, with exact and with lean states."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import stronghold
from stronghold.checkpoint.manifest import MANIFEST, STATE, Manifest
from stronghold.checkpoint.weights import fp32_state
from stronghold.errors import CheckpointError
from stronghold.optim.states import join_master
from tests.support.checkpoints import assert_same, command, masters_of, resume, snapshot
from tests.support.training import config, moments_of

SAVED = Path(__file__).resolve().parents[1] / "support" / "version_1"
TAGS = ["exact", "lean"]


class Small(nn.Module):
    """A frozen parameter, a buffer, and sizes that no group of states divides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(15, 15) for _ in range(2))
        self.head = nn.Linear(15, 3)
        self.blocks[0].bias.requires_grad = False
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


@contextmanager
def session(states: str, **section: Any) -> Iterator[Any]:
    torch.manual_seed(9)
    model = Small()
    section = {"layers": "blocks", **({"states": states} if states == "lean" else {}), **section}
    engine, *_ = stronghold.initialize(
        model=model,
        config=config(precision="bf16", section=section),
        model_parameters=list(model.parameters()),
    )
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        inputs = torch.full((2, 15), 1.0 + engine.global_steps, dtype=torch.bfloat16)
        loss = engine(inputs)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


def stored(tag: str, kind: str) -> dict[str, torch.Tensor]:
    """The tensors of all files of a kind, as the library reads them."""
    tensors: dict[str, torch.Tensor] = {}
    for path in (SAVED / tag).glob(f"{kind}-*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("section", [{}, {"resident_layers": "all"}], ids=str)
@pytest.mark.parametrize("tag", TAGS)
def test_every_bit_of_version_1_is_loaded(tag: str, section: dict[str, Any]) -> None:
    weights, lows, moments = (stored(tag, kind) for kind in ("weights", "masters", "moments"))
    with session(tag, **section) as engine:
        train(engine, 1)
        path, client = resume(engine, SAVED, tag=tag)
        assert path == str(SAVED / tag / STATE)
        assert client["epoch"] == 2
        assert (engine.global_steps, engine.global_samples) == (3, 6)
        assert engine.module.seen.tolist() == [3.0] * 3
        assert_same(dict(engine.module.named_parameters()), weights)
        for name, master in masters_of(engine).items():
            assert torch.equal(master, join_master(weights[name], lows[name])), name
        for name, arrays in moments_of(engine).items():
            for array, values in moments.items():
                if array.endswith(f".{name}"):
                    flat = values.view(-1)
                    assert any(a.dtype is flat.dtype and torch.equal(a, flat) for a in arrays), name
        counts = [count for layer in engine.inspect().layers for count in layer.counts]
        assert sorted(counts) == [0, 3, 3, 3, 3, 3]
        state = torch.load(SAVED / tag / STATE, weights_only=False)
        assert torch.equal(torch.get_rng_state(), state["random"]["torch"])


@pytest.mark.parametrize("tag", TAGS)
def test_version_1_saved_again_goes_on_as_it_does(tag: str, tmp_path: Path) -> None:
    with session(tag) as engine:
        engine.load_checkpoint(SAVED, tag=tag)
        engine.save_checkpoint(tmp_path)
        losses, expected = train(engine, 3), snapshot(engine)
    body = json.loads((tmp_path / "global_step3" / MANIFEST).read_text())["manifest"]
    assert body["version"] == 2
    with session(tag) as engine:
        engine.load_checkpoint(tmp_path)
        assert all(map(torch.equal, train(engine, 3), losses))
        assert_same(snapshot(engine), expected)
    one, two = Manifest.read(SAVED / tag), Manifest.read(tmp_path / "global_step3")
    assert one.tensors == two.tensors
    assert one.files.keys() == two.files.keys()


def test_lean_states_of_version_1_become_exact_ones() -> None:
    with session("lean") as engine:
        engine.load_checkpoint(SAVED, tag="lean")
        expected = masters_of(engine)
    with session("exact") as engine:
        engine.load_checkpoint(SAVED, tag="lean")
        assert_same(masters_of(engine), expected)


def test_version_1_is_exported(tmp_path: Path) -> None:
    weights, lows = stored("exact", "weights"), stored("exact", "masters")
    state = fp32_state(SAVED / "exact")
    for name, weight in weights.items():
        assert torch.equal(state[name], join_master(weight, lows.get(name))), name
    command("export", SAVED / "exact", tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same({name: exported[name] for name in weights}, weights)


@pytest.mark.parametrize("name", sorted(path.name for path in (SAVED / "exact").iterdir()))
def test_a_damaged_file_of_version_1_is_refused(name: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(SAVED, tmp_path / "copy"))
    file = copy / "exact" / name
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    file.write_bytes(data)
    with session("exact") as engine:
        before = snapshot(engine)
        with pytest.raises(CheckpointError, match=f"{file}"):
            engine.load_checkpoint(copy, tag="exact")
        assert_same(snapshot(engine), before)


CRAFTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tensors are a number": lambda body: body.update(tensors=7),
    "a tensor is a number": lambda body: body["tensors"].append(7),
    "no file of weights": lambda body: body["tensors"][0].pop("weights"),
    "weights are null": lambda body: body["tensors"][0].update(weights=None),
    "an unknown optimizer": lambda body: body["tensors"][0].update(optimizer="Magic"),
    "an unknown dtype": lambda body: body["tensors"][0].update(dtype=["BF16"]),
    "sizes are words": lambda body: body["tensors"][0].update(shape=["a"]),
    "sizes are negative": lambda body: body["tensors"][0].update(shape=[-15, -15]),
    "states are a list": lambda body: body.update(states=[]),
    "a file elsewhere": lambda body: body["tensors"][0].update(low="../low.safetensors"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_manifest_of_version_1_is_refused(case: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(SAVED / "exact", tmp_path / "copy"))
    body = json.loads((copy / MANIFEST).read_text())["manifest"]
    CRAFTED[case](body)
    crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (copy / MANIFEST).write_text(json.dumps({"crc32": crc32, "manifest": body}))
    with pytest.raises(CheckpointError, match=str(copy / MANIFEST)):
        Manifest.read(copy)
