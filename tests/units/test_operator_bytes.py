"""Laws of the bytes that operators move: what one reads and writes, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stronghold.model.operator_bytes import OperatorBytes

ROWS, WIDTH, VOCAB = 17, 15, 4097
EACH = 4  # bytes of an fp32 number
MATRIX = ROWS * WIDTH * EACH
IDS = ROWS * 8


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def moved(run: Callable[..., Any], *given: Tensor) -> int:
    with OperatorBytes() as counted:
        run(*given)
    return counted.total


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


def test_products_and_attention_are_not_counted() -> None:
    query = empty(1, 2, ROWS, 8)
    assert moved(lambda: X @ empty(WIDTH, 3)) == 0
    assert moved(lambda: F.linear(X, empty(3, WIDTH), empty(3))) == 0
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    half = query.to(torch.bfloat16)
    assert moved(lambda: attend(half, half, half, 0.0, True)) == 0


def test_a_table_is_read_where_it_is_looked_up() -> None:
    table = empty(VOCAB, WIDTH)
    assert moved(lambda: F.embedding(LONG, table)) == IDS + 2 * MATRIX
    assert moved(lambda: table[LONG]) == IDS + 2 * MATRIX


def test_a_scatter_in_place_touches_what_it_adds() -> None:
    sums, column = empty(ROWS, VOCAB), LONG[:, None]
    ones = empty(ROWS, 1)
    assert moved(lambda: sums.scatter_add_(1, column, ones)) == IDS + 3 * ROWS * EACH
