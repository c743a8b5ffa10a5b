"""A block that is recomputed computes what it computed, or is refused.

The oracle of programs draws what blocks write into their arguments, count and sample
(`tests.models.drawn`). The engine restores arguments, buffers and torch's generators, as torch's
checkpoint does. It refuses a block whose second run depends on something else.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from stronghold.errors import ConfigError
from tests.models import HIDDEN, MODELS, Block, Decoder, loss_of, token_batch
from tests.models.drawn import KINDS, model_of_kind
from tests.support.training import (
    Run,
    assert_identical,
    config,
    initialized,
    train_plain,
    train_windowed,
)

SECTION = {"window": 2, "activations": "recompute"}
RUNS_AGAIN = r"blocks\.\d: .*runs? again in backward.*stronghold\.activations"


def check(factory: Callable[[], Any], steps: int = 3) -> None:
    run = train_windowed(factory, steps=steps, settings=config(section=SECTION))
    assert_identical(run, train_plain(factory, steps=steps))


def engine_of(model: nn.Module, section: dict[str, Any] = SECTION) -> Any:
    return initialized(model, config(section=section))


def scaled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 1.5, *args[1:])


def scaled_with_names(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] * 0.5, *args[1:]), kwargs


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder([Block(dropout=0.1) for _ in range(3)])


def train(model: nn.Module, hook: Callable[[nn.Module], Any], section: Any, remove: bool) -> Run:
    """Steps with hooks that are registered after initialize; removed, they are gone in backward."""
    engine = engine_of(model, section)
    run = Run()
    torch.manual_seed(1)
    handles = hook(model)
    try:
        for step in range(3):
            loss = loss_of(engine(**token_batch(step)))
            if remove:
                for handle in handles:
                    handle.remove()
            engine.backward(loss)
            engine.step()
            run.losses.append(loss.detach().clone())
            if remove:
                handles = hook(model)
        run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    finally:
        engine.destroy()
        for handle in handles:
            handle.remove()
    return run


def on_blocks(*, with_names: bool, prepend: bool) -> Callable[[Any], list[Any]]:
    hook = scaled_with_names if with_names else scaled
    return lambda model: [
        part.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_names)
        for block in model.blocks
        for part in (block, block.mlp)
    ]


def on_all(model: nn.Module) -> list[Any]:
    """Of the block and of its parts, where the hook may change what it is given in place."""

    def hook(module: nn.Module, args: Any) -> Any:
        if isinstance(module, nn.LayerNorm):
            return scaled(module, args)
        if isinstance(module, Block):
            return ((args[0] * 1.0).mul_(1.5),)
        return None

    return [nn.modules.module.register_module_forward_pre_hook(hook)]


@pytest.mark.parametrize("remove", [False, True], ids=["stay", "gone in backward"])
@pytest.mark.parametrize(
    "hook",
    [
        on_blocks(with_names=False, prepend=True),
        on_blocks(with_names=True, prepend=True),
        on_blocks(with_names=True, prepend=False),
        on_all,
    ],
    ids=["before", "before, with names", "after", "global"],
)
def test_hooks_that_change_arguments_change_them_once(hook: Any, remove: bool) -> None:
    kept = {"window": 2, "activations": "keep"}
    expected = train(decoder(), hook, kept, remove=False)
    if remove:
        with pytest.raises(CheckpointError, match=RUNS_AGAIN):
            assert_identical(train(decoder(), hook, SECTION, remove), expected)
    else:
        assert_identical(train(decoder(), hook, SECTION, remove), expected)


REFUSED = dict.fromkeys(("python's", "numpy's", "own", "counted", "remembered", "left"), RUNS_AGAIN)
REFUSED |= {"its argument": "argument was written in place", "gradient": "takes gradients inside"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_any_kind_computes_what_it_computed(kind: str) -> None:
    """The oracle of programs draws these kinds among other blocks, in any way through a model."""

    def factory() -> Any:
        random.seed(1), np.random.seed(1)
        return model_of_kind(kind)

    if kind in REFUSED:
        with pytest.raises((RuntimeError, ConfigError), match=REFUSED[kind]):
            check(factory)
    else:
        check(factory)


# -- what a block was given ----------------------------------------------------


class WritesAfter(Decoder):
    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            given = x * 1.0
            x = block(given)
            with torch.no_grad():
                given.mul_(0.5)
        return x


def test_a_tensor_among_the_arguments_that_is_written_afterwards_is_refused() -> None:
    def factory() -> Any:
        return WritesAfter([Block() for _ in range(3)]), token_batch

    expected = r"blocks\.\d.*written in place.*stronghold\.activations"
    with pytest.raises(RuntimeError, match=expected):
        train_windowed(factory, steps=1, settings=config(section=SECTION))


# -- what it keeps by itself -----------------------------------------------------------------------


class Summing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.total)


def test_a_buffer_that_the_program_writes_before_backward_is_for_the_next_forward() -> None:
    def train(level: str) -> list[float]:
        torch.manual_seed(0)
        model = Decoder([Summing() for _ in range(2)])
        engine = engine_of(model, {"window": 1, "activations": level})
        losses = []
        for step in range(3):
            loss = loss_of(engine(**token_batch(step)))
            model.blocks[1].total.add_(1.0)
            engine.backward(loss)
            assert torch.equal(model.blocks[1].total, torch.full((HIDDEN,), step + 1.0))
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    assert train("recompute") == train("keep")


def test_a_model_in_another_mode_in_backward_is_refused() -> None:
    model = decoder()
    engine = engine_of(model)
    loss = loss_of(engine(**token_batch(0)))
    model.eval()
    with pytest.raises(CheckpointError, match=r"A different number of tensors.*or its mode"):
        engine.backward(loss)
    engine.destroy()


# -- which generators it draws from ----------------------------------------------------------------

GENERATOR = torch.Generator()


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand((), generator=GENERATOR))


def test_a_generator_behind_a_global_name_is_refused_with_the_way() -> None:
    with pytest.raises(CheckpointError, match=r"blocks\.2: .*a generator"):
        train_windowed(
            lambda: (Decoder([Drawing() for _ in range(3)]), token_batch),
            steps=1,
            settings=config(section=SECTION),
        )


class Late(Block):
    """`history` gets an item in the calls of `when`, and changes what is computed."""

    def __init__(self, when: tuple[int, ...]) -> None:
        super().__init__()
        self.when, self.history, self.step = when, [1.0], 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * sum(self.history))
        if self.step in self.when:
            self.history.append(0.5)
        return y


class Stepping(Decoder):
    """It says in which call each block is, before it calls the block."""

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            block.step += 1
            x = block(x)
        return x


@pytest.mark.parametrize("when", [(1,), (2, 4), (4,)])
def test_a_change_in_a_call_whose_values_are_compared_is_refused(when: tuple[int, ...]) -> None:
    model = Stepping([Late(when) for _ in range(3)])
    engine = engine_of(model)
    for step in range(1, 5):
        loss = loss_of(engine(**token_batch(step)))
        if step in when:
            with pytest.raises(CheckpointError, match=RUNS_AGAIN):
                engine.backward(loss)
            break
        engine.backward(loss)
        engine.step()
    engine.destroy()


def test_ordinary_blocks_are_recomputed() -> None:
    for name in ("gpt", "gpt_dropout", "llama", "torch_transformer"):
        check(MODELS[name], steps=2)


class Flagged(Block):
    """A flag is up while it runs; an end before its time leaves the flag up."""

    def __init__(self) -> None:
        super().__init__()
        self.is_running = False

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.is_running else x * 0.5
        self.is_running = True
        y = super().forward(y)
        self.is_running = False
        return y


def test_a_block_that_its_second_run_leaves_changed_is_refused() -> None:
    with pytest.raises(CheckpointError, match=RUNS_AGAIN):
        check(lambda: (Decoder([Flagged() for _ in range(3)]), token_batch), steps=4)


def test_an_attribute_that_changes_before_backward_is_refused() -> None:
    model = Decoder([Late(()) for _ in range(3)])
    engine = engine_of(model)
    loss = loss_of(engine(**token_batch(0)))
    model.blocks[0].history.append(-0.25)
    with pytest.raises(CheckpointError, match=r"blocks\.0: .*again in backward"):
        engine.backward(loss)
    engine.destroy()


CALLS: list[int] = []  # no state of a block's
COUNTS: list[int] = []


class CountingInAGlobal(Block):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        COUNTS.append(0)
        return super().forward(x * (len(COUNTS) if len(COUNTS) > self.first else 1))


@pytest.mark.parametrize("first", [0, 6])
def test_a_counter_behind_a_global_name_is_refused(first: int) -> None:
    COUNTS.clear()

    def factory() -> Any:
        return Decoder([CountingInAGlobal(first) for _ in range(3)]), token_batch

    with pytest.raises(CheckpointError, match="computes other values when it runs again"):
        train_windowed(factory, steps=4, settings=config(section=SECTION))


SEEDS: list[int] = []


class WithUnwrittenSeeds(torch.autograd.Function):
    """Saves what torch's fused attention on a GPU saves without dropout: a seed and an offset that
    no kernel has written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        SEEDS.append(len(SEEDS))
        seed = torch.tensor(len(SEEDS))
        state = torch.tensor([len(SEEDS), 0], dtype=torch.uint64)
        ctx.save_for_backward(seed, state)
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 2
        return 2.0 * gradients[0]


