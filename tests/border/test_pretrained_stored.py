"""`from_pretrained` of directories that bitsandbytes has quantised: their weights stay as they are,
and adapters train over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import stronghold
from stronghold.errors import ConfigError
from stronghold.model.partition import source_of
from tests.support.checkpoints import session, train
from tests.support.tiny import tiny


def random_weights(model: nn.Module) -> None:
    """Give the parameters values that differ in size from row to row."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float32)
            values = (count + 0.37 * number).sin() * torch.exp2(count % 7 - 6)
            parameter.copy_(values.view_as(parameter))


def write_llama(directory: Path) -> None:
    """A bf16 Llama in shards. Its widths are no multiples of the formats' blocks."""
    config = LlamaConfig(
        hidden_size=72,
        intermediate_size=200,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=18,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    random_weights(model)
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="150KB")


def save(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Save a model of bf16 weights. Returns the tensors of its file."""
    random_weights(model)
    model.to(torch.bfloat16).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("method", ["gptq", "fp8", "mxfp4"])
def test_other_formats_are_refused_with_the_way(method: str, tmp_path: Path) -> None:
    save(tiny("llama"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(ConfigError, match=rf"'{method}'.*Load the model with transformers"):
        stronghold.from_pretrained(tmp_path)


BITSANDBYTES = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4 twice": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4 in bf16": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage=torch.bfloat16
    ),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.mark.parametrize("stored", BITSANDBYTES)
def test_bitsandbytes_weights_are_opened_as_they_are(stored: str, tmp_path: Path) -> None:
    save(tiny("llama"), tmp_path / "plain")
    settings = BITSANDBYTES[stored]
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings)
    made.save_pretrained(tmp_path / "stored")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "stored")
    ours = stronghold.from_pretrained(tmp_path / "stored")
    assert ours.is_quantized
    assert ours.hf_quantizer.is_trainable
    num_packed = 0
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert type(parameter) is type(other), name
        if type(parameter) is nn.Parameter:
            assert parameter.is_meta
            value = torch.empty(other.shape, dtype=other.dtype)
            source_of(ours).read_into(parameter, value)
            assert torch.equal(value, other), name
            continue
        num_packed += 1
        assert not parameter.requires_grad
        assert torch.equal(parameter.view(torch.uint8), other.view(torch.uint8)), name
        ours_inner, theirs_inner = inner_tensors(parameter), inner_tensors(other)
        assert ours_inner.keys() == theirs_inner.keys()
        assert all(torch.equal(ours_inner[key], value) for key, value in theirs_inner.items()), name
    assert num_packed == 14


@pytest.mark.parametrize("stored", ["nf4 twice", pytest.param("int8", marks=pytest.mark.slow)])
def test_adapters_over_a_bitsandbytes_directory_train_as_over_the_loaded_model(
    stored: str, tmp_path: Path
) -> None:
    write_llama(tmp_path / "plain")
    settings = BITSANDBYTES[stored]
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings)
    made.save_pretrained(tmp_path / "stored")
    runs = []
    for load in (AutoModelForCausalLM.from_pretrained, stronghold.from_pretrained):
        model = load(tmp_path / "stored")
        torch.manual_seed(0)
        with stronghold.placeholders(model):
            chosen = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
            model = peft.get_peft_model(model, chosen)
        section = {"window": 1, "room": "streaming"}
        with session(model.train(), precision="bf16", section=section) as engine:
            runs.append(train(engine, 3))
    theirs, ours = runs
    assert not torch.equal(ours[0], ours[-1])
    assert all(map(torch.equal, ours, theirs))


def inner_tensors(parameter: Any) -> dict[str, torch.Tensor]:
    """The tensors beside the codes of a bitsandbytes parameter, by name."""
    if hasattr(parameter, "SCB"):
        return {"SCB": parameter.SCB}
    state = parameter.quant_state.as_dict(packed=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
