"""Shapes: a GPT from its sizes alone, without a model.

Owns the closed formulas of the standard decoder: learned positions, norms before attention and MLP,
biases everywhere, the head tied to the embedding. Its layout is the one that `layout` gives for
GPT-2 of the same sizes. Pure numbers, but for the layout's rules; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stronghold.errors import ConfigError
from stronghold.model.costs import DTYPES, LayerCost, ModelCosts
from stronghold.model.layout import ModelLayout, ParameterShape, layer_layout
from stronghold.model.logits import part_of

Shapes = dict[str, tuple[int, ...]]
CostsOf = Callable[[int, int, str], ModelCosts]  # batch, seq, dtype


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


def transformer_shape(
    layers: int, hidden: int, heads: int, vocab: int, seq: int
) -> tuple[ModelLayout, CostsOf]:
    """The layout of a GPT, and its costs as a function of batch, seq and dtype ("bf16", ...). `seq`
    is the length of the table of positions. The parameters are l (12 h^2 + 13 h) + v h + s h + 2 h,
    the count that Megatron-LM quotes. The costs are those of fused attention and one operator for
    GELU, in training without dropout, with a cross-entropy over fp32 logits. ConfigError, with the
    option's name, for sizes that do not fit together."""
    for name, value in (
        ("--layers", layers),
        ("--hidden", hidden),
        ("--heads", heads),
        ("--vocab", vocab),
        ("--seq", seq),
    ):
        if value < 1:
            raise ConfigError(f"{name}: got {value}, expected at least 1")
    if hidden % heads:
        raise ConfigError(
            f"--heads: got {heads}, expected a divisor of --hidden ({hidden}): every head has the "
            "same width"
        )
    sizes = _Sizes(layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq)
    return _layout(sizes), lambda batch, seq, dtype: _costs(sizes, batch, seq, dtype)


def _layout(sizes: _Sizes) -> ModelLayout:
    h = sizes.hidden
    rows: list[tuple[str, Shapes, bool]] = [
        ("transformer.wte", {"weight": (sizes.vocab, h)}, False),
        ("transformer.wpe", {"weight": (sizes.seq, h)}, False),
        *((f"transformer.h.{index}", _block(sizes), True) for index in range(sizes.layers)),
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


def _block(sizes: _Sizes) -> Shapes:
    h, inner = sizes.hidden, sizes.inner
    return {
        **_norm("ln_1", h),
        **_product("attn.c_attn", h, 3 * h),
        **_product("attn.c_proj", h, h),
        **_norm("ln_2", h),
        **_product("mlp.c_fc", h, inner),
        **_product("mlp.c_proj", inner, h),
    }


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _product(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def _costs(sizes: _Sizes, batch: int, seq: int, dtype: str) -> ModelCosts:
    if not 1 <= seq <= sizes.seq:
        raise ConfigError(f"--seq: got {seq}, expected 1 to {sizes.seq}, the model's positions")
    if batch < 1:
        raise ConfigError(f"--batch: got {batch}, expected at least 1")
    tokens, h, each = batch * seq, sizes.hidden, DTYPES[dtype].itemsize
    row = tokens * h * each  # one activation of the hidden size
    statistics = 2 * tokens * 4  # of a norm: mean and reciprocal deviation, fp32
    block = LayerCost(
        forward_flops=_block_flops(sizes, tokens, seq),
        saved_bytes=_block_saved(sizes, batch, seq, dtype),
        boundary_bytes=row,
        attention_flops=4.0 * tokens * seq * h,
        attention_bytes=row + _statistics(sizes, batch, seq, dtype),
    )
    head = _head(sizes, tokens, each)
    positions = LayerCost(forward_flops=0.0, saved_bytes=seq * 8, boundary_bytes=0)
    norm = LayerCost(forward_flops=0.0, saved_bytes=row + statistics, boundary_bytes=0)
    return ModelCosts(layers=(head, positions, *(block,) * sizes.layers, norm), dtype=dtype)


def _head(sizes: _Sizes, tokens: int, each: int) -> LayerCost:
    """Of head and loss; as large as they are by default, logits are computed in parts."""
    row, flops = tokens * sizes.hidden * each, 2.0 * tokens * sizes.hidden * sizes.vocab
    part = part_of(tokens, sizes.vocab, None)
    if part:
        return LayerCost(
            forward_flops=flops * 4 / 3,  # [Note: four products] of `logits`; three are assumed
            # The ids, which are the labels too; the last norm's output and its gradient.
            saved_bytes=tokens * 8 + 2 * row + 4,
            boundary_bytes=0,
            # Of a part the logits, and where they are not fp32 their fp32 copy.
            passing_bytes=part * sizes.vocab * (4 + (each if each < 4 else 0)),
        )
    return LayerCost(
        forward_flops=flops,
        # The ids, which are the labels too; the last norm's output; the loss's fp32 softmax and its
        # sum of weights.
        saved_bytes=tokens * 8 + row + tokens * sizes.vocab * 4 + 4,
        boundary_bytes=0,
        # In backward the gradients of the softmax and of its logarithm, both fp32.
        passing_bytes=2 * tokens * sizes.vocab * 4,
    )


def _block_flops(sizes: _Sizes, tokens: int, seq: int) -> float:
    """Two per multiplication: the matrices, and q k^T and its product with v over all pairs."""
    h = sizes.hidden
    return 2.0 * tokens * (4 * h * h + 2 * h * sizes.inner) + 4.0 * tokens * seq * h


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
