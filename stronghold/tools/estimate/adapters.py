"""Adapters of an estimate: PEFT puts LoRA on a model without memory for weights.

Owns the options `--lora`, `--lora-targets` and `--frozen`, and their checks. PEFT is imported when
a call asks for adapters. One thread enters.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stronghold.errors import ConfigError, did_you_mean
from stronghold.model.costs import DTYPES
from stronghold.model.packed_formats import FORMATS
from stronghold.model.packing import choose_packed
from stronghold.model.partition import Partition
from stronghold.model.stored_tensors import NOTHING_PACKED, PackedParameter

EVERY_LINEAR = "all-linear"  # PEFT's word for all linear modules but the head
NUM_SHOWN = 12  # names in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA of this rank on some modules: the adapters train, and all other weights are frozen.

    `targets` are ends of the names of linear modules, in whole steps ("q_proj"), or of parameters
    such as fused experts ("mlp.experts.gate_up_proj"). None: all linear modules but the head.
    `frozen` names the format of the frozen weights (`packed_formats`). None: as they came.
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

    ConfigError for a rank below 1, for an unknown format, and for targets or a format without a
    rank.
    """
    if lora is None:
        for option, value in (("--lora-targets", targets), ("--frozen", frozen)):
            if value is not None:
                got = value if isinstance(value, str) else " ".join(value)
                raise ConfigError(f"{option}: got {got}, expected it with --lora RANK alone")
        return None
    if lora < 1:
        raise ConfigError(f"--lora: got {lora}, expected a rank of at least 1")
    if frozen is not None and frozen not in FORMATS:
        raise ConfigError(
            f"--frozen: got {frozen!r}, expected one of {', '.join(FORMATS)}."
            f"{did_you_mean(frozen, FORMATS)}"
        )
    names = None if targets is None else tuple(targets)
    return Adapters(rank=lora, targets=names, frozen=frozen, precision=precision)


def packed_weights(
    layers: Partition, adapters: Adapters | None
) -> Mapping[nn.Parameter, PackedParameter]:
    """The frozen weights that the adapters' format packs, by the engine's rule. Nothing is read."""
    if adapters is None or adapters.frozen is None:
        return NOTHING_PACKED
    dtype = DTYPES[adapters.precision]
    return choose_packed(layers, FORMATS[adapters.frozen], lambda _: dtype)


def with_adapters(module: nn.Module, adapters: Adapters) -> nn.Module:
    """The module, of the meta device, with PEFT's adapters in it. It freezes all other weights.

    ConfigError if PEFT is not installed, if a target is unknown, or if PEFT refuses the model.
    """
    peft = _peft()
    modules, parameters = _named_targets(module, adapters.targets)
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
    _refuse_fused_experts(adapted)
    return adapted.train()


def _refuse_fused_experts(adapted: nn.Module) -> None:
    """ConfigError for an adapter of a parameter, which PEFT adds up with the whole weight.

    Its forward asks for autocast on the weight's device, and torch has none on the meta device.
    """
    for name, child in adapted.named_modules():
        if type(child).__name__ == "ParamWrapper":
            raise ConfigError(
                f"--lora: PEFT puts an adapter on the fused experts {name}, whose costs cannot be "
                "counted without values. Name linear modules, such as --lora-targets q_proj "
                "k_proj v_proj o_proj"
            )


def _peft() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            "--lora: needs peft to put the adapters on the model: pip install peft"
        ) from error


def _named_targets(
    module: nn.Module, names: Sequence[str] | None
) -> tuple[list[str] | str, list[str] | None]:
    """PEFT's `target_modules` and `target_parameters`. A name is a module's if there is one."""
    if names is None:
        return EVERY_LINEAR, None
    holders = [name for name, child in module.named_modules() if not list(child.children())]
    tensors = [name for name, _ in module.named_parameters()]
    modules: list[str] = []
    parameters: list[str] = []
    for target in names:
        if _is_end(target, holders):
            modules.append(target)
        elif _is_end(target, tensors):
            parameters.append(target)
        else:
            ends = sorted({name.rpartition(".")[2] for name in holders})
            raise ConfigError(
                f"--lora-targets: got {target!r}, which is the end of no module's name and of no "
                f"parameter's; modules end with {', '.join(ends[:NUM_SHOWN])}"
            )
    return modules, parameters or None


def _is_end(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)
