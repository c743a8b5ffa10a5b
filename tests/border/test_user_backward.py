"""`loss.backward()` by the user: the bits of `engine.backward(loss)`, and DeepSpeed's gradients."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.utils.checkpoint import checkpoint

import stronghold
from stronghold.config.source import warn_once
from stronghold.errors import ConfigError
from tests.laws.test_adapters import checkpointed_lora
from tests.models import MODELS, loss_of
from tests.support import stock
from tests.support.pairs import each
from tests.support.training import Run, assert_identical, config, initialized, moments_of
from tests.support.twin import failing_once, twin

MIXED = {"window": 1, "resident_layers": 1}
Backward = Callable[..., Any]  # (engine, loss)
Batches = Callable[[int], dict[str, Any]]


def by_engine(engine: Any, loss: torch.Tensor, **options: Any) -> None:
    engine.backward(loss, **options)


def by_user(engine: Any, loss: torch.Tensor, **options: Any) -> None:
    engine.scale(loss).backward(**options)


# -- programs: the losses of three steps -----------------------------------------------------------
def plain(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for micro in range(3 * engine.gradient_accumulation_steps()):
        loss = loss_of(engine(**batches(micro)))
        backward(engine, loss)
        engine.step()
        yield loss


def two_losses(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for step in range(3):
        losses = [loss_of(engine(**batches(2 * step + k))) for k in range(2)]
        for loss in losses:
            backward(engine, loss)
        engine.step()
        yield from losses


def retained(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for step in range(3):
        loss = loss_of(engine(**batches(step)))
        backward(engine, loss, retain_graph=True)
        backward(engine, loss)
        engine.step()
        yield loss


def outside(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for step in range(3):
        loss = engine(**batches(step)).square() * 0.7
        backward(engine, loss)
        engine.step()
        yield loss


def evaluated_between(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for step in range(3):
        loss = loss_of(engine(**batches(step)))
        with torch.no_grad():
            yield loss_of(engine(**batches(9)))
        backward(engine, loss)
        with torch.no_grad():
            yield loss_of(engine.module(**batches(9)))
        engine.step()


def failed_once(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for step in range(3):
        if step == 1:
            loss = loss_of(engine(**batches(7)))
            with (
                failing_once(engine.module.blocks[0].mlp.up, "backward"),
                pytest.raises(torch.OutOfMemoryError),
            ):
                backward(engine, loss)
        loss = loss_of(engine(**batches(step)))
        backward(engine, loss)
        engine.step()
        yield loss


def boundary_set(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for step in range(3):
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(micro == 2)
            with engine.no_sync():
                loss = loss_of(engine(**batches(3 * step + micro)))
                backward(engine, loss)
            engine.step()
            yield loss


def dropped(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for step in range(3):
        backward(engine, loss_of(engine(**batches(9))))
        engine.zero_grad()
        loss = loss_of(engine(**batches(step)))
        backward(engine, loss)
        engine.step()
        yield loss


def checkpointed(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    """By torch, with a backward inside of the backward."""
    for block in engine.module.blocks:
        whole = block.forward
        block.forward = lambda x, whole=whole: checkpoint(whole, x, use_reentrant=True)
    try:
        yield from plain(engine, batches, backward)
    finally:
        for block in engine.module.blocks:
            del block.forward


def by_the_module(engine: Any, batches: Batches, backward: Backward) -> Iterator[torch.Tensor]:
    for step in range(3):
        loss = loss_of(engine.module(**batches(step)))
        backward(engine, loss)
        engine.step()
        yield loss


PROGRAMS = {
    "plain": (plain, {}),
    "accumulation": (plain, {"accumulation": 2}),
    "fp16": (plain, {"precision": "fp16"}),
    "bf16": (plain, {"precision": "bf16", "accumulation": 4}),
    "as gradients come": (plain, {"clipping": 0.0}),
    "two losses": (two_losses, {}),
    "retained": (retained, {}),
    "outside": (outside, {"accumulation": 2}),
    "evaluated between": (evaluated_between, {}),
    "failed once": (failed_once, {"accumulation": 1}),
    "boundary": (boundary_set, {"accumulation": 4}),
    "dropped": (dropped, {}),
    "checkpointed": (checkpointed, {}),
    "by the module": (by_the_module, {}),
}
PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"window": 1},
    "recomputed": {"window": 2, "activations": "recompute"},
    "chunks": {"window": 1, "chunk": 1},
    "resident": {"resident_layers": 1, "resident_updates": "gpu"},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
}
# The first is refused (below); the second gives its chunks to a forward of its own.
NEVER = {("by the module", "whole"), ("checkpointed", "chunks")}


def ran(program: str, place: str, backward: Backward) -> Run:
    run, settings = PROGRAMS[program]
    model, batches = MODELS["gpt"]()
    engine, *_ = stronghold.initialize(
        model=model, config=config(**settings, section=PLACES[place])
    )
    try:
        return Run(
            losses=[loss.detach().clone() for loss in run(engine, batches, backward)],
            weights={name: p.clone() for name, p in engine.module_state_dict().items()},
            moments=moments_of(engine),
        )
    finally:
        engine.destroy()


@functools.cache
def by_the_engine(program: str, place: str) -> Run:
    return ran(program, place, by_engine)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("program", "place"), each(list(PROGRAMS), list(PLACES)))
def test_a_users_backward_has_the_bits_of_the_engines(program: str, place: str) -> None:
    """Wherever layers are: that changes no bit, but chunks are added otherwise."""
    if (program, place) not in NEVER:
        expected = by_the_engine(program, "chunks" if place == "chunks" else "streamed")
        assert_identical(ran(program, place, by_user), expected)


# -- what is refused, and what is left -------------------------------------------------------------
def test_a_backward_through_reentrant_checkpoints_begins_once_and_divides() -> None:
    """Behind such a checkpoint autograd shows no parameter."""
    found = []
    for backward in (by_engine, by_user):
        torch.manual_seed(0)
        model, make_batch = checkpointed_lora(reentrant=True)
        settings = config(accumulation=2, section={"window": 1})
        engine = initialized(model, settings)
        for micro in range(4):
            backward(engine, loss_of(engine(**make_batch(micro))))
            engine.step()
        found.append(engine.get_global_grad_norm())
        engine.destroy()
    assert found[0] == found[1]


def test_a_loss_that_was_not_scaled_is_refused_in_fp16() -> None:
    model, batches = MODELS["gpt"]()
    engine, *_ = stronghold.initialize(model=model, config=config(precision="fp16"))
    with pytest.raises(ConfigError, match=r"engine\.scale\(loss\)\.backward"):
        loss_of(engine(**batches(0))).backward()
    by_user(engine, loss_of(engine(**batches(0))))
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def by_the_loss_alone(engine: Any, loss: torch.Tensor) -> None:
    loss.backward()


def by_a_smaller_loss(engine: Any, loss: torch.Tensor) -> None:
    (engine.scale(loss) / engine.optimizer.loss_scale).backward()


def test_a_loss_of_the_raw_module_may_lack_its_scale_in_fp16(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`step` divides all the same, as under DeepSpeed."""
    warn_once.cache_clear()  # it warns once per process
    runs = []
    for backward in (by_the_loss_alone, by_a_smaller_loss):
        model, batches = MODELS["gpt"]()
        settings = config(precision="fp16", section={"window": 1})
        settings["fp16"]["initial_scale_power"] = 8
        engine = initialized(model, settings)
        losses = [loss.clone() for loss in by_the_module(engine, batches, backward)]
        assert engine.optimizer.loss_scale == 256.0
        runs.append(Run(losses=losses, moments=moments_of(engine)))
        engine.destroy()
    assert_identical(*runs)
    assert caplog.text.count("divides gradients by the loss scale") == 1


