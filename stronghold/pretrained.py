"""`from_pretrained`: a Hugging Face model that takes no memory until `initialize` streams it in.

Owns the match between a model directory's tensors and a model's names. Reads safetensors alone, a
piece at a time, straight into the slabs: the host holds a second copy of what transformers
converts while it loads (the experts of one layer, a fused projection), and of nothing else. The
training thread alone enters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from stronghold.checkpoint.files import TensorFile
from stronghold.errors import CheckpointError, ConfigError, did_you_mean
from stronghold.model.partition import set_source

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def from_pretrained(
    directory: str | Path,
    *,
    auto_class: Any = None,
    dtype: torch.dtype | None = None,
    **config_changes: Any,
) -> Any:
    """The model of a local directory (`config.json` and safetensors, whole or sharded), with its
    parameters on the meta device; `stronghold.initialize` streams their values into host memory,
    layer by layer. In evaluation mode, as transformers' own leaves it. `auto_class`: another auto
    class or model class than AutoModelForCausalLM; `dtype`: another than the configuration's, which
    further arguments change. ConfigError, before anything is built or with the names that are
    missing, for a directory that cannot be opened like this."""
    import transformers

    path = Path(directory)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: no config.json there; expected a local directory that save_pretrained or "
            "`stronghold export` wrote"
        )
    stored = _stored(path)
    try:
        config = transformers.AutoConfig.from_pretrained(path, **config_changes)
    except RecursionError as error:
        raise ConfigError(f"{path / 'config.json'}: nested too deeply") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{path}: its weights are quantised, and stronghold trains whole floats")
    made_by = auto_class or transformers.AutoModelForCausalLM
    build = getattr(made_by, "from_config", None) or made_by._from_config
    with _parameters_on_meta():
        model = build(config, dtype=dtype or config.dtype or torch.float32)
    if (path / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    source = _Directory(model, stored, path)
    source.fill_buffers(model)
    set_source(model, source)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside get parameters without memory and buffers with their values: those that
    no file holds (rotary frequencies) are computed when they are made, so this is not
    `torch.device("meta")`. What a constructor allocates for a parameter is never touched."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def _stored(path: Path) -> dict[str, TensorFile]:
    """The file of each tensor in the directory."""
    if (path / INDEX).is_file():
        try:
            names = dict(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"])
            shards = sorted(set(names.values()))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path / INDEX}: not a readable index: {error!r}") from error
        for name in shards:
            if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{path / INDEX}: {name!r} is no file below it")
        files = {name: TensorFile(path / name) for name in shards}
        for tensor, name in names.items():
            files[name].info(tensor)
        return {tensor: files[name] for tensor, name in names.items()}
    if (path / SINGLE).is_file():
        file = TensorFile(path / SINGLE)
        return dict.fromkeys(file.tensors, file)
    raise ConfigError(
        f"{path}: neither {INDEX} nor {SINGLE}; save the model with transformers' "
        "save_pretrained, which writes them"
    )


class _Tensors:
    """Tensors of files that become parameters: one as it is, or those that transformers converts
    together (the experts of a layer), which lie in host memory twice while they are."""

    def __init__(self, rule: Any, target: str, context: dict[str, Any]) -> None:
        self._rule, self._target, self._context = rule, target, context
        self._parts: list[tuple[str | None, str, TensorFile]] = []
        self._made: dict[str, torch.Tensor] = {}  # what nobody has read yet

    def __str__(self) -> str:
        return f"{self._parts[0][2].path}: {self._parts[0][1]}"

    def add(self, pattern: str | None, key: str, file: TensorFile) -> None:
        """`pattern`: as which the rule knows the tensor `key`."""
        if self._rule is not None or not self._parts:
            self._parts.append((pattern, key, file))

    def results(self) -> dict[str, torch.Tensor]:
        """What they become, by the model's names, on the meta device. ConfigError where they are
        not what transformers' rule expects."""
        try:
            return self._convert(
                lambda file, key: torch.empty(
                    file.info(key).shape, dtype=file.info(key).dtype, device="meta"
                )
            )
        except Exception as error:
            raise ConfigError(
                f"{self} and what belongs to it do not become {self._target} by {self._rule}: "
                f"{error}. Load the model with transformers' from_pretrained, and give it to "
                "stronghold.initialize"
            ) from error

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, cast to its dtype."""
        if self._rule is None:
            self._parts[0][2].read_into(self._parts[0][1], 0, target)
            return
        if name not in self._made or self._made[name].dtype is not target.dtype:
            self._made = self._convert(partial(_values, target.dtype))
        target.copy_(self._made.pop(name))

    def forget(self) -> None:
        """Free what nobody has read."""
        self._made = {}

    def _convert(self, get: Callable[[TensorFile, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._rule is None:
            _, key, file = self._parts[0]
            return {self._target: get(file, key)}
        rule = deepcopy(self._rule)
        for pattern, key, file in self._parts:
            rule.add_tensor(self._target, key, pattern, partial(get, file, key))
        made = rule.convert(self._target, **self._context)
        return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}


class _Directory:
    """The weights of one directory by the model's parameters."""

    def __init__(self, model: Any, stored: dict[str, TensorFile], path: Path) -> None:
        state = model.state_dict().items()
        expected = {name: t.to("meta") for name, t in state if isinstance(t, torch.Tensor)}
        self._of = _by_names(model, stored, expected)
        self._found: dict[int, str] = {}
        self._last: _Tensors | None = None
        missing = []
        aliases: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, []).append(name)
        for parameter, names in aliases.items():
            name = next((name for name in names if name in self._of), None)
            if name is None:
                missing.append(names[0])
            else:
                self._found[id(parameter)] = name
        if missing:
            more = f" and {len(missing) - 1} more parameters" if missing[1:] else ""
            raise ConfigError(
                f"{path}: has no {missing[0]}{more}."
                f"{did_you_mean(missing[0], stored)} Where transformers makes new weights while "
                "it loads, use its from_pretrained, then save_pretrained"
            )
        self._alive = list(aliases)  # or another parameter could take over an id

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is the model's."""
        return id(parameter) in self._found

    def read_into(self, parameter: nn.Parameter, target: torch.Tensor) -> None:
        """Fill `target`, cast to its dtype."""
        self._read_into(self._found[id(parameter)], target)

    def fill_buffers(self, model: nn.Module) -> None:
        """Values of the buffers that the directory has."""
        for name, buffer in model.named_buffers():
            if name in self._of:
                self._read_into(name, buffer.data)

    def _read_into(self, name: str, target: torch.Tensor) -> None:
        tensors = self._of[name]
        if self._last is not None and self._last is not tensors:
            self._last.forget()
        self._last = tensors
        tensors.read_into(name, target)


