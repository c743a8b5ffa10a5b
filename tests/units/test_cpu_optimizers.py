"""Laws of `CPULion` and `CPUSGD` beside those of `CPUAdam`: torch's and the published steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import stronghold
from stronghold.errors import ConfigError

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = ((1,), (15,), (17, 3), (4097,), (0,), ())
STEPS = 12


def parameters(dtype: torch.dtype = F32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def train(optimizer: Any, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


SGDS: list[dict[str, Any]] = [
    {"lr": 0.05},
    {"lr": 0.05, "weight_decay": 0.1},
    {"lr": 0.02, "momentum": 0.9},
    {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    {"lr": 0.05, "maximize": True},
]


@pytest.mark.parametrize("hyper", SGDS, ids=str)
def test_sgd_is_torchs_up_to_rounding(hyper: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    train(stronghold.CPUSGD(ours, **hyper, num_threads=1), ours, range(STEPS))
    train(torch.optim.SGD(theirs, **hyper), theirs, range(STEPS))
    # A step has at most five roundings of numbers below 64, in either of the two.
    bound = 2 * STEPS * 5 * 64 * 2**-24
    for left, right in zip(ours, theirs, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=bound)


def lion(
    params: list[torch.Tensor], grads: list[list[torch.Tensor]], hyper: dict[str, Any]
) -> None:
    """The published algorithm (arXiv 2302.06675, program 1), in fp64, with decoupled decay."""
    beta1, beta2 = hyper["betas"]
    moments = [torch.zeros_like(p) for p in params]
    for of_step in grads:
        for p, m, g in zip(params, moments, of_step, strict=True):
            p.mul_(1.0 - hyper["lr"] * hyper["weight_decay"])
            p.sub_(hyper["lr"] * torch.sign(beta1 * m + (1.0 - beta1) * g))
            m.mul_(beta2).add_((1.0 - beta2) * g)


def test_lion_is_the_published_algorithm() -> None:
    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    ours = parameters()
    exact = [param.detach().double() for param in ours]
    grads = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        grads.append([torch.randn(p.shape, generator=generator).double() for p in ours])
    train(stronghold.CPULion(ours, **hyper, num_threads=1), ours, range(STEPS))
    lion(exact, grads, hyper)
    # No sign of this run is of a number near zero: only the weights' roundings differ.
    for left, right in zip(ours, exact, strict=True):
        assert torch.allclose(left.double(), right, rtol=0, atol=STEPS * 3 * 8 * 2**-24)


MAKERS: dict[str, Any] = {
    "lion": lambda p, **more: stronghold.CPULion(p, **{"lr": 1e-2, "weight_decay": 0.1, **more}),
    "sgd": lambda p, **more: stronghold.CPUSGD(p, lr=0.05, **more),
    "momentum": lambda p, **more: stronghold.CPUSGD(p, lr=0.02, momentum=0.9, **more),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, "lean"], ids=str)
def test_saving_loading_and_threads_change_no_bit(name: str, dtype: Any) -> None:
    kind = "lean" if dtype == "lean" else "exact"
    weights = BF16 if dtype == "lean" else dtype
    straight, resumed = parameters(weights), parameters(weights)
    one = MAKERS[name](straight, states=kind, num_threads=1)
    train(one, straight, range(6))
    first = MAKERS[name](resumed, states=kind, num_threads=2)
    train(first, resumed, range(3))
    second = MAKERS[name](resumed, states=kind, num_threads=2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, resumed, range(3, 6))
    for left, right in zip(straight, resumed, strict=True):
        assert torch.equal(left, right)
        states = one.state[left], second.state[right]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            other = states[1][key]
            assert value == other if key == "step" else torch.equal(value, other)


@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_optimizer_saves_what_it_loaded(name: str) -> None:
    """Loading adds no key to the groups: a program may compare two saved states."""
    params = parameters()
    first = MAKERS[name](params, num_threads=1)
    train(first, params, range(1))
    saved = first.state_dict()
    second = MAKERS[name](params, num_threads=1)
    second.load_state_dict(copy.deepcopy(saved))
    assert second.state_dict()["param_groups"] == saved["param_groups"]
    again = copy.deepcopy(second)
    again.load_state_dict(copy.deepcopy(saved))
    assert again.state_dict()["param_groups"] == saved["param_groups"]


@pytest.mark.parametrize("name", MAKERS)
def test_hyper_parameters_are_checked_before_parameters(name: str) -> None:
    with pytest.raises(ConfigError, match="weight_decay: got -1"):
        MAKERS[name](None, num_threads=1, weight_decay=-1)
    with pytest.raises(ConfigError, match="Tensor lr must be 1-element"):
        stronghold.CPUAdam(None, lr=torch.tensor([0.1, 0.2]))


def test_the_state_is_as_small_as_promised() -> None:
    for name, names in (("lion", {"exp_avg"}), ("sgd", set()), ("momentum", {"momentum_buffer"})):
        params = parameters(BF16)
        optimizer = MAKERS[name](params, num_threads=1)
        train(optimizer, params, range(1))
        assert optimizer.state[params[3]].keys() == {"step", "low", *names}


def test_torchs_momentum_is_taken_over() -> None:
    ours, theirs = parameters(), parameters()
    donor = torch.optim.SGD(theirs, lr=0.02, momentum=0.9)
    train(donor, theirs, range(3))
    with torch.no_grad():
        for left, right in zip(ours, theirs, strict=True):
            left.copy_(right)
    heir = stronghold.CPUSGD(ours, lr=0.02, momentum=0.9, num_threads=1)
    heir.load_state_dict(donor.state_dict())
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(
            heir.state[left]["momentum_buffer"], donor.state[right]["momentum_buffer"]
        )


def test_what_they_refuse_is_named() -> None:
    with pytest.raises(ConfigError, match=r"CPUSGD: dampening: got 0\.5, expected 0"):
        stronghold.CPUSGD(parameters(), momentum=0.9, dampening=0.5)
    with pytest.raises(ConfigError, match="CPULion: lr: got -1"):
        stronghold.CPULion(parameters(), lr=-1.0)
