"""Laws of `stronghold plan --sweep`: it ends where one more does not fit. A plan takes seconds."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path

import pytest

from stronghold.tools.estimate.estimate import Estimate, estimate
from stronghold.tools.estimate.question import question_from_options
from stronghold.tools.estimate.sweep import draw, sweep, table
from tests.support.forecasts import SIZES, asked, full_estimate, run
from tests.support.published import published

LIMITS = {"gpu": "20MB", "host": "30MB"}


@functools.cache
def swept(axis: str) -> list[tuple[int, Estimate]]:
    return sweep(asked(**LIMITS), axis)


# -- sweeps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["window", "seq"])
def test_a_sweep_draws_and_prints_its_points(
    axis: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png = tmp_path / "deep" / f"{axis}.png"
    limits = ["--gpu", LIMITS["gpu"], "--host", LIMITS["host"], "--machine", "v100-32gb"]
    status, text, _ = run(*SIZES, *limits, "--sweep", axis, "-o", str(png), capsys=capsys)
    assert status == 0
    assert f"The plot is in {png}" in text
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = [line for line in text.splitlines() if re.match(r"\s+[\d,]+  ", line)]
    assert len(rows) >= 4


@pytest.mark.parametrize("axis", ["batch", "layers"])
@pytest.mark.slow
def test_a_sweep_ends_with_the_largest_that_fits_and_the_next_that_does_not(
    axis: str, tmp_path: Path
) -> None:
    points = swept(axis)
    values = [value for value, _ in points]
    assert values == sorted(set(values))
    assert all(found.fits for _, found in points[:-1])
    assert not points[-1][1].fits
    assert values[-1] == values[-2] + 1
    assert f"{values[-1]:,}" in table(points, axis).splitlines()[-1]
    draw(points, axis, tmp_path / "sweep.png")
    assert estimate(asked(**LIMITS, **{axis: values[-2]})).fits
    assert not estimate(asked(**LIMITS, **{axis: values[-1]})).fits


# -- speed ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_70b_model_of_80_layers_is_planned_in_seconds(tmp_path: Path) -> None:
    llama = tmp_path / "llama"
    published("Llama-3.3-70B").save_pretrained(llama)
    question_from_options(model=llama, machine="h100-80gb")  # imports
    begin = time.process_time()  # of this process: others may be at work here
    found = full_estimate(
        question_from_options(model=llama, machine="h100-80gb", host="1200GiB", batch=8)
    )
    took_s = time.process_time() - begin
    assert found.fits
    assert found.question.model.num_blocks == 80
    # 2 to 9 s, by the processor; two on one core slow each other down
    assert took_s < 20.0
