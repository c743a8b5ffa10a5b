"""`from_pretrained`: a Hugging Face model that takes no memory until `initialize` streams it in.

Owns the match between a directory's tensors and a model's parameter names. It reads safetensors
alone, a piece at a time, straight into the slabs. Only tensors that transformers converts while it
loads (the experts of one layer, a fused projection) take host memory twice meanwhile. The training
thread alone enters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from stronghold.checkpoint.files import TensorFile
from stronghold.errors import CheckpointError, ConfigError, did_you_mean
from stronghold.model.partition import set_source
from stronghold.streaming.patches.modules import build_from_config, set_weight_conversions

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def from_pretrained(
    directory: str | Path,
    *,
    auto_class: Any = None,
    dtype: torch.dtype | None = None,
    **config_changes: Any,
) -> Any:
    """Open the model of a local directory, with its parameters on torch's meta device.

    `stronghold.initialize` streams their values into host memory, layer by layer. The model is in
    evaluation mode, as transformers' own `from_pretrained` leaves it.

    * `directory`: has `config.json`, and safetensors in one file or in shards.
    * `auto_class`: transformers' auto class or model class. None: `AutoModelForCausalLM`.
    * `dtype`: dtype of the parameters. None: the configuration's.
    * `config_changes`: changes of the configuration.

    Returns the model. It reads the buffers' values, and waits for the disk only for those.

    Raises ConfigError for a directory that cannot be opened, if possible before the model is built.
    The error names missing tensors. Raises CheckpointError for a damaged file.
    """
    import transformers

    path = Path(directory)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: has no config.json. Expected a local directory that save_pretrained or "
            "`stronghold export` wrote"
        )
    files = _files_of_tensors(path)
    try:
        config = transformers.AutoConfig.from_pretrained(path, **config_changes)
    except RecursionError as error:
        raise ConfigError(f"{path / 'config.json'}: nested too deeply") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{path}: its weights are quantised, and stronghold trains floats alone")
    model_class = auto_class or transformers.AutoModelForCausalLM
    build = getattr(model_class, "from_config", None) or build_from_config(model_class)
    with _parameters_on_meta():
        model = build(config, dtype=dtype or config.dtype or torch.float32)
    if (path / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    source = _DirectorySource(model, files, path)
    source.fill_buffers(model)
    set_source(model, source)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context manager in which new modules get parameters on the meta device.

    Buffers get memory and values: buffers that no file holds (rotary frequencies) are computed at
    construction. So this is not `torch.device("meta")`. Memory that a constructor allocates for a
    parameter is never touched.
    """
    handle = register_module_parameter_registration_hook(_to_meta)
    try:
        yield
    finally:
        handle.remove()


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    """Registration hook: a parameter on the meta device instead. None: no change."""
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def _files_of_tensors(path: Path) -> dict[str, TensorFile]:
    """The file of each tensor in the directory."""
    index = path / INDEX
    if index.is_file():
        return _files_of_index(path, index)
    if (path / SINGLE).is_file():
        file = TensorFile(path / SINGLE)
        return dict.fromkeys(file.tensors, file)
    raise ConfigError(
        f"{path}: has neither {INDEX} nor {SINGLE}. Save the model with transformers' "
        "save_pretrained, which writes them"
    )


