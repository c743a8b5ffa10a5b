"""Models to plan for: transformers builds them on the meta device, without memory for weights.

Owns the way from a Hugging Face configuration, or from the sizes of a GPT, to layers and their
costs. It reads one JSON file. It never reads weights and never runs a model's custom code. One
thread enters.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.costs import DTYPES, ModelCosts, trace_costs
from stronghold.model.layout import ModelLayout
from stronghold.model.packed_weight import pack_frozen
from stronghold.model.partition import find_blocks, partition
from stronghold.model.stored_tensors import CAST, stored_tensors, training_dtypes
from stronghold.optim import DEFAULT
from stronghold.optim.contract import Optimizer
from stronghold.optim.states import EXACT, StateKind
from stronghold.private import Replacements
from stronghold.tools.estimate.adapters import Adapters, with_adapters
from stronghold.train.layer import Groups, layers_of, layout_of

CONFIG = "config.json"


class MetaModel:
    """A model on the meta device: its layers, and the costs of a step by batch, length and dtype.

    Arguments:
        config: the configuration of transformers.
        source: the file or directory of `config`. None: `config` has the sizes that a caller named.
        adapters: train alone, over frozen weights. None: all weights train.
    """

    def __init__(self, config: Any, source: Path | None, adapters: Adapters | None = None) -> None:
        self._config = config
        self._source = source
        self.adapters = adapters
        self._module: nn.Module = _build(config, source)
        self._class_name = type(self._module).__name__
        if source is None:
            # GPT2LMHeadModel has this loss, and no name of it. Without one, logits are kept whole.
            self._module.loss_type = "ForCausalLM"
        if adapters is not None:
            with _without_advice():
                self._module = with_adapters(self._module, adapters)
        self._layers = partition(self._module)  # as it computes
        self._costs: dict[tuple[int, int, str], ModelCosts] = {}

    @property
    def name(self) -> str:
        adapted = "" if self.adapters is None else f", with {self.adapters}"
        if self._source is not None:
            return f"{self._class_name} of {self._source}{adapted}"
        return (
            f"GPT-2, hidden {self._config.hidden_size}, {self._config.num_attention_heads} heads, "
            f"vocabulary {self._config.vocab_size}{adapted}"
        )

    @cached_property
    def layout(self) -> ModelLayout:
        """Its layers under bf16 and Adam, for their numbers of parameters."""
        return self.laid_out(DEFAULT, torch.bfloat16, EXACT)

    @property
    def num_blocks(self) -> int:
        """Layers that can be streamed."""
        return len(self.layout.streamed)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model has positions for, or None without a limit."""
        if self._source is None:
            return None
        return getattr(self._config, "max_position_embeddings", None)

    @cached_property
    def _packed(self) -> nn.Module:
        """The module as an engine has it."""
        if self.adapters is None or self.adapters.frozen is None:
            return self._module
        module = copy.deepcopy(self._module)
        pack_frozen(module, find_blocks(module, None), DTYPES[self.adapters.precision])
        return module

    def laid_out(self, optimizer: Optimizer, dtype: torch.dtype, kind: StateKind) -> ModelLayout:
        """The sizes of the layers in an engine."""
        groups: Groups = {p: ({}, optimizer) for p in self._packed.parameters() if p.requires_grad}
        dtypes = training_dtypes(stored_tensors(self._packed), dtype=dtype, rule=CAST)
        parts = partition(self._packed)
        return layout_of(layers_of(parts, groups, dtype_of=dtypes.__getitem__, kind=kind), parts)

    def with_frozen(self, frozen: str) -> MetaModel:
        """Store the frozen weights in the format of this name. The model must have adapters."""
        assert self.adapters is not None
        return MetaModel(self._config, self._source, replace(self.adapters, frozen=frozen))

    def costs_of(self, batch: int, seq: int, dtype: str) -> ModelCosts:
        """The costs of `batch` sequences of `seq` tokens in `dtype` ("bf16", "fp16", "fp32").

        Raises ConfigError if the model's forward depends on values.
        """
        key = (batch, seq, dtype)
        if key not in self._costs:
            module = self._packed
            layers = self._layers if module is self._module else partition(module)
            with _without_advice(), _autocast_on_meta():
                self._costs[key] = trace_costs(module, layers, batch=batch, seq=seq, dtype=dtype)
        return self._costs[key]

    def with_positions(self, longest: int) -> MetaModel:
        """Make room for `longest` tokens. A model that was read keeps its table of positions."""
        if self._source is not None:
            return self
        changed = copy.deepcopy(self._config)
        changed.max_position_embeddings = longest
        return MetaModel(changed, None, self.adapters)


