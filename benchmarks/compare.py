"""Methods of training side by side: the same model, data, seed, precision and clipping.

    python benchmarks/compare.py --method all --layers 4 --hidden 256 --heads 4 --seq 128

Every method has a process of its own. A method whose losses leave the reference's is marked wrong;
out of memory is a result. Exits with 1 if a method is wrong or failed. The reference is `plain`;
where it does not fit the caps it runs once more without them. `--method MODULE:CLASS` runs a
`methods.base.Method` of your own. On a machine without a GPU layers compute on the emulated device,
and what needs a GPU says so.

The five cases of the STRONGHOLD paper, on a GPU of 32 GB beside 90 GB of RAM. PAPER stands for
`--gpu-memory 32GB --host-memory 90GB --hidden 2048 --heads 16 --seq 1024 --precision fp32
--activations recompute --steps 5 --warmup 2`:

    the largest model of a method: double --layers until it is out of memory, then bisect
        compare.py PAPER --method zero-offload --layers 48 --window 1 --no-reference
    speed of every method at plain's largest model
        compare.py PAPER --method all --layers 32
    the time of a step by the number of layers
        compare.py PAPER --method stronghold --layers 16 --window 15     (then 32, 64, 92)
    the time of a step by the size of the window
        compare.py PAPER --method stronghold --layers 32 --window 2      (then 4, 8, 15)
    speed by tokens in a step: from which batch on does streaming cost nothing
        compare.py PAPER --method plain,stronghold --layers 32 --batch 1 (then 2, 4, 8, 16)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from harness import describe, leave, provenance, write
from methods import METHODS, process
from methods.judge import FACTOR, FLOOR, bounds, verdict
from methods.task import Task, tflops_megatron, tflops_useful
from tqdm import tqdm

from stronghold.config.section import parse_bytes
from stronghold.limits import stated_host_bytes

GIB, MB = float(1 << 30), 1e6
# references where plain does not fit at all
STAND_INS = ("l2l", "fsdp2-offload", "zero-offload")
Row = dict[str, Any]
NO_REFERENCE: Row = {"source": None, "losses": None, "other_order": None, "bounds": []}


def run_method(name: str, task: Task, timeout_s: float) -> Row:
    """One method's row, without a verdict on its losses. Without a cap on host memory the cap is
    what STRONGHOLD_HOST_MEMORY says, where it says anything."""
    row = process.run(
        name,
        task.to_json(),
        machine=task.machine,
        host_cap_bytes=task.host_memory or stated_host_bytes(),
        timeout_s=timeout_s,
    )
    if row["status"] == "ok":
        row |= rates(row, task)
        cap = task.gpu_memory
        if cap is not None and (row["device_peak_bytes"] or 0) > cap:
            row |= {"status": "out of memory", "reason": "over the cap on GPU memory"}
    return row


def rates(row: Row, task: Task) -> Row:
    """Throughput over all measured steps and their updates; the median of single steps."""
    step_s = row["wall_s"] / task.steps
    tokens, parameters = task.tokens_per_step, row["num_parameters"]
    recomputes = row["activations"] == "recompute"
    return {
        "samples_per_s": task.batch * task.accumulation / step_s,
        "tokens_per_s": tokens / step_s,
        "median_step_s": statistics.median(row["step_s"]),
        "tflops": tflops_megatron(parameters, tokens, step_s, recomputes),
        "useful_tflops": tflops_useful(
            parameters, tokens, step_s, layers=task.layers, hidden=task.hidden, seq=task.seq
        ),
    }


def compare(
    names: Sequence[str],
    task: Task,
    timeout_s: float = 3600.0,
    reference: dict[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Rows of all methods, judged; the reference's losses and bound beside them. `reference` is
    that of an earlier result on the same data. `keep` gets what there is after every row: a run
    that is cut off loses no row."""
    rows: list[Row] = []

    def so_far(judged_by: dict[str, Any]) -> dict[str, Any]:
        judge_rows(rows, judged_by)
        return {"task": dataclasses.asdict(task), "rows": rows, "reference": judged_by}

    for name in tqdm(names, desc="methods", disable=None):
        rows.append(run_method(name, task, timeout_s))
        if keep is not None:
            keep(so_far(reference or NO_REFERENCE))
    if reference is None:
        reference = find_reference(rows, task, timeout_s)
    return so_far(reference)


def judge_rows(rows: list[Row], reference: dict[str, Any]) -> None:
    """Write a verdict on every row that ran."""
    for row in rows:
        if row["status"] == "ok":
            word, largest, first = verdict(row["losses"], reference["losses"], reference["bounds"])
            row |= {"verdict": word, "loss_difference": largest, "first_wrong_step": first}


