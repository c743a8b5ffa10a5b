"""The engine against a plain PyTorch loop: accumulation, refusals, skipped steps, loaded weights.

Everything is equal to the bit, unless a test says why not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from stronghold.errors import ConfigError
from tests.models import loss_of
from tests.training import moments_of
from tests.twin import Twin, twin

POLICIES = ["keep", "offload", "recompute"]


# --- accumulation ---------------------------------------------------------------------------------


def test_the_boundary_is_every_accumulation_steps_micro_batch() -> None:
    with twin(accumulation=3) as both:
        engine = both.engine
        for micro in range(7):
            both.backward(both.on(micro))
            boundary = micro % 3 == 2
            assert engine.is_gradient_accumulation_boundary() is boundary
            before = {name: p.clone() for name, p in engine.named_parameters()}
            if boundary:
                both.step()
            else:
                engine.step()
                assert not engine.was_step_applied()
                for name, parameter in engine.named_parameters():
                    assert torch.equal(parameter, before[name])
        assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (7, 2, 12)
        both.drop_plain()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_overridden_boundary_ends_a_shorter_window(precision: str) -> None:
    """As accelerate does: the boundary before every backward, `step` at a boundary alone."""
    with twin(accumulation=3, precision=precision) as both:
        for length in (3, 2, 3, 1):
            for micro in range(length):
                both.engine.set_gradient_accumulation_boundary(micro == length - 1)
                both.backward(both.on(10 * length + micro))
            both.step()
        assert both.engine.global_steps == 4


def test_losses_that_the_caller_divides_are_not_divided_again() -> None:
    with twin(accumulation=3) as both:
        for micro in range(6):
            both.backward(both.on(micro), caller_scales=True)
            if micro % 3 == 2:
                both.step()
            else:
                both.engine.step()


def test_backward_returns_the_loss_divided_by_the_accumulation_steps() -> None:
    with twin(accumulation=4) as both:
        loss = both.on(0)(both.engine)
        assert torch.equal(both.engine.backward(loss), loss / 4)
        loss = both.on(1)(both.engine)
        assert torch.equal(both.engine.backward(loss, scale_wrt_gas=False), loss)


def test_no_sync_changes_nothing_on_one_rank() -> None:
    with twin(accumulation=2) as both:
        for step in range(2):
            with both.engine.no_sync():
                both.backward(both.on(2 * step))
                both.engine.step()
            both.backward(both.on(2 * step + 1))
            both.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_backwards_before_a_step_add_up(accumulation: int, precision: str) -> None:
    with twin(accumulation=accumulation, precision=precision) as both:
        for step in range(3):
            both.engine.set_gradient_accumulation_boundary(True)
            both.backward(both.on(2 * step))
            both.backward(both.on(2 * step + 1))
            both.step()


def test_early_updates_refuse_a_second_backward_and_train_on() -> None:
    with twin(clipping=0.0) as both:
        both.train(0)
        both.backward(both.on(1))
        with pytest.raises(ConfigError, match="gradient_accumulation_steps to the number of back"):
            both.engine.backward(both.on(2)(both.engine))
        both.step()
        both.train(3)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_two_forwards_before_one_backward_equal_plain_pytorch(
    clipping: float, precision: str, policy: str
) -> None:
    """A preference loss: chosen and rejected go through the model one after the other."""
    section = {"activations": policy}
    with twin(clipping=clipping, precision=precision, section=section) as both:
        for step in range(3):
            first, second = both.on(2 * step), both.on(2 * step + 1)

            def preference(model: Any, first: Any = first, second: Any = second) -> torch.Tensor:
                return -nn.functional.logsigmoid(first(model) - second(model))

            both.backward(preference)
            both.step()


# --- what is refused, and what goes on after it ---------------------------------------------------


def test_a_loss_that_is_no_scalar_or_has_no_graph_is_refused() -> None:
    with twin() as both:
        loss = both.on(0)(both.engine)
        for wrong in (loss.expand(3), loss.detach(), torch.tensor(1.0), 1.0, None):
            with pytest.raises(ConfigError, match="expected a scalar loss with a graph"):
                both.engine.backward(wrong)
        both.engine.eval()
        with torch.no_grad(), pytest.raises(ConfigError, match="expected a scalar loss"):
            both.engine.backward(both.on(0)(both.engine))
        both.engine.train()
        both.train(1)


def test_autograds_own_backward_is_refused_and_leaves_nothing_behind() -> None:
    with twin() as both:
        both.train(0)
        with pytest.raises(ConfigError, match=r"call engine\.backward\(loss\)"):
            both.on(1)(both.engine).backward()
        assert all(parameter.grad is None for parameter in both.model.parameters())
        both.train(2)
        both.train(3)


@contextlib.contextmanager
def failing_once(module: nn.Module, where: str) -> Iterator[None]:
    """The next forward, or backward, through `module` runs out of memory."""
    failures = iter([torch.OutOfMemoryError("CUDA out of memory (injected)")])

    def fail(*_: Any) -> None:
        for failure in failures:
            raise failure

    if where == "forward":
        handle = module.register_forward_pre_hook(fail)
    else:
        parameter = next(module.parameters())
        handle = parameter.register_hook(fail)  # in backward, as its gradient is made
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_goes_on_exactly_after_a_failure_inside_the_model(
    accumulation: int, where: str, policy: str
) -> None:
    section = {"activations": policy}
    with twin(accumulation=accumulation, section=section) as both:
        seeds = range(accumulation)
        both.train(*seeds)
        if accumulation > 1:
            both.engine.backward(both.on(7)(both.engine))
            both.engine.step()
        with (
            failing_once(both.model.blocks[1].mlp.up, where),
            pytest.raises(torch.OutOfMemoryError),
        ):
            both.engine.backward(both.on(8)(both.engine))
        if accumulation > 1 and where == "forward":  # the step's earlier micro-batch still counts
            both.plain_backward(both.on(7))
            both.train(*seeds[1:])
        else:  # the step starts again
            both.train(*seeds)
        both.train(*seeds)


def test_a_forward_only_engine_refuses_backward_and_step_and_says_why() -> None:
    settings = {"optimizer": None}
    with twin(extra=settings, model_parameters=None) as both:
        engine = both.engine
        assert engine.optimizer is None
        with torch.no_grad():
            assert torch.equal(both.on(0)(engine.eval()), both.on(0)(both.plain.eval()))
        with pytest.raises(ConfigError, match=r"engine\.backward: this engine has no optimizer"):
            engine.backward(both.on(0)(engine))
        with pytest.raises(ConfigError, match=r"engine\.step: this engine has no optimizer"):
            engine.step()
        assert engine.get_lr() == []
        report = engine.memory_report()
        weights = sum(layer.numel for layer in engine._stack.layout.layers) * 4
        assert report.host_peak == report.host_planned == weights


# --- forwards and backwards in another order ------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "early": {"clipping": 0.0},
    "gated": {"clipping": 0.5},
    "accumulated": {"clipping": 0.5, "accumulation": 2},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["evaluation", "inference", "a loss that is dropped"])
def test_other_forwards_before_a_backward_change_nothing(what: str, mode: str, policy: str) -> None:
    with twin(section={"activations": policy}, **MODES[mode]) as both:
        engine = both.engine
        for step in range(3):
            for micro in range(both.accumulation):
                batch = both.on(2 * step + micro)
                loss = batch(engine)
                if what == "evaluation":
                    with torch.no_grad():
                        assert torch.equal(both.on(9)(both.model), both.on(9)(both.plain))
                elif what == "inference":
                    with torch.inference_mode():
                        assert torch.equal(both.on(9)(engine), both.on(9)(both.plain))
                else:
                    both.on(9)(engine)
                engine.backward(loss)
                both.plain_backward(batch)
                if micro < both.accumulation - 1:
                    engine.step()
            both.step()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["gated", "accumulated"])
def test_a_retained_graph_can_run_backward_twice(mode: str, policy: str) -> None:
    with twin(section={"activations": policy}, **MODES[mode]) as both:
        for step in range(2):
            both.engine.set_gradient_accumulation_boundary(True)
            loss, expected = both.on(step)(both.engine), both.on(step)(both.plain)
            both.engine.backward(loss, retain_graph=True)
            both.engine.backward(loss)
            for retain in (True, False):
                (expected / both.accumulation).backward(retain_graph=retain)
                if both.accumulation > 1:
                    for parameter in both.parameters:
                        before = both.sums.get(parameter)
                        both.sums[parameter] = (
                            parameter.grad if before is None else before + parameter.grad
                        )
                        parameter.grad = None
            both.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_a_backward_changes_no_weight(mode: str) -> None:
    with twin(**MODES[mode]) as both:
        both.train(*range(both.accumulation))
        for _ in range(both.accumulation):
            both.engine.step()
        assert both.engine.get_global_grad_norm() == 0.0
        both.check()
        both.train(*range(both.accumulation))


def test_a_backward_that_fails_between_early_updates_refuses_every_further_one() -> None:
    """Some layers are of the next step already: no further step could be exact."""
    both = Twin(clipping=0.0)
    both.train(0)
    with (
        failing_once(both.model.blocks[0].mlp.up, "backward"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        both.engine.backward(both.on(1)(both.engine))
    with pytest.raises(ConfigError, match="weights are of two steps"):
        both.engine.backward(both.on(1)(both.engine))
    both.engine.destroy()


# --- gradients that are not finite ----------------------------------------------------------------


def memory_of(engine: Any) -> list[torch.Tensor]:
    """Weights, remainders and moments, copied."""
    engine.synchronize()
    held = []
    for state in engine._stack.host.layers:
        held += [state.weights.clone(), state.exp_avg.clone(), state.exp_avg_sq.clone()]
        if state.low is not None:
            held.append(state.low.clone())
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
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "mode",
    [
        {"precision": "fp32", "clipping": 0.5},
        {"precision": "bf16", "clipping": 0.5},
        {"precision": "bf16", "clipping": 0.0, "extra": {"bf16": {"enabled": True}}},
        {"precision": "fp32", "clipping": 0.5, "accumulation": 2},
    ],
    ids=["fp32", "bf16", "bf16 without clipping", "accumulated"],
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
        assert not torch.isfinite(torch.tensor(engine.get_global_grad_norm()))
        assert engine.get_lr() == rate, "the schedule moved"
        for value, expected in zip(memory_of(engine), before, strict=True):
            assert torch.equal(value, expected)
        train()
        train()
        assert (engine.global_steps, engine.skipped_steps) == (5, 1)
        assert not engine.optimizer.overflow


def test_the_norm_is_torchs_norm_before_clipping() -> None:
    with twin("weird_model", clipping=1e-3) as both:
        assert both.engine.get_global_grad_norm() is None
        for step in range(3):
            both.backward(both.on(step))
            gradients = [p.grad.clone() for p in both.parameters if p.grad is not None]
            both.step()
            expected = torch.nn.utils.get_total_norm(gradients).item()
            # Sums of squares in another order and precision: fp32 rounding of the total.
            assert both.engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-6)
            assert both.engine.get_global_grad_norm() > 1e-3


# --- weights from outside -------------------------------------------------------------------------


@pytest.mark.parametrize("section", [{}, {"window": 2}, {"resident_layers": 1}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["model", "engine", "module", "checkpoint", "custom"])
def test_loaded_weights_become_the_masters(
    way: str, precision: str, section: dict[str, Any]
) -> None:
    def custom(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in dst.named_parameters():
                parameter.copy_(src[name])

    with twin(precision=precision, section=section) as both:
        both.train(0)
        both.train(1)
        # Values between those that bf16 has, as another run's masters: the remainder must restart.
        new = {k: v.float() * 1.1 + 1e-4 for k, v in both.plain.state_dict().items()}
        both.plain.load_state_dict(new)
        for state in both.adam._state.values():
            if state["low"] is not None:
                state["low"].zero_()
        if way == "model":
            both.model.load_state_dict(new)
        elif way == "engine":
            both.engine.load_state_dict({f"module.{name}": value for name, value in new.items()})
        elif way == "module":
            both.engine.load_module_state_dict(new)
        elif way == "checkpoint":
            both.engine.load_module_state_dict({"module": new}, strict=True)
        else:
            both.engine.load_module_state_dict(new, custom_load_fn=custom)
        with torch.no_grad():
            assert torch.equal(both.on(3)(both.model), both.on(3)(both.plain))
        both.train(2)
        both.train(3)


def test_loading_by_assignment_is_refused_before_a_parameter_is_replaced() -> None:
    with twin() as both:
        both.train(0)
        own = list(both.model.parameters())
        with pytest.raises(ConfigError, match="leave assign out"):
            both.model.load_state_dict(both.plain.state_dict(), assign=True)
        assert all(a is b for a, b in zip(own, both.model.parameters(), strict=True))
        both.train(1)


@pytest.mark.parametrize("read", ["state_dict", "module_state_dict", "parameters", "raw", "named"])
def test_what_is_read_after_a_step_is_its_result(read: str) -> None:
    # Slow lanes: whoever does not wait reads weights of the step before.
    section = {"window": 2, "emulated": {"jitter_s": 0.01, "seed": 1}}
    with twin(section=section) as both:
        engine = both.engine
        both.train(0)
        if read == "state_dict":
            values = [engine.state_dict()[f"module.{name}"] for name in both.plain.state_dict()]
        elif read == "module_state_dict":
            values = list(engine.module_state_dict().values())
        elif read == "parameters":
            values = list(engine.parameters())
        elif read == "named":
            values = [parameter for _, parameter in engine.named_parameters()]
        else:
            values = list(both.model.state_dict().values())
        for value, expected in zip(values, both.plain.state_dict().values(), strict=True):
            assert torch.equal(value, expected)


# --- DeepSpeed's parts ----------------------------------------------------------------------------


class _Tokens(torch.utils.data.Dataset[Any]):
    def __init__(self, both: Any) -> None:
        self._make_batch = both

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in self._make_batch(index).items()}


def test_training_data_gives_deepspeeds_loader() -> None:
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader

    from tests.models import token_batch

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}

    with twin(training_data=_Tokens(token_batch), collate_fn=collate) as both:
        loader = both.engine.training_dataloader
        assert isinstance(loader, DeepSpeedDataLoader)
        batches = list(loader)
        assert len(batches) == len(loader) == 6
        for batch in batches:
            assert batch["input_ids"].shape == (2, 8)
            both.backward(lambda model, batch=batch: loss_of(model(**batch)))
            both.step()


def test_the_csv_monitor_gets_the_learning_rate_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # DeepSpeed's own group would compile a kernel for half a minute; its monitors ask for a rank.
    begun: list[int] = []
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **_: begun.append(1))
    monkeypatch.setattr(deepspeed.comm, "is_initialized", lambda: bool(begun))
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda group=None: 0)
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    with twin(extra={**WARMUP, "csv_monitor": monitor}) as both:
        used = []
        for step in range(3):
            both.shown.param_groups[0]["lr"] = both.engine.get_lr()[0]
            used += both.engine.get_lr()
            both.train(step)
    (written,) = tmp_path.rglob("*lr*.csv")
    rows = [line.split(",") for line in written.read_text().splitlines()[1:]]
    assert [(int(samples), float(rate)) for samples, rate in rows] == [
        (2 * (step + 1), rate) for step, rate in enumerate(used)
    ]


def test_a_monitor_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.comm, "is_initialized", lambda: False)
    with (
        pytest.raises(ConfigError, match=r"deepspeed\.init_distributed\(\) first"),
        twin(extra={"csv_monitor": {"enabled": True}}, dist_init_required=False),
    ):
        pass


def test_batch_sizes_are_read_and_changed_as_in_deepspeed() -> None:
    with twin(accumulation=3) as both:
        engine = both.engine
        assert engine.train_batch_size() == 6
        assert engine.train_micro_batch_size_per_gpu() == 2
        assert engine.gradient_accumulation_steps() == 3
        assert engine.gradient_clipping() == 1.0
        both.train(0, 1, 2)
        engine.set_train_batch_size(4)
        both.accumulation = 2
        assert engine.gradient_accumulation_steps() == 2
        engine.micro_steps = 0
        both.train(3, 4)
        with pytest.raises(ValueError, match="divisible"):
            engine.set_train_batch_size(5)


def test_more_accumulation_steps_than_were_planned_for_are_refused_without_effect() -> None:
    with twin() as both:
        with pytest.raises(ConfigError, match="start with gradient_accumulation_steps above 1"):
            both.engine.set_train_batch_size(4)
        assert both.engine.train_batch_size() == 2
        assert both.engine.gradient_accumulation_steps() == 1
        both.train(0)


def test_moments_are_those_of_the_plain_loop() -> None:
    with twin("weird_model") as both:
        both.train(0)
        both.train(1)
        moments = moments_of(both.engine)
        for name, parameter in both.plain.named_parameters():
            if parameter in both.adam._state:
                state = both.adam._state[parameter]
                assert torch.equal(moments[name][0], state["m"])
                assert torch.equal(moments[name][1], state["v"])
