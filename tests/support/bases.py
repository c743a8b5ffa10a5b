"""Prepared bases of tiny models."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.stored_weights import random_weights

NUM_LAYERS = 3


def write_model(directory: Path, *, num_layers: int = NUM_LAYERS, scale: float = 1.0) -> None:
    """A bf16 Llama in shards. Its widths are no multiples of the formats' blocks."""
    config = LlamaConfig(
        hidden_size=72,
        intermediate_size=200,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=18,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    random_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="150KB")
