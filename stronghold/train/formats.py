"""Decides each parameter's format: its dtype in training, its arrays, and its update kernel.

This file reads dtypes and groups, never values. The training thread calls it once, before anything
is allocated.

    parameter               dtype, `dtypes` "cast"      `dtypes` "own"
    trained                 the config's precision      its own: fp32, bf16 or fp16
    frozen, 16 or 32 bits   the config's precision      its own
    frozen, of others       its own (int8, float8)      its own
    frozen, beside codes    its own                     its own

"cast" is DeepSpeed's rule. Lean states are a layout of bf16 weights: trained weights of other
dtypes have exact states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stronghold.errors import ConfigError
from stronghold.model.stored_tensors import StoredTensors
from stronghold.optim.contract import Moment, Optimizer
from stronghold.optim.states import EXACT, LOW_DTYPE, Format, Formats, StateKind, states_of

KEY = "stronghold.dtypes"
CAST, OWN = "cast", "own"
COMPUTED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """Formats of a model, and the index in `formats` of each stored tensor's format (`numbers`)."""

    formats: Formats
    numbers: Mapping[torch.Tensor, int]

    def of(self, tensor: torch.Tensor) -> int:
        """Index of the stored tensor's format."""
        return self.numbers[tensor]

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Dtype of the stored tensor in training."""
        return self.formats[self.numbers[tensor]].dtype


def model_formats(
    stored: StoredTensors,
    *,
    dtype: torch.dtype,
    kind: StateKind,
    rule: str,
    optimizers: Mapping[torch.Tensor, Optimizer],
    default: Optimizer | None,
) -> ModelFormats:
    """Choose the format of each stored tensor.

    `dtype`: the config's precision. `rule`: "cast" or "own". `optimizers`: the optimizer of each
    trained parameter. A trained parameter without one has the arrays of `default`; without a
    default it has no moments. Raises ConfigError for a trained parameter that cannot be trained in
    its own dtype.
    """
    formats: list[Format] = []
    numbers: dict[torch.Tensor, int] = {}
    # Trained ones first: a frozen one may share the format of a trained one with its dtype.
    for parameter in sorted(stored.names, key=_is_frozen):
        name = stored.names[parameter][0]
        is_fixed = parameter in stored.quantised and not parameter.requires_grad
        keeps_dtype = rule == OWN or is_fixed or parameter.dtype not in COMPUTED
        weight_dtype = parameter.dtype if keeps_dtype else dtype
        if not parameter.requires_grad:
            numbers[parameter] = _number_of_dtype(formats, weight_dtype)
            continue
        if weight_dtype not in LOW_DTYPE:
            can_cast = weight_dtype in COMPUTED
            way = f", or leave {KEY} out, which trains it in {dtype}" if can_cast else ""
            raise ConfigError(
                f"{name} is {weight_dtype} and trains: expected float32, bfloat16 or float16. "
                f"Convert it before stronghold.initialize, freeze it (requires_grad_(False)){way}"
            )
        optimizer = optimizers.get(parameter, default)
        moments: tuple[Moment, ...] = () if optimizer is None else optimizer.moments
        states_kind = kind if weight_dtype is torch.bfloat16 else EXACT
        states = states_of(weight_dtype, states_kind, moments)
        kernel = "" if optimizer is None else optimizer.kernel
        parameter_format = Format(weight_dtype, states, kernel)
        if parameter_format not in formats:
            formats.append(parameter_format)
        numbers[parameter] = formats.index(parameter_format)
    return ModelFormats(tuple(formats), numbers)


def _is_frozen(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad


def _number_of_dtype(formats: list[Format], dtype: torch.dtype) -> int:
    """Return the index of the first format of this dtype. Add a format if there is none."""
    for number, known_format in enumerate(formats):
        if known_format.dtype is dtype:
            return number
    formats.append(Format(dtype))
    return len(formats) - 1
