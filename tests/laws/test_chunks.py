"""Chunks: a block takes its batch a few sequences at a time. For one chunk size nothing else ever
changes a bit, and the bits are those of a plain loop whose blocks are chunked in the same way.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomForCausalLM

import stronghold
from stronghold.errors import ConfigError
from stronghold.model.partition import partition
from tests.models import HUGGING_FACE, MODELS
from tests.models.families import llama_of
from tests.support.training import (
    Run,
    assert_identical,
    config,
    initialized,
    train_plain,
    train_windowed,
)

NUM_LAYERS = 4
VOCABULARY = 61
BATCH = 5


def llama() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    model = llama_of(24, 52, NUM_LAYERS, 2, 1, VOCABULARY, attention_dropout=0.2)

    def make_batch(seed: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, (BATCH, 11), generator=made)
        mask = torch.ones_like(tokens)
        mask[1, 7:] = 0
        return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}

    return model.train(), make_batch


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.model.layers)


class CalledTwice(nn.Module):
    """Two calls of a Llama on halves of the tokens, whose losses one backward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()[0]

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        halves = ({k: v[:, at::2] for k, v in batch.items()} for at in range(2))
        first, second = (self.model(**half).loss for half in halves)
        return first + 2.0 * second


def called_twice() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return CalledTwice(), llama()[1]


@functools.cache
def plain_twice(precision: str, accumulation: int, clipping: float = 0.5) -> Run:
    return train_plain(
        called_twice,
        steps=3,
        accumulation=accumulation,
        clipping=clipping,
        precision=precision,
        chunks=(lambda model: blocks_of(model.model), 2),
    )


SUMS = [("fp32", 1, 0.5), ("fp32", 2, 0.5), ("bf16", 1, 0.5), ("bf16", 2, 0.5), ("bf16", 1, 0.0)]
CALLED_IN: list[dict[str, Any]] = [
    {"window": 1, "activations": "recompute"},
    {"window": 2, "resident_layers": 2, "activations": "keep", "streams": 2},
    {"resident_layers": "all", "resident_updates": "gpu"},
]
# Indices of CALLED_IN and of SUMS in the default run. Only a GPU's own updates with accumulation 1
# show whether the sums of two calls are rounded apart. With accumulation 2, and only there, a layer
# that is updated on the GPU has no gradient slot of its own.
OFTEN = {(0, 3), (1, 1), (2, 2), (2, 3), (2, 4)}


@pytest.mark.parametrize(
    ("place", "precision", "accumulation", "clipping"),
    [
        pytest.param(place, *sums, marks=() if (k, n) in OFTEN else pytest.mark.slow)
        for k, place in enumerate(CALLED_IN)
        for n, sums in enumerate(SUMS)
    ],
    ids=str,
)
def test_calls_of_one_backward_are_added_as_without_chunks(
    place: dict[str, Any], precision: str, accumulation: int, clipping: float
) -> None:
    """There are fewer gradient slots than layers that wait for the other call's chunks."""
    settings = config(
        accumulation=accumulation,
        clipping=clipping,
        precision=precision,
        section={"chunk": 2, **place},
    )
    run = train_windowed(called_twice, steps=3, settings=settings)
    expected = plain_twice(precision, accumulation, clipping)
    assert_identical(run, expected)
    assert run.norms == expected.norms


def streamed_modules(model: nn.Module) -> list[nn.Module]:
    return [module for layer in partition(model).streamed for module in layer.modules]


@functools.cache
def plain_zoo(name: str) -> Run:
    return train_plain(MODELS[name], steps=3, clipping=0.5, chunks=(streamed_modules, 1))


