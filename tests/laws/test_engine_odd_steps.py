"""The engine against a plain PyTorch loop in steps out of the ordinary: other orders of forward and
backward, gradients that are not finite, weights from outside.

Everything is equal to the bit, unless a test says why not.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.errors import ConfigError
from tests.models import MODELS as MODEL_FACTORIES
from tests.models import loss_of
from tests.support.pairs import pairs
from tests.support.places import on_gpu
from tests.support.saved import has_saved_tensor_hooks
from tests.support.training import WARMUP, config, initialized
from tests.support.twin import Twin, failing_once, twin

# --- forwards and backwards in another order ------------------------------------------------------

POLICIES = ["keep", "offload", "recompute"]
MODES: dict[str, dict[str, Any]] = {
    "early": {"clipping": 0.0, "early": "all"},
    "gated": {"clipping": 0.5},
    "accumulated": {"clipping": 0.5, "accumulation": 2},
}


@pytest.mark.parametrize(
    ("where", "mode", "policy"),
    pairs(["the engine", "the model", "a recomputation"], list(MODES), POLICIES),
)
def test_a_forward_that_is_stopped_by_hand_leaves_nothing_behind(
    where: str, mode: str, policy: str
) -> None:
    def stopped(both: Twin) -> None:
        called = both.on(9)(both.model if where == "the model" else both.engine)
        both.engine.backward(called)

    with twin(section={"activations": policy}, **MODES[mode]) as both:
        block = next(m for name, m in both.model.named_modules() if name.endswith(".2"))
        inner = next(block.children())
        answer, calls_to_stop = inner.forward, list[bool]()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if calls_to_stop and calls_to_stop.pop():
                raise KeyboardInterrupt
            return answer(*args, **kwargs)

        inner.forward = forward
        for step in range(3):
            if step == 1 and (where != "a recomputation" or policy == "recompute"):
                # The block's first call is the forward's, its second is in backward.
                calls_to_stop[:] = [True, False] if where == "a recomputation" else [True]
                with pytest.raises(KeyboardInterrupt):
                    stopped(both)
                assert calls_to_stop == []
            for micro in range(both.accumulation):
                batch = both.on(2 * step + micro)
                loss = batch(both.engine)
                assert not has_saved_tensor_hooks()
                both.engine.backward(loss)
                both.plain_backward(batch)
                if micro < both.accumulation - 1:
                    both.engine.step()
            both.step()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_that_is_stopped_within_the_programs_own_checkpoint_leaves_no_hook(
    policy: str,
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    model, make_batch = MODEL_FACTORIES["gpt_checkpointed"]()
    engine = initialized(model, config(section={"window": 1, "activations": policy}))
    handle = model.get_submodule("blocks.1.mlp.up").register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        engine(**make_batch(0))
    handle.remove()
    assert not has_saved_tensor_hooks()
    engine.backward(loss_of(engine(**make_batch(1))))
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("error", [RuntimeError("a hook of the user's"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["streamed", "resident", "whole"])
@pytest.mark.parametrize("mode", ["gated", "accumulated"])
def test_a_gradient_that_its_hook_kept_from_leaving_is_no_further_steps(
    mode: str, place: str, error: BaseException
) -> None:
    model, _ = MODEL_FACTORIES["gpt"]()
    failures: list[BaseException] = []

    def fail(_: Any) -> None:
        for failure in failures:
            raise failure

    # Of each layer a parameter, whose hook runs before the engine's, which would take .grad away.
    for number, parameter in enumerate(model.parameters()):
        if number % 3 == 0:
            parameter.register_post_accumulate_grad_hook(fail)
    sections: dict[str, dict[str, Any]] = {
        "streamed": {"window": 1},
        "resident": {"resident_layers": 1},
        "whole": {"resident_layers": "all", "resident_updates": "gpu"},
    }
    with twin(of=model, section=sections[place], **MODES[mode]) as both:
        micro = range(both.accumulation)
        both.train(*micro)
        failures.append(error)
        with pytest.raises(type(error)):
            both.engine.backward(both.on(9)(both.engine))
        failures.clear()
        assert all(parameter.grad is None for parameter in model.parameters())
        for step in range(1, 3):
            both.train(*(2 * step + k for k in micro))


def test_an_engine_that_is_destroyed_after_a_stopped_call_leaves_no_hook() -> None:
    with twin() as both:
        block = next(m for name, m in both.model.named_modules() if name.endswith(".2"))

        def forward(*args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        block.forward = forward
        with pytest.raises(KeyboardInterrupt):
            both.on(0)(both.model)
        both.engine.destroy()
        assert not has_saved_tensor_hooks()


@pytest.mark.parametrize(
    "section", [{}, {"early_layers": 2}, on_gpu("half"), on_gpu("every layer")], ids=str
)
def test_a_backward_that_fails_between_early_updates_changes_nothing(
    section: dict[str, Any],
) -> None:
    with twin(clipping=0.0, early="all", section=section) as both:
        both.train(0)
        with (
            failing_once(both.model.blocks[0].mlp.up, "backward"),
            pytest.raises(torch.OutOfMemoryError),
        ):
            both.engine.backward(both.on(1)(both.engine))
        now = both.engine.inspect()
        assert now.unfinished is None
        assert not any(layer.is_updated_early for layer in now.layers)
        both.check()
        both.train(1)
        both.train(2)


# --- gradients that are not finite ----------------------------------------------------------------


def memory_of(engine: Any) -> list[torch.Tensor]:
    """Weights, remainders and moments, copied."""
    engine.synchronize()
    held = []
    for state in engine.inspect().layers:
        arrays = {name: array for name, array in state.arrays.items() if name != "accumulated"}
        held += [array.clone() for array in arrays.values()]
    return held


def bad_by_loss(value: float) -> Any:
    def backward(both: Twin) -> None:
        both.engine.backward(both.on(5)(both.engine) * value)

    return backward


def bad_by_one_element(both: Twin) -> None:
    """One gradient of one parameter is infinite; every other is as it should be."""
    bias = both.model.blocks[1].mlp.up.bias

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(gradient[:1], torch.inf), gradient[1:]])

    handle = bias.register_hook(spoil)
    both.engine.backward(both.on(5)(both.engine))
    handle.remove()


BAD = {
    "nan": bad_by_loss(float("nan")),
    "inf": bad_by_loss(float("inf")),
    "one element": bad_by_one_element,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "mode",
    [
        {"precision": "fp32", "clipping": 0.5},
        {"precision": "fp32", "clipping": 0.0},
        {"precision": "bf16", "clipping": 0.5},
        {"precision": "bf16", "clipping": 0.0, "extra": {"bf16": {"enabled": True}}},
        {"precision": "fp32", "clipping": 0.5, "accumulation": 2},
        *({"precision": "bf16", "section": on_gpu(place)} for place in ("half", "whole")),
    ],
    ids=[
        "fp32",
        "fp32 without clipping",
        "bf16",
        "bf16 without clipping",
        "accumulated",
        "half on the gpu",
        "whole",
    ],
)
def test_a_step_with_gradients_that_are_not_finite_is_skipped_and_counted(
    mode: dict[str, Any], bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    with twin(**{**mode, "extra": {**WARMUP, **mode.get("extra", {})}}) as both:
        engine, micros = both.engine, range(both.accumulation)

        def train() -> None:
            both.shown.param_groups[0]["lr"] = engine.get_lr()[0]
            both.train(*micros)

        train()
        train()
        before, rate = memory_of(engine), engine.get_lr()
        for _ in micros[1:]:
            engine.backward(both.on(9)(engine))
            engine.step()
        BAD[bad](both)
        with caplog.at_level(logging.WARNING, "stronghold"):
            engine.step()
        assert "step 3 skipped: the gradients are not finite" in caplog.text
        assert not engine.was_step_applied()
        assert engine.optimizer.overflow
        assert (engine.global_steps, engine.skipped_steps) == (3, 1)
        assert engine.last_record.skipped
        assert engine.get_global_grad_norm() == torch.inf, "a NaN too, as DeepSpeed's"
        assert engine.last_record.grad_norm == torch.inf
        assert engine.get_lr() == rate, "the schedule moved"
        for value, expected in zip(memory_of(engine), before, strict=True):
            assert torch.equal(value, expected)
        train()
        train()
        assert (engine.global_steps, engine.skipped_steps) == (5, 1)
        assert not engine.optimizer.overflow


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_that_is_not_to_be_skipped_has_the_bits_of_a_plain_loop(
    bad: float, accumulation: int
) -> None:
    """`bf16.check_grad_overflow` false, where clipping shows that the norm is not finite."""
    extra = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    both = Twin(precision="bf16", clipping=0.5, accumulation=accumulation, extra=extra)
    both.train(*range(accumulation))
    for model in (both.model, both.plain):
        bias = model.blocks[1].mlp.up.bias
        bias.register_hook(lambda g: torch.cat([torch.full_like(g[:1], bad), g[1:]]))
    for seed in range(accumulation):
        both.backward(both.on(seed))
        both.engine.step()
    both.plain_step()
    assert both.engine.was_step_applied()
    assert both.engine.skipped_steps == 0
    found, spoiled = both.engine.module_state_dict(), 0
    for name, expected in both.plain.state_dict().items():
        spoiled += int(expected.isnan().sum())
        assert torch.equal(found[name].nan_to_num(7.0), expected.nan_to_num(7.0)), name
    assert spoiled == (1 if bad == torch.inf else sum(p.numel() for p in both.parameters))
    both.engine.destroy()


# --- weights from outside -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["engine", "checkpoint", "custom"])
@pytest.mark.parametrize("section", [{"window": 2}, on_gpu("whole")], ids=str)
def test_loaded_weights_become_the_masters(way: str, section: dict[str, Any]) -> None:
    """In every form that DeepSpeed's engine takes. The oracle of programs trains them further."""

    def custom(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in dst.named_parameters():
                parameter.copy_(src[name])

    with twin(precision="bf16", section=section) as both:
        both.train(0)
        # Values between those that bf16 has, as another run's masters: the remainder must restart.
        new = {k: v.float() * 1.1 + 1e-4 for k, v in both.plain.state_dict().items()}
        both.plain.load_state_dict(new)
        if way == "engine":
            both.engine.load_state_dict({f"module.{name}": value for name, value in new.items()})
        elif way == "checkpoint":
            both.engine.load_module_state_dict({"module": new}, strict=True)
        else:
            both.engine.load_module_state_dict(new, custom_load_fn=custom)
        masters = {
            name: layer.master(name)
            for layer in both.engine.inspect().layers
            for name in layer.trained
        }
        for name, _ in both.model.named_parameters():
            assert torch.equal(masters[name], new[name].bfloat16().float())


def test_loading_by_assignment_is_refused_before_a_parameter_is_replaced() -> None:
    with twin() as both:
        both.train(0)
        own = list(both.model.parameters())
        with pytest.raises(ConfigError, match="leave assign out"):
            both.model.load_state_dict(both.plain.state_dict(), assign=True)
        assert all(a is b for a, b in zip(own, both.model.parameters(), strict=True))
        both.train(1)
