"""Hooks of `stronghold.train`: what a program may do with the model, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stronghold.errors import ConfigError
from stronghold.plan.cost import LEVELS
from stronghold.private import saved_tensor_hooks
from tests.models import MODELS, Block, Decoder, loss_of, token_batch
from tests.models.base import cross_entropy
from tests.support.core import Core, opened, train_core
from tests.support.insides import offload_small
from tests.support.training import assert_identical, train_plain

WRITTEN = "written since|modified by an|modified in place"


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    offload_small(monkeypatch)


@contextmanager
def streaming(model: nn.Module | None = None, **settings: Any) -> Iterator[Core]:
    with opened(model or MODELS["gpt"]()[0], **{"window": 1, **settings}) as core:
        yield core


def step(core: Core, number: int) -> torch.Tensor:
    loss = core.trainer.forward(**token_batch(number))
    core.trainer.backward(loss)
    core.trainer.step(clipping=1.0)
    return loss.detach()


# -- copies ----------------------------------------------------------------------------------------
def reloaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("way", [copy.deepcopy, reloaded])
def test_a_copy_of_the_model_is_a_plain_model(way: Callable[[nn.Module], nn.Module]) -> None:
    with streaming() as core:
        step(core, 0)
        core.trainer.synchronize()
        model = core.trainer.model
        other = way(model)
        with torch.no_grad():
            expected = core.trainer.forward(**token_batch(1))
        num_fetches = core.trainer.weights.num_fetches
        loss = other(**token_batch(1))
        loss.backward()
        assert torch.equal(loss, expected)
        assert core.trainer.weights.num_fetches == num_fetches
        assert all(p.grad is not None for p in other.parameters())
        assert all(p.grad is None for p in model.parameters())


def test_frameworks_read_the_signature_of_the_models_own_forward() -> None:
    model, _ = MODELS["gpt"]()
    expected = inspect.signature(model.forward)
    with streaming(model):
        assert inspect.signature(model.forward) == expected
        assert inspect.signature(model.blocks[0].forward).parameters.keys() == {"x"}


# -- hooks of the program --------------------------------------------------------------------------
def test_hooks_of_the_program_see_and_change_gradients() -> None:
    """Whether they were registered before or after ours, and by a forward, too."""
    seen: list[torch.Tensor] = []

    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(2.0)

    model, plain = MODELS["gpt"]()[0], MODELS["gpt"]()[0]
    model.norm.weight.register_post_accumulate_grad_hook(double)
    with streaming(model) as core:
        model.blocks[1].mlp.up.weight.register_post_accumulate_grad_hook(double)
        core.trainer.backward(core.trainer.forward(**token_batch(0)))
        plain(**token_batch(0)).backward()
        core.device.finish()
        assert torch.equal(seen[0], plain.norm.weight.grad)
        assert torch.equal(seen[1], plain.blocks[1].mlp.up.weight.grad)
        for name in ("norm.weight", "blocks.1.mlp.up.weight"):
            layer = next(layer for layer in core.layers if name in layer.names)
            gradient = core.trainer.arrays.gradient(layer, layer.names.index(name))
            assert torch.equal(gradient, 2.0 * plain.get_parameter(name).grad.flatten())


def test_gradients_that_the_optimizer_does_not_own_are_dropped() -> None:
    model, _ = MODELS["gpt"]()
    trained = [p for name, p in model.named_parameters() if "norm" not in name]
    with streaming(model, groups=trained) as core:
        before = model.norm.weight.detach().clone()
        step(core, 0)
        core.trainer.synchronize()
        assert torch.equal(model.norm.weight, before)
        assert model.norm.weight.grad is None


def test_a_frozen_parameter_that_is_unfrozen_is_refused() -> None:
    model, _ = MODELS["gpt"]()
    model.blocks[1].requires_grad_(False)
    with streaming(model) as core:
        step(core, 0)
        model.blocks[1].norm1.weight.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"blocks.1.norm1.weight was frozen"):
            core.trainer.forward(**token_batch(1))


# -- saved tensors ---------------------------------------------------------------------------------
@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_without_a_backward_is_freed(level: str) -> None:
    with streaming(activations=level) as core:
        marks: list[Any] = []

        def mark(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            def hook(gradient: torch.Tensor) -> None:
                pass

            output.register_hook(hook)
            marks.append(weakref.ref(hook))

        handle = core.trainer.model.blocks[1].mlp.register_forward_hook(mark)
        loss = core.trainer.forward(**token_batch(0))
        handle.remove()
        assert level != "keep" or marks[0]() is not None
        del loss
        gc.disable()  # nothing waits for a collection
        try:
            assert marks[0]() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_that_is_older_than_the_step_is_refused(level: str) -> None:
    with streaming(activations=level, resident_layers=1) as core:
        loss = core.trainer.forward(**token_batch(0))
        step(core, 1)
        with pytest.raises((ConfigError, RuntimeError), match=WRITTEN):
            core.trainer.backward(loss)
        step(core, 2)


def test_an_old_graph_is_refused_where_a_weight_was_read_without_a_call() -> None:
    """Autograd has the weight itself there, and no handle of it."""

    class Fused(Decoder):
        def __init__(self) -> None:
            super().__init__([Block() for _ in range(3)])
            del self.positions  # so the call of the model is no call of a layer

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.norm(self.run(self.embedding(input_ids), input_ids))
            return cross_entropy(F.linear(hidden, self.head.weight), labels)

    model = Fused()
    with streaming(model, groups=[model.head.weight, model.embedding.weight]) as core:
        loss = core.trainer.forward(**token_batch(0))
        step(core, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            core.trainer.backward(loss)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("updates", ["host", "gpu"])
def test_a_write_between_forward_and_backward_is_refused(level: str, updates: str) -> None:
    with streaming(activations=level, resident_layers=1, resident_updates=updates) as core:
        for name in ("blocks.0.mlp.down.weight", "blocks.1.mlp.down.weight"):
            loss = core.trainer.forward(**token_batch(0))
            core.trainer.synchronize()
            with torch.no_grad():
                core.trainer.model.get_parameter(name).mul_(1.0)
            with pytest.raises((ConfigError, RuntimeError), match=WRITTEN):
                core.trainer.backward(loss)


def test_a_graph_of_the_graph_is_refused() -> None:
    with streaming() as core:
        loss = core.trainer.forward(**token_batch(0))
        with pytest.raises(ConfigError, match="create_graph"):
            loss.backward(create_graph=True)
        step(core, 1)


def test_a_saved_tensor_that_was_written_is_refused_as_by_autograd() -> None:
    class Writes(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.mlp(x).exp()
            y += x  # backward needs the exponential
            return y

    with streaming(Decoder([Writes() for _ in range(3)])) as core:
        loss = core.trainer.forward(**token_batch(0))
        with pytest.raises(RuntimeError, match="modified in place after it was saved"):
            core.trainer.backward(loss)


def test_a_forward_that_writes_into_its_parameters_is_refused() -> None:
    class Clamps(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.norm1.weight.clamp_(max=0.5)
            return super().forward(x)

    refused = pytest.raises(ConfigError, match=r"a forward wrote into the parameters of blocks.1")
    with streaming(Decoder([Block(), Clamps(), Block()]), layers="blocks") as core, refused:
        core.trainer.forward(**token_batch(0))


def test_a_second_run_that_would_write_again_is_refused() -> None:
    """Where the device has the weights themselves, a forward may write them, once."""

    def shrink(module: Any, _: Any) -> None:
        module.weight.data.mul_(0.9)

    model, make_batch = MODELS["gpt"]()
    hook = model.blocks[1].mlp.up.register_forward_pre_hook(shrink)
    there = {"resident_layers": 3, "resident_updates": "gpu"}
    with opened(model, activations="keep", **there) as core:
        core.trainer.backward(loss_of(core.trainer.forward(**make_batch(0))))
    with (
        opened(model, activations="recompute", **there) as core,
        pytest.raises(ConfigError, match=r"wrote .* of blocks\.1 .* again in backward: set"),
    ):
        core.trainer.forward(**make_batch(0))
    hook.remove()


class Counting(Block):
    """Counts its batches, and shifts by a mean that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        return super().forward(x - self.mean / self.count)


