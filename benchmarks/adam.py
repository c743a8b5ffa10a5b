"""How near the CPU Adam is to memory's limit, and to the best that others offer.

    python benchmarks/adam.py [--params 64] [--rounds 15] [--threads 1 2] [--flows lean] [--save]

Three flows, each with its contenders and its limit, all alternating in one process:

  fp32  weight, gradient and moments fp32: 28 bytes per parameter. Ours, torch's fused AdamW,
        DeepSpeedCPUAdam.
  bf16  bf16 weight and gradient, exact fp32 master and moments. Ours is one pass of 26 bytes.
        DeepSpeed's flow: cast the gradient to fp32, step the fp32 master, copy it back to bf16.
  lean  bf16 weight and gradient, 8-bit states: one pass of 12.25 bytes, beside our bf16 one.

The limit moves the same bytes from as many streams to as many and computes nothing: in place, as
Adam does, and past the caches into other arrays; the faster of the two counts. It has the same
threads and chunks as ours, and finds its distance of prefetching as ours does. All arrays are
alike: fresh private mappings that ask for huge pages, as the engine's do. Every thread count has a
process of its own, because OpenMP reads its own once; OpenMP's waiting threads sleep, for all
contenders, because they would hold the cores of the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("MAX_JOBS", "1")

import torch
from harness import alternate, describe, host_array, medians, provenance, save, slug

from stronghold import native
from stronghold.optim import states
from stronghold.optim.adam import CPUAdam

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
BYTES = {"fp32": 28, "bf16": 26, "lean": 12.25}
SMALL_TENSORS, SMALL_NUMEL = 300, 1024
Contenders = dict[str, Callable[[], object]]


def batch(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    moments: list[torch.Tensor],
    grad: torch.Tensor,
    scales: list[torch.Tensor] | None = None,
    to: list[torch.Tensor] | None = None,
) -> native.UpdateBatch:
    """One call on these arrays. It writes `to` others, in the order of `native.Target`, or in
    place."""
    scale0, scale1 = (array.data_ptr() for array in scales) if scales else (0, 0)
    segment = native.UpdateSegment(
        weight=weight.data_ptr(),
        low=0 if low is None else low.data_ptr(),
        grad=grad.data_ptr(),
        numel=weight.numel(),
        moment0=moments[0].data_ptr(),
        moment1=moments[1].data_ptr(),
        scale0=scale0,
        scale1=scale1,
        number0=1e-4,  # lr
        number1=0.9,  # beta1
        number2=0.999,  # beta2
        number3=1e-8,  # eps
        number4=0.01,  # weight decay
        step=10,
        flags=0b11,  # AdamW with bias correction
    )
    targets = [native.Target(*(array.data_ptr() for array in to))] if to else None
    return native.UpdateBatch(
        "adam", weight.dtype, grad.dtype, [segment], lean=scales is not None, targets=targets
    )


def optimizers(params: list[torch.nn.Parameter], moments: list[torch.Tensor] | None) -> Contenders:
    """torch's and DeepSpeed's steps on `params`, with the given moments or their own."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    arguments: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
    fused = torch.optim.AdamW(params, fused=True, **arguments)
    deepspeed = DeepSpeedCPUAdam(params, adamw_mode=True, **arguments)
    if moments is not None:
        names = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        fused.state[params[0]] = {"step": torch.tensor(10.0), **names}
        deepspeed.state[params[0]] = {"step": 10, **names}
    return {"torch fused AdamW": fused.step, "DeepSpeedCPUAdam": deepspeed.step}


