"""What fits on which machine, and how fast `stronghold plan` predicts it: the README's table.

    python benchmarks/what_fits.py [--save] [--only NAME]

Each row is one run of `stronghold plan` on the shape of a published model. Nothing is trained, and
no GPU is needed. The machines are profiles of the planner, not measurements of this computer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import describe, leave, provenance
from tqdm import tqdm
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

SEQUENCE = 2048
MODELS: dict[str, PretrainedConfig] = {
    "Llama 3.2 3B": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "Llama 3.1 8B": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "Qwen3 14B": Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    ),
    "Llama 3.3 70B": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "Qwen3 30B-A3B": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row. `host` and `nvme` are sizes as `stronghold plan` takes them.

    `lora`: rank of the adapters, over a frozen base in the format `frozen`. 0: all weights train.
    """

    gpu: str
    machine: str
    model: str
    host: str
    batch: int
    states: str = "exact"
    nvme: str = ""
    lora: int = 0
    frozen: str = ""

    @property
    def name(self) -> str:
        """Short name for `--only`."""
        words = [self.machine, self.host, self.model, self.states, self.nvme, self.frozen]
        return " ".join(filter(None, words))

    @property
    def method(self) -> str:
        """What is trained, for people."""
        if self.lora:
            return f"LoRA of rank {self.lora}, base in {self.frozen or 'bf16'}"
        return "all weights" if self.states == "exact" else "all weights, lean states"

    def command(self, folder: Path) -> list[str]:
        """The command line, for the model's directory `folder`."""
        options = ["--model", str(folder), "--machine", self.machine, "--host", self.host]
        options += ["--batch", str(self.batch), "--seq", str(SEQUENCE), "--states", self.states]
        if self.nvme:
            options += ["--nvme", self.nvme]
        if self.lora:
            options += ["--lora", str(self.lora)]
        if self.frozen:
            options += ["--frozen", self.frozen]
        return ["stronghold", "plan", *options, "--json"]


RTX_4090, RTX_3090, H100 = "RTX 4090, 24 GB", "RTX 3090, 24 GB", "H100, 80 GB"
CASES = [
    Case(gpu=RTX_4090, machine="rtx4090", model="Llama 3.2 3B", host="64GiB", batch=8),
    Case(gpu=RTX_3090, machine="rtx3090", model="Llama 3.1 8B", host="128GiB", batch=8),
    Case(gpu=RTX_4090, machine="rtx4090", model="Llama 3.1 8B", host="128GiB", batch=8),
    Case(
        gpu=RTX_4090, machine="rtx4090", model="Llama 3.1 8B", host="64GiB", batch=8, states="lean"
    ),
    Case(
        gpu=RTX_4090, machine="rtx4090", model="Llama 3.1 8B", host="64GiB", batch=16, nvme="1TiB"
    ),
    Case(gpu=RTX_4090, machine="rtx4090", model="Qwen3 14B", host="256GiB", batch=8),
    Case(
        gpu=RTX_4090,
        machine="rtx4090",
        model="Qwen3 30B-A3B",
        host="256GiB",
        batch=16,
        states="lean",
    ),
    Case(
        gpu=RTX_4090,
        machine="rtx4090",
        model="Llama 3.3 70B",
        host="64GiB",
        batch=8,
        lora=16,
        frozen="nf4",
    ),
    Case(gpu=H100, machine="h100-80gb", model="Qwen3 14B", host="256GiB", batch=16),
]


def predict(case: Case, folder: Path) -> dict[str, Any]:
    """Run the planner for one row."""
    MODELS[case.model].save_pretrained(folder)
    result = subprocess.run(case.command(folder), capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):
        sys.exit(f"{' '.join(case.command(folder))}\n{result.stderr}")
    answer = json.loads(result.stdout)
    row = {
        "gpu": case.gpu,
        "host": case.host,
        "nvme": case.nvme,
        "model": case.model,
        "states": case.states,
        "method": case.method,
        "tokens_per_step": answer["tokens"],
        "fits": answer["fits"],
    }
    if answer["fits"]:
        timing, limit = answer["timing"], answer["limits"]["seconds"]
        row["tokens_per_s"] = round(timing["tokens_per_s"])
        row["step_s"] = timing["step_s"]
        row["share_of_limit"] = round(limit / timing["step_s"], 2)
        row["bound"] = timing["bound"]
    return row


def line(row: dict[str, Any]) -> str:
    """The row as Markdown, as it stands in the README."""
    size = row["host"].replace("GiB", " GB")
    if row["nvme"]:
        size += f", {row['nvme'].replace('TiB', ' TB')} NVMe"
    method = row["method"]
    if not row["fits"]:
        return f"| {row['gpu']} | {size} | {row['model']} | {method} | does not fit | |"
    speed = f"{row['tokens_per_s']:,}"
    share = f"{row['share_of_limit']:.0%}"
    return f"| {row['gpu']} | {size} | {row['model']} | {method} | {speed} | {share} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--output", type=Path, help="write the data there")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    record = provenance()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in tqdm([case for case in CASES if args.only in case.name]):
            rows.append(predict(case, Path(folder) / case.model.replace(" ", "-")))
    page = "\n".join(
        [
            "# What fits, and how fast",
            "",
            describe(record),
            "",
            f"Predicted by `stronghold plan`: sequences of {SEQUENCE} tokens, AdamW, clipping 1.",
            "Nothing here was measured on these machines. The share is that of the physical limit:",
            "the time of the busiest resource over the predicted time of a step.",
            "",
            "| GPU | RAM | model | what is trained | tokens/s | share of the limit |",
            "|---|---|---|---|---|---|",
            *map(line, rows),
            "",
        ]
    )
    leave("what-fits", page, {**record, "rows": rows}, to=args.output, keep=args.save)


if __name__ == "__main__":
    main()
