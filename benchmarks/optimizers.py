"""How near every optimizer of the CPU is to memory's limit, and how fast beside Adam.

    python benchmarks/optimizers.py [--params 64] [--rounds 15] [--threads 1 2] [--save]

Weights and gradients are bf16. Every optimizer takes a step with exact states (fp32 master and
moments) and a step with lean states. Beside a step stands its limit: the same bytes from as many
streams to as many, and no arithmetic. The limit runs in place, as the step does, and past the
caches into other arrays; the faster of the two counts. It has the same threads and chunks as the
step, and chooses its distance of prefetching as the step does.

All contenders alternate in one process. `adam.py` compares Adam with other libraries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import ROOT, alternate, describe, host_array, medians, provenance, save, slug

from stronghold import native

sys.path.insert(0, str(ROOT))
from tests.support.optimizers import OPTIMIZERS, hyper_fields

BF16, F32, I8 = torch.bfloat16, torch.float32, torch.int8
GROUP = 64  # elements that share a scale of lean states
KINDS = ("exact", "lean")
# Of memory's limit and of Adam's parameters per second, with exact states and two threads or more.
ASKED_OF_LIMIT, ASKED_OF_ADAM = 0.95, 1.25

Arrays = dict[str, torch.Tensor]
Contenders = dict[str, Callable[[], object]]


def state_dtypes(optimizer: str, kind: str) -> dict[str, torch.dtype]:
    """The dtypes of the arrays that a step writes, by the fields of a segment."""
    lean = kind == "lean"
    dtypes = {"weight": BF16, "low": I8 if lean else torch.int16}
    for k in range(OPTIMIZERS[optimizer].num_moments):
        dtypes[f"moment{k}"] = I8 if lean else F32
        if lean:
            dtypes[f"scale{k}"] = F32
    return dtypes


def num_items(field: str, numel: int) -> int:
    return -(-numel // GROUP) if field.startswith("scale") else numel


def bytes_per_parameter(optimizer: str, kind: str) -> float:
    """What a step reads and writes: all states both ways, the gradient one way."""
    dtypes = state_dtypes(optimizer, kind)
    states = sum(dtype.itemsize * num_items(name, GROUP) / GROUP for name, dtype in dtypes.items())
    return 2 * states + BF16.itemsize


class Memory:
    """All arrays of the run. The limits' targets are shared, as nothing reads them."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.grad = host_array(numel, BF16)
        self.grad.copy_(torch.empty(numel).normal_(0.0, 0.02))
        self._sources: list[torch.Tensor] = []
        self._targets: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def source(self, field: str, dtype: torch.dtype) -> torch.Tensor:
        array = host_array(num_items(field, self.numel), dtype)
        if field == "weight":
            array.copy_(self.grad)
        self._sources.append(array)
        return array

    def target(self, field: str, dtype: torch.dtype) -> torch.Tensor:
        key = field, dtype
        if key not in self._targets:
            self._targets[key] = host_array(num_items(field, self.numel), dtype)
        return self._targets[key]


def batch(
    optimizer: str, kind: str, memory: Memory, sources: Arrays, targets: Arrays | None = None
) -> native.UpdateBatch:
    """One call on these arrays; with `targets` it writes there."""
    addresses = {name: array.data_ptr() for name, array in sources.items()}
    hyper = hyper_fields(optimizer, grad_scale=1.0, lr=1e-4, weight_decay=0.01)
    segment = native.UpdateSegment(
        grad=memory.grad.data_ptr(), numel=memory.numel, step=10, **addresses, **hyper
    )
    to = None
    if targets is not None:
        to = [native.Target(**{name: array.data_ptr() for name, array in targets.items()})]
    return native.UpdateBatch(optimizer, BF16, BF16, [segment], lean=kind == "lean", targets=to)


def contenders(optimizer: str, kind: str, memory: Memory, pool: native.Pool) -> Contenders:
    dtypes = state_dtypes(optimizer, kind)
    sources = {name: memory.source(name, dtype) for name, dtype in dtypes.items()}
    targets = {name: memory.target(name, dtype) for name, dtype in dtypes.items()}
    step = batch(optimizer, kind, memory, sources)
    elsewhere = batch(optimizer, kind, memory, sources, targets)
    name = f"{optimizer}, {kind}"
    return {
        f"{name}: limit, in place": lambda: step.traffic(pool),
        f"{name}: limit, past the caches": lambda: elsewhere.traffic(pool),
        f"{name}: step": lambda: step.run(pool),
    }


def measure(memory: Memory, threads: int, rounds: int) -> dict[str, Any]:
    every: Contenders = {}
    with native.Pool(threads) as pool:
        for kind in KINDS:
            for optimizer in OPTIMIZERS:
                every |= contenders(optimizer, kind, memory, pool)
        seconds = alternate(every, rounds)
        isa = pool.isa
    return {"threads": threads, "isa": isa, "median_s": medians(seconds), "seconds": seconds}


def figures(median_s: dict[str, float], optimizer: str, kind: str) -> tuple[float, float, float]:
    """Seconds of a step, its speed as a part of the limit's, and as a part of Adam's."""
    name = f"{optimizer}, {kind}"
    step = median_s[f"{name}: step"]
    in_place, past = (median_s[f"{name}: limit, {way}"] for way in ("in place", "past the caches"))
    return step, min(in_place, past) / step, median_s[f"adam, {kind}: step"] / step


def table(results: list[dict[str, Any]], numel: int, record: dict[str, Any]) -> str:
    rounds = len(next(iter(results[0]["seconds"].values())))
    lines = [
        "# Optimizers on the CPU",
        "",
        f"{numel:,} parameters; bf16 weights and gradients; medians of {rounds} alternating "
        f"rounds; {results[0]['isa']}.",
    ]
    for result in results:
        threads = result["threads"]
        lines += [
            "",
            f"## {threads} thread{'s'[: threads > 1]}",
            "",
            "| optimizer, states | bytes per parameter | step | GB/s | 1e9 parameters/s "
            "| speed, of memory's limit | speed, of Adam's |",
            "|---|---|---|---|---|---|---|",
        ]
        for kind in KINDS:
            for optimizer in OPTIMIZERS:
                step, of_limit, of_adam = figures(result["median_s"], optimizer, kind)
                nbytes = bytes_per_parameter(optimizer, kind)
                lines.append(
                    f"| {optimizer}, {kind} | {nbytes:g} | {step * 1e3:.1f} ms "
                    f"| {numel * nbytes / step / 1e9:.1f} | {numel / step / 1e9:.2f} "
                    f"| {of_limit:.2f} | {of_adam:.2f} |"
                )
    lines += [
        "",
        f"Asked with exact states and all threads: {ASKED_OF_LIMIT:.2f} of memory's limit, and of "
        f"Adam's parameters per second {ASKED_OF_ADAM:.2f} for every other optimizer. Speeds of "
        "Adam's are those of Adam with the same states.",
    ]
    return "\n".join([*lines, "", describe(record), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=64, help="millions (2**20) of parameters")
    parser.add_argument("--rounds", type=int, default=15)
    every = native.available_cores()
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, every}))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/optimizers_*")
    arguments = parser.parse_args()
    numel = arguments.params * 2**20
    record = provenance()
    results = []
    for threads in arguments.threads:
        memory = Memory(numel)
        results.append(measure(memory, threads, arguments.rounds))
        del memory
    markdown = table(results, numel, record)
    print(markdown)
    if arguments.save:
        name = f"optimizers_{slug(record['machine']['cpu'])}"
        for path in save(name, markdown, {**record, "numel": numel, "results": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
