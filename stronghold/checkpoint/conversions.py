"""Conversions: tensors of files become parameters of a model, by Transformers' rules.

Owns the order in which rules apply. It reads files only when a caller asks for a parameter. The
training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stronghold.checkpoint.files import TensorFile
from stronghold.errors import ConfigError
from stronghold.streaming.patches.modules import set_weight_conversions


class ExpectedTensors:
    """The tensors of a model's state dict on the meta device: the model as rules see it.

    The model itself cannot answer while it is taken over. Its parameters then lose their shapes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._modules: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                tensor = value.to("meta")
                self.tensors[name] = tensor
                module, _, attribute = name.rpartition(".")
                self._modules.setdefault(module, {})[attribute] = tensor

    def get_parameter(self, name: str) -> torch.Tensor:
        """The parameter on the meta device."""
        return self.tensors[name]

    def get_submodule(self, name: str) -> SimpleNamespace:
        """An object that has the module's direct tensors as attributes."""
        return SimpleNamespace(**self._modules.get(name, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileTensor:
    """One tensor of a file. `pattern`: the name by which a conversion rule knows it."""

    pattern: str | None
    key: str
    file: TensorFile

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.info(self.key).shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads a tensor when a conversion rule calls it.

    dtype    of the result; None: the file's
    is_meta  gives a tensor on the meta device, without values
    """

    tensor: _FileTensor
    dtype: torch.dtype | None
    is_meta: bool

    def __call__(self) -> torch.Tensor:
        info = self.tensor.file.info(self.tensor.key)
        dtype = self.dtype or info.dtype
        if self.is_meta:
            return torch.empty(info.shape, dtype=dtype, device="meta")
        values = torch.empty(info.shape, dtype=dtype)
        self.tensor.file.read_into(self.tensor.key, 0, values)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _MappedReader:
    """Gives a tensor over the file's pages when a conversion rule calls it."""

    tensor: _FileTensor

    def __call__(self) -> torch.Tensor:
        return self.tensor.file.mapped(self.tensor.key)


class Conversion:
    """Tensors of files that become parameters of a model.

    Without a `rule` it is one tensor, as it is. A rule of Transformers converts several together.

    rule      a `WeightConverter`, or None
    target    name of a parameter that they become
    expected  the model's tensors
    config    the model's configuration
    """

    def __init__(self, rule: Any, target: str, expected: ExpectedTensors, config: Any) -> None:
        self.target = target
        self._rule = rule
        self._expected = expected
        self._config = config
        self._sources: list[_FileTensor] = []
        self._unread: dict[str, torch.Tensor] = {}  # converted parameters, by name

    def __str__(self) -> str:
        first = self._sources[0]
        return f"{first.file.path}: {first.key}"

    @property
    def takes_stored_bytes(self) -> bool:
        """True if the rule begins with a quantiser's operation. It gets tensors as they are."""
        return self._rule is not None and _is_of_quantiser(self._rule.operations[0])

    def add(self, pattern: str | None, key: str, file: TensorFile) -> None:
        """Add the tensor `key` of a file. `pattern`: the name by which the rule knows it."""
        if self._rule is not None or not self._sources:
            self._sources.append(_FileTensor(pattern=pattern, key=key, file=file))

    def end_sources(self) -> None:
        """End the list of tensors. A weight that the checkpoint does not quantise needs no rule.

        A quantiser's rule takes every weight. Such a weight comes without scales.
        """
        if not self.takes_stored_bytes or len(self._sources) > 1:
            return
        has_one_operation = len(self._rule.operations) == 1
        if has_one_operation and self._sources[0].pattern in self._rule.target_patterns:
            self._rule = None

    def results(self) -> dict[str, torch.Tensor]:
        """The parameters that they become, by the model's names, on the meta device.

        Raises ConfigError if they are not the tensors that Transformers' rule expects.
        """
        try:
            return self._convert(None, is_meta=True)
        except Exception as error:
            raise ConfigError(
                f"{self} and the tensors that belong to it do not become {self.target} by "
                f"{self._rule}: {error}. Load the model with transformers' from_pretrained, and "
                "give it to stronghold.initialize"
            ) from error

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` with the parameter's values, cast to its dtype."""
        if self._rule is None:
            source = self._sources[0]
            source.file.read_into(source.key, 0, target)
        else:
            if name not in self._unread or self._unread[name].dtype is not target.dtype:
                self._unread = self._convert(target.dtype, is_meta=False)
            target.copy_(self._unread.pop(name))

    def mapped(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The parameters by name, as tensors over the files' pages.

        For rules that keep stored bytes: they make parameters of a library's class. A write to such
        a tensor copies the page.
        """
        rule = deepcopy(self._rule)
        for source in self._sources:
            reader = _MappedReader(tensor=source)
            rule.add_tensor(self.target, source.key, source.pattern, reader)
        return self._apply(rule, model)

    def forget(self) -> None:
        """Free converted parameters that were not read."""
        self._unread = {}

    def _convert(self, dtype: torch.dtype | None, *, is_meta: bool) -> dict[str, torch.Tensor]:
        """The parameters by name. `dtype`: of floats that are read; None: the files'."""
        if self._rule is None:
            source = self._sources[0]
            reader = _Reader(tensor=source, dtype=dtype, is_meta=is_meta)
            return {self.target: reader()}
        rule = deepcopy(self._rule)
        for source in self._sources:
            reader = _Reader(tensor=source, dtype=dtype, is_meta=is_meta)
            rule.add_tensor(self.target, source.key, source.pattern, reader)
        return self._apply(rule, self._expected)

    def _apply(self, rule: Any, model: Any) -> dict[str, torch.Tensor]:
        """The results of a rule that has its tensors, by the parameters' names."""
        converted = rule.convert(self.target, model=model, config=self._config)
        results = {}
        for name, value in converted.items():
            results[name] = value[0] if isinstance(value, list) else value
        return results


# -- Transformers' rules --------------------------------------------------------------------------
def _is_of_quantiser(operation: Any) -> bool:
    """True for an operation of a quantiser, by the attribute that Transformers looks for, too."""
    return getattr(operation, "hf_quantizer", None) is not None


def conversions(
    model: Any, files: Mapping[str, TensorFile], expected: ExpectedTensors, quantiser: Any
) -> dict[str, Conversion]:
    """The conversion that gives each name of the model's state dict, by Transformers' own rules.

    files      the file of each tensor
    expected   the model's tensors
    quantiser  Transformers' object for stored weights that stay as they are, or None

    Rules apply in Transformers' order. Raises ConfigError for tensors that their rule refuses, and
    for a tensor of another shape.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import dot_natural_key
    except ImportError as error:
        raise ConfigError("from_pretrained needs transformers 5 or later") from error

    keys = sorted(files, key=dot_natural_key)
    rules = get_model_conversion_mapping(model, None, quantiser)
    by_target: dict[str, Conversion] = {}
    for key, name, pattern, rule in _matched(model, keys, rules, expected):
        conversion = Conversion(rule, name, expected, model.config)
        by_target.setdefault(name, conversion).add(pattern, key, files[key])
    # As transformers does: save_pretrained then writes the names that were read.
    set_weight_conversions(model, [rule for rule in rules if rule.was_used()])

    by_name: dict[str, Conversion] = {}
    for conversion in by_target.values():
        conversion.end_sources()
        if conversion.takes_stored_bytes:
            by_name[conversion.target] = conversion
            continue
        for name, result in conversion.results().items():
            _check_shape(conversion, result, expected.tensors.get(name))
            by_name[name] = conversion
    return by_name


def _matched(
    model: Any, keys: Sequence[str], rules: Sequence[Any], expected: ExpectedTensors
) -> Iterator[tuple[str, str, str | None, Any]]:
    """Each key that belongs to the model: (key, the model's name, the rule's pattern, the rule).

    Pattern and rule are None for a tensor that is taken as it is. A rule that matches is marked as
    used.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    tensors = expected.tensors
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if name not in tensors and key in tensors:
            name, pattern = rename_source_key(key, [], [], prefix, tensors)
        if name in tensors:
            yield key, name, pattern, None if pattern is None else by_pattern[pattern]


def _check_shape(
    conversion: Conversion, result: torch.Tensor, expected: torch.Tensor | None
) -> None:
    """Raise ConfigError for a result of another shape than the model's tensor. None: no tensor."""
    if expected is not None and result.shape != expected.shape:
        raise ConfigError(
            f"{conversion} has the shape {list(result.shape)}, and the model expects "
            f"{list(expected.shape)}"
        )
