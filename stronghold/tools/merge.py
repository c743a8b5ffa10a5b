"""`stronghold export --merge`: PEFT's adapters and their base become one model directory.

Owns the order of the merge: one unit after the other is read, merged by PEFT's own code, written
and freed. A unit is a block, or the embedding, or the head. So the whole model is never in memory.
The tensors have the bits of PEFT's `merge_and_unload` followed by `save_pretrained`, and the same
names. A base in FP8 or MXFP4 is decoded into the model's dtype, unit by unit. It imports PEFT and
Transformers when it runs. One thread enters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.checkpoint import directory, weights
from stronghold.checkpoint.files import Entry, entry_of
from stronghold.checkpoint.placeholders import placeholders
from stronghold.checkpoint.pretrained import from_pretrained
from stronghold.checkpoint.stored_weights import READINGS, Reading, quantised_as
from stronghold.errors import ConfigError, StateError
from stronghold.model.partition import NamedParameter, WeightSource, partition, source_of
from stronghold.streaming.patches.modules import parameter_table

ADAPTER_CONFIG = "adapter_config.json"
Tensors = dict[str, torch.Tensor]


def export_merged(
    adapters: Path, out: Path, *, max_shard_bytes: int, model_dir: Path | None = None
) -> list[Path]:
    """Write the model that adapters and their base make, as sharded safetensors with an index.

    adapters         directory that PEFT's `save_pretrained` wrote
    out              new directory, which appears complete or not at all
    max_shard_bytes  largest size of a shard
    model_dir        directory of the base; None: the one that the adapters' config names

    Tensors keep the base's dtypes. Returns the files. Raises ConfigError if the base is not a local
    directory, and if the adapters cannot be merged. Raises CheckpointError for a damaged file.
    """
    directory.check_new(out)
    base = _base_directory(adapters, model_dir)
    opened = _open(adapters, base)
    entries = [entry for unit in opened.units for entry in unit.entries()]
    for name, value in names_of_files(opened.model, opened.buffers).items():
        entries.append(entry_of(name, value.contiguous()))
    dtype = str(opened.model.config.dtype).removeprefix("torch.")
    changes = {"tie_word_embeddings": False} if opened.unties else {}
    with directory.appearing(out) as hidden:
        weights.write_shards(hidden, weights.shards(entries, max_shard_bytes, _num_bytes))
        weights.write_small_files(hidden, None, base, {"dtype": dtype, **changes})
    return sorted(out.iterdir())


def _num_bytes(entry: Entry) -> int:
    return entry.num_bytes


def names_of_files(model: Any, tensors: Tensors) -> Tensors:
    """The tensors as `save_pretrained` would write them.

    Transformers' own rules, backwards: renamed, and fused experts as one tensor per expert.
    """
    from transformers.core_model_loading import revert_weight_conversion

    converted: Tensors = revert_weight_conversion(model, tensors)
    return converted


# -- opening --------------------------------------------------------------------------------------
def _base_directory(adapters: Path, model_dir: Path | None) -> Path:
    """The base's directory. Raises ConfigError for adapters of another format."""
    file = adapters / ADAPTER_CONFIG
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        named = described.get("base_model_name_or_path")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{adapters}: has no {ADAPTER_CONFIG}. Expected the directory that PEFT's "
            "save_pretrained or scripts/finetune --lora wrote"
        ) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as a JSON object: {error}") from error
    if model_dir is not None:
        return model_dir
    if not named or not Path(named).is_dir():
        raise ConfigError(
            f"{file}: its base is {named!r}, which is no directory here. Give the base's directory "
            "with --model-dir"
        )
    return Path(named)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A base with its adapters.

    model    the base, with its parameters on the meta device
    units    every parameter of the merged model in one of them
    buffers  of the base's state dict, by name
    unties   a module with tied weights was trained as a copy, so the ties end
    """

    model: Any
    units: list[_Unit]
    buffers: Tensors
    unties: bool


def _open(adapters: Path, base: Path) -> _Opened:
    """Open the base with its weights in files, and put the adapters on it.

    Raises ConfigError if PEFT refuses them, or if they cannot be merged.
    """
    try:
        import peft
        import transformers
    except ImportError as error:
        raise ConfigError(f"stronghold export --merge needs {error.name}: install it") from error
    config = transformers.AutoConfig.from_pretrained(base)
    method = quantised_as(config)
    if method is not None and READINGS.get(method) is not Reading.DECODED:
        raise ConfigError(
            f"{base}: its weights are quantised as {method!r}, and a merge adds to floating-point "
            "weights. Give the directory of the base in bf16 with --model-dir"
        )
    architectures = getattr(config, "architectures", None) or [""]
    model = from_pretrained(base, auto_class=getattr(transformers, architectures[0], None))
    source = source_of(model)
    if source is None:
        raise StateError(f"{base}: the model that was opened has no source of weights")
    # by the base's names
    layers = [layer.parameters for layer in partition(model).layers]
    saved = model.state_dict()
    buffers = {name: value for name, value in model.named_buffers() if name in saved}
    try:
        with placeholders(model):
            wrapped = peft.PeftModel.from_pretrained(model, adapters, torch_device="cpu")
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"{adapters}: PEFT cannot open it on {base}: {error}") from error
    settings = wrapped.active_peft_config
    if settings.is_prompt_learning:
        raise ConfigError(
            f"{adapters}: {settings.peft_type.value} learns a prompt, which no weight can hold"
        )
    if getattr(settings, "layer_replication", None):
        raise ConfigError(f"{adapters}: layers that are replicated cannot be merged")
    adapted = list(_adapted_modules(model))
    copied = {name for one in adapted for name in one.copied_tensors()}
    units = [
        _unit(model, source, parameters, held, copied)
        for parameters, held in _joined(layers, adapted)
    ]
    tied = [named for layer in layers for named in layer if len(named.aliases) > 1]
    return _Opened(
        model=model,
        units=units,
        buffers={name: value for name, value in buffers.items() if name not in copied},
        unties=any(alias in copied for named in tied for alias in named.aliases),
    )


# -- units ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapted:
    """A module that PEFT has put in the place of the base's module `name`."""

    name: str
    module: Any

    def merge(self) -> nn.Module:
        """Merge the adapters, as PEFT's `merge_and_unload` does. Returns the module that stays."""
        if hasattr(self.module, "unload_and_optionally_merge_module"):
            special: nn.Module = self.module.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
            return special
        self.module.merge(safe_merge=False, adapter_names=None)
        base: nn.Module = self.module.get_base_layer()
        return base

    def copied_tensors(self) -> Tensors:
        """Tensors of the trained copy that replaces the base's module (`modules_to_save`).

        By the base's names. Empty if the base's module itself stays.
        """
        from peft.utils import ModulesToSaveWrapper

        if not isinstance(self.module, ModulesToSaveWrapper) or not self.module.active_adapters:
            return {}
        copy = self.module.modules_to_save[self.module.active_adapter]
        if hasattr(copy, "get_base_layer"):  # it has adapters, too, which merge into it
            copy = copy.get_base_layer()
        return {f"{self.name}.{key}": value for key, value in copy.state_dict().items()}