@pytest.mark.parametrize("backward", [by_engine, by_user])
def test_one_loss_of_several_engines_is_scaled_for_all_of_them_or_refused(
    backward: Backward,
) -> None:
    model, batches = MODELS["gpt"]()
    alone, *both = (
        stronghold.initialize(model=copy.deepcopy(model), config=config(precision="fp16"))[0]
        for _ in range(3)
    )
    backward(alone, loss_of(alone(**batches(0))))
    backward(both[0], sum(loss_of(engine(**batches(0))) for engine in both))
    norms = set()
    for engine in (alone, *both):
        engine.step()
        norms.add(engine.get_global_grad_norm())
    assert len(norms) == 1
    both[1].optimizer.override_loss_scale(2.0)
    with pytest.raises(ConfigError, match=r"scaled by .* loss scale is 2\.0: give both"):
        backward(both[0], sum(loss_of(engine(**batches(0))) for engine in both))
    for engine in (alone, *both):
        engine.destroy()


def test_a_backward_of_the_raw_model_after_one_that_failed_is_used() -> None:
    with twin() as both:
        fails = failing_once(both.model.blocks[1], "backward")
        with fails, pytest.raises(torch.OutOfMemoryError):
            both.on(0)(both.model).backward()
        both.on(1)(both.model).backward()
        both.plain_backward(both.on(1))
        both.step()
        both.train(2)


def test_gradients_of_inputs_are_no_backward_of_the_engines() -> None:
    with twin("sequential", clipping=0.0) as both:
        inputs = both.make_batch(0)["inputs"].requires_grad_()
        out = loss_of(both.engine(**(both.make_batch(0) | {"inputs": inputs})))
        torch.autograd.grad(out, inputs)
        assert not both.engine.inspect().has_trained
        both.train(0)


