"""What a model that fits whole pays for being trained by an engine: nothing, it should be.

    python benchmarks/whole.py [--batch 2] [--rounds 15] [--threads 1] [--save]

The quickstart's model, whole on the device, beside the loop that everybody writes: autograd,
clipping by the global norm, torch's fused AdamW on fp32 masters. They take turns in one process;
the figure is the median over rounds of the ratio within a round, because a shared machine is not as
fast in one minute as in the next. On a machine with a GPU the device is that, else CPU memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.path.exists("/dev/nvidia0") else "cpu")

import torch
from harness import ROOT, alternate, describe, hardware, medians, provenance, save

sys.path.insert(0, str(ROOT / "scripts"))

from plain import PlainLoop
from quickstart import FULL, VOCABULARY

import stronghold

STEPS = 2  # in a round
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCHEDULE = {"warmup_num_steps": 5, "total_num_steps": 10**6}


def settings(precision: str, batch: int, device: torch.device) -> dict[str, Any]:
    section: dict[str, Any] = {"resident_layers": "all", "resident_updates": "gpu"}
    if device.type == "cpu":
        section |= {"device": "emulated", "emulated": {"poison": False}}
    adam = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupCosineLR", "params": SCHEDULE},
        "stronghold": section,
    }


def measure(precision: str, batch: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round's steps, whole and plain."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = settings(precision, batch, device)
    model = FULL.build(PRECISIONS[precision])
    engine, *_ = stronghold.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    assert engine.plan.whole
    plain = PlainLoop(FULL.build(PRECISIONS[precision]).to(device), config, exact=False)
    tokens = torch.randint(VOCABULARY, (batch, FULL.context), device=device)
    inputs = {"input_ids": tokens, "labels": tokens}

    def whole_steps() -> None:
        for _ in range(STEPS):
            loss = engine(**inputs).loss
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        loss.item()

    def plain_steps() -> None:
        for _ in range(STEPS):
            loss = plain.step(inputs)
        loss.item()

    contenders: dict[str, Callable[[], object]] = {"whole": whole_steps, "plain": plain_steps}
    seconds = alternate(contenders, rounds)
    engine.destroy()
    return seconds


def table(results: dict[str, dict[str, list[float]]], record: dict[str, Any], args: Any) -> str:
    lines = [
        "# A model that fits whole",
        "",
        describe(record),
        "",
        f"Median seconds of a step of {FULL.num_parameters() / 1e6:.0f} M parameters, {args.batch} "
        f"x {FULL.context} tokens, {args.threads} threads, {args.rounds} rounds; the ratio is the "
        "median of plain / whole within a round, above 1 where whole is faster.",
        "",
        "| precision | whole | plain | ratio | quartiles |",
        "|---|---|---|---|---|",
    ]
    for precision, seconds in results.items():
        ratios = [p / w for p, w in zip(seconds["plain"], seconds["whole"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found = {name: value / STEPS for name, value in medians(seconds).items()}
        lines.append(
            f"| {precision} | {found['whole']:.4f} | {found['plain']:.4f} | {middle:.3f} | "
            f"{low:.3f} to {high:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of torch and of Adam on the device")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    record = provenance()
    results = {name: measure(name, args.batch, args.rounds) for name in args.precisions}
    markdown = table(results, record, args)
    print(markdown)
    if args.save:
        for path in save(f"whole-{hardware()}", markdown, {**record, "seconds": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
