"""A quantised directory is taken over at one layer's extra RAM: peaks of a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_checkpoint_memory import grown, in_a_process

SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def quant_state(tensor: torch.Tensor) -> torch.Tensor:
    """bitsandbytes' description of a weight, as its files have it: JSON in bytes."""
    described = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(tensor.shape),
    }
    return torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)


def write_directory(config: Any, out: Path) -> None:
    """Write a directory of random stored weights, a tensor at a time."""
    from transformers import AutoModelForCausalLM

    from stronghold.checkpoint.files import Entry, entry_of, write_tensors

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    out.mkdir()
    config.save_pretrained(out)
    entries = []

    def add(name: str, dtype: torch.dtype, *shape: int) -> None:
        pieces = RandomPieces(dtype, shape)
        entries.append(Entry(name=name, dtype=dtype, shape=shape, pieces=pieces))

    for name, parameter in model.named_parameters():
        if "proj" in name:
            key = f"{name}.quant_state.bitsandbytes__nf4"
            entries.append(entry_of(key, quant_state(parameter)))
            add(name, torch.uint8, parameter.numel() // 2, 1)
            add(f"{name}.absmax", torch.float32, parameter.numel() // 64)
            add(f"{name}.quant_map", torch.float32, 16)
        else:
            add(name, torch.bfloat16, *parameter.shape)
    write_tensors(out / "model.safetensors", entries)
    path = out / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": SETTINGS}))


class RandomPieces:
    """`Entry.pieces` of random values: codes, and scales near 1."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape

    def __call__(self) -> list[torch.Tensor]:
        if self._dtype.itemsize > 1:
            return [torch.rand(self._shape).add_(0.5).to(self._dtype)]
        return [torch.randint(0, 126, self._shape, dtype=self._dtype)]


def measure(work: Path) -> dict[str, int]:
    """Bytes of the engine's weights and of a layer, and the peak of the process's own memory beside
    the weights."""
    from transformers import LlamaConfig

    import stronghold

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=8192,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        vocab_size=512,
        use_cache=False,
        dtype="bfloat16",
    )
    write_directory(config, work / "made")
    model = stronghold.from_pretrained(work / "made").train()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "stronghold": {"device": "emulated", "window": 2, "emulated": {"poison": False}},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    initialize = stronghold.initialize  # imports DeepSpeed, which takes memory, too
    engines = []

    def take_over() -> None:
        engines.append(initialize(model=model, config=settings, model_parameters=trained)[0])

    own = grown(take_over)
    layers = [layer.weights.nbytes for layer in engines[0].inspect().layers]
    engines[0].destroy()
    return {"weights": sum(layers), "own": own - sum(layers), "layer": max(layers)}


@pytest.mark.slow
def test_several_hundred_megabytes_are_taken_over_within_one_layer(tmp_path: Path) -> None:
    measured = in_a_process(measure, tmp_path)
    print({what: f"{size / 2**20:.1f} MiB" for what, size in measured.items()})
    assert measured["weights"] > 2e8
    assert measured["own"] < measured["layer"], measured
