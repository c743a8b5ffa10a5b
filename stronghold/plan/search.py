"""The search: the fastest of the plans that fit.

Pure: no tensors, no threads. Owns the candidates and the order in which they are tried. The
estimate gives a candidate's step time. Settings that the user pinned in the demand stay as they
are.

[Note: lower bounds first]

1. A candidate's step cannot be shorter than the work on its busiest lane.
2. A round tries its candidates in the order of this bound.
3. It skips a candidate whose bound is not below the best step so far by more than EQUAL_SHARE.

[Note: rounds]

1. Numbers of resident blocks, with the largest window of usual size that fits, and activation
   levels by FIRST_LADDERS.
2. For the best NUM_VARIED choices: the other LADDERS, and smaller windows.
3. For the best choice: all WINDOWS.
4. For the best choice: numbers of resident blocks in finer steps.
5. For the best choice: how many layers are updated before the norm is known.
6. With so many early updates, rounds 1 to 5 once more, because updates cost less then.

[Note: activations] A config that pins activations is followed (`places`). Without it:
1. Before the first steps are measured, a GPU recomputes every block (`Stack._demand`).
2. Then the rounds fill the blocks with LADDERS of levels, from the last block on, as far as the
   memory of the GPU allows (`_filled`), and take the fastest by prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from stronghold.errors import BudgetError, ConfigError
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import Demand, Workload, disk_s, step_bytes, trained_bytes
from stronghold.plan.estimate import StepEstimate, estimate
from stronghold.plan.machine import LEAST_SHARE, Rates
from stronghold.plan.places import levels_of
from stronghold.plan.plan import Plan, make_plan

USUAL_WINDOW = 3  # one computes, one is still in use or drains, one is on its way
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
SHARES = 8  # round 1 tries resident blocks in steps of an eighth of the model
FINER_SHARES = (1 / 16, 1 / 32, 1 / 64)  # round 4 tries them in these steps
EARLY_SHARES = 8  # early updates are tried in steps of an eighth of the layers
# of the share of layers that backward has time for
EARLY_MARGINS = (0.8, 0.9, 1.0, 1.1)
NUM_VARIED = 3  # choices of round 1 that round 2 varies
# Activation levels that take least of the gpu or of the host.
SMALLEST_LEVELS = ("recompute", "offload", "recompute_offload")
Ladder = tuple[str, ...]
"""Activation levels from the first blocks to the last. As many of the last blocks as fit have the
last level, as many before them as fit the level before it, and so on."""
FIRST_LADDERS: tuple[Ladder, ...] = (("recompute", "keep"), ("offload", "keep"))
LADDERS: tuple[Ladder, ...] = (
    *FIRST_LADDERS,
    ("recompute", "attention", "keep"),
    ("recompute_offload", "recompute"),
    ("recompute_offload", "attention", "keep"),
    ("attention_offload", "attention", "keep"),
)
UPDATE_PLACES = ("host", "gpu")  # the places at which resident layers may be updated
# Factors of the fastest step time, up to which the search prefers another plan.
WHOLE_MARGIN = 1.03  # a plan that keeps the whole model on the gpu
NEARLY_FASTEST = 1.01  # a plan with fewer early updates, which take room
EQUAL_SHARE = 1e-3  # plans whose times differ by a smaller share count as equal
SEARCHED_KEYS = ("window", "resident_layers", "resident_updates", "activations", "early_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A candidate: a plan and its predicted step time."""

    plan: Plan
    forecast: StepEstimate
    ladder: Ladder = ()  # the ladder that chose the activation levels

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.forecast.step_s


# -- bounds ---------------------------------------------------------------------------------------
def lower_bound(layout: ModelLayout, plan: Plan, work: Workload, rates: Rates) -> float:
    """The work of the busiest lane in a step of `plan`, in seconds ([Note: lower bounds first])."""
    traffic = plan.traffic
    update_s = traffic.update_bytes * 1e-9 / rates.update_gbps
    compute_s = work.micro_batches * (work.forward_s + work.backward_s(plan.activations))
    compute_s += _waits_s(layout, plan, work, rates)
    return max(
        compute_s,
        update_s,
        traffic.fetch_bytes * 1e-9 / rates.fetch_gbps,
        traffic.drain_bytes * 1e-9 / rates.offload_gbps,
    )


