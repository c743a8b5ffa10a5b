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
from stronghold.errors import ConfigError
from stronghold.streaming.optimizer import EngineOptimizer
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
    [({}, "fp32", 1), (MIXED, "bf16", 2), (FRESH, "bf16", 1), (WHOLE, "fp32", 2)],
)
def test_a_model_that_was_away_trains_on_with_the_same_bits(
    section: dict[str, Any], precision: str, accumulation: int, tmp_path: Path
) -> None:
    with twin(precision=precision, section=section, accumulation=accumulation) as both:
        both.train(*range(accumulation))
        device = both.engine.inspect().device
        assert device.memory.allocated_bytes > 0
        both.engine.offload_states(include=[OffloadStateTypeEnum.optim_states])
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


@pytest.mark.parametrize("section", [MIXED, WHOLE])
def test_the_optimizer_takes_the_model_away_as_deepspeeds_does(section: dict[str, Any]) -> None:
    """As OpenRLHF calls it."""
    with twin(section=section) as both:
        both.train(0)
        optimizer, device = both.engine.optimizer, both.engine.inspect().device
        optimizer.offload_states(
            include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params],
            device=OffloadDeviceEnum.cpu,
            pin_memory=True,
            non_blocking=False,
        )
        assert device.memory.allocated_bytes == 0
        with pytest.raises(ConfigError, match=r"engine\.reload_states"):
            both.engine(**both.make_batch(1))
        optimizer.reload_states(non_blocking=True)
        assert device.memory.allocated_bytes > 0
        both.train(1)


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
