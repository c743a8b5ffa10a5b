"""The optimizer that the user sees, and the learning-rate schedules that write into it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from tests.models import MODELS, loss_of
from tests.support.training import ADAM, config
from tests.support.twin import Twin, twin

SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {"total_num_steps": 6, "warmup_max_lr": 1e-2, "warmup_num_steps": 2},
    "OneCycle": {
        "cycle_min_lr": 1e-3,
        "cycle_max_lr": 1e-2,
        "cycle_first_step_size": 2,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.95,
    },
    "StepLR": {"step_size": 1, "gamma": 0.5},
}


def schedule_class(name: str) -> Any:
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)


def decayed_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, and the embedding learns at a rate of its own."""
    named = dict(model.named_parameters())
    embedding = [named.pop("embedding.weight")]
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
        {"params": embedding, "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6},
    ]


def train_with(both: Twin, schedule: Any, steps: int = 7) -> list[list[float]]:
    """Train both; the plain half asks `schedule`, made for `both.shown`. Returns the rates."""
    rates = []
    for step in range(steps):
        assert both.engine.get_lr() == [group["lr"] for group in both.shown.param_groups]
        assert both.engine.get_mom() == [group["betas"] for group in both.shown.param_groups]
        rates.append(both.engine.get_lr())
        both.train(step)
        if schedule is not None:
            schedule.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_by_name_is_followed(name: str) -> None:
    with twin(extra={"scheduler": {"type": name, "params": SCHEDULES[name]}}) as both:
        assert type(both.engine.lr_scheduler) is schedule_class(name)
        rates = train_with(both, schedule_class(name)(both.shown, **SCHEDULES[name]))
        assert len({rate for (rate,) in rates}) > 2, "the rate never moved"


@pytest.mark.parametrize("way", ["object", "callable"])
def test_a_clients_schedule_is_followed(way: str) -> None:
    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    if way == "callable":
        both = Twin(lr_scheduler=halve)
    else:  # made for the client's own optimizer before the engine is
        model, _ = MODELS["gpt"]()
        client = torch.optim.AdamW(model.parameters(), **ADAM)
        both = Twin(of=model, optimizer=client, lr_scheduler=halve(client))
    train_with(both, halve(both.shown))
    both.check()
    both.engine.destroy()


def test_a_schedule_that_the_program_steps_itself_is_followed() -> None:
    """Hugging Face's Trainer steps its own LambdaLR after engine.step()."""
    with twin(clipping=0.0) as both:
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            for optimizer in (both.engine.optimizer, both.shown)
        ]
        with warnings.catch_warnings():
            # "lr_scheduler.step() before optimizer.step()"
            warnings.simplefilter("error")
            for step in range(4):
                both.train(step)
                for schedule in schedules:
                    schedule.step()
        assert both.engine.get_lr() == [1e-2 * 0.5**4]


@pytest.mark.parametrize("section", [{}, {"resident_layers": 1, "resident_updates": "gpu"}])
@pytest.mark.parametrize("updates", [{"clipping": 0.5}, {"clipping": 0.0, "early": "all"}])
def test_a_rate_that_is_written_after_backward_is_this_steps(section: Any, updates: Any) -> None:
    with twin(section=section, **updates) as both:
        both.train(0)
        both.backward(both.on(1))
        early = any(layer.is_updated_early for layer in both.engine.inspect().layers)
        assert early == ("early" in updates)
        for optimizer in (both.engine.optimizer, both.shown):
            optimizer.param_groups[0]["lr"] = 5e-4
        both.step()
        both.train(2)


CLIENTS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "Adam, no decay": functools.partial(torch.optim.Adam),
    "CPUAdam": stronghold.CPUAdam,
}


