"""A lane's exception surfaces in the training thread with the operation's name; nothing hangs."""

from __future__ import annotations

import gc
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stronghold
from stronghold import native
from stronghold.devices.device import Device, ThreadLane
from tests.conftest import lane_threads
from tests.models import MODELS, loss_of
from tests.support.insides import offload_small
from tests.support.training import config, initialized

MODES: dict[str, dict[str, Any]] = {
    "no norm": {"clipping": 0.0},
    "gated": {"clipping": 1.0},
    "accumulated": {"clipping": 1.0, "accumulation": 2},
}
WITHIN_S = 30.0  # far above any step here: a hang fails the test rather than the suite


def make_engine(**options: Any) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    model, make_batch = MODELS["gpt"](num_layers=4)
    section = {"window": 2, "activations": options.pop("activations", "keep")}
    return initialized(model, config(section=section, **options)), make_batch


def run_steps(engine: Any, make_batch: Any, steps: range) -> None:
    for micro in range(
        steps.start * engine.gradient_accumulation_steps(),
        steps.stop * engine.gradient_accumulation_steps(),
    ):
        engine.backward(loss_of(engine(**make_batch(micro))))
        engine.step()


def in_time(work: Callable[[], object]) -> BaseException | None:
    """Call `work`; its exception, or None. Fails if it does not end."""

    def hangs(*_: Any) -> None:
        pytest.fail("hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, WITHIN_S)
    try:
        work()
    except Exception as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return None


def fail_in(
    device: Device, monkeypatch: pytest.MonkeyPatch, operation: str, only: int | None = None
) -> None:
    """Let the device's next operations of this name fail; with `only` the one of that number, from
    1 on."""
    submit, seen = ThreadLane.submit, 0

    def submit_failing(
        lane: ThreadLane, name: str, work: Any, after: Any = (), **declared: Any
    ) -> Any:
        nonlocal seen
        is_named = name == operation and lane is device.lane(lane.name)
        seen += is_named

        def broken() -> None:
            raise OSError("injected")

        fails = is_named and only in (None, seen)
        return submit(lane, name, broken if fails else work, after, **declared)

    monkeypatch.setattr(ThreadLane, "submit", submit_failing)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verb", ["fetch", "offload", "update"])
def test_a_failing_operation_names_itself_within_one_step(
    verb: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, make_batch = make_engine(**MODES[mode])
    run_steps(engine, make_batch, range(2))
    layer = engine.inspect().layout.streamed[1]
    fail_in(engine.inspect().device, monkeypatch, f"{verb} {layer}")
    # One step in which the operation fails, and the next one, whose first wait tells at the latest.
    error = in_time(lambda: run_steps(engine, make_batch, range(2, 4)))
    assert isinstance(error, stronghold.LaneError)
    assert f"{verb} {layer} failed on the {verb} lane: OSError: injected" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert in_time(engine.destroy) is None


@pytest.mark.parametrize("verb", ["offload", "onload"])
def test_a_failing_activation_transfer_names_itself(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload_small(monkeypatch)
    engine, make_batch = make_engine(activations="offload")
    run_steps(engine, make_batch, range(2))
    layer = engine.inspect().layout.streamed[1]
    fail_in(engine.inspect().device, monkeypatch, f"{verb} {layer}")
    error = in_time(lambda: run_steps(engine, make_batch, range(2, 4)))
    assert isinstance(error, stronghold.LaneError)
    assert f"{verb} {layer} failed" in str(error)
    assert in_time(engine.destroy) is None


def test_a_failing_kernel_names_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, make_batch = make_engine()
    run_steps(engine, make_batch, range(1))

    def broken(*_: Any, **__: Any) -> None:
        raise stronghold.StateError("injected")

    monkeypatch.setattr(native.UpdateBatch, "run", broken)
    error = in_time(lambda: run_steps(engine, make_batch, range(1, 3)))
    assert isinstance(error, stronghold.LaneError)
    assert re.search(r"update \d+ failed on the update lane", str(error))
    with pytest.raises(stronghold.LaneError, match=r"update \d+ failed"):
        engine.module_state_dict()
    assert in_time(engine.destroy) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_of_the_last_step_is_told_by_destroy(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else weights of two steps would be taken for trained ones."""
    engine, make_batch = make_engine(**MODES[mode])
    run_steps(engine, make_batch, range(1))
    # the last one in either order
    last = f"update {engine.inspect().layout.layers[0].index}"
    fail_in(engine.inspect().device, monkeypatch, last)
    model = engine.module
    error = in_time(lambda: (run_steps(engine, make_batch, range(1, 2)), engine.destroy()))
    assert isinstance(error, stronghold.LaneError)
    assert str(error).startswith(f"{last} failed")
    assert in_time(engine.destroy) is None
    assert lane_threads() == []
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    loss_of(model(**make_batch(0))).backward()


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("out of memory")


def fail_backward(engine: Any, make_batch: Any) -> None:
    """Fail in the middle of the model, when the layers behind have their gradients."""
    layout = engine.inspect().layout
    block = engine.module.get_submodule(layout.layers[layout.streamed[1]].name)

    def breaking(module: Any, args: Any, output: Any) -> Any:
        return _FailingBackward.apply(output)

    handle = block.register_forward_hook(breaking)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.backward(loss_of(engine(**make_batch(0))))
    handle.remove()


def test_an_engine_that_is_collected_on_a_lane_ends_like_another() -> None:
    """The collector comes upon it in the first update, for which the next forward's fetch waits."""
    engine, make_batch = make_engine()
    engine.callbacks = [engine]  # a cycle, which the collector alone frees
    model, lane, dropped = (engine.module, engine.inspect().device.update, threading.Event())
    submit = lane.submit

    def submit_collecting(name: str, work: Any, after: Any = (), **declared: Any) -> Any:
        def collect() -> None:
            dropped.wait()
            gc.collect()
            work()

        return submit(name, collect if name.startswith("update") else work, after, **declared)

    gc.collect()
    gc.disable()  # until a lane calls it
    try:
        lane.submit = submit_collecting
        run_steps(engine, make_batch, range(1))
        gone = weakref.ref(engine)
        del engine
        dropped.set()
        deadline = time.monotonic() + WITHIN_S
        while lane_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert lane_threads() == []
    assert gone() is None
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
