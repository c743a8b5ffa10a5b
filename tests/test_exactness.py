"""Law 1 and law 2: what must never change a bit, checked with `torch.equal`."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stronghold import native
from tests.training import Run, assert_identical, config, train_plain, train_windowed

STEPS = 8
NUM_LAYERS = 5
WINDOWS: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 2},
    {"window": 4},
    {"resident_layers": "all"},
]
POLICIES = ["keep", "offload", "recompute"]
PLACES = list(itertools.product(WINDOWS, POLICIES))
THREADS_AND_ISAS = list(itertools.product([1, 2], native.isas()))
VOCABULARY = 61


def llama() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """Weird sizes on purpose: heads of 12, an odd vocabulary, an odd sequence."""
    shape = LlamaConfig(
        hidden_size=24,
        intermediate_size=52,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        use_cache=False,
    )

    def make_batch(seed: int) -> dict[str, Any]:
        tokens = torch.randint(
            0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(seed)
        )
        return {"input_ids": tokens, "labels": tokens}

    return LlamaForCausalLM(shape), make_batch


@functools.cache
def plain(accumulation: int, clipping: float, precision: str) -> Run:
    return train_plain(
        llama, steps=STEPS, accumulation=accumulation, clipping=clipping, precision=precision
    )


def check(
    places: list[Any], accumulation: int, clipping: float, precision: str, monkeypatch: Any
) -> None:
    expected = plain(accumulation, clipping, precision)
    # Threads and instruction sets take turns over windows and policies: the native tests cross them
    # with everything.
    for (window, policy), (threads, isa) in zip(
        places, itertools.cycle(THREADS_AND_ISAS), strict=False
    ):
        monkeypatch.setenv("STRONGHOLD_ISA", isa)
        section = {**window, "activations": policy, "cpu_threads": threads}
        settings = config(
            accumulation=accumulation, clipping=clipping, precision=precision, section=section
        )
        run = train_windowed(llama, steps=STEPS, settings=settings)
        assert_identical(run, expected)
        assert run.norms == expected.norms


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_window_policy_threads_and_isa_never_change_a_bit(
    clipping: float, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(PLACES, 1, clipping, precision, monkeypatch)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_micro_batches_add_up_as_without_a_window(
    clipping: float, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(PLACES[::5], 4, clipping, precision, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_micro_batches_add_up_in_every_place(
    clipping: float, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(PLACES, 4, clipping, precision, monkeypatch)


@pytest.mark.parametrize("seed", range(3))
def test_jitter_never_changes_a_bit(seed: int) -> None:
    expected = plain(1, 0.5, "bf16")
    section = {
        "window": 2,
        "activations": POLICIES[seed],
        "emulated": {"jitter_s": 0.002, "seed": seed},
    }
    settings = config(clipping=0.5, precision="bf16", section=section)
    assert_identical(train_windowed(llama, steps=STEPS, settings=settings), expected)


def test_weights_that_are_not_contiguous_are_said_and_trained_as_contiguous(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def transposed() -> Any:
        model, make_batch = llama()
        for layer in model.model.layers:
            weight = layer.mlp.up_proj.weight
            weight.data = weight.data.t().contiguous().t()
        return model, make_batch

    settings = config(section={"window": 1, "activations": "keep"})
    with caplog.at_level(logging.WARNING, "stronghold"):
        run = train_windowed(transposed, steps=4, settings=settings)
    said = [record.message for record in caplog.records if "contiguous" in record.message]
    assert len(said) == 1
    assert "model.layers.0.mlp.up_proj.weight and 4 more" in said[0]
    assert_identical(run, train_plain(llama, steps=4))