def _waits_s(layout: ModelLayout, plan: Plan, work: Workload, rates: Rates) -> float:
    """A lower bound of the seconds that forward waits for updates.

    1. Updates on the device run on the compute lane.
    2. Updates behind the gate begin when backward has ended, in the layers' order.
    3. Updated weights cross host memory beside the next updates, or after them.
    """
    formats = plan.demand.formats
    update_byte_s = 1e-9 / rates.update_gbps / plan.demand.num_ranks
    delay_byte_s = _delay_byte_s(plan, rates)
    updated_s = 0.0  # the end of the updates so far
    delayed_s = 0.0  # their delay by the fetches beside them
    end_s = 0.0  # the end of forward so far
    forward_s = 0.0
    for layer in layout.layers:
        if layer.index in plan.early:
            continue
        is_on_host = layer.index not in plan.updated_on_gpu
        if is_on_host:
            updated_s += step_bytes(layer, formats) * update_byte_s
        layer_s = work.layers[layer.index].forward_s
        end_s = max(end_s, updated_s + delayed_s) + layer_s
        forward_s += layer_s
        if is_on_host:
            delayed_s += trained_bytes(layer, formats) * delay_byte_s
    device_update_s = plan.traffic.device_update_bytes * 1e-9 / rates.device_gbps
    return max(end_s - forward_s, device_update_s)


def _delay_byte_s(plan: Plan, rates: Rates) -> float:
    """The delay of updates by one byte that is fetched beside them, in seconds.

    The update's rate and the fetch's rate together may exceed the memory's bandwidth. The updates
    lose the excess.
    """
    update_gbps = rates.update_gbps
    left_gbps = rates.memory_gbps - rates.duplex_gbps - rates.io_gbps
    if plan.demand.num_ranks > 1 or left_gbps <= LEAST_SHARE * update_gbps:
        return 0.0
    excess = max(0.0, update_gbps + rates.fetch_gbps - rates.memory_gbps) / update_gbps
    return 1e-9 / rates.fetch_gbps * excess


