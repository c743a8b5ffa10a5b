"""What the engine knows of a GPU's memory and leaves of it, and batches that need more."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.devices import cuda
from stronghold.devices.cuda import CudaDevice
from stronghold.train.job import Job
from tests.models import MODELS, loss_of, token_batch
from tests.models.families import llama_of
from tests.support.profiles import use_slow_link
from tests.support.training import (
    Run,
    assert_identical,
    config,
    flash_in_one_order,
    initialized,
    on,
)

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ESTIMATED = pytest.mark.skipif(
    "tests.pretended.install" in sys.modules,
    reason="attention of the pretended device is written out, and saves more than is estimated",
)
MIB = 1 << 20
MOVES_BYTES = 7_000_000  # of a device on which not all of `large_model` can stay
SHORT, LONG = 64, 1024  # tokens of a sequence, of which a batch has two
SLOWEST: dict[str, Any] = {  # and smallest
    "device": "cuda",
    "window": 1,
    "resident_layers": 0,
    "resident_updates": "host",
}


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


@pytest.fixture
def fused_attention() -> Iterator[None]:
    """The kernel that is estimated, and libraries that have what they keep."""
    with flash_in_one_order():
        run_of({**SLOWEST, "activations": "keep"}, [LONG])
        yield


def settled() -> int:
    """Bytes that torch has of the GPU when nothing is kept of what is gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class Capped:
    """The process may take `nbytes` more of the GPU, inside."""

    def __init__(self, nbytes: int) -> None:
        self._share = (settled() + nbytes) / cuda.identity(0)[1]

    def __enter__(self) -> None:
        torch.cuda.set_per_process_memory_fraction(self._share)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_trial_that_finds_no_room_leaves_none_of_its_parts(device: CudaDevice) -> None:
    before = settled()
    with Capped(300 * MIB):
        assert not device.memory.has_room(400 * MIB, 200 * MIB)
        assert torch.cuda.memory_reserved() == before
        assert device.memory.has_room(100 * MIB, 100 * MIB)
        assert torch.cuda.memory_reserved() == before


def steps(engine: Any, lengths: list[int]) -> Run:
    run = Run()
    for step, length in enumerate(lengths):
        batch = on(engine.device, token_batch(step, length=length))
        loss = loss_of(engine(**batch))
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.detach().clone())
        del loss
    return run


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_what_ran_out_of_memory_trains_when_it_is_tried_again(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forward, and in a backward. The estimate of a larger batch is much too low."""
    for module in ("engine.planner", "plan.rules"):
        monkeypatch.setattr(f"stronghold.{module}.activation_bytes", lambda *_: 0)
    lengths = [SHORT, LONG]
    run_of({**SLOWEST, "activations": "keep"}, lengths)  # libraries keep memory from now on
    _, most, _ = run_of({**SLOWEST, "activations": "keep"}, lengths)
    _, least, _ = run_of({**SLOWEST, "activations": "recompute"}, lengths)
    with Capped(int(least + share * (most - least))):
        model, _ = MODELS["llama"](max_position_embeddings=LONG)
        engine = initialized(model, config(precision="bf16", section=SLOWEST))
        steps(engine, [SHORT])
        with pytest.raises(torch.OutOfMemoryError):
            steps(engine, [LONG])
        settled()  # what a program does that goes on
        steps(engine, [LONG])
        engine.destroy()


def small_model() -> Any:
    return MODELS["llama"](max_position_embeddings=LONG)[0]


def large_model() -> Any:
    """It takes 5.5 MB with its optimizer's state."""
    return llama_of(hidden=64, inner=256, layers=6, heads=4, pairs=2, vocabulary=64)


def run_of(
    section: dict[str, Any], lengths: list[int], make_model: Callable[[], Any] = small_model
) -> tuple[Run, int, Any]:
    """A run, the bytes that it took at most, and its plan."""
    before = settled()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    settings = config(precision="bf16", section={"device": "cuda", **section})
    engine = initialized(make_model(), settings)
    run = steps(engine, lengths)
    plan = engine.plan
    run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return run, torch.cuda.max_memory_allocated() - before, plan


def test_layers_move_again_for_a_batch_that_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules know of a slow link and of less memory than there is. The first plan lets all
    blocks stay, and a later one takes some to the host."""
    use_slow_link(tmp_path, monkeypatch)
    lengths = [8, SHORT, LONG // 2, 8, LONG // 2]
    section = {**SLOWEST, "activations": "keep"}
    expected, *_ = run_of(section, lengths, large_model)
    plans: list[Any] = []
    take_plan = Job.take_plan

    def noted(job: Job, plan: Any) -> None:
        plans.append(plan)
        take_plan(job, plan)

    monkeypatch.setattr(Job, "take_plan", noted)
    monkeypatch.setattr("stronghold.devices.cuda.GpuMemory.free_bytes", lambda _: MOVES_BYTES)
    section = {"gpu_memory": MOVES_BYTES}
    run, _, plan = run_of(section, lengths, large_model)
    assert len(plans) >= 2
    assert len(plan.updated_on_gpu) < len(plans[0].updated_on_gpu)
    assert_identical(run, expected)


@ESTIMATED
@pytest.mark.usefixtures("fused_attention")
def test_a_larger_batch_keeps_less_and_is_refused_without_room() -> None:
    """What the GPU has lies between what long batches take when activations are kept, and when they
    are computed again."""
    lengths = [SHORT, SHORT, LONG]
    expected, most, _ = run_of({**SLOWEST, "activations": "keep"}, lengths)
    _, least, _ = run_of({**SLOWEST, "activations": "recompute"}, lengths)
    assert least < 0.7 * most
    with Capped((least + most) // 2):
        run, _, plan = run_of({**SLOWEST, "batch_tokens": 2 * LONG}, lengths)
        with pytest.raises(torch.OutOfMemoryError, match="would be out of memory"):
            run_of(SLOWEST, [SHORT, 64 * LONG])
    assert_identical(run, expected)
    assert plan.activations.count("keep") > 2


@ESTIMATED
@pytest.mark.usefixtures("fused_attention")
@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_the_estimate_of_activations_is_what_a_step_takes(level: str) -> None:
    section = {**SLOWEST, "activations": level, "window": None}
    _, peak, plan = run_of(section, [LONG])
    measured = peak - plan.gpu_total_bytes
    assert 0.85 * measured <= plan.activation_bytes <= 1.15 * measured
