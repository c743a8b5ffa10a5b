"""Levels of activations change in place, and layers move again for a batch that has no room. On a
counted device, whose memory ends for activations, too. Losses and weights are a plain loop's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from stronghold.checkpoint.files import write_tensors
from stronghold.engine.planner import HEADROOM
from stronghold.errors import ConfigError
from stronghold.model.costs import count_costs
from tests.models import loss_of, token_batch
from tests.models.families import llama_of
from tests.support.counted import counted
from tests.support.profiles import use_slow_link
from tests.support.training import Run, assert_identical, config, moments_of, train_plain

SHORT, LONG = 32, 256  # tokens of a sequence, of which a batch has two


def section_of(total_bytes: int, **more: Any) -> dict[str, Any]:
    return {"gpu_memory": total_bytes, "cpu_threads": 1, **more}


def llama(lengths: list[int], *, trains_head: bool = True) -> Any:
    """A model with six blocks of 61,000 parameters, and batches with so many tokens in a sequence.
    All of it takes 5.5 MB on the device, a short batch 1.4 MB, and a long one 13, of which 2.6 if
    blocks are computed again."""

    def factory() -> Any:
        torch.manual_seed(0)
        model = llama_of(hidden=64, inner=256, layers=6, heads=4, pairs=2, vocabulary=64)
        model.lm_head.requires_grad_(trains_head)
        model.model.norm.requires_grad_(trains_head)
        return model, lambda micro: token_batch(micro, length=lengths[micro])

    return factory


@pytest.fixture
def slow_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays on the device pays."""
    use_slow_link(tmp_path, monkeypatch)


def levels_of(engine: Any) -> tuple[str, ...]:
    """The levels of the last forward, of the blocks."""
    layers = engine._job.layers
    return tuple(layer.level for layer in layers if layer.is_block)


def finish(run: Run, engine: Any) -> None:
    """Add what the engine has trained. These copies are not the device's."""
    engine.inspect().device.memory.total_bytes = 1 << 40
    run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    run.moments = moments_of(engine)


def take_step(engine: Any, batch: dict[str, Any], run: Run) -> None:
    loss = loss_of(engine(**batch))
    engine.backward(loss)
    engine.step()
    run.losses.append(loss.detach().clone())


def plain(lengths: list[int], **more: Any) -> Run:
    return train_plain(llama(lengths), steps=len(lengths), precision="bf16", **more)


def test_a_larger_batch_keeps_as_much_as_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all or nothing: the first blocks are computed again first. A smaller batch keeps all that
    its plan says. A size is counted once."""
    monkeypatch.setattr("stronghold.engine.planner.CHECKED_AHEAD", 1.0)
    sizes = list(range(SHORT, LONG, 48))
    lengths = [*sizes, *sizes[-3:], SHORT]
    num_counted = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_counted
        num_counted += 1
        return count_costs(*args, **kwargs)

    monkeypatch.setattr("stronghold.engine.planner.count_costs", counting)
    pinned = {"resident_layers": 0, "resident_updates": "host"}
    settings = config(precision="bf16", section=section_of(5_000_000, **pinned))
    run, seen = Run(), list[tuple[str, ...]]()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        for micro in range(len(lengths)):
            take_step(engine, make_batch(micro), run)
            seen.append(levels_of(engine))
        plans_tokens = engine.plan.demand.tokens
        finish(run, engine)
    num_kept = [levels.count("keep") for levels in seen]
    assert num_kept[0] == num_kept[-1] == 6
    assert num_counted == len(sizes)
    assert len({*num_kept}) >= 3, num_kept
    for levels, kept in zip(seen, num_kept, strict=True):
        assert "keep" not in levels[: 6 - kept]  # the last blocks keep most
    assert plans_tokens == 2 * SHORT
    assert_identical(run, plain(lengths))


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("order", [[2, SHORT, LONG, 2], [SHORT, LONG, SHORT, LONG], [8, 48, 250]])
@pytest.mark.parametrize("total_bytes", [6_000_000, 8_000_000])
def test_layers_move_again_for_a_batch_that_has_no_room(
    total_bytes: int, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan for the first batch fills the device with layers. No batch is refused."""
    settings = config(precision="bf16", section=section_of(total_bytes))
    run, buffers = Run(), list[int]()
    with counted(llama(order), settings, monkeypatch) as (engine, make_batch):
        for micro in range(len(order)):
            take_step(engine, make_batch(micro), run)
            buffers.append(engine.plan.gpu_total_bytes)
        assert engine.memory_report().gpu_peak <= engine.memory_report().gpu_planned
        finish(run, engine)
    assert buffers == sorted(buffers, reverse=True)
    assert buffers[-1] < buffers[0]
    assert_identical(run, plain(order))


