"""`stronghold plan --sweep`: each value is twice the one before, until one does not fit."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stronghold.tools.estimate.estimate import estimate
from stronghold.tools.estimate.question import question_from_options
from tests.support.forecasts import SIZES, asked, full_estimate, run
from tests.support.published import published

LIMITS = {"gpu": "20MB", "host": "30MB"}
CALL = [*SIZES, "--machine", "v100-32gb", "--gpu", LIMITS["gpu"], "--host", LIMITS["host"]]


@pytest.mark.parametrize(
    ("axis", "first"), [("batch", 1), pytest.param("seq", 512, marks=pytest.mark.slow)]
)
def test_a_sweep_ends_with_the_first_that_does_not_fit(
    axis: str, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, _ = run(*CALL, "--sweep", axis, capsys=capsys)
    assert status == 0
    head, *rows = text.splitlines()
    assert head.split()[0] == axis
    values = [int(row.split()[0].replace(",", "")) for row in rows]
    assert values == [first * 2**k for k in range(len(values))]
    assert len(values) >= 3
    *fitting, last = rows
    assert last.endswith("does not fit")
    assert not estimate(asked(**LIMITS, **{axis: values[-1]})).fits
    for row, value in zip(fitting, values, strict=False):
        found = estimate(asked(machine="v100-32gb", **LIMITS, **{axis: value}))
        assert f"{found.tokens_per_s:,.0f}" in row.split()
        assert row.endswith(found.bound)


def test_a_sweep_of_chunks_ends_with_the_whole_batch(capsys: pytest.CaptureFixture[str]) -> None:
    call = [*SIZES, "--machine", "v100-32gb", "--gpu", "20MB", "--batch", "6", "--sweep", "chunk"]
    status, text, _ = run(*call, capsys=capsys)
    assert status == 0
    _, *rows = text.splitlines()
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    found = estimate(asked(machine="v100-32gb", gpu="20MB", batch=6, chunk=2))
    assert f"{found.tokens_per_s:,.0f}" in rows[1].split()


def test_a_sweeps_figures_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(*CALL, "--sweep", "batch", "--json", capsys=capsys)
    assert status == 0
    figures = json.loads(text)
    assert [point["asked"]["batch"] for point in figures] == [1 << k for k in range(len(figures))]
    assert [point["fits"] for point in figures] == [True] * (len(figures) - 1) + [False]


def test_where_not_even_the_first_fits_the_status_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, text, _ = run(*CALL, "--gpu", "10kB", "--sweep", "batch", capsys=capsys)
    assert status == 1
    assert text.splitlines()[1:] == ["        1  does not fit"]


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