def test_gradients_of_inputs_that_fail_take_none_of_the_step() -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("the program's")

    with twin("sequential", accumulation=2) as both:
        both.backward(both.on(0))
        both.engine.step()
        inputs = both.make_batch(1)["inputs"].requires_grad_()
        out = loss_of(both.engine(**(both.make_batch(1) | {"inputs": inputs})))
        inputs.register_hook(fail)
        with pytest.raises(ValueError, match="the program's"):
            torch.autograd.grad(out, inputs)
        both.train(2)


# -- beside DeepSpeed ------------------------------------------------------------------------------
class Outputs(nn.Module):
    """Its outputs are those of `names`: "hidden", or "loss", which is made of it, or both."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.names = names

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x).tanh()
        found = {"hidden": x, "loss": x.square().mean()}
        return {name: found[name] for name in self.names}


CALLS: dict[str, tuple[tuple[str, ...], Callable[[Any, Any], None]]] = {
    "engine": (("loss",), lambda engine, out: engine.backward(out["loss"])),
    "loss": (("loss",), lambda _, out: out["loss"].backward()),
    "outside": (("hidden",), lambda _, out: out["hidden"].square().mean().backward()),
    "gradient": (("hidden",), lambda _, out: out["hidden"].backward(out["hidden"] / 8)),
    "divided": (("loss",), lambda engine, out: (out["loss"] / 2).backward()),
    "unscaled": (("loss",), lambda e, out: e.backward(out["loss"] / 2, scale_wrt_gas=False)),
    "both": (("hidden", "loss"), lambda _, out: out["loss"].backward()),
}


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with stock.one_rank(tmp_path_factory.mktemp("gloo")):
        yield


def gradients(engine: Any, call: Any) -> list[torch.Tensor]:
    """Of a step of two micro-batches, before it ends."""
    random = torch.Generator().manual_seed(1)
    for micro in range(2):
        call(engine, engine(torch.randn(2, 8, generator=random)))
        if micro == 0:
            engine.step()
    return [safe_get_full_grad(p).clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_accumulation_is_deepspeeds_at_the_same_call(name: str, stage: int, gloo: None) -> None:
    names, call = CALLS[name]
    ours, *_ = stronghold.initialize(model=Outputs(*names), config=config(accumulation=2))
    with stock.deepspeeds_engine(
        Outputs(*names), stage=stage, gradient_accumulation_steps=2
    ) as theirs:
        # Divided at both outputs there, one of which the other was made of; here once.
        factor = 2.0 if name == "both" else 1.0
        for found, expected in zip(gradients(ours, call), gradients(theirs, call), strict=True):
            torch.testing.assert_close(found, expected * factor, rtol=1e-6, atol=1e-8)
    ours.destroy()


# -- steps that the program ends -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("section", "backward"), [({"window": 1}, by_engine), ({"resident_layers": "all"}, by_user)]
)
def test_unmanaged_steps_are_those_of_boundaries_that_are_set(
    section: dict[str, Any], backward: Backward
) -> None:
    counts, found = (2, 3, 1), []
    for managed in (True, False):
        settings = {**config(accumulation=2, section=section)}
        settings["managed_gradient_accumulation"] = managed
        model, batches = MODELS["gpt"]()
        engine: Any = initialized(model, settings)
        run, micros = Run(), iter(range(sum(counts)))
        for count in counts:
            for left in reversed(range(count)):
                if managed:
                    engine.set_gradient_accumulation_boundary(not left)
                loss = loss_of(engine(**batches(next(micros))))
                backward(engine, loss)
                run.losses.append(loss.detach().clone())
            engine.step()
            assert engine.was_step_applied()
            run.norms.append(engine.get_global_grad_norm())
        run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        run.moments = moments_of(engine)
        found.append(run)
        if not managed:
            assert engine.global_samples == 2 * sum(counts)
            with pytest.raises(ConfigError, match="leave the call out"):
                engine.set_gradient_accumulation_boundary(True)
        engine.destroy()
    assert_identical(found[1], found[0])
    assert found[1].norms == found[0].norms


class Descends(nn.Module):
    """A block that goes on with a gradient of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def energy(at: torch.Tensor) -> torch.Tensor:
            return self.second(at).square().sum()

        hidden = self.first(x).tanh()
        if self.way == "func":
            found = torch.func.grad(energy)(hidden)
        else:
            found = torch.autograd.grad(energy(hidden), hidden, create_graph=True)[0]
        return x - self.last(found)