def updates_s(plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds of a step's updates on the host: (the CPU's updates and norms, the disk)."""
    traffic = plan.traffic
    cpu_bytes = traffic.update_bytes + traffic.norm_bytes
    files_s = disk_s(traffic, rates.load_gbps, rates.spill_gbps, rates.io_gbps)
    return cpu_bytes * 1e-9 / rates.update_gbps, files_s


# -- the search -----------------------------------------------------------------------------------
def fastest_plan(
    layout: ModelLayout,
    demand: Demand,
    work: Workload,
    rates: Rates,
    *,
    asynchronous: bool = True,
    ladders: Sequence[Ladder] = LADDERS,
    near: Sequence[tuple[int, int]] = (),
) -> Choice:
    """Find the fastest plan for `demand`. `Search` has `ladders`, `Search.run` has `near`."""
    search = Search(layout, demand, work, rates, asynchronous, ladders)
    return search.run(near)


@dataclass(slots=True)
class Search:
    """One search of the plans within the demand's budgets.

    `asynchronous`: the device is a GPU, not the emulated one. `ladders` are the orders in which
    activation levels are tried. `seen` has the keys of the plans so far, `tried` those that were
    estimated.
    """

    layout: ModelLayout
    demand: Demand
    work: Workload
    rates: Rates
    asynchronous: bool
    ladders: Sequence[Ladder]
    seen: set[object] = field(default_factory=set)
    tried: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        searched = [key for key in SEARCHED_KEYS if getattr(self.demand, key) is None]
        self.demand = replace(self.demand, searched=frozenset(searched))

    def run(self, near: Sequence[tuple[int, int]]) -> Choice:
        """Find the fastest plan.

        `near` lists numbers of resident blocks and windows, to which the search is limited; empty:
        no limit. BudgetError if no plan fits: it names a change that makes the smallest plan fit.
        """
        is_early_open = self.demand.early_layers is None
        self._search(near)
        if not self.tried:
            raise _refusal(self.layout, self.demand)
        if is_early_open:
            self._round(self._with_early_updates(self._fastest()))
            num_early = len(self._fastest().plan.early)
            # updates cost less now: another choice of the rest may be faster
            if num_early:
                self.demand = replace(self.demand, early_layers=num_early)
                self._search(near)
                self._round(self._with_early_updates(self._fastest()))
        return self._chosen()

    def _search(self, near: Sequence[tuple[int, int]]) -> None:
        """Try the choices of all settings but early updates."""
        if not near:
            self._rounds()
            return
        demands: list[Demand] = []
        for num_resident, window in near:
            demands += self._demands([num_resident], [window])
        self._round(self._fitting(demands, self.ladders))

    def _with_early_updates(self, choice: Choice) -> Iterator[tuple[Plan, Ladder]]:
        """The plan with more and more early updates, as far as the host has room."""
        plan = choice.plan
        num_able = sum(layer not in plan.updated_on_gpu for layer in plan.updates)
        shares = {k / EARLY_SHARES for k in range(EARLY_SHARES + 1)}
        backward_s = self.work.backward_s(plan.activations)
        update_s = max(updates_s(plan, self.rates))
        if update_s > backward_s:  # [Note: early updates] of `plan`
            shares |= {margin * backward_s / update_s for margin in EARLY_MARGINS}
        counts = {round(num_able * min(1.0, share)) for share in shares}
        largest = _last_fitting(
            self.layout, num_able, lambda count: replace(plan.demand, early_layers=count)
        )
        demands = [
            replace(plan.demand, early_layers=count)
            for count in sorted({*counts, largest})
            if count <= largest
        ]
        return self._new(demands, choice.ladder)

    def _rounds(self) -> None:
        """All rounds of [Note: rounds] but those of early updates."""
        num_blocks = len(self.layout.streamed)
        residents = self._resident_counts()
        first = [ladder for ladder in FIRST_LADDERS if ladder in self.ladders]
        self._round(self._usual(residents, first or self.ladders))
        if not self.tried:
            self._round(self._usual(residents, self.ladders))
        if not self.tried:
            return
        for choice in self._best(NUM_VARIED):
            demands = self._near(choice, [choice.plan.window, 2, USUAL_WINDOW])
            self._round(self._fitting(demands, self.ladders))
        fastest = self._fastest()
        demands = self._near(fastest, [*WINDOWS, num_blocks])
        self._round(self._fitting(demands, [fastest.ladder]))
        if self.demand.resident_layers is None:
            for share in FINER_SHARES:
                self._round_around(self._fastest(), max(1, round(share * num_blocks)))

    def _resident_counts(self) -> list[int]:
        """The numbers of resident blocks of the first round."""
        pinned = self.demand.resident_layers
        if pinned is not None:
            return [pinned]
        num_blocks = len(self.layout.streamed)
        counts = {round(num_blocks * k / SHARES) for k in range(SHARES + 1)}
        for level in SMALLEST_LEVELS:
            counts.add(_most_resident(self.layout, self.demand, level))
        return sorted(counts)

    def _round_around(self, choice: Choice, distance: int) -> None:
        """Try `distance` resident blocks fewer than the choice has, and as many more."""
        num_resident = choice.plan.demand.resident_layers or 0
        num_blocks = len(self.layout.streamed)
        residents = [
            count
            for count in (num_resident - distance, num_resident + distance)
            if 0 <= count <= num_blocks
        ]
        self._round(self._usual(residents, [choice.ladder]))
        demands = self._demands(residents, [choice.plan.window])
        self._round(self._fitting(demands, [choice.ladder]))

    def _chosen(self) -> Choice:
        """The result of the search: the fastest choice, or a preferred one that is nearly as fast.

        1. Of those that differ from the fastest in early updates alone, the one with the fewest.
        2. A plan that keeps the whole model on the gpu.
        """
        fastest = self._fastest()
        demand = replace(fastest.plan.demand, early_layers=None)
        similar = [
            choice
            for choice in self.tried
            if replace(choice.plan.demand, early_layers=None) == demand
            and choice.step_s <= NEARLY_FASTEST * fastest.step_s
        ]
        best = min(similar, key=_num_early)
        for choice in self.tried:
            if choice.plan.whole:
                return choice if choice.step_s <= WHOLE_MARGIN * best.step_s else best
        return best

    def _fastest(self) -> Choice:
        return self._best(1)[0]

    def _best(self, count: int) -> list[Choice]:
        """The `count` fastest choices so far. Of equals, the one that takes least of the gpu."""
        unit_s = EQUAL_SHARE * min(choice.step_s for choice in self.tried)
        keys = [
            (round(choice.step_s / unit_s), _gpu_peak(choice.plan), _num_early(choice), number)
            for number, choice in enumerate(self.tried)
        ]
        return [self.tried[number] for *_, number in sorted(keys)[:count]]

    def _round(self, candidates: Iterable[tuple[Plan, Ladder]]) -> None:
        """Estimate the candidates, the most promising first ([Note: lower bounds first])."""
        plans = list(candidates)
        keys: list[tuple[float, int, int]] = []
        for number, (plan, _) in enumerate(plans):
            bound_s = lower_bound(self.layout, plan, self.work, self.rates)
            keys.append((bound_s, _gpu_peak(plan), number))
        least_s = min((choice.step_s for choice in self.tried), default=math.inf)
        for bound_s, _, number in sorted(keys):
            plan, ladder = plans[number]
            is_promising = bound_s < (1.0 - EQUAL_SHARE) * least_s
            if not is_promising and not plan.whole:
                continue
            forecast = estimate(
                self.layout, plan, self.work, self.rates, asynchronous=self.asynchronous
            )
            choice = Choice(plan=plan, forecast=forecast, ladder=ladder)
            self.tried.append(choice)
            least_s = min(least_s, choice.step_s)

    def _demands(self, residents: Iterable[int], windows: Iterable[int]) -> Iterator[Demand]:
        """The demand with each number of resident blocks, each window that is possible with it, and
        each place of updates that is open."""
        pinned = self.demand.window
        prefetch = self.demand.prefetch
        windows = list(windows)
        places: Sequence[str | None] = (self.demand.resident_updates,)
        # Without blocks the plan itself decides ([Note: no blocks] of `plan`).
        if self.demand.resident_updates is None and self.layout.streamed:
            places = UPDATE_PLACES
        for num_resident in residents:
            num_streamed = len(self.layout.streamed) - num_resident
            if pinned is None:
                possible = sorted({max(1, min(window, num_streamed)) for window in windows})
            else:
                possible = [pinned]
            for window, place in product(possible, places):
                if prefetch is None or prefetch < window:
                    yield replace(
                        self.demand,
                        resident_layers=num_resident,
                        resident_updates=place,
                        window=window,
                    )

    def _near(self, choice: Choice, windows: Iterable[int]) -> Iterator[Demand]:
        """The demand with the choice's number of resident blocks, and these windows."""
        return self._demands([choice.plan.demand.resident_layers or 0], windows)

    def _usual(
        self, residents: Iterable[int], ladders: Sequence[Ladder]
    ) -> Iterator[tuple[Plan, Ladder]]:
        """Plans with the largest window of usual size that fits, for each number of resident blocks
        and each place of their updates."""
        for num_resident in residents:
            done: set[str | None] = set()
            for window in range(USUAL_WINDOW, 0, -1):
                for demand in self._demands([num_resident], [window]):
                    if demand.resident_updates in done:
                        continue
                    for candidate in self._fitting([demand], ladders):
                        done.add(demand.resident_updates)
                        yield candidate

    def _fitting(
        self, demands: Iterable[Demand], ladders: Sequence[Ladder]
    ) -> Iterator[tuple[Plan, Ladder]]:
        """New plans of these demands, with activation levels by each ladder."""
        for demand in demands:
            for filled, ladder in _filled(self.layout, demand, ladders):
                yield from self._new([filled], ladder)

    def _new(self, demands: Iterable[Demand], ladder: Ladder) -> Iterator[tuple[Plan, Ladder]]:
        """The plans of these demands that fit and are new."""
        for demand in demands:
            try:
                plan = make_plan(self.layout, demand)
            except (BudgetError, ConfigError):
                continue
            key = (
                plan.window,
                plan.prefetch,
                plan.resident,
                plan.updated_on_gpu,
                plan.activations,
                plan.early,
            )
            if key not in self.seen:
                self.seen.add(key)
                yield plan, ladder


