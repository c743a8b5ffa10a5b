"""What users do to gradients and parameters beside training, and what is given out and saved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import stronghold
from stronghold.errors import ConfigError
from tests.models import MODELS, loss_of
from tests.support.pairs import pairs
from tests.support.training import config
from tests.support.twin import Twin, twin

PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"window": 1},
    "recomputed": {"window": 1, "activations": "recompute"},
    "offloaded": {"window": 1, "activations": "offload"},
    "resident": {"resident_layers": 1, "resident_updates": "gpu"},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
}


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


HOOKS = {
    "tensor": lambda parameter: parameter.register_hook(lambda gradient: gradient * 0.5),
    "post-accumulate": lambda parameter: parameter.register_post_accumulate_grad_hook(halve),
}


UPDATES: dict[str, dict[str, Any]] = {
    "gated": {"clipping": 1.0},
    "early": {"clipping": 0.0, "early": "all"},
}


@pytest.mark.parametrize(("place", "hook", "updates"), pairs(list(PLACES), list(HOOKS), UPDATES))
def test_hooks_of_after_initialize_change_gradients(
    place: str, hook: str, updates: dict[str, Any]
) -> None:
    with twin(section=PLACES[place], **updates) as both:
        both.train(0)
        pair = list(zip(both.model.parameters(), both.plain.parameters(), strict=True))
        handles = [HOOKS[hook](p) for each in pair for p in each]
        both.train(1)
        both.train(2)
        for handle in handles:
            handle.remove()
        both.train(3)


@pytest.mark.parametrize("place", ["streamed", "resident", "whole"])
def test_a_grad_that_is_set_by_hand_is_refused_with_the_way(place: str) -> None:
    with twin(section=PLACES[place]) as both:
        weight = both.model.blocks[0].mlp.up.weight
        both.backward(both.on(1))
        weight.grad = torch.ones_like(weight)
        with pytest.raises(ConfigError, match=r"up\.weight\.grad was set by hand.*register_hook"):
            both.engine.step()
        assert weight.grad is None
        both.step()


@pytest.mark.parametrize("place", ["streamed", "whole"])
def test_clipping_by_hand_is_the_configs_or_refused_with_the_way(place: str) -> None:
    """Under the name that a program imported before."""
    with twin(section=PLACES[place], clipping=0.5) as both:
        both.backward(both.on(0))
        with pytest.raises(ConfigError, match=r"got 0\.5\. Set \"gradient_clipping\": 9\.0"):
            clip_grad_norm_(both.model.parameters(), 9.0)
        with pytest.warns(UserWarning, match="the engine clips in step") as warned:
            clip_grad_norm_(both.engine.parameters(), 0.5)
        assert warned[0].filename == __file__
        both.step()
    assert clip_grad_norm_(both.plain.parameters(), 9.0) >= 0.0  # torch's again


@pytest.mark.parametrize("place", [place for place in PLACES if place != "recomputed"])
def test_freezing_between_forward_and_backward_drops_the_gradient(place: str) -> None:
    """A block that runs again then does not save what it saved before, and is refused."""
    with twin(section=PLACES[place]) as both:
        both.train(0)
        for model in (both.engine, both.plain):
            module = both.model if model is both.engine else both.plain
            loss = both.on(1)(model)
            frozen = module.blocks[0].mlp.up.requires_grad_(False)
            both.engine.backward(loss) if model is both.engine else loss.backward()
            assert not frozen.weight.requires_grad
            frozen.requires_grad_(True)
        assert both.plain.blocks[0].mlp.up.weight.grad is None
        both.step()
        both.train(2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["streamed", "resident", "whole"])
def test_what_a_state_dict_gives_out_saves_as_what_it_is(place: str, precision: str) -> None:
    """And is the parameter's memory as before: what is written into it is trained."""
    with twin(section=PLACES[place], precision=precision) as both:
        both.train(0)
        state = both.model.blocks[1].state_dict()
        for name, value in state.items():
            assert value.untyped_storage().nbytes() == value.nbytes, name
        kept = io.BytesIO()
        torch.save(state, kept)
        assert kept.tell() < 2 * sum(value.nbytes for value in state.values()) + 700 * len(state)
        plain = both.plain.blocks[1].state_dict()
        with torch.no_grad():
            for name, value in state.items():
                value.mul_(1.5)
                plain[name].mul_(1.5)
        del state
        both.train(1)
        both.check()


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    both = Twin(section={"async_checkpoint": True, "emulated": {"jitter_s": 1e-3}})
    both.train(0)
    both.engine.save_checkpoint("saved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    both.train(1)
    both.engine.wait_for_checkpoint()
    assert (tmp_path / "saved" / "latest").read_text().strip() == "global_step1"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    both.engine.destroy()


@pytest.mark.parametrize("without", ["optimizer", "steps_per_print"])
def test_an_engine_takes_the_model_over_from_one_that_has_not_trained(without: str) -> None:
    """As DPO's precompute_ref_log_probs: the same model is prepared for inference, then trained."""
    model, make_batch = MODELS["gpt"]()
    settings = config()
    forward_only = {k: v for k, v in settings.items() if k != without}
    reference, *_ = stronghold.initialize(model=model, config=forward_only)
    with torch.no_grad():
        before = loss_of(reference(**make_batch(0)))
    engine, *_ = stronghold.initialize(model=model, config=settings)
    loss = loss_of(engine(**make_batch(0)))
    assert torch.equal(loss, before)
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied()
    with torch.no_grad():
        assert torch.equal(loss_of(reference(**make_batch(0))), loss_of(engine(**make_batch(0))))
    with pytest.raises(ConfigError, match="destroyed"):
        reference.step()
    reference.destroy()  # is over already, and changes nothing
    engine.backward(loss_of(engine(**make_batch(1))))
    engine.step()
    engine.destroy()
