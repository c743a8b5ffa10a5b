"""Packed bases on a real GPU: packed and decoded by its kernel, a base has the bits of the decoded
weights that stay in bf16, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stronghold.model.packed_formats import FORMATS
from tests.laws.test_packed_bases import PLACES, placed
from tests.support.packed import MODELS, with_decoded_weights
from tests.support.training import Run, assert_identical, config, train_windowed

pytestmark = pytest.mark.gpu

STEPS = 4
KEEP: dict[str, Any] = {"device": "cuda", "activations": "keep"}


def trained(factory: Any, **section: Any) -> Run:
    section.pop("emulated", None)
    settings = config(clipping=0.5, precision="bf16", section={**KEEP, **section})
    return train_windowed(factory, steps=STEPS, settings=settings)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("place", PLACES)
def test_a_packed_base_has_the_bits_of_its_decoded_weights(
    place: str, model: str, name: str, tmp_path: Path
) -> None:
    expected = trained(with_decoded_weights(MODELS[model], name, "bf16"), window=1)
    run = trained(MODELS[model], **placed(place, tmp_path, frozen=name))
    assert_identical(run, expected)
    assert run.norms == expected.norms


@pytest.mark.parametrize("streams", [1, 2])
def test_chunks_on_several_streams_have_the_bits_of_the_decoded_weights(streams: int) -> None:
    chunked = {"window": 1, "chunk": 1, "streams": streams}
    expected = trained(with_decoded_weights(MODELS["llama"], "nf4", "bf16"), **chunked)
    assert_identical(trained(MODELS["llama"], frozen="nf4", **chunked), expected)
