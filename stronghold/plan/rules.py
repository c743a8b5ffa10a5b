"""The rules: the plan that a model gets on a machine.

Pure: no tensors, no threads. The rules settle every question that has one good answer. For three
others the estimate compares seconds: how many blocks stay, where they are updated, and which ladder
of activation levels the blocks climb. Settings that the config pins stay as they are.

[Note: rules]

   rule                                            reason
1. Layers outside the blocks stay on the GPU.      Every pass needs them, and they do not repeat.
2. Three slots for weights where they fit, two     One computes, one is still in use, one is on its
   for gradients.                                  way. One gathers while the other drains.
3. Blocks stay, evenly over the depth, the first   Their compute hides the updates of the blocks in
   among them: as many as make the shortest step.  between. Their room saves link and CPU, or else
                                                   it saves recomputation.
4. Blocks keep more from the last one backwards.   Backward needs the last ones first.
5. Backward takes the updates that forward would   The CPU would idle in backward. A clipped step
   wait for, where no step clips.                  makes these updates twice.
6. Files hold what the host cannot: moments,       In this order they are needed more and more
   master remainders, weights, of the              often. Forward comes to the last layers last.
   last layers first.

Rules 1, 3 and 6 are those of `memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from stronghold.errors import BudgetError, ConfigError, ErrorPage
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import Demand, Workload, disk_s
from stronghold.plan.estimate import StepEstimate, estimate
from stronghold.plan.machine import Rates
from stronghold.plan.memory import (
    Places,
    activation_bytes,
    last_that,
    later_activation_bytes,
    levels_of,
)
from stronghold.plan.plan import Plan, make_plan

RESIDENT_SHARES = 8  # numbers of resident blocks are tried in steps of this share, then in finer
UPDATE_PLACES = ("host", "gpu")  # the places at which resident layers may be updated
LEAST_LATE = 0.01  # share of a step that forward waits for updates, from which early ones pay
EARLY_FACTORS = (0.85, 1.15, 1.3)  # how many early updates pay is not exact
EQUAL_SHARE = 1e-3  # plans whose times differ by a smaller share count as equal
# Activation levels that take least of the gpu or of the host.
SMALLEST_LEVELS = ("recompute", "offload", "recompute_offload")
RULED_KEYS = ("window", "resident_layers", "resident_updates", "activations", "early_layers")
Ladder = tuple[str, ...]
"""Activation levels from the first blocks to the last. As many of the last blocks as fit have the
last level, as many before them as fit the level before it, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan and the estimate of its step."""

    plan: Plan
    forecast: StepEstimate

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.forecast.step_s


def fastest_plan(
    layout: ModelLayout, demand: Demand, work: Workload, rates: Rates, *, asynchronous: bool = True
) -> Choice:
    """The plan of the rules for `demand`, and the estimate of its step.

    `asynchronous`: the device is a GPU, not the emulated one. BudgetError if no plan fits: it names
    a change that makes the smallest plan fit.
    """
    keys = [key for key in RULED_KEYS if getattr(demand, key) is None]
    demand = replace(demand, by_rule=frozenset(keys))
    return _Rules(layout, demand, work, rates, asynchronous).choice()


def fastest_levels(
    layout: ModelLayout,
    demand: Demand,
    work: Workload,
    rates: Rates,
    room_bytes: int,
    *,
    asynchronous: bool = True,
) -> Ladder | None:
    """The level of each layer at which a step is shortest by estimate, where activations take at
    most `room_bytes` of the GPU. None if none fits. `demand` has settled everything else."""
    demand = replace(demand, gpu_budget_bytes=None, early_layers=demand.early_layers or 0)
    best = _Rules(layout, demand, work, rates, asynchronous).with_levels(room_bytes)
    return None if best is None else best.plan.activations


# -- the choice -----------------------------------------------------------------------------------
@dataclass(slots=True)
class _Rules:
    """One choice of a plan within the demand's budgets. `best` is the fastest so far."""

    layout: ModelLayout
    demand: Demand
    work: Workload
    rates: Rates
    asynchronous: bool
    best: Choice | None = field(default=None, init=False)

    def choice(self) -> Choice:
        distance = max(1, len(self.layout.streamed) // RESIDENT_SHARES)
        self._try(fitting_plans(self.layout, self.demand, distance))
        if self.best is None:
            raise _refusal(self.layout, self.demand)
        while distance > 1 and self.demand.resident_layers is None:
            distance //= 2
            num_kept = self.best.plan.demand.resident_layers or 0
            for count in (num_kept - distance, num_kept + distance):
                if 0 <= count <= len(self.layout.streamed):
                    near = replace(self.demand, resident_layers=count)
                    self._try(fitting_plans(self.layout, near))
        if self._may_be_early and self.best.plan.early:
            without = replace(self.best.plan.demand, early_layers=0)
            behind_gate = self._estimated(make_plan(self.layout, without))
            for factor in EARLY_FACTORS:
                self._keep(self._with_early_updates(behind_gate, factor))
        return self.best

    def with_levels(self, room_bytes: int) -> Choice | None:
        """The fastest of the ladders, with activations in so many bytes. None if none fits."""
        for ladder in _ladders(self.layout, self.demand):
            first = replace(self.demand, activations=ladder[0]) if ladder else self.demand
            levels = _levels_within(Places(self.layout, first), ladder, room_bytes)
            if levels is not None:
                plan = _made(self.layout, replace(first, activations=levels))
                if plan is not None:
                    self._keep(self._estimated(plan))
        return self.best

    # -- tries ------------------------------------------------------------------------------------
    def _try(self, plans: Iterable[Plan]) -> None:
        """Estimate the plans, the most promising first.

        No step is shorter than the work on its busiest lane. So a plan is not estimated if that
        bound is no better than the best step so far.
        """
        bounds = [(self._lower_bound(plan), plan) for plan in plans]
        for bound_s, plan in sorted(bounds, key=lambda pair: (pair[0], _gpu_bytes(pair[1]))):
            if not self._is_better(bound_s):
                return
            choice = self._estimated(plan)
            self._keep(self._with_early_updates(choice) if self._may_be_early else choice)

    def _keep(self, choice: Choice) -> None:
        if self._is_better(choice.step_s):
            self.best = choice

    def _is_better(self, step_s: float) -> bool:
        return self.best is None or step_s < (1.0 - EQUAL_SHARE) * self.best.step_s

    def _estimated(self, plan: Plan) -> Choice:
        forecast = estimate(
            self.layout, plan, self.work, self.rates, asynchronous=self.asynchronous
        )
        return Choice(plan=plan, forecast=forecast)

    def _lower_bound(self, plan: Plan) -> float:
        """The work of the busiest lane in a step of `plan`, in seconds.

        Updates behind the clip barrier begin when backward has ended. Forward cannot end before
        them.
        """
        work, rates, traffic = self.work, self.rates, plan.traffic
        update_s = traffic.update_bytes * 1e-9 / rates.update_gbps
        compute_s = work.micro_batches * (work.forward_s + work.backward_s(plan.activations))
        compute_s += traffic.device_update_bytes * 1e-9 / rates.device_gbps
        if not plan.early and not self._may_be_early:
            compute_s += max(0.0, update_s - work.forward_s)
        return max(
            compute_s,
            update_s,
            traffic.fetch_bytes * 1e-9 / rates.fetch_gbps,
            traffic.drain_bytes * 1e-9 / rates.offload_gbps,
            disk_s(traffic, rates.load_gbps, rates.spill_gbps, rates.io_gbps),
        )

    # -- early updates ----------------------------------------------------------------------------
    @property
    def _may_be_early(self) -> bool:
        return self.demand.early_layers is None and self.demand.num_ranks == 1

    def _with_early_updates(self, choice: Choice, factor: float = 1.0) -> Choice:
        """The choice with the updates in backward that forward waits for, times `factor`, as far as
        the CPU would idle there and the host has room beside all that it holds (rule 5)."""
        plan, forecast = choice.plan, choice.forecast
        busy = forecast.busy.get("update", 0.0)
        late = min(forecast.waits.get("update", 0.0), 1.0 - busy)
        if late < LEAST_LATE or any(plan.nvme_bytes.values()):
            return choice
        num_able = len(plan.trained - plan.updated_on_gpu)
        wanted = min(num_able, round(factor * late / busy * num_able))

        def early(count: int) -> Plan | None:
            return _made(self.layout, replace(plan.demand, early_layers=count))

        most = last_that(lambda count: early(count) is not None, 0, wanted)
        with_early = early(most) if most else None
        return choice if with_early is None else self._estimated(with_early)


def _gpu_bytes(plan: Plan) -> int:
    """Bytes of the plan's peak on the gpu, with activations."""
    return plan.gpu_total_bytes + plan.activation_bytes


# -- plans that fit -------------------------------------------------------------------------------
def fits(layout: ModelLayout, demand: Demand) -> bool:
    """True if any plan is within the budgets."""
    # Fewer resident blocks take less of the GPU, more of them less of the host.
    plans = fitting_plans(layout, demand, distance=max(1, len(layout.streamed)))
    return next(plans, None) is not None


def fitting_plans(layout: ModelLayout, demand: Demand, distance: int = 1) -> Iterator[Plan]:
    """The plans of the rules that are within the budgets, before early updates are chosen.

    The numbers of resident blocks are the multiples of `distance`, and the largest that fits.
    """
    demand = replace(demand, early_layers=demand.early_layers or 0)
    for num_resident in _resident_counts(layout, demand, distance):
        for place in _update_places(layout, demand):
            placed = replace(demand, resident_layers=num_resident, resident_updates=place)
            for ladder in _ladders(layout, demand):
                plan = _leveled(layout, placed, ladder)
                if plan is not None:
                    yield plan


def _resident_counts(layout: ModelLayout, demand: Demand, distance: int) -> list[int]:
    if demand.resident_layers is not None:
        return [demand.resident_layers]
    num_blocks = len(layout.streamed)
    # Where the host is short, only the plan with the most blocks on the gpu may fit.
    most = {_most_resident(layout, demand, level) for level in SMALLEST_LEVELS}
    return sorted({*range(0, num_blocks + 1, distance), *most})


def _update_places(layout: ModelLayout, demand: Demand) -> tuple[str | None, ...]:
    # Without blocks the plan itself decides ([Note: no blocks] of `plan`).
    if demand.resident_updates is not None or not layout.streamed:
        return (demand.resident_updates,)
    return UPDATE_PLACES


def _ladders(layout: ModelLayout, demand: Demand) -> list[Ladder]:
    """The ladders of levels, each from the level that takes least of the GPU (rule 4). One empty
    ladder where the config pins the levels, or where their bytes are unknown."""
    if demand.activations is not None or not demand.work or not layout.streamed:
        return [()]
    block = demand.work[layout.streamed[len(layout.streamed) // 2]]
    # Attention's results pay if a byte of them saves more seconds than a byte of "keep".
    saved_s = block.forward_s / max(1, block.saved_bytes - block.boundary_bytes)
    attention_pays = block.attention_bytes and block.attention_s / block.attention_bytes >= saved_s
    top = ("attention", "keep") if attention_pays else ("keep",)
    ladders = [("recompute", *top), ("offload", "keep"), ("recompute_offload", "recompute")]
    ladders.append(("recompute_offload", *top))
    if attention_pays:
        ladders.append(("attention_offload", *top))
    return ladders


def _leveled(layout: ModelLayout, demand: Demand, ladder: Ladder) -> Plan | None:
    """The plan with the most slots of `SLOTS` that fit at the ladder's first level, and then with
    levels by the ladder (rules 2 and 4). None if nothing fits."""
    first = replace(demand, activations=ladder[0]) if ladder else demand
    places, budget = Places(layout, first), demand.gpu_budget_bytes
    for slots, gradients in places.wanted_slots():
        room = inf if budget is None else budget - places.gpu_buffers(slots, gradients)
        levels = _levels_within(places, ladder, room)
        if levels is not None:
            with_levels = replace(first, activations=levels) if ladder else first
            plan = _made(layout, replace(with_levels, window=max(1, slots)))
            if plan is not None:
                return plan
    return None


def _levels_within(places: Places, ladder: Ladder, room: float) -> tuple[str, ...] | None:
    """The level of each layer by the ladder, or as pinned without one, where activations take at
    most `room` bytes of the GPU. None if not even those of the first level do."""
    if not _is_within(places, places.activations, room):
        return None
    if not ladder:
        return places.activations
    counts = {**dict.fromkeys(ladder, 0), ladder[0]: places.num_blocks}
    for below, level in pairwise(ladder):
        counts = _raised(places, counts, below, level, room)
    return levels_of(places.layout, counts)


def _raised(
    places: Places, counts: Mapping[str, int], below: str, level: str, room: float
) -> dict[str, int]:
    """The numbers of blocks by level, with the most that fit at `level` in place of `below`."""

    def raised(count: int) -> dict[str, int]:
        return {**counts, below: counts[below] - count, level: count}

    def fit(count: int) -> bool:
        return _is_within(places, levels_of(places.layout, raised(count)), room)

    return raised(last_that(fit, 0, counts[below]))


def _is_within(places: Places, levels: tuple[str, ...], room: float) -> bool:
    layout, demand = places.layout, places.demand
    later_bytes = later_activation_bytes(layout, levels, demand)
    need = max(activation_bytes(layout, levels, demand), later_bytes, demand.reserve_bytes)
    return need <= room


def _made(layout: ModelLayout, demand: Demand) -> Plan | None:
    """The demand's plan; None if it does not fit, or if its settings do not go together."""
    try:
        return make_plan(layout, demand)
    except (BudgetError, ConfigError):
        return None


# -- refusals -------------------------------------------------------------------------------------
def _smallest(demand: Demand, resident: int, updates: str, policy: str) -> Demand:
    """The demand at its smallest on the gpu, with so many resident blocks."""
    return replace(
        demand,
        window=demand.window or 1,
        resident_layers=resident,
        resident_updates=updates,
        activations=demand.activations or policy,
    )


def _most_resident(layout: ModelLayout, demand: Demand, policy: str) -> int:
    """The largest number of blocks that the gpu can hold with their optimizer states.

    Such a plan takes least of the host; the host's budget is ignored. 0 if not even the smallest
    plan fits.
    """
    without_host_budget = replace(demand, host_budget_bytes=None)
    updates = demand.resident_updates or "gpu"
    return last_that(
        lambda resident: (
            _made(layout, _smallest(without_host_budget, resident, updates, policy)) is not None
        ),
        0,
        len(layout.streamed),
    )


def _least(layout: ModelLayout, demand: Demand) -> Iterator[Demand]:
    """Demands that take least of the host if the gpu has room, then those that take least of the
    gpu. If none of them fits, no plan does."""
    resident = demand.resident_layers
    updates = demand.resident_updates
    # offloading takes least of the gpu, recomputation of the host
    for policy in SMALLEST_LEVELS:
        most = _most_resident(layout, demand, policy) if resident is None else resident
        yield _smallest(demand, most, updates or "gpu", policy)
    for policy in SMALLEST_LEVELS:
        yield _smallest(demand, resident or 0, updates or "host", policy)


def _refusal(layout: ModelLayout, demand: Demand) -> BudgetError:
    """The error of the plan that needs least of the tier that is too small: the GPU, if no plan
    fits it."""
    errors: list[BudgetError] = []
    for least in _least(layout, demand):
        try:
            make_plan(layout, least)
        except BudgetError as error:
            errors.append(error)
    beside_gpu = [error for error in errors if error.page is not ErrorPage.GPU_MEMORY]
    return min(
        beside_gpu or errors,
        key=lambda error: error.need_bytes or 0,
        default=BudgetError(
            "no plan fits the budgets with what is pinned: leave stronghold.window, "
            "resident_layers or activations out"
        ),
    )


def largest_micro_batch(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """The largest micro-batch for which `fits` holds, up to `limit`; 0 if it holds for none.

    `fits` must hold for no batch that is larger than one for which it does not hold.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, 2 * high
    return last_that(fits, low, min(high - 1, limit))
