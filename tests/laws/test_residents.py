"""What stays on the GPU, updated there or not: it never moves, and fails as what streams does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stronghold
from stronghold import native
from stronghold.devices.emulated import EmulatedCompute
from stronghold.errors import ConfigError
from stronghold.native import Pool
from tests.models import HIDDEN, MODELS, Decoder, loss_of
from tests.support.places import ON_GPU, on_gpu
from tests.support.training import (
    assert_identical,
    config,
    initialized,
    train,
    train_plain,
    train_windowed,
)

MODES: dict[str, dict[str, Any]] = {
    "early": {"clipping": 0.0},
    "gated": {"clipping": 0.5},
    "accumulated": {"clipping": 0.5, "accumulation": 3},
    "accumulated, no clipping": {"clipping": 0.0, "accumulation": 2},
}


def as_planned(engine: Any) -> None:
    report = engine.memory_report()
    assert report.gpu_peak == report.gpu_planned
    assert report.host_peak == report.host_planned


def engine_of(place: str, mode: str = "gated", **options: Any) -> tuple[Any, Any]:
    model, make_batch = MODELS["gpt"](num_layers=4)
    section = on_gpu(place, early_layers="all" if mode == "early" else 0)
    return initialized(model, config(section=section, **{**MODES[mode], **options})), make_batch


# -- what stays never moves ------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ON_GPU)
def test_what_is_updated_on_the_gpu_has_no_slab_and_no_transfer(
    place: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, make_batch = engine_of(place, mode)
    now = engine.inspect()
    train(engine, make_batch, range(1))
    submitted: list[str] = []
    for lane in map(now.device.lane, ("fetch", "offload", "gradients", "update")):

        def noted(name: str, *args: Any, submit: Any = lane.submit, **kwargs: Any) -> Any:
            submitted.append(name)
            return submit(name, *args, **kwargs)

        monkeypatch.setattr(lane, "submit", noted)
    train(engine, make_batch, range(1, 4))
    here = engine.plan.updated_on_gpu
    moved = {int(name.split()[-1]) for name in submitted}
    assert moved == set(range(len(now.layout.layers))) - here
    away = [layer for layer in now.layout.layers if layer.index not in here]
    assert engine.plan.host_bytes["weights"] == sum(layer.weight_bytes for layer in away)
    assert engine.plan.host_bytes["moments"] == 8 * sum(layer.trained_numel for layer in away)
    as_planned(engine)
    engine.destroy()


@pytest.mark.parametrize("place", ["half", "whole"])
def test_closing_gives_the_model_back_in_memory_of_its_own(place: str) -> None:
    engine, make_batch = engine_of(place)
    train(engine, make_batch, range(2))
    expected = {name: value.clone() for name, value in engine.module_state_dict().items()}
    arrays = [state.weights for state in engine.inspect().layers if state.is_on_gpu]
    model = engine.module
    engine.destroy()
    for array in arrays:
        array.fill_(255)  # what was the device's
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    loss_of(model(**make_batch(0))).backward()  # an ordinary model again


# -- gradients that come twice, late, never, or not finite -----------------------------------------


def test_a_graph_older_than_the_step_is_refused_as_in_a_plain_loop() -> None:
    engine, make_batch = engine_of("whole")
    old = loss_of(engine(**make_batch(0)))
    train(engine, make_batch, range(1))
    message = "modified by an inplace operation|modified in place after it was saved"
    with pytest.raises(RuntimeError, match=message):
        engine.backward(old)
    train(engine, make_batch, range(1, 2))
    engine.destroy()


class ReadsDetached(nn.Module):
    """Backward needs the weight once more after its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(F.linear(x, self.inner.weight.detach())))


def detached() -> Any:
    torch.manual_seed(3)
    return Decoder([ReadsDetached() for _ in range(3)]), MODELS["gpt"]()[1]


@pytest.mark.parametrize("levels", [{"recompute": 1, "keep": 2}, "recompute"])
def test_a_graph_older_than_the_step_is_refused_where_torch_has_handles(levels: Any) -> None:
    """Blocks that stay, in a model that is not whole: torch may not see their weights."""
    model, make_batch = detached()
    model.requires_grad_(False)
    for block in model.blocks:
        block.inner.requires_grad_(True)
    settings = config(section={**on_gpu("every layer"), "activations": levels})
    engine = initialized(model, settings)
    old = loss_of(engine(**make_batch(0)))
    train(engine, make_batch, range(1))
    message = "before an update on the gpu|written since|modified (by an in|in place after)"
    with pytest.raises((ConfigError, RuntimeError), match=message):
        engine.backward(old)
    engine.destroy()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_a_detached_read_is_exact(clipping: float, activations: str) -> None:
    expected = train_plain(detached, steps=3, clipping=clipping)
    for place in ({"window": 1}, on_gpu("half"), on_gpu("whole")):
        section = {**place, "activations": activations, "early_layers": "all"}
        settings = config(clipping=clipping, section=section)
        assert_identical(train_windowed(detached, steps=3, settings=settings), expected)


@pytest.mark.parametrize("mode", ["early", "gated", "accumulated"])
@pytest.mark.parametrize("place", ["every layer", "whole"])
def test_a_failing_kernel_names_what_it_did(
    place: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, make_batch = engine_of(place, mode)
    train(engine, make_batch, range(1))

    def broken(*_: Any, **__: Any) -> None:
        raise stronghold.StateError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(native.UpdateBatch, "run", broken)
        with pytest.raises(stronghold.LaneError, match=r"update .* on the compute lane: Stat"):
            train(engine, make_batch, range(1, 2))
    with pytest.raises(stronghold.LaneError, match=r"update .* failed"):
        train(engine, make_batch, range(2, 3))
    engine.destroy()


# -- checkpoints -----------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ON_GPU)
def test_all_but_the_scale_is_prepared_before_it_is_waited_for(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that has ended its backward would stand still meanwhile."""
    seen: list[str] = []

    def noting(what: str, original: Any, after: str) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if threading.current_thread() is not threading.main_thread():
                return made  # of layers that are updated on the host
            seen.append(what)
            return lambda *rest: [seen.append(after), made(*rest)][1]

        return noted

    for owner, name, after in (
        (Pool, "prepare_update", "updated"),
        (EmulatedCompute, "read_later", "read"),
    ):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name), after))
    engine, make_batch = engine_of(place)
    engine.backward(loss_of(engine(**make_batch(0))))
    engine.step()
    assert seen[-4:] == ["read_later", "prepare_update", "read", "updated"]
    engine.destroy()
