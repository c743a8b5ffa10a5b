"""Which format each parameter of a model has: the dtype in which it is trained, its arrays, and the
kernel that updates it.

Reads dtypes and groups, never values. The training thread calls it once, before anything is
allocated.

    parameter               dtype, `dtypes` "cast"      `dtypes` "own"
    trained                 the config's precision      its own: fp32, bf16 or fp16
    frozen, 16 or 32 bits   the config's precision      its own
    frozen, of others       its own (int8, float8)      its own

"cast" is DeepSpeed's rule. Lean states are a layout of bf16 weights: trained weights of other
dtypes have exact states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.optim.contract import Moment, Optimizer
from stronghold.optim.states import (
    EXACT,
    LOW_DTYPE,
    PAGE_BYTES,
    Format,
    Formats,
    StateKind,
    page_numel,
    states_of,
)

KEY = "stronghold.dtypes"
CAST, OWN = "cast", "own"
COMPUTED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """`numbers` has the place in `formats` of each parameter's format."""

    formats: Formats
    numbers: Mapping[nn.Parameter, int]

    def of(self, parameter: nn.Parameter) -> int:
        """The number of the parameter's format."""
        return self.numbers[parameter]


def model_formats(
    named: Iterable[tuple[str, nn.Parameter]],
    *,
    dtype: torch.dtype,
    kind: StateKind,
    rule: str,
    optimizers: Mapping[nn.Parameter, Optimizer],
    default: Optimizer | None,
) -> ModelFormats:
    """`dtype` is the config's precision, `rule` "cast" or "own". `optimizers` has how each trained
    parameter is updated; what trains without one has the arrays of `default`, or of None: no
    moments. ConfigError for a trained parameter that cannot be trained in its own dtype."""
    formats: list[Format] = []
    numbers: dict[nn.Parameter, int] = {}
    parameters = list(named)
    # Trained ones first: a frozen one may share the format of those with its dtype.
    for name, parameter in sorted(parameters, key=lambda pair: not pair[1].requires_grad):
        own = rule == OWN or parameter.dtype not in COMPUTED
        lies_in = parameter.dtype if own else dtype
        if not parameter.requires_grad:
            numbers[parameter] = _number_of_dtype(formats, lies_in)
            continue
        if lies_in not in LOW_DTYPE:
            way = f", or leave {KEY} out, which trains it in {dtype}" if lies_in in COMPUTED else ""
            raise ConfigError(
                f"{name} is {lies_in} and trains: expected float32, bfloat16 or float16. Convert "
                f"it before stronghold.initialize, freeze it (requires_grad_(False)){way}"
            )
        optimizer = optimizers.get(parameter, default)
        moments: tuple[Moment, ...] = () if optimizer is None else optimizer.moments
        states = states_of(lies_in, kind if lies_in is torch.bfloat16 else EXACT, moments)
        made = Format(lies_in, states, "" if optimizer is None else optimizer.kernel)
        if made not in formats:
            formats.append(made)
        numbers[parameter] = formats.index(made)
    return ModelFormats(tuple(formats), numbers)


def _number_of_dtype(formats: list[Format], dtype: torch.dtype) -> int:
    """The first format of this dtype, made where there is none."""
    for number, made in enumerate(formats):
        if made.dtype is dtype:
            return number
    formats.append(Format(dtype))
    return len(formats) - 1


def page_items(formats: Formats, *, in_files: bool) -> int:
    """Elements of which every array of these formats has whole pages."""
    kinds = {made.states.kind for made in formats if made.states is not None} or {EXACT}
    smallest = min(made.dtype.itemsize for made in formats) if formats else 2
    return max(PAGE_BYTES // smallest, *(page_numel(kind, in_files=in_files) for kind in kinds))
