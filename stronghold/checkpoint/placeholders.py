"""Placeholders: adapters are made for a model whose weights are still in files.

PEFT copies the device and the dtype of the weights that it adapts. So adapters of a model that
`from_pretrained` opened would lie on the meta device, without values. Inside `placeholders` the
weights are on the CPU, have their shapes and dtypes, and take no memory.

Owns the placeholders, which live inside the block alone. The training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.partition import WeightSource, materialize, source_of
from stronghold.streaming.patches.modules import parameter_table


class _Placeholder(nn.Parameter):
    """A CPU parameter that takes no memory: one NaN, expanded to the shape of a meta parameter.

    A deep copy is an ordinary parameter with the values of the source: PEFT's `modules_to_save`
    trains a copy of a module. Values that are copied to it take memory from then on: files of
    adapters may hold the whole embedding.
    """

    original: nn.Parameter
    source: WeightSource
    is_written: bool

    def copy_(self, values: torch.Tensor, non_blocking: bool = False) -> _Placeholder:
        """Take values, as `load_state_dict` gives them."""
        self.data = values.detach().to(self.dtype, copy=True)
        self.is_written = True
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            values = torch.empty(self.shape, dtype=self.dtype)
            self.source.read_into(self.original, values)
            memo[id(self)] = nn.Parameter(values, requires_grad=self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy


@contextmanager
def placeholders(model: nn.Module) -> Iterator[None]:
    """Context manager in which adapters can be added to a model of `stronghold.from_pretrained`.

    Example:

        model = stronghold.from_pretrained(directory)
        with stronghold.placeholders(model):
            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))

    The adapters get the initial values that PEFT draws for a model in memory. Copies of modules
    (`modules_to_save`) get their values from the files. Without weights in files nothing happens.

    Raises ConfigError at the end of the block if PEFT has computed a new parameter from weights
    (DoRA, PiSSA, ...): their values were not there.
    """
    source = source_of(model)
    if source is None:
        yield
        return
    known = {id(parameter) for parameter in model.parameters()}
    made = _make_placeholders(model, source)
    _exchange(model, made)
    try:
        yield
    finally:
        back: dict[int, nn.Parameter] = {}
        for placeholder in made.values():
            original = placeholder.original
            original.requires_grad_(placeholder.requires_grad)
            if placeholder.is_written:
                materialize(original, placeholder.data)
            back[id(placeholder)] = original
        _exchange(model, back)
    for name, parameter in model.named_parameters():
        if id(parameter) not in known and bool(parameter.isnan().any()):
            raise ConfigError(
                f"stronghold.placeholders: the initial values of {name} follow from the model's "
                "weights, which are still in files. Load the model with transformers' "
                "from_pretrained instead of stronghold.from_pretrained, or choose other initial "
                "values"
            )


def _make_placeholders(model: nn.Module, source: WeightSource) -> dict[int, _Placeholder]:
    """A placeholder of each meta parameter of the model, by the parameter's id."""
    made: dict[int, _Placeholder] = {}
    for parameter in model.parameters():
        if parameter.is_meta:
            value = torch.full((), float("nan"), dtype=parameter.dtype)
            placeholder = _Placeholder(value.expand(parameter.shape), parameter.requires_grad)
            placeholder.original = parameter
            placeholder.source = source
            placeholder.is_written = False
            made[id(parameter)] = placeholder
    return made


def _exchange(model: nn.Module, others: dict[int, Any]) -> None:
    """Put other parameters in the place of the model's. `others`: by the id of the present one."""
    for module in model.modules():
        table = parameter_table(module)
        for name, parameter in table.items():
            if id(parameter) in others:
                table[name] = others[id(parameter)]