def _files_of_index(path: Path, index: Path) -> dict[str, TensorFile]:
    """The file of each tensor in the index of a sharded directory."""
    try:
        shard_of_tensor = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        shards = sorted(set(shard_of_tensor.values()))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a readable index: {error!r}") from error
    for name in shards:
        is_below = isinstance(name, str) and not Path(name).is_absolute()
        if not is_below or ".." in Path(name).parts:
            raise CheckpointError(f"{index}: {name!r} is no file below it")
    files = {name: TensorFile(path / name) for name in shards}
    for tensor, name in shard_of_tensor.items():
        files[name].info(tensor)
    return {tensor: files[name] for tensor, name in shard_of_tensor.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileTensor:
    """One tensor of a file. `pattern`: the name by which a conversion rule knows it."""

    pattern: str | None
    key: str
    file: TensorFile

    def on_meta(self) -> torch.Tensor:
        """The tensor's shape and dtype on the meta device."""
        info = self.file.info(self.key)
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor's values in host memory, cast to `dtype`."""
        values = torch.empty(self.file.info(self.key).shape, dtype=dtype)
        self.file.read_into(self.key, 0, values)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads one tensor when a conversion rule calls it. `dtype`: None for a meta tensor."""

    tensor: _FileTensor
    dtype: torch.dtype | None

    def __call__(self) -> torch.Tensor:
        if self.dtype is None:
            return self.tensor.on_meta()
        return self.tensor.read(self.dtype)


class _Conversion:
    """Tensors of files that become parameters of a model.

    Without a `rule` it is one tensor, as it is. A rule of transformers converts several together
    (the experts of a layer), and they lie in host memory twice meanwhile.

    target   name of a parameter that they become
    context  arguments of the rule's `convert`
    """

    def __init__(self, rule: Any, target: str, context: dict[str, Any]) -> None:
        self._rule = rule
        self._target = target
        self._context = context
        self._sources: list[_FileTensor] = []
        self._unread: dict[str, torch.Tensor] = {}  # converted parameters, by name

    def __str__(self) -> str:
        first = self._sources[0]
        return f"{first.file.path}: {first.key}"

    def add(self, pattern: str | None, key: str, file: TensorFile) -> None:
        """Add the tensor `key` of a file. `pattern`: the name by which the rule knows it."""
        if self._rule is not None or not self._sources:
            self._sources.append(_FileTensor(pattern=pattern, key=key, file=file))

    def results(self) -> dict[str, torch.Tensor]:
        """The parameters that they become, by the model's names, on the meta device.

        Raises ConfigError if they are not the tensors that transformers' rule expects.
        """
        try:
            return self._convert(None)
        except Exception as error:
            raise ConfigError(
                f"{self} and the tensors that belong to it do not become {self._target} by "
                f"{self._rule}: {error}. Load the model with transformers' from_pretrained, and "
                "give it to stronghold.initialize"
            ) from error

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` with the parameter's values, cast to its dtype."""
        if self._rule is None:
            source = self._sources[0]
            source.file.read_into(source.key, 0, target)
            return
        if name not in self._unread or self._unread[name].dtype is not target.dtype:
            self._unread = self._convert(target.dtype)
        target.copy_(self._unread.pop(name))

    def forget(self) -> None:
        """Free converted parameters that were not read."""
        self._unread = {}

    def _convert(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """The parameters by name, in `dtype`. None: on the meta device."""
        if self._rule is None:
            reader = _Reader(tensor=self._sources[0], dtype=dtype)
            return {self._target: reader()}
        rule = deepcopy(self._rule)
        for source in self._sources:
            reader = _Reader(tensor=source, dtype=dtype)
            rule.add_tensor(self._target, source.key, source.pattern, reader)
        converted = rule.convert(self._target, **self._context)
        results = {}
        for name, value in converted.items():
            results[name] = value[0] if isinstance(value, list) else value
        return results


class _DirectorySource:
    """Source of the values of a model's parameters: the tensors of one directory."""

    def __init__(self, model: Any, files: dict[str, TensorFile], path: Path) -> None:
        expected = {
            name: value.to("meta")
            for name, value in model.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        self._conversion_of = _conversions(model, files, expected)
        self._name_of: dict[int, str] = {}  # by the parameter's id
        self._last: _Conversion | None = None
        missing = []
        aliases: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, []).append(name)
        for parameter, names in aliases.items():
            name = next((name for name in names if name in self._conversion_of), None)
            if name is None:
                missing.append(names[0])
            else:
                self._name_of[id(parameter)] = name
        if missing:
            more = f" and {len(missing) - 1} more parameters" if missing[1:] else ""
            raise ConfigError(
                f"{path}: has no {missing[0]}{more}."
                f"{did_you_mean(missing[0], files)} If transformers makes new weights while it "
                "loads this model, use its from_pretrained, then save_pretrained"
            )
        self._alive = list(aliases)  # keeps ids from being used again

    def has(self, parameter: torch.Tensor) -> bool:
        """True if the parameter is one of the model's."""
        return id(parameter) in self._name_of

    def read_into(self, parameter: torch.Tensor, target: torch.Tensor) -> None:
        """Fill `target` with the parameter's values, cast to its dtype."""
        self._read_into(self._name_of[id(parameter)], target)

    def fill_buffers(self, model: nn.Module) -> None:
        """Fill the model's buffers that the directory has."""
        for name, buffer in model.named_buffers():
            if name in self._conversion_of:
                self._read_into(name, buffer.data)

    def _read_into(self, name: str, target: torch.Tensor) -> None:
        conversion = self._conversion_of[name]
        if self._last is not None and self._last is not conversion:
            self._last.forget()
        self._last = conversion
        conversion.read_into(name, target)


def _conversions(
    model: Any, files: dict[str, TensorFile], expected: dict[str, torch.Tensor]
) -> dict[str, _Conversion]:
    """The conversion that gives each name of the model's state dict, by transformers' own rules.

    files     the file of each tensor
    expected  the state dict on the meta device

    Rules apply in transformers' order. Raises ConfigError for a tensor of another shape.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError as error:
        raise ConfigError("from_pretrained needs transformers 5 or later") from error

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    # A rule asks the model for the shapes of its parameters.
    shapes = SimpleNamespace(get_parameter=expected.__getitem__)
    context = {"model": shapes, "config": model.config}
    conversions: dict[str, _Conversion] = {}
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name in expected:
            rule = None if pattern is None else by_pattern[pattern]
            conversion = conversions.setdefault(name, _Conversion(rule, name, context))
            conversion.add(pattern, key, files[key])
    # As transformers does: save_pretrained then writes the names that were read.
    set_weight_conversions(model, [rule for rule in rules if rule.was_used()])

    conversion_of: dict[str, _Conversion] = {}
    for conversion in conversions.values():
        for name, result in conversion.results().items():
            if name in expected and result.shape != expected[name].shape:
                raise ConfigError(
                    f"{conversion} has the shape {list(result.shape)}, and the model expects "
                    f"{list(expected[name].shape)}"
                )
            conversion_of[name] = conversion
    return conversion_of
