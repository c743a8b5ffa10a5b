"""A reference without a second model takes no memory of the host.

The base is the policy with its adapters disabled, as in TRL's DPOTrainer and GRPOTrainer. The
oracle of programs draws its bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from tests.models.families import llama_of
from tests.support.training import config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

VOCABULARY = 61
# A model, as it is called. Of an engine these are the engine, and the module that TRL unwraps.
Policy = Callable[..., Any]


def base_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return llama_of(24, 52, 3, 2, 1, VOCABULARY).to(dtype)


def policy_model(dtype: torch.dtype) -> Any:
    """Adapters whose second factor is not zero: from the first step they change the output."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_dropout=0.2,
        target_modules="all-linear",
        init_lora_weights=False,
    )
    base = base_model(dtype)
    torch.manual_seed(1)
    return peft.get_peft_model(base, settings)


def sequences(step: int, number: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (number, 9), generator=generator)


def log_probabilities(model: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """Of each next token: (sequences, tokens - 1), in fp32."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen


def reference(module: Any, tokens: torch.Tensor) -> torch.Tensor:
    """With the adapters disabled, and without gradients."""
    with torch.no_grad(), module.disable_adapter():
        return log_probabilities(module, tokens)


@pytest.mark.parametrize("asks", [False, True], ids=["no reference", "reference"])
def test_a_reference_takes_no_memory_of_the_host(asks: bool) -> None:
    """One base, as without a reference: weights, and the state of the adapters."""
    model = policy_model(torch.bfloat16)
    settings = config(precision="bf16", section={"window": 1, "dtypes": "own"})
    trained = [p for p in model.parameters() if p.requires_grad]
    engine: Any = stronghold.initialize(model=model, config=settings, model_parameters=trained)[0]
    try:
        for step in range(2):
            asked = reference(engine.module, sequences(step)) if asks else None
            loss = -log_probabilities(engine, sequences(step)).mean()
            engine.backward(loss if asked is None else loss - asked.mean())
            engine.step()
        report = engine.memory_report()
        layers = engine.inspect().layout.layers
        frozen = sum(layer.frozen_bytes for layer in layers)
        trainable = sum(layer.trained_numel for layer in layers)
        # fp32 adapters: weight, two moments, a pending gradient.
        assert report.host_peak == report.host_planned == frozen + 16 * trainable
    finally:
        engine.destroy()
