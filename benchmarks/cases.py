"""What the five cases of the STRONGHOLD artifact share: sizes, machines, and what they leave.

A case is a question (`case1_largest.py` to `case5_window.py`); `--machine` says where it is asked:
`here` (the GPU, or without one the emulated device), `emulated`, or `simulated:PROFILE`, where
stronghold alone is predicted, by its own executor on virtual clocks, for a machine's profile.
Measured and predicted figures never share a table; the artifact's own published figures may stand
beside, in columns or rows with a star.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compare
from case_machine import Machine, Row
from harness import RESULTS, ROOT, describe, hardware, provenance
from methods import METHODS
from methods.task import Task
from tqdm import tqdm

# GPT of the SC22 artifact, on one V100 of 32 GB with 90 GB of RAM
ARTIFACT: dict[str, Any] = {
    "family": "gpt",
    "hidden": 2048,
    "heads": 16,
    "seq": 1024,
    "batch": 4,
    "vocab": 50304,
    "precision": "fp32",
    "activations": "recompute",
    "steps": 5,
    "warmup": 2,
}
SMALL: dict[str, Any] = {  # the same questions in a minute, on the emulated device
    **ARTIFACT,
    "hidden": 64,
    "heads": 4,
    "seq": 32,
    "batch": 2,
    "vocab": 256,
    "steps": 3,
    "gpu_memory": 4_000_000,
    "threads": 1,
}
# What the artifact published; `facts` names its methods megatron-lm, l2l, zero-offload,
# zero-infinity and stronghold.
PUBLISHED_LARGEST = {
    "plain": 32,
    "l2l": 78,
    "zero-offload": 48,
    "zero-infinity": 48,
    "stronghold": 100,
}
PUBLISHED_SAMPLES_PER_S = {
    32: {
        "plain": 0.7496,
        "l2l": 0.1729,
        "zero-offload": 0.3711,
        "zero-infinity": 0.3587,
        "stronghold": 0.6647,
    },
    48: {"zero-offload": 0.2523, "zero-infinity": 0.2439, "stronghold": 0.3999},
    78: {"l2l": 0.0529, "stronghold": 0.2271},
}
PUBLISHED_WINDOW_MS = {
    2: 7961.0,
    4: 7738.0,
    6: 7213.0,
    8: 7231.0,
    10: 6788.0,
    12: 6544.0,
    14: 6491.0,
    15: 5991.0,
}
PUBLISHED_LAYERS_MS = {
    16: 2685.0,
    24: 4141.0,
    32: 5960.0,
    40: 7929.0,
    48: 10053.0,
    56: 11802.0,
    64: 14166.0,
    78: 17712.0,
    92: 21006.0,
}
BASELINES = ("plain", "l2l", "zero-offload", "zero-infinity", "superoffload", "fsdp2-offload")


class Measured(Machine):
    """This machine: every run in a process of its own."""

    def __init__(self, word: str, timeout_s: float, rows: Path) -> None:
        """`rows` gets a line of JSON for every run, as it ends."""
        self.word = word
        self._timeout_s = timeout_s
        self._rows = rows
        self._references: dict[str, dict[str, Any]] = {}  # a sweep of windows needs one
        if word == "emulated":
            self.description = (
                "Measured on the emulated device: the CPU computes, and GPU memory is counted, so "
                "that times say nothing about a GPU."
            )

    def methods(self) -> list[str]:
        """On the emulated device those whose GPU bytes are counted: others know no cap there."""
        if self.word == "emulated":
            return ["plain", "l2l", "stronghold"]
        return [name for name in METHODS if name in BASELINES] + ["stronghold"]

    def run(self, method: str, task: Task) -> Row:
        row = compare.run_method(method, task, self._timeout_s)
        self._keep(row, task)
        return row

    def compare(self, names: Sequence[str], task: Task) -> list[Row]:
        trained = compare.trained(task).to_json()
        known = self._references.get(trained)
        result = compare.compare(
            names, task, self._timeout_s, known, lambda found: self._keep(found["rows"][-1], task)
        )
        self._references[trained] = result["reference"]
        rows: list[Row] = result["rows"]
        return rows

    def _keep(self, row: Row, task: Task) -> None:
        self._rows.parent.mkdir(parents=True, exist_ok=True)
        with self._rows.open("a") as lines:
            lines.write(json.dumps({"task": dataclasses.asdict(task), "row": row}) + "\n")


def machine_of(arguments: argparse.Namespace, task: Task) -> Machine:
    """The machine that `--machine` names."""
    word: str = arguments.machine
    if word.startswith("simulated"):
        from case_simulated import Simulated  # the planner and the executor, and no GPU

        return Simulated(word.partition(":")[2] or "v100-32gb")
    word = "emulated" if task.machine == "emulated" else "here"
    return Measured(word, arguments.timeout, arguments.output / "rows.jsonl")


def parse(
    doc: str, argv: Sequence[str] | None, add: Callable[[argparse.ArgumentParser], None]
) -> tuple[argparse.Namespace, Task, Machine]:
    """A case's arguments, the task they make, and the machine. Sizes left out are the artifact's;
    on the emulated device, small ones."""
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    compare.add_task_arguments(parser)
    parser.add_argument("--method", action="append", help="default: all that the machine offers")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "cases", help="folder for what is left"
    )
    parser.add_argument("--save", action="store_true", help="write to benchmarks/results/")
    add(parser)
    word = parser.parse_known_args(argv)[0].machine
    if word not in ("here", "emulated") and not word.startswith("simulated"):
        parser.error(f"--machine {word}: expected here, emulated or simulated:PROFILE")
    if word.startswith("simulated") and parser.parse_known_args(argv)[0].save:
        parser.error("--save: a prediction is not a result; leave it in a folder with --output")
    small = compare.machine_word("here" if word == "here" else "emulated") == "emulated"
    defaults = SMALL if small and not word.startswith("simulated") else ARTIFACT
    parser.set_defaults(**defaults)
    arguments = parser.parse_args(argv)
    asked = argparse.Namespace(**vars(arguments))
    if word.startswith("simulated"):
        asked.machine = "emulated"  # no GPU is touched
    task = compare.task_of(asked)
    machine = machine_of(arguments, task)
    arguments.method = compare.method_names(arguments.method or machine.methods())
    return arguments, task, machine


def add_sweep(
    parser: argparse.ArgumentParser, what: str, small: Sequence[int], paper: Sequence[int]
) -> None:
    """`--sweep` of whole numbers; without it the artifact's, or small ones when emulated."""
    parser.add_argument(
        "--sweep",
        type=lambda text: [int(word) for word in text.split(",")],
        help=f"{what}, joined by commas (default: {_join(paper)}; emulated: {_join(small)})",
    )


