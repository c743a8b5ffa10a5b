"""`offload_states` and `reload_states`: room for a generator between two steps."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import utils
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from stronghold.engine import StrongholdEngine
from stronghold.errors import ConfigError, LaneError
from stronghold.train.optimizer import EngineOptimizer
from tests.support.pairs import each
from tests.support.training import initialized
from tests.support.twin import Twin, twin

WHOLE = {"window": None, "resident_layers": "all"}
MIXED = {"window": 1, "resident_layers": 1, "resident_updates": "gpu"}
FRESH = {"window": 2, "resident_layers": 1, "resident_updates": "host"}


def write(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(1.5)


@pytest.mark.parametrize(
    ("section", "precision", "accumulation"),
    [
        ({}, "fp32", 1),
        (MIXED, "bf16", 2),
        ({**MIXED, "nvme": {"spill": "masters"}}, "bf16", 1),
        (FRESH, "bf16", 1),
        (WHOLE, "fp32", 2),
    ],
)
def test_a_model_that_was_away_trains_on_with_the_same_bits(
    section: dict[str, Any], precision: str, accumulation: int, tmp_path: Path
) -> None:
    if "nvme" in section:
        section = {**section, "nvme": {**section["nvme"], "path": str(tmp_path)}}
    with twin(precision=precision, section=section, accumulation=accumulation) as both:
        both.train(*range(accumulation))
        device = both.engine.inspect().device
        assert device.memory.allocated_bytes > 0
        both.engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        both.engine.offload_states(device=OffloadDeviceEnum.cpu, pin_memory=False)
        assert device.memory.allocated_bytes == 0
        both.check()
        with torch.no_grad():
            assert torch.equal(both.on(5)(both.model), both.on(5)(both.plain))
        for model in (both.model, both.plain):
            write(next(model.parameters()))
        with pytest.raises(ConfigError, match=r"engine\.reload_states"):
            both.engine(**both.make_batch(1))
        with pytest.raises(ConfigError, match=r"engine\.reload_states"):
            both.engine.load_checkpoint(str(tmp_path))
        both.engine.reload_states()
        both.engine.reload_states(non_blocking=True)
        both.train(*range(2, 2 + accumulation))
        both.train(*range(4, 4 + accumulation))
        report = both.engine.memory_report()
        assert report.gpu_peak <= report.gpu_planned


def test_values_of_another_shape_are_refused_and_what_was_there_comes_back() -> None:
    with twin(section=MIXED) as both:
        both.train(0)
        both.engine.offload_states()
        parameter = next(both.model.parameters())
        before = parameter.data
        parameter.data = torch.zeros(3)
        with pytest.raises(ConfigError, match="shape"):
            both.engine.reload_states()
        parameter.data = before
        both.engine.reload_states()
        both.train(1)


@pytest.mark.parametrize("moves", [0, 1])
def test_after_an_interrupt_while_layers_move_the_newest_weights_come_back(
    moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Twin(section={**MIXED, "resident_layers": 2})
    both.train(0)
    arrays = both.engine._job.trainer.arrays
    copy_now, copies = arrays._device.copy_now, []

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(source)
        if len(copies) == 1 + moves * 4:
            raise KeyboardInterrupt
        copy_now(target, source)

    monkeypatch.setattr(arrays._device, "copy_now", copy)
    with pytest.raises(KeyboardInterrupt):
        both.engine.offload_states()
    monkeypatch.undo()
    for call in (both.engine.offload_states, both.engine.reload_states):
        with pytest.raises(LaneError, match="offload_states failed"):
            call()
    both.engine.destroy()
    both.check()


def test_masters_of_their_own_take_what_was_written_while_the_model_was_away() -> None:
    both = Twin(precision="fp16")
    parameter = next(both.model.parameters())
    both.engine.backward(both.on(0)(both.engine))
    both.engine.step()
    both.engine.offload_states()
    write(parameter)
    written = parameter.detach().clone()
    both.engine.reload_states()
    master = utils.safe_get_full_fp32_param(parameter)
    assert torch.equal(master, written.float())
    both.engine.destroy()


def test_a_checkpoint_of_a_model_that_is_away_is_that_of_one_that_is_not(tmp_path: Path) -> None:
    with twin(section=MIXED) as both, twin(section=MIXED) as other:
        both.train(0)
        both.engine.offload_states()
        both.engine.save_checkpoint(str(tmp_path))
        other.engine.load_checkpoint(str(tmp_path))
        other.plain.load_state_dict(both.plain.state_dict())
        both.engine.reload_states()
        for each in (both, other):
            each.engine.backward(each.on(1)(each.engine))
            each.engine.step()
        for name, value in both.engine.module_state_dict().items():
            assert torch.equal(value, other.engine.module_state_dict()[name]), name
        both.plain.load_state_dict(both.engine.module_state_dict())
        other.plain.load_state_dict(both.engine.module_state_dict())


@pytest.mark.parametrize("section", [MIXED, WHOLE])
def test_a_model_that_is_away_is_given_back_and_another_engine_takes_it(
    section: dict[str, Any],
) -> None:
    both = Twin(section=section)
    both.train(0)
    both.engine.offload_states()
    both.engine.destroy()
    both.check()
    device = both.engine.inspect().device
    assert device.memory.allocated_bytes == 0
    both.restart_plain()
    both.engine = initialized(both.model, both.settings)
    both.train(1)
    both.check()
    both.engine.destroy()


def test_gradients_that_wait_and_room_that_is_gone_are_refused() -> None:
    with twin(section=MIXED) as both:
        both.backward(both.on(0))
        with pytest.raises(ConfigError, match=r"engine\.step"):
            both.engine.offload_states()
        both.step()
        both.engine.offload_states()
        device = both.engine.inspect().device
        device.memory.budget_bytes = 1
        with pytest.raises(ConfigError, match=r"needs .* bytes .* programs have taken"):
            both.engine.reload_states()
        device.memory.budget_bytes = None
        both.engine.reload_states()
        both.train(1)
        with pytest.raises(ConfigError, match='expected "cpu"'):
            both.engine.offload_states(device="nvme")


# OpenRLHF's list: the weights stay.
WITHOUT_WEIGHTS = [
    OffloadStateTypeEnum.optim_states,
    OffloadStateTypeEnum.contiguous_grad_buffer,
    OffloadStateTypeEnum.hp_params,
    OffloadStateTypeEnum.lp_grads,
]


@pytest.mark.parametrize(
    ("section", "precision"),
    each({"streamed": {}, "mixed": MIXED, "fresh": FRESH, "whole": WHOLE}, ["fp32", "bf16"]),
)
def test_weights_that_stay_are_evaluated(section: dict[str, Any], precision: str) -> None:
    """As OpenRLHF calls it: optimizer states leave at first, and log-probabilities are computed
    while they are away."""
    with twin(precision=precision, section=section) as both:
        optimizer, device = both.engine.optimizer, both.engine.inspect().device
        optimizer.offload_states(include=WITHOUT_WEIGHTS, pin_memory=True, non_blocking=True)
        before = device.memory.allocated_bytes
        both.engine.empty_partition_cache()
        both.engine.reload_states(non_blocking=True)
        both.train(0)
        assert device.memory.allocated_bytes > before
        for _ in range(2):
            optimizer.offload_states(include=WITHOUT_WEIGHTS, device=OffloadDeviceEnum.cpu)
        assert device.memory.allocated_bytes == before
        with torch.no_grad():
            for model in (both.engine, both.engine.module):
                assert torch.equal(both.on(5)(model), both.on(5)(both.plain))
        assert device.memory.allocated_bytes == before
        both.check()
        for model in (both.model, both.plain):
            write(next(model.parameters()))
        optimizer.reload_states(non_blocking=True)
        both.train(1)


def test_states_that_are_away_are_not_trained() -> None:
    with twin(section=MIXED) as both:
        both.train(0)
        both.engine.offload_states(include=WITHOUT_WEIGHTS)
        losses = [both.on(1)(both.engine)]
        backwards = (lambda: both.engine.backward(losses[0]), losses[0].backward)
        for call in (*backwards, both.engine.step):
            with pytest.raises(ConfigError, match=r"masters, moments and gradients .*reload"):
                call()
        losses.clear()
        del backwards, call
        both.engine.reload_states()
        both.train(1)


def test_more_can_leave_later_and_all_comes_back() -> None:
    with twin(precision="bf16", section=MIXED) as both:
        both.train(0)
        device = both.engine.inspect().device
        there = device.memory.allocated_bytes
        both.engine.offload_states(include=WITHOUT_WEIGHTS)
        middle = device.memory.allocated_bytes
        both.engine.offload_states(include=[])
        assert 0 < middle < there
        both.engine.offload_states()
        assert device.memory.allocated_bytes == 0
        both.engine.offload_states(include=WITHOUT_WEIGHTS)
        assert device.memory.allocated_bytes == 0
        both.engine.reload_states()
        both.train(1)
        assert device.memory.allocated_bytes == there


@pytest.mark.parametrize("include", [None, WITHOUT_WEIGHTS])
def test_a_checkpoint_of_states_that_are_away(include: Any, tmp_path: Path) -> None:
    """And the engine that is closed while they are away gives the newest weights back."""
    both = Twin(precision="bf16", section=MIXED)
    both.train(0)
    both.engine.offload_states(include=include)
    with pytest.raises(ConfigError, match=r"engine\.reload_states"):
        both.engine.load_checkpoint(str(tmp_path))
    both.engine.save_checkpoint(str(tmp_path))
    both.engine.destroy()
    both.check()
    other = Twin(precision="bf16", section=MIXED)
    other.engine.load_checkpoint(str(tmp_path))
    other.engine.backward(other.on(1)(other.engine))
    other.engine.step()
    both.plain_backward(both.on(1))
    both.plain_step()
    for name, value in other.engine.module_state_dict().items():
        assert torch.equal(value, both.plain.state_dict()[name]), name
    other.engine.destroy()


def test_a_graph_from_before_is_refused_by_name() -> None:
    """Between a forward and its backward: what the graph saved has left the device."""
    with twin(section=MIXED) as both:
        both.train(0)
        loss = both.on(1)(both.engine)
        both.engine.offload_states()
        with pytest.raises(ConfigError, match=r"engine\.reload_states"):
            both.engine.backward(loss)
        both.engine.reload_states()
        with pytest.raises(ConfigError, match="forward"):
            both.engine.backward(loss)
        del loss
        both.train(1)


def test_after_a_call_of_the_module_that_raised_everything_leaves() -> None:
    with twin(section=MIXED) as both:
        both.train(0)
        block = next(m for m in both.model.modules() if isinstance(m, torch.nn.LayerNorm))

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        for call in (both.engine, both.engine.module):
            handle = block.register_forward_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                call(**both.make_batch(1))
            handle.remove()
            both.engine.offload_states()
            both.engine.reload_states()
        both.train(1)


def test_within_a_pass_nothing_leaves() -> None:
    with twin(section=MIXED) as both:
        seen: list[str] = []

        def look(*_: Any) -> None:
            with pytest.raises(ConfigError, match="within a forward"):
                both.engine.offload_states()
            seen.append("forward")

        block = next(m for m in both.model.modules() if isinstance(m, torch.nn.LayerNorm))
        handle = block.register_forward_hook(look)
        both.train(0)
        handle.remove()
        assert seen


@pytest.mark.parametrize("accumulation", [1, 2])
def test_in_the_middle_of_a_step_nothing_leaves(accumulation: int) -> None:
    with twin(section=MIXED, accumulation=accumulation) as both:
        both.backward(both.on(0))
        for include in (None, WITHOUT_WEIGHTS):
            with pytest.raises(ConfigError, match=r"engine\.step"):
                both.engine.offload_states(include=include)
        if accumulation == 2:
            both.engine.step()
            with pytest.raises(ConfigError, match=r"engine\.step"):
                both.engine.offload_states()
            both.backward(both.on(1))
        both.step()


def test_an_unknown_kind_is_named() -> None:
    with twin() as both, pytest.raises(ConfigError, match='Did you mean "lp_params"'):
        both.engine.offload_states(include=["lp_param"])


def test_an_engine_that_is_destroyed_or_gone_says_so() -> None:
    both = Twin()
    optimizer = both.engine.optimizer
    both.engine.destroy()
    for call in (optimizer.offload_states, optimizer.reload_states):
        with pytest.raises(ConfigError, match=f"engine.{call.__name__}: .* was destroyed"):
            call()
    both.engine = None
    for call in (optimizer.offload_states, optimizer.reload_states):
        with pytest.raises(ConfigError, match=f"optimizer.{call.__name__}.* not connected"):
            call()


@pytest.mark.parametrize("name", ["offload_states", "reload_states"])
def test_signatures_are_deepspeeds(name: str) -> None:
    def arguments(of: type) -> list[tuple[str, Any]]:
        signature = inspect.signature(getattr(of, name))
        return [(parameter.name, parameter.default) for parameter in signature.parameters.values()]

    expected = arguments(deepspeed.DeepSpeedEngine)
    for cls in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        assert arguments(cls) == expected
    for cls in (StrongholdEngine, EngineOptimizer):
        assert arguments(cls) == expected
