"""The adapters of `finetune`: LoRA of PEFT on a model whose weights may still be in files."""

from __future__ import annotations

import argparse
from typing import Any

from finetune_output import NotPossible
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import set_seed

import stronghold
from stronghold.errors import ConfigError
from stronghold.model.adapter_targets import EVERY_LINEAR, split_targets


def add_adapters(args: argparse.Namespace, model: Any) -> Any:
    """Return the model with the adapters that the arguments ask for; without any, the model.

    The base's weights are frozen. `args.seed` decides the adapters' initial values. Adapters are
    fp32 if the base is bf16 or fp16, as PEFT makes them by default. Raises NotPossible for a target
    that the model does not have.
    """
    if args.lora is None:
        return model
    try:
        modules, parameters = split_targets(args.lora_targets, model)
    except ConfigError as error:
        raise NotPossible(str(error)) from error
    settings = LoraConfig(
        r=args.lora,
        lora_alpha=args.lora_alpha or 2 * args.lora,
        target_modules=modules,
        target_parameters=parameters,
        task_type="CAUSAL_LM",
    )
    set_seed(args.seed)
    with stronghold.placeholders(model):
        adapted = get_peft_model(model, settings)
    # The whole path: the adapters are opened from other directories.
    adapted.peft_config["default"].base_model_name_or_path = str(args.model.resolve())
    return adapted


def describe_adapters(args: argparse.Namespace) -> dict[str, Any] | None:
    """The arguments that a resumed run must have in common. None: all weights train."""
    if args.lora is None:
        return None
    return {
        "rank": args.lora,
        "alpha": args.lora_alpha or 2.0 * args.lora,
        "targets": args.lora_targets or EVERY_LINEAR,
        "frozen": args.frozen,
    }


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is PEFT's."""
    return isinstance(model, PeftModel)
