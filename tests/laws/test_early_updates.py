"""Laws of early updates: what changes between backward and step, the bytes, and nothing left of a
step that fails or is dropped. `test_bits` and the oracle of programs show the bits of other steps.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.devices.fences import LaneName
from stronghold.errors import ConfigError, LaneError
from stronghold.private import without_torch_function
from tests.faults.test_lane_failures import WITHIN_S, fail_backward, fail_in
from tests.models import MODELS, loss_of
from tests.support.checkpoints import assert_same, snapshot
from tests.support.insides import offload_small
from tests.support.sleeping import SleepingModel
from tests.support.training import config, initialized
from tests.support.twin import Twin, twin

FEW_BYTES = 2048 * 24  # of a piece: a page of each array
SECOND = "second arrays of early updates"
ALL: dict[str, Any] = {"early_layers": "all"}
JITTER: dict[str, Any] = {"emulated": {"jitter_s": 0.0003}}
# updates outlast a backward
SLOW: dict[str, Any] = {"emulated": {"update_gbps": 0.002}}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every input is offloaded, as a large one is."""
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", FEW_BYTES)
    offload_small(monkeypatch)


def engine_of(
    model: nn.Module, section: dict[str, Any], *, clipping: float = 0.0, precision: str = "fp32"
) -> Any:
    section = {"window": 2, **section}
    return initialized(model, config(clipping=clipping, precision=precision, section=section))


def step(engine: Any, make_batch: Any, seed: int) -> None:
    engine.backward(loss_of(engine(**make_batch(seed))))
    engine.step()


def is_any_early(engine: Any) -> bool:
    return any(layer.is_updated_early for layer in engine.inspect().layers)


# -- what changes between backward and step --------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True], ids=["not begun", "ended"])
def test_a_late_gradient_cancels_the_early_update(ends: bool) -> None:
    """A second backward adds to gradients that an early update has used, or will use."""
    with twin(section={**ALL, **(JITTER if ends else SLOW)}, clipping=1e4) as both:
        for number in range(3):
            both.backward(both.on(2 * number))
            assert is_any_early(both.engine)
            if ends:
                both.engine.synchronize()
            both.backward(both.on(2 * number + 1))
            both.step()


@pytest.mark.parametrize("ends", [False, True], ids=["under way", "ended"])
def test_what_is_written_between_backward_and_step_is_stepped_from(ends: bool) -> None:
    with twin(section={**ALL, **({} if ends else SLOW)}, clipping=1e4) as both:
        for number in range(3):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            if ends:
                both.engine.synchronize()
            with torch.no_grad():
                for model in (both.model, both.plain):
                    model.blocks[1].mlp.up.weight.mul_(0.5)
                    model.embedding.weight[3] = 0.125
            both.step()


def test_a_late_gradient_of_a_step_that_goes_on_cancels_the_early_update() -> None:
    """The program ends its step later than it had said."""
    with twin(section=ALL, clipping=1e4, accumulation=3) as both:
        for number in range(3):
            both.engine.set_gradient_accumulation_boundary(True)
            both.backward(both.on(2 * number))
            assert is_any_early(both.engine)
            both.engine.set_gradient_accumulation_boundary(False)
            both.backward(both.on(2 * number + 1))
            assert not is_any_early(both.engine)
            both.engine.set_gradient_accumulation_boundary(True)
            both.step()


def test_what_no_one_notices_is_written_between_backward_and_step() -> None:
    """Code that has looked in backward, before the gradients of two calls were complete, writes
    through NumPy."""
    with twin(section={**ALL, **JITTER}, clipping=1e4) as both:
        for number in range(3):
            handles = []
            for model in (both.model, both.plain):
                weight = model.blocks[2].mlp.up.weight

                def look(_: Any, weight: Any = weight) -> None:
                    weight.sum()

                handles.append(model.embedding.weight.register_hook(look))
            batches = both.on(2 * number), both.on(2 * number + 1)
            both.backward(lambda model, batches=batches: sum(on(model) for on in batches))
            both.engine.inspect().device.update.finish()
            for handle in handles:
                handle.remove()
            for model in (both.model, both.plain):
                model.blocks[2].mlp.up.weight.detach().numpy()[...] *= 0.5
            both.step()


