"""Stored tensors: the dense tensors of a model that move as bytes.

1. An ordinary parameter is one stored tensor.
2. A quantised parameter of a library (bitsandbytes, torchao) is several: its inner tensors
   (`inner_tensors`): packed codes, absolute maxima, a code book. They are frozen.
3. Buffers are none: they stay on the device. A module that keeps quantised weights in buffers, as
   GPTQ's and AWQ's do, is refused.

The engine points each stored tensor at its place: `tensor.data = view`. Reads no values.

[Note: dtypes in training] "cast" is DeepSpeed's rule. Lean states are a layout of bf16 weights:
trained weights of other dtypes have exact states.

    parameter               dtype, `dtypes` "cast"      `dtypes` "own"
    trained                 the config's precision      its own: fp32, bf16 or fp16
    frozen, 16 or 32 bits   the config's precision      its own
    frozen, of others       its own (int8, float8)      its own
    frozen, beside codes    its own                     its own
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import decoded, format_of, has_codes, inner_tensors, settle
from stronghold.optim.states import LOW_DTYPE

KEY = "stronghold.dtypes"
CAST, OWN = "cast", "own"
COMPUTED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_CODES_IN_BUFFERS = "qweight"  # the buffer's name in the modules of GPTQ and AWQ


def tensor_has_memory(tensor: torch.Tensor) -> bool:
    """False on the meta device, and for a tensor that has given its memory back."""
    return not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes


@dataclass(slots=True, eq=False)
class StoredTensors:
    """The stored tensors of a model.

    names      all names of each, both in registration order
    quantised  the ones that a library quantised or that are codes, and all others of their modules
    aliases    further tensor objects of a library over the memory of a stored tensor
    num_weights  number of weights that a tensor of a quantised parameter stands for: all of the
               parameter's for the first one, 0 for the others
    """

    names: dict[torch.Tensor, list[str]] = field(default_factory=dict)
    quantised: set[torch.Tensor] = field(default_factory=set)
    _of_module: dict[nn.Module, list[torch.Tensor]] = field(default_factory=dict)
    aliases: dict[torch.Tensor, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    num_weights: dict[torch.Tensor, int] = field(default_factory=dict)

    def held_by(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """The stored tensors of the parameters that the module holds directly."""
        return self._of_module.get(module, ())


def stored_tensors(model: nn.Module) -> StoredTensors:
    """List the model's stored tensors. ConfigError for a parameter of an unknown class, and for
    quantised weights in buffers."""
    settle(model)
    stored = StoredTensors()
    for prefix, module in model.named_modules(remove_duplicate=False):
        held: dict[torch.Tensor, None] = {}
        dot = "." if prefix else ""
        if _CODES_IN_BUFFERS in dict(module.named_buffers(recurse=False)):
            raise ConfigError(
                f"{prefix or 'the model'} is a {type(module).__name__}, which keeps quantised "
                f"weights in buffers ({_CODES_IN_BUFFERS}), as GPTQ and AWQ do: buffers do not "
                "stream. Load the model unquantised, and quantise it with bitsandbytes, torchao or "
                'stronghold.frozen "nf4"'
            )
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{prefix}{dot}{name}"
            inner = inner_tensors(parameter, full_name)
            if format_of(parameter) is not None:
                numel = math.prod(decoded(parameter).shape)
                stored.num_weights.update(dict.fromkeys((tensor.tensor for tensor in inner), 0))
                stored.num_weights[inner[0].tensor] = numel
            for tensor in inner:
                inner_name = f"{full_name}.{tensor.name}" if tensor.name else full_name
                stored.names.setdefault(tensor.tensor, []).append(inner_name)
                held[tensor.tensor] = None
                if tensor.aliases:
                    stored.aliases[tensor.tensor] = tensor.aliases
        stored._of_module[module] = list(held)
        if has_codes(module):
            stored.quantised.update(held)
    return stored


def training_dtypes(
    stored: StoredTensors, *, dtype: torch.dtype, rule: str
) -> dict[torch.Tensor, torch.dtype]:
    """The dtype of each stored tensor in training ([Note: dtypes in training]).

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
