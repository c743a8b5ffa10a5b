"""Decides each parameter's dtype in training.

This file reads dtypes, never values. The training thread calls it once, before anything
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

import torch

from stronghold.errors import ConfigError
from stronghold.model.stored_tensors import StoredTensors
from stronghold.optim.states import LOW_DTYPE

KEY = "stronghold.dtypes"
CAST, OWN = "cast", "own"
COMPUTED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def training_dtypes(
    stored: StoredTensors, *, dtype: torch.dtype, rule: str
) -> dict[torch.Tensor, torch.dtype]:
    """The dtype of each stored tensor in training.

    `dtype`: the config's precision. `rule`: "cast" or "own". Raises ConfigError for a trained
    parameter that cannot be trained in its own dtype.
    """
    dtypes: dict[torch.Tensor, torch.dtype] = {}
    for parameter, names in stored.names.items():
        is_fixed = parameter in stored.quantised and not parameter.requires_grad
        keeps_dtype = rule == OWN or is_fixed or parameter.dtype not in COMPUTED
        chosen = dtypes[parameter] = parameter.dtype if keeps_dtype else dtype
        if parameter.requires_grad and chosen not in LOW_DTYPE:
            way = f", or leave {KEY} out, which trains it in {dtype}" if chosen in COMPUTED else ""
            raise ConfigError(
                f"{names[0]} is {chosen} and trains: expected float32, bfloat16 or float16. "
                f"Convert it before stronghold.initialize, freeze it (requires_grad_(False)){way}"
            )
    return dtypes
