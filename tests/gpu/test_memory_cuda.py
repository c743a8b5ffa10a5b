"""What the engine knows of a GPU's memory and leaves of it, and batches that need more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.devices import cuda
from stronghold.devices.cuda import CudaDevice
from stronghold.predict.refine import TRACED_STEPS, WARM_UP_STEPS
from tests.models import MODELS, loss_of, token_batch
from tests.support.training import Run, assert_identical, config, initialized, on

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MIB = 1 << 20
REFINED = WARM_UP_STEPS + TRACED_STEPS  # steps
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


def test_what_the_allocator_cannot_use_is_counted(device: CudaDevice) -> None:
    settled()
    device.memory.restart_activation_peak()
    first, second = (torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    assert device.memory.fragment_bytes() < 16 * MIB
    del first
    # 64 are free, and too few
    third = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
    assert 64 * MIB <= device.memory.fragment_bytes() < 80 * MIB
    del second, third
    device.memory.restart_activation_peak()
    assert device.memory.fragment_bytes() < 16 * MIB


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


def test_the_programs_own_peak_is_not_lost_when_steps_are_measured() -> None:
    settled()
    large = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del large
    peak = torch.cuda.max_memory_allocated()
    model, _ = MODELS["llama"]()
    engine = initialized(model, config(section={"device": "cuda", "resident_layers": 0}))
    steps(engine, [SHORT] * REFINED)
    assert torch.cuda.max_memory_allocated() < 256 * MIB  # of the measured steps alone
    assert engine.memory_report().gpu_process_peak >= peak >= 256 * MIB
    engine.destroy()


class Hiding(nn.Module):
    """Takes its batch in an object: nobody sees from outside how large it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        return loss_of(self.model(**vars(batch)))


def attempt(engine: Any, length: int, *, by_engine: bool) -> None:
    batch = on(engine.device, token_batch(0, length=length))
    loss = engine(SimpleNamespace(**batch))
    if by_engine:
        engine.backward(loss)
    else:
        loss.backward()
    engine.step()


@pytest.mark.parametrize("by_engine", [True, False])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_what_ran_out_of_memory_trains_when_it_is_tried_again(
    share: float, by_engine: bool
) -> None:
    """In a forward, and in a backward: also of `loss.backward()`, which the engine does not see."""
    lengths = [SHORT] * (REFINED + 1) + [LONG]
    _, most, _ = run_of({**SLOWEST, "activations": "keep"}, lengths)
    _, least, _ = run_of({**SLOWEST, "activations": "recompute"}, lengths)
    with Capped(int(least + share * (most - least))):
        model, _ = MODELS["llama"](max_position_embeddings=LONG)
        settings = config(precision="bf16", section={"device": "cuda"})
        engine = initialized(Hiding(model), settings)
        for _ in range(REFINED + 1):
            attempt(engine, SHORT, by_engine=by_engine)
        plan = engine.plan
        with pytest.raises(torch.OutOfMemoryError):
            attempt(engine, LONG, by_engine=by_engine)
        settled()  # what a program does that goes on
        attempt(engine, LONG, by_engine=by_engine)
        assert engine.plan is not plan
        engine.destroy()


def run_of(section: dict[str, Any], lengths: list[int]) -> tuple[Run, int, list[Any]]:
    """A run, the bytes that it took at most, and the plans that it began and ended with."""
    before = settled()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model, _ = MODELS["llama"](max_position_embeddings=LONG)
    engine = initialized(model, config(precision="bf16", section={"device": "cuda", **section}))
    run = steps(engine, lengths[:-1])
    plans = [engine.plan]
    last = steps(engine, lengths[-1:])
    plans.append(engine.plan)
    run.losses += last.losses
    run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return run, torch.cuda.max_memory_allocated() - before, plans


def test_a_batch_that_the_refined_plan_has_no_room_for_trains() -> None:
    """What the GPU has lies between what long batches take when activations are kept, and when they
    are computed again."""
    lengths = [SHORT] * (REFINED + 1) + [LONG]
    expected, most, _ = run_of({**SLOWEST, "activations": "keep"}, lengths)
    _, least, _ = run_of({**SLOWEST, "activations": "recompute"}, lengths)
    assert least < 0.7 * most
    with Capped((least + 2 * most) // 3):
        run, _, (short, long) = run_of({}, lengths)
    assert_identical(run, expected)
    assert short.activations.count("keep") > 2
    assert long.activations.count("keep") < short.activations.count("keep")
