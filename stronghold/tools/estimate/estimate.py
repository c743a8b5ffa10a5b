"""Estimates: the fastest plan of a question, beside the physical limit, with warnings and what more
memory or more tokens would gain.

Owns the order of these steps; `plan.rules` and `plan.estimate` own how each works. It allocates
nothing of the model's size. One thread enters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import inf
from operator import itemgetter
from typing import Any

from stronghold.errors import BudgetError
from stronghold.optim import examples
from stronghold.optim.states import EXACT, LEAN
from stronghold.plan import rules
from stronghold.plan.cost import AGAIN, ATTENTION, COMPUTE, DISK, Limits, physical_limit, traffic_of
from stronghold.plan.machine import NETWORK_GBPS
from stronghold.plan.plan import Plan
from stronghold.plan.rules import Choice, fastest_plan
from stronghold.tools.estimate.question import Question

GIB = 1 << 30
OF_TIERS = {"gpu": "on the gpu", "host": "of host memory", "nvme": "of nvme"}
FULL = 0.9  # share of a tier
SMALLEST = "nf4"  # format of frozen weights
# The resource of each lane.
RESOURCES = {
    "compute": "compute",
    "launch": "calling thread",
    "fetch": "link host to device",
    "offload": "link device to host",
    "gradients": "host memory bandwidth",
    "update": "host memory bandwidth",
    "load": "nvme",
    "stage": "nvme",
    "spill": "nvme",
    "io": "nvme",
    "reduce": "wire between ranks",
    "exchange": "network between nodes",
}
# Fields of a question in the JSON.
ASKED = ("dtype", "states", "batch", "seq", "accumulation", "chunk", "clipping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The step of the fastest plan, and its bounds.

    `choice` is None if no plan fits; `refusal` is then the reason, and a step never ends. `notes`
    are warnings. `gains` has the estimate after each change of memory or batch, None for a change
    after which no plan fits.
    """

    question: Question
    limits: Limits
    refusal: str | None = None
    choice: Choice | None = None
    notes: tuple[str, ...] = ()
    gains: tuple[tuple[str, Estimate | None], ...] = ()

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
        # a profile without a disk: a step that needs one never ends
        return inf if self.choice is None else max(self.choice.step_s, self.limits.parts[DISK])

    @property
    def tokens_per_s(self) -> float:
        return self.question.tokens / self.step_s

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the step in which the GPU computes, and in which it waits for each
        resource, the largest first."""
        shares: defaultdict[str, float] = defaultdict(float)
        if self.choice is not None:
            for lane, share in self.choice.forecast.shares.items():
                shares[RESOURCES.get(lane, lane)] += share
        return dict(sorted(shares.items(), key=itemgetter(1), reverse=True))

    @property
    def compute(self) -> dict[str, float]:
        """Seconds of the GPU's work in a step, by kind; empty if no plan fits.

        "products and attention" are those of the physical limit. "other operators" are bound by
        device memory: norms, activations, additions, rotary embedding, the loss, and decoding.
        """
        plan, work = self.plan, self.question.work
        if plan is None:
            return {}
        total_s = work.micro_batches * (work.forward_s + work.backward_s(plan.activations))
        products_s = self.limits.parts[COMPUTE]
        return {"products and attention": products_s, "other operators": total_s - products_s}

    @property
    def busy(self) -> dict[str, float]:
        """The share of the step in which each lane is busy."""
        return {} if self.choice is None else dict(self.choice.forecast.busy)

    @property
    def bound(self) -> str:
        """The resource that sets most of the step."""
        return next(iter(self.shares), "nothing")

    @property
    def tiers(self) -> dict[str, tuple[int, dict[str, int]]]:
        """The budget of each tier in bytes, and the parts of its peak."""
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
        """The DeepSpeed config of the plan, or None if no plan fits."""
        return None if self.plan is None else _config_of(self.question, self.plan)

    def as_json(self) -> dict[str, Any]:
        """Every figure, in the units of its name."""
        question = self.question
        timed = ("step_s", "tokens_per_s", "shares", "busy", "bound", "compute")
        return {
            "fits": self.fits,
            "tokens": question.tokens,
            "asked": {
                "model": question.model.name,
                "num_parameters": question.model.layout.num_parameters,
                "num_trained": question.model.layout.num_trained,
                "adapters": question.model.adapters and asdict(question.model.adapters),
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
            "gains": [
                {"change": change}
                | {name: gained and getattr(gained, name) for name in ("step_s", "tokens_per_s")}
                for change, gained in self.gains
            ],
            "config": self.config,
        }


def estimate(question: Question) -> Estimate:
    """The estimate of the fastest plan, or of the reason why none fits; without notes and gains."""
    try:
        choice = fastest_plan(
            question.layout,
            question.demand,
            question.work,
            question.rates,
            asynchronous=not question.machine.emulated,
        )
    except BudgetError as error:
        return Estimate(question=question, refusal=str(error), limits=_limits(question, None))
    return Estimate(question=question, choice=choice, limits=_limits(question, choice.plan))


def fits(question: Question) -> bool:
    """True if any plan fits."""
    return rules.fits(question.layout, question.demand)


def with_largest_batch(question: Question) -> Question:
    """The question with the largest micro-batch that fits; with one of 1 if none fits."""
    largest = rules.largest_micro_batch(lambda batch: fits(replace(question, batch=batch)))
    return replace(question, batch=max(1, largest))


def _limits(question: Question, plan: Plan | None) -> Limits:
    """The physical limit of `plan`, from the bytes and FLOPs of one rank.

    Without a plan it is the limit of the one that needs the least memory: it streams and
    recomputes every block.
    """
    layout, machine, costs = question.layout, question.machine, question.costs
    rate = machine.flops[question.dtype]
    forward = []  # FLOPs of products and of attention in each layer's forward
    passes = []  # a third of each layer's FLOPs in forward and backward
    for layer in costs.layers:
        # Attention runs at other rates than products. It counts as products that take as long.
        forward_s, backward_s = machine.attention_s(costs.dtype, layer.forward)
        products = layer.forward.product_flops
        forward.append((products, rate * forward_s))
        both = products + layer.backward.product_flops
        passes.append((both + rate * (forward_s + backward_s)) / 3)
    if plan is None:
        traffic = traffic_of(layout, question.demand)
        levels = None
        resident = layout.resident
    else:
        traffic = plan.traffic
        levels = plan.activations
        resident = tuple(sorted(plan.resident))
    recomputed = 0.0
    for index in layout.streamed:
        level = "recompute" if levels is None else levels[index]
        products, attention = forward[index]
        if level in AGAIN:
            recomputed += products
            if level not in ATTENTION:
                recomputed += attention
    return physical_limit(
        traffic,
        machine.share(question.gpus),
        question.dtype,
        forward_flops=sum(passes),
        recomputed_flops=recomputed,
        staying_flops=sum(passes[index] for index in resident),
    )


def _config_of(question: Question, plan: Plan) -> dict[str, Any]:
    """The config with every choice of `plan` pinned.

    It runs with `stronghold.initialize`, DeepSpeed's launcher or a trainer.
    """
    blocks = question.model.layout.streamed
    kept = len(plan.resident.intersection(blocks))
    section: dict[str, Any] = {} if question.states == EXACT else {"states": question.states}
    adapters = question.model.adapters
    if adapters is not None and adapters.frozen is not None:
        section["frozen"] = adapters.frozen
    section |= {
        # the key counts no activations
        "gpu_memory": question.gpu_bytes - plan.activation_bytes,
        "host_memory": question.host_bytes // question.gpus,
        "resident_layers": "all" if kept == len(blocks) else kept,
        "resident_updates": "gpu" if plan.updated_on_gpu else "host",
    }
    if kept < len(blocks):
        section["window"] = plan.window
    # in the blocks' order
    counts = Counter(plan.activations[index] for index in blocks)
    section["activations"] = dict(counts) if len(counts) > 1 else next(iter(counts), "keep")
    if plan.demand.chunk is not None:
        section["chunk"] = question.chunk
    section["early_layers"] = len(plan.early)
    if question.nvme_bytes and plan.nvme_bytes:
        path = question.machine.nvme_path or "/path/to/nvme"
        section["nvme"] = {"path": path, "capacity": question.nvme_bytes}
    config: dict[str, Any] = {
        "_plan": f"stronghold plan: {question.model.name}; {question.machine.name}; "
        f"{question.seq} tokens per sequence",
        "train_micro_batch_size_per_gpu": question.batch,
        "gradient_accumulation_steps": question.accumulation,
        "gradient_clipping": question.clipping,
    }
    if question.dtype != "fp32":
        config[question.dtype] = {"enabled": True}
    config["optimizer"] = dict(examples()[question.optimizer])
    return config | {"stronghold": section}


# -- advice ---------------------------------------------------------------------------------------
def with_advice(bare: Estimate) -> Estimate:
    """Return the estimate with its notes and gains."""
    return replace(bare, notes=tuple(_notes(bare.question)), gains=tuple(_gains(bare)))


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
        others = "its node" if question.nodes > 1 else "the others"
        link = question.machine.fetch_gbps
        received.append(f"{link:g} GB/s from {others} (assumed: as over its link)")
    if question.nodes > 1:
        network = question.network_gbps or NETWORK_GBPS
        assumed = "" if question.network_gbps else ", assumed"
        received.append(f"{network:g} GB/s from other nodes (--network{assumed})")
    return (
        f"{question.ranks} ranks {where}: bytes are of each, tokens of all; each receives "
        f"{' and '.join(received)}"
    )


# -- gains ----------------------------------------------------------------------------------------
def _gains(bare: Estimate) -> Iterator[tuple[str, Estimate | None]]:
    """The estimate after each change; if no plan fits, only changes after which one does."""
    question = bare.question
    changes: dict[str, dict[str, Any]] = {}
    for tier, of_tier in OF_TIERS.items():
        if _is_short(bare, tier):
            field = f"{tier}_bytes"
            changes[f"1 GiB more {of_tier}"] = {field: getattr(question, field) + GIB}
    changes[f"twice the tokens: batch {2 * question.batch}"] = {"batch": 2 * question.batch}
    # Lean states round otherwise, so no plan has them unasked.
    full = bare.plan is None or any(bare.plan.nvme_bytes.values())
    if full and (question.states, question.dtype) == (EXACT, "bf16"):
        changes["states: lean (they round otherwise)"] = {"states": LEAN}
    adapters = question.model.adapters
    if adapters is not None and adapters.frozen is None:
        packed = question.model.with_frozen(SMALLEST)
        changes[f"frozen: {SMALLEST} (weights are rounded)"] = {"model": packed}
    for change, values in changes.items():
        gained = estimate(replace(question, **values))
        if gained.fits:
            yield change, gained
        elif bare.fits:
            yield change, None


def _is_short(bare: Estimate, tier: str) -> bool:
    """True if more of the tier may buy something: its plan nearly fills it, or none fits."""
    if bare.plan is None:
        return tier != "nvme" or bare.question.nvme_bytes > 0
    budget, parts = bare.tiers.get(tier, (0, {}))
    return sum(parts.values()) > FULL * budget


def seconds(value: float) -> str:
    """A duration with its unit."""
    if value == float("inf"):
        return "never"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
