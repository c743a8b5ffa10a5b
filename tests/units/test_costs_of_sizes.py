"""Laws of a GPT that is named by its sizes: its parameters, its layout and its costs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from stronghold.errors import ConfigError
from stronghold.tools.estimate.model import from_sizes
from tests.support.layouts import laid_out


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "vocab", "seq"), [(1, 16, 1, 17, 1), (32, 2048, 16, 50304, 1024)]
)
def test_parameters_follow_megatrons_formula(
    layers: int, hidden: int, heads: int, vocab: int, seq: int
) -> None:
    sizes = from_sizes(layers, hidden, heads, vocab, seq).layout
    per_block = 12 * hidden * hidden + 13 * hidden
    outside = (vocab + seq + 2) * hidden
    assert sizes.num_parameters == layers * per_block + outside


def test_the_layout_is_that_of_gpt2() -> None:
    config = GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=1001, n_positions=33)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert from_sizes(3, 48, 4, 1001, 33).layout == laid_out(model)


def test_wide_logits_are_counted_in_parts() -> None:
    """As the engine computes them by default: they are never whole."""
    tokens, vocab = 8 * 1024, 50304
    head = from_sizes(1, 64, 4, vocab, 1024).costs_of(8, 1024, "bf16").layers[0]
    assert head.saved_bytes < 2 * tokens * vocab / 10
    assert head.passing_bytes < 4 * tokens * vocab


def test_sizes_that_do_not_fit_together_are_named() -> None:
    with pytest.raises(ConfigError, match=r"--heads: got 5, expected a divisor of --hidden \(64\)"):
        from_sizes(2, 64, 5, 100, 8)
