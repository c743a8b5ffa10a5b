"""Which Adam: read from the config and from client optimizers; all else is refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from stronghold import config as configs
from stronghold.errors import ConfigError
from stronghold.optim import known_types
from stronghold.optim.adam import Adam
from stronghold.optim.cpu_adam import CPUAdam
from stronghold.optim.lion import Lion
from stronghold.optim.sgd import SGD
from tests.support.settings import BASE, load, refusal


def adam(
    *, adamw: bool = True, bias_correction: bool = True, **hyperparameters: Any
) -> configs.OptimizerSettings:
    """Settings of Adam with DeepSpeed's defaults, but for these."""
    return configs.OptimizerSettings(
        optimizer=Adam(adamw=adamw, bias_correction=bias_correction),
        hyperparameters={**Adam.defaults, **hyperparameters},
    )


TORCH_DECAY = inspect.signature(torch.optim.AdamW).parameters["weight_decay"].default


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("Adam", {}, {}),
        ("ADAM", {"lr": 1}, {"lr": 1.0}),
        ("AdamW", {"betas": [0.8, 0.9], "eps": 1e-6}, {"betas": (0.8, 0.9), "eps": 1e-6}),
        ("Adam", {"adam_w_mode": False}, {"adamw": False}),
        ("adamw", {"adam_w_mode": False}, {}),
        (
            "AdamW",
            {"weight_decay": 0.1, "bias_correction": False},
            {"weight_decay": 0.1, "bias_correction": False},
        ),
        ("Adam", {"torch_adam": True}, {"weight_decay": TORCH_DECAY}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, {"adamw": False}),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.0}, {}),
        ("AdamW", {"foreach": None, "fused": True, "amsgrad": False, "lr": None}, {}),
        ("AdamW", {"fp32_optimizer_states": True}, {}),
    ],
)
def test_optimizer_params_follow_deepspeeds_rules(
    name: str, params: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = load(optimizer={"type": name, "params": params}).optimizer
    assert settings == adam(**expected)


def test_no_optimizer_section_is_no_optimizer() -> None:
    assert load(optimizer=None).optimizer is None
    assert load(optimizer={}).optimizer is None
    assert load(optimizer={"type": "Adam"}).optimizer == adam()


@pytest.mark.parametrize(
    "name", ["Adagrad", "Lamb", "Muon", "OneBitAdam", "MuAdam", "Adamax", "Adm", ""]
)
def test_an_optimizer_that_cannot_run_on_the_cpu_is_refused_by_name(name: str) -> None:
    message = refusal({**BASE, "optimizer": {"type": name, "params": {"lr": 1.0}}})
    assert message.startswith(f'optimizer.type: got "{name}"')
    assert all(f'"{word}"' in message for word in known_types())


def test_every_wrong_optimizer_param_is_in_one_error() -> None:
    params = {
        "lr": "3e-4",
        "beta": [0, 1],
        "betas": [0.9, 1.0],
        "amsgrad": True,
        "max_grad_norm": 2.0,
    }
    params |= {"weight_decay": -1, "eps": True, "adam_w_mode": 1, "fp32_optimizer_states": False}
    lines = refusal({**BASE, "optimizer": {"type": "AdamW", "params": params}}).splitlines()
    found = {line.partition(":")[0].removeprefix("optimizer.params.") for line in lines}
    assert found == set(params)
    assert any('"gradient_clipping": 2.0' in line for line in lines)
    assert any('Did you mean "betas"?' in line for line in lines)
    assert any("without quotes" in line for line in lines)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def stand_in(module: str, name: str, **attributes: Any) -> type[torch.optim.Optimizer]:
    """A class with the name of one whose constructor would compile a kernel."""

    def step(self: Any, closure: Any = None) -> None:
        raise AssertionError("only its name is looked at")

    body = {"__module__": module, "step": step, **attributes}
    return type(name, (torch.optim.Optimizer,), body)


@pytest.mark.parametrize(
    ("make", "adamw"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.25), True),
        (lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.25, fused=True), True),
        (lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.25, foreach=True), True),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5), weight_decay=0.25, fused=True), True),
        (lambda p: torch.optim.Adam(p, lr=0.5, weight_decay=0.25), False),
        (
            lambda p: torch.optim.Adam(p, lr=0.5, weight_decay=0.25, decoupled_weight_decay=True),
            True,
        ),
    ],
)
def test_torch_optimizers_are_accepted_in_every_spelling(make: Any, adamw: bool) -> None:
    found = configs.settings_from_client_optimizer(make([parameter()]))
    assert found == (adam(lr=0.5, weight_decay=0.25, adamw=adamw),)


@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", "adam_w_mode"),
        ("deepspeed.ops.adam.fused_adam", "FusedAdam", "adam_w_mode"),
        ("apex.optimizers.fused_adam", "FusedAdam", "adam_w_mode"),
    ],
)
@pytest.mark.parametrize("mode", [True, False, 1, 0])
def test_foreign_adams_are_accepted_with_their_mode(
    module: str, name: str, attribute: str, mode: Any
) -> None:
    cls = stand_in(module, name, **{attribute: mode})
    defaults = {
        "lr": 0.5,
        "betas": (0.5, 0.75),
        "eps": 1e-4,
        "weight_decay": 0.0,
        "bias_correction": False,
    }
    (found,) = configs.settings_from_client_optimizer(cls([parameter()], defaults))
    assert found == adam(
        lr=0.5, betas=(0.5, 0.75), eps=1e-4, adamw=bool(mode), bias_correction=False
    )