@pytest.mark.parametrize(
    "section",
    [
        {"window": 2, "activations": "recompute"},
        pytest.param({"window": 1, "activations": "keep"}, marks=pytest.mark.slow),
        pytest.param({"resident_layers": "all", "resident_updates": "gpu"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_zoo_trains_in_chunks_as_a_plain_loop_does(name: str, section: dict[str, Any]) -> None:
    settings = config(clipping=0.5, section={"chunk": 1, **section})
    assert_identical(train_windowed(MODELS[name], steps=3, settings=settings), plain_zoo(name))


# -- what it costs ---------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_weights_cross_twice_and_gradients_once_however_many_chunks(chunk: int) -> None:
    model, make_batch = llama()
    section = {"chunk": chunk, "window": 1, "activations": "recompute"}
    engine, *_ = stronghold.initialize(
        model=model, config=config(precision="bf16", section=section)
    )
    try:
        for step in range(3):
            before = engine.inspect().traffic
            engine.backward(engine(**make_batch(step)).loss)
            after = engine.inspect().traffic
            fetched = after.num_fetches - before.num_fetches
            drained = after.offloaded_bytes - before.offloaded_bytes
            engine.step()
        layers = engine.inspect().layers
        streamed = sum(state.layout.streamed for state in layers)
        residents = len(layers) - streamed  # the host has updated them
        # One layer of the turn from forward to backward is there already.
        assert fetched <= 2 * streamed + residents
        trained = sum(s.layout.num_trained for s in engine.inspect().layers)
        padding = sum(s.layout.trained_numel for s in engine.inspect().layers)
        assert 2 * trained <= drained <= 2 * padding
        report = engine.memory_report()
        assert report.gpu_peak == report.gpu_planned
        assert engine.plan.gpu_bytes["fp32 sums of chunks"] > 0
    finally:
        engine.destroy()


# -- what it is to the user ------------------------------------------------------------------------
OVER_THE_BATCH = ["mean", "sum", "all rows", "batch norm"]
KEEPING = ["list", "table", "namespace"]


class OverTheBatch(nn.Module):
    """A block that mixes the sequences of a batch, or keeps what it has of them in an argument."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind
        self.norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Identity()

    def forward(self, x: torch.Tensor, seen: Any) -> Any:
        y = self.linear(x)
        if self.kind == "list":
            seen.append(y)
        elif self.kind == "table":
            seen["rows"] = y
        elif self.kind == "namespace" and self.training:
            seen.total = y.sum()
        if self.kind == "mean":
            return x + y - y.mean(0)
        if self.kind == "sum":
            return (x + y).sum(0)
        if self.kind == "all rows":
            return x + y.reshape(4, 8)
        return self.norm(y)


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OverTheBatch(kind) for _ in range(2))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = {"list": [], "table": {}, "namespace": types.SimpleNamespace()}.get(self.kind)
        for block in self.blocks:
            x = block(x, seen)
        return x.square().mean()


@pytest.mark.parametrize("kind", [*OVER_THE_BATCH, *KEEPING])
def test_what_cannot_be_divided_is_refused_by_name_before_it_trains(kind: str) -> None:
    torch.manual_seed(0)
    model = Stack(kind)
    before = [p.detach().clone() for p in model.parameters()]

    def first_call() -> None:
        engine, *_ = stronghold.initialize(model=model, config=config(section={"chunk": 2}))
        try:
            engine(torch.randn(4, 8))
        finally:
            engine.destroy()

    words = r"\.0 changes an argument .*eave" if kind in KEEPING else r"\.0.*eave"
    with pytest.raises(ConfigError, match=rf"^stronghold.chunk: blocks{words} the key out"):
        first_call()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_biases_with_rows_for_each_head_are_refused() -> None:
    """Those of Bloom (ALiBi) have batch * heads."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    engine = initialized(BloomForCausalLM(BloomConfig(**sizes)), config(section={"chunk": 2}))
    try:
        with pytest.raises(ConfigError, match=r"h\.0 fails with 2 .*several for each sequence"):
            engine(**llama()[1](0))
    finally:
        engine.destroy()


def test_what_is_not_a_number_divides_no_worse() -> None:
    """A run that has diverged is the user's to see, not said to mix sequences."""
    model, make_batch = MODELS["gpt"]()
    nn.init.constant_(next(model.blocks[0].parameters()), float("nan"))
    engine = stronghold.initialize(model=model, config=config(section={"chunk": 1}))[0]
    assert engine(**make_batch(0)).isnan()
    engine.destroy()


def test_the_model_is_given_back_whole() -> None:
    model, make_batch = llama()
    engine, *_ = stronghold.initialize(model=model, config=config(section={"chunk": 2}))
    engine.backward(engine(**make_batch(0)).loss)
    engine.step()
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    engine.destroy()
    for one in (model, copied, pickled):
        assert "forward" not in vars(one.model.layers[0]) or one is not model
        one.eval()
    batch = make_batch(1)
    with torch.no_grad():
        losses = [one(**batch).loss for one in (model, copied, pickled)]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused(kind: str) -> None:
    model, make_batch = llama()
    engine, *_ = stronghold.initialize(model=model, config=config(section={"chunk": 2}))
    try:
        getattr(model.model.layers[0].mlp.up_proj.weight, kind)(lambda given: None)
        with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up_proj\.weight has a hook"):
            engine(**make_batch(0))
    finally:
        engine.destroy()


# -- backwards of other kinds ----------------------------------------------------------------------
class Failing(torch.autograd.Function):
    """Raises in its `fails`-th backward, counted from 1."""

    fails = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Failing.fails -= 1
        if Failing.fails == 0:
            raise RuntimeError("of the program")
        return gradient


class WholeNumbers(nn.Module):
    """A block whose sums are exact in any order. It returns something that all chunks share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-2, 3, (width, width)).float())
        self.scale = nn.Parameter(torch.randint(1, 4, (3,)).float())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = Failing.apply(x)  # type: ignore[no-untyped-call]
        return torch.nn.functional.linear(x, self.weight), 2.0 * self.scale


class Twice(nn.Module):
    """Its last block is first called with one sequence, which is not divided."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WholeNumbers(width) for _ in range(3))

    def forward(self, x: torch.Tensor, ends: int) -> torch.Tensor:
        alone, own = self.blocks[2](x[:1])
        for block in self.blocks:
            x, shared = block(x)
        sums = [x.sum() + alone.sum()] if ends != 1 else []
        return sum([*sums, *([shared.sum() + 3.0 * own.sum()] if ends > 0 else [])])


def backward_twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def backward_again(loss: torch.Tensor) -> None:
    """After one that has failed between two chunks of the second block."""
    Failing.fails = 5  # after three chunks of the third block, and one of the second
    with pytest.raises(RuntimeError, match="of the program"):
        loss.backward(retain_graph=True)
    loss.backward()


BACKWARDS = {"once": torch.Tensor.backward, "twice": backward_twice, "again": backward_again}


@pytest.mark.parametrize("place", [CALLED_IN[0], CALLED_IN[2]], ids=str)
@pytest.mark.parametrize(
    ("ends", "backward"),
    [(0, "once"), (0, "twice"), (1, "once"), (1, "twice"), (2, "twice"), (2, "again")],
)
def test_gradients_are_whole_after_any_backward(
    ends: int, backward: str, place: dict[str, Any]
) -> None:
    """Also if the call of a block has chunks without a gradient, and chunks beside a whole call."""
    torch.manual_seed(0)
    model = Twice()
    plain = copy.deepcopy(model)
    engine = initialized(model, config(section={"chunk": 2, **place}))
    x = torch.randint(-2, 3, (5, 4)).float()
    BACKWARDS[backward](engine(x, ends))
    engine.step()
    loss = plain(x, ends)
    BACKWARDS["twice" if backward == "twice" else "once"](loss)
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    assert engine.get_global_grad_norm() == torch.cat([g.flatten() for g in gradients]).norm()
    engine.destroy()


def test_a_backward_after_one_that_failed_has_the_same_bits() -> None:
    """Sums of the calls of a block are rounded one by one, in bf16."""
    norms = []
    for backward in ("once", "again"):
        torch.manual_seed(0)
        model = Twice(32)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        settings = config(precision="bf16", section={"chunk": 2, **CALLED_IN[0]})
        engine = initialized(model, settings)
        BACKWARDS[backward](engine(torch.randn(5, 32, dtype=torch.bfloat16), 2))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == norms[1]