@pytest.mark.usefixtures("slow_link")
def test_layers_move_again_where_the_config_sets_the_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [SHORT, LONG]
    section = section_of(7_000_000, activations="recompute")
    settings = config(precision="bf16", section=section)
    run, buffers = Run(), list[int]()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        for micro in range(2):
            take_step(engine, make_batch(micro), run)
            assert {*levels_of(engine)} == {"recompute"}
            buffers.append(engine.plan.gpu_total_bytes)
        finish(run, engine)
    assert buffers[1] < buffers[0]
    assert_identical(run, plain(lengths))


@pytest.mark.usefixtures("slow_link")
def test_no_layer_moves_while_gradients_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch without room is refused within a step, and trains as the first one of the next."""
    lengths = [SHORT, SHORT, LONG, SHORT, SHORT, LONG]
    of_steps = [0, 1, 3, 4, 5, 2]
    settings = config(precision="bf16", accumulation=2, section=section_of(6_000_000))
    run = Run()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        for micro in (0, 1, 3):
            take_step(engine, make_batch(micro), run)
        before = engine.plan
        with pytest.raises(stronghold.OutOfMemoryError, match="would be out of memory"):
            engine(**make_batch(2))
        take_step(engine, make_batch(4), run)
        assert engine.plan is before
        for micro in (5, 2):
            take_step(engine, make_batch(micro), run)
        assert engine.plan.gpu_total_bytes < before.gpu_total_bytes
        finish(run, engine)
    batches = [token_batch(micro, length=lengths[micro]) for micro in of_steps]
    factory = lambda: (llama([])()[0], batches.__getitem__)  # noqa: E731
    assert_identical(run, train_plain(factory, steps=3, accumulation=2, precision="bf16"))


@pytest.mark.usefixtures("slow_link")
def test_no_layer_moves_while_a_graph_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [SHORT, SHORT, LONG]
    settings = config(precision="bf16", section=section_of(7_000_000))
    run = Run()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        take_step(engine, make_batch(0), run)
        before = engine.plan
        loss = loss_of(engine(**make_batch(1)))
        with pytest.raises(stronghold.OutOfMemoryError, match="would be out of memory"):
            engine(**make_batch(2))
        assert engine.plan is before
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.detach().clone())
        del loss
        take_step(engine, make_batch(2), run)
        assert engine.plan is not before
        finish(run, engine)
    assert_identical(run, plain(lengths))


@pytest.mark.slow
@pytest.mark.usefixtures("slow_link")
def test_a_plan_leaves_room_for_a_larger_batch_where_layers_cannot_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later micro-batch of a step may be larger. And batches that have grown before may again."""
    for accumulation, lengths, growth in [
        (1, [LONG], 1.0),
        (2, [SHORT], HEADROOM),
        (1, [SHORT, LONG], HEADROOM),
    ]:
        section = section_of(8_000_000)
        settings = config(precision="bf16", accumulation=accumulation, section=section)
        with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
            for micro in range(len(lengths)):
                take_step(engine, make_batch(micro), Run())
            assert engine.plan.demand.growth == growth, lengths


def test_levels_that_offload_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast link, and blocks that had kept all on the device."""
    lengths = [SHORT, LONG, SHORT]
    pinned = {"resident_layers": 0, "resident_updates": "host"}
    settings = config(precision="bf16", section=section_of(6_000_000, **pinned))
    run, last = Run(), list[int]()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        for micro in range(len(lengths)):
            take_step(engine, make_batch(micro), run)
            last.append(engine._job.trainer._hooks._last_away)
            if micro == 1:
                assert "offload" in levels_of(engine)
        finish(run, engine)
        layers = engine._job.layers
    assert last[0] == last[2] == -1
    assert layers[last[1]].is_block
    assert_identical(run, plain(lengths))


@pytest.mark.slow
@pytest.mark.usefixtures("slow_link")
def test_layers_move_again_for_a_larger_batch_of_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And leave room for it from then on. Not for one that no plan can hold."""
    lengths = [SHORT, SHORT, SHORT, 440]
    settings = config(precision="bf16", section=section_of(7_000_000))
    run = Run()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        take_step(engine, make_batch(0), run)
        before = engine.plan
        large = token_batch(7, length=LONG)
        with torch.no_grad():
            seen = loss_of(engine(**large))
        after = engine.plan
        assert after.gpu_total_bytes < before.gpu_total_bytes
        take_step(engine, make_batch(1), run)
        with torch.no_grad():
            engine(**large)
        assert engine.plan is after
        refused = pytest.raises(stronghold.OutOfMemoryError, match="a batch of 8,192 tokens")
        with torch.no_grad(), refused:
            engine(**token_batch(8, length=16 * LONG))
        take_step(engine, make_batch(2), run)
        take_step(engine, make_batch(3), run)  # The batch that was refused needs no room.
        assert engine.plan is not after
        finish(run, engine)
    assert_identical(run, plain(lengths))
    assert torch.isfinite(seen)


