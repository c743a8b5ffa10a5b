"""PyTorch's `test/test_optim.py` with stronghold's CPU optimizers in its database.

`torch.testing._internal.common_optimizers.optim_db` lists the optimizers that `TestOptimRenewed`
tests, each with settings that work, settings that must fail, and abilities. The settings here are
those that torch gives its own optimizer of the same kind, without the abilities that ours refuse:
AMSGrad, complex numbers, sparse gradients, dampening.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LinearLR, ReduceLROnPlateau, StepLR
from torch.testing._internal import common_optimizers
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

import stronghold

SCHEDULERS = (
    [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
    [lambda opt: ReduceLROnPlateau(opt)],
    [lambda opt: ExponentialLR(opt, gamma=0.9), lambda opt: LinearLR(opt, start_factor=0.4)],
    [lambda opt: ConstantLR(opt, factor=0.4, total_iters=4)],
)
ADAM = (
    {},
    {"lr": 0.01},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "adamw_mode": False},
    {"bias_correction": False},
)
LION = ({"lr": 1e-4}, {"lr": 1e-4, "weight_decay": 0.1}, {"lr": 1e-4, "maximize": True})
SGD = (
    {"lr": 1e-2},
    {"lr": 1e-2, "momentum": 0.9},
    {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
)
WRONG_ADAM = (
    ({"betas": (1.0, 0.0)}, "betas"),
    ({"weight_decay": -1}, "weight_decay"),
    ({"lr": -1e-2}, "lr"),
    ({"eps": -1e-8}, "eps"),
    ({"amsgrad": True}, "amsgrad"),
)
WRONG_LION = (({"betas": (1.0, 0.0)}, "betas"), ({"lr": -1e-2}, "lr"))
WRONG_SGD = (({"lr": -1e-2}, "lr"), ({"lr": 1e-2, "momentum": -0.5}, "momentum"))


def fill_database() -> None:
    """Put our optimizers in the place of torch's. Before `test_optim.py` is imported."""
    common_optimizers.optim_db[:] = [
        entry(stronghold.CPUAdam, ADAM, WRONG_ADAM),
        entry(stronghold.CPULion, LION, WRONG_LION),
        entry(stronghold.CPUSGD, SGD, WRONG_SGD),
    ]


def entry(
    optimizer: Any,
    settings: tuple[dict[str, Any], ...],
    wrong: tuple[tuple[dict[str, Any], str], ...],
) -> Any:
    """The database's entry of one optimizer.

    settings  keyword arguments with which it trains
    wrong     keyword arguments that it must refuse, and the word that its error must hold
    """
    return OptimizerInfo(
        optimizer,
        optim_inputs_func=inputs_of(settings),
        optim_error_inputs_func=errors_of(wrong),
        scheduler_inputs=SCHEDULERS,
        supported_impls=(),
        not_og_supported_flags=("maximize",),
        supports_complex=False,
        supports_fused_on=(),
    )


def inputs_of(settings: tuple[dict[str, Any], ...]) -> Callable[..., list[Any]]:
    def inputs(device: Any, dtype: torch.dtype | None = None) -> list[Any]:
        return [OptimizerInput(params=None, kwargs=dict(s), desc=str(s)) for s in settings]

    return inputs


def errors_of(wrong: tuple[tuple[dict[str, Any], str], ...]) -> Callable[..., list[Any]]:
    def errors(device: Any, dtype: torch.dtype) -> list[Any]:
        ours = [
            ErrorOptimizerInput(
                OptimizerInput(params=None, kwargs=dict(kwargs), desc=str(kwargs)),
                error_type=ValueError,
                error_regex=word,
            )
            for kwargs, word in wrong
        ]
        return [*get_error_inputs_for_all_optims(device, dtype), *ours]

    return errors