def test_the_names_of_foreign_adams_are_those_of_the_installed_classes() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    for cls in (DeepSpeedCPUAdam, FusedAdam, CPUAdam, torch.optim.Adam, torch.optim.AdamW):
        home = cls.__module__.partition(".")[0]
        assert (home, cls.__name__) in Adam.classes


@pytest.mark.parametrize("name", ["Lion", "lion"])
def test_lion_has_deepspeeds_defaults(name: str) -> None:
    settings = load(optimizer={"type": name, "params": {"lr": 1e-4, "weight_decay": 0.5}}).optimizer
    expected = {"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.5}
    assert settings == configs.OptimizerSettings(optimizer=Lion(), hyperparameters=expected)


@pytest.mark.parametrize("name", ["DeepSpeedCPULion", "FusedLion"])
def test_deepspeeds_lions_are_accepted(name: str) -> None:
    defaults = {"lr": 0.5, "betas": (0.5, 0.75), "weight_decay": 0.25}
    made = stand_in("deepspeed.ops.lion", name)([parameter()], defaults)
    (found,) = configs.settings_from_client_optimizer(made)
    assert found == configs.OptimizerSettings(optimizer=Lion(), hyperparameters=defaults)


def test_lion_refuses_what_it_does_not_have() -> None:
    params = {"eps": 1e-8, "betas": [0.9, 1.0], "fp32_optimizer_states": False}
    lines = refusal({**BASE, "optimizer": {"type": "Lion", "params": params}}).splitlines()
    keys = {line.partition(":")[0].removeprefix("optimizer.params.") for line in lines}
    assert keys == set(params)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, SGD()),
        ({"momentum": 0.9}, SGD(has_momentum=True)),
        ({"momentum": 0.9, "nesterov": True}, SGD(has_momentum=True, nesterov=True)),
    ],
)
def test_sgd_has_torchs_defaults(params: dict[str, Any], expected: SGD) -> None:
    settings = load(optimizer={"type": "SGD", "params": params}).optimizer
    assert settings.optimizer == expected
    theirs = torch.optim.SGD([parameter()], **params).param_groups[0]
    assert {k: theirs[k] for k in settings.hyperparameters} == settings.hyperparameters


def test_a_group_without_momentum_has_no_buffer() -> None:
    groups = [{"params": [parameter()]}, {"params": [parameter()], "momentum": 0.5}]
    found = configs.settings_from_client_optimizer(torch.optim.SGD(groups, lr=0.1))
    assert [group.optimizer for group in found] == [SGD(), SGD(has_momentum=True)]
    assert [group.hyperparameters["momentum"] for group in found] == [0.0, 0.5]


def test_sgd_refuses_dampening_and_nesterov_without_momentum() -> None:
    params = {"momentum": 0.9, "dampening": 0.1}
    assert "dampening" in refusal({**BASE, "optimizer": {"type": "SGD", "params": params}})
    params = {"nesterov": True}
    assert "momentum is 0" in refusal({**BASE, "optimizer": {"type": "SGD", "params": params}})


def test_momentum_that_comes_later_is_refused() -> None:
    """Its buffer is not there."""
    group = {**SGD.defaults, "momentum": 0.5}
    with pytest.raises(ConfigError, match=r"momentum is 0\.5 now, expected 0"):
        SGD().numbers(group)


def test_our_own_optimizer_says_its_mode_per_group() -> None:
    cls = stand_in("stronghold.optim.cpu_adam", "CPUAdam")
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "adamw_mode": True}
    groups = [{"params": [parameter()]}, {"params": [parameter()], "adamw_mode": False}]
    found = configs.settings_from_client_optimizer(cls(groups, defaults))
    assert [group.optimizer for group in found] == [Adam(), Adam(adamw=False)]


def test_groups_keep_their_order_and_their_settings() -> None:
    groups = [
        {"params": [parameter()], "weight_decay": 0.5},
        {"params": [parameter()], "lr": 0.125, "betas": (0.5, 0.75)},
    ]
    found = configs.settings_from_client_optimizer(
        torch.optim.AdamW(groups, lr=0.25, weight_decay=0.0)
    )
    hyperparameters = [group.hyperparameters for group in found]
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in hyperparameters] == [
        (0.25, 0.5, (0.9, 0.999)),
        (0.125, 0.0, (0.5, 0.75)),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: stand_in("bitsandbytes.optim", "AdamW")(p, {"lr": 0.1}),
    ],
)
def test_other_client_optimizers_are_refused_by_name(make: Any) -> None:
    optimizer = make([parameter()])
    with pytest.raises(
        ConfigError, match=r"torch.optim.AdamW, .* or leave the optimizer out"
    ) as caught:
        configs.settings_from_client_optimizer(optimizer)
    assert type(optimizer).__name__ in str(caught.value)


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "differentiable"])
def test_a_flag_that_changes_the_arithmetic_is_refused(flag: str) -> None:
    groups: list[dict[str, Any]] = [
        {"params": [parameter()]},
        {"params": [parameter()], flag: True},
    ]
    with pytest.raises(ConfigError, match=rf"optimizer.param_groups\[1\]: {flag} is on"):
        configs.settings_from_client_optimizer(torch.optim.AdamW(groups, foreach=False))


def test_a_subclass_is_accepted_only_if_it_steps_like_its_base() -> None:
    class Renamed(torch.optim.AdamW):
        pass

    class Different(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            return None

    assert configs.settings_from_client_optimizer(Renamed([parameter()])) == (
        adam(weight_decay=TORCH_DECAY),
    )
    with pytest.raises(ConfigError, match="Different cannot run"):
        configs.settings_from_client_optimizer(Different([parameter()]))
