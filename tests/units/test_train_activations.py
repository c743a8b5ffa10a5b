"""Recomputation: what the two runs of a block are compared by, and attention that is computed once.
`tests/laws/test_recompute.py` has odd blocks.
"""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from stronghold.train import activations, saved_tensors
from stronghold.train.activations import (
    NUM_COMPARED,
    ROUNDING,
    AttentionOnce,
    difference,
    may_be_rounding,
    running,
    some_values,
)
from tests.models import HIDDEN, Block, Decoder, loss_of, token_batch
from tests.support.core import Core, opened, train_core
from tests.support.training import assert_identical, train_plain


# -- values that are compared ----------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(), (1,), (256,), (10_000,), (2, 8, 16), (64, 1, 3, 500)])
def test_some_values_of_a_tensor_are_few_and_from_all_of_it(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    values = some_values(tensor)
    assert min(tensor.numel(), 20) <= values.numel() <= 4 * NUM_COMPARED
    assert torch.equal(values, some_values(tensor.clone()))
    changed = tensor.clone()
    changed.view(-1)[-(tensor.numel() // 4 + 1) :] += 1.0
    assert not torch.equal(values, some_values(changed))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7),
        torch.tensor([7, 0], dtype=torch.uint64),
        torch.zeros(300, dtype=torch.uint8),
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
    ],
    ids=["seed", "seed and offset", "work space", "meta", "sparse"],
)
def test_what_no_kernel_has_written_and_what_has_no_values_is_not_compared(tensor: Tensor) -> None:
    assert some_values(tensor).numel() == 0


def test_indices_masks_and_parameters_are_compared() -> None:
    """A chunk has a plain view of a parameter in its first run, and the parameter in its second."""
    assert some_values(nn.Parameter(torch.zeros(3))).numel() == 3
    assert some_values(torch.arange(300)).numel() >= 256
    assert some_values(torch.tensor([True])).numel() == 1


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("got", "expected", "units"),
    [
        (ONES, ONES.clone(), 0.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), 0.0),
        (torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), 0.0),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), 0.0),
        (torch.tensor([1.0 + 2**-23, 1e-9]), torch.tensor([1.0, 1e-9]), 1.0),
        (torch.tensor([1.0, 2**-23]), torch.tensor([1.0, 0.0]), 1.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), math.inf),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, 2.0]), math.inf),
        (torch.tensor([0.5]), torch.tensor([0.0]), math.inf),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), math.inf),
        (torch.tensor([True]), torch.tensor([False]), math.inf),
        (ONES, torch.ones(3), math.inf),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), math.inf),
    ],
)
def test_differences_are_counted_in_units_in_the_last_place(
    got: Tensor, expected: Tensor, units: float
) -> None:
    assert difference(got, expected) == units


def test_a_gpu_may_round_otherwise_and_leave_one_tensor_unwritten() -> None:
    assert may_be_rounding([1.0, ROUNDING], [ROUNDING])
    assert may_be_rounding([0.0, math.inf], [0.0])
    assert not may_be_rounding([1.0, ROUNDING + 1], [])
    assert not may_be_rounding([], [ROUNDING + 1])


class Factored(Block):
    """Its last factor is a number of Python's, which autograd keeps in no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 + self.calls)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_block_that_differs_in_its_output_alone_is_refused(is_frozen: bool) -> None:
    with decoder(Factored, level="recompute") as core:
        core.trainer.model.blocks.requires_grad_(not is_frozen)
        loss = loss_of(core.trainer.forward(**token_batch(0)))
        with pytest.raises(CheckpointError, match=r"blocks\.2: .*\(1 of \d+ tensors have other"):
            core.trainer.backward(loss)


# -- attention once --------------------------------------------------------------------------------
class Fused(Block):
    """A block that calls attention `calls` more times."""

    def __init__(self, calls: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.calls, self.rate = calls, dropout

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            heads = x.unflatten(-1, (2, HIDDEN // 2)).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(heads, heads, heads, None, self.rate)
            x = x + mixed.transpose(1, 2).flatten(-2)
        return super().forward(x)


class Unfused(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm1(x))


@contextmanager
def decoder(block: type[Block] = Fused, *, level: str = "attention", **of: Any) -> Iterator[Core]:
    torch.manual_seed(0)
    core = Core(Decoder([block(**of) for _ in range(3)]), activations=level, window=1)
    try:
        yield core
    finally:
        core.close()


@pytest.mark.parametrize(("calls", "dropout"), [(1, 0.0), (2, 0.0), (1, 0.3)])
def test_attention_that_is_kept_changes_no_bit(calls: int, dropout: float) -> None:
    def factory() -> Any:
        torch.manual_seed(0)
        return Decoder([Fused(calls, dropout) for _ in range(3)]), token_batch

    run = train_core(factory, steps=3, activations="attention", window=1)
    assert_identical(run, train_plain(factory, steps=3))


def test_a_graph_that_is_retained_has_a_second_backward() -> None:
    gradients = {}
    for level in ("keep", "attention"):
        with decoder(level=level, calls=2) as core:
            loss = loss_of(core.trainer.forward(**token_batch(0)))
            core.trainer.backward(loss, ends_step=False, retain_graph=True)
            core.trainer.backward(loss)
            gradients[level] = core.trainer.gradients.norm()()
    assert gradients["attention"] == gradients["keep"] > 0.0


KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def kernel(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    output: Tensor = KERNEL(query, key, value)[0]
    return output


def test_each_run_gets_an_alias_of_what_is_kept() -> None:
    attention, heads = (
        AttentionOnce(saved_tensors.kept),
        torch.randn(1, 2, 4, 8, requires_grad=True),
    )
    first = attention._compute(kernel, (heads, heads, heads), {})
    assert attention.is_kept
    for _ in range(2):
        again = attention._begin_second()(kernel, (heads, heads, heads), {})
        assert again.data_ptr() == first.data_ptr()
        assert again.grad_fn is not None
        kept = attention._calls[0][0].results[0]()
        assert kept.grad_fn is None  # else the graph of a second run would live as long


def test_a_kernel_that_another_run_chooses_is_computed() -> None:
    attention, heads = (
        AttentionOnce(saved_tensors.kept),
        torch.randn(1, 2, 4, 8, requires_grad=True),
    )
    first = attention._compute(kernel, (heads, heads, heads), {})
    other = torch.ops.aten._scaled_dot_product_efficient_attention.default
    attention._calls[0][0] = attention._calls[0][0]._replace(kernel=other)
    again = attention._begin_second()(kernel, (heads, heads, heads), {})
    assert again.data_ptr() != first.data_ptr()
    assert torch.equal(again, first)


@pytest.mark.parametrize("by_name", [False, True])
def test_attention_with_dropout_is_computed_again(by_name: bool) -> None:
    """It draws from the device's generator, as no kernel of a CPU does."""
    attention, heads = AttentionOnce(saved_tensors.kept), torch.randn(1, 2, 4, 8)
    args = (heads, heads, heads)
    if by_name:
        attention._compute(lambda *a, dropout_p: kernel(*a), args, {"dropout_p": 0.1})
    else:
        attention._compute(kernel, (*args, None, 0.1), {})
    assert not attention.is_kept