def from_config(path: Path, adapters: Adapters | None = None) -> MetaModel:
    """The model of a directory with a config.json, or of such a file. Weights are not needed.

    Raises ConfigError if the file is missing or wrong, if transformers is not installed, or if it
    does not know the model.
    """
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        problem = f"has no {CONFIG}" if path.is_dir() else "is neither a directory nor a file"
        raise ConfigError(
            f"--model {path}: {problem}; expected a local directory of a Hugging Face model, or "
            f"its {CONFIG} (weights are not needed), or --layers, --hidden, --heads and --vocab"
        )
    return MetaModel(_read(file), path, adapters)


def from_sizes(
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    positions: int,
    adapters: Adapters | None = None,
) -> MetaModel:
    """GPT-2 of these sizes; `positions` is the length of its table of positions.

    It trains without dropout, and GELU is one operator. It has l (12 h^2 + 13 h) + v h + s h + 2 h
    parameters, the count that Megatron-LM quotes.

    Raises ConfigError, with the option's name, if the sizes do not fit together.
    """
    if hidden % heads:
        raise ConfigError(
            f"--heads: got {heads}, expected a divisor of --hidden ({hidden}): every head has the "
            "same width"
        )
    config = _transformers("--layers").GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        vocab_size=vocab,
        n_positions=positions,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["GPT2LMHeadModel"],
    )
    return MetaModel(config, None, adapters)


def _read(file: Path) -> Any:
    """The file as a configuration of transformers."""
    transformers = _transformers("--model")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model {file}: cannot be read as JSON: {error}") from error
    kind = raw.pop("model_type", None) if isinstance(raw, dict) else None
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            f"--model {file}: model_type: got {kind!r}, which transformers "
            f"{transformers.__version__} does not know; expected the {CONFIG} of one of its models"
            + (" (custom code is not run)" if isinstance(raw, dict) and "auto_map" in raw else "")
        )
    try:
        return transformers.AutoConfig.for_model(kind, **raw)
    except Exception as error:
        raise ConfigError(
            f"--model {file}: transformers refuses it: {type(error).__name__}: {error}"
        ) from error


def _transformers(option: str) -> Any:
    """The package, which only estimates need. Raises ConfigError if it is not installed."""
    try:
        logging.disable(logging.WARNING)  # of packages that transformers imports: torchao's
        importlib.import_module("transformers.modeling_utils")
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{option}: needs transformers to build the model: pip install transformers"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Context manager in which `torch.autocast("meta")` does nothing.

    PEFT's adapters of fused experts leave autocast in each forward, by
    `torch.autocast(weight.device.type, enabled=False)`. torch refuses the meta device there, though
    no autocast is ever active on it.
    """
    replacements = Replacements()
    replacements.put(torch, "autocast", _with_meta)
    try:
        yield
    finally:
        replacements.undo()


def _with_meta(original: Any) -> type:
    """Return a class that stands for `torch.autocast`."""

    class Autocast(original):  # type: ignore[misc]
        def __new__(cls, device_type: str, *args: Any, **kwargs: Any) -> Any:
            if device_type == "meta":
                return nullcontext()
            return original(device_type, *args, **kwargs)

    return Autocast


def _build(config: Any, source: Path | None) -> Any:
    """The module on the meta device, in training mode, with fused attention where it has that.

    Its class is the first that the configuration names, else a causal language model.
    """
    option = "--layers" if source is None else f"--model {source}"
    transformers = _transformers(option)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    makers = [kind._from_config for kind in named[:1] if kind is not None]
    make = makers[0] if makers else transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"), _without_advice():
        try:
            try:
                module = make(copy.deepcopy(config), attn_implementation="sdpa")
            except ValueError:  # the model writes its attention out
                module = make(copy.deepcopy(config), attn_implementation="eager")
        except Exception as error:
            raise ConfigError(
                f"{option}: transformers cannot build it: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error
    return module.train()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Context manager that hides the advice of transformers, which is about runs."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
