"""What the engine is to its surroundings: every public name of DeepSpeed's engine, and the user's
model, which stays theirs.
"""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import pickle
import textwrap
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from transformers import GPT2LMHeadModel

import stronghold
from stronghold.engine import StrongholdEngine
from stronghold.engine.refusals import REFUSED
from stronghold.errors import ConfigError
from stronghold.private import TRIED, report_untried
from stronghold.train import demand, job
from tests.conftest import lane_threads
from tests.models import MODELS, loss_of
from tests.support.checkpoints import make_model
from tests.support.insides import hooks_of, num_hooks
from tests.support.pairs import each, pairs
from tests.support.training import config, initialized
from tests.support.twin import Twin, twin

# DeepSpeed's own public names; those of nn.Module that it does not redefine mean the same here.
PUBLIC = [
    name
    for name in dir(deepspeed.DeepSpeedEngine)
    if not name.startswith("_")
    and getattr(deepspeed.DeepSpeedEngine, name) is not getattr(nn.Module, name, None)
]
OWN = [one for one in StrongholdEngine.__mro__ if one.__module__.startswith("stronghold")]
IMPLEMENTED = {name for one in OWN for name in vars(one)} - {*REFUSED}


def is_accessor(name: str) -> bool:
    """Whether DeepSpeed's does nothing but return what it has: its config, most of all."""
    method = getattr(deepspeed.DeepSpeedEngine, name)
    if not inspect.isfunction(method):
        return False
    body = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0].body  # type: ignore[attr-defined]
    said = [one for one in body if not isinstance(one, ast.Expr)]
    return len(said) == 1 and isinstance(said[0], ast.Return)


# These have a branch more, are properties, or set a batch size.
_OTHERS = """
    autotuning_metric_path autotuning_model_info_path collect_python_gc communication_data_type
    flops_profiler_detailed flops_profiler_profile_step get_data_types get_mom is_compiled
    set_train_micro_batch_size torch_autocast_lower_precision_safe_modules zero_cpu_offload
    zero_use_cpu_optimizer
"""
INHERITED = {*_OTHERS.split(), *filter(is_accessor, PUBLIC)} - IMPLEMENTED - {*REFUSED}


def make(name: str = "gpt", **options: Any) -> tuple[StrongholdEngine, Any]:
    model, make_batch = MODELS[name]()
    return initialized(model, config(**options)), make_batch


# --- the contract with the installed DeepSpeed ----------------------------------------------------


def test_every_public_name_of_deepspeeds_engine_has_its_place() -> None:
    places = (IMPLEMENTED, set(REFUSED), INHERITED)
    strangers = [name for name in PUBLIC if not any(name in place for place in places)]
    assert strangers == [], "implement them, or list them in stronghold/engine/refusals.py or above"
    twice = [name for name in PUBLIC if sum(name in place for place in places) > 1]
    assert twice == []


def test_the_tables_name_nothing_that_deepspeed_does_not_have() -> None:
    assert set(PUBLIC) >= INHERITED
    assert set(REFUSED) <= set(PUBLIC)


def test_a_step_of_several_micro_batches_is_absent_as_in_deepspeeds_plain_engine() -> None:
    """DeepSpeed's pipeline engine alone takes an iterator."""
    engine, _ = make()
    for name in ("train_batch", "eval_batch"):
        assert not hasattr(deepspeed.DeepSpeedEngine, name)
        assert hasattr(PipelineEngine, name)
        with pytest.raises(AttributeError, match=name):
            getattr(engine, name)
    engine.destroy()


def test_what_the_engine_lacks_names_the_way_out() -> None:
    engine, _ = make()
    for name in REFUSED:
        with pytest.raises(ConfigError, match=f'engine.{name} .*"enabled": false'):
            getattr(engine, name)("anything", of="any kind")
    for name in ("gate_modules", "flops_profiler", "timers"):  # DeepSpeed's engine has them
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"'{name}'.*docs/members.md"):
            getattr(engine, name)
    engine.destroy()