def test_a_second_run_gets_the_buffers_of_the_first() -> None:
    runs = []
    for level in LEVELS:
        torch.manual_seed(0)
        with streaming(Decoder([Counting() for _ in range(3)]), activations=level) as core:
            losses = [step(core, number) for number in range(3)]
            core.trainer.synchronize()
            runs.append([*losses, *(v.clone() for v in core.trainer.model.state_dict().values())])
    assert all(all(map(torch.equal, runs[0], run)) for run in runs[1:])


# -- passes ----------------------------------------------------------------------------------------
def test_a_weight_that_is_suddenly_read_without_a_call_is_refused_once() -> None:
    model, _ = MODELS["fused_loss"]()
    model.fused = False
    with streaming(model) as core:
        for number in range(2):
            step(core, number)
        model.fused = True
        with pytest.raises(ConfigError, match=r"head.weight was read without a call"):
            step(core, 2)
        for number in range(2, 4):
            step(core, number)
        model.fused = None


def test_a_program_may_call_backward_itself() -> None:
    runs = []
    for own in (False, True):
        with streaming() as core:
            for number in range(3):
                loss = core.trainer.forward(**token_batch(number))
                loss.backward() if own else core.trainer.backward(loss)
                core.trainer.step(clipping=1.0)
            core.trainer.synchronize()
            runs.append([p.detach().clone() for p in core.trainer.model.parameters()])
    assert all(map(torch.equal, *runs))