def _gpu_peak(plan: Plan) -> int:
    """Bytes of the plan's peak on the gpu, with activations."""
    return plan.gpu_total_bytes + plan.activation_bytes


def _num_early(choice: Choice) -> int:
    return len(choice.plan.early)


def _filled(
    layout: ModelLayout, demand: Demand, ladders: Sequence[Ladder]
) -> Iterator[tuple[Demand, Ladder]]:
    """The demand with activation levels: the pinned ones, or the best that fit by each ladder."""
    if demand.activations is not None or not demand.work:
        yield demand, ()
        return
    num_blocks = len(layout.streamed)
    has_attention = any(work.attention_bytes for work in demand.work)
    # Offloaded activations may be too much for the host. Then no plan of this ladder fits.
    without_host_budget = replace(demand, host_budget_bytes=None)
    for ladder in ladders:
        if "attention" in ladder and not has_attention:
            continue
        counts = dict.fromkeys(ladder, 0)
        counts[ladder[0]] = num_blocks
        if not _fits(layout, _with_levels(layout, without_host_budget, counts)):
            continue
        for below, level in pairwise(ladder):
            counts = _raised(layout, without_host_budget, counts, below, level)
        yield _with_levels(layout, demand, counts), ladder
        if counts.get("keep") == num_blocks:
            return


