"""A training session for tests of checkpoints: dropout, tied weights, a schedule, named by step."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import stronghold
from stronghold.checkpoint import saving
from stronghold.tools.cli import main
from tests.support.training import config, moments_of, on

VOCABULARY = 61
# what a save of a tag leaves beside it
BESIDE_TAGS = ["latest", "zero_to_fp32.py"]
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": 5, "total_num_steps": 40, "warmup_max_lr": 1e-2},
}


def make_model(num_layers: int = 3, seed: int = 0, width: int = 24) -> GPT2LMHeadModel:
    """A small GPT-2: dropout everywhere, head tied to the embedding."""
    shape = GPT2Config(
        n_embd=width, n_layer=num_layers, n_head=2, n_positions=16, vocab_size=VOCABULARY
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(shape).train()


class WithBuffer(torch.nn.Module):
    """GPT-2 has no buffer in its state dict: this one has."""

    def __init__(self, seed: int = 0, num_layers: int = 3, width: int = 24) -> None:
        super().__init__()
        self.body = make_model(seed=seed, num_layers=num_layers, width=width)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, **batch: Any) -> Any:
        self.seen += 1
        return self.body(**batch)


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices alone."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the C library has no `renameat2`: two names cannot be exchanged at once."""
    library = ctypes.CDLL

    class Without:
        def __init__(self, *of: Any, **options: Any) -> None:
            self.library = library(*of, **options)

        def __getattr__(self, name: str) -> Any:
            if name == "renameat2":
                raise AttributeError(name)
            return getattr(self.library, name)

    monkeypatch.setattr(ctypes, "CDLL", Without)


def settings_of(**options: Any) -> dict[str, Any]:
    """`tests.support.training.config` with a schedule of learning rates."""
    return {**config(**options), "scheduler": SCHEDULE}


@contextmanager
def session(model: Any = None, **options: Any) -> Iterator[Any]:
    """An engine over a fresh model, destroyed at the end."""
    torch.manual_seed(1)
    model = make_model() if model is None else model
    engine, _, _, _ = stronghold.initialize(
        model=model, config=settings_of(**options), model_parameters=two_groups(model)
    )
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, steps: int) -> list[torch.Tensor]:
    """The losses of the next micro-batches, from the engine's own position on."""
    losses = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        output = engine(**on(engine.device, make_batch(engine.micro_steps)))
        engine.backward(output.loss)
        engine.step()
        losses.append(output.loss.detach().clone())
    return losses


def resume(engine: Any, *arguments: Any, **options: Any) -> tuple[str | None, Any]:
    """`load_checkpoint` and the random states of the save, with which dropout goes on."""
    result = engine.load_checkpoint(*arguments, **options)
    engine.restore_random_states()
    return result


def snapshot(engine: Any) -> dict[str, torch.Tensor]:
    """Everything that a load may change, by name."""
    engine.synchronize()
    found = {f"weight {k}": v.cpu().clone() for k, v in engine.module_state_dict().items()}
    now = engine.inspect()
    if now.has_trained:
        moments = moments_of(engine)
        found |= {f"moment {i} {k}": m for k, v in moments.items() for i, m in enumerate(v)}
        for layer in now.layers:
            if "low" in layer.arrays:
                found[f"low {layer.index}"] = layer.arrays["low"].to("cpu", copy=True)
    found["steps"] = torch.tensor([step for layer in now.layers for step in layer.counts])
    found["torch's random state"] = torch.get_rng_state()
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    counters = [engine.global_steps, engine.micro_steps, engine.global_samples]
    found["numbers"] = torch.tensor([*rates, *counters], dtype=torch.float64)
    return found


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), f"{name} differs"


def held_saves(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let saves write no file of a layer until the event is set."""
    write, goes_on = saving.write_tensors, threading.Event()

    def late(*file: Any, **options: Any) -> Any:
        assert goes_on.wait(60)
        return write(*file, **options)

    monkeypatch.setattr(saving, "write_tensors", late)
    return goes_on


def stored_weights(file: Path) -> dict[str, torch.Tensor]:
    """The weights in a file of a layer, by name."""
    found = {k: v for k, v in load_file(file).items() if k.startswith("weights/")}
    return {name.removeprefix("weights/"): value for name, value in found.items()}


def stored_tensors(tag: Path) -> dict[str, torch.Tensor]:
    """Every array of a checkpoint by its name, flat, and every buffer, as the library reads them:
    whichever ranks have written them. The files hold nothing else."""
    described = json.loads((tag / "manifest.json").read_text())["manifest"]
    files = {path.name: load_file(path) for path in sorted(tag.glob("*.safetensors"))}
    assert files.keys() <= described["files"].keys()
    tensors = dict(files.pop("buffers.safetensors", {}))
    if "parameters" in described:  # a tag of one rank
        for one in described["parameters"]:
            for array in one["arrays"]:
                name = f"{array}/{one['names'][0]}"
                tensors[name] = files[one["file"]].pop(name).flatten()
        assert not any(files.values()), "tensors that the manifest does not list"
        return tensors
    for record in described["tensors"]:
        for array, pieces in record["pieces"].items():
            name = record["name"] if array in ("weights", "low") else f"{array}.{record['name']}"
            parts = []
            for piece in pieces:
                file, span = files[piece["file"]], f"[{piece['begin']}:{piece['end']}]"
                part = file.pop(name + span) if name + span in file else file.pop(name)
                assert part.numel() == piece["end"] - piece["begin"]
                parts.append(part.flatten())
            tensors[f"{array} {name}"] = torch.cat(parts)
    assert not any(files.values()), "tensors that the manifest does not list"
    return tensors


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    engine.synchronize()
    return {name: layer.master(name) for layer in engine.inspect().layers for name in layer.trained}


def saved_run(where: Path) -> Path:
    """A checkpoint after four steps, and beside it the plain weights and masters."""
    with session(precision="bf16") as engine:
        train(engine, 4)
        engine.save_checkpoint(where, client_state={"epoch": 1})
        save_plain(engine, where / "plain.pt")
    return where


def save_plain(engine: Any, path: Path) -> None:
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    torch.save({"weights": weights, "masters": masters_of(engine)}, path)


def command(*arguments: object) -> None:
    """`stronghold` with these arguments ends well."""
    assert main([str(argument) for argument in arguments]) == 0
