"""The predictions in the texts are those of `stronghold plan`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stronghold.tools.estimate.estimate import estimate
from stronghold.tools.estimate.question import question_from_options
from tests.support.published import published

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE = 2048


MACHINES = {"RTX 4090": "rtx4090", "RTX 3090": "rtx3090", "H100": "h100-80gb"}
METHODS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, lean states": {"states": "lean"},
    "LoRA of rank 16, base in nf4": {"lora": 16, "frozen": "nf4"},
}


class Row(NamedTuple):
    """A row of a table of predictions."""

    gpu: str
    ram: str
    model: str
    method: str
    batch: str
    tokens_per_s: str
    share: str


def rows_of(path: str, heading: str) -> list[Row]:
    """The rows of the table below a heading."""
    section = (ROOT / path).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    cells = [line.strip("|").split("|") for line in table[0].splitlines()[2:]]
    return [Row(*(cell.strip() for cell in row)) for row in cells]


PLAN_ROWS = rows_of("docs/plan.md", "What fits, and how fast")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", PLAN_ROWS, ids=lambda row: f"{row.gpu}, {row.ram}, {row.model}")
def test_a_prediction_of_the_page_is_that_of_the_plan(row: Row, tmp_path: Path) -> None:
    ram, _, disk = row.ram.partition(", ")
    options: dict[str, Any] = {"host": ram.replace(" GB", "GiB"), **METHODS[row.method]}
    if disk:
        options["nvme"] = disk.replace(" TB NVMe", "TiB")
    published(row.model.replace(" ", "-")).save_pretrained(tmp_path)
    question = question_from_options(
        model=tmp_path,
        machine=MACHINES[row.gpu.partition(",")[0]],
        batch=int(row.batch),
        seq=SEQUENCE,
        **options,
    )
    answer = estimate(question)
    share = answer.limits.seconds / answer.step_s
    assert (row.tokens_per_s, row.share) == (f"{answer.tokens_per_s:,.0f}", f"{share:.0%}")


def test_the_predictions_of_the_readme_are_those_of_the_page() -> None:
    rows = rows_of("README.md", "What fits where")
    assert len(rows) >= 5
    assert [row for row in rows if row not in PLAN_ROWS] == []


def test_the_predictions_of_the_page_on_8b_are_those_of_the_plan() -> None:
    text = (ROOT / "docs/how_to/full_8b_24gb.md").read_text(encoding="utf-8")
    predicted = re.findall(r"\| ([\d,]+) \|$", text, re.MULTILINE)
    of_8b = [row for row in PLAN_ROWS if row.model == "Llama 3.1 8B" and "4090" in row.gpu]
    assert predicted == [row.tokens_per_s for row in of_8b]


def test_the_prediction_without_clipping_is_that_of_the_plan(tmp_path: Path) -> None:
    text = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    (predicted,) = re.findall(r"`--clipping 0` the 8 B model in 128 GB reaches ([\d,]+)", text)
    published("Llama-3.1-8B").save_pretrained(tmp_path)
    machine: dict[str, Any] = {"machine": "rtx4090", "host": "128GiB", "clipping": 0.0}
    question = question_from_options(model=tmp_path, batch=8, seq=SEQUENCE, **machine)
    assert predicted == f"{estimate(question).tokens_per_s:,.0f}"
