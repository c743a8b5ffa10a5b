"""What streaming one layer costs the host in a step: hooks, saved tensors, transfers, updates.

    python benchmarks/host_time.py [--layers 24] [--rounds 21] [--steps 4] [--profile keep] [--save]

A Llama of tiny blocks, whose kernels take next to nothing, streamed on a device of CPU memory with
no paced link, beside the loop that everybody writes: autograd, clipping by the global norm, torch's
fused AdamW. One torch thread. They take turns in one process; the figure is the median over
rounds of the difference within a round, divided by the layers. A GPU starves while a layer's
forward and backward take less than that. `recompute` runs each forward twice; the plain loop with
torch's own checkpointing is there to tell what of that is ours.

Beside them stand two forecasts. One policy's steps are traced, as in a run whose plan is refined,
and the other policy's step is simulated from that trace: the forecast has to know what a change of
policy costs the calling thread. And the step that `stronghold plan` expects before a run, from the
model's costs and a profile of `stronghold doctor`. The doctor measures between the rounds, with
the same thread, since the memory and the clock of a shared machine change from minute to minute.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import json
import os
import pstats
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from harness import ROOT, alternate, describe, leave, medians, provenance, rows_beside

sys.path.insert(0, str(ROOT / "scripts"))

from plain import PlainLoop
from quickstart import VOCABULARY, Size

import stronghold
from stronghold.plan.cost import measured_rates, measured_workload
from stronghold.plan.machine import MachineProfile
from stronghold.plan.plan import make_plan
from stronghold.predict.refine import EMULATED_RATES
from stronghold.predict.simulate import simulate
from stronghold.tools.doctor.measure import examine
from stronghold.tools.estimate.question import question_from_options

POLICIES = ("keep", "recompute")
SLOTS = 4
TOKENS = 16  # whose kernels take next to nothing


def settings(policy: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": 10**6},
        },
        "stronghold": {
            "device": "emulated",
            "emulated": {"poison": False},
            "window": SLOTS,
            "resident_layers": 0,
            "activations": policy,
        },
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of every round's steps, by contender; and the forecasts' seconds of one step, by the
    policy that they are for: from the other policy's trace, and from the profile."""

    seconds: dict[str, list[float]]
    traced_s: dict[str, float]
    planned_s: dict[str, float]
    profile: MachineProfile


