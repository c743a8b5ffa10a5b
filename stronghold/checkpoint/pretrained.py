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
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from stronghold.checkpoint.conversions import Conversion, ExpectedTensors, conversions
from stronghold.checkpoint.files import TensorFile
from stronghold.checkpoint.stored_weights import quantiser_of
from stronghold.errors import CheckpointError, ConfigError, did_you_mean
from stronghold.model.partition import set_source
from stronghold.streaming.patches.modules import build_from_config

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
    files = files_of_tensors(path)
    try:
        config = transformers.AutoConfig.from_pretrained(path, **config_changes)
    except RecursionError as error:
        raise ConfigError(f"{path / 'config.json'}: nested too deeply") from error
    quantiser = quantiser_of(config, path)
    model_class = auto_class or transformers.AutoModelForCausalLM
    build = getattr(model_class, "from_config", None) or build_from_config(model_class)
    model_dtype = dtype or config.dtype or torch.float32
    with _parameters_on_meta():
        model = build(config, dtype=model_dtype)
        if quantiser is not None:  # the library's modules
            quantiser.preprocess_model(model=model, dtype=model_dtype, device_map={"": "cpu"})
    if (path / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    source = DirectorySource(model, files, path, quantiser)
    source.fill_buffers(model)
    set_source(model, source)
    if quantiser is not None:
        model.hf_quantizer = quantiser
        quantiser.postprocess_model(model)
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


def files_of_tensors(path: Path) -> dict[str, TensorFile]:
    """The file of each tensor in a directory of safetensors.

    Raises ConfigError for a directory without them, and CheckpointError for a damaged file.
    """
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


class DirectorySource:
    """Source of the values of a model's parameters: the tensors of one directory."""

    def __init__(
        self, model: Any, files: dict[str, TensorFile], path: Path, quantiser: Any
    ) -> None:
        self._conversion_of = conversions(model, files, ExpectedTensors(model), quantiser)
        _adopt_stored(model, self._conversion_of)
        self._name_of: dict[int, str] = {}  # by the parameter's id
        self._last: Conversion | None = None
        missing = []
        aliases: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, []).append(name)
        for parameter, names in aliases.items():
            if not parameter.is_meta:  # it has its values
                continue
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


def _adopt_stored(model: nn.Module, conversion_of: dict[str, Conversion]) -> None:
    """Give the library's modules of `model` their parameters, as tensors over the files' pages.

    So they take no memory until the engine copies them, layer by layer.
    """
    for conversion in conversion_of.values():
        if not conversion.takes_stored_bytes:
            continue
        for name, value in conversion.mapped(model).items():
            module_name, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module_name), attribute, value)