@dataclass(slots=True, kw_only=True)
class _Unit:
    """Parameters of the base that are read, merged, written and freed together.

    model       the base
    source      of its values
    parameters  of the base, on the meta device, by the names under which they are written
    adapted     PEFT's modules that hold some of them
    described   all tensors of the unit on the meta device, by the base's names
    """

    model: Any
    source: WeightSource
    parameters: dict[str, NamedParameter]
    adapted: tuple[_Adapted, ...]
    described: Tensors
    _merged: Tensors = field(default_factory=dict)

    def entries(self) -> Iterator[Entry]:
        """An entry of each tensor, by the names of the base's files."""
        for name, value in names_of_files(self.model, self.described).items():
            pieces = _Piece(unit=self, name=name)
            shape = tuple(value.shape)
            yield Entry(name=name, dtype=value.dtype, shape=shape, pieces=pieces)

    def take(self, name: str) -> torch.Tensor:
        """The values of one tensor. The first call reads and merges the unit; each call frees one
        tensor of it."""
        if not self._merged:
            self._merged = names_of_files(self.model, self._merge())
        return self._merged.pop(name).contiguous()

    def _read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The base's values, from its files or (some embeddings) from the adapters' file."""
        if not parameter.is_meta:
            return parameter.detach().clone()
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        self.source.read_into(parameter, values)
        return values

    def _merge(self) -> Tensors:
        """Read the unit's parameters, and merge the adapters into them."""
        real: dict[int, nn.Parameter] = {}
        for named in self.parameters.values():
            values = self._read(named.parameter)
            real[id(named.parameter)] = nn.Parameter(values, requires_grad=False)
        places = [
            (table, key, parameter)
            for table in map(parameter_table, self.model.modules())
            for key, parameter in table.items()
            if id(parameter) in real
        ]
        for table, key, parameter in places:
            table[key] = real[id(parameter)]
        with torch.no_grad():
            for adapted in self.adapted:
                adapted.merge()
        merged = {
            name: real[id(named.parameter)].detach() for name, named in self.parameters.items()
        }
        for adapted in self.adapted:
            merged |= adapted.copied_tensors()
        for table, key, parameter in places:
            table[key] = parameter
        for name, expected in self.described.items():
            value = merged[name]
            if value.shape != expected.shape or value.dtype is not expected.dtype:
                raise StateError(
                    f"{name}: merged to {value.dtype} of {list(value.shape)}, expected "
                    f"{expected.dtype} of {list(expected.shape)}"
                )
        return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """`Entry.pieces` of one tensor of a unit."""

    unit: _Unit
    name: str

    def __call__(self) -> list[torch.Tensor]:
        return [self.unit.take(self.name)]


