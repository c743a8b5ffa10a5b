"""The files of a tiny model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.stored_weights import random_weights


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
