"""Large bases with adapters on a desktop's GPU: what fits, and what bounds the step.

The plan hides the link and the disk behind compute: no step is longer than the GPU's own work. The
share of the physical limit is smaller. The limit counts products and attention alone, and compute
also has operators that are bound by device memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from stronghold.tools.estimate.estimate import estimate
from stronghold.tools.estimate.question import question_from_options
from tests.support.forecasts import LLAMA_70B

GIB = 1 << 30
GPT_OSS_120B = GptOssConfig(
    num_hidden_layers=36, num_local_experts=128, architectures=["GptOssForCausalLM"]
)
QWEN3_235B = Qwen3MoeConfig(
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
    vocab_size=151936,
    max_position_embeddings=40960,
    architectures=["Qwen3MoeForCausalLM"],
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Row(NamedTuple):
    """A model, how it trains, its parameters, and the least share of the physical limit."""

    config: PretrainedConfig
    options: dict[str, Any]
    billions: float
    share: float


ROWS = {
    "70b, 64 GiB": Row(LLAMA_70B, {"host": "64GiB", "batch": 8, "accumulation": 2}, 70.8, 0.79),
    # Transformers writes the attention of gpt-oss out: three quarters of the step are operators.
    "gpt-oss-120b, 96 GiB": Row(
        GPT_OSS_120B,
        {"host": "96GiB", "batch": 16, "chunk": 4, "lora_targets": ATTENTION},
        117,
        0.24,
    ),
    "235b, 160 GiB": Row(
        QWEN3_235B, {"host": "160GiB", "batch": 32, "chunk": 8, "lora_targets": ATTENTION}, 235, 0.6
    ),
    "235b, 64 GiB and nvme": Row(
        QWEN3_235B,
        {
            "host": "64GiB",
            "nvme": "200GiB",
            "batch": 16,
            "accumulation": 2,
            "chunk": 8,
            "lora_targets": ATTENTION,
        },
        235,
        0.59,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_packed_base_computes_all_the_time(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    row.config.save_pretrained(tmp_path)
    question = question_from_options(
        model=tmp_path, machine="rtx4090", lora=16, frozen="nf4", seq=2048, **row.options
    )
    numel = question.layout.num_parameters
    assert numel == pytest.approx(row.billions * 1e9, rel=0.005)
    assert question.stored_bytes < 0.53  # adapters and norms included
    found = estimate(question)
    assert found.fits
    for budget, parts in found.tiers.values():
        assert sum(parts.values()) <= budget
    compute_s = sum(found.compute.values())
    assert found.step_s < (1.05 if question.nvme_bytes else 1.01) * compute_s
    assert found.limits.seconds / found.step_s > row.share
    assert found.compute["decoding"] < 0.03 * found.step_s
    assert found.plan is not None
    assert (found.plan.traffic.nvme_read_bytes > 0) == (question.nvme_bytes > 0)
