"""The predictions in the texts are those of `stronghold plan`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from stronghold.tools.estimate.estimate import estimate
from stronghold.tools.estimate.question import question_from_options
from tests.support.forecasts import LLAMA_70B

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE = 2048


def llama(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
        **more,
    )


MODELS: dict[str, PretrainedConfig] = {
    "Llama 3.2 3B": llama(3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True),
    "Llama 3.1 8B": llama(4096, 14336, 32, 32),
    "Llama 3.3 70B": LLAMA_70B,
    "Qwen3 14B": Qwen3Config(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        architectures=["Qwen3ForCausalLM"],
    ),
    "Qwen3 30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}
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


@pytest.mark.parametrize("row", PLAN_ROWS, ids=lambda row: f"{row.gpu}, {row.ram}, {row.model}")
def test_a_prediction_of_the_page_is_that_of_the_plan(row: Row, tmp_path: Path) -> None:
    ram, _, disk = row.ram.partition(", ")
    options: dict[str, Any] = {"host": ram.replace(" GB", "GiB"), **METHODS[row.method]}
    if disk:
        options["nvme"] = disk.replace(" TB NVMe", "TiB")
    MODELS[row.model].save_pretrained(tmp_path)
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
    MODELS["Llama 3.1 8B"].save_pretrained(tmp_path)
    machine: dict[str, Any] = {"machine": "rtx4090", "host": "128GiB", "clipping": 0.0}
    question = question_from_options(model=tmp_path, batch=8, seq=SEQUENCE, **machine)
    assert predicted == f"{estimate(question).tokens_per_s:,.0f}"