@pytest.mark.parametrize("training", [True, False])
def test_every_inherited_name_answers_on_a_live_engine(training: bool) -> None:
    model, make_batch = MODELS["gpt"]()
    settings = config()
    if not training:
        del settings["optimizer"]
    engine, *_ = stronghold.initialize(model=model, config=settings)
    if training:
        engine.backward(loss_of(engine(**make_batch(0))))
        engine.step()
    arguments = {
        "set_train_micro_batch_size": (2,),
        "is_map_style_dataset": ([1],),
        "is_iterable_style_dataset": ([1],),
    }
    for name in sorted(INHERITED):
        value = getattr(engine, name)
        if callable(value):
            value(*arguments.get(name, ()))
    assert engine.train_batch_size() == 2
    assert engine.gradient_clipping() == 1.0
    assert engine.get_lr() == ([1e-2] if training else [])
    assert engine.get_mom() == ([(0.9, 0.99)] if training else [])
    assert engine.zero_optimization_stage() == 0
    assert not engine.bfloat16_enabled()
    engine.destroy()


@pytest.mark.parametrize("name", sorted(set(PUBLIC) & IMPLEMENTED))
def test_an_implemented_method_takes_what_deepspeeds_takes(name: str) -> None:
    theirs, ours = (getattr(deepspeed.DeepSpeedEngine, name), getattr(StrongholdEngine, name))
    if not callable(theirs):
        assert not callable(ours)
        return
    signature = inspect.signature(ours)
    parameters = list(inspect.signature(theirs).parameters.values())[1:]
    if name == "backward":  # behind a decorator that hides its signature
        inner = deepspeed.DeepSpeedEngine.backward.__closure__
        (theirs,) = (c.cell_contents for c in inner if inspect.isfunction(c.cell_contents))
        parameters = list(inspect.signature(theirs).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    ordinary = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    engine = object()
    signature.bind(engine, *[0 for _ in required])
    signature.bind(engine, **{p.name: 0 for p in ordinary})
    signature.bind(engine, *[0 for p in ordinary if p.kind is p.POSITIONAL_OR_KEYWORD][:3])


def test_initialize_takes_what_deepspeeds_takes() -> None:
    ours = inspect.signature(stronghold.initialize).parameters
    theirs = inspect.signature(deepspeed.initialize).parameters
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]


# --- the user's model is theirs -------------------------------------------------------------------


def anatomy(model: nn.Module) -> list[dict[str, Any]]:
    """Every attribute of every module: containers by their keys, the rest by identity."""
    return [
        {
            name: tuple(value.items()) if isinstance(value, dict) else value
            for name, value in vars(module).items()
        }
        for module in model.modules()
    ]


def num_hooks_of(model: nn.Module) -> int:
    on_modules = sum(
        len(table) for module in model.modules() for table in hooks_of(module).values()
    )
    return on_modules + sum(map(num_hooks, model.parameters()))


@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "weird_model", "frozen", "unused", "llama"])
def test_parameters_keep_identity_dtype_and_shape(name: str) -> None:
    model, make_batch = MODELS[name]()
    before = {k: (p, p.dtype, p.shape) for k, p in model.named_parameters(remove_duplicate=False)}
    keys = list(model.state_dict())

    def check() -> None:
        after = dict(model.named_parameters(remove_duplicate=False))
        assert list(after) == list(before)
        for key, (parameter, dtype, shape) in before.items():
            assert after[key] is parameter
            assert (parameter.dtype, parameter.shape) == (dtype, shape)
            assert parameter.grad is None
        assert list(model.state_dict()) == keys

    engine = initialized(model, config(section={"window": 1}))
    check()
    for step in range(2):
        engine.backward(loss_of(engine(**make_batch(step))))
        check()
        engine.step()
        check()
    assert [f"module.{key}" for key in keys] == list(engine.state_dict())
    engine.destroy()
    check()


