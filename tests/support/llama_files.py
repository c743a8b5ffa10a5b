"""The files of a tiny model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def random_weights(model: nn.Module) -> None:
    """Give the parameters values that differ in size from row to row."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float32)
            values = (count + 0.37 * number).sin() * torch.exp2(count % 7 - 6)
            parameter.copy_(values.view_as(parameter))


def write_model(directory: Path) -> None:
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
