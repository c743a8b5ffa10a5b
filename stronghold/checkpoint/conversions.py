"""Conversions: tensors of files become parameters of a model, by Transformers' rules.

Owns the order in which rules apply, and the pieces in which values are read. It reads files only
when a caller asks for a parameter. The training thread alone enters.

[Note: rows]

1. A rule may decode quantised weights (fp8, mxfp4) or join the experts of a layer. Transformers
   applies it to whole tensors. Then a layer lies in host memory several times.
2. Most rules treat rows apart: rows of the result depend only on the same rows of the sources.
   `_treats_rows_apart` has the operations for which this holds.
3. A group of rows is the smallest piece of the result that a rule can make: one expert, or the
   rows that share one scale.
4. Such a rule is called for a few groups at a time. Each call's result is copied to its rows of
   the parameter. The bits are those of one call for all groups.
5. The last group of a matrix may be short. DeepSeek-V3 has projections of 576 rows, with a scale
   for each 128. Transformers' operation refuses such a matrix as a whole. It is called for the
   last 64 rows alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stronghold.checkpoint.files import TensorFile
from stronghold.checkpoint.stored_weights import StoredWeights
from stronghold.errors import ConfigError
from stronghold.streaming.patches.modules import set_weight_conversions

# Bytes of a result that a rule makes at once. A decoder takes about five times as much meanwhile:
# fp32 values, and their products with the scales.
PIECE_BYTES = 2 << 20


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
    """Reads a tensor, or rows [begin, end) of it, when a conversion rule calls it.

    rows     None: the whole tensor
    dtype    of the result; None: the file's
    is_meta  gives a tensor on the meta device, without values
    """

    tensor: _FileTensor
    rows: tuple[int, int] | None
    dtype: torch.dtype | None
    is_meta: bool

    def __call__(self) -> torch.Tensor:
        info = self.tensor.file.info(self.tensor.key)
        dtype = self.dtype or info.dtype
        shape, first = info.shape, 0
        if self.rows is not None:
            begin, end = self.rows
            shape = (end - begin, *info.shape[1:])
            first = begin * (info.numel // info.shape[0])
        if self.is_meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        values = torch.empty(shape, dtype=dtype)
        self.tensor.file.read_into(self.tensor.key, first, values)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _MappedReader:
    """Gives a tensor over the file's pages when a conversion rule calls it."""

    tensor: _FileTensor

    def __call__(self) -> torch.Tensor:
        return self.tensor.file.mapped(self.tensor.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """The groups of rows that a rule can make apart ([Note: rows]).

    count        number of groups
    result_rows  rows of the result in a group; the last group may have fewer
    source_rows  the same of each source. None: each source is one expert, which is a group
    """

    count: int
    result_rows: int
    source_rows: tuple[int, ...] | None


class Conversion:
    """Tensors of files that become parameters of a model.

    Without a `rule` it is one tensor, as it is. A rule of Transformers converts several together.

    rule        a `WeightConverter`, or None
    target      name of a parameter that they become
    expected    the model's tensors
    config      the model's configuration
    block_rows  rows of a weight that share a scale. 0: the checkpoint has no such scales
    """

    def __init__(
        self, rule: Any, target: str, expected: ExpectedTensors, config: Any, block_rows: int = 0
    ) -> None:
        self.target = target
        self._rule = rule
        self._expected = expected
        self._config = config
        self._block_rows = block_rows
        self._sources: list[_FileTensor] = []
        self._groups: _Groups | None = None
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
            self._groups = self._find_groups()
            if self._groups is None:
                return self._convert(None, is_meta=True)
            first = self._convert_groups(self._groups, 0, 1, None, is_meta=True)
            shape = (self._expected.tensors[self.target].shape[0], *first.shape[1:])
            return {self.target: torch.empty(shape, dtype=first.dtype, device="meta")}
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
        elif self._groups is not None:
            self._read_groups(self._groups, target)
        else:
            if name not in self._unread or self._unread[name].dtype is not target.dtype:
                self._unread = self._convert(target.dtype, is_meta=False)
            target.copy_(self._unread.pop(name))

    def will_read(self) -> None:
        """Let the system read the tensors ahead. Waits for nothing."""
        for source in self._sources:
            source.file.will_read(source.key)

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
            reader = _Reader(tensor=source, rows=None, dtype=dtype, is_meta=is_meta)
            return {self.target: reader()}
        rule = deepcopy(self._rule)
        stored = None if self.takes_stored_bytes else dtype
        for source in self._sources:
            reader = _Reader(tensor=source, rows=None, dtype=stored, is_meta=is_meta)
            rule.add_tensor(self.target, source.key, source.pattern, reader)
        return self._apply(rule, self._expected)

    def _apply(self, rule: Any, model: Any) -> dict[str, torch.Tensor]:
        """The results of a rule that has its tensors, by the parameters' names."""
        converted = rule.convert(self.target, model=model, config=self._config)
        results = {}
        for name, value in converted.items():
            results[name] = value[0] if isinstance(value, list) else value
        return results

    # -- groups of rows ---------------------------------------------------------------------------
    def _read_groups(self, groups: _Groups, target: torch.Tensor) -> None:
        """Fill `target`, a few groups at a time."""
        num_rows = target.shape[0]
        row_bytes = max(target.nbytes // num_rows, 1)
        step = max(1, PIECE_BYTES // (row_bytes * groups.result_rows))
        num_whole = num_rows // groups.result_rows
        first = 0
        while first < groups.count:
            # A short last group is converted alone.
            end = min(first + step, num_whole) if first < num_whole else groups.count
            values = self._convert_groups(groups, first, end, target.dtype, is_meta=False)
            begin = first * groups.result_rows
            target[begin : begin + values.shape[0]].copy_(values)
            first = end

    def _convert_groups(
        self, groups: _Groups, first: int, end: int, dtype: torch.dtype | None, *, is_meta: bool
    ) -> torch.Tensor:
        """The rows of groups [first, end) of the result."""
        rule = deepcopy(self._rule)
        stored = None if self.takes_stored_bytes else dtype
        for source, rows in self._sources_of(groups, first, end):
            reader = _Reader(tensor=source, rows=rows, dtype=stored, is_meta=is_meta)
            rule.add_tensor(self.target, source.key, source.pattern, reader)
        return self._apply(rule, self._expected)[self.target]

    def _sources_of(
        self, groups: _Groups, first: int, end: int
    ) -> Iterator[tuple[_FileTensor, tuple[int, int] | None]]:
        """The sources of groups [first, end), each with its rows. None: the whole tensor."""
        if groups.source_rows is None:
            numbers: Counter[str | None] = Counter()
            for source in self._sources:
                if first <= numbers[source.pattern] < end:
                    yield source, None
                numbers[source.pattern] += 1
            return
        for source, rows in zip(self._sources, groups.source_rows, strict=True):
            yield source, (first * rows, min(end * rows, source.shape[0]))

    def _find_groups(self) -> _Groups | None:
        """The groups of rows that the rule can make apart. None: it needs whole tensors."""
        if self._rule is None or len(self._rule.target_patterns) != 1:
            return None
        shape = self._expected.tensors[self.target].shape
        operations = self._rule.operations
        if not all(_treats_rows_apart(operation, len(shape)) for operation in operations):
            return None
        num_of_pattern = Counter(source.pattern for source in self._sources)
        if any(_joins_experts(operation) for operation in operations):
            if set(num_of_pattern.values()) != {shape[0]}:
                return None
            return _Groups(count=shape[0], result_rows=1, source_rows=None)
        if set(num_of_pattern.values()) != {1}:
            return None
        return self._groups_of_rows(shape)

    def _groups_of_rows(self, shape: torch.Size) -> _Groups | None:
        """The groups of a result of this shape, which is made of one tensor for each pattern."""
        shapes = [*(source.shape for source in self._sources), tuple(shape)]
        if not all(shapes):
            return None
        num_rows = [first for first, *_ in shapes]
        count = min(num_rows)
        rows = [_rows_of_group(number, count, self._block_rows) for number in num_rows]
        if 0 in rows:
            return None
        *source_rows, result_rows = rows
        return _Groups(count=count, result_rows=result_rows, source_rows=tuple(source_rows))


def _rows_of_group(num_rows: int, count: int, block_rows: int) -> int:
    """Rows of a tensor in one of `count` groups. 0: there are no such groups.

    `block_rows`: rows of a group whose last one may be short; 0: none may.
    """
    if count and num_rows % count == 0:
        return num_rows // count
    is_short = block_rows > 0 and -(-num_rows // block_rows) == count
    return block_rows if is_short else 0


# -- Transformers' rules --------------------------------------------------------------------------
# Decoders of quantised weights that treat rows apart. Each multiplies a block of rows by its scale.
_DECODERS_OF_ROWS = frozenset({"Fp8Dequantize", "Mxfp4Dequantize"})


def _is_of_quantiser(operation: Any) -> bool:
    """True for an operation of a quantiser, by the attribute that Transformers looks for, too."""
    return getattr(operation, "hf_quantizer", None) is not None


def _joins_experts(operation: Any) -> bool:
    """True if the operation stacks a list of tensors into rows of one."""
    return type(operation).__name__ == "MergeModulelist" and operation.dim == 0


def _treats_rows_apart(operation: Any, num_dimensions: int) -> bool:
    """True if rows of the result depend only on the same rows of the sources.

    `num_dimensions`: of the rule's result.
    """
    kind = type(operation).__name__
    if kind == "Concatenate":
        return bool(operation.dim % num_dimensions)
    return kind in _DECODERS_OF_ROWS or _joins_experts(operation)


def conversions(
    model: Any, files: Mapping[str, TensorFile], expected: ExpectedTensors, stored: StoredWeights
) -> dict[str, Conversion]:
    """The conversion that gives each name of the model's state dict, by Transformers' own rules.

    files     the file of each tensor
    expected  the model's tensors

    Rules apply in Transformers' order. Raises ConfigError for tensors that their rule refuses, and
    for a tensor of another shape.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import dot_natural_key
    except ImportError as error:
        raise ConfigError("from_pretrained needs transformers 5 or later") from error

    keys = sorted(files, key=dot_natural_key)
    rules = get_model_conversion_mapping(model, None, stored.quantiser)
    by_target: dict[str, Conversion] = {}
    for key, name, pattern, rule in _matched(model, keys, rules, expected):
        conversion = Conversion(rule, name, expected, model.config, stored.block_rows)
        by_target.setdefault(name, conversion).add(pattern, key, files[key])
    if stored.is_decoded:
        # The model is saved as one that was never quantised: by the rules of its family alone.
        rules = get_model_conversion_mapping(model)
        for _ in _matched(model, keys, rules, expected):
            pass
    # As transformers does: save_pretrained then writes the names that were read.
    set_weight_conversions(model, [rule for rule in rules if rule.was_used()])

    by_name: dict[str, Conversion] = {}
    for conversion in by_target.values():
        conversion.end_sources()
        if conversion.takes_stored_bytes and not stored.is_decoded:
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
