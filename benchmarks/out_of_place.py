"""How fast a step out of place is, beside the same step in place.

    python benchmarks/out_of_place.py [--params 64] [--rounds 15] [--threads 2] [--save]
        [--optimizers adam lion] [--flows fp32 bf16] [--before LIBRARY]

Every optimizer takes steps with fp32 weights, with bf16 weights and exact states, and with bf16
weights and lean states. Gradients have the weights' dtype. Contenders alternate in one process:

  in place      every array is read and written where it is.
  out of place  one set of arrays is read and another is written. The next call goes back, as it
                does for a caller that swaps the two sets.
  limit         both ways: the same bytes from as many streams to as many, and no arithmetic.
  before        in place, with the library of an earlier commit (ABI 3, which had no targets).

Both ways move the same bytes, because the stores out of place go past the caches. What such stores
cost more than others is the machine's: the limit shows it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import ROOT, alternate, describe, host_array, medians, provenance, save, slug

from stronghold import native

sys.path.insert(0, str(ROOT))
from tests.support.optimizers import OPTIMIZERS, hyper_fields

F32, BF16, I16, I8 = torch.float32, torch.bfloat16, torch.int16, torch.int8
GROUP = 64  # elements that share a scale of lean states
FLOWS = ("fp32", "bf16", "lean")
CODES = {F32: 0, BF16: 1}  # sh_dtype
LEAN_CODE = 3
# speeds, of the step in place and of before
ASKED_OUT_OF_PLACE, ASKED_OF_BEFORE = 0.97, 0.99

Contenders = dict[str, Callable[[], object]]


def state_dtypes(optimizer: str, flow: str) -> dict[str, torch.dtype]:
    """The dtypes of the arrays that a step writes, by the fields of a segment."""
    low = {"fp32": {}, "bf16": {"low": I16}, "lean": {"low": I8}}[flow]
    dtypes = {"weight": F32 if flow == "fp32" else BF16, **low}
    for k in range(OPTIMIZERS[optimizer].num_moments):
        dtypes[f"moment{k}"] = I8 if flow == "lean" else F32
        if flow == "lean":
            dtypes[f"scale{k}"] = F32
    return dtypes


class Case:
    """One optimizer and flow: two sets of arrays, and prepared calls."""

    def __init__(self, optimizer: str, flow: str, numel: int) -> None:
        self.optimizer, self.flow = optimizer, flow
        dtypes = state_dtypes(optimizer, flow)
        self.dtype = dtypes["weight"]
        self.grad = host_array(numel, self.dtype)
        self.grad.copy_(torch.empty(numel).normal_(0.0, 0.02))
        self.sets = [
            {
                name: host_array(-(-numel // GROUP) if name.startswith("scale") else numel, dtype)
                for name, dtype in dtypes.items()
            }
            for _ in range(2)
        ]
        self.sets[0]["weight"].copy_(self.grad)

    def batch(self, source: int, target: int) -> native.UpdateBatch:
        """A call that reads one set of arrays and writes one."""
        sources, targets = (
            {name: array.data_ptr() for name, array in self.sets[k].items()}
            for k in (source, target)
        )
        numel = self.grad.numel()
        hyper = hyper_fields(self.optimizer, grad_scale=1.0, lr=1e-4, weight_decay=0.01)
        segment = native.UpdateSegment(
            **{"low": 0, **sources}, grad=self.grad.data_ptr(), numel=numel, step=10, **hyper
        )
        return native.UpdateBatch(
            self.optimizer,
            *(self.dtype, self.dtype),
            [segment],
            lean=self.flow == "lean",
            targets=None if source == target else [native.Target(**targets)],
        )


class Before:
    """An earlier library, and a pool of its threads."""

    def __init__(self, path: str, threads: int) -> None:
        self._library = ctypes.CDLL(path)
        address, int32 = ctypes.c_void_p, ctypes.c_int32
        self._library.sh_update.argtypes = [
            *(address, ctypes.c_char_p, int32, int32, address, ctypes.c_int64)
        ]
        if self._library.sh_abi_version() != 3:
            raise SystemExit(f"{path}: sh_update had no targets in ABI 3; this is another")
        self._pool = ctypes.c_void_p()
        if self._library.sh_pool_create(threads, None, 0, None, ctypes.byref(self._pool)):
            raise SystemExit(f"{path}: sh_pool_create failed")

    def run(self, case: Case, batch: native.UpdateBatch) -> None:
        lean = case.flow == "lean"
        dtypes = LEAN_CODE if lean else CODES[case.dtype], CODES[case.dtype]
        address = batch.rows.ctypes.data
        if self._library.sh_update(self._pool, case.optimizer.encode(), *dtypes, address, 1):
            raise SystemExit("the earlier library refused the call")


def contenders(case: Case, pool: native.Pool, before: Before | None) -> Contenders:
    in_place = case.batch(0, 0)
    out_of_place = case.batch(0, 1)
    swapping = itertools.cycle([out_of_place, case.batch(1, 0)])
    found: Contenders = {
        "in place": lambda: in_place.run(pool),
        "out of place": lambda: next(swapping).run(pool),
        "limit, in place": lambda: in_place.traffic(pool),
        "limit, out of place": lambda: out_of_place.traffic(pool),
    }
    if before is not None:
        found["before"] = lambda: before.run(case, in_place)
    return found


def measure(
    optimizer: str, flow: str, numel: int, rounds: int, pool: native.Pool, before: Before | None
) -> dict[str, Any]:
    case = Case(optimizer, flow, numel)
    # The first steps choose how far ahead each way prefetches.
    seconds = alternate(contenders(case, pool, before), rounds, warmup=4)
    dtypes = state_dtypes(optimizer, flow)
    states = sum(d.itemsize / (GROUP if n.startswith("scale") else 1) for n, d in dtypes.items())
    return {
        "optimizer": optimizer,
        "flow": flow,
        "bytes_per_parameter": 2 * states + case.dtype.itemsize,
        "median_s": medians(seconds),
        "seconds": seconds,
    }


def table(results: list[dict[str, Any]], arguments: argparse.Namespace, isa: str) -> list[str]:
    has_before = "before" in results[0]["median_s"]
    head = "| optimizer, flow | bytes per parameter | in place | GB/s | out of place | GB/s "
    head += "| speed out of place, of in place | the limits' | out of place, of its limit |"
    head += " speed in place, of before |" if has_before else ""
    lines = [
        "# Steps out of place",
        "",
        f"{arguments.params * 2**20:,} parameters; medians of {arguments.rounds} alternating "
        f"rounds; {arguments.threads} threads; {isa}.",
        "",
        head,
        "|---" * (head.count("|") - 1) + "|",
    ]
    for result in results:
        median_s, nbytes = result["median_s"], result["bytes_per_parameter"]
        inside, outside = median_s["in place"], median_s["out of place"]
        limit = median_s["limit, out of place"]
        moved = arguments.params * 2**20 * nbytes / 1e9
        line = (
            f"| {result['optimizer']}, {result['flow']} | {nbytes:g} "
            f"| {inside * 1e3:.1f} ms | {moved / inside:.1f} "
            f"| {outside * 1e3:.1f} ms | {moved / outside:.1f} | {inside / outside:.2f} "
            f"| {median_s['limit, in place'] / limit:.2f} | {limit / outside:.2f} |"
        )
        lines.append(line + (f" {median_s['before'] / inside:.2f} |" if has_before else ""))
    asked = f"Asked: {ASKED_OUT_OF_PLACE:.2f} out of place"
    asked += f", {ASKED_OF_BEFORE:.2f} of before." if has_before else "."
    return [*lines, "", asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=64, help="millions (2**20) of parameters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=native.available_cores())
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--flows", nargs="+", choices=FLOWS, default=list(FLOWS))
    parser.add_argument("--before", help="a libstronghold.so of ABI 3")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/out-of-place_*"
    )
    arguments = parser.parse_args()
    record = provenance()
    before = Before(arguments.before, arguments.threads) if arguments.before else None
    with native.Pool(arguments.threads) as pool:
        results = [
            measure(name, flow, arguments.params * 2**20, arguments.rounds, pool, before)
            for name, flow in itertools.product(arguments.optimizers, arguments.flows)
        ]
        isa = pool.isa
    markdown = "\n".join([*table(results, arguments, isa), "", describe(record), ""])
    print(markdown)
    if arguments.save:
        name = f"out-of-place_{slug(record['machine']['cpu'])}"
        for path in save(name, markdown, {**record, "results": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
