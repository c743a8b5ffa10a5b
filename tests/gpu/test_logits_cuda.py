"""Head and loss in parts on a GPU: the bodies of tests/laws/test_logits.py with another device.

The host's weight of a head and its copy on the device are equal on the emulated device. On a GPU
they cannot stand in for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.test_training_cuda import STREAMED, train_plain_on_gpu
from tests.laws import test_logits as logits
from tests.support.training import Run, assert_identical, config, train_windowed

pytestmark = pytest.mark.gpu

UPDATES = [{"resident_updates": "gpu"}, {"resident_updates": "host"}]


@functools.cache
def plain() -> Run:
    return train_plain_on_gpu(
        logits.tied_in_parts, precision="bf16", clipping=1.0, accumulation=1, steps=3
    )


def check(make: Callable[[], Any], section: dict[str, Any]) -> None:
    section = {"device": "cuda", "loss_chunk": 5, **STREAMED, **section}
    run = train_windowed(make, steps=3, settings=config(precision="bf16", section=section))
    run.weights = {name: value.cpu() for name, value in run.weights.items()}
    assert_identical(run, plain())


@pytest.mark.parametrize("updates", UPDATES)
def test_the_engine_has_the_bits_of_a_plain_loop_in_parts(updates: dict[str, Any]) -> None:
    check(logits.tied_llama, updates)


@pytest.mark.parametrize("updates", UPDATES)
def test_a_program_may_compute_the_loss_after_the_call(
    updates: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain()  # before the loss of training runs is replaced
    check(logits.with_a_late_loss(monkeypatch), updates)


@pytest.mark.parametrize("updates", UPDATES)
def test_logits_are_used_before_the_step(updates: dict[str, Any]) -> None:
    logits.check_use_of_logits({"device": "cuda", **STREAMED, **updates})