def when_backward_ends(model: Any, run: Callable[[nn.Parameter], None]) -> None:
    """Run it on a weight of the last block, near the end of backward: the block's gradients have
    come, and its early update is queued or has ended."""
    weight = model.blocks[2].mlp.up.weight
    model.embedding.weight.register_hook(lambda _: run(weight))


@pytest.mark.parametrize("section", [{}, SLOW, {"resident_layers": "all"}], ids=str)
def test_an_alias_that_backward_makes_shows_the_new_values(section: dict[str, Any]) -> None:
    with twin(section={**ALL, "resident_updates": "host", **section}, clipping=1e4) as both:
        kept: list[torch.Tensor] = []
        when_backward_ends(both.model, lambda weight: kept.append(weight.data))
        for number in range(3):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            both.step()
            both.engine.synchronize()
            assert torch.equal(kept.pop(), both.plain.blocks[2].mlp.up.weight)


@pytest.mark.parametrize("section", [{}, SLOW, {"resident_layers": "all"}], ids=str)
def test_what_is_written_in_backward_is_stepped_from(section: dict[str, Any]) -> None:
    @torch.no_grad()
    def halve(weight: nn.Parameter) -> None:
        weight.mul_(0.5)

    with twin(section={**ALL, "resident_updates": "host", **section}, clipping=1e4) as both:
        for model in (both.model, both.plain):
            when_backward_ends(model, halve)
        for number in range(3):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            both.step()


def change_rate(both: Twin) -> None:
    for optimizer in (both.engine.optimizer, both.shown):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def write_past_the_hidden_class(both: Twin) -> None:
    for model in (both.model, both.plain):
        with torch.no_grad(), without_torch_function():
            model.blocks[1].mlp.up.weight.mul_(0.5)


def drop_a_gradient(both: Twin) -> None:
    for model in (both.model, both.plain):
        model.blocks[1].mlp.up.zero_grad()


@pytest.mark.parametrize("ends", [False, True], ids=["under way", "ended"])
@pytest.mark.parametrize("change", [change_rate, write_past_the_hidden_class, drop_a_gradient])
def test_what_changes_before_the_step_is_the_steps(
    change: Callable[[Twin], None], ends: bool
) -> None:
    with twin(section={**ALL, **({} if ends else SLOW)}, clipping=1e4) as both:
        for number in range(3):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            if ends:
                both.engine.inspect().device.update.finish()
            change(both)
            both.step()


def test_a_parameter_without_a_gradient_keeps_its_value() -> None:
    """The second memory of its layer has an older one."""
    with twin(section={**ALL, **JITTER}, clipping=1e4) as both:
        for number in range(6):
            for model in (both.model, both.plain):
                model.blocks[1].mlp.up.weight.requires_grad_(number % 3 != 2)
            both.backward(both.on(number))
            both.engine.inspect().device.update.finish()  # the step commits what it may
            both.step()
            assert both.engine.last_record.early.committed


@pytest.mark.parametrize("section", [{}, {"resident_layers": "all"}], ids=str)
def test_an_alias_that_is_kept_over_steps_shows_each_value(section: dict[str, Any]) -> None:
    section = {**ALL, **JITTER, "resident_updates": "host", **section}
    with twin(section=section, clipping=1e4) as both:
        kept = both.model.blocks[1].mlp.up.weight.data
        for number in range(4):
            both.train(number)
            both.engine.synchronize()
            assert torch.equal(kept, both.plain.blocks[1].mlp.up.weight)
        del kept
        both.backward(both.on(4))
        assert both.engine.inspect().layers[3].is_updated_early
        both.step()


