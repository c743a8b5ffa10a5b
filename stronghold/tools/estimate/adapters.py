"""Adapters of an estimate: PEFT puts LoRA on a model without memory for weights.

Owns the options `--lora`, `--lora-targets` and `--frozen`, and their checks. PEFT is imported when
a call asks for adapters. One thread enters.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stronghold.errors import ConfigError

EVERY_LINEAR = "all-linear"  # PEFT's word for all linear modules but the head
NUM_SHOWN = 12  # names in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA of this rank on some modules: the adapters train, and all other weights are frozen.

    `targets` are ends of the names of linear modules, in whole steps ("q_proj"), or of parameters
    such as fused experts ("mlp.experts.gate_up_proj"). None: all linear modules but the head.
    `frozen` is the format of the frozen weights, "nf4". None: as they came.
    `precision`, of `DTYPES`, is that in which the model computes.
    """

    rank: int
    targets: tuple[str, ...] | None = None
    frozen: str | None = None
    precision: str = "bf16"

    def __str__(self) -> str:
        where = "all linear modules" if self.targets is None else ", ".join(self.targets)
        packed = "" if self.frozen is None else f" over {self.frozen} weights"
        return f"LoRA of rank {self.rank} on {where}{packed}"


def adapters_from_options(
    lora: int | None, targets: Sequence[str] | None, frozen: str | None, precision: str
) -> Adapters | None:
    """The adapters of the command's options; None without `--lora`.

    ConfigError for a rank below 1, and for targets or a format without a rank.
    """
    if lora is None:
        for option, value in (("--lora-targets", targets), ("--frozen", frozen)):
            if value is not None:
                got = value if isinstance(value, str) else " ".join(value)
                raise ConfigError(f"{option}: got {got}, expected it with --lora RANK alone")
        return None
    if lora < 1:
        raise ConfigError(f"--lora: got {lora}, expected a rank of at least 1")
    names = None if targets is None else tuple(targets)
    return Adapters(rank=lora, targets=names, frozen=frozen, precision=precision)


def with_adapters(module: nn.Module, adapters: Adapters) -> nn.Module:
    """The module, of the meta device, with PEFT's adapters in it. It freezes all other weights.

    ConfigError if PEFT is not installed, if a target is unknown, or if PEFT refuses the model.
    """
    peft = _peft()
    modules, parameters = _split_targets(adapters.targets, module)
    settings = peft.LoraConfig(
        r=adapters.rank, target_modules=modules, target_parameters=parameters, task_type="CAUSAL_LM"
    )
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about runs
            adapted: nn.Module = peft.get_peft_model(module, settings, autocast_adapter_dtype=False)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"--lora: PEFT cannot put it on a {type(module).__name__}: "
            f"{type(error).__name__}: {reason}"
        ) from error
    return adapted.train()


def _split_targets(
    targets: Sequence[str] | None, model: nn.Module
) -> tuple[list[str] | str, list[str] | None]:
    """PEFT's `target_modules` and `target_parameters`.

    A target is a module's if a module without children has this end of a name, and otherwise a
    parameter's. ConfigError if neither has: PEFT would leave it out without a word.
    """
    if targets is None:
        return EVERY_LINEAR, None
    leaves = [name for name, module in model.named_modules() if not list(module.children())]
    modules = [target for target in targets if _is_end(target, leaves)]
    others = [target for target in targets if target not in modules]
    tensors = [name for name, _ in model.named_parameters()]
    for target in others:
        if not _is_end(target, tensors):
            ends = sorted({name.rpartition(".")[2] for name in leaves})
            raise ConfigError(
                f"--lora-targets: got {target!r}, which is the end of no module's name and of no "
                f"parameter's; modules end with {', '.join(ends[:NUM_SHOWN])}"
            )
    return modules, others or None


def _is_end(target: str, names: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{target}") for name in names)


def _peft() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            "--lora: needs peft to put the adapters on the model: pip install peft"
        ) from error
