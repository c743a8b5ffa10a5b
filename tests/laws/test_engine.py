"""The engine against a plain PyTorch loop: accumulation, refusals, DeepSpeed's parts.

Everything is equal to the bit, unless a test says why not.
"""

from __future__ import annotations

import re
from typing import Any

import deepspeed
import pytest
import torch

from stronghold.errors import ConfigError
from tests.models import loss_of
from tests.support.pairs import pairs
from tests.support.places import ON_GPU, on_gpu
from tests.support.twin import failing_once, twin

POLICIES = ["keep", "offload", "recompute"]
PLACES = {policy: {"activations": policy} for policy in POLICIES}
PLACES |= {place: on_gpu(place) for place in ON_GPU}


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


def test_backward_returns_the_loss_divided_by_the_accumulation_steps() -> None:
    with twin(accumulation=4) as both:
        loss = both.on(0)(both.engine)
        assert torch.equal(both.engine.backward(loss), loss / 4)
        loss = both.on(1)(both.engine)
        assert torch.equal(both.engine.backward(loss, scale_wrt_gas=False), loss)


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


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_through_another_engines_model_is_that_ones_too(frozen: bool) -> None:
    """As a generator's comes through its critic."""
    with twin("sequential") as critic, twin("sequential") as generator:

        def through_the_critic(model: Any) -> torch.Tensor:
            batch = critic.make_batch(0)
            judge = critic.engine if model is generator.engine else critic.plain
            inputs = batch["inputs"] * model(**batch)
            return judge(inputs=inputs, targets=batch["targets"])

        for step in range(2):
            for model in (critic.model, critic.plain):
                model.requires_grad_(not frozen)
            generator.backward(through_the_critic)
            generator.step()
            for model in (critic.model, critic.plain):
                model.requires_grad_(True)
            if frozen:
                critic.train(step)
            else:
                critic.step()


@pytest.mark.parametrize(
    ("accumulation", "where", "section"),
    pairs({"once": 1, "three": 3}, ["forward", "backward"], PLACES),
)
def test_training_goes_on_exactly_after_a_failure_inside_the_model(
    accumulation: int, where: str, section: dict[str, Any]
) -> None:
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
        # the step's earlier micro-batch still counts
        if accumulation > 1 and where == "forward":
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
        weights = sum(layer.weight_bytes for layer in engine.inspect().layout.layers)
        assert report.host_peak == report.host_planned == weights


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


# --- the start ------------------------------------------------------------------------------------


def test_the_log_says_once_where_the_seconds_of_the_start_went(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "stronghold")
    with twin() as both:
        for step in range(3):
            both.train(step)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("start:")]
    whole_s, *parts_s = map(float, re.findall(r"\d+\.\d", line.partition(";")[0]))
    assert len(parts_s) == 5
    assert whole_s == pytest.approx(sum(parts_s), abs=0.3)
