"""`NF4Config` and `MappedConfig`: Transformers loads a model packed, or to files."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, LlamaForCausalLM, MobileNetV2Config, MobileNetV2Model
from transformers.trainer_utils import validate_quantization_for_training

from stronghold.errors import ConfigError
from stronghold.model.loading import MappedConfig, NF4Config, mapped
from stronghold.model.packed_weight import PackedWeight, packable
from stronghold.model.partition import find_blocks
from tests.support import nf4
from tests.support.training import assert_identical, train_plain

FILE = "model.safetensors"


def packed_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if isinstance(p, PackedWeight)}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_weights_of_blocks_are_packed_and_all_others_are_as_they_were(kind: str) -> None:
    model, dense = nf4.loaded(kind), nf4.from_folder(kind)
    modules = {module: name for name, module in dense.named_modules()}
    expected = {f"{modules[m]}.{name}" for m, name in packable(find_blocks(dense))}
    assert packed_names(model) == expected
    for name, value in dense.named_parameters():
        parameter = model.get_parameter(name)
        assert (parameter.shape, parameter.dtype) == (value.shape, torch.bfloat16)
        assert parameter.requires_grad != (name in expected)
        if name in expected:
            packed = PackedWeight.pack(value)
            assert torch.equal(parameter.codes, packed.codes), name
            assert torch.equal(parameter.absmax, packed.absmax), name
        else:
            assert torch.equal(parameter, value), name


@pytest.mark.parametrize("kind", nf4.CONFIGS)
def test_adapters_train_in_plain_torch_as_over_the_decoded_weights(kind: str) -> None:
    def over_decoded() -> nf4.Made:
        model = nf4.from_folder(kind)
        for name, parameter in nf4.loaded(kind).named_parameters():
            if isinstance(parameter, PackedWeight):
                model.get_parameter(name).data = parameter.decode()
        return nf4.adapted(model.requires_grad_(False), kind)

    options: Any = {"steps": 3, "clipping": 0.5, "precision": "bf16"}
    expected = train_plain(over_decoded, **options)
    run = train_plain(nf4.LOADED[kind], **options)
    adapters = [name for name in run.weights if "lora_" in name]
    run.weights = {name: run.weights[name] for name in adapters}
    expected.weights = {name: expected.weights[name] for name in adapters}
    assert_identical(run, expected)


def test_a_model_without_a_head_is_packed_too() -> None:
    model = AutoModel.from_pretrained(
        nf4.saved("dense").name, dtype=torch.bfloat16, quantization_config=NF4Config()
    )
    assert packed_names(model) == {
        name.removeprefix("model.") for name in packed_names(nf4.loaded("dense"))
    }


def test_a_model_without_blocks_is_refused_by_name(tmp_path: Path) -> None:
    MobileNetV2Model(MobileNetV2Config(depth_multiplier=0.1)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"MobileNetV2Model .*load it without NF4Config"):
        AutoModel.from_pretrained(tmp_path, quantization_config=NF4Config())


def test_a_trainer_takes_adapters_over_it_and_these_are_saved_and_loaded(tmp_path: Path) -> None:
    model, batches = nf4.over_loaded("experts")
    validate_quantization_for_training(model)
    model.save_pretrained(tmp_path)
    base = nf4.loaded("experts")
    again: Any = PeftModel.from_pretrained(base, tmp_path, autocast_adapter_dtype=False)
    with torch.no_grad():
        expected = model.eval()(**batches(0)).loss
        assert torch.equal(again.eval()(**batches(0)).loss, expected)


# -- in files --------------------------------------------------------------------------------------
def test_a_mapped_model_is_an_ordinary_one(tmp_path: Path) -> None:
    folder, saved = tmp_path / "disk", tmp_path / "saved"
    folder.mkdir()
    model = nf4.from_folder("experts", quantization_config=MappedConfig(str(folder)))
    assert not list(folder.iterdir())  # files without a name go with their process
    dense = nf4.from_folder("experts")
    for name, value in dense.named_parameters():
        parameter = model.get_parameter(name)
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad
        assert torch.equal(parameter, value), name
    model.save_pretrained(saved)
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    loss = model.train()(**nf4.token_batch(0)).loss
    assert torch.equal(loss, dense.train()(**nf4.token_batch(0)).loss)
    loss.backward()


def is_mapped(tensor: torch.Tensor, folder: Path) -> bool:
    """True if the kernel has the tensor's address in a file of the folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return str(folder) in line
    return False


def test_weights_lie_in_the_folder(tmp_path: Path) -> None:
    model = nf4.from_folder("dense", quantization_config=MappedConfig(str(tmp_path)))
    assert all(is_mapped(parameter, tmp_path) for parameter in model.parameters())
    packed = nf4.from_folder("dense", quantization_config=NF4Config(str(tmp_path)))
    weight = packed.model.layers[1].mlp.up_proj.weight
    assert is_mapped(weight.codes, tmp_path)
    assert is_mapped(weight.absmax, tmp_path)
    expected = nf4.loaded("dense").model.layers[1].mlp.up_proj.weight
    assert torch.equal(weight.decode(), expected.decode())
    assert not is_mapped(expected.codes, tmp_path)


class WithScale(LlamaForCausalLM):
    """With a parameter whose dtype is not the model's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.rand(4, dtype=torch.float32))


def test_a_parameter_of_another_dtype_keeps_it(tmp_path: Path) -> None:
    WithScale(nf4.dense()).bfloat16().save_pretrained(tmp_path / "model")
    scale = torch.rand(4)
    save_file({**load_file(tmp_path / "model" / FILE), "scale": scale}, tmp_path / "model" / FILE)
    model = WithScale.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, quantization_config=MappedConfig(str(tmp_path))
    )
    assert torch.equal(model.scale, scale)
    assert is_mapped(model.lm_head.weight, tmp_path)


def test_a_folder_that_is_none_is_refused_before_loading(tmp_path: Path) -> None:
    for config in (MappedConfig(str(tmp_path / "none")), NF4Config(str(tmp_path / "none"))):
        with pytest.raises(ConfigError, match=r"none' is no folder: give one on a local disk"):
            nf4.from_folder("dense", quantization_config=config)


def test_a_disk_without_room_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"for a weight of 2097152 bytes") as raised:
            mapped(torch.zeros(1 << 20, dtype=torch.bfloat16), str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(tmp_path)
    assert not list(tmp_path.iterdir())