def earlier_reference(file: Path, task: Task) -> dict[str, Any]:
    """The reference of a result file, if it is of the same training."""
    kept = json.loads(file.read_text())
    other = Task(**kept["task"])
    if trained(other) != trained(task):
        raise SystemExit(f"{file}: another training: {title(other)}; expected {title(task)}")
    found: dict[str, Any] = kept["reference"]
    if found["losses"] is None:  # it was cut off before
        return NO_REFERENCE
    return found | {"source": f"{found['source']} of {file.name}"}


def trained(task: Task) -> Task:
    """The task without what does not change a loss."""
    neutral = Task()
    names = ("activations", "window", "gpu_memory", "host_memory", "link_gbps")
    names += ("threads", "nvme_dir", "trace", "section", "halves")
    return dataclasses.replace(task, **{name: getattr(neutral, name) for name in names})


def find_reference(rows: list[Row], task: Task, timeout_s: float) -> dict[str, Any]:
    """Plain's losses: from its row, else from a run without caps, else a stand-in's; and the bound,
    from the same run with every micro-batch cut in two, where that is possible."""
    free = dataclasses.replace(task, gpu_memory=None, host_memory=None, activations="recompute")
    for name in ("plain", *STAND_INS):
        row = next((r for r in rows if r["method"] == name and r["status"] == "ok"), None)
        source = f"{name}, the row above"
        if row is None and name == "plain":
            row, source = run_method(name, free, timeout_s), "plain, without caps"
        if row is not None and row["status"] == "ok":
            losses, other = row["losses"], None
            if task.batch % 2 == 0:
                halves = dataclasses.replace(free, halves=True)
                other = run_method(name, halves, timeout_s).get("losses")
            allowed = bounds(losses, other, task.precision)
            return {"source": source, "losses": losses, "other_order": other, "bounds": allowed}
    return NO_REFERENCE


# -- what is printed ------------------------------------------------------------------------------
def table(result: dict[str, Any]) -> str:
    """Markdown: one row per method, then the losses of every step."""
    lines = [
        "| method | result | losses | samples/s | tokens/s | ms/step | TFLOPS | useful TFLOPS "
        "| GPU peak | host peak | over the link |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(line(row) for row in result["rows"]),
        "",
    ]
    return "\n".join([*lines, *explain(result), "", *loss_table(result)])


def line(row: Row) -> str:
    if row["status"] != "ok":
        reason = " ".join(str(row.get("reason", "")).split()).replace("|", "/")
        cells = [row["status"] + (f": {reason[:160]}" if reason else ""), *[""] * 9]
        return f"| {row['method']} | " + " | ".join(cells) + " |"
    word, largest = row["verdict"], row["loss_difference"]
    losses = word if largest is None else f"{word}, {largest:.1e}"
    if word == "wrong":
        losses = f"**wrong** from step {row['first_wrong_step']}, {largest:.1e}"
    peak, link = row["device_peak_bytes"], row["link_bytes"]
    cells = [
        "ok",
        losses,
        f"{row['samples_per_s']:.4g}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['median_step_s'] * 1e3:,.1f}",
        f"{row['tflops']:.3g}",
        f"{row['useful_tflops']:.3g}",
        "not counted" if peak is None else size(peak),
        size(row["host_anonymous_peak_bytes"]),
        "not counted" if link is None else f"{link / MB:,.1f} MB",
    ]
    return f"| {row['method']} | " + " | ".join(cells) + " |"


def size(num_bytes: int) -> str:
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (GIB / 1024, "MiB")
    return f"{num_bytes / unit:,.2f} {name}"


def explain(result: dict[str, Any]) -> list[str]:
    """What the columns mean, for this run."""
    task, reference = Task(**result["task"]), result["reference"]
    ok = [row for row in result["rows"] if row["status"] == "ok"]
    policies = ", ".join(f"{row['method']} {row['activations']}" for row in ok)
    floor = FLOOR[task.precision]
    lines = [
        f"- losses: largest relative difference from the reference ({reference['source'] or 'none'}"
        f") over {task.num_steps} steps. Wrong: beyond {floor:g}, and beyond {FACTOR:g} times the "
        "distance between two runs of the reference that add in different orders"
        + (f" (at most {max(reference['bounds']):.1e} here)." if reference["bounds"] else "."),
        f"- samples/s and tokens/s over {task.steps} steps after {task.warmup} of warm-up, until "
        "the last update is done; ms/step is the median of single steps. TFLOPS counts a "
        "recomputed forward as work (k = 4), useful TFLOPS is (6 P T + attention) / s.",
        f"- activations: {policies or 'none ran'}.",
        "- host peak: anonymous and shared resident bytes of the process, sampled every 50 ms; "
        "torch and the frameworks are in it.",
    ]
    if task.machine == "emulated":
        lines.append(
            "- the device is emulated: the CPU computes, and GPU memory is not counted. Speeds say "
            "nothing about a GPU, nor, on a machine that others use, about each other."
        )
    return lines


