"""How far every method is from what the machine could do: the physical limit, from its own rates.

    python benchmarks/limits.py --method plain,stronghold --layers 8 --hidden 512 --seq 256

Takes compare.py's arguments. Rates of the link, of host memory and of matrix products are measured
in this run, by the code of `stronghold doctor`; then the methods run; then the rates are measured
again, because shared machines change, and the faster figure of each counts. The limit is
`stronghold.plan.cost.physical_limit`: the time of the busiest resource if it never waited.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compare
import torch
from harness import describe, leave, provenance, write
from methods.model import Model
from methods.task import Task

from stronghold.model.costs import DTYPES
from stronghold.optim import DEFAULT
from stronghold.optim.states import EXACT, states_of
from stronghold.plan.cost import Limits, Traffic, break_even, physical_limit
from stronghold.plan.machine import MachineProfile
from stronghold.tools.doctor.measure import examine


def load_of(task: Task, *, streamed: bool) -> tuple[Traffic, dict[str, float]]:
    """What a step of `task` must move, and its FLOPs: `streamed`, every block's weights rest in
    host memory and their gradients go there; else everything is on the device.

    Forward is 2 P T for the matrices, the tied head once and embeddings not, and 2 l h s T for
    causal attention (half of QK^T and of AV).
    """
    with torch.device("meta"):
        model = Model(task)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    tokens = task.batch * task.seq
    attention = 2 * task.layers * task.hidden * task.seq * tokens
    in_blocks = 2.0 * sum(blocks) * tokens + attention
    head = 2.0 * task.vocab * task.hidden * tokens
    moved = Traffic.of_parameters(
        states_of(DTYPES[task.precision], EXACT, DEFAULT.moments),
        micro_batches=task.accumulation,
        streamed=sum(blocks) if streamed else 0,
        trained=sum(blocks) if streamed else 0,
        layer=max(blocks) if streamed else 0,
    )
    again = in_blocks if task.recomputes else 0.0
    return moved, {"forward_flops": in_blocks + head, "recomputed_flops": again}


def limit_of(task: Task, machine: MachineProfile, *, streamed: bool) -> Limits:
    """What no method can beat on this machine."""
    moved, flops = load_of(task, streamed=streamed)
    return physical_limit(moved, machine, task.precision, **flops)


def measure_rates(task: Task, quick: bool) -> MachineProfile:
    """The machine's rates now, with the threads that the methods get."""
    threads = torch.get_num_threads()
    torch.set_num_threads(task.threads or threads)
    try:
        found = examine(device=task.machine, quick=quick)
    finally:
        torch.set_num_threads(threads)
    return found.profile


def faster(first: MachineProfile, second: MachineProfile) -> MachineProfile:
    """The better of two measurements, rate by rate: a limit is what the machine can do."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(MachineProfile):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name.endswith("_gbps") or field.name == "flops":
            values[field.name] = (
                {k: max(a[k], b[k]) for k in a}
                if isinstance(a, dict)
                else (a if b is None else b if a is None else max(a, b))
            )
    return dataclasses.replace(first, **values)


def judge(result: dict[str, Any], machine: MachineProfile) -> dict[str, Any]:
    """Limits, and each method's share of them."""
    task = Task(**result["task"])
    streaming = limit_of(task, machine, streamed=True)
    resident = limit_of(task, machine, streamed=False)
    shares = {
        row["method"]: {
            "step_s": row["wall_s"] / task.steps,
            "of_streaming_limit": streaming.seconds * task.steps / row["wall_s"],
            "of_resident_limit": resident.seconds * task.steps / row["wall_s"],
        }
        for row in result["rows"]
        if row["status"] == "ok" and row["verdict"] != "wrong"
    }
    states = states_of(DTYPES[task.precision], EXACT, DEFAULT.moments)
    crossing = break_even(machine, task.precision, states, recompute=task.recomputes)
    return {
        "streaming": dataclasses.asdict(streaming),
        "resident": dataclasses.asdict(resident),
        "shares": shares,
        "break_even_tokens": dataclasses.asdict(crossing),
        "machine_profile": json.loads(machine.to_json()),
    }


def table(judged: dict[str, Any]) -> str:
    """Markdown: the limits' terms, and the methods' distance."""
    streaming, resident = judged["streaming"], judged["resident"]
    lines = ["| resource | ms of a step, weights streamed | all on the device |", "|---|---|---|"]
    for name, seconds in streaming["parts"].items():
        lines.append(f"| {name} | {seconds * 1e3:,.2f} | {resident['parts'][name] * 1e3:,.2f} |")
    for name, key in (("fill and drain of a layer", "fill_s"), ("**limit**", "seconds")):
        lines.append(f"| {name} | {streaming[key] * 1e3:,.2f} | {resident[key] * 1e3:,.2f} |")
    lines += [
        "",
        f"Bound by {streaming['bound']}. Compute covers the CPU's Adam from "
        f"{judged['break_even_tokens']['cpu']:,.0f} tokens per step on, and the link from "
        f"{judged['break_even_tokens']['link']:,.0f} per micro-batch.",
        "",
        "| method | ms/step | of the limit when weights stream | of the limit on the device |",
        "|---|---|---|---|",
    ]
    for name, share in judged["shares"].items():
        lines.append(
            f"| {name} | {share['step_s'] * 1e3:,.1f} | {share['of_streaming_limit']:.2f} "
            f"| {share['of_resident_limit']:.2f} |"
        )
    if any(share["of_streaming_limit"] > 1.0 for share in judged["shares"].values()):
        lines += ["", "Above 1: the machine was slower while its rates were measured."]
    return "\n".join(lines)


def rates_in_words(machine: MachineProfile) -> str:
    """One line of the rates that were measured."""
    memory = max(machine.memory_gbps.values())
    flops = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in machine.flops.items())
    return (
        f"Rates of this run: host to device {machine.fetch_gbps:.3g} GB/s, back "
        f"{machine.offload_gbps:.3g}, both {machine.duplex_gbps:.3g}; host memory {memory:.3g} "
        "GB/s; "
        f"matrix products, TFLOPS: {flops}."
    )


def run(
    names: Sequence[str],
    task: Task,
    timeout_s: float,
    quick: bool = False,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[dict[str, Any], str]:
    """Rates, methods, rates again; everything measured, and the page's body. `keep` gets the
    comparison after every row."""
    before = measure_rates(task, quick)
    result = compare.compare(names, task, timeout_s, keep=keep)
    machine = faster(before, measure_rates(task, quick))
    judged = judge(result, machine)
    body = [compare.title(task), "", rates_in_words(machine), "", table(judged), ""]
    return {**result, **judged}, "\n".join([*body, compare.table(result)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", action="append", help="as compare.py's")
    compare.add_task_arguments(parser)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for a method")
    parser.add_argument("--quick", action="store_true", help="rougher rates, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    task = compare.task_of(arguments)
    if task.model_dir is not None:
        parser.error("--model: the limit is computed for the built-in models; give sizes instead")
    names = compare.method_names(arguments.method or ["plain,stronghold"])
    record = provenance()

    def keep(result: dict[str, Any]) -> None:
        if arguments.json is not None:
            write(arguments.json, {**record, **result})

    result, body = run(names, task, arguments.timeout, arguments.quick, keep)
    page = "\n".join(["# Distance to the physical limit", "", body, "", describe(record), ""])
    name = f"limits-{compare.model_name(task, result)}"
    leave(name, page, {**record, **result}, to=arguments.json, keep=arguments.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
