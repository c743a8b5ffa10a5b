"""How near the CPU's optimizers are to memory's limit, and Adam to the best that others offer.

    python benchmarks/adam.py [--params 64] [--rounds 15] [--threads 1 2] [--only bf16] [--save]

Every optimizer takes a step in three flows:

  fp32  weights, gradients and moments in fp32
  bf16  weights and gradients in bf16; exact fp32 masters and moments
  lean  weights and gradients in bf16; 8-bit states

The rivals of Adam are torch's fused AdamW and DeepSpeedCPUAdam in fp32. In bf16 DeepSpeed casts the
gradient to fp32, steps the fp32 master, and copies it back.

The limit moves the same bytes from as many streams to as many and computes nothing: in place, as
the step does, and past the caches into other arrays; the faster of the two counts. It has the same
threads and chunks as ours, and finds its distance of prefetching as ours does. All arrays are
alike: fresh private mappings that ask for huge pages, as the engine's do; about 130 bytes per
parameter in all. Contenders alternate. Every thread count has a process of its own, because OpenMP
reads its own once; OpenMP's waiting threads sleep, because they would hold the cores of the next.
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
from harness import ROOT, alternate, describe, host_array, leave, medians, provenance

from stronghold import native

sys.path.insert(0, str(ROOT))
from tests.support.optimizers import OPTIMIZERS, hyper_fields

F32, BF16, I8, I16 = torch.float32, torch.bfloat16, torch.int8, torch.int16
GROUP = 64  # elements that share a scale of lean states
FLOWS = ("fp32", "bf16", "lean")
ASKED = (
    "Asked of stronghold: 0.90 of memory's limit with exact states, 0.80 with lean ones; Adam in "
    "fp32 at 0.97 of the fastest rival's speed, and in bf16 1.5 times as fast as DeepSpeed."
)
Contenders = dict[str, Callable[[], object]]


def state_dtypes(optimizer: str, flow: str) -> dict[str, torch.dtype]:
    """The dtypes of the arrays that a step writes, by the fields of a segment."""
    lean = flow == "lean"
    dtypes = {"weight": F32} if flow == "fp32" else {"weight": BF16, "low": I8 if lean else I16}
    for k in range(OPTIMIZERS[optimizer].num_moments):
        dtypes[f"moment{k}"] = I8 if lean else F32
        if lean:
            dtypes[f"scale{k}"] = F32
    return dtypes


def num_items(field: str, numel: int) -> int:
    return -(-numel // GROUP) if field.startswith("scale") else numel


def bytes_per_parameter(name: str) -> float:
    """What a step reads and writes: all states both ways, the gradient one way."""
    optimizer, flow = name.partition(":")[0].split(", ")
    dtypes = state_dtypes(optimizer, flow)
    states = sum(dtype.itemsize * num_items(field, GROUP) for field, dtype in dtypes.items())
    return 2 * states / GROUP + (4 if flow == "fp32" else 2)


class Memory:
    """All arrays of the run, which live as long as this: a batch has their addresses alone."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._arrays: dict[tuple[str, str, torch.dtype], torch.Tensor] = {}

    def array(self, field: str, dtype: torch.dtype, owner: str = "") -> torch.Tensor:
        """The owner's own. Gradients, and what the limits write, have no owner and are shared."""
        key = owner, field, dtype
        if key not in self._arrays:
            made = self._arrays[key] = host_array(num_items(field, self.numel), dtype)
            if field in ("weight", "grad"):
                made.normal_(0.0, 0.02)
        return self._arrays[key]


def own(optimizer: str, flow: str, memory: Memory, pool: native.Pool) -> Contenders:
    """Our step, and its limit both ways."""
    dtypes = state_dtypes(optimizer, flow)
    dtype = dtypes["weight"]
    name = f"{optimizer}, {flow}"
    addresses = {field: memory.array(field, d, name).data_ptr() for field, d in dtypes.items()}
    elsewhere = {field: memory.array(field, d).data_ptr() for field, d in dtypes.items()}
    hyper = hyper_fields(optimizer, grad_scale=1.0, lr=1e-4, weight_decay=0.01)
    grad = memory.array("grad", dtype).data_ptr()
    fields = {"grad": grad, "numel": memory.numel, "step": 10, "low": 0, **addresses, **hyper}
    segment = native.UpdateSegment(**fields)

    def batch(targets: list[native.Target] | None) -> native.UpdateBatch:
        lean = flow == "lean"
        return native.UpdateBatch(optimizer, dtype, dtype, [segment], lean=lean, targets=targets)

    step, past = batch(None), batch([native.Target(**{"low": 0, **elsewhere})])
    return {
        f"{name}: limit, in place": lambda: step.traffic(pool),
        f"{name}: limit, past the caches": lambda: past.traffic(pool),
        f"{name}: stronghold": lambda: step.run(pool),
    }


