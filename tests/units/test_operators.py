"""Laws of the counts of operators: FLOPs, and what one reads and writes, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stronghold.model.operators import Counts, GpuOperators, OperatorCounts

ROWS, WIDTH, VOCAB = 17, 15, 4097
EACH = 4  # bytes of an fp32 number
MATRIX = ROWS * WIDTH * EACH
IDS = ROWS * 8


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def moved(run: Callable[..., Any], *given: Tensor) -> int:
    return int(counts_of(run, *given).moved_bytes)


def counts_of(run: Callable[..., Any], *given: Tensor) -> Counts:
    with OperatorCounts() as counts:
        run(*given)
    return counts.take()


X = empty(ROWS, WIDTH)
LONG = empty(ROWS, dtype=torch.long)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: X + empty(ROWS, WIDTH), 3 * MATRIX),
        (lambda: X + X, 2 * MATRIX),  # one tensor is read once
        (lambda: X + empty(WIDTH), 2 * MATRIX + WIDTH * EACH),
        (lambda: X + empty(1, WIDTH).expand(ROWS, WIDTH), 2 * MATRIX + WIDTH * EACH),
        (lambda: X.add_(1.0), 2 * MATRIX),
        (lambda: torch.sub(X, 1.0, out=empty(ROWS, WIDTH)), 2 * MATRIX),
        (lambda: X.to(torch.bfloat16), MATRIX + MATRIX // 2),
        (lambda: X.sum(), MATRIX + EACH),
        (lambda: F.layer_norm(X, (WIDTH,)), 2 * MATRIX + 2 * ROWS * EACH),
        (lambda: torch.cat([X, X]), MATRIX + 2 * MATRIX),
        (lambda: X.clone(), 2 * MATRIX),
        (lambda: X.t().contiguous(), 2 * MATRIX),
        # old values are not read
        (lambda: X.copy_(empty(WIDTH)), MATRIX + WIDTH * EACH),
        (lambda: X.zero_(), MATRIX),
        (lambda: torch.zeros_like(X), MATRIX),
        (lambda: empty(0, WIDTH) + 1.0, 0),
    ],
)
def test_an_operator_reads_its_inputs_once_and_writes_its_results(
    run: Callable[[], Any], expected: int
) -> None:
    assert moved(run) == expected


@pytest.mark.parametrize(
    "run",
    [
        lambda: X.view(-1),
        lambda: X.t(),
        lambda: X.split(3),
        lambda: X[1:].expand(2, ROWS - 1, WIDTH).detach(),
        lambda: torch.empty_like(X),
    ],
)
def test_views_and_memory_that_is_not_written_cost_nothing(run: Callable[[], Any]) -> None:
    assert moved(run) == 0


def test_products_count_flops_and_no_bytes() -> None:
    product = Counts(product_flops=2 * ROWS * WIDTH * 3)
    assert counts_of(lambda: X @ empty(WIDTH, 3)) == product
    assert counts_of(lambda: F.linear(X, empty(3, WIDTH), empty(3))) == product


def test_a_kernel_of_attention_counts_where_it_is_called_alone() -> None:
    half = empty(1, 2, ROWS, 8, dtype=torch.bfloat16)
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    assert counts_of(lambda: attend(half, half, half, 0.0, True)) == Counts()
    counts = OperatorCounts()
    with counts, GpuOperators(counts):
        output = F.scaled_dot_product_attention(half, half, half, is_causal=True)
    assert output.shape == half.shape
    flops = 2 * 2 * 2 * ROWS * ROWS * 8
    results = 2 * ROWS * (8 * 2 + 4)  # and the seed and offset of dropout
    found = counts.take()
    assert (found.attention_flops, found.causal_flops) == (flops, flops)
    assert results <= found.attention_bytes <= results + 32
    assert counts.take() == Counts()
    assert (found + found).attention_flops == 2 * flops


def test_flash_attention_pads_heads_to_a_multiple_of_eight() -> None:
    odd = empty(1, 2, ROWS, 12, dtype=torch.bfloat16)
    counts = OperatorCounts()
    with counts, GpuOperators(counts):
        assert F.scaled_dot_product_attention(odd, odd, odd).shape == odd.shape
    assert counts.take().attention_flops == 2 * 2 * 2 * ROWS * ROWS * 16


def test_a_table_is_read_where_it_is_looked_up() -> None:
    table = empty(VOCAB, WIDTH)
    assert moved(lambda: F.embedding(LONG, table)) == IDS + 2 * MATRIX
    assert moved(lambda: table[LONG]) == IDS + 2 * MATRIX


def test_a_scatter_in_place_touches_what_it_adds() -> None:
    sums, column = empty(ROWS, VOCAB), LONG[:, None]
    ones = empty(ROWS, 1)
    assert moved(lambda: sums.scatter_add_(1, column, ones)) == IDS + 3 * ROWS * EACH
