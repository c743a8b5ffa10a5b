"""The subject of a forecast: a model's layers and their costs, without its weights.

Owns the way from a Hugging Face configuration, or from sizes alone, to a layout and costs. Reads
one JSON file, never weights; imports transformers only for a configuration. One thread enters.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stronghold.errors import ConfigError
from stronghold.model.costs import ModelCosts, trace_costs
from stronghold.model.layout import ModelLayout, layout
from stronghold.model.partition import partition
from stronghold.model.shapes import transformer_shape

CONFIG = "config.json"
MOST_LAYERS = 1000  # eight times what the deepest models have


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to plan for.

    `costs_of` takes batch, seq and dtype. `positions` is the longest sequence that the model knows,
    None where nothing says. `with_layers` makes the same model with another number of blocks,
    `with_positions` one that knows so long a sequence where its sizes depend on that.
    """

    name: str
    layout: ModelLayout
    costs_of: Callable[[int, int, str], ModelCosts]
    positions: int | None
    with_layers: Callable[[int], Subject]
    with_positions: Callable[[int], Subject]

    @property
    def num_blocks(self) -> int:
        """Layers that may be streamed."""
        return len(self.layout.streamed)


def check_depth(option: str, layers: object) -> None:
    """ConfigError for more layers than can be planned: plans are tried layer by layer."""
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ConfigError(
            f"{option}: got {layers}, expected at most {MOST_LAYERS}: a plan is found by "
            "simulating steps layer by layer, which would take hours. Ask for fewer layers"
        )


def from_sizes(layers: int, hidden: int, heads: int, vocab: int, positions: int) -> Subject:
    """A standard GPT of these sizes (`model.shapes`); ConfigError where they contradict."""
    sizes, costs_of = transformer_shape(layers, hidden, heads, vocab, positions)
    return Subject(
        name=f"GPT, hidden {hidden}, {heads} heads, vocabulary {vocab}",
        layout=sizes,
        costs_of=costs_of,
        positions=None,
        with_layers=lambda count: from_sizes(count, hidden, heads, vocab, positions),
        with_positions=lambda longest: from_sizes(layers, hidden, heads, vocab, longest),
    )


def from_config(path: Path) -> Subject:
    """The model of a directory with a config.json, or of such a file; its weights are not needed.

    ConfigError where there is none, where transformers is not installed or does not know the model,
    and where its forward depends on values.
    """
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        what = f"has no {CONFIG}" if path.is_dir() else "is neither a directory nor a file"
        raise ConfigError(
            f"--model {path}: {what}; expected a local directory of a Hugging Face model, or its "
            f"{CONFIG} (weights are not needed), or --layers, --hidden, --heads and --vocab"
        )
    config = _read(file)
    check_depth(f"--model {file}: num_hidden_layers", getattr(config, "num_hidden_layers", None))
    return _of_config(config, str(path))


def _read(file: Path) -> Any:
    """The file as transformers' configuration."""
    transformers = _transformers()
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


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "--model: needs transformers to build the model: pip install transformers; or give "
            "--layers, --hidden, --heads and --vocab"
        ) from error
    return transformers


def _of_config(config: Any, where: str) -> Subject:
    model = _build(config, where)
    layers = partition(model)

    @functools.cache
    def costs_of(batch: int, seq: int, dtype: str) -> ModelCosts:
        with _quiet():
            return trace_costs(model, layers, batch=batch, seq=seq, dtype=dtype)

    subject = Subject(
        name=f"{type(model).__name__} of {where}",
        layout=layout(layers),
        costs_of=costs_of,
        positions=getattr(config, "max_position_embeddings", None),
        with_layers=lambda count: _of_config(_with_layers(config, count), where),
        with_positions=lambda longest: subject,
    )
    return subject


def _build(config: Any, where: str) -> Any:
    """The model without memory, in training mode: the class that the configuration names, else a
    causal language model; attention fused where the model can."""
    transformers = _transformers()
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    makers = [kind._from_config for kind in named[:1] if kind is not None]
    make = makers[0] if makers else transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"), _quiet():
        try:
            try:
                model = make(copy.deepcopy(config), attn_implementation="sdpa")
            except ValueError:  # written out in this model
                model = make(copy.deepcopy(config), attn_implementation="eager")
        except Exception as error:
            raise ConfigError(
                f"--model {where}: transformers cannot build it: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error
    return model.train()


def _with_layers(config: Any, count: int) -> Any:
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = count
    kinds = getattr(config, "layer_types", None)
    if kinds:  # the pattern goes on
        changed.layer_types = [kinds[index % len(kinds)] for index in range(count)]
    return changed


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice, which is about runs."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
