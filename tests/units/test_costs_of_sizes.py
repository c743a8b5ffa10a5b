"""Laws of a GPT that is named by its sizes: its parameters, its layout and its costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config

from stronghold.errors import ConfigError
from stronghold.model.costs import trace_costs
from stronghold.model.layout import layout
from stronghold.model.partition import partition
from stronghold.tools.estimate.model import from_sizes
from tests.units.test_costs import without_passing


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "vocab", "seq"),
    [(1, 16, 1, 17, 1), (3, 48, 4, 1001, 33), (32, 2048, 16, 50304, 1024)],
)
def test_parameters_follow_the_formula(
    layers: int, hidden: int, heads: int, vocab: int, seq: int
) -> None:
    sizes = from_sizes(layers, hidden, heads, vocab, seq).layout
    l, h, v, s = layers, hidden, vocab, seq  # noqa: E741
    assert sizes.num_parameters == l * (12 * h * h + 13 * h) + v * h + s * h + 2 * h


def test_the_layout_is_that_of_gpt2() -> None:
    config = GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=1001, n_positions=33)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert from_sizes(3, 48, 4, 1001, 33).layout == layout(partition(model))


class ShapedBlock(nn.Module):
    """The block of a GPT with fused attention, one operator for GELU and no dropout."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, 4 * hidden
        self.ln_1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.ln_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        parts = self.qkv(self.ln_1(x)).view(batch, seq, 3 * self.heads, -1)
        q, k, v = parts.transpose(1, 2).split(self.heads, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))
        y = self.ln_2(x)
        return x + self.down(F.gelu(self.up(y)))


class ShapedModel(nn.Module):
    def __init__(
        self, layers: int, hidden: int, vocab: int, seq: int, blocks: list[ShapedBlock]
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, hidden)
        self.wpe = nn.Embedding(seq, hidden)
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device="meta"))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_costs_are_those_of_an_equal_model(dtype: str) -> None:
    """Of blocks and the last norm to the byte. The head keeps the shifted labels beside its own."""
    tokens = 2 * 33
    gpt = from_sizes(3, 64, 4, 101, 40)
    with torch.device("meta"):
        blocks = [ShapedBlock(64, 4) for _ in range(3)]
        model = ShapedModel(3, 64, 101, 40, blocks)
    layers = partition(model)
    shape = layout(layers)
    assert [layer.numel for layer in gpt.layout.layers] == [layer.numel for layer in shape.layers]
    assert gpt.layout.num_parameters == shape.num_parameters
    costs = without_passing(gpt.costs_of(2, 33, dtype))
    expected = without_passing(trace_costs(model, layers, batch=2, seq=33, dtype=dtype))
    assert costs.layers[2:] == expected.layers[2:]
    head, expected_head = costs.layers[0], expected.layers[0]
    assert head.forward_flops == expected_head.forward_flops
    assert head.saved_bytes == expected_head.saved_bytes + 8 * tokens
    assert head.operator_bytes == pytest.approx(expected_head.operator_bytes, rel=0.05)
    positions, expected_positions = costs.layers[1], expected.layers[1]
    assert positions.saved_bytes == expected_positions.saved_bytes
    assert positions.operator_bytes == pytest.approx(expected_positions.operator_bytes, rel=0.15)


def test_wide_logits_are_counted_in_parts() -> None:
    """As the engine computes them by default: they are never whole."""
    tokens, vocab = 8 * 1024, 50304
    head = from_sizes(1, 64, 4, vocab, 1024).costs_of(8, 1024, "bf16").layers[0]
    assert head.saved_bytes < 2 * tokens * vocab / 10
    assert head.passing_bytes < 4 * tokens * vocab


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_head_has_twice_its_fp32_logits_in_passing(dtype: str) -> None:
    """Where the vocabulary is much wider than the model."""
    costs_of = from_sizes(2, 64, 4, 8000, 64).costs_of
    with torch.device("meta"):
        blocks = [ShapedBlock(64, 4) for _ in range(2)]
        model = ShapedModel(2, 64, 8000, 64, blocks)
    traced = trace_costs(model, partition(model), batch=4, seq=64, dtype=dtype)
    logits = 4 * 64 * 8000 * 4
    for costs in (traced, costs_of(4, 64, dtype)):
        assert costs.layers[0].passing_bytes == pytest.approx(2 * logits, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 64, 4, 100, 8), "--layers: got 0"),
        ((2, 64, 5, 100, 8), r"--heads: got 5, expected a divisor of --hidden \(64\)"),
    ],
)
def test_sizes_that_do_not_fit_together_are_named(
    sizes: tuple[int, int, int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_sizes(*sizes)