def _adapted_modules(model: nn.Module) -> Iterator[_Adapted]:
    """PEFT's modules in the base, without those inside others."""
    outer: tuple[str, ...] = ()
    for name, module in model.named_modules():
        is_peft = hasattr(module, "unload_and_optionally_merge_module") or (
            hasattr(module, "base_layer") and hasattr(module, "merge")
        )
        if is_peft and not name.startswith(outer):
            outer = (*outer, f"{name}.")
            yield _Adapted(name=name, module=module)


def _joined(
    layers: list[tuple[NamedParameter, ...]], adapted: list[_Adapted]
) -> list[tuple[tuple[NamedParameter, ...], tuple[_Adapted, ...]]]:
    """The parameters of each unit, with PEFT's modules that hold some of them.

    A module with parameters in several layers joins them.
    """
    layer_of = {id(named.parameter): k for k, layer in enumerate(layers) for named in layer}
    joined_to = list(range(len(layers)))  # by layer: the first layer of its unit
    held: dict[int, list[_Adapted]] = {}
    for one in adapted:
        touched = {layer_of[id(p)] for p in one.module.parameters() if id(p) in layer_of}
        firsts = {joined_to[k] for k in touched}
        first = min(firsts)
        joined_to = [first if k in firsts else k for k in joined_to]
        held.setdefault(first, []).append(one)
    units = []
    for first in sorted(set(joined_to)):
        parts = [layer for k, layer in enumerate(layers) if joined_to[k] == first]
        modules = [one for k, ones in held.items() if joined_to[k] == first for one in ones]
        units.append((tuple(named for layer in parts for named in layer), tuple(modules)))
    return units


def _unit(
    model: Any,
    source: WeightSource,
    parameters: tuple[NamedParameter, ...],
    adapted: tuple[_Adapted, ...],
    copied: set[str],
) -> _Unit:
    """A unit of the base's `parameters`. `copied`: names that trained copies of modules have.

    A tied parameter is written under its first name, as Transformers does.
    """
    written: dict[str, NamedParameter] = {}
    for named in parameters:
        names = [alias for alias in named.aliases if alias not in copied]
        if names:
            written[names[0]] = named
    described = {name: named.parameter.detach().to("meta") for name, named in written.items()}
    for one in adapted:
        described |= {name: value.to("meta") for name, value in one.copied_tensors().items()}
    return _Unit(
        model=model, source=source, parameters=written, adapted=adapted, described=described
    )