@pytest.mark.parametrize("way", ["object", "callable"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_clients_adam_is_the_optimizer(name: str, way: str) -> None:
    model, _ = MODELS["gpt"]()
    hyper = {**ADAM, "weight_decay": 0.0 if name.startswith("Adam,") else 0.1}
    make = functools.partial(CLIENTS[name], **hyper)
    groups = decayed_groups if "no decay" not in name else nn.Module.parameters
    optimizer = make if way == "callable" else make(groups(model))
    both = Twin(
        of=model, optimizer=optimizer, model_parameters=groups(model), extra={"optimizer": None}
    )
    both.restart_plain(groups(both.plain), hyper)
    train_with(both, None, steps=3)
    both.check()
    if way == "object":
        assert both.engine.optimizer.param_groups is optimizer.param_groups
        assert not optimizer.state, "the client's own moments would be a second copy"
    both.engine.destroy()


def test_l2_decay_of_adam_is_no_decoupled_decay() -> None:
    """torch.optim.Adam with weight decay against torch itself: only rounding differs."""
    model, make_batch = MODELS["gpt"]()
    plain, _ = MODELS["gpt"]()
    hyper = {"lr": 1e-3, "weight_decay": 0.5}
    engine, *_ = stronghold.initialize(
        model=model,
        config=config(clipping=0.0),
        optimizer=torch.optim.Adam(model.parameters(), **hyper),
    )
    expected = torch.optim.Adam(plain.parameters(), **hyper)
    for step in range(5):
        engine.backward(loss_of(engine(**make_batch(step))))
        engine.step()
        loss_of(plain(**make_batch(step))).backward()
        expected.step()
        expected.zero_grad()
    for ours, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        # Five steps of 1e-3 each; a decoupled decay would differ by 5 x 1e-3 x 0.5 of the weight.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    engine.destroy()


IN_A_BUDGET = {"gpu_memory": "4MB", "window": None}  # the first batch has a plan of its own


@pytest.mark.parametrize("has_trained", [True, False])
@pytest.mark.parametrize(
    "section", [{}, {"resident_layers": "all", "resident_updates": "gpu"}, IN_A_BUDGET]
)
def test_a_parameter_that_was_frozen_from_the_start_cannot_be_thawed(
    section: Any, has_trained: bool
) -> None:
    """It would be in no step, without a word."""
    with twin("frozen", section=section) as both:
        if has_trained:
            both.train(0)
        both.model.embedding.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"embedding\.weight was frozen in stronghold\.init"):
            both.engine.backward(both.on(1)(both.engine))
        both.model.embedding.requires_grad_(False)
        both.train(1)


@pytest.mark.parametrize("section", [{}, IN_A_BUDGET])
def test_a_parameter_may_be_frozen_for_a_while_before_the_first_batch(section: Any) -> None:
    """As LISA does."""
    with twin("gpt", section=section) as both:
        for step in range(4):
            for model in (both.model, both.plain):
                model.head.weight.requires_grad_(step % 2 == 1)
                model.blocks[0].requires_grad_(step % 2 == 0)
            both.train(step)


@pytest.mark.parametrize("way", ["named", "generator", "one tensor", "named groups", "callable"])
def test_parameters_may_be_given_in_every_form_that_torch_takes(way: str) -> None:
    model, _ = MODELS["gpt"]()
    named = dict(model.named_parameters())
    single = named.pop("embedding.weight")
    forms: dict[str, Any] = {
        "named": {"model_parameters": model.named_parameters()},
        "generator": {"model_parameters": filter(lambda p: p.requires_grad, model.parameters())},
        "one tensor": {
            "model_parameters": [{"params": single}, {"params": (p for p in named.values())}]
        },
        "named groups": {
            "model_parameters": [{"params": named.items()}, {"params": [("embedding", single)]}]
        },
        "callable": {"optimizer": lambda parameters: torch.optim.AdamW(parameters, **ADAM)},
    }
    both = Twin(of=model, **forms[way])
    both.train(0)
    both.train(1)
    both.check()
    both.engine.destroy()


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("way", ["object", "callable"])
def test_another_optimizer_is_refused_by_name(optimizer: Any, way: str) -> None:
    model, _ = MODELS["gpt"]()
    make = functools.partial(optimizer, lr=0.1)
    with pytest.raises(ConfigError, match=rf"{optimizer.__name__} cannot run.*Pass torch"):
        stronghold.initialize(
            model=model,
            config=config(),
            optimizer=make if way == "callable" else make(model.parameters()),
        )


def test_an_optimizer_with_moments_is_refused() -> None:
    model, make_batch = MODELS["gpt"]()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(**make_batch(0))).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="moments cannot be taken over: pass a new one"):
        stronghold.initialize(model=model, config=config(), optimizer=optimizer)