def contenders(
    numel: int, pool: native.Pool, memory: list[torch.Tensor], flows: list[str]
) -> Contenders:
    """The flows' steps; `memory` takes the arrays, whose addresses alone the batches hold."""
    moments = [host_array(numel, F32) for _ in range(2)]
    grad32, master = host_array(numel, F32), host_array(numel, F32)
    grad16, weight, low = (host_array(numel, BF16) for _ in range(3))
    for array in (grad32, master, moments[0]):
        array.normal_(0.0, 0.02)
    moments[1].fill_(4e-4)
    grad16.copy_(grad32)
    weight.copy_(master)
    elsewhere = [host_array(numel, F32) for _ in range(3)]
    halves = elsewhere[2].view(BF16)
    memory += [*moments, *elsewhere, grad32, master, grad16, weight, low]
    eighths, eighths_to = lean_batches(numel, grad16, weight, memory)

    param = torch.nn.Parameter(master)
    param.grad = grad32
    steps = {} if flows == ["lean"] else optimizers([param], moments)
    fp32 = batch(master, None, moments, grad32)
    bf16 = batch(weight, low, moments, grad16)
    fp32_to = batch(master, None, moments, grad32, to=[elsewhere[2], master, *elsewhere[:2]])
    bf16_to = batch(
        *(weight, low, moments, grad16), to=[halves[:numel], halves[numel:], *elsewhere[:2]]
    )

    def cast_step_copy() -> None:
        grad32.copy_(grad16)
        steps["DeepSpeedCPUAdam"]()
        weight.copy_(param.detach())

    every: Contenders = {
        "fp32 limit, in place": lambda: fp32.traffic(pool),
        "fp32 limit, past the caches": lambda: fp32_to.traffic(pool),
        "fp32 stronghold": lambda: fp32.run(pool),
        **{f"fp32 {name}": step for name, step in steps.items()},
        "bf16 limit, in place": lambda: bf16.traffic(pool),
        "bf16 limit, past the caches": lambda: bf16_to.traffic(pool),
        "bf16 stronghold": lambda: bf16.run(pool),
        "bf16 DeepSpeed cast, step, copy back": cast_step_copy,
        "lean limit, in place": lambda: eighths.traffic(pool),
        "lean limit, past the caches": lambda: eighths_to.traffic(pool),
        "lean stronghold": lambda: eighths.run(pool),
    }
    wanted = [name for name in every if name[:4] in flows]
    if "bf16" not in flows and "lean" in flows:
        wanted.insert(0, "bf16 stronghold")
    return {name: every[name] for name in wanted}


def lean_batches(
    numel: int, grad: torch.Tensor, weight: torch.Tensor, memory: list[torch.Tensor]
) -> tuple[native.UpdateBatch, native.UpdateBatch]:
    """A call in place on fresh arrays with lean states, and one from them to others. The rounds
    before the first that counts fill the moments."""
    sets = []
    for _ in range(2):
        low, *moments = (host_array(numel, U8) for _ in range(3))
        scales = [host_array(states.num_items("exp_avg_scale", numel), F32) for _ in range(2)]
        sets.append([host_array(numel, BF16), low, *moments, *scales])
    source, target = sets
    source[0].copy_(weight)
    memory += [*source, *target]
    arrays = source[0], source[1], source[2:4], grad, source[4:]
    return batch(*arrays), batch(*arrays, to=target)


def small_contenders(threads: int) -> Contenders:
    params = [torch.nn.Parameter(torch.randn(SMALL_NUMEL)) for _ in range(SMALL_TENSORS)]
    for param in params:
        param.grad = torch.randn(SMALL_NUMEL)
    ours = CPUAdam(params, lr=1e-4, weight_decay=0.01, num_threads=threads)
    steps = {"CPUAdam": ours.step, **optimizers(params, None)}
    return {f"{SMALL_TENSORS} x {SMALL_NUMEL} {name}": step for name, step in steps.items()}


