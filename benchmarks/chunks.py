"""What chunks buy, and what they cost the host.

    python benchmarks/chunks.py [--sequences 16] [--steps 3] [--layers 12] [--rounds 15] [--save]

First: blocks whose compute is sleep (it leaves the cores free, as a GPU does), on a link that is
paced so that one micro-batch after the other is bound by it: a step of so many sequences as
micro-batches of one, and as one batch in chunks of one. Then the host's time: a Llama of tiny
blocks, a batch in chunks of one, over the plain loop whose blocks are called with one sequence
after the other in the same way, under torch's checkpoint or not; one torch thread, contenders
alternate in one process.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from harness import ROOT, alternate, describe, leave, provenance, rows_beside

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from host_time import SLOTS, settings
from plain import PlainLoop
from quickstart import VOCABULARY, Size

import stronghold
from stronghold.predict.refine import TRACED_STEPS, WARM_UP_STEPS
from stronghold.telemetry.trace import read
from tests.support.chunked import Sums, chunk_blocks
from tests.support.sleeping import SleepingModel, timed_steps

LAYERS, NUMEL = 16, 1 << 19  # of blocks that sleep
FORWARD_S = 0.001  # a sequence's, in a layer; backward takes twice that
LINK_GBPS = 0.5
PLAIN = ("plain", "plain checkpointed")


def paced(args: argparse.Namespace, *, chunked: bool) -> dict[str, float]:
    """Seconds of a step (median), and of each lane's work in it."""
    micro_batches = 1 if chunked else args.sequences
    model = SleepingModel([(NUMEL, FORWARD_S, 2 * FORWARD_S)] * LAYERS)
    warm_up = WARM_UP_STEPS + TRACED_STEPS + 1
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        config = settings("keep")
        config["gradient_accumulation_steps"] = micro_batches
        config["stronghold"] |= {
            "window": 3,
            "trace": str(trace),
            "emulated": {"poison": False, "link_gbps": LINK_GBPS},
            **({"chunk": 1} if chunked else {}),
        }
        engine, *_ = stronghold.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )
        batch = torch.ones(args.sequences // micro_batches, 64)
        steps = timed_steps(engine, batch, warm_up + args.steps, micro_batches)[warm_up:]
        engine.destroy()
        spans = list(read(trace))
    found = {"step": statistics.median(steps)}
    for lane in ("compute", "fetch", "offload", "update"):
        total = sum(span.duration_s for span in spans if span.lane == lane)
        found[lane] = total / (warm_up + args.steps)
    return found


def host(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every round's steps, by contender."""
    size = Size(hidden=64, intermediate=192, layers=args.layers, heads=2, context=16)
    tokens = torch.randint(VOCABULARY, (args.sequences, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    engines: dict[str, Any] = {}
    contenders: dict[str, Callable[[], object]] = {}
    for policy in ("keep", "recompute"):
        config = settings(policy)
        config["stronghold"]["chunk"] = 1
        model = size.build(torch.float32)
        engines[policy], *_ = stronghold.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    backward = torch.Tensor.backward

    def plain(loop: PlainLoop, sums: Sums) -> None:
        def chunked_backward(loss: torch.Tensor, *given: Any, **more: Any) -> None:
            backward(loss, *given, **more)
            sums.to_grad()

        torch.Tensor.backward = chunked_backward  # type: ignore[method-assign]
        try:
            loop.step(inputs).item()
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]

    for name in PLAIN:
        model = size.build(torch.float32)
        blocks: Any = model.model
        sums = chunk_blocks(list(blocks.layers), 1, checkpointed=name != PLAIN[0])
        loop = PlainLoop(model, settings("keep"), exact=False)
        contenders[name] = functools.partial(plain, loop, sums)

    def ours(policy: str) -> None:
        engine = engines[policy]
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        engine.synchronize()
        loss.item()

    for policy in engines:
        contenders[policy] = functools.partial(ours, policy)
    seconds = alternate(contenders, args.rounds)
    for engine in engines.values():
        engine.destroy()
    return seconds


def page(
    order: dict[str, dict[str, float]],
    seconds: dict[str, list[float]],
    record: dict[str, Any],
    args: argparse.Namespace,
) -> str:
    one, all_ = order["micro-batches"], order["chunks"]
    lines = [
        "# Chunks",
        "",
        describe(record),
        "",
        f"{LAYERS} blocks of {NUMEL} fp32 parameters that sleep {1e3 * FORWARD_S:.0f} ms a "
        f"sequence in forward and twice that in backward, a link of {LINK_GBPS} GB/s each way, a "
        f"window of 3; {args.sequences} sequences a step, medians of {args.steps} steps, "
        "milliseconds.",
        "",
        "| order | step | compute | fetch | offload | update | step over the longest lane |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in order.items():
        cells = [f"{1e3 * found[lane]:.0f}" for lane in found]
        longest = max(value for lane, value in found.items() if lane != "step")
        lines.append(f"| {name} | {' | '.join(cells)} | {found['step'] / longest:.2f} |")
    uses = args.layers * args.sequences
    lines += [
        "",
        f"Chunks are {one['step'] / all_['step']:.2f} times faster.",
        "",
        f"Host time: {args.layers} Llama blocks of width 64 in {SLOTS} slots, {args.sequences} "
        f"sequences in chunks of one, fp32, one torch thread, medians of {args.rounds} steps.",
        "",
        f"| | a chunk and layer, ms | over {PLAIN[0]}, ms | over {PLAIN[1]}, ms |",
        "|---|---|---|---|",
    ]
    lines += rows_beside(seconds, PLAIN, uses, digits=3)
    lines += [
        "",
        "A block's forward runs as often in keep as in plain, and in recompute as in plain "
        "checkpointed (torch.utils.checkpoint around each chunk): these differences are what is "
        "ours.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="of the paced runs")
    parser.add_argument("--layers", type=int, default=12, help="of the host's time")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--to", type=Path, help="write the data as JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = provenance()
    order = {"micro-batches": paced(args, chunked=False), "chunks": paced(args, chunked=True)}
    seconds = host(args)
    data = {**record, "order": order, "seconds": seconds}
    leave("chunks", page(order, seconds, record, args), data, to=args.to, keep=args.save)


if __name__ == "__main__":
    main()
