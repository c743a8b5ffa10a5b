"""A second thread reads or calls the model while the first one trains: training keeps its bits, and
the second thread gets values or a refusal that names the way out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.errors import ConfigError
from tests.support.checkpoints import assert_same, make_batch, make_model, session, snapshot, train

SECTIONS: list[dict[str, Any]] = [
    {"window": 1, "activations": "recompute"},
    {"window": 2, "activations": "keep", "early_layers": "all"},
    {"resident_layers": 1, "window": 1},
    {"resident_layers": "all", "resident_updates": "gpu"},
]
STEPS = 5
REFUSAL = r"in thread .* while thread 'MainThread' trains: .*engine\.named_weights\(\)"


def call(model: Any) -> None:
    with torch.no_grad():
        model(**make_batch(99))


def call_block(model: Any) -> None:
    with torch.no_grad():
        model.transformer.h[1](torch.ones(1, 3, 24, dtype=torch.bfloat16))


# what the second thread does again and again
READS: dict[str, Callable[[Any, Path], Any]] = {
    "clone": lambda model, _: [parameter.detach().clone() for parameter in model.parameters()],
    "state dict": lambda model, _: model.state_dict(),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "forward": lambda model, _: call(model),
    "block": lambda model, _: call_block(model),
}


def without_dropout() -> Any:
    """A second thread's forward would draw from the generator of all threads, as in plain torch."""
    model = make_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def beside(engine: Any, read: Callable[[], Any], steps: int) -> tuple[list[Any], list[Exception]]:
    """Losses of these steps, and what another thread raised that read meanwhile."""
    stop, errors = threading.Event(), list[Exception]()

    def reader() -> None:
        while not stop.is_set():
            try:
                read()
            except Exception as error:
                errors.append(error)
                time.sleep(0.0005)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader)
        try:
            losses = train(engine, steps)
            snapshot(engine)
        finally:
            stop.set()
        reading.result()
    return losses, errors


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(50))
def test_another_thread_never_touches_training(seed: int, tmp_path: Path) -> None:
    name, section = list(READS)[seed % len(READS)], SECTIONS[seed % len(SECTIONS)]
    section = {**section, "emulated": {"jitter_s": 0.0003, "seed": seed}}
    options = {"precision": "bf16", "section": section, "clipping": 0.0}
    with session(without_dropout(), **options) as engine:
        losses = train(engine, 1 + STEPS)
        expected = snapshot(engine)
    with session(without_dropout(), **options) as engine:
        first = train(engine, 1)
        found, errors = beside(engine, lambda: READS[name](engine.module, tmp_path), STEPS)
        assert all(map(torch.equal, first + found, losses))
        assert_same(snapshot(engine), expected)
    assert errors or name == "clone" or section.get("resident_layers") == "all"
    for error in errors:
        with pytest.raises(ConfigError, match=REFUSAL):
            raise error


@pytest.mark.parametrize("call", ["engine", "module"])
def test_a_second_thread_that_trains_within_a_call_is_refused(call: str) -> None:
    with session(without_dropout()) as engine:
        losses = train(engine, 3)
    errors: list[Exception] = []

    def forward() -> None:
        try:
            (engine if call == "engine" else engine.module)(**make_batch(9))
        except Exception as error:
            errors.append(error)

    def intrude(*_: Any) -> None:
        hook.remove()  # the second forward comes here, too
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()

    with session(without_dropout()) as engine:
        found = train(engine, 1)
        hook = engine.module.transformer.h[1].register_forward_pre_hook(intrude)
        found += train(engine, 2)
        assert all(map(torch.equal, found, losses))
    assert len(errors) == 1
    with pytest.raises(ConfigError, match=REFUSAL):
        raise errors[0]


def test_a_thread_may_train_when_the_one_before_has_ended_or_waits() -> None:
    with session() as engine:
        losses = train(engine, 4)
    with session() as engine, ThreadPoolExecutor(1) as pool:
        found = train(engine, 1) + pool.submit(train, engine, 2).result()
        refused = pytest.raises(ConfigError, match=r"while thread 'ThreadPool.* trains")
        with refused:
            engine.module.state_dict()
        with refused:
            engine.save_checkpoint("nowhere")
        found += train(engine, 1)
        engine.module.state_dict()
        assert all(map(torch.equal, found, losses))
        pool.submit(train, engine, 1).result()
        pool.shutdown()
        engine.module.state_dict()
