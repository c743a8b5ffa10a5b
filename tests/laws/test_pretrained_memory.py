"""A quantised directory is taken over at one layer's extra RAM: peaks of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_checkpoint_memory import grown, status

MIXTURE = {"num_experts": 32, "moe_intermediate_size": 512, "num_experts_per_tok": 2}
SIZES: dict[str, dict[str, Any]] = {
    "fp8": {"family": "llama", "intermediate_size": 8192},
    "fp8 experts": {"family": "qwen3_moe", **MIXTURE},
    "mxfp4": {"family": "gpt_oss", "num_local_experts": 32, "intermediate_size": 512},
    "bitsandbytes": {"family": "llama", "intermediate_size": 8192},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "bitsandbytes": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    },
}
BLOCK = 128


def stored(name: str, tensor: torch.Tensor, kind: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, dtype, shape) of the tensors that a directory has for one tensor of a model."""
    shape = tuple(tensor.shape)
    if kind == "bitsandbytes" and "proj" in name:
        yield name, torch.uint8, (tensor.numel() // 2, 1)
        yield f"{name}.absmax", torch.float32, (tensor.numel() // 64,)
        yield f"{name}.quant_map", torch.float32, (16,)
    elif kind.startswith("fp8") and "proj" in name and len(shape) == 2:
        grid = tuple(-(-size // BLOCK) for size in shape)
        yield name, torch.float8_e4m3fn, shape
        yield f"{name}_scale_inv", torch.float32, grid
    elif kind == "mxfp4" and len(shape) == 3:
        experts, inputs, outputs = shape
        yield f"{name}_blocks", torch.uint8, (experts, outputs, inputs // 32, 16)
        yield f"{name}_scales", torch.uint8, (experts, outputs, inputs // 32)
    else:
        yield name, torch.bfloat16, shape


def split_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The names that a file of Qwen3-MoE has for the joined experts of a model."""
    if "experts" not in name:
        yield name, tensor
        return
    stem = name.rpartition(".")[0]
    for number, expert in enumerate(tensor):
        if name.endswith("gate_up_proj"):
            gate, up = expert.chunk(2)
            yield f"{stem}.{number}.gate_proj.weight", gate
            yield f"{stem}.{number}.up_proj.weight", up
        else:
            yield f"{stem}.{number}.down_proj.weight", expert


def quant_state(tensor: torch.Tensor) -> torch.Tensor:
    """bitsandbytes' description of a weight, as its files have it: JSON in bytes."""
    described = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(tensor.shape),
    }
    return torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)


def write_directory(config: Any, out: Path, kind: str) -> None:
    """Write a directory of random stored weights, a tensor at a time."""
    from transformers import AutoModelForCausalLM

    from stronghold.checkpoint.files import Entry, entry_of, write_tensors

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    out.mkdir()
    config.save_pretrained(out)
    entries = []
    for name, parameter in model.named_parameters():
        is_split = kind == "fp8 experts"
        parts = split_experts(name, parameter) if is_split else iter([(name, parameter)])
        for part, tensor in parts:
            if kind == "bitsandbytes" and "proj" in part:
                key = f"{part}.quant_state.bitsandbytes__nf4"
                entries.append(entry_of(key, quant_state(tensor)))
            for stored_name, dtype, shape in stored(part, tensor, kind):
                pieces = RandomPieces(dtype, shape)
                entries.append(Entry(name=stored_name, dtype=dtype, shape=shape, pieces=pieces))
    write_tensors(out / "model.safetensors", entries)
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    settings = SETTINGS.get(kind, fp8)
    path = out / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


class RandomPieces:
    """`Entry.pieces` of random values: finite codes, and scales near 1."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape

    def __call__(self) -> list[torch.Tensor]:
        if self._dtype.itemsize > 1:
            return [torch.rand(self._shape).add_(0.5).to(self._dtype)]
        codes = torch.randint(0, 126, self._shape, dtype=torch.uint8)
        return [codes.view(self._dtype)]


def measure(work: Path, kind: str, width: int, num_layers: int) -> dict[str, int]:
    """Bytes of the engine's weights and of a layer, and the peak beside the weights: of the
    process's own memory, and of resident memory, which has pages of files, too."""
    from transformers import CONFIG_MAPPING

    import stronghold

    torch.set_num_threads(1)
    sizes = {**SIZES[kind], "hidden_size": width, "num_hidden_layers": num_layers}
    cls = CONFIG_MAPPING[sizes.pop("family")]
    config = cls(
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        vocab_size=512,
        use_cache=False,
        dtype="bfloat16",
        **sizes,
    )
    write_directory(config, work / "made", kind)
    model = stronghold.from_pretrained(work / "made").train()
    if kind == "bitsandbytes":
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

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    own = grown(take_over)
    resident = status("VmHWM") - before
    layers = [layer.weights.nbytes for layer in engines[0].inspect().layers]
    engines[0].destroy()
    weights = sum(layers)
    return {
        "weights": weights,
        "own": own - weights,
        "resident": resident - weights,
        "layer": max(layers),
    }


def measured_in_a_process(work: Path, kind: str, width: int, num_layers: int) -> dict[str, int]:
    """`measure` in a process of its own."""
    code = (
        "import json, sys, pathlib; from tests.laws.test_pretrained_memory import measure; "
        "work, kind, *sizes = sys.argv[1:]; "
        "print(json.dumps(measure(pathlib.Path(work), kind, *map(int, sizes))))"
    )
    # One arena: memory that other threads freed would otherwise count as grown.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(work), kind, str(width), str(num_layers)],
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_several_hundred_megabytes_are_taken_over_within_one_layer(
    kind: str, tmp_path: Path
) -> None:
    num_layers = {"fp8": 8, "bitsandbytes": 20}.get(kind, 4)
    measured = measured_in_a_process(tmp_path, kind, 1024, num_layers)
    print({what: f"{size / 2**20:.1f} MiB" for what, size in measured.items()})
    assert measured["weights"] > 300e6
    assert measured["own"] < measured["layer"], measured
    if kind != "bitsandbytes":  # the pages of its file are read through a mapping
        assert measured["resident"] < measured["layer"], measured