def test_what_is_kept_goes_with_the_graph() -> None:
    kept: list[weakref.ref[Any]] = []
    first = activations.AttentionOnce._compute

    def noted(self: Any, *args: Any) -> Tensor:
        kept.append(weakref.ref(self))
        return first(self, *args)

    with pytest.MonkeyPatch.context() as patched, decoder() as core:
        patched.setattr(activations.AttentionOnce, "_compute", noted)
        gc.disable()
        try:
            loss = core.trainer.forward(**token_batch(0))
            assert len(kept) == 6  # and the block has one of its own
            assert all(one() is not None for one in kept)
            del loss
            assert not any(one() is not None for one in kept)
        finally:
            gc.enable()


def test_a_block_without_fused_attention_is_said_once(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    activations._say_not_kept.cache_clear()
    monkeypatch.setattr(logging.getLogger("stronghold"), "propagate", True)
    with decoder(Unfused) as core, caplog.at_level(logging.WARNING, "stronghold"):
        for number in range(2):
            core.trainer.backward(loss_of(core.trainer.forward(**token_batch(number))))
            core.trainer.step()
    said = [line for line in caplog.messages if "attention" in line]
    assert len(said) == 1
    assert said[0].startswith("Unfused: ")


def test_torchs_attention_is_replaced_while_a_model_trains() -> None:
    plain = F.scaled_dot_product_attention
    with decoder() as _, decoder() as second:
        assert F.scaled_dot_product_attention is not plain
        loss = loss_of(second.trainer.forward(**token_batch(0)))
        assert running.through is None
        second.trainer.backward(loss)
        assert running.through is None
    assert F.scaled_dot_product_attention is plain


def test_an_interrupt_leaves_attention_as_it_was() -> None:
    with decoder() as core:
        running.through = lambda plain, args, kwargs: args[0]
        core.trainer.forget()
        assert running.through is None


# -- blocks ----------------------------------------------------------------------------------------
class Counted(Block):
    """It counts its runs, and fails in run `fails`."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails, self.runs = fails, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == self.fails:
            raise RuntimeError("no room in here")
        return super().forward(x)


def test_an_error_of_the_second_run_is_the_blocks_own() -> None:
    with decoder(Counted, level="recompute", fails=2) as core:
        loss = core.trainer.forward(**token_batch(0))
        with pytest.raises(RuntimeError, match=r"^no room in here$"):
            core.trainer.backward(loss)


class Checkpointed(Decoder):
    """With checkpoints of its own around its blocks."""

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_a_block_in_a_checkpoint_of_the_program_runs_twice_as_there() -> None:
    torch.manual_seed(0)
    model = Checkpointed([Counted() for _ in range(3)])
    with opened(model, activations="recompute", window=1) as core:
        core.trainer.backward(core.trainer.forward(**token_batch(0)))
        assert [block.runs for block in model.blocks] == [2] * 3


def test_a_block_that_differs_is_refused_and_nothing_of_the_step_stays() -> None:
    class Odd(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Odd.calls += 1
            return super().forward(x * (2.0 if Odd.calls == 4 else 1.0))  # the first second run

    with decoder(Odd, level="recompute") as core:
        with pytest.raises(CheckpointError, match=r"blocks\.2: .*Odd depends on"):
            core.trainer.backward(loss_of(core.trainer.forward(**token_batch(0))))
        assert not core.trainer.is_in_step
        core.trainer.backward(loss_of(core.trainer.forward(**token_batch(0))))
        core.trainer.step()
