"""DeepSpeed's safe_get_full_*: masters, moments and gradients, wherever they lie."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import utils
from deepspeed.runtime.zero import GatheredParameters
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from stronghold.optim.states import join_master
from stronghold.train.fragments import ATTRIBUTES
from tests.models import MODELS, loss_of
from tests.support import stock
from tests.support.pairs import each
from tests.support.states import MOMENTS
from tests.support.training import config
from tests.support.twin import Twin, twin

PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"window": 1},
    "resident": {"resident_layers": 1, "resident_updates": "host"},
    "updated on the gpu": {"resident_layers": 1, "resident_updates": "gpu"},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
    "files": {"nvme": {"spill": "weights"}},
}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "accumulated": {"precision": "bf16", "accumulation": 2},
    "lean": {"precision": "lean"},
}


def placed(place: str, folder: Path) -> dict[str, Any]:
    section = dict(PLACES[place])
    if "nvme" in section:
        section["nvme"] = section["nvme"] | {"path": str(folder)}
    return section


def pairs_of(both: Twin) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    named = zip(both.model.named_parameters(), both.plain.parameters(), strict=True)
    return [(name, ours, plain) for (name, ours), plain in named]


def master_of(both: Twin, plain: nn.Parameter) -> torch.Tensor:
    low = both.adam.state[plain].get("low")
    flat = plain.detach().reshape(-1).contiguous()
    return join_master(flat, low).view(plain.shape) if low is not None else plain.detach()


def check_states(both: Twin) -> None:
    for name, ours, plain in pairs_of(both):
        assert torch.equal(utils.safe_get_full_fp32_param(ours), master_of(both, plain)), name
        for moment in MOMENTS:
            states = both.adam.states(plain)
            decoded = states.decode(states.moment(moment), both.adam.state[plain])
            expected = decoded.view(plain.shape)
            assert torch.equal(utils.safe_get_full_optimizer_state(ours, moment), expected), name


@pytest.mark.parametrize(("place", "mode"), each(list(PLACES), list(MODES)))
def test_states_and_gradients_are_read(place: str, mode: str, tmp_path: Path) -> None:
    """Those of a plain loop, before the first step and after it."""
    with twin("gpt", section=placed(place, tmp_path), **MODES[mode]) as both:
        for _, ours, plain in pairs_of(both):
            assert torch.equal(utils.safe_get_full_fp32_param(ours), plain.float())
            zeros = torch.zeros(plain.shape)
            assert torch.equal(utils.safe_get_full_optimizer_state(ours, "exp_avg"), zeros)
        seeds = iter(range(99))
        both.train(*(next(seeds) for _ in range(both.accumulation)))
        check_states(both)
        for _ in range(2):
            for micro in range(both.accumulation):
                both.backward(both.on(next(seeds)))
                if micro < both.accumulation - 1:
                    both.engine.step()
            for name, ours, plain in pairs_of(both):
                waits = both.sums.get(plain, plain.grad)
                assert waits is not None
                assert torch.equal(utils.safe_get_full_grad(ours), waits.float()), name
            both.step()
        check_states(both)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with stock.one_rank(tmp_path_factory.mktemp("gloo")):
        yield


@pytest.mark.parametrize("stage", [1, 3])
def test_values_are_those_that_deepspeed_gives_at_the_same_calls(stage: int, gloo: None) -> None:
    """To the bit where nothing was computed but the gradient; Adam's rounding is torch's there."""
    model, make_batch = MODELS["gpt"]()
    theirs_model = MODELS["gpt"]()[0]
    settings = config(clipping=0.5, precision="bf16")
    settings["optimizer"]["params"] = stock.ADAM
    ours, *_ = stronghold.initialize(model=model, config=settings)
    with stock.deepspeeds_engine(theirs_model, stage=stage, bf16=True) as theirs:
        for step in range(2):
            for engine in (ours, theirs):
                engine.backward(loss_of(engine(**make_batch(step))))
            for p, q in zip(model.parameters(), theirs_model.parameters(), strict=True):
                looks = [
                    utils.safe_get_full_fp32_param,
                    utils.safe_get_full_grad,
                    lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"),
                ]
                # theirs has no states at first
                for k, look in enumerate(looks[: 2 + step]):
                    found, expected = look(p), look(q).float()
                    assert found.shape == expected.shape
                    bound = 0.0 if step == 0 else 2e-2
                    assert torch.allclose(found, expected, rtol=bound, atol=bound / 10), (k, step)
            for engine in (ours, theirs):
                engine.step()
    ours.destroy()


def test_what_cannot_be_had_is_refused_with_the_way() -> None:
    both = Twin(clipping=0.0)
    weight = both.model.head.weight
    with pytest.raises(ValueError, match=r"head\.weight: gradients .*register_hook\(function\)"):
        utils.safe_get_full_grad(weight)
    with pytest.raises(ValueError, match=r"optimizer state 'momentum' not found"):
        utils.safe_get_full_optimizer_state(weight, "momentum")
    writes = (
        lambda: utils.safe_set_full_fp32_param(weight, weight),
        lambda: utils.safe_set_full_optimizer_state(weight, weight, "exp_avg"),
        lambda: utils.safe_set_full_grad(weight, weight),
    )
    for write in writes:
        with pytest.raises(ConfigError, match=r"head\.weight: safe_set_full_\* .*register_hook"):
            write()
    both.engine.destroy()
    # of no engine: DeepSpeed's own answer
    assert not any(hasattr(nn.Parameter, name) or hasattr(weight, name) for name in ATTRIBUTES)
    assert utils.safe_get_full_fp32_param(weight) is None
    with pytest.raises(AssertionError, match="ZeRO-3"):
        utils.safe_get_local_fp32_param(weight)


@pytest.mark.parametrize("how", ["in place", "data", "assigned"])
@pytest.mark.parametrize("place", list(PLACES))
def test_a_master_has_what_the_program_has_written(place: str, how: str, tmp_path: Path) -> None:
    """Between two steps, at once. The next step goes on from it."""
    with twin("gpt", section=placed(place, tmp_path)) as both:
        both.train(0)
        for _, ours, plain in pairs_of(both):
            values = plain.detach() * 1.5
            if how == "in place":
                with torch.no_grad():
                    ours.copy_(values)
            elif how == "data":
                ours.data.copy_(values)
            else:
                ours.data = values.to(ours.device)
            assert torch.equal(utils.safe_get_full_fp32_param(ours), values)
            plain.data.copy_(values)
        both.train(1)
        check_states(both)


def test_gradients_are_not_read_within_a_backward() -> None:
    """Some have not arrived. The engine goes on without the step."""
    with twin() as both:

        def look(_: torch.Tensor) -> None:
            utils.safe_get_full_grad(both.model.head.weight)

        handle = next(both.model.parameters()).register_post_accumulate_grad_hook(look)
        with pytest.raises(ConfigError, match="reading gradients: called within a forward"):
            both.engine.backward(loss_of(both.engine(**both.make_batch(0))))
        handle.remove()
        both.train(1)


def test_gradients_that_early_updates_have_used_are_read() -> None:
    with twin(clipping=0.0, early="all") as both:
        for step in range(3):
            both.backward(both.on(step))
            assert any(layer.is_updated_early for layer in both.engine.inspect().layers)
            for name, ours, theirs in pairs_of(both):
                assert torch.equal(utils.safe_get_full_grad(ours), theirs.grad), name
            both.step()


def test_a_parameter_without_a_gradient_reads_zeros() -> None:
    with twin("unused") as both:
        both.backward(both.on(0))
        plain = [p for p in both.parameters if p.grad is None]
        assert plain
        for name, ours, theirs in pairs_of(both):
            if theirs.grad is None:
                assert not utils.safe_get_full_grad(ours).any(), name
        both.step()


def test_copies_have_no_attributes_and_gathered_parameters_are_the_newest() -> None:
    with twin() as both:
        both.train(0)
        kept = io.BytesIO()
        torch.save(both.engine.module, kept)
        kept.seek(0)
        for model in (copy.deepcopy(both.engine.module), torch.load(kept, weights_only=False)):
            assert all(vars(p) == {} for p in model.parameters())
        with GatheredParameters(list(both.model.parameters()), modifier_rank=0), torch.no_grad():
            both.check()
            for _, ours, plain in pairs_of(both):
                ours.mul_(1.5)
                plain.mul_(1.5)
        both.train(1)
        loss = loss_of(both.engine(**both.make_batch(2)))
        assert torch.equal(loss, both.on(2)(both.plain))
