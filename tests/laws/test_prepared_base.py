"""A prepared base has the bytes that a run of the same config packs for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import stronghold
from stronghold.checkpoint.base import StoredPlace, open_base, stored_place
from stronghold.checkpoint.prepare import prepare
from stronghold.checkpoint.pretrained import directory_of
from stronghold.model.arrays import weight_map
from stronghold.model.layout import LayerLayout
from stronghold.optim.states import Formats
from tests.support.bases import write_model
from tests.support.training import config

TARGETS = {"attention": ["q_proj", "v_proj"], "all": "all-linear"}
SECTIONS: dict[str, dict[str, Any]] = {
    "one read": {},
    "lean states in files": {"states": "lean", "nvme": {}},
    "fp32 adapters": {"dtypes": "own"},
}


def frozen_places(layout: LayerLayout, formats: Formats) -> list[StoredPlace]:
    """The places of a layer's frozen stored tensors in its array of weights."""
    weights = weight_map(layout, formats)
    return [stored_place(weights, part) for part in layout.slices if not part.trainable]


@pytest.mark.parametrize(
    "frozen",
    [
        "nf4",
        pytest.param("int8", marks=pytest.mark.slow),
        pytest.param("fp8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_base_has_the_bytes_that_a_run_packs(frozen: str, section: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    prepare(tmp_path / "model", tmp_path / "base", frozen=frozen)
    plain = stronghold.from_pretrained(tmp_path / "model")
    targets = TARGETS["all" if section == "one read" else "attention"]
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
    with stronghold.placeholders(plain):
        model = peft.get_peft_model(plain, settings)
    assert directory_of(model) == tmp_path / "model"
    chosen = {"frozen": frozen, **SECTIONS[section]}
    if "nvme" in chosen:
        chosen["nvme"] = {"path": str(tmp_path), "spill": "moments"}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = stronghold.initialize(
        model=model, config=config(precision="bf16", section=chosen), model_parameters=parameters
    )[0]
    try:
        inspection = engine.inspect()
        states = [state for state in inspection.layers if state.layout.streamed]
        layers = [frozen_places(state.layout, inspection.formats) for state in states]
        with open_base(tmp_path / "base", frozen=frozen, layers=layers) as base:
            for number, state in enumerate(states):
                found = torch.zeros_like(state.weights)
                base.read_into(number, found, layers[number])
                for place in layers[number]:
                    here = slice(place.offset, place.end)
                    assert torch.equal(found[here], state.weights[here]), place.name
                begin = min(place.offset for place in layers[number])
                moved = [
                    StoredPlace(
                        name=place.name,
                        dtype=place.dtype,
                        shape=place.shape,
                        offset=place.offset - begin,
                    )
                    for place in layers[number]
                ]
                assert base.has_layout(number, moved) == (section == "one read")
    finally:
        engine.destroy()