@pytest.mark.parametrize(("taken_bytes", "num_errors"), [(1_500_000, 1), (4_000_000, 2)])
@pytest.mark.usefixtures("slow_link")
def test_training_goes_on_when_another_program_has_taken_memory(
    taken_bytes: int, num_errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error makes later forwards keep less. After a second one the next batch gets a new
    plan, by what is free then."""
    lengths = [SHORT] * 6
    total_bytes = 8_000_000
    settings = config(precision="bf16", section=section_of(total_bytes))
    run, errors = Run(), list[str]()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        memory, micro = engine.inspect().device.memory, 0
        batches = [make_batch(micro) for micro in range(len(lengths))]
        while micro < len(lengths):
            if micro == 2:
                first_plan = engine.plan
                memory.total_bytes = total_bytes - taken_bytes
            try:
                loss = loss_of(engine(**batches[micro]))
                engine.backward(loss)
            except stronghold.OutOfMemoryError as error:
                errors.append(str(error))
                loss = None
                assert len(errors) < 4, errors
                continue
            engine.step()
            run.losses.append(loss.detach().clone())
            micro += 1
            del loss
        finish(run, engine)
        assert engine.memory_report().gpu_peak <= total_bytes
        is_planned_again = engine.plan is not first_plan
    assert len(errors) == num_errors
    assert is_planned_again == (num_errors == 2)
    assert "from now on backward computes again" in errors[0]
    assert "the next batch gets a new plan" in errors[-1] or num_errors == 1
    assert_identical(run, plain(lengths))


def test_a_graph_has_the_level_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward runs a block again with the weights of its forward, or is refused. The level of a
    later forward says nothing about that. The head is frozen: else autograd refuses its weight."""
    pinned = {"resident_layers": "all", "resident_updates": "gpu"}
    settings = config(precision="bf16", section=section_of(9_000_000, **pinned))
    lengths, run = [SHORT, LONG, SHORT], Run()
    factory = llama(lengths, trains_head=False)
    with counted(factory, settings, monkeypatch) as (engine, make_batch):
        take_step(engine, make_batch(0), run)
        older = loss_of(engine(**make_batch(1)))
        assert "keep" not in levels_of(engine)
        newer = loss_of(engine(**make_batch(2)))
        assert {*levels_of(engine)} == {"keep"}
        engine.backward(newer)
        engine.step()
        with pytest.raises(ConfigError, match="as they were in its forward"):
            engine.backward(older)


@pytest.mark.usefixtures("slow_link")
def test_a_checkpoint_that_is_written_while_layers_move_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_slowly(*args: Any) -> Any:
        time.sleep(0.1)  # for each layer: the save is on its way when they move
        return write_tensors(*args)

    monkeypatch.setattr("stronghold.checkpoint.saving.write_tensors", written_slowly)
    lengths = [SHORT, SHORT, LONG]
    section = section_of(8_000_000, async_checkpoint=True)
    settings, run, resumed = config(precision="bf16", section=section), Run(), Run()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        for micro in range(2):
            take_step(engine, make_batch(micro), run)
        plan = engine.plan
        engine.save_checkpoint(str(tmp_path), tag="two")
        take_step(engine, make_batch(2), run)
        assert engine.plan is not plan
        finish(run, engine)
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        engine.load_checkpoint(str(tmp_path), tag="two")
        resumed.losses = run.losses[:2]
        take_step(engine, make_batch(2), resumed)
        finish(resumed, engine)
    assert_identical(resumed, run)