class AttendingOnAGpu(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(WithUnwrittenSeeds.apply(x))  # type: ignore[no-untyped-call]


def test_seeds_that_no_kernel_has_written_may_differ() -> None:
    SEEDS.clear()

    def factory() -> Any:
        return Decoder([AttendingOnAGpu() for _ in range(3)]), token_batch

    check(factory, steps=3)
    assert len(SEEDS) == 3 * 3 * (1 + 2)  # steps, blocks, plain and twice in the engine


class Otherwise(Block):
    """What it saves when it is run again is not what it saved."""

    def __init__(self, how: str, place: int) -> None:
        super().__init__()
        self.how, self.place = how, place

    def forward(self, hidden: Tensor) -> Tensor:
        again = self.place in CALLS
        CALLS.append(self.place)
        out = super().forward(hidden)
        if not again:
            return out + torch.sin(hidden) + torch.cos(hidden)
        return out if self.how == "fewer" else out + torch.sin(hidden) + torch.cos(hidden.sum(0))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("fewer", r"Number of tensors .* recomputation: \d+"),
        ("other shapes", r"blocks\.1: .*\(2 of \d+ tensors"),
    ],
)
def test_a_second_run_that_saves_other_tensors_is_refused(how: str, match: str) -> None:
    CALLS.clear()
    model = Decoder([Otherwise(how, place) for place in range(2)])
    engine = engine_of(model)
    with pytest.raises(CheckpointError, match=match):
        engine.backward(loss_of(engine(**token_batch(0))))
    engine.destroy()


