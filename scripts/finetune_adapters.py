"""The adapters of `finetune`: LoRA of PEFT on a model whose weights may still be in files."""

from __future__ import annotations

import argparse
from typing import Any

from finetune_output import NotPossible
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import set_seed

import stronghold

EVERY_LINEAR = "all-linear"  # PEFT's word for all linear modules but the head
NUM_SHOWN = 12  # names in an error


def add_adapters(args: argparse.Namespace, model: Any) -> Any:
    """Return the model with the adapters that the arguments ask for; without any, the model.

    The base's weights are frozen. `args.seed` decides the adapters' initial values. Adapters are
    fp32 if the base is bf16 or fp16, as PEFT makes them by default. Raises NotPossible for a target
    that the model does not have.
    """
    if args.lora is None:
        return model
    modules, parameters = targets_of(args.lora_targets, model)
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


def targets_of(
    names: list[str] | None, model: nn.Module
) -> tuple[list[str] | str, list[str] | None]:
    """PEFT's `target_modules` and `target_parameters`: a name is one of a module, if there is one.

    `names` are ends of full names, in whole steps: "q_proj", "mlp.experts.gate_up_proj".
    """
    if names is None:
        return EVERY_LINEAR, None
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    tensors = [name for name, _ in model.named_parameters()]
    modules, parameters = [], []
    for target in names:
        if _is_end(target, linears):
            modules.append(target)
        elif _is_end(target, tensors):
            parameters.append(target)
        else:
            ends = sorted({name.rpartition(".")[2] for name in linears})
            raise NotPossible(
                f"--lora-targets: {target} is the end of no linear module's name and of no "
                f"parameter's; linear modules end with {', '.join(ends[:NUM_SHOWN])}"
            )
    return modules, parameters or None


def _is_end(target: str, names: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)
