"""The laws of the third tier on a real GPU: pinned pieces, streams that wait for files, and files
that wait for streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import MODELS
from tests.support.training import Run, assert_identical, config, train_windowed

pytestmark = pytest.mark.gpu

STEPS = 5


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 2048 * 24)


def trained(section: dict[str, Any], **settings: Any) -> Run:
    streamed = {"device": "cuda", "window": 2, "resident_layers": 0, "activations": "keep"}
    settings = config(section={**streamed, **section}, **settings)
    run = train_windowed(MODELS["gpt"], steps=STEPS, settings=settings)
    run.losses = [loss.cpu() for loss in run.losses]
    run.weights = {name: weight.cpu() for name, weight in run.weights.items()}
    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("clipping", "accumulation"), [(0.0, 1), (0.5, 1), (0.5, 2)])
@pytest.mark.parametrize("spill", ["moments", "masters", "weights"])
def test_what_spills_never_changes_a_bit(
    spill: str, clipping: float, accumulation: int, precision: str, tmp_path: Path
) -> None:
    settings = {"precision": precision, "clipping": clipping, "accumulation": accumulation}
    section = {"nvme": {"path": str(tmp_path), "spill": spill}}
    expected = trained({}, **settings)
    assert_identical(trained(section, **settings), expected)


def test_layers_updated_on_the_gpu_beside_spilled_ones(tmp_path: Path) -> None:
    settings = {"precision": "bf16", "clipping": 0.5}
    expected = trained({}, **settings)
    expected.moments = {}
    section = {
        "nvme": {"path": str(tmp_path), "spill": "weights"},
        "resident_layers": 1,
        "resident_updates": "gpu",
    }
    run = trained(section, **settings)
    run.moments = {}
    assert_identical(run, expected)