def measure(args: argparse.Namespace) -> Measured:
    """Half of the rounds, the machine's rates, and the other half."""
    size = Size(hidden=64, intermediate=192, layers=args.layers, heads=2, context=args.tokens)
    tokens = torch.randint(VOCABULARY, (1, args.tokens))
    inputs = {"input_ids": tokens, "labels": tokens}
    engines = {}
    for policy in POLICIES:
        model = size.build(torch.float32)
        engines[policy], *_ = stronghold.initialize(
            model=model, model_parameters=model.parameters(), config=settings(policy)
        )
        assert not engines[policy].plan.whole

    def streamed(policy: str) -> None:
        engine = engines[policy]
        for _ in range(args.steps):
            loss = engine(**inputs).loss
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        loss.item()

    loops = {}
    for name in ("plain", "plain checkpointed"):
        model = size.build(torch.float32)
        if name != "plain":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        loops[name] = PlainLoop(model, settings("keep"), exact=False)

    def plain(name: str) -> None:
        for _ in range(args.steps):
            loss = loops[name].step(inputs)
        loss.item()

    contenders: dict[str, Callable[[], object]] = {
        **{name: functools.partial(plain, name) for name in loops},
        **{name: functools.partial(streamed, name) for name in engines},
    }
    if args.profile:
        profile(contenders[args.profile], args.layers * args.steps)
    first = alternate(contenders, args.rounds // 2)
    machine = examine(device="emulated").profile
    second = alternate(contenders, args.rounds - args.rounds // 2)
    measured = Measured(
        seconds={name: first[name] + second[name] for name in contenders},
        traced_s={
            policy: forecast(engines[other], functools.partial(streamed, other), policy, args.steps)
            for policy, other in (POLICIES, POLICIES[::-1])
        },
        planned_s={policy: planned(size, machine, policy) for policy in POLICIES},
        profile=machine,
    )
    for engine in engines.values():
        engine.destroy()
    return measured


def planned(size: Size, machine: MachineProfile, policy: str) -> float:
    """Seconds of a step as `stronghold plan` has them, for the plan that runs here."""
    with tempfile.TemporaryDirectory() as folder:
        machine.save(Path(folder) / "machine.json")
        size.build(torch.float32).config.save_pretrained(folder)
        question = question_from_options(
            model=Path(folder),
            machine=str(Path(folder) / "machine.json"),
            seq=size.context,
            precision="fp32",
            clipping=settings(policy)["gradient_clipping"],
        )
        question = dataclasses.replace(question, window=SLOTS, resident_layers=0)
        demand = dataclasses.replace(question.demand, activations=policy, whole=False)
        plan = make_plan(question.layout, demand)
        predicted = simulate(
            question.layout, plan, question.work, question.rates, asynchronous=not machine.emulated
        )
    return predicted.step_s


def forecast(engine: Any, run: Callable[[], object], policy: str, num_steps: int) -> float:
    """Seconds of a step of `policy`, simulated from `num_steps` of another policy that `run` takes
    on `engine`."""
    device = engine.inspect().device
    device.record_spans(True)
    begun = len(engine.inspect().operations)
    run()
    device.record_spans(False)
    now = engine.inspect()
    spans = now.operations[begun:]
    workload = measured_workload(
        spans, now.layout, activations=now.plan.activations, micro_batches=1, num_steps=num_steps
    )
    plan = make_plan(now.layout, dataclasses.replace(now.demand, activations=policy))
    rates = measured_rates(spans, EMULATED_RATES)
    predicted = simulate(now.layout, plan, workload, rates, asynchronous=False)
    return predicted.step_s


def profile(run: Callable[[], object], num_uses: int) -> None:
    """Print microseconds per layer and step of the training thread's functions, as cProfile has
    them, which makes each call of a Python function dearer than it is."""
    for _ in range(3):
        run()
    recorder = cProfile.Profile()
    recorder.runcall(run)
    rows = pstats.Stats(recorder).stats.items()  # type: ignore[attr-defined]
    print("| own us | with callees us | calls | function |\n|---|---|---|---|")
    for (file, line, name), (_, calls, own, total, _) in sorted(rows, key=lambda r: -r[1][2])[:60]:
        place = f"{Path(file).parent.name}/{Path(file).name}:{line} " if line else ""
        us = (1e6 * own / num_uses, 1e6 * total / num_uses)
        print(f"| {us[0]:.1f} | {us[1]:.1f} | {calls / num_uses:.1f} | {place}{name} |")


def table(measured: Measured, record: dict[str, Any], args: argparse.Namespace) -> str:
    uses, seconds = args.layers * args.steps, measured.seconds
    lines = [
        "# Host time of a streamed layer",
        "",
        describe(record),
        "",
        f"{args.layers} Llama blocks of width 64 in {SLOTS} slots, {args.tokens} tokens, fp32, one "
        f"torch thread; medians of {args.rounds} rounds of {args.steps} steps. Milliseconds of a "
        "step divided by the layers, so that what is done once a step (embedding, head, gate) is "
        "among them; over: the median difference within a round.",
        "",
        "| | a layer and step, ms | over plain, ms | over plain checkpointed, ms |",
        "|---|---|---|---|",
    ]
    lines += rows_beside(seconds, ("plain", "plain checkpointed"), uses, digits=2)
    lines += [
        "",
        "Lanes are threads of the same process: on few cores they take the training thread's, and "
        "its lock. On a GPU the lanes of transfers only enqueue.",
        "",
        "| a layer and step, ms | measured | forecast from the other policy's trace | error | "
        "`stronghold plan`, from the doctor's profile | error |",
        "|---|---|---|---|---|---|",
    ]
    for policy in POLICIES:
        of_use = 1e3 * medians(seconds)[policy] / uses
        cells = [f"{of_use:.2f}"]
        for forecasts in (measured.traced_s, measured.planned_s):
            expected = 1e3 * forecasts[policy] / args.layers
            cells += [f"{expected:.2f}", f"{expected / of_use - 1:+.0%}"]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    machine = measured.profile
    forward, backward = (
        {tokens: 1e-9 * by_width[min(by_width)] for tokens, by_width in rates["fp32"].items()}
        for rates in (machine.attention_flops, machine.attention_backward_flops)
    )
    width = min(machine.attention_flops["fp32"][min(forward)])
    attention = ", ".join(
        f"{forward[tokens]:.0f} and {backward[tokens]:.0f} over {tokens}" for tokens in forward
    )
    lines += [
        "",
        f"The profile: products at {machine.flops['fp32'] / 1e9:.0f} GFLOP/s; forward and "
        f"backward of attention with heads {width} wide at {attention} tokens, pairs that the mask "
        f"leaves out counted, too; device memory at {machine.gpu_memory_gbps:.1f} GB/s; all in "
        f"fp32, on one thread, with torch's kernels for {torch.backends.cpu.get_cpu_capability()}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=4, help="in a round")
    parser.add_argument("--profile", choices=POLICIES, help="print where its time goes, too")
    parser.add_argument("--to", type=Path, help="write the data as JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = provenance()
    measured = measure(args)
    data = {
        **record,
        "seconds": measured.seconds,
        "forecast_step_s": measured.traced_s,
        "plan_step_s": measured.planned_s,
        "profile": json.loads(measured.profile.to_json()),
    }
    name = "host-time" if args.tokens == TOKENS else f"host-time-{args.tokens}-tokens"
    leave(name, table(measured, record, args), data, to=args.to, keep=args.save)


if __name__ == "__main__":
    main()
