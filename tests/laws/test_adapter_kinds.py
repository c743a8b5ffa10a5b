"""Every kind of PEFT's adapters under recompute. A block's second run saves what the first one has
saved, so nothing is refused. The bits are the plain loop's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: E402

from tests.laws.test_adapters import Batches, base_model  # noqa: E402
from tests.models import token_batch  # noqa: E402
from tests.support.training import assert_identical, config, train_plain, train_windowed  # noqa: E402

CONFIGS = {kind.value: made for kind, made in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
# They need a package, another call than the model's, or another architecture.
LEFT_OUT = {"ADAMSS", "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "POLY"}
LEFT_OUT |= {"SHADOW", "XLORA"}
# What a kind needs beside `r`, its target modules, and weights that are not zero.
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 100, "init_r": 4, "target_r": 2},
    "BOFT": {"boft_block_size": 4, "init_weights": True},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 16},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {"oft_block_size": 4, "r": 0, "init_weights": True},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "ROAD": {"group_size": 4},
    "TINYLORA": {"init_weights": True},  # else it leaves weights unwritten
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3, 4, 5], "target_modules": ["embed_tokens"]},
    "VBLORA": {"vector_length": 4, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 16},
}
LORA: dict[str, dict[str, Any]] = {
    "bias": {"lora_bias": True},
    "biases of the base": {"bias": "all"},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.3},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "everywhere": {"target_modules": "all-linear"},
    "head": {"modules_to_save": ["lm_head"]},
    "olora": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "pissa": {"init_lora_weights": "pissa"},
    "qalora": {"use_qalora": True, "qalora_group_size": 4},
    "rslora": {"use_rslora": True},
    "tokens": {"trainable_token_indices": [1, 2, 3]},
}
KINDS = {kind: (kind, OPTIONS.get(kind, {})) for kind in sorted(CONFIGS.keys() - LEFT_OUT)}
KINDS |= {f"LORA {name}": ("LORA", options) for name, options in LORA.items()}


def adapted(kind: str, options: dict[str, Any]) -> tuple[nn.Module, Batches]:
    made = CONFIGS[kind]
    known = {field.name for field in dataclasses.fields(made)}
    default: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    default |= {"init_weights": False, "init_lora_weights": False}
    chosen = {name: value for name, value in default.items() if name in known}
    torch.manual_seed(0)
    settings = made(task_type="CAUSAL_LM", **{**chosen, **options})
    return peft.get_peft_model(base_model(), settings), token_batch


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute", "attention_offload"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_adapter_is_recomputed_exactly(name: str, policy: str) -> None:
    factory = functools.partial(adapted, *KINDS[name])
    settings = config(section={"window": 1, "activations": policy})
    run = train_windowed(factory, steps=2, settings=settings)
    assert_identical(run, train_plain(factory, steps=2))


def activated_lora(*, checkpointed: bool) -> tuple[nn.Module, Batches]:
    """aLoRA: adapters work from an invocation on. Hooks tell them its place, and end with the call
    of the model."""
    model, _ = adapted("LORA", {"alora_invocation_tokens": [5]})
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()

    def batch(seed: int) -> dict[str, Any]:
        made = token_batch(seed)
        made["input_ids"][:, 3] = 5
        return made

    return model, batch


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_whose_hooks_end_with_the_call_need_keep_or_their_own_checkpointing(
    checkpointed: bool, policy: str
) -> None:
    factory = functools.partial(activated_lora, checkpointed=checkpointed)
    settings = config(section={"window": 1, "activations": policy})
    if policy == "recompute" and not checkpointed:
        with pytest.raises(RuntimeError, match=r'a hook, or its mode.*to "keep"'):
            train_windowed(factory, steps=2, settings=settings)
        return
    run = train_windowed(factory, steps=2, settings=settings)
    assert_identical(run, train_plain(factory, steps=2))