def rivals(memory: Memory) -> Contenders:
    """torch's and DeepSpeed's Adam on one parameter, with the same moments."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = torch.nn.Parameter(memory.array("weight", F32, "rivals"))
    param.grad = gradient = memory.array("grad", F32, "rivals")
    weight, low_gradient = memory.array("weight", BF16, "rivals"), memory.array("grad", BF16)
    arguments: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
    fused = torch.optim.AdamW([param], fused=True, **arguments)
    deepspeed = DeepSpeedCPUAdam([param], adamw_mode=True, **arguments)
    moments = {name: memory.array(name, F32, "rivals") for name in ("exp_avg", "exp_avg_sq")}
    fused.state[param] = {"step": torch.tensor(10.0), **moments}
    deepspeed.state[param] = {"step": 10, **moments}

    def cast_step_copy() -> None:
        gradient.copy_(low_gradient)
        deepspeed.step()
        weight.copy_(param.detach())

    return {
        "adam, fp32: torch fused AdamW": fused.step,
        "adam, fp32: DeepSpeedCPUAdam": deepspeed.step,
        "adam, bf16: DeepSpeed cast, step, copy back": cast_step_copy,
    }


def measure(numel: int, threads: int, rounds: int, only: str) -> dict[str, Any]:
    torch.set_num_threads(threads)
    memory, every = Memory(numel), Contenders()
    with native.Pool(threads) as pool:
        for optimizer in OPTIMIZERS:
            for flow in FLOWS:
                if only in f"{optimizer}, {flow}":
                    every |= own(optimizer, flow, memory, pool)
        if only in "adam, fp32" or only in "adam, bf16":
            others = rivals(memory).items()
            every |= {name: step for name, step in others if only in name.partition(":")[0]}
        seconds = alternate(every, rounds)
        isa = pool.isa
    return {"threads": threads, "isa": isa, "median_s": medians(seconds), "seconds": seconds}


def table(results: list[dict[str, Any]], numel: int, record: dict[str, Any]) -> str:
    rounds = len(next(iter(results[0]["seconds"].values())))
    lines = [
        "# Optimizers on the CPU",
        "",
        f"{numel:,} parameters; medians of {rounds} alternating rounds; {results[0]['isa']}. GB/s "
        "count what one pass must move, for every contender.",
    ]
    for result in results:
        median_s, threads = result["median_s"], result["threads"]
        lines += [
            "",
            f"## {threads} thread{'s'[: threads > 1]}",
            "",
            "| step | bytes per parameter | time | GB/s | speed, of memory's limit |",
            "|---|---|---|---|---|",
        ]
        for name, seconds in median_s.items():
            limit = f"{name.partition(':')[0]}: limit, "
            limit_s = min(median_s[limit + "in place"], median_s[limit + "past the caches"])
            moved = bytes_per_parameter(name)
            lines.append(
                f"| {name} | {moved:g} | {seconds * 1e3:.1f} ms "
                f"| {numel * moved / seconds / 1e9:.1f} | {limit_s / seconds:.2f} |"
            )
    return "\n".join([*lines, "", ASKED, "", describe(record), ""])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=64, help="millions (2**20) of parameters")
    parser.add_argument("--rounds", type=int, default=15)
    every = native.available_cores()
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, every}))
    parser.add_argument("--only", default="", help="a part of a name such as 'adam, lean'")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    # this process's thread count
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(threads: int) -> dict[str, Any]:
    """The same command with one number of threads."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
    }
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--one", str(threads)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def main() -> None:
    arguments = parse()
    numel = arguments.params * 2**20
    if arguments.one is not None:
        print(json.dumps(measure(numel, arguments.one, arguments.rounds, arguments.only)))
        return
    record = provenance()
    results = [in_own_process(threads) for threads in arguments.threads]
    data = {**record, "numel": numel, "results": results}
    leave("optimizers", table(results, numel, record), data, keep=arguments.save)


if __name__ == "__main__":
    main()