def loss_table(result: dict[str, Any]) -> list[str]:
    """Losses by step: the reference, then every method."""
    ok = [row for row in result["rows"] if row["status"] == "ok"]
    reference = result["reference"]["losses"]
    if not ok:
        return []
    names = [row["method"] for row in ok]
    columns = [row["losses"] for row in ok]
    if reference is not None:
        names, columns = ["reference", *names], [reference, *columns]
    lines = ["| step | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for step, values in enumerate(zip(*columns, strict=True), 1):
        lines.append(f"| {step} | " + " | ".join(f"{value:.8f}" for value in values) + " |")
    return lines


def title(task: Task) -> str:
    """The model and what a step is, in words."""
    model = f"{task.family}, {task.layers} layers, hidden {task.hidden}, {task.heads} heads"
    caps = [
        f"{name} capped at {size(cap)}"
        for name, cap in (("GPU", task.gpu_memory), ("host", task.host_memory))
        if cap is not None
    ]
    step = f"{task.accumulation} x {task.batch} x {task.seq} = {task.tokens_per_step:,} tokens"
    return (
        f"{model}; {task.precision}; a step is {step}; clipping {task.clipping:g}; activations "
        f"{task.activations}" + "".join(f"; {cap}" for cap in caps)
    )


# -- the command ----------------------------------------------------------------------------------
def byte_size(text: str) -> int:
    """24GB, 24GiB, or whole bytes."""
    return parse_bytes(int(text) if text.isdigit() else text)


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """An argument for each field of `Task`, whose text describes them."""
    parsers = {"gpu_memory": byte_size, "host_memory": byte_size, "section": json.loads}
    for name, hint in get_type_hints(Task).items():
        word, kinds = f"--{name.replace('_', '-')}", get_args(hint) or (hint,)
        if name in parsers:
            parser.add_argument(word, type=parsers[name])
        elif isinstance(kinds[0], str):
            parser.add_argument(word, choices=kinds)
        elif name != "halves":  # the reference's own
            parser.add_argument(word, type=kinds[0])


def task_of(arguments: argparse.Namespace) -> Task:
    """The task that parsed arguments ask for. The machine is what there is, in bf16 on CUDA."""
    names = {field.name for field in dataclasses.fields(Task)}
    given = {n: value for n, value in vars(arguments).items() if n in names and value is not None}
    given.setdefault("machine", "cuda" if torch.cuda.is_available() else "emulated")
    given.setdefault("precision", "bf16" if given["machine"] == "cuda" else "fp32")
    for name in {"nvme_dir", "trace"} & given.keys():
        given[name] = str(Path(given[name]).resolve())
    return Task(**given)


def method_names(words: Sequence[str]) -> list[str]:
    """Methods by name, "all", or MODULE:CLASS; commas and repetition both join."""
    names: list[str] = []
    for word in ",".join(words).split(","):
        if word != "all" and word not in METHODS and ":" not in word:
            raise SystemExit(f"--method {word}: expected all, {', '.join(METHODS)}")
        names += [name for name in (METHODS if word == "all" else [word]) if name not in names]
    return names


def page(result: dict[str, Any], record: dict[str, Any]) -> str:
    """The Markdown page of one comparison."""
    heads = ["# Methods side by side", "", title(Task(**result["task"])), ""]
    return "\n".join([*heads, table(result), "", describe(record), ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"{Task.__doc__}\nMethods:\n"
        + "".join(f"    {name}: {entry.about}\n" for name, entry in METHODS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--method", action="append", help="a name, several with commas, or all")
    add_task_arguments(parser)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for a method")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="judge by this JSON's")
    parser.add_argument("--no-reference", action="store_true", help="losses stay unchecked")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    record = provenance()
    task, names = task_of(arguments), method_names(arguments.method or ["all"])
    kept = earlier_reference(arguments.reference, task) if arguments.reference else None
    kept = NO_REFERENCE if arguments.no_reference else kept

    def keep(result: dict[str, Any]) -> None:
        if arguments.json is not None:
            write(arguments.json, {**record, **result})

    result = compare(names, task, arguments.timeout, kept, keep)
    name, data = f"{task.family}-{task.layers}x{task.hidden}-{task.precision}", {**record, **result}
    leave(name, page(result, record), data, keep=arguments.save)
    if arguments.json is not None:
        write(arguments.json, data)
    rows = result["rows"]
    return int(any(row["status"] == "failed" or row.get("verdict") == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