def descending(way: str, section: dict[str, Any] | None) -> list[torch.Tensor]:
    """Gradients of one batch, by a plain loop without a section."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Descends(way) for _ in range(3)))
    inputs = torch.linspace(-1, 1, 32).view(4, 8)
    if section is None:
        model(inputs).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]
    engine = initialized(model, config(section=section))
    try:
        engine.backward(engine(inputs).square().mean())
        return [safe_get_full_grad(p).clone() for p in model.parameters()]
    finally:
        engine.destroy()


class Forces(nn.Module):
    """Its blocks use a gradient of their own, and it returns that of its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Falling() for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            at = hidden = x.detach().requires_grad_()
            for block in self.blocks:
                hidden = block(hidden)
            forces = torch.autograd.grad(hidden.square().sum(), at)[0]
        return hidden, nn.functional.linear(forces, self.last.weight)  # without a call


class Falling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            force = torch.autograd.grad(self.first(at).tanh().sum(), at)[0]
        return x - self.last(force) * self.first(x)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("section", [{"window": 1}, {"window": 2}, {"resident_layers": 1}])
def test_a_forward_may_take_gradients_inside(section: dict[str, Any], trains: bool) -> None:
    """Of the blocks before, and of the block that runs. No weight has moved when it goes on."""
    torch.manual_seed(0)
    model = Forces()
    plain = copy.deepcopy(model)
    engine = initialized(model, config(section={"activations": "keep", **section}))
    x = torch.linspace(-1, 1, 32).view(4, 8)
    for _ in range(2):
        with torch.set_grad_enabled(trains):
            found, expected = engine(x), plain(x)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if trains:
        engine.backward(found[1].square().mean())
        expected[1].square().mean().backward()
        gradient = plain.last.weight.grad
        assert gradient is not None
        assert torch.equal(safe_get_full_grad(model.last.weight), gradient)
    engine.destroy()


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_a_block_may_take_gradients_itself(policy: str) -> None:
    section = {"window": 1, "activations": policy}
    plain = descending("autograd", None)
    assert len(plain) == 18
    if policy == "recompute":
        with pytest.raises(ConfigError, match=r'takes gradients inside.*activations to "keep"'):
            descending("autograd", section)
    else:
        assert all(map(torch.equal, descending("autograd", section), plain))
    with pytest.raises(ConfigError, match=r"use torch\.autograd\.grad .*resident_layers"):
        descending("func", section)
    whole = {"resident_layers": "all", "resident_updates": "gpu"}
    assert all(map(torch.equal, descending("func", whole), descending("func", None)))


@pytest.mark.parametrize("inside", [True, False])
def test_torchs_transforms_are_refused_of_the_raw_module_too(inside: bool) -> None:
    model = nn.Sequential(*(Descends("func" if inside else "autograd") for _ in range(3)))
    engine = initialized(model, config(section={"window": 1}))
    inputs = torch.linspace(-1, 1, 32).view(4, 8)
    call = model if inside else torch.func.grad(lambda x: model(x).sum())
    with pytest.raises(ConfigError, match=r"use torch\.autograd\.grad .*resident_layers"):
        call(inputs)
    if not inside:  # and nothing is left behind
        engine.backward(engine(inputs).square().mean())
        engine.step()
        assert engine.was_step_applied()
    engine.destroy()


def test_one_loss_of_several_engines_goes_on_after_deepspeeds_epilogue() -> None:
    with twin(section={"window": 1}) as first, twin(section={"window": 2}) as second:
        both = (first, second)
        for step in range(2):
            for one, other in ((t.engine.module for t in both), (t.plain for t in both)):
                (first.on(step)(one) + second.on(step)(other) / 2).backward()
            for each in both:
                each.engine._backward_epilogue()
                each.step()


def test_an_actor_a_critic_and_a_frozen_reference_train_as_plain_ones() -> None:
    """Three engines of one process, one of which only runs forward."""
    model, settings = (MODELS["gpt"]()[0].requires_grad_(False), config(section={"window": 2}))
    before = MODELS["gpt"]()[0]
    reference: Any = stronghold.initialize(model=model, config=settings)[0]
    assert reference.optimizer is None
    with twin(section={"window": 1}) as actor, twin(precision="bf16", section=MIXED) as critic:
        for step in range(3):
            with torch.no_grad():
                told = actor.on(step)(reference)
                assert torch.equal(told, actor.on(step)(before))

            def policy(of: Any, told: torch.Tensor = told, step: int = step) -> torch.Tensor:
                loss = actor.on(step)(of)
                return loss + 0.1 * (loss - told) ** 2

            def value(of: Any, told: torch.Tensor = told, step: int = step) -> torch.Tensor:
                return (critic.on(step)(of).float() - told) ** 2

            for each, objective in ((actor, policy), (critic, value)):
                each.backward(objective)
                each.step()
            reference.offload_states()
            reference.reload_states()
    reference.destroy()
