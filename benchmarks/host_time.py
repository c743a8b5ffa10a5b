"""What streaming one layer costs the host in a step: hooks, saved tensors, transfers, updates.

    python benchmarks/host_time.py [--layers 24] [--tokens 16] [--rounds 21] [--steps 4] [--save]

A Llama of tiny blocks, whose kernels take next to nothing, streamed on a device of CPU memory with
no paced link, beside the loop that everybody writes: autograd, clipping by the global norm, torch's
fused AdamW. One torch thread. They take turns in one process; the figure is the median over
rounds of the difference within a round, divided by the layers. A GPU starves while a layer's
forward and backward take less than that. `recompute` runs each forward twice; the plain loop with
torch's own checkpointing is there to tell what of that is ours.

Beside them stands the step that `stronghold plan` expects before a run, from the model's costs and
a profile of `stronghold doctor`. The doctor measures between the rounds, with the same thread,
since the memory and the clock of a shared machine change from minute to minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from harness import alternate, describe, leave, medians, provenance
from methods.base import accumulate, engine_step
from methods.ours import config
from methods.plain import Masters
from methods.task import Task
from transformers import LlamaConfig, LlamaForCausalLM

import stronghold
from stronghold.plan.estimate import estimate
from stronghold.plan.machine import MachineProfile
from stronghold.plan.plan import make_plan
from stronghold.tools.doctor.examine import examine
from stronghold.tools.estimate.question import question_from_options

PLAIN, POLICIES = ("plain", "plain checkpointed"), ("keep", "recompute")
SLOTS = 4
TOKENS = 16  # whose kernels take next to nothing


def build(layers: int, tokens: int) -> LlamaForCausalLM:
    """The same weights on every call."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    return LlamaForCausalLM(sizes).train()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of every round's steps, by contender; of a step as planned, by policy."""

    seconds: dict[str, list[float]]
    planned_s: dict[str, float]
    profile: MachineProfile


def measure(args: argparse.Namespace) -> Measured:
    """Half of the rounds, the machine's rates, and the other half."""
    tokens = torch.randint(256, (1, args.tokens))
    batch, task = {"input_ids": tokens, "labels": tokens}, Task(batch=1, window=SLOTS)
    engines = []
    contenders: dict[str, Callable[[], object]] = {}

    def plain(model: LlamaForCausalLM, masters: Masters) -> None:
        for _ in range(args.steps):
            loss = accumulate(model, [batch])
            masters.clip()
            masters.update()
        loss.item()

    def streamed(engine: Any) -> None:
        for _ in range(args.steps):
            loss = engine_step(engine, [batch])
        engine.synchronize()
        loss.item()

    for name in PLAIN:
        model = build(args.layers, args.tokens)
        if name == "plain checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        masters = Masters(list(model.parameters()), task)
        contenders[name] = functools.partial(plain, model, masters)
    for policy in POLICIES:
        section = {"activations": policy, "resident_layers": 0}
        model, settings = (
            build(args.layers, args.tokens),
            dataclasses.replace(task, section=section),
        )
        engine, *_ = stronghold.initialize(
            model=model, model_parameters=model.parameters(), config=config(settings)
        )
        engines.append(engine)
        contenders[policy] = functools.partial(streamed, engine)
    first = alternate(contenders, args.rounds // 2)
    machine = examine(device="emulated").profile
    second = alternate(contenders, args.rounds - args.rounds // 2)
    for engine in engines:
        engine.destroy()
    return Measured(
        seconds={name: first[name] + second[name] for name in contenders},
        planned_s={policy: planned(args, machine, policy) for policy in POLICIES},
        profile=machine,
    )


def planned(args: argparse.Namespace, machine: MachineProfile, policy: str) -> float:
    """Seconds of a step as `stronghold plan` has them, for the plan that runs here."""
    with tempfile.TemporaryDirectory() as folder:
        machine.save(Path(folder) / "machine.json")
        build(args.layers, args.tokens).config.save_pretrained(folder)
        question = question_from_options(
            model=Path(folder),
            machine=str(Path(folder) / "machine.json"),
            seq=args.tokens,
            precision="fp32",
            clipping=1.0,
        )
        question = dataclasses.replace(question, window=SLOTS, resident_layers=0)
        demand = dataclasses.replace(question.demand, activations=policy)
        plan = make_plan(question.layout, demand)
        predicted = estimate(
            question.layout, plan, question.work, question.rates, asynchronous=not machine.emulated
        )
    return predicted.step_s


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
    for name, values in seconds.items():
        over = [[a - b for a, b in zip(values, seconds[o], strict=True)] for o in PLAIN]
        cells = [f"{1e3 * statistics.median(of) / uses:.2f}" for of in (values, *over)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "Lanes are threads of the same process: on few cores they take the training thread's, and "
        "its lock. On a GPU the lanes of transfers only enqueue.",
        "",
        "| a layer and step, ms | measured | `stronghold plan`, from a profile | error |",
        "|---|---|---|---|",
    ]
    for policy in POLICIES:
        of_use = 1e3 * medians(seconds)[policy] / uses
        expected = 1e3 * measured.planned_s[policy] / args.layers
        lines.append(f"| {policy} | {of_use:.2f} | {expected:.2f} | {expected / of_use - 1:+.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=4, help="in a round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = provenance()
    measured = measure(args)
    data = {
        **record,
        "seconds": measured.seconds,
        "plan_step_s": measured.planned_s,
        "profile": json.loads(measured.profile.to_json()),
    }
    name = "host-time" if args.tokens == TOKENS else f"host-time-{args.tokens}-tokens"
    leave(name, table(measured, record, args), data, keep=args.save)


if __name__ == "__main__":
    main()
