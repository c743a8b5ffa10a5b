"""`from_pretrained`: a Hugging Face model that takes no memory until `initialize` streams it in.

Owns the match between a model directory's tensors and a model's names. Reads safetensors alone, a
piece at a time, straight into the slabs: the host never holds a second copy of a layer. The
training thread alone enters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from stronghold.checkpoint.tensorfile import TensorFile
from stronghold.errors import CheckpointError, ConfigError, did_you_mean
from stronghold.model.source import set_source

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
    layer by layer. In evaluation mode, as transformers' own `from_pretrained` leaves it.

    `auto_class`: transformers' AutoModelForCausalLM unless another auto class or model class is
    given. `dtype`: of the parameters; the configuration's without it. Further arguments change the
    configuration. ConfigError for a directory that cannot be opened like this, before anything is
    built or with the names that are missing.
    """
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
    """Modules made inside get parameters without memory and buffers with their values.

    Not `torch.device("meta")`: buffers that no file holds (rotary frequencies) are computed when
    they are made. What a constructor allocates for a parameter is never touched, and gone at once.
    """

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


class _Directory:
    """The weights of one directory by the model's parameters."""

    def __init__(self, model: Any, stored: dict[str, TensorFile], path: Path) -> None:
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        self._found: dict[int, tuple[TensorFile, str]] = {}
        missing = []
        aliases: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, []).append(name)
        for parameter, names in aliases.items():
            # With or without the prefix of the model's body: what a head's class or the bare model
            # saved.
            spelled = [s for n in names for s in (n, n.removeprefix(prefix), prefix + n)]
            key = next((name for name in spelled if name in stored), None)
            if key is None:
                missing.append(names[0])
                continue
            shape = stored[key].info(key).shape
            if shape != tuple(parameter.shape):
                raise ConfigError(
                    f"{stored[key].path}: {key} has the shape {list(shape)}, and the model expects "
                    f"{list(parameter.shape)}"
                )
            self._found[id(parameter)] = stored[key], key
        if missing:
            more = f" and {len(missing) - 1} more parameters" if missing[1:] else ""
            raise ConfigError(
                f"{path}: has no {missing[0]}{more}."
                f"{did_you_mean(missing[0], stored)} Where transformers converts names or "
                "makes new weights while it loads, use its from_pretrained, then save_pretrained"
            )
        self._stored = stored
        self._alive = list(aliases)  # or another parameter could take over an id

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is the model's."""
        return id(parameter) in self._found

    def read_into(self, parameter: nn.Parameter, target: torch.Tensor) -> None:
        """Fill `target`, cast to its dtype."""
        _read(*self._found[id(parameter)], target)

    def fill_buffers(self, model: nn.Module) -> None:
        """Values of the buffers that the directory has."""
        for name, buffer in model.named_buffers():
            if name in self._stored:
                _read(self._stored[name], name, buffer.data)


def _read(file: TensorFile, key: str, target: torch.Tensor) -> None:
    if file.info(key).dtype is target.dtype:
        file.read_into(key, target)
        return
    flat, begin = target.view(-1), 0
    for piece in file.pieces(key):
        flat[begin : begin + piece.numel()].copy_(piece)
        begin += piece.numel()
