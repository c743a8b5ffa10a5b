"""Where layers stay and where they are updated never changes a bit, and what stays never moves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.models import HUGGING_FACE, MODELS, PLAIN
from tests.test_exactness import llama
from tests.training import Run, assert_identical, config, train_plain, train_windowed

STEPS = 4
MODES: dict[str, dict[str, Any]] = {
    "ring": {"clipping": 0.0},
    "held": {"clipping": 0.5},
    "accumulated": {"clipping": 0.5, "accumulation": 3},
    "accumulated, no clipping": {"clipping": 0.0, "accumulation": 2},
}
ON_GPU: dict[str, dict[str, Any]] = {
    "embedding and head": {"window": 1, "resident_layers": 0},
    "half": {"window": 2, "resident_layers": 2},
    "every layer": {"resident_layers": "all", "activations": "recompute"},
    "whole": {"resident_layers": "all"},
}
JITTER = {"jitter_s": 0.0005, "seed": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_gpu(place: str, **section: Any) -> dict[str, Any]:
    return {**ON_GPU[place], "resident_updates": "gpu", "cpu_threads": 1, **section}


@functools.cache
def plain(mode: str, precision: str) -> Run:
    return train_plain(llama, steps=STEPS, precision=precision, **MODES[mode])


def as_planned(engine: Any) -> None:
    report = engine.memory_report()
    assert report.gpu_peak == report.gpu_planned
    assert report.host_peak == report.host_planned


# -- law 1 -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ON_GPU)
@pytest.mark.parametrize("updates", ["gpu", "host"])
def test_where_layers_stay_and_are_updated_never_changes_a_bit(
    updates: str, place: str, mode: str, precision: str
) -> None:
    section = on_gpu(place, resident_updates=updates, emulated=JITTER)
    settings = config(precision=precision, section=section, **MODES[mode])
    run = train_windowed(llama, steps=STEPS, settings=settings, inspect=as_planned)
    expected = plain(mode, precision)
    assert_identical(run, expected)
    assert run.norms == expected.norms


@functools.cache
def plain_of(name: str) -> Run:
    return train_plain(MODELS[name], steps=STEPS, clipping=0.5)


@pytest.mark.parametrize("place", ["embedding and head", "every layer", "whole"])
@pytest.mark.parametrize("name", [*PLAIN, *HUGGING_FACE])
def test_any_model_is_updated_on_the_gpu_as_in_a_plain_loop(name: str, place: str) -> None:
    settings = config(clipping=0.5, section=on_gpu(place))
    assert_identical(train_windowed(MODELS[name], steps=STEPS, settings=settings), plain_of(name))
