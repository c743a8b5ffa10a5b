"""Whether lean states train as exact ones do: held-out loss of the quickstart's model with both.

    python benchmarks/lean_training.py [--tiny] [--steps 1000] [--seeds 3] [--processes 2] [--save]

A plain loop with the engine's arithmetic (`scripts/plain.py`): what the engine computes is the same
to the bit, whatever moves. Each seed has its weights and its order of batches; both kinds of states
have the same. What is asked: that the mean of the lean runs lies within the spread of the exact
ones. Rows: two texts (the standard library's sources; the C++ headers that torch brings), clipping
on and off, and fine-tuning on the other text, at a rate of 1e-5, what the first row's exact run of
the same seed has learned.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, ROOT, describe, hardware, provenance, save
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "scripts"))
from corpus import Corpus, read_text
from plain import PlainLoop
from quickstart import FULL, TINY, Size, evaluate

EVALUATIONS = 10
KINDS = ("exact", "lean")
ROWS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "not clipped": {"clipping": 0.0},
    "other text": {"text": "headers"},
    "fine-tuned": {"text": "headers", "lr": 1e-5, "begins": "clipped"},
}
Curve = list[tuple[int, float]]


def headers() -> bytes:
    """A second text that every machine with torch has."""
    folder = Path(torch.__file__).parent / "include"
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*.h")))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training. What it found is kept under `folder`: who is cut off loses a run, not all."""

    row: str
    kind: str
    seed: int
    steps: int
    size: Size
    config: dict[str, Any]
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / f"{self.row.replace(' ', '-')}-{self.seed}-{self.kind}.pt"

    def curve(self) -> Curve:
        """(step, held-out loss in nats per byte); the file has the last weights too."""
        if not self.file.exists():
            torch.set_num_threads(1)
            part = self.file.with_suffix(".part")
            torch.save(self._train(), part)
            part.rename(self.file)
        curve: Curve = torch.load(self.file)["curve"]
        return curve

    def _train(self) -> dict[str, Any]:
        asked, config = ROWS[self.row], copy.deepcopy(self.config)
        config["gradient_clipping"] = asked.get("clipping", config["gradient_clipping"])
        config["optimizer"]["params"]["lr"] = asked.get("lr", config["optimizer"]["params"]["lr"])
        config["scheduler"]["params"]["total_num_steps"] = self.steps
        text = headers() if asked.get("text") == "headers" else read_text(None)
        batch = config["train_micro_batch_size_per_gpu"]
        data = Corpus(text, batch_size=batch, context=self.size.context)
        data.restart(self.seed)
        model = self.size.build(torch.bfloat16, self.seed)
        model.set_attn_implementation("eager")  # at these lengths faster on a CPU
        if "begins" in asked:
            model.load_state_dict(torch.load(self._begins(asked["begins"]))["weights"])
        loop = PlainLoop(model, config, exact=True, states=self.kind)
        curve = [(0, evaluate(model, data))]
        for step in range(1, self.steps + 1):
            loop.step(data.batch())
            if step % max(1, self.steps // EVALUATIONS) == 0 or step == self.steps:
                curve.append((step, evaluate(model, data)))
        return {"curve": curve, "weights": model.state_dict()}

    def _begins(self, row: str) -> Path:
        return replace(self, row=row, kind="exact").file


def run(
    size: Size, args: argparse.Namespace, config: dict[str, Any]
) -> Iterator[dict[str, dict[str, list[Curve]]]]:
    """The curves by row, kind and seed, after each row."""
    name = f"{size.num_parameters()}-{args.steps}"
    folder = args.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[Curve]]] = {}
    bar = tqdm(total=len(args.rows) * args.seeds * len(KINDS), unit="run")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        for row in args.rows:
            asked = {
                pool.submit(
                    Run(
                        row=row,
                        kind=kind,
                        seed=seed,
                        steps=args.steps,
                        size=size,
                        config=config,
                        folder=folder,
                    ).curve
                ): (kind, seed)
                for seed in range(args.seeds)
                for kind in KINDS
            }
            curves: dict[tuple[str, int], Curve] = {}
            for done in as_completed(asked):
                curves[asked[done]] = done.result()
                bar.update()
            found[row] = {
                kind: [curves[kind, seed] for seed in range(args.seeds)] for kind in KINDS
            }
            yield found


def verdicts(found: dict[str, dict[str, list[Curve]]]) -> dict[str, dict[str, Any]]:
    rows = {}
    for row, kinds in found.items():
        last = {kind: [curve[-1][1] for curve in curves] for kind, curves in kinds.items()}
        exact, mean = last["exact"], statistics.mean(last["lean"])
        pairs = zip(last["lean"], exact, strict=True)
        rows[row] = {
            "before": [curve[0][1] for curve in kinds["exact"]],
            **last,
            "within": min(exact) <= mean <= max(exact),
            "difference": statistics.mean(lean - other for lean, other in pairs),
            "spread": max(exact) - min(exact),
        }
    return rows


def page(size: Size, data: dict[str, Any]) -> str:
    lines = [
        "# Training with lean states",
        "",
        f"A Llama of {size.num_parameters() / 1e6:.1f} M parameters, bytes as tokens, "
        f"{data['steps']} steps, {data['seeds']} seeds. Held-out loss at the end, nats per byte: "
        "each seed, exact and lean beside each other.",
        "",
        "| | exact | lean | mean of lean - exact | spread of exact | mean of lean within it |",
        "|---|---|---|---|---|---|",
    ]
    for row, found in data["rows"].items():
        exact, lean = (", ".join(f"{v:.4f}" for v in found[kind]) for kind in KINDS)
        lines.append(
            f"| {row} | {exact} | {lean} | {found['difference']:+.4f} | {found['spread']:.4f} | "
            f"{'yes' if found['within'] else 'no'} |"
        )
    return "\n".join([*lines, "", describe(data), ""])


def draw(found: dict[str, dict[str, list[Curve]]], png: Path) -> None:
    from matplotlib.figure import Figure

    from stronghold.tools import plot

    figure = Figure(figsize=(4.2 * len(found), 3.6), dpi=110, layout="constrained")
    columns = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (row, kinds) in zip(columns, found.items(), strict=True):
        for kind, colour, style in (("exact", "#303030", "-"), ("lean", "#d2691e", "--")):
            for number, curve in enumerate(kinds[kind]):
                label = f"{kind} states" if number == 0 else None
                steps, losses = zip(*curve, strict=True)
                axes.plot(steps, losses, style, color=colour, linewidth=1.1, label=label)
        axes.set_title(row, fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel("held-out loss, nats per byte")
        axes.legend(frameon=False, fontsize=8)
    plot.save(figure, png)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="the model of 0.7 M parameters")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--processes", type=int, default=2, help="runs at once, a thread each")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/lean_training"),
        help="what is there is not run again",
    )
    parser.add_argument("--save", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    config = json.loads((ROOT / "configs" / "quickstart.json").read_text())
    record = provenance()
    asked = {"steps": args.steps, "seeds": args.seeds, "parameters": size.num_parameters()}
    for curves in run(size, args, config):
        data = {**record, **asked, "rows": verdicts(curves), "curves": curves}
        text = page(size, data)
        if args.save:
            millions = f"{size.num_parameters() / 1e6:.1f}m"
            name = f"lean-training-{millions}-{args.steps}-steps_{hardware()}"
            save(name, text, data)
            draw(curves, RESULTS / f"{name}.png")
    print(text)


if __name__ == "__main__":
    main()