def _by_names(
    model: Any, stored: dict[str, TensorFile], expected: dict[str, torch.Tensor]
) -> dict[str, _Tensors]:
    """Which tensors of files each name of the model's state dict is made of, by transformers' own
    rules, in the order in which it applies them."""
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
    # A conversion asks the model for the shapes of its parameters.
    shapes = SimpleNamespace(get_parameter=expected.__getitem__)
    context = {"model": shapes, "config": model.config}
    groups: dict[str, _Tensors] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name in expected:
            rule = None if pattern is None else by_pattern[pattern]
            group = groups.setdefault(name, _Tensors(rule, name, context))
            group.add(pattern, key, stored[key])
    # As transformers leaves it: save_pretrained writes the names that were read.
    model._weight_conversions = [rule for rule in rules if rule.was_used()]

    found: dict[str, _Tensors] = {}
    for group in groups.values():
        for name, made in group.results().items():
            if name in expected and made.shape != expected[name].shape:
                raise ConfigError(
                    f"{group} has the shape {list(made.shape)}, and the model expects "
                    f"{list(expected[name].shape)}"
                )
            found[name] = group
    return found


def _values(dtype: torch.dtype, file: TensorFile, key: str) -> torch.Tensor:
    made = torch.empty(file.info(key).shape, dtype=dtype)
    file.read_into(key, 0, made)
    return made
