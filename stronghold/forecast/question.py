"""The question of a forecast: a model, a machine with its budgets, and a way to train.

Owns the defaults of what was not said, and the way from a Hugging Face configuration, or from sizes
alone, to a model's layers and their costs. Reads a profile and one JSON file, never weights;
measures nothing; imports transformers only for a configuration. One thread enters.
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

from stronghold.config import settings_from_config
from stronghold.config.section import parse_bytes
from stronghold.errors import ConfigError, did_you_mean
from stronghold.limits import update_cores
from stronghold.model.costs import DTYPES, LayerCost, ModelCosts, trace_costs
from stronghold.model.layout import ModelLayout, ParameterShape, for_ranks, layer_layout, layout
from stronghold.model.logits import part_of
from stronghold.model.partition import partition
from stronghold.optim import examples
from stronghold.optim.states import EXACT, LEAN, Kind, States, page_numel, states_of
from stronghold.plan.cost import Demand, Workload, workload_of
from stronghold.plan.machine import MachineProfile, Rates, find, machine_names, rates_of
from stronghold.runtime.patches.modules import build_from_config

SEQ = 2048  # without --seq, or as many as the model knows
CLIPPING = 1.0  # DeepSpeed's default
CONFIG = "config.json"
MOST_LAYERS = 1000  # eight times what the deepest models have


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to plan for, without its weights. `costs_of` takes batch, seq and dtype. `positions`
    is the longest sequence that it knows, None where nothing says. `with_layers` makes it with
    another number of blocks, `with_positions` so that it knows so long a sequence."""

    name: str
    layout: ModelLayout
    costs_of: Callable[[int, int, str], ModelCosts]
    positions: int | None
    with_layers: Callable[[int], Model]
    with_positions: Callable[[int], Model]

    @property
    def num_blocks(self) -> int:
        """Layers that may be streamed."""
        return len(self.layout.streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked. Budgets are bytes; `nvme_bytes` is 0 without that tier. `window` and
    `resident_layers` are pinned where they are given."""

    model: Model
    machine: MachineProfile
    batch: int
    seq: int
    accumulation: int
    dtype: str
    clipping: float
    overflow_check: bool
    early_layers: int | None
    gpu_bytes: int
    host_bytes: int
    states: Kind = EXACT
    optimizer: str = next(iter(examples()))
    nvme_bytes: int = 0
    nvme_path: str = ""
    window: int | None = None
    resident_layers: int | None = None
    chunk: int | None = None  # sequences that go through a block together; None: all
    streams: int = 1  # on which chunks take turns
    gpus: int = 1  # of each node, each a rank; `gpu_bytes` and `batch` are of each
    nodes: int = 1  # `host_bytes` are of each
    wire_gbps: float | None = None  # what a rank receives from its node; None: as over its link
    network_gbps: float | None = None  # and from other nodes; None: the simulator's

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def tokens(self) -> int:
        """Per optimizer step."""
        return self.batch * self.seq * self.accumulation * self.ranks

    @property
    def layout(self) -> ModelLayout:
        """The model's, as that many ranks share it, with pages for these states."""
        layout, page = self.model.layout, page_numel(self.states, in_files=self.nvme_bytes > 0)
        same = self.ranks == 1 and page == layout.page_numel
        return layout if same else for_ranks(layout, self.ranks, page)

    @property
    def costs(self) -> ModelCosts:
        return self.model.costs_of(self.batch, self.seq, self.dtype)

    @property
    def work(self) -> Workload:
        return workload_of(self.costs, self.machine, micro_batches=self.accumulation)

    @property
    def rates(self) -> Rates:
        return rates_of(
            self.machine,
            self.cpu_threads,
            sharing=self.gpus,
            num_nodes=self.nodes,
            wire_gbps=self.wire_gbps,
            network_gbps=self.network_gbps,
            states=self.states,
        )

    @property
    def active_share(self) -> float:
        """The share of the blocks' parameters with which one token computes, from the FLOPs of
        their products: two for each parameter. 1 for a model whose blocks multiply nothing."""
        layout, loads = self.layout, self.costs.layers
        products = sum(
            loads[index].forward_flops - loads[index].attention_flops for index in layout.streamed
        )
        numel = sum(layout.layers[index].num_parameters for index in layout.streamed)
        if not products or not numel:
            return 1.0
        return products / (2.0 * self.batch * self.seq * numel)

    @property
    def cpu_threads(self) -> int:
        """Threads of each rank's optimizer, as the engine has by default."""
        return update_cores(self.machine.num_cores // self.gpus, compute_threads=1)

    @property
    def arrays(self) -> States:
        """The arrays of a trained parameter."""
        found = settings_from_config(examples()[self.optimizer])
        assert found is not None
        return states_of(DTYPES[self.dtype], self.states, found.optimizer.moments)

    @property
    def demand(self) -> Demand:
        return Demand(
            states=self.arrays,
            early_layers=self.early_layers,
            accumulate=self.accumulation > 1,
            gpu_budget_bytes=self.gpu_bytes,
            host_budget_bytes=self.host_bytes // self.gpus,
            window=self.window,
            resident_layers=self.resident_layers,
            kept=self.work.layers,
            sequences=self.batch,
            tokens=self.batch * self.seq,
            num_cores=self.cpu_threads,
            num_ranks=self.ranks,
            num_nodes=self.nodes,
            resident_updates="host" if self.ranks > 1 or self.states == LEAN else None,
            nvme=self.nvme_bytes > 0,
            nvme_capacity_bytes=self.nvme_bytes // self.gpus or None,
            micro_batches=self.accumulation,
            chunk=self.chunk,
            streams=self.streams,
            chunks=1 if self.chunk is None else -(-self.batch // self.chunk),
        )


def understand(
    *,
    model: Path | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    machine: str | None = None,
    gpu: str | None = None,
    host: str | None = None,
    nvme: str | None = None,
    nvme_path: Path | None = None,
    batch: int | None = 1,
    seq: int | None = None,
    accumulation: int = 1,
    chunk: int | None = None,
    streams: int = 1,
    precision: str = "bf16",
    states: Kind = EXACT,
    optimizer: str = next(iter(examples())),
    clipping: float = CLIPPING,
    no_overflow_check: bool = False,
    early: int | None = None,
    gpus: int = 1,
    nodes: int = 1,
    wire: float | None = None,
    network: float | None = None,
) -> Question:
    """The question that the command's options ask, None where one was left out. `batch` None (the
    largest is wanted) stands as 1 in the answer, `chunk` 0 (the fastest) as none. ConfigError, with
    the option's name, for a mistake."""
    for option, count in (
        ("--batch", batch),
        ("--seq", seq),
        ("--accumulation", accumulation),
        ("--chunk", chunk or None),
        ("--streams", streams),
        ("--gpus", gpus),
        ("--nodes", nodes),
    ):
        if count is not None and count < 1:
            raise ConfigError(f"{option}: got {count}, expected at least 1")
    if not clipping >= 0.0:
        raise ConfigError(f"--clipping: got {clipping}, expected a norm, or 0 for none")
    if states == LEAN and precision != "bf16":
        raise ConfigError(
            f"--states: got lean with --precision {precision}, expected bf16: lean states are a "
            "layout of bf16 weights"
        )
    if no_overflow_check and precision != "bf16":
        raise ConfigError(
            f"--no-overflow-check: got it with --precision {precision}, expected bf16: "
            + ("fp16 scales the loss by it" if precision == "fp16" else "fp32 has no check")
        )
    if early is not None and early < 0:
        raise ConfigError(f"--early: got {early}, expected a number of layers, or 0 for none")
    if optimizer.lower() not in examples():
        known = ", ".join(example["type"] for example in examples().values())
        hint = did_you_mean(optimizer.lower(), examples())
        raise ConfigError(f"--optimizer: got {optimizer!r}, expected one of {known}.{hint}")
    for option, rate in (("--wire", wire), ("--network", network)):
        if rate is not None and not 0.0 < rate < float("inf"):
            raise ConfigError(f"{option}: got {rate}, expected 1e9 bytes per second, above 0")
    # An option that says nothing without another is a question that would not be answered.
    for option, value, others, given in (
        ("--nvme-path", nvme_path, "--nvme SIZE", nvme is not None),
        ("--streams", streams if streams > 1 else None, "--chunk N", chunk is not None),
        ("--wire", wire, "--gpus N or --nodes M above 1", gpus * nodes > 1),
        ("--network", network, "--nodes M above 1", nodes > 1),
    ):
        if value is not None and not given:
            raise ConfigError(f"{option}: got {value}, expected it with {others} alone")
    profile = _machine(machine)
    gpu_bytes = _bytes("--gpu", gpu, profile.gpu_memory_bytes)
    host_bytes = _bytes("--host", host, profile.host_memory_bytes)
    nvme_bytes = _bytes("--nvme", nvme, 0)
    asked = _model(
        model, {"--layers": layers, "--hidden": hidden, "--heads": heads, "--vocab": vocab}, seq
    )
    if nvme_bytes and None in (profile.nvme_read_gbps, profile.nvme_write_gbps):
        raise ConfigError(
            f"--nvme: the profile of {profile.name} has no disk; measure one with `stronghold "
            "doctor --path DIR`, or name another --machine"
        )
    folder = str(nvme_path or profile.nvme_path or "/path/to/nvme")
    return Question(
        model=asked,
        machine=profile,
        batch=batch or 1,
        seq=seq or min(SEQ, asked.positions or SEQ),
        accumulation=accumulation,
        chunk=chunk or None,
        streams=streams,
        dtype=precision,
        states=states,
        optimizer=optimizer.lower(),
        clipping=clipping,
        # 16-bit gradients are checked before any is used: DeepSpeed's default.
        overflow_check=precision != "fp32" and not no_overflow_check,
        early_layers=early,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        nvme_bytes=nvme_bytes,
        nvme_path=folder if nvme_bytes else "",
        gpus=gpus,
        nodes=nodes,
        wire_gbps=wire,
        network_gbps=network,
    )


def _machine(name: str | None) -> MachineProfile:
    if name is not None:
        return MachineProfile.load(name)
    found = find()
    if found is None:
        raise ConfigError(
            "no profile of this machine: run `stronghold doctor`, which takes less than a minute, "
            f"or name a machine with --machine: {', '.join(machine_names())}, or a profile's file"
        )
    return found


def _bytes(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


# -- the model ------------------------------------------------------------------------------------
def _model(path: Path | None, sizes: dict[str, int | None], seq: int | None) -> Model:
    given = [name for name, size in sizes.items() if size is not None]
    if path is not None:
        if given:
            raise ConfigError(
                f"--model and {given[0]}: expected one of the two ways to say a model"
            )
        return from_config(path)
    missing = [name for name in sizes if name not in given]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: missing; expected --model DIR, or all of {', '.join(sizes)}"
        )
    _check_depth("--layers", sizes["--layers"])
    layers, hidden, heads, vocab = (size or 0 for size in sizes.values())
    return from_sizes(layers, hidden, heads, vocab, seq or SEQ)


def _check_depth(option: str, layers: object) -> None:
    """ConfigError for more layers than can be planned: plans are tried layer by layer."""
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ConfigError(
            f"{option}: got {layers}, expected at most {MOST_LAYERS}: a plan is found by "
            "simulating steps layer by layer, which would take hours. Ask for fewer layers"
        )


def from_config(path: Path) -> Model:
    """The model of a directory with a config.json, or of such a file; its weights are not needed.
    ConfigError where there is none, transformers is missing or does not know the model, or its
    forward depends on values."""
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        what = f"has no {CONFIG}" if path.is_dir() else "is neither a directory nor a file"
        raise ConfigError(
            f"--model {path}: {what}; expected a local directory of a Hugging Face model, or its "
            f"{CONFIG} (weights are not needed), or --layers, --hidden, --heads and --vocab"
        )
    config = _read(file)
    _check_depth(f"--model {file}: num_hidden_layers", getattr(config, "num_hidden_layers", None))
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


def _of_config(config: Any, where: str) -> Model:
    model = _build(config, where)
    layers = partition(model)

    @functools.cache
    def costs_of(batch: int, seq: int, dtype: str) -> ModelCosts:
        with _quiet():
            return trace_costs(model, layers, batch=batch, seq=seq, dtype=dtype)

    found = Model(
        name=f"{type(model).__name__} of {where}",
        layout=layout(layers),
        costs_of=costs_of,
        positions=getattr(config, "max_position_embeddings", None),
        with_layers=lambda count: _of_config(_with_layers(config, count), where),
        with_positions=lambda longest: found,
    )
    return found


def _build(config: Any, where: str) -> Any:
    """The model without memory, in training mode: the class that the configuration names, else a
    causal language model; attention fused where the model can."""
    transformers = _transformers()
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    makers = [build_from_config(kind) for kind in named[:1] if kind is not None]
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


# -- a GPT from its sizes alone -------------------------------------------------------------------
# The standard decoder: learned positions, norms before attention and MLP, biases everywhere, the
# head tied to the embedding. Its layout is the one that `layout` gives for GPT-2 of the same sizes.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int

    @property
    def inner(self) -> int:
        """The MLP's width."""
        return 4 * self.hidden


def from_sizes(layers: int, hidden: int, heads: int, vocab: int, positions: int) -> Model:
    """A standard GPT of these sizes; `positions` is the length of its table of them. The parameters
    are l (12 h^2 + 13 h) + v h + s h + 2 h, the count that Megatron-LM quotes. The costs are those
    of fused attention and one operator for GELU, in training without dropout, with a cross-entropy
    over fp32 logits. ConfigError, with the option's name, for sizes that do not fit together."""
    given = {"--layers": layers, "--hidden": hidden, "--heads": heads, "--vocab": vocab}
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"{name}: got {value}, expected at least 1")
    if hidden % heads:
        raise ConfigError(
            f"--heads: got {heads}, expected a divisor of --hidden ({hidden}): every head has the "
            "same width"
        )
    sizes = _Sizes(layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=positions)
    return Model(
        name=f"GPT, hidden {hidden}, {heads} heads, vocabulary {vocab}",
        layout=_layout(sizes),
        costs_of=functools.partial(_costs, sizes),
        positions=None,
        with_layers=lambda count: from_sizes(count, hidden, heads, vocab, positions),
        with_positions=lambda longest: from_sizes(layers, hidden, heads, vocab, longest),
    )


def _layout(sizes: _Sizes) -> ModelLayout:
    h, inner = sizes.hidden, sizes.inner
    in_block = {
        "ln_1": (h,),
        "attn.c_attn": (h, 3 * h),
        "attn.c_proj": (h, h),
        "ln_2": (h,),
        "mlp.c_fc": (h, inner),
        "mlp.c_proj": (inner, h),
    }
    block = {
        f"{part}.{kind}": of_kind
        for part, shape in in_block.items()
        for kind, of_kind in (("weight", shape), ("bias", shape[-1:]))
    }
    rows: list[tuple[str, dict[str, tuple[int, ...]], bool]] = [
        ("transformer.wte", {"weight": (sizes.vocab, h)}, False),
        ("transformer.wpe", {"weight": (sizes.seq, h)}, False),
        *((f"transformer.h.{index}", block, True) for index in range(sizes.layers)),
        ("transformer.ln_f", {"weight": (h,), "bias": (h,)}, False),
    ]
    return ModelLayout(
        layers=tuple(
            layer_layout(
                [
                    ParameterShape(name=f"{name}.{part}", shape=shape, trainable=True)
                    for part, shape in parts.items()
                ],
                index=index,
                name=name,
                streamed=streamed,
            )
            for index, (name, parts, streamed) in enumerate(rows)
        )
    )


def _costs(sizes: _Sizes, batch: int, seq: int, dtype: str) -> ModelCosts:
    tokens, h, each = batch * seq, sizes.hidden, DTYPES[dtype].itemsize
    row = tokens * h * each  # one activation of the hidden size
    statistics = 2 * tokens * 4  # of a norm: mean and reciprocal deviation, fp32
    # Two per multiplication: the matrices, and q k^T and its product with v over all pairs.
    products, attention = 2.0 * tokens * (4 * h * h + 2 * h * sizes.inner), 4.0 * tokens * seq * h
    block = LayerCost(
        forward_flops=products + attention,
        saved_bytes=_block_saved(sizes, batch, seq, dtype),
        boundary_bytes=row,
        attention_flops=attention,
        causal_flops=attention,
        head_width=h // sizes.heads,
        attention_bytes=row + _statistics(sizes, batch, seq, dtype),
        # Two norms; two additions of a residual; GELU. Biases are added by products.
        operator_bytes=2 * (2 * row + 2 * h * each + statistics) + 2 * 3 * row + 8 * row,
    )
    head = _head(sizes, tokens, seq, each)
    positions = LayerCost(
        forward_flops=0.0,
        saved_bytes=seq * 8,
        boundary_bytes=0,
        # Rows of the table, and their addition to the tokens' embeddings.
        operator_bytes=seq * (8 + 2 * h * each) + (2 * row + seq * h * each),
    )
    norm = LayerCost(
        forward_flops=0.0,
        saved_bytes=row + statistics,
        boundary_bytes=0,
        operator_bytes=2 * row + 2 * h * each + statistics,
    )
    return ModelCosts(
        layers=(head, positions, *(block,) * sizes.layers, norm), dtype=dtype, seq=seq
    )


def _head(sizes: _Sizes, tokens: int, seq: int, each: int) -> LayerCost:
    """Of embedding, head and loss; logits as large as by default are computed in parts."""
    row, flops = tokens * sizes.hidden * each, 2.0 * tokens * sizes.hidden * sizes.vocab
    part = part_of(tokens, sizes.vocab, None)
    # Ids, and their rows of the table; positions' numbers.
    embedding = tokens * 8 + 2 * row + seq * 8
    logits = tokens * sizes.vocab
    cast = each + 4 if each < 4 else 0  # a logit to fp32, or back
    if part:
        return LayerCost(
            forward_flops=flops * 4 / 3,  # [Note: four products] of `logits`; three are assumed
            # The ids, which are the labels too; the last norm's output and its gradient.
            saved_bytes=tokens * 8 + 2 * row + 4,
            boundary_bytes=0,
            # Of a part the logits, and where they are not fp32 their fp32 copy.
            passing_bytes=part * sizes.vocab * (4 + (each if each < 4 else 0)),
            # Of a logit the maximum, the difference, its exponential, the sum and the quotient, and
            # as much again in backward: two passes, where three are assumed.
            operator_bytes=(embedding + logits * (4 + 8 + 8 + 4 + 8 + 2 * cast)) * 2 / 3,
        )
    return LayerCost(
        forward_flops=flops,
        # The ids, which are the labels too; the last norm's output; the loss's fp32 softmax and its
        # sum of weights.
        saved_bytes=tokens * 8 + row + tokens * sizes.vocab * 4 + 4,
        boundary_bytes=0,
        # In backward the gradients of the softmax and of its logarithm, both fp32.
        passing_bytes=2 * tokens * sizes.vocab * 4,
        # Logits become fp32, and their softmax's logarithm; the loss reads one of each token's.
        operator_bytes=embedding + logits * (cast + 8) + tokens * 8 + 16,
    )


def _block_saved(sizes: _Sizes, batch: int, seq: int, dtype: str) -> int:
    """What each operator of a block keeps for its backward. Norms: their input and statistics.
    Products: their input. Attention: q, k, v, its output and log-sum-exp. GELU: its input."""
    tokens, h, each = batch * seq, sizes.hidden, DTYPES[dtype].itemsize
    norms = 2 * (2 * tokens * h * each + 2 * tokens * 4)
    attention = tokens * 4 * h * each
    mlp = 2 * tokens * sizes.inner * each
    return norms + attention + _statistics(sizes, batch, seq, dtype) + mlp


def _statistics(sizes: _Sizes, batch: int, seq: int, dtype: str) -> int:
    """Attention's log-sum-exp, in rows that the kernel for fp32 pads; dropout's seed and offset."""
    rows, state = (-(-seq // 32) * 32, 16) if dtype == "fp32" else (seq, 24)
    return batch * sizes.heads * rows * 4 + state