class Stop(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("error", [ValueError, Stop])
@pytest.mark.parametrize("where", ["forward", "backward", "own backward", "raw forward"])
def test_after_an_exception_a_step_is_as_if_it_had_not_been(
    error: type[BaseException], where: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    runs = []
    for fails in (False, True):
        with streaming(window=2, resident_layers=1) as core:
            model = core.trainer.model
            step(core, 0)
            if fails:
                block = model.blocks[1]
                hook = block.mlp.up.weight.register_hook(fail)
                if "forward" in where:
                    hook.remove()
                    hook = block.mlp.register_forward_pre_hook(fail)
                call = model if where.startswith("raw") else core.trainer.forward
                with suppress(error):
                    loss = call(**token_batch(7))
                    loss.backward() if where.startswith("own") else core.trainer.backward(loss)
                    raise AssertionError("nothing was raised")
                hook.remove()
            losses = [step(core, number) for number in (1, 2)]
            core.trainer.synchronize()
            runs.append([*losses, *(p.detach().clone() for p in model.parameters())])
    assert all(map(torch.equal, *runs))


def test_a_forward_that_fails_keeps_the_gradients_of_earlier_micro_batches() -> None:
    for error in (ValueError, Stop):
        with streaming(accumulate=True, micro_batches=2) as core:
            core.trainer.backward(core.trainer.forward(**token_batch(0)), ends_step=False)

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            hook = core.trainer.model.blocks[2].register_forward_pre_hook(fail)
            with pytest.raises(error):
                core.trainer.forward(**token_batch(1))
            hook.remove()
            assert all(len(layer.waiting) == layer.num_trained for layer in core.layers)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_the_models_own_checkpoints_keep_working(level: str, reentrant: bool) -> None:
    def factory() -> Any:
        model, make_batch = MODELS["llama"]()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model, make_batch

    run = train_core(factory, steps=3, clipping=0.5, activations=level, window=1)
    assert_identical(run, train_plain(MODELS["llama"], steps=3, clipping=0.5))


def test_evaluation_in_inference_mode_leaves_a_model_that_trains() -> None:
    """The first to use a slot's views, too."""
    with streaming(window=2, resident_layers=1) as core:
        with torch.inference_mode():
            evaluated = loss_of(core.trainer.forward(**token_batch(0))).clone()
        assert torch.equal(step(core, 0), evaluated)


# -- odd models, and what is left behind ----------------------------------------------------------
class Segments(Decoder):
    """Checkpoints several blocks together."""

    def run(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        for begin in range(0, len(self.blocks), 3):
            segment = nn.Sequential(*self.blocks[begin : begin + 3])
            x = checkpoint(segment, x, use_reentrant=False)
        return x


class SharedOutside(Block):
    """Calls a module outside of the blocks in a checkpoint of its own."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "shared", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.shared(x) + x)


def with_segments() -> nn.Module:
    return Segments([Block() for _ in range(6)])


def with_a_shared_module() -> nn.Module:
    shared = nn.Linear(16, 16)
    model = Decoder([SharedOutside(shared) for _ in range(6)])
    model.shared = shared
    return model


class Conjugates(Block):
    """Multiplies by a weight that torch conjugates and negates lazily."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(0.3 * torch.randn(16, 16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x, -x) @ torch.view_as_complex(self.turn).conj()
        return super().forward(x + turned.imag * turned.conj().imag)


def with_conjugates() -> nn.Module:
    return Decoder([Conjugates() for _ in range(4)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [with_segments, with_a_shared_module, with_conjugates])
def test_odd_models_train_as_in_plain_torch(
    make: Callable[[], nn.Module], level: str, window: int
) -> None:
    def factory() -> Any:
        torch.manual_seed(0)
        return make().train(), token_batch

    run = train_core(factory, steps=3, activations=level, window=window, layers="blocks")
    assert_identical(run, train_plain(factory, steps=3))


def test_a_block_that_returns_a_view_of_its_weights_is_refused() -> None:
    class Views(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.norm1.weight.expand(2, 16)

    class Model(Decoder):
        def run(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x, _ = block(x)
            return x

    model = Model([Views() for _ in range(3)])
    refused = pytest.raises(ConfigError, match=r"blocks.0 returns a view of its weights")
    with streaming(model, layers="blocks") as core, refused:
        core.trainer.forward(**token_batch(0))
    with streaming(model, layers="blocks", resident_layers="all") as core:
        step(core, 0)


def test_a_block_that_calls_a_block_may_be_called_directly() -> None:
    class Calls(Block):
        inner: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm1(x) if self.inner is None else self.inner(x)
            return super().forward(y)

    torch.manual_seed(0)
    model = Decoder([Calls() for _ in range(3)])
    object.__setattr__(model.blocks[2], "inner", model.blocks[0])
    x = torch.randn(2, 8, 16)
    expected = model.blocks[2](x).detach()
    with streaming(model, layers="blocks", window=2) as core:
        with torch.no_grad():
            assert torch.equal(model.blocks[2](x), expected)
        assert torch.equal(model.blocks[2](x).detach(), expected)
        assert not core.trainer._hooks._called  # no list grows with such calls


@pytest.mark.parametrize("where", ["raw forward", "raw backward", "a block"])
def test_after_an_interrupt_the_weights_can_be_read_and_written(where: str) -> None:
    """Ctrl-C, and then a save."""

    def fail(*_: Any) -> None:
        raise Stop

    model, _ = MODELS["gpt"]()
    with streaming(model, window=2) as core:
        before = {name: p.clone() for name, p in model.named_parameters()}
        block = model.blocks[1]
        if where == "raw backward":
            hook: Any = block.mlp.up.weight.register_hook(fail)
        else:
            hook = block.mlp.register_forward_pre_hook(fail)
        with pytest.raises(Stop):
            block(torch.randn(2, 8, 16)) if where == "a block" else model(
                **token_batch(0)
            ).backward()
        hook.remove()
        core.trainer.synchronize()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name])
            p.data.fill_(0.25)
        loss = core.trainer.forward(**token_batch(0)).detach()
        core.trainer.synchronize()
        assert all((p == 0.25).all() for p in model.parameters())
    assert torch.equal(loss, model(**token_batch(0)).detach())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("moment", ["__enter__", "__exit__"])
@pytest.mark.parametrize("level", LEVELS)
def test_an_interrupt_leaves_no_saved_tensor_hooks(
    level: str, moment: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after a pair was pushed and before that is known, or before it is popped."""
    original, countdown = getattr(saved_tensors_hooks, moment), [number]

    def interrupting(self: Any, *args: Any) -> None:
        countdown[0] -= 1
        if moment == "__enter__":
            original(self, *args)
        if countdown[0] == -1:
            raise KeyboardInterrupt
        if moment == "__exit__":
            original(self, *args)

    with streaming(activations=level, window=1) as undisturbed:
        losses = [step(undisturbed, number) for number in range(2)]
    outer = (lambda tensor: tensor, lambda tensor: tensor)
    with streaming(activations=level, window=1) as core:
        found = [step(core, 0)]
        with saved_tensors_hooks(*outer):
            with monkeypatch.context() as patched:
                patched.setattr(saved_tensors_hooks, moment, interrupting)
                with pytest.raises(KeyboardInterrupt):
                    core.trainer.forward(**token_batch(1))
            assert saved_tensor_hooks() == outer
        assert saved_tensor_hooks() is None
        found.append(step(core, 1))
    assert all(map(torch.equal, found, losses))


def test_a_backward_after_one_that_failed_is_used() -> None:
    def fail(*_: Any) -> None:
        raise ValueError

    model, plain = MODELS["gpt"]()[0], MODELS["gpt"]()[0]
    with streaming(model, window=2) as core:
        losses = [model(**token_batch(number)) for number in range(2)]
        hook = model.blocks[1].mlp.up.weight.register_hook(fail)
        with pytest.raises(ValueError):
            losses[0].backward()
        hook.remove()
        losses[1].backward()
        plain(**token_batch(1)).backward()
        norm = core.trainer.step(clipping=1.0).grad_norm
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert norm == pytest.approx(float(expected), rel=1e-5)


def test_forwards_without_a_backward_leave_no_slots_behind() -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with streaming(window=2) as core:
        step(core, 0)
        memory = core.device.memory
        allocated = memory.allocated_bytes
        hook = core.trainer.model.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            core.trainer.forward(**token_batch(1))
        hook.remove()
        step(core, 1)
        assert memory.allocated_bytes == allocated == memory.peak_bytes
        core.trainer.forward(**token_batch(9))  # evaluated with a graph
        for number in range(2):
            step(core, number)
        assert memory.allocated_bytes == allocated


def test_a_layer_that_a_failed_forward_read_without_a_call_is_waited_for() -> None:
    """On a GPU the forward fails: the weight is on the host."""
    model, _ = MODELS["fused_loss"]()
    model.fused = False
    with streaming(model) as core:
        step(core, 0)
        model.fused = True
        hook = model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            core.trainer.forward(**token_batch(1))
        hook.remove()
        step(core, 1)
        model.fused = None


def test_a_retained_graph_does_not_make_later_forwards_wait() -> None:
    with streaming() as core:
        for number in range(2):
            loss = core.trainer.forward(**token_batch(number))
            for retains in (True, False):
                core.trainer.backward(loss, retain_graph=retains)
            core.trainer.step(clipping=1.0)
        assert not core.trainer._hooks._outside._read


def test_closing_restores_a_forward_that_another_package_has_replaced() -> None:
    model, _ = MODELS["gpt"]()
    block = model.blocks[1]
    own = block.forward

    def replaced(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * own(x)

    block.forward = replaced
    expected = model(**token_batch(0)).detach()
    with streaming(model) as core:
        assert torch.equal(core.trainer.forward(**token_batch(0)), expected)
    assert block.forward is replaced
    assert torch.equal(model(**token_batch(0)), expected)
