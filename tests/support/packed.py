"""A model with frozen weights that an engine packs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models.families import llama_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

VOCABULARY = 61


def token_batch(seed: int) -> dict[str, Any]:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def adapted(base: nn.Module, targets: list[str]) -> nn.Module:
    """LoRA whose second factor is not zero, so that every factor learns."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False
    )
    model: nn.Module = peft.get_peft_model(base, settings)
    return model


def mixed() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """fp32 adapters over a bf16 base. The same values in every process."""
    torch.manual_seed(0)
    base = llama_of(48, 100, 3, 2, 1, VOCABULARY).to(torch.bfloat16)
    return adapted(base, ["q_proj", "down_proj"]), token_batch
