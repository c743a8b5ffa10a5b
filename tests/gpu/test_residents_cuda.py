"""Layers that are updated on a real GPU: the emulated tests' laws with the Triton kernels.

What a window of one layer gives, updated on the host, is the reference: losses, norms, weights and
moments must be equal to the bit.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.laws.test_residents import MODES, as_planned
from tests.models import HUGGING_FACE, MODELS, PLAIN
from tests.models.families import odd_llama as llama
from tests.support.places import CHECKPOINTED, ON_GPU, assert_resumed_through, on_gpu
from tests.support.training import Run, assert_identical, config, train_windowed

pytestmark = pytest.mark.gpu

STEPS = 6
# Some steps overflow, some do not.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 2}}
# Nothing is left open, which would be planned anew after the first steps, and end on the GPU.
HOST: dict[str, Any] = {
    "device": "cuda",
    "window": 1,
    "resident_layers": 0,
    "resident_updates": "host",
    "activations": "keep",
}


def there(place: str, **section: Any) -> dict[str, Any]:
    return {"activations": "keep", **on_gpu(place, device="cuda", **section)}


@functools.cache
def on_host(mode: str, precision: str) -> Run:
    settings = config(precision=precision, section=HOST, **MODES[mode])
    return train_windowed(llama, steps=STEPS, settings=settings)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ON_GPU)
def test_updates_on_the_gpu_have_the_hosts_bits(place: str, mode: str, precision: str) -> None:
    settings = config(precision=precision, section=there(place), **MODES[mode])
    run = train_windowed(llama, steps=STEPS, settings=settings, inspect=as_planned)
    assert_identical(run, on_host(mode, precision))
    assert run.norms == on_host(mode, precision).norms


@pytest.mark.parametrize("place", ["every layer", "whole"])
@pytest.mark.parametrize("name", [*PLAIN, *HUGGING_FACE])
def test_any_model_is_updated_on_the_gpu_as_on_the_host(name: str, place: str) -> None:
    runs = [
        train_windowed(MODELS[name], steps=4, settings=config(clipping=0.5, section=section))
        for section in (there(place), HOST)
    ]
    assert_identical(*runs)


def test_fp16_with_overflows_is_the_same_everywhere() -> None:
    runs = [
        train_windowed(
            MODELS["gpt"], steps=24, settings={**config(clipping=0.1, section=section), **FP16}
        )
        for section in (HOST, *(there(place) for place in ON_GPU))
    ]
    assert 0 < len(runs[0].norms) < 24
    for run in runs[1:]:
        assert_identical(run, runs[0])
        assert run.norms == runs[0].norms


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("options", CHECKPOINTED, ids=str)
def test_a_checkpoint_is_resumed_wherever_layers_are(
    options: dict[str, Any], asynchronous: bool, tmp_path: Path
) -> None:
    """Dropout included: the GPU's generator is saved and restored."""
    places = [HOST, *map(there, ON_GPU), {**HOST, "window": 2}]
    saving = [{**place, "async_checkpoint": asynchronous} for place in places]
    assert_resumed_through(saving, tmp_path, HOST, **options)
