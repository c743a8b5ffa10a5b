"""Laws of weights that a model reads by other ways than a call of their module: they are those of
the last step, or the step is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stronghold.errors import ConfigError
from tests.models import token_batch
from tests.models.base import cross_entropy
from tests.support.pairs import pairs
from tests.support.twin import Twin, twin

SECTIONS: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1},
    "slow": {"window": 2, "emulated": {"jitter_s": 0.01, "seed": 1}},
    "recompute": {"window": 2, "activations": "recompute"},
    "updated on the gpu": {"resident_layers": 1, "resident_updates": "gpu"},
}


@contextmanager
def below_python() -> Iterator[None]:
    """As an extension in C++ reads a tensor: no parameter is asked."""
    with torch._C.DisableTorchFunctionSubclass():
        yield


def test_a_head_that_is_read_below_python_is_refused_once() -> None:
    with twin("fused_loss", section=SECTIONS["slow"]) as both:
        both.model.fused = both.plain.fused = False
        for step in range(4):
            both.train(step)
        both.model.fused = both.plain.fused = True
        with (
            below_python(),
            pytest.raises(ConfigError, match=r"head\.weight was read without a call"),
        ):
            both.engine.backward(both.on(4)(both.engine))
        for step in range(4, 8):
            both.train(step)


@pytest.mark.parametrize("head", ["called", "read", "read below python"])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_part_of_the_model_may_be_called_by_itself(section: str, head: str) -> None:
    """The model's own forward never runs: not its parameters, and not the head, are old."""

    def objective(seed: int) -> Any:
        batch = token_batch(seed)

        def loss(model: Any) -> Tensor:
            model = getattr(model, "module", model)
            hidden = model.encode(batch["input_ids"])
            if head == "called":
                return cross_entropy(model.head(hidden), batch["labels"])
            with below_python() if head == "read below python" else nullcontext():
                return cross_entropy(F.linear(hidden, model.head.weight), batch["labels"])

        return loss

    with twin("fused_loss", section=SECTIONS[section]) as both:
        for step in range(4):
            both.backward(objective(step))
            both.step()
            with torch.no_grad():
                assert torch.equal(objective(9)(both.engine), objective(9)(both.plain))


# -- the weights of blocks, outside of their calls -------------------------------------------------
PLACES: dict[str, dict[str, Any]] = {
    **SECTIONS,
    "slow updates": {"window": 2, "emulated": {"update_gbps": 0.02}},
    "offload": {"window": 1, "activations": "offload"},
    "resident": {"resident_layers": "all", "resident_updates": "host"},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
}


def parts_of_blocks(model: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    for block in model.blocks:
        x = x + block.attention(block.norm1(x))
        x = x + block.mlp(block.norm2(x))
    return x


def forwards_of_blocks(model: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    for block in model.blocks:
        x = block.forward(x)
    return x


def a_penalty_before(model: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    penalty = sum(block.mlp.up.weight.square().sum() for block in model.blocks)
    for block in model.blocks:
        x = block(x)
    return x + 1e-3 * penalty


def a_penalty_after(model: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x + 1e-3 * sum(p.abs().sum() for p in model.blocks.parameters())


def another_blocks_weight(model: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    for block, other in zip(model.blocks, (*model.blocks[1:], model.blocks[0]), strict=True):
        x = block(x) * other.norm1.weight.detach()
    return F.linear(x, model.blocks[0].attention.out.weight)


def called_and_in_parts(model: Any, x: Tensor, input_ids: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x) + block.mlp(x)
    return x


UPDATES: dict[str, dict[str, Any]] = {
    "early updates": {"clipping": 0.0, "early": "all"},
    "gated updates": {"clipping": 1.0},
}
RUNS = [
    parts_of_blocks,
    forwards_of_blocks,
    a_penalty_before,
    a_penalty_after,
    another_blocks_weight,
    called_and_in_parts,
]


@pytest.mark.parametrize(("place", "run", "updates"), pairs(list(PLACES), RUNS, UPDATES))
def test_weights_of_a_block_that_are_read_outside_of_its_call_are_new(
    place: str, run: Callable[[Any, Tensor, Tensor], Tensor], updates: dict[str, Any]
) -> None:
    with twin("gpt", section=PLACES[place], **updates) as both:
        for model in (both.model, both.plain):
            model.run = MethodType(run, model)  # type: ignore[assignment]
        for step in range(4):
            both.train(step)
            with torch.no_grad():
                assert torch.equal(both.on(9)(both.engine), both.on(9)(both.plain))


# -- weights that a forward writes -----------------------------------------------------------------
WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "no_grad": lambda weight: weight.clamp_(-0.1, 0.1),
    ".data": lambda weight: weight.data.clamp_(-0.1, 0.1),
    ".detach()": lambda weight: weight.detach().renorm_(2, 0, 0.5),
    "a view": lambda weight: weight.view(-1)[3:].mul_(0.9),
    "copy_": lambda weight: weight.copy_(0.5 * weight),
    "fill_diagonal_": lambda weight: weight.data.fill_diagonal_(0.0),
}
WHERE: dict[str, Callable[[Any], nn.Module]] = {
    "a block": lambda model: model.blocks[1],
    "inside a block": lambda model: model.blocks[1].mlp.up,
    "the head": lambda model: model.head,
    "before all": lambda model: model,
}


@pytest.mark.parametrize(
    ("place", "through", "where", "precision"),
    pairs(
        ["one slot", "recompute", "resident", "whole"], list(WRITES), list(WHERE), ["fp32", "bf16"]
    ),
)
def test_what_a_forward_writes_into_its_weights_counts_or_is_refused(
    place: str, through: str, where: str, precision: str
) -> None:
    """A norm that is kept, weights that are clamped: by the module itself, or by a hook."""
    section = {"activations": "keep", **PLACES[place]}

    def write(module: Any, _: Any) -> None:
        for weight in (p for p in module.parameters() if p.ndim == 2):
            with torch.no_grad():
                WRITES[through](weight)

    both = Twin("gpt", section=section, precision=precision)
    hooks = [
        WHERE[where](model).register_forward_pre_hook(write) for model in (both.model, both.plain)
    ]
    # a hook before a block's forward writes the host's weights
    is_copy = where in ("inside a block", "the head") and place != "whole"
    if is_copy:
        said = r"parameters of (blocks\.1|head) in place"
        refused = pytest.raises(ConfigError, match=said)
        with refused:
            both.engine(**both.make_batch(0))
        with torch.no_grad(), refused:
            both.engine(**both.make_batch(0))
        for hook in hooks:
            hook.remove()
        both.train(0)
        both.train(1)
        both.check()
    else:
        for step in range(4):
            both.train(step)
            with torch.no_grad():
                assert torch.equal(both.on(9)(both.engine), both.on(9)(both.plain))
        both.check()
    both.engine.destroy()


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("when", ["in place", "by a step"])
def test_a_graph_whose_weights_were_written_since_is_refused(activations: str, when: str) -> None:
    """As autograd does."""
    both = Twin("gpt", section={"window": 1, "activations": activations})
    loss = both.on(0)(both.engine)
    if when == "in place":
        with torch.no_grad():
            both.model.blocks[1].mlp.up.weight.mul_(0.5)
    else:
        both.engine.backward(both.on(1)(both.engine))
        both.engine.step()
    with pytest.raises(ConfigError, match=r"written since"):
        both.engine.backward(loss)
    both.engine.destroy()