def measure(numel: int, threads: int, rounds: int, flows: list[str]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    memory: list[torch.Tensor] = []
    with native.Pool(threads) as pool:
        seconds = alternate(contenders(numel, pool, memory, flows), rounds)
        isa = pool.isa
        prefetch = {
            "fp32": pool.prefetch("adam", F32, F32),
            "bf16": pool.prefetch("adam", BF16, BF16),
            "lean": pool.prefetch("adam", BF16, BF16, lean=True),
        }
    memory.clear()
    if "fp32" in flows:
        seconds.update(alternate(small_contenders(threads), rounds))
    return {
        "threads": threads,
        "isa": isa,
        "prefetch": prefetch,
        "median_s": medians(seconds),
        "seconds": seconds,
    }


def ratios(median_s: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Name -> (figure, what the project asks for), of the flows that were measured."""
    limit = {
        flow: min(time for name, time in median_s.items() if name.startswith(f"{flow} limit"))
        for flow in BYTES
        if f"{flow} limit, in place" in median_s
    }
    ours = {flow: median_s.get(f"{flow} stronghold", 0.0) for flow in BYTES}
    found = {}
    if "fp32" in limit:
        rivals = min(median_s["fp32 torch fused AdamW"], median_s["fp32 DeepSpeedCPUAdam"])
        found["fp32: speed, of the fastest rival's"] = (rivals / ours["fp32"], 0.97)
    if "bf16" in limit:
        flow = median_s["bf16 DeepSpeed cast, step, copy back"]
        found["bf16: speed, of memory's limit"] = (limit["bf16"] / ours["bf16"], 0.90)
        found["bf16: speed, of DeepSpeed's flow"] = (flow / ours["bf16"], 1.5)
    if "lean" in limit:
        found["lean: speed, of memory's limit"] = (limit["lean"] / ours["lean"], 0.80)
        found["lean: speed, of bf16 with exact states"] = (ours["bf16"] / ours["lean"], 1.7)
    return found


def table(results: list[dict[str, Any]], numel: int, record: dict[str, Any]) -> str:
    heads = [f"{r['threads']} thread{'s'[: r['threads'] > 1]}" for r in results]
    rounds = len(next(iter(results[0]["seconds"].values())))
    lines = [
        "# Adam on the CPU",
        "",
        f"{numel:,} parameters; medians of {rounds} alternating rounds; {results[0]['isa']}.",
        "",
        "| figure | " + " | ".join(heads) + " | asked |",
        "|---|" + "---|" * (len(heads) + 1),
    ]
    figures = [ratios(r["median_s"]) for r in results]
    for name, (_, asked) in figures[0].items():
        cells = " | ".join(f"{figure[name][0]:.2f}" for figure in figures)
        lines.append(f"| {name} | {cells} | {asked:.2f} |")
    lines += ["", "| step | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for name in results[0]["median_s"]:
        cells = []
        for result in results:
            time = result["median_s"][name]
            if name[:4] in BYTES:
                moved = numel * BYTES[name[:4]]
                cells.append(f"{time * 1e3:.1f} ms, {moved / time / 1e9:.1f} GB/s")
            else:
                cells.append(f"{time / SMALL_TENSORS * 1e6:.2f} us per tensor")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    note = (
        "GB/s count "
        + ", ".join(f"{count} bytes per parameter in {flow}" for flow, count in BYTES.items())
        + ", for every contender: what one pass must move. The limit has our threads and our way "
        "to choose how far ahead it prefetches. Chosen by ours, in elements: "
        + "; ".join(
            f"{head}: " + ", ".join(f"{ahead} in {flow}" for flow, ahead in r["prefetch"].items())
            for head, r in zip(heads, results, strict=True)
        )
        + "."
    )
    return "\n".join([*lines, "", note, "", describe(record), ""])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=64, help="millions (2**20) of parameters")
    parser.add_argument("--rounds", type=int, default=15)
    every = native.available_cores()
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, every}))
    parser.add_argument("--flows", nargs="+", choices=list(BYTES), default=list(BYTES))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/adam_CPU.*")
    # this process's thread count
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
    }
    sizes = ["--params", str(arguments.params), "--rounds", str(arguments.rounds)]
    flows = ["--flows", *arguments.flows]
    command = [sys.executable, str(Path(__file__)), "--one", str(threads), *sizes, *flows]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def main() -> None:
    arguments = parse()
    numel = arguments.params * 2**20
    if arguments.one is not None:
        print(json.dumps(measure(numel, arguments.one, arguments.rounds, arguments.flows)))
        return
    record = provenance()
    results = [in_own_process(threads, arguments) for threads in arguments.threads]
    markdown = table(results, numel, record)
    print(markdown)
    if arguments.save:
        which = "" if set(arguments.flows) == set(BYTES) else "_".join(["", *arguments.flows])
        name = f"adam{which}_{slug(record['machine']['cpu'])}"
        for path in save(name, markdown, {**record, "numel": numel, "results": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