def sweep_of(
    arguments: argparse.Namespace, machine: Machine, small: Sequence[int], paper: Sequence[int]
) -> list[int]:
    """The sweep asked for, or the machine's default."""
    return list(arguments.sweep or (small if machine.word == "emulated" else paper))


def at_layers(task: Task, layers: int) -> Task:
    return dataclasses.replace(task, layers=layers)


def is_artifacts(task: Task) -> bool:
    """Whether published figures are of this task."""
    fields = ("family", "hidden", "heads", "seq", "batch", "vocab", "precision", "activations")
    return all(getattr(task, field) == ARTIFACT[field] for field in fields)


def speed(row: Row) -> float | None:
    """Samples per second of a row that counts: it ran, and its losses are right."""
    if row["status"] != "ok" or row.get("verdict") == "wrong":
        return None
    return float(row["samples_per_s"])


def result_in_words(row: Row) -> str:
    """A row's result for a cell: a figure, or why there is none."""
    found = speed(row)
    if found is not None:
        return f"{found:.4g}"
    if row["status"] == "ok":
        return f"wrong losses from step {row['first_wrong_step']}"
    reason = " ".join(str(row.get("reason", "")).split()).replace("|", "/")[:100]
    return f"{row['status']}: {reason}" if reason else str(row["status"])


def count_in_words(parameters: int) -> str:
    """Such as 1.717 B."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.4g} {name}"
    return str(parameters)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def leave(
    arguments: argparse.Namespace,
    name: str,
    *,
    title: str,
    body: str,
    data: dict[str, Any],
    draw: Callable[[Path], None],
    task: Task,
    machine: Machine,
    layers: str = "",
) -> None:
    """Print the page; write it, its data and its picture. `layers` says how many where it is not
    the task that does."""
    record = provenance()
    where = machine.word.replace(" ", "-") if machine.simulated else hardware()
    stem = f"{name}_{where}_{record['time'][:10]}"
    folder = RESULTS if arguments.save else arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    png = folder / f"{stem}.png"
    draw(png)
    picture = [f"![{title}]({png.name})", ""] if png.exists() else []
    heads = [f"# {title}", "", compare.title(task, layers), "", machine.description, ""]
    page = "\n".join([*heads, *picture, body, "", describe(record), ""])
    print(page)
    (folder / f"{stem}.md").write_text(page)
    everything = {**record, "case": name, "machine_word": machine.word}
    everything |= {"simulated": machine.simulated, "task": dataclasses.asdict(task), **data}
    (folder / f"{stem}.json").write_text(json.dumps(everything, indent=1) + "\n")
    print(f"wrote {folder / stem}.md, .json" + (", .png" if png.exists() else ""))


def progress(items: Sequence[Any], what: str) -> Any:
    return tqdm(items, desc=what, disable=None)


def _join(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
