"""`from_pretrained` of directories whose weights are stored in FP8, MXFP4 or bitsandbytes' formats:
the values are those of Transformers' own decoding, and an engine trains them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GptOssConfig, GptOssForCausalLM

import stronghold
from stronghold.checkpoint import conversions
from stronghold.errors import ConfigError
from stronghold.model.partition import source_of
from tests.support.checkpoints import session, train
from tests.support.llama_files import write_model
from tests.support.stored_weights import (
    fp8_settings,
    fp8_tensors,
    mxfp4_tensors,
    random_weights,
    rewrite,
)
from tests.support.tiny import SMALL, tiny

PLAIN = ("embed", "lm_head", "mlp.gate.")
BLOCK = (4, 8)  # divides every projection of the tiny models
MXFP4_SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def save(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Save a model of bf16 weights. Returns the tensors of its file."""
    random_weights(model)
    model.to(torch.bfloat16).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def write_fp8(family: str, directory: Path, block: tuple[int, int] = BLOCK) -> None:
    tensors = save(tiny(family), directory)
    rewrite(directory, fp8_tensors(tensors, block, PLAIN), fp8_settings(block))


def write_mxfp4(directory: Path) -> None:
    sizes = {name: value for name, value in SMALL.items() if name in GptOssConfig().to_dict()}
    sizes |= {"intermediate_size": 64, "num_local_experts": 4, "layer_types": None}
    tensors = save(GptOssForCausalLM(GptOssConfig(**sizes)), directory)
    rewrite(directory, mxfp4_tensors(tensors), MXFP4_SETTINGS)


def values_of(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The parameters' values from the model's source, by name."""
    source = source_of(model)
    assert source is not None
    values = {}
    for name, parameter in model.named_parameters():
        value = torch.full(parameter.shape, torch.nan, dtype=dtype or parameter.dtype)
        source.read_into(parameter, value)
        values[name] = value
    return values


def assert_decoded_alike(directory: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    ours = stronghold.from_pretrained(directory)
    values = values_of(ours)
    for name, parameter in theirs.named_parameters():
        assert parameter.dtype is values[name].dtype is torch.bfloat16
        assert torch.equal(values[name], parameter), name
    for (name, buffer), other in zip(theirs.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(other, buffer), name
    assert getattr(ours.config, "quantization_config", None) is None


# 1 byte: each call of a rule makes one group of rows. 1000: some. The default: all that fit.
@pytest.mark.parametrize("piece_bytes", [1, 1000, conversions.PIECE_BYTES])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp8_is_decoded_as_transformers_decodes_it(
    family: str, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversions, "PIECE_BYTES", piece_bytes)
    write_fp8(family, tmp_path)
    assert_decoded_alike(tmp_path)


@pytest.mark.parametrize("piece_bytes", [1, conversions.PIECE_BYTES])
def test_mxfp4_is_decoded_as_transformers_decodes_it(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversions, "PIECE_BYTES", piece_bytes)
    write_mxfp4(tmp_path)
    assert_decoded_alike(tmp_path)


def test_fp8_blocks_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    """As in DeepSeek-V3, whose compressed keys and values have 576 rows: 4.5 blocks. Transformers
    5.23 refuses such a matrix. The oracle is the layout's definition."""
    rows, columns = 8, 8  # of a projection with 20 rows
    write_fp8("deepseek_v3", tmp_path, (rows, columns))
    stored = load_file(tmp_path / "model.safetensors")
    short = 0
    for name, value in values_of(stronghold.from_pretrained(tmp_path)).items():
        expected = stored[name]
        if f"{name}_scale_inv" in stored:
            scales = stored[f"{name}_scale_inv"]
            scales = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            short += bool(scales.shape[0] > expected.shape[0])
            expected = expected.float() * scales[: expected.shape[0]]
        assert torch.equal(value, expected.to(torch.bfloat16)), name
    assert short == 2


def test_fp8_decodes_into_other_dtypes_as_it_does_in_transformers(tmp_path: Path) -> None:
    write_fp8("llama", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = values_of(stronghold.from_pretrained(tmp_path, dtype=torch.float32))
    quantised = [name for name in ours if "proj" in name]
    assert len(quantised) == 14
    for name in quantised:
        assert torch.equal(ours[name], theirs.get_parameter(name)), name


@pytest.mark.parametrize("stored", ["fp8", "mxfp4"])
def test_a_decoded_model_trains_and_is_saved_as_a_plain_one(stored: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    if stored == "mxfp4":
        write_mxfp4(made)
    else:
        write_fp8("qwen3_moe", made)
    plain = AutoModelForCausalLM.from_pretrained(made)
    runs = []
    for model in (type(plain)(plain.config), stronghold.from_pretrained(made)):
        if model.device.type != "meta":
            model.load_state_dict(plain.state_dict())
        with session(model.to(torch.bfloat16).train(), precision="bf16") as engine:
            losses = train(engine, 2)
        model.save_pretrained(tmp_path / "saved")
        runs.append((losses, load_file(tmp_path / "saved" / "model.safetensors")))
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert "quantization_config" not in config
    (losses, weights), (ours, saved) = runs
    assert all(map(torch.equal, ours, losses))
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())


def test_a_scale_grid_that_fits_no_rule_is_refused_by_name(tmp_path: Path) -> None:
    write_fp8("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[f"{name}_scale_inv"] = torch.ones(7, 4)  # of 48 rows
    rewrite(tmp_path, iter(tensors.items()), fp8_settings(BLOCK))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj.*not divisible by scale grid"):
        stronghold.from_pretrained(tmp_path)


def test_other_formats_are_refused_with_the_way(tmp_path: Path) -> None:
    save(tiny("llama"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match=r"'gptq'.*Load the model with transformers"):
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
    write_model(tmp_path / "plain")
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
        with session(model.train(), precision="bf16", section={"window": 1}) as engine:
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