def test_a_save_beside_training_has_the_values_of_its_step(tmp_path: Path) -> None:
    """The next step makes other memory the layers', before the save has read one."""
    options: dict[str, Any] = {
        "section": {**ALL, "async_checkpoint": True},
        "clipping": 1e4,
        "precision": "bf16",
    }
    with twin(**options) as both:
        both.train(0)
        both.train(1)
        expected, opened = snapshot(both.engine), threading.Event()
        both.engine.inspect().device.lane(LaneName.IO).submit(
            "stall", lambda: opened.wait(WITHIN_S)
        )
        both.engine.save_checkpoint(tmp_path)
        both.backward(both.on(2))
        both.engine.inspect().device.update.finish()
        both.step()
        opened.set()
        assert both.engine.last_record.early.committed
        both.train(3)
    with twin(**options) as other:
        other.engine.load_checkpoint(tmp_path)
        assert_same(snapshot(other.engine), expected)
        other.plain.load_state_dict(other.engine.module_state_dict())


# -- clipped and skipped steps ---------------------------------------------------------------------


def test_early_updates_of_a_clipped_step_are_dropped_and_come_back() -> None:
    with twin(section={**ALL, **JITTER}, clipping=1.0) as both:
        for number, factor in enumerate([1.0, 1.0, 1e-4, 1e-4]):
            both.backward(lambda model, n=number, f=factor: f * both.on(n)(model))
            both.engine.inspect().device.update.finish()
            both.step()
            early, num_layers = both.engine.last_record.early, len(both.engine.plan.early)
            if number == 0:
                assert early.dropped == num_layers
            elif number == 1:
                assert early.left == num_layers
            elif number == 3:
                assert early.committed == num_layers


def test_early_updates_know_the_loss_scale_from_the_first_step_on() -> None:
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, ALL, precision="fp16")
    for number in range(3):
        engine.backward(loss_of(engine(**make_batch(number))))
        engine.inspect().device.update.finish()
        engine.step()
        assert bool(engine.last_record.early.committed) == (number > 0)
    engine.destroy()


def test_a_skipped_step_has_no_early_update() -> None:
    with twin(section=ALL, clipping=1e4, precision="bf16") as both:
        both.train(0)
        both.engine.backward(both.on(1)(both.engine) * math.inf)
        assert is_any_early(both.engine)
        both.engine.inspect().device.update.finish()
        both.engine.step()
        assert not both.engine.was_step_applied()
        assert not is_any_early(both.engine)
        both.check()
        both.train(2)


# -- the plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clipping", "section", "planned"),
    [
        (1.0, {"early_layers": None}, 0),
        (0.0, {"early_layers": None}, None),
        (1.0, {"early_layers": 2}, 2),
        (0.0, {"early_layers": 0}, 0),
    ],
)
def test_a_run_that_clips_plans_no_early_updates_unasked(
    clipping: float, section: dict[str, Any], planned: int | None
) -> None:
    """None: as many as pay, once the first steps are measured."""
    model, _ = MODELS["gpt"]()
    plan = engine_of(model, section, clipping=clipping).plan
    assert plan.demand.early_layers == planned
    assert len(plan.early) == (planned or 0)


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "bytes_each"), [("bf16", 12), ("fp32", 12), ("lean", 5.125)])
def test_an_early_layer_has_its_weights_masters_and_moments_twice(
    precision: str, bytes_each: float
) -> None:
    peaks = []
    for section in (ALL, {}):
        engine = engine_of(SleepingModel([(1 << 15, 0.0, 0.0)] * 4), section, precision=precision)
        for _ in range(2):
            engine.backward(engine(torch.ones(64, requires_grad=True)))
            engine.step()
        engine.offload_states()
        engine.reload_states()
        now = engine.inspect()
        assert now.bytes.host_peak <= now.bytes.host_planned
        assert now.plan.host_bytes[SECOND] == (bytes_each * 4 * (1 << 15) if section else 0)
        peaks.append(now.bytes.host_peak)
        engine.destroy()
    assert peaks[0] - peaks[1] == bytes_each * 4 * (1 << 15)


def test_more_than_there_are_is_refused_by_name() -> None:
    model, _ = MODELS["gpt"]()
    with pytest.raises(ConfigError, match=r"stronghold\.early_layers: got 99"):
        engine_of(model, {"early_layers": 99})


# -- other steps -----------------------------------------------------------------------------------


