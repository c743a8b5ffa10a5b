"""`train_batch` and `eval_batch` are the loop by hand: the same bits, the same counters, whether
micro-batches come one after the other or, with a chunk, joined.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stronghold.engine.batches import joined
from stronghold.errors import ConfigError
from tests.laws.test_chunks import llama
from tests.models import loss_of
from tests.support.training import config, initialized

COUNT = 3
STEPS = 3


def engine_of(section: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, make_batch = llama()
    settings = config(section={"window": 2, **section}, **more)
    engine = initialized(model, settings)
    torch.manual_seed(1)
    return engine, make_batch


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_after_the_other_is_the_loop_by_hand(precision: str) -> None:
    engine, make_batch = engine_of({}, accumulation=COUNT, precision=precision)
    batches = iter([make_batch(seed) for seed in range(COUNT * STEPS)])
    losses = [engine.train_batch(batches) for _ in range(STEPS)]
    found, counters = weights_of(engine), (engine.global_steps, engine.micro_steps)
    engine.destroy()

    engine, make_batch = engine_of({}, accumulation=COUNT, precision=precision)
    for step in range(STEPS):
        total = 0.0
        for micro in range(COUNT):
            loss = loss_of(engine(**make_batch(step * COUNT + micro)))
            engine.backward(loss)
            engine.step()
            total = total + loss.detach()
        assert torch.equal(losses[step], total / COUNT)
    assert_same(found, weights_of(engine))
    assert counters == (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * COUNT)
    engine.destroy()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_joined_is_one_batch_in_chunks(precision: str) -> None:
    engine, make_batch = engine_of({"chunk": 2}, accumulation=COUNT, precision=precision)
    batches = iter([make_batch(seed) for seed in range(COUNT * STEPS)])
    fetched = []
    losses = []
    for _ in range(STEPS):
        losses.append(engine.train_batch(batches))
        fetched.append(engine.inspect().traffic.num_fetches)
    found, counters = weights_of(engine), (engine.global_steps, engine.micro_steps)
    engine.destroy()

    engine, make_batch = engine_of({"chunk": 2}, precision=precision)
    for step in range(STEPS):
        before = engine.inspect().traffic.num_fetches
        whole = joined([make_batch(step * COUNT + micro) for micro in range(COUNT)])
        loss = loss_of(engine(**whole))
        engine.backward(loss)
        engine.step()
        assert torch.equal(losses[step], loss.detach())
    assert fetched[-1] - fetched[-2] == engine.inspect().traffic.num_fetches - before
    assert_same(found, weights_of(engine))
    assert counters == (STEPS, STEPS * COUNT)
    engine.destroy()


def test_what_does_not_agree_is_not_joined() -> None:
    batch = {"x": torch.ones(2, 3), "labels": torch.tensor([[1, 2, -100], [3, 4, 5]]), "n": 4}
    assert joined([batch, batch])["labels"].shape == (4, 3)
    others: list[Any] = [
        {**batch, "x": torch.ones(2, 4)},
        {**batch, "n": 5},
        {**batch, "labels": torch.tensor([[1, 2, 3], [3, 4, 5]])},
        {**batch, "labels": torch.tensor([[-100, 2, 6], [3, 4, 5]])},  # shifted, it is not counted
        {"x": batch["x"], "labels": batch["labels"]},
        {**batch, "x": torch.ones(3, 3), "labels": torch.ones(3, 3, dtype=torch.long)},
    ]
    for other in others:
        assert joined([batch, other]) is None
    full = {"mask": torch.ones(2, 3, dtype=torch.long)}
    part = {"mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    assert joined([full, full]) is not None
    assert joined([full, part]) is None


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().sum()


def test_a_sum_over_the_batch_is_not_joined() -> None:
    engines = []
    for section in ({"chunk": 1}, {}):
        torch.manual_seed(0)
        model = Sums()
        engine = initialized(model, config(section={"window": 1, **section}, accumulation=2))
        batches = (torch.full((2, 4), 0.1 * k) for k in range(1, 5))
        losses = [engine.train_batch(batches) for _ in range(2)]
        engines.append((engine, losses))
    for one, other in zip(engines[0][1], engines[1][1], strict=True):
        torch.testing.assert_close(one, other)
    for engine, _ in engines:
        engine.destroy()


def test_evaluation_is_the_mean_without_gradients() -> None:
    engine, make_batch = engine_of({}, accumulation=COUNT)
    batches = [make_batch(seed) for seed in range(COUNT)]
    loss, logits = engine.eval_batch(iter(batches), return_logits=True)
    assert not engine.module.training
    with torch.no_grad():
        outputs = [engine(**batch) for batch in batches]
    total = outputs[0].loss + outputs[1].loss + outputs[2].loss
    assert torch.equal(loss, total / COUNT)
    assert all(torch.equal(a, b.logits) for a, b in zip(logits, outputs, strict=True))
    engine.destroy()


def test_what_cannot_be_a_step_is_refused() -> None:
    engine, make_batch = engine_of({}, accumulation=COUNT)
    before = weights_of(engine)
    with pytest.raises(StopIteration):
        engine.train_batch(iter([make_batch(0)]))
    with pytest.raises(ConfigError, match="no data"):
        engine.train_batch()
    with torch.no_grad(), pytest.raises(ConfigError, match="eval_batch"):
        engine.train_batch(iter([]))
    engine.backward(loss_of(engine(**make_batch(0))))
    engine.step()
    with pytest.raises(ConfigError, match="a step has begun"):
        engine.train_batch(iter([make_batch(k) for k in range(COUNT)]))
    assert_same(weights_of(engine), before)
    engine.destroy()
