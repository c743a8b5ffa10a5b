"""Laws of weights that a model reads by other ways than a call of their module: they are those of
the last step, or the step is refused.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stronghold.errors import ConfigError
from tests.models import token_batch
from tests.models.base import cross_entropy
from tests.twin import twin

SECTIONS: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1},
    "slow": {"window": 2, "emulated": {"jitter_s": 0.01, "seed": 1}},
    "recompute": {"window": 2, "activations": "recompute"},
    "updated on the gpu": {"resident_layers": 1, "resident_updates": "gpu"},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_head_that_evaluation_alone_calls_is_new_in_training(section: str) -> None:
    with twin("fused_loss", section=SECTIONS[section]) as both:
        for step in range(4):
            both.train(step)
            both.engine.eval(), both.plain.eval()
            with torch.no_grad():
                assert torch.equal(both.on(9)(both.engine), both.on(9)(both.plain))
            both.engine.train(), both.plain.train()


def test_a_head_that_is_read_after_steps_that_called_it_is_refused_once() -> None:
    with twin("fused_loss", section=SECTIONS["slow"]) as both:
        both.model.fused = both.plain.fused = False
        for step in range(4):
            both.train(step)
        both.model.fused = both.plain.fused = True
        with pytest.raises(ConfigError, match=r"head\.weight was read without a call"):
            both.engine.backward(both.on(4)(both.engine))
        for step in range(4, 8):
            both.train(step)


@pytest.mark.parametrize("head", ["called", "read"])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_part_of_the_model_may_be_called_by_itself(section: str, head: str) -> None:
    """The model's own forward never runs: not its parameters, and not the head, are old."""

    def objective(seed: int) -> Any:
        batch = token_batch(seed)

        def loss(model: Any) -> Tensor:
            model = getattr(model, "module", model)
            hidden = model.encode(batch["input_ids"])
            direct = F.linear(hidden, model.head.weight)
            return cross_entropy(
                model.head(hidden) if head == "called" else direct, batch["labels"]
            )

        return loss

    with twin("fused_loss", section=SECTIONS[section]) as both:
        for step in range(4):
            both.backward(objective(step))
            both.step()
            with torch.no_grad():
                assert torch.equal(objective(9)(both.engine), objective(9)(both.plain))


@pytest.mark.xfail(
    strict=True, reason="a forward that writes into weights writes into a slot: it is lost"
)
@pytest.mark.parametrize("through", ["no_grad", ".data"])
def test_what_a_forward_writes_into_its_weights_counts_or_is_refused(through: str) -> None:
    def write(module: Any, _: Any) -> None:
        with torch.no_grad():
            weight = module.mlp.up.weight
            (weight if through == "no_grad" else weight.data).clamp_(-0.05, 0.05)

    with twin("gpt", section={"window": 1, "activations": "keep"}) as both:
        for model in (both.model, both.plain):
            model.blocks[1].register_forward_pre_hook(write)
        for step in range(3):
            try:
                both.train(step)
            except ConfigError:
                both.plain = both.model
                return


@pytest.mark.xfail(
    strict=True, reason="a block's weights are waited for in the block's own call alone"
)
def test_weights_of_a_block_that_are_read_outside_of_its_call_are_new() -> None:
    def run(model: Any, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in model.blocks:
            x = x + block.attention(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        return x

    with twin("gpt", section={"window": 2, "emulated": {"update_gbps": 0.02}}) as both:
        for model in (both.model, both.plain):
            model.run = MethodType(run, model)
        for step in range(6):
            both.train(step)