def test_a_step_that_is_dropped_after_backward_changes_nothing() -> None:
    """Another backward, which fails, drops the step whose early updates have ended."""
    with twin(section=ALL, clipping=1e4) as both:
        both.train(0)
        both.backward(both.on(1))
        assert is_any_early(both.engine)
        both.engine.synchronize()
        fail_backward(both.engine, both.make_batch)
        assert not is_any_early(both.engine)
        both.drop_plain()
        both.check()
        both.train(2)
        both.train(3)


def test_a_committed_update_that_failed_is_told_by_destroy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, ALL)
    step(engine, make_batch, 0)
    layer = max(engine.plan.early)
    fail_in(engine.inspect().device, monkeypatch, f"update early {layer}")

    def to_the_end() -> None:
        try:
            step(engine, make_batch, 1)
        finally:
            engine.destroy()

    with pytest.raises(LaneError, match=f"update early {layer} failed"):
        to_the_end()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    loss_of(model(**make_batch(0))).backward()


@pytest.mark.parametrize("section", [{}, SLOW], ids=["ended", "under way"])
def test_an_engine_that_is_closed_before_the_step_gives_the_old_weights_back(
    section: dict[str, Any],
) -> None:
    both = Twin(section={**ALL, **section}, clipping=1e4)
    both.train(0)
    both.engine.backward(both.on(1)(both.engine))
    assert is_any_early(both.engine)
    if not section:
        both.engine.synchronize()
    both.engine.destroy()
    expected = both.plain.state_dict()
    assert all(torch.equal(v, expected[name]) for name, v in both.model.state_dict().items())


def test_a_withdrawn_update_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that have not begun at the clip barrier run once: behind it, in place."""
    # else the training thread performs short operations
    jitter = {"emulated": {"jitter_s": 1e-6}}
    engine = engine_of(SleepingModel([(1 << 12, 0.0, 0.0)] * 8), {**ALL, **jitter})
    lane, ran = engine.inspect().device.update, list[str]()
    begun, opened = threading.Event(), threading.Event()

    def noted(name: str, work: Callable[[], None], *args: Any, **declared: Any) -> Any:
        def noting() -> None:
            if name == "update early 7":
                begun.set()
                opened.wait(WITHIN_S)
            ran.append(name)
            work()

        return submit(name, noting, *args, **declared)

    submit = lane.submit
    monkeypatch.setattr(lane, "submit", noted)
    engine.backward(engine(torch.ones(64, requires_grad=True)))
    assert all(layer.is_updated_early for layer in engine.inspect().layers)
    assert begun.wait(WITHIN_S)  # else the clip barrier withdraws it, too
    engine.step()
    opened.set()
    engine.synchronize()
    early = engine.last_record.early
    engine.destroy()
    assert (early.committed, early.left, early.dropped) == (1, 7, 0)
    assert ran == ["update early 7", *(f"update {layer}" for layer in range(7))]


@pytest.mark.parametrize("first", ["a read", "a forward", "a checkpoint"])
def test_a_reader_after_the_gate_waits_for_a_committed_update(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of the layer that the next forward needs first has begun at the clip barrier. It
    ends after it. No later update of the lane makes the reader wait in its place."""
    with twin(section=ALL, clipping=1e4, precision="bf16") as both:
        lane, begun = both.engine.inspect().device.update, threading.Event()
        queued: list[str] = []

        def late(name: str, work: Callable[[], None], *args: Any, **declared: Any) -> Any:
            def sleeping() -> None:
                begun.set()
                time.sleep(0.05)
                work()

            queued.append(name)
            is_first = name == "update early 0"
            return submit(name, sleeping if is_first else work, *args, **declared)

        submit = lane.submit
        monkeypatch.setattr(lane, "submit", late)
        for number in range(3):
            begun.clear()
            both.backward(both.on(number))
            assert begun.wait(WITHIN_S)
            both.step()
            if first == "a read":
                assert all(map(torch.equal, both.model.parameters(), both.plain.parameters()))
            elif first == "a checkpoint":
                both.engine.save_checkpoint(tmp_path)
            assert "update early 0" in queued
            assert "update 0" not in queued