def _raised(
    layout: ModelLayout, demand: Demand, counts: Mapping[str, int], below: str, level: str
) -> dict[str, int]:
    """The numbers of blocks by level, with the most blocks at `level` in place of `below`."""
    raised = [
        {**counts, below: counts[below] - count, level: count} for count in range(counts[below] + 1)
    ]
    most = _last_fitting(
        layout, counts[below], lambda count: _with_levels(layout, demand, raised[count])
    )
    return raised[most]


def _with_levels(layout: ModelLayout, demand: Demand, counts: Mapping[str, int]) -> Demand:
    """The demand with so many blocks at each level. The last blocks have the last level, because
    backward needs them first."""
    return replace(demand, activations=levels_of(layout, counts))


def _fits(layout: ModelLayout, demand: Demand) -> bool:
    """True if the demand's plan is within the budgets."""
    try:
        make_plan(layout, demand)
    except BudgetError:
        return False
    return True


def _last_fitting(layout: ModelLayout, most: int, demand_of: Callable[[int], Demand]) -> int:
    """The largest count up to `most` whose demand fits. Larger counts need more; 0 fits."""
    return last_that(lambda count: _fits(layout, demand_of(count)), 0, most)


def _smallest(demand: Demand, resident: int, updates: str, policy: str) -> Demand:
    """The demand at its smallest on the gpu, with so many resident blocks."""
    return replace(
        demand,
        window=demand.window or 1,
        prefetch=0 if demand.window is None else demand.prefetch,
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
    return _last_fitting(
        layout,
        len(layout.streamed),
        lambda resident: _smallest(without_host_budget, resident, updates, policy),
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


def roomiest_plan(layout: ModelLayout, demand: Demand) -> Plan:
    """The plan that takes least of the gpu, within the host's budget. The gpu's budget is ignored.

    It serves activations whose size is known too late. BudgetError if the host has room for no
    plan.
    """
    without_gpu_budget = replace(demand, gpu_budget_bytes=None)
    resident = demand.resident_layers or 0
    updates = demand.resident_updates or "host"
    plans: list[Plan] = []
    failure: BudgetError | None = None
    for policy in SMALLEST_LEVELS:
        smallest = _smallest(without_gpu_budget, resident, updates, policy)
        try:
            plans.append(make_plan(layout, smallest))
        except BudgetError as error:
            failure = error
    if failure is not None and not plans:
        raise failure
    return min(plans, key=_gpu_peak)


def fits(layout: ModelLayout, demand: Demand) -> bool:
    """True if any plan is within the budgets."""
    num_resident = demand.resident_layers or len(layout.streamed)
    if any(_fits(layout, smallest) for smallest in _least(layout, demand)):
        return True
    whole = _smallest(demand, num_resident, "gpu", "keep")  # needs no slots
    return _fits(layout, whole)


def _refusal(layout: ModelLayout, demand: Demand) -> BudgetError:
    """The error of the plan that needs least of the tier that is too small."""
    demands = list(_least(layout, demand))
    fitting_gpu = [d for d in demands if _fits(layout, replace(d, host_budget_bytes=None))]
    if fitting_gpu:
        _, least = min((_host_need(layout, d), number) for number, d in enumerate(fitting_gpu))
        smallest = fitting_gpu[least]
    else:
        _, least = min((_gpu_need(layout, d), number) for number, d in enumerate(demands))
        smallest = demands[least]
    try:
        make_plan(layout, smallest)
    except BudgetError as error:
        return error
    return BudgetError(
        "no plan fits the budgets with what is pinned: leave stronghold.window, prefetch, "
        "resident_layers or activations out"
    )


def _gpu_need(layout: ModelLayout, demand: Demand) -> int:
    """Bytes of the gpu that the plan needs, whatever the budgets."""
    return _gpu_peak(_plan_without_budgets(layout, demand))


def _host_need(layout: ModelLayout, demand: Demand) -> int:
    """Bytes of the host that the plan needs, whatever the budgets."""
    plan = _plan_without_budgets(layout, demand)
    return plan.host_total_bytes + plan.offloaded_bytes


def _plan_without_budgets(layout: ModelLayout, demand: Demand) -> Plan:
    return make_plan(layout, replace(demand, gpu_budget_bytes=None, host_budget_bytes=None))


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


def last_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to `high` for which `fits`, once false always false, holds; for `low`
    it does."""
    while low < high:
        middle = (low + high) // 2 + 1
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