def test_a_tensor_that_the_block_writes_after_it_was_saved_is_refused() -> None:
    class Writes(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            exponent = torch.exp(super().forward(hidden) * 0.1)  # it saves its result
            exponent += 1.0
            return torch.sin(exponent)

    model = Decoder([Writes() for _ in range(2)])
    engine = engine_of(model)
    with pytest.raises(RuntimeError, match="modified in place after it was saved"):
        engine.backward(loss_of(engine(**token_batch(0))))
    engine.destroy()


def test_a_block_is_run_again_once_and_as_far_as_autograd_needs_it() -> None:
    seen: list[str] = []

    class Telling(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append("begins")
            # the last that autograd saves anything of
            hidden = super().forward(hidden).sin()
            seen.append("ends")
            return hidden + 1

    train_windowed(
        lambda: (Decoder([Telling() for _ in range(3)]), token_batch),
        steps=3,
        settings=config(section=SECTION),
    )
    # The last step: its second runs are not compared.
    assert seen[-9:] == ["begins", "ends"] * 3 + ["begins"] * 3


class Surrounded(Block):
    """A block whose values depend on the contexts around its call.

    It notes the default device of each run on its class.
    """

    devices: ClassVar[list[torch.device]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.devices.append(torch.empty(1).device)
        return super().forward(hidden)


@pytest.mark.parametrize("around", ["autocast", "default device"])
def test_a_second_run_stands_where_the_first_one_stood(around: str) -> None:
    num_blocks, num_steps = 3, 3

    def train(activations: str) -> tuple[list[float], list[torch.device]]:
        torch.manual_seed(0)
        Surrounded.devices.clear()
        model = Decoder([Surrounded() for _ in range(num_blocks)])
        engine = engine_of(model, {"window": 2, "activations": activations})
        losses = []
        for step in range(num_steps):
            ids = token_batch(step)
            context: Any = torch.autocast("cpu", torch.bfloat16)
            if around == "default device":
                context = torch.device("meta")
            with context:
                loss = loss_of(engine(**ids))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses, list(Surrounded.devices)

    losses, devices = train("recompute")
    assert losses == train("keep")[0]
    assert len(devices) == 2 * num_blocks * num_steps
    expected = "meta" if around == "default device" else "cpu"
    assert {device.type for device in devices} == {expected}


class Mark:
    pass


class Node(torch.autograd.Function):
    """`alive[-1]()` is None once the graph is gone."""

    alive: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark = Mark()
        Node.alive.append(weakref.ref(ctx.mark))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        return gradients[0]


class Residual(Decoder):
    """It writes into what it gave a block, which then belongs to the block's own graph."""

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        x = Node.apply(x)
        for block in self.blocks:
            x += block(x)
        return x


def test_a_graph_without_a_backward_is_freed_at_once() -> None:
    model = Residual([Block() for _ in range(3)])
    engine = engine_of(model)
    gc.disable()
    try:
        for step in range(2):
            loss = loss_of(engine(**token_batch(step)))
            assert Node.alive[-1]() is not None
            del loss
            assert Node.alive[-1]() is None
    finally:
        gc.enable()
        engine.destroy()