@pytest.mark.parametrize("way", ["optimizer", "model_parameters"])
def test_parameters_of_another_model_are_refused(way: str) -> None:
    model, _ = MODELS["gpt"]()
    other, _ = MODELS["gpt"]()
    options: dict[str, Any] = (
        {"optimizer": torch.optim.AdamW(other.parameters())}
        if way == "optimizer"
        else {"model_parameters": other.parameters()}
    )
    with pytest.raises(ConfigError, match=f"{way}: .* are not the model's"):
        stronghold.initialize(model=model, config=config(), **options)


def test_parameters_outside_the_optimizer_stay_as_they_are() -> None:
    model, _ = MODELS["gpt"]()
    trained = [p for name, p in model.named_parameters() if "mlp" in name]
    both = Twin(of=model, model_parameters=trained)
    both.restart_plain([p for name, p in both.plain.named_parameters() if "mlp" in name])
    for step in range(3):
        both.backward(both.on(step))
        both.engine.step()
        gradients = {
            p: p.grad
            for name, p in both.plain.named_parameters()
            if "mlp" in name and p.grad is not None
        }
        assert both.adam.step(gradients, both.clipping) == both.engine.get_global_grad_norm()
        both.drop_plain()
    both.check()
    both.engine.destroy()


def test_the_optimizers_step_is_the_engines() -> None:
    with twin() as both:
        both.backward(both.on(0))
        both.engine.optimizer.step()
        both.plain_step()
        assert both.engine.global_steps == 1
        assert both.engine.was_step_applied()
        both.check()
        with pytest.raises(ConfigError, match=r"engine\.backward\(loss\) and engine\.step\(\)"):
            both.engine.optimizer.step(lambda: 0.0)


def test_a_group_cannot_be_added_later() -> None:
    with twin() as both:
        with pytest.raises(ConfigError, match="pass every group to initialize"):
            both.engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(both.engine.optimizer.param_groups) == 1
        both.train(0)
        both.engine.optimizer.param_groups[0]["params"].pop()
        with pytest.raises(ConfigError, match="other parameters than"):
            both.train(1)


def test_the_optimizers_state_dict_carries_its_hyper_parameters() -> None:
    with twin() as both:
        optimizer = both.engine.optimizer
        both.train(0)
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["lr"] == 1e-2
        optimizer.param_groups[0]["lr"] = 5.0
        live = optimizer.param_groups[0]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0] is live
        both.train(1)  # at the loaded rate: the live groups took it over
        saved["param_groups"][0]["lr"] = both.shown.param_groups[0]["lr"] = 1e-3
        optimizer.load_state_dict(saved)
        both.train(2)
        with pytest.raises(ConfigError, match="moments cannot be loaded"):
            optimizer.load_state_dict({**saved, "state": {0: {"exp_avg": torch.ones(1)}}})
        with pytest.raises(ConfigError, match="got groups of"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_what_frameworks_read_of_the_optimizer_is_there() -> None:
    with twin() as both:
        optimizer = both.engine.optimizer
        assert optimizer is both.engine.basic_optimizer
        assert optimizer.overflow is False
        assert optimizer.cur_scale == optimizer.loss_scale == 1.0
        both.train(0)
        assert both.engine.get_global_grad_norm() == optimizer.grad_norm > 0.0
        assert "EngineOptimizer" in repr(optimizer)