def test_nothing_is_left_on_the_users_modules() -> None:
    model, make_batch = MODELS["gpt"]()
    before, names = anatomy(model), [set(vars(module)) for module in model.modules()]
    assert num_hooks_of(model) == 0
    engine = initialized(model, config())
    assert num_hooks_of(model) > 0
    for step in range(2):
        engine.backward(loss_of(engine(**make_batch(step))))
        engine.step()
    for module, own in zip(model.modules(), names, strict=True):
        assert set(vars(module)) - own <= {"forward"}
    assert all(set(vars(parameter)) == set() for parameter in model.parameters())
    engine.destroy()
    assert anatomy(model) == before
    assert num_hooks_of(model) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_after_destroy_the_model_trains_on_in_plain_pytorch(precision: str) -> None:
    both = Twin(precision=precision)
    both.train(0)
    both.train(1)
    both.engine.destroy()
    both.engine.destroy()
    assert lane_threads() == []
    for ours, theirs in zip(both.model.parameters(), both.plain.parameters(), strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(ours, theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (both.model, both.plain)]
    for step in range(2):
        losses = [both.on(step)(model) for model in (both.model, both.plain)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(both.model.parameters(), both.plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- the engine as an object ----------------------------------------------------------------------


def test_the_engine_is_deepspeeds_by_name_and_passes_through_to_the_model() -> None:
    model, make_batch = MODELS["gpt"]()
    settings = config()
    engine, optimizer, loader, scheduler = stronghold.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert isinstance(engine, nn.Module)
    assert engine.module is model
    assert optimizer is engine.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert loader is None
    assert scheduler is None
    assert engine.config == settings
    assert engine.config.get("zero_optimization") is None
    assert engine.embedding is model.embedding
    engine.accelerator = settings  # frameworks keep things on engines
    assert engine.accelerator is settings
    with pytest.raises(AttributeError, match="no_such_name"):
        engine.no_such_name  # noqa: B018
    assert engine.eval() is engine
    assert not model.training
    assert engine.train() is engine
    assert model.training
    assert torch.equal(engine(**make_batch(0)), model(**make_batch(0)))
    engine.destroy()


def test_the_modules_forward_is_called_as_it_is_at_that_moment() -> None:
    """Lightning and TRL put another `forward` on the instance for a while."""
    engine, make_batch = make()
    model = engine.module
    expected = engine(**make_batch(0)).item()
    original = model.forward
    model.forward = lambda **batch: 2 * original(**batch)
    assert engine(**make_batch(0)).item() == pytest.approx(2 * expected)
    engine.backward(engine(**make_batch(0)))
    engine.step()
    del model.forward
    engine.destroy()


def test_generation_runs_through_the_engine_and_the_raw_model() -> None:
    engine, make_batch = make("llama", section={"window": 1})
    plain, _ = MODELS["llama"]()
    prompt = make_batch(0)["input_ids"][:, :4]
    engine.eval()
    expected = plain.eval().generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(engine.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    assert torch.equal(engine.module.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    engine.destroy()


def test_moving_or_casting_the_engine_is_without_effect_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with twin(section={"window": 2}) as both:
        both.train(0)
        for move in (
            lambda: both.engine.to("cpu"),
            lambda: both.engine.half(),
            lambda: both.engine.bfloat16(),
            lambda: both.engine.to(torch.float64),
        ):
            assert move() is both.engine
            assert "without effect" in caplog.text
        both.train(1)
        both.train(2)


ZEROES: dict[str, Any] = {
    "engine": lambda both: both.engine.zero_grad(),
    "optimizer": lambda both: both.engine.optimizer.zero_grad(set_to_none=False),
    "model": lambda both: both.model.zero_grad(),
    "a model around it": lambda both: nn.Sequential(both.model).zero_grad(set_to_none=True),
    "client's optimizer": lambda both: torch.optim.SGD(both.model.parameters()).zero_grad(),
}
PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"window": 1},
    "resident": {"resident_layers": 1, "window": 1},
    "updated on the gpu": {"resident_layers": 1, "resident_updates": "gpu", "window": 1},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mode", "place", "zero"),
    pairs(
        {"fp32": {}, "bf16": {"precision": "bf16"}, "accumulated": {"accumulation": 2}},
        list(PLACES),
        list(ZEROES),
    ),
)
def test_zero_grad_throws_away_what_came_since_the_last_step(
    mode: dict[str, Any], place: str, zero: str
) -> None:
    with twin(section=PLACES[place], **mode) as both:
        for step in range(3):
            ZEROES[zero](both)  # after a step: nothing is there
            for micro in range(both.accumulation - 1):
                both.backward(both.on(4 * step + micro))
                both.engine.step()
            if step == 1:  # a bad batch, and those of its step before it
                both.backward(both.on(9))
                ZEROES[zero](both)
                both.drop_plain()
            both.backward(both.on(4 * step + 3))
            both.step()
            assert both.engine.last_record.loss is not None
        both.backward(both.on(9))
        ZEROES[zero](both)
        both.drop_plain()
        both.engine.step()  # without a gradient: nothing changes, as in a plain loop


def test_a_step_whose_early_updates_have_run_can_be_thrown_away() -> None:
    with twin(clipping=0.0, early="all") as both:
        for zero in ZEROES.values():
            both.backward(both.on(9))
            assert any(layer.is_updated_early for layer in both.engine.inspect().layers)
            both.engine.synchronize()
            zero(both)
            both.drop_plain()
            both.check()
            both.train(0)


SOME: dict[str, Any] = {
    "block": lambda model: list(model.blocks[1].parameters()),
    "parameter": lambda model: [model.blocks[0].mlp.up.weight],
    "head and embedding": lambda model: [model.head.weight, model.embedding.weight],
}


@pytest.mark.parametrize(
    ("mode", "place", "some"),
    each(
        {"fp32": {}, "bf16": {"precision": "bf16"}, "accumulated": {"accumulation": 2}},
        list(PLACES),
        list(SOME),
    ),
)
def test_some_gradients_are_thrown_away_as_in_a_plain_loop(
    mode: dict[str, Any], place: str, some: str
) -> None:
    with twin(section=PLACES[place], **mode) as both:
        for number in range(3):
            both.backward(both.on(2 * number))
            if both.accumulation == 2:
                both.engine.step()
            if number > 0:
                torch.optim.SGD(SOME[some](both.model)).zero_grad()
                for parameter in SOME[some](both.plain):
                    parameter.grad = None
                    both.sums.pop(parameter, None)
            if number < 2:  # of the same step: it is added
                both.backward(both.on(2 * number + 1))
            both.step()


def test_the_loss_of_a_step_is_that_of_the_batches_that_were_kept() -> None:
    engine, make_batch = make(accumulation=2)
    for _ in range(2):
        engine.backward(loss_of(engine(**make_batch(9))))
        engine.zero_grad()
    losses = []
    for micro in range(2):
        losses.append(loss_of(engine(**make_batch(micro))).detach() / 2)
        engine.backward(loss_of(engine(**make_batch(micro))))
        engine.step()
    assert torch.equal(engine.last_record.loss, losses[0] + losses[1])
    engine.destroy()


# --- several engines, and their ends --------------------------------------------------------------


def test_an_engine_that_is_dropped_ends_its_lanes_and_gives_the_model_back() -> None:
    engine, make_batch = make()
    model, optimizer = engine.module, engine.optimizer
    engine.backward(loss_of(engine(**make_batch(0))))
    engine.step()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert lane_threads() == []
    assert num_hooks_of(model) == 0
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    with pytest.raises(ConfigError, match="not connected to an engine"):
        optimizer.step()


def test_an_engine_in_a_cycle_of_references_is_collected_too() -> None:
    engine, _ = make()
    engine.callbacks = [engine]
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert lane_threads() == []


def test_engines_do_not_know_of_each_other() -> None:
    """A policy that trains, and a reference model that only answers."""
    with (
        twin(section={"window": 1}) as policy,
        twin(extra={"optimizer": None}, model_parameters=None) as reference,
        twin(precision="bf16", accumulation=2) as other,
    ):
        for step in range(3):
            with torch.no_grad():
                answer = reference.on(step)(reference.engine)
                assert torch.equal(answer, reference.on(step)(reference.plain))
            policy.train(step)
            other.train(2 * step, 2 * step + 1)
    assert lane_threads() == []


def test_an_engine_plans_with_what_the_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are taken in each step: what is planned for them is not free."""
    gc.collect()
    monkeypatch.setattr(demand, "available_host_bytes", lambda: 2 << 30)
    before = job.reserved_bytes()
    first = initialized(MODELS["gpt"]()[0], config())
    monkeypatch.setattr(
        first._job, "plan", replace(first.plan, activation_bytes=4321, offloaded_bytes=1234)
    )
    reserved = job.reserved_bytes()
    assert reserved == (before[0] + 4321, before[1] + 1234)
    second = initialized(MODELS["gpt"]()[0], config())
    budgets = [engine.inspect().demand.host_budget_bytes for engine in (first, second)]
    assert budgets[1] == budgets[0] - 1234
    second.destroy()
    first.offload_states()
    assert job.reserved_bytes()[0] == before[0]
    first.destroy()
    assert job.reserved_bytes() == before


def test_pages_of_a_models_files_are_not_counted_as_memory_that_comes_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "available_host_bytes", lambda: 2 << 30)
    made = make_model()
    made.save_pretrained(tmp_path)

    def budget(model: Any) -> int:
        engine = initialized(model, config())
        found: int = engine.inspect().demand.host_budget_bytes
        engine.destroy()
        return found

    of_files = budget(GPT2LMHeadModel.from_pretrained(tmp_path))
    assert of_files == (1 << 30)
    assert budget(made) == of_files + sum(p.nbytes for p in made.parameters())


def test_a_model_that_an_engine_trains_is_refused_until_it_is_given_back() -> None:
    """To one that has it as a part, to one that only runs forward, and between backward and step;
    a second one that trains takes over (below)."""
    both = Twin()
    both.train(0)
    reference = {key: value for key, value in both.settings.items() if key != "optimizer"}
    inside = nn.Sequential(both.model)

    def refused(model: nn.Module, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"already; call its destroy\(\) first"):
            stronghold.initialize(model=model, config=settings, model_parameters=model.parameters())

    refused(inside, both.settings)
    refused(both.model, reference)
    both.backward(both.on(1))
    refused(both.model, both.settings)
    both.step()
    both.check()
    both.engine.destroy()


@pytest.mark.parametrize(
    ("precision", "given_back"), [("fp32", True), ("bf16", True), ("bf16", False)]
)
def test_the_same_model_goes_through_a_second_engine_exactly(
    precision: str, given_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As auto_find_batch_size does: destroy, and initialize again with another batch size. Where a
    program forgets the first one, as under DeepSpeed, that ends by itself, and says so."""
    both = Twin(precision=precision)
    both.train(0)
    both.train(1)
    first = both.engine
    if given_back:
        first.destroy()
    # Moments and remainders end with their engine.
    both.restart_plain()
    both.settings["train_micro_batch_size_per_gpu"] = 1
    both.engine = initialized(both.model, both.settings)
    assert ("has trained this model for 2 steps ends" in caplog.text) != given_back
    with pytest.raises(ConfigError, match="was destroyed"):
        first.step()
    both.train(2)
    both.train(3)
    both.check()
    assert both.engine.global_steps == 2
    both.engine.destroy()


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied_but_its_model_is(take: Callable[[Any], Any]) -> None:
    both = Twin()
    with pytest.raises(ConfigError, match=r"engine\.module or its state_dict"):
        take(both.engine)
    assert take(both.engine.module)
    both.engine.destroy()


def test_a_failure_while_the_engine_is_built_leaves_the_model_as_it_was() -> None:
    model, make_batch = MODELS["gpt"]()
    before = anatomy(model)
    # which keeps the engine alive
    with pytest.raises(ValueError, match="torch Dataset") as caught:
        stronghold.initialize(
            model=model,
            config=config(),
            model_parameters=model.parameters(),
            training_data=object(),
        )
    assert lane_threads() == []
    assert anatomy(model) == before
    assert torch.isfinite(loss_of(model(**make_batch(0))))
    assert caught.traceback


def test_an_engine_names_the_versions_that_were_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(TRIED, "torch", ("1.0", "1.0"))
    report_untried.cache_clear()
    with twin(), twin():
        pass
    report_untried.cache_clear()
    assert caplog.text.count(f"torch {torch.__version__} (tried: 1.0)") == 1


def test_an_inspection_says_what_a_bug_report_needs() -> None:
    with twin(section={"window": 1, "resident_layers": 0}) as both:
        before = both.engine.inspect()
        assert not before.has_trained
        both.train(0)
        both.engine.synchronize()
        now = both.engine.inspect()
        assert now.has_trained
        assert not now.is_in_step
        assert now.unfinished is None
        assert (now.ranks.rank, now.ranks.num_ranks) == (now.ranks.node, 1) == (0, 1)
        assert now.ranks.sent_bytes == {}
        assert now.traffic.num_fetches > before.traffic.num_fetches
        holders = {name: layer for layer in now.layers for name in layer.trained}
        for name, parameter in both.model.named_parameters():
            layer = holders[name]
            assert torch.equal(layer.read("weights", name), parameter.flatten())
            assert torch.equal(layer.master(name), parameter)
            assert set(layer.counts) == {1}
        text = str(now)
        for words in (str(now.plan), "host", "num_fetches", now.layers[1].text, str(now.ranks)):
            assert words in text
