"""`stronghold.from_pretrained` of every causal family of the installed Transformers: what
`save_pretrained` wrote, names and layouts converted or not, are the values that are streamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import stronghold
from stronghold.errors import ConfigError
from stronghold.model.partition import source_of
from tests.support.checkpoints import session, train
from tests.support.tiny import SMALL, tiny

# One of each way of converting: none, other names, experts stacked and joined, split, interleaved.
FEW = ("llama", "gpt_neox", "mixtral", "deepseek_v3", "bailing_hybrid", "hrm_text", "inkling2_text")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.slow)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ],
)
def test_what_was_saved_is_what_is_streamed(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    if model is None:
        assert family not in FEW
        pytest.skip("these sizes do not fit it")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.copy_((count + 0.37 * number).sin().view_as(parameter))
    model.save_pretrained(tmp_path)
    ours = stronghold.from_pretrained(tmp_path, auto_class=type(model))
    source = source_of(ours)
    for (name, parameter), own in zip(model.named_parameters(), ours.parameters(), strict=True):
        found = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
        source.read_into(own, found)
        assert torch.equal(found, parameter), name
    for (name, buffer), own in zip(model.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(buffer, own), name


def test_experts_train_and_save_as_those_of_the_loaded_model(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "made")
    runs = []
    for load in (AutoModelForCausalLM.from_pretrained, stronghold.from_pretrained):
        model = load(tmp_path / "made").train()
        with session(model) as engine:
            losses = train(engine, 2)
        model.save_pretrained(tmp_path / "saved")
        runs.append((losses, load_file(tmp_path / "saved" / "model.safetensors")))
    (losses, weights), (ours, saved) = runs
    assert all(map(torch.equal, ours, losses))
    assert saved.keys() == weights.keys() == load_file(tmp_path / "made/model.safetensors").keys()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())


def test_the_advice_for_weights_that_a_directory_lacks_leads_to_a_way(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SMALL.items() if name in BertConfig().to_dict()}
    made = BertLMHeadModel(BertConfig(**sizes, is_decoder=True, tie_word_embeddings=False))
    made.bert.save_pretrained(tmp_path / "body")
    with pytest.raises(ConfigError, match="use its from_pretrained, then save_pretrained"):
        stronghold.from_pretrained(tmp_path / "body", auto_class=BertLMHeadModel)
    BertLMHeadModel.from_pretrained(tmp_path / "body").save_pretrained(tmp_path / "whole")
    assert isinstance(
        stronghold.from_pretrained(tmp_path / "whole", auto_class=BertLMHeadModel), nn.Module
    )
