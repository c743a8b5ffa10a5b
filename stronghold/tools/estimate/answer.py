"""The answer to a question: plan, simulate, and set it beside the physical limit; and the same for
many values of one thing.

Owns the order of these, and nothing of how each works. Allocates nothing that is of the model's
size. One thread enters.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from stronghold.errors import BudgetError, ConfigError, format_size
from stronghold.model.costs import DTYPES
from stronghold.optim import examples
from stronghold.optim.states import EXACT, LEAN
from stronghold.plan import search
from stronghold.plan.cost import (
    AGAIN,
    ATTENTION,
    DISK,
    BreakEven,
    Limits,
    attention_s,
    break_even,
    physical_limit,
    traffic_of,
)
from stronghold.plan.machine import NETWORK_GBPS
from stronghold.plan.plan import SECOND_ARRAYS, Plan, last_that, make_plan
from stronghold.plan.search import Choice, updates_s
from stronghold.predict.simulate import fastest_plan, simulate
from stronghold.tools.estimate.question import Question

GIB = 1 << 30
WAITS = 0.05  # share of a step from which on what it waits for is named
# A lane of the simulator by the resource that it waits for.
RESOURCES = {
    "compute": "compute",
    "fetch": "link host to device",
    "drain": "link device to host",
    "update": "host memory bandwidth",
    "load": "nvme",
    "stage": "nvme",
    "spill": "nvme",
    "io": "nvme",
    "gather": "wire between ranks",
    "reduce": "wire between ranks",
    "exchange": "network between nodes",
}
MOST_POINTS = 16  # of a sweep
GROWTH = 1.3  # from one number of layers to the next
SHORTEST = 128  # sequence
ASKED = ("dtype", "states", "batch", "seq", "accumulation", "chunk", "streams", "clipping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run will do, and what bounds it. `refusal` says why nothing fits, and then there is
    no `choice`, and a step never ends; `notes` are warnings; `gains` what each change would buy,
    None where it does not fit even so."""

    question: Question
    limits: Limits
    refusal: str | None = None
    choice: Choice | None = None
    notes: tuple[str, ...] = ()
    gains: tuple[tuple[str, Forecast | None], ...] = ()

    @property
    def fits(self) -> bool:
        return self.choice is not None

    @property
    def plan(self) -> Plan | None:
        return None if self.choice is None else self.choice.plan

    @property
    def reasons(self) -> tuple[str, ...]:
        return () if self.plan is None else self.plan.reasons

    @property
    def step_s(self) -> float:
        # Loads and spills that overlap share a disk in the simulator by a rule that is a few per
        # cent generous: no step is faster than the disk.
        return inf if self.choice is None else max(self.choice.step_s, self.limits.parts[DISK])

    @property
    def tokens_per_s(self) -> float:
        return self.question.tokens / self.step_s

    @property
    def shares(self) -> dict[str, float]:
        """Of each resource, in words, its part of the step's critical path; the largest first."""
        shares: defaultdict[str, float] = defaultdict(float)
        if self.choice is not None:
            for lane, critical_s in self.choice.forecast.critical.items():
                shares[RESOURCES.get(lane, lane)] += critical_s / self.choice.step_s
        return dict(sorted(shares.items(), key=lambda share: -share[1]))

    @property
    def busy(self) -> dict[str, float]:
        """Each lane's part of the step."""
        return {} if self.choice is None else dict(self.choice.forecast.busy)

    @property
    def bound(self) -> str:
        """The resource that sets most of the step."""
        return next(iter(self.shares), "nothing")

    @property
    def break_even(self) -> BreakEven:
        recompute = self.plan is None or self.plan.recomputed > 0.5
        asked = self.question
        return break_even(
            asked.machine,
            asked.dtype,
            asked.arrays,
            recompute=recompute,
            active_share=asked.active_share,
        )

    @property
    def tiers(self) -> dict[str, tuple[int, dict[str, int]]]:
        """Of each tier its budget, and the parts of its peak."""
        question, plan = self.question, self.plan
        if plan is None:
            return {}
        waiting = {"activations": plan.offloaded_bytes}
        tiers = {
            "gpu": (question.gpu_bytes, plan.gpu_bytes | {"activations": plan.activation_bytes}),
            "host": (question.host_bytes // question.gpus, plan.host_bytes | waiting),
        }
        if question.nvme_bytes:
            tiers["nvme"] = (question.nvme_bytes // question.gpus, plan.nvme_bytes)
        return tiers

    @property
    def config(self) -> dict[str, Any] | None:
        """Ready to run: for `stronghold.initialize`, DeepSpeed's launcher or a trainer."""
        return None if self.plan is None else _config(self.question, self.plan)

    def as_json(self) -> dict[str, Any]:
        """Every figure, in the units of its name."""
        question = self.question
        timed = ("step_s", "tokens_per_s", "shares", "busy", "bound")
        return {
            "fits": self.fits,
            "tokens": question.tokens,
            "asked": {
                "model": question.model.name,
                "num_parameters": question.model.layout.num_parameters,
                "num_blocks": question.model.num_blocks,
                "machine": question.machine.name,
                **{name: getattr(question, name) for name in ASKED},
                "gpus": question.gpus,
                "nodes": question.nodes,
            },
            "refusal": self.refusal,
            "notes": self.notes,
            "tiers": [
                {"name": name, "budget_bytes": budget, "parts": parts}
                for name, (budget, parts) in self.tiers.items()
            ],
            "reasons": self.reasons,
            "timing": {name: getattr(self, name) for name in timed} if self.fits else None,
            "limits": asdict(self.limits),
            "break_even": asdict(self.break_even),
            "gains": [
                {"change": change}
                | {name: gained and getattr(gained, name) for name in ("step_s", "tokens_per_s")}
                for change, gained in self.gains
            ],
            "config": self.config,
        }


def answer(question: Question) -> Forecast:
    """The whole forecast; ConfigError for what no planner could be asked."""
    found = outlook(question)
    notes = (*_notes(question), *_gate(found), *_early(found))
    return replace(found, notes=notes, gains=tuple(_gains(found)))


def outlook(
    question: Question,
    ladders: Sequence[search.Ladder] = search.LADDERS,
    near: Sequence[tuple[int, int]] = (),
) -> Forecast:
    """The fastest plan (`Search.run`), or why none fits; without notes and gains."""
    try:
        choice = fastest_plan(
            question.layout,
            question.demand,
            question.work,
            question.rates,
            asynchronous=not question.machine.emulated,
            ladders=ladders,
            near=near,
        )
    except BudgetError as error:
        return Forecast(question=question, refusal=str(error), limits=_limits(question, None))
    return Forecast(question=question, choice=choice, limits=_limits(question, choice.plan))


def fits(question: Question) -> bool:
    """Whether anything fits."""
    return search.fits(question.layout, question.demand)


def with_largest_batch(question: Question) -> Question:
    """The question with the largest micro-batch that fits, or as it is when not even one does."""
    largest = search.largest_micro_batch(lambda batch: fits(replace(question, batch=batch)))
    return replace(question, batch=max(1, largest))


def with_fastest_chunk(question: Question) -> Question:
    """The question with the chunk whose step is predicted fastest, of the micro-batch's halves; of
    equals the largest, and none where a whole micro-batch is as fast."""
    chunks: list[int | None] = [None]
    size = question.batch
    while size > 1:
        size = -(-size // 2)
        chunks.append(size)
    steps = [outlook(replace(question, chunk=chunk)).step_s for chunk in chunks]
    best = min(range(len(chunks)), key=lambda k: (round(steps[k], 4), k))
    streams = question.streams if best else 1
    return replace(question, chunk=chunks[best], streams=streams)


def _limits(question: Question, plan: Plan | None) -> Limits:
    """Of what `plan` must move and compute on each rank; without one, of what the least memory
    would need: every block streamed and recomputed."""
    layout, machine, costs = question.model.layout, question.machine, question.costs
    rate, forward, passes = machine.flops[question.dtype], [], []
    for layer in costs.layers:
        # Attention has rates of its own. It counts as products that take as long.
        forward_s, backward_s = attention_s(layer, costs, machine)
        products = layer.forward_flops - layer.attention_flops
        forward.append((products, rate * forward_s))
        passes.append(products + rate * (forward_s + backward_s) / 3)
    if plan is None:
        traffic, levels, stay = traffic_of(layout, question.demand), None, layout.resident
    else:
        traffic, levels, stay = plan.traffic, plan.activations, tuple(sorted(plan.resident))
    again = 0.0
    for index in layout.streamed:
        level = "recompute" if levels is None else levels[index]
        products, attention = forward[index]
        if level in AGAIN:
            again += products + (0.0 if level in ATTENTION else attention)
    return physical_limit(
        traffic,
        machine.share(question.gpus),
        question.dtype,
        forward_flops=sum(passes),
        recomputed_flops=again,
        staying_flops=sum(passes[index] for index in stay),
    )


def seconds(value: float) -> str:
    """A duration with its unit."""
    if value == float("inf"):
        return "never"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


# -- notes ----------------------------------------------------------------------------------------
def _notes(question: Question) -> Iterator[str]:
    if not question.model.num_blocks:
        without = "" if question.chunk is None else "; --chunk has no effect"
        yield f"the model has no repeated blocks: all of it stays on the gpu{without}"
    if question.ranks > 1:
        yield _wires(question)
    positions = question.model.positions
    if positions is not None and question.seq > positions:
        yield f"--seq {question.seq} is longer than the {positions} positions that the model knows"


def _wires(question: Question) -> str:
    where = f"on {question.nodes} nodes" if question.nodes > 1 else "on one node"
    received = []
    if question.gpus > 1:
        wire = question.wire_gbps or question.machine.fetch_gbps
        assumed = "" if question.wire_gbps else ", assumed: as over its link"
        others = "its node" if question.nodes > 1 else "the others"
        received.append(f"{wire:g} GB/s from {others} (--wire{assumed})")
    if question.nodes > 1:
        network = question.network_gbps or NETWORK_GBPS
        assumed = "" if question.network_gbps else ", assumed"
        received.append(f"{network:g} GB/s from other nodes (--network{assumed})")
    return (
        f"{question.ranks} ranks {where}: bytes are of each, tokens of all; each receives "
        f"{' and '.join(received)}"
    )


def _early(found: Forecast) -> Iterator[str]:
    """A note on early updates: their memory, their gain, and the cost of a clipped step."""
    question, choice = found.question, found.choice
    if choice is None or not choice.plan.early:
        return
    without = make_plan(question.layout, replace(choice.plan.demand, early_layers=0))
    behind_gate = simulate(
        question.layout,
        without,
        question.work,
        question.rates,
        asynchronous=not question.machine.emulated,
    )
    second_bytes = choice.plan.host_bytes[SECOND_ARRAYS]
    yield (
        f"{len(choice.plan.early)} layers are updated early, which takes "
        f"{format_size(second_bytes)} of host memory: without them, and in a step that is "
        f"clipped, a step takes {seconds(behind_gate.step_s)} instead of "
        f"{seconds(choice.step_s)}"
    )


def _gate(found: Forecast) -> Iterator[str]:
    """What it costs that updates wait for the end of backward, where the step waits for them."""
    question, plan = found.question, found.plan
    if plan is None or plan.early:  # `_early` has what these cost
        return
    waits = sum(found.shares.get(RESOURCES[lane], 0.0) for lane in ("update", "load"))
    work = question.work
    forward, updates = work.forward_s, max(updates_s(plan, question.rates))
    if waits < WAITS or updates <= forward:
        return
    if question.clipping or question.overflow_check:
        rule = "clipping" if question.clipping else "the overflow check"
        why = f"{rule} decides over every gradient"
    elif question.accumulation > 1:
        why = "gradients are summed over micro-batches"
    elif question.ranks > 1:
        why = "several ranks make them together"
    else:
        why = "no more layers are updated early (stronghold.early_layers)"
    others = "the other micro-batches, " if question.accumulation > 1 else ""
    backward = seconds(work.backward_s(plan.activations))
    yield (
        f"updates wait for the end of backward, since {why}, and the step waits for them: it takes "
        f"{others}backward ({backward}) and then the longer of "
        f"forward ({seconds(forward)}) and updates ({seconds(updates)})"
    )


# -- what a change would buy ----------------------------------------------------------------------
def _gains(found: Forecast) -> Iterator[tuple[str, Forecast | None]]:
    """Every change's step; where nothing fits, of those changes alone that help."""
    question = found.question
    changes: dict[str, dict[str, Any]] = {
        "1 GiB more on the gpu": {"gpu_bytes": question.gpu_bytes + GIB},
        "1 GiB more of host memory": {"host_bytes": question.host_bytes + GIB},
        "1 GiB more of nvme": {"nvme_bytes": question.nvme_bytes + GIB},
        f"twice the tokens: batch {2 * question.batch}": {"batch": 2 * question.batch},
    }
    # Where host memory does not hold the states; they round otherwise, so no plan has them unasked.
    full = found.plan is None or any(found.plan.nvme_bytes.values())
    if full and (question.states, question.dtype) == (EXACT, "bf16"):
        changes["states: lean (they round otherwise)"] = {"states": LEAN}
    for change, values in changes.items():
        if "nvme_bytes" in values and not question.nvme_bytes:
            continue
        asked = replace(question, **values)
        if found.choice is None:
            gained: Forecast | None = outlook(asked)
            if gained is None or not gained.fits:
                continue
        else:
            gained = _near(asked, found.choice)
            alike = (asked.tokens, asked.states) == (question.tokens, question.states)
            if gained is not None and alike:
                # More memory takes nothing away: the plan without it still fits.
                gained = min(gained, found, key=lambda each: each.step_s)
        yield change, gained


def _near(question: Question, choice: Choice) -> Forecast | None:
    """The fastest of the plans near that of `choice`, made for another question: its window and its
    number of resident blocks, or of either what a GiB holds more, with whatever activations then
    fit. None where not one of them fits, nor any other plan."""
    layout, plan = question.layout, choice.plan
    blocks = set(layout.streamed)
    kept, window = len(plan.resident & blocks), plan.window
    largest = max((layout.layers[index].numel for index in blocks), default=0)
    held = max(1, GIB // max(1, largest * DTYPES[question.dtype].itemsize))
    near = [(kept, window), (kept + held, window), (kept, window + held), (kept - 1, window)]
    if question.resident_layers is not None:
        near = near[::2]
    bounded = [(min(count, len(blocks)), slots) for count, slots in near if count >= 0]
    ladders = [choice.ladder] if choice.ladder else search.LADDERS
    with contextlib.suppress(ConfigError):
        found = outlook(question, ladders, bounded)
        if found.fits:
            return found
    found = outlook(question)
    return found if found.fits else None


# -- the config -----------------------------------------------------------------------------------
def _config(question: Question, plan: Plan) -> dict[str, Any]:
    blocks = question.model.layout.streamed
    kept = len(plan.resident.intersection(blocks))
    section: dict[str, Any] = {} if question.states == EXACT else {"states": question.states}
    section |= {
        "gpu_memory": question.gpu_bytes - plan.activation_bytes,  # which the key does not count
        "host_memory": question.host_bytes // question.gpus,
        "resident_layers": "all" if kept == len(blocks) else kept,
        "resident_updates": "gpu" if plan.updated_on_gpu else "host",
    }
    if kept < len(blocks):
        section |= {"window": plan.window, "prefetch": plan.prefetch}
    counts = Counter(plan.activations[index] for index in blocks)  # in the blocks' order
    section["activations"] = dict(counts) if len(counts) > 1 else next(iter(counts), "keep")
    if plan.demand.chunk is not None:
        section["chunk"] = question.chunk
        if question.streams > 1:
            section["streams"] = question.streams
    section["early_layers"] = len(plan.early)
    if plan.nvme_bytes:
        section["nvme"] = {"path": question.nvme_path, "capacity": question.nvme_bytes}
    config: dict[str, Any] = {
        "_plan": f"stronghold plan: {question.model.name}; {question.machine.name}; "
        f"{question.seq} tokens per sequence",
        "train_micro_batch_size_per_gpu": question.batch,
        "gradient_accumulation_steps": question.accumulation,
        "gradient_clipping": question.clipping,
    }
    if question.dtype != "fp32":
        checked = {} if question.overflow_check else {"check_grad_overflow": False}
        config[question.dtype] = {"enabled": True, **checked}
    config["optimizer"] = dict(examples()[question.optimizer])
    return config | {"stronghold": section}


# -- many values of one thing ---------------------------------------------------------------------
def sweep(question: Question, axis: str) -> list[tuple[int, Forecast]]:
    """Forecasts along "window", "batch", "seq" or "layers", in increasing order, until one does not
    fit; of layers and batches the largest that fits is the last but one."""
    if axis == "window" and not question.model.num_blocks:
        raise ConfigError("--sweep window: the model has no repeated blocks, so there is no window")
    points: list[tuple[int, Forecast]] = []
    for value in _values(question, axis):
        points.append((value, outlook(_with(question, axis, value))))
        if not points[-1][1].fits:
            break
    if not any(found.fits for _, found in points):
        raise ConfigError(f"--sweep {axis}: not even {axis} {points[0][0]} fits")
    if not points[-1][1].fits and axis in ("batch", "layers"):
        low = last_that(
            lambda value: fits(_with(question, axis, value)), points[-2][0], points[-1][0] - 1
        )
        last = [(value, outlook(_with(question, axis, value))) for value in (low, low + 1)]
        points = [*points[:-2], *(points[-2:-1] if low > points[-2][0] else []), *last]
    return points


def _with(question: Question, axis: str, value: int) -> Question:
    model = question.model
    if axis == "window":
        # Resident blocks would need no window: with them every window is as good.
        return replace(question, window=value, resident_layers=0)
    if axis == "batch":
        return replace(question, batch=value)
    if axis == "seq":
        return replace(question, seq=value, model=model.with_positions(value))
    return replace(question, model=model.with_layers(value))


def _values(question: Question, axis: str) -> list[int]:
    """At most MOST_POINTS that are worth a look."""
    model, steps = question.model, range(MOST_POINTS)
    if axis == "window":
        last = model.num_blocks  # denser at the beginning
        if last <= MOST_POINTS:
            return list(range(1, last + 1))
        ratio = last ** (1 / (MOST_POINTS - 1))
        return sorted({round(ratio**k) for k in steps})
    if axis == "batch":
        return [2**k for k in steps]
    if axis == "seq":
        longest = model.positions or SHORTEST * 2 ** (MOST_POINTS - 1)
        first = min(SHORTEST, longest)
        return [first * 2**k for k in steps if first * 2**k <= longest]
    first = max(1, model.num_blocks // 4)
    return sorted({round(first * GROWTH**k) for k in steps})
