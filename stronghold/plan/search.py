"""The search: which of the plans that fit is the fastest.

Pure: no tensors, no threads. Owns the candidates and the order in which they are tried; how long a
candidate takes `predict` says, which runs the real executor on virtual clocks (`simulate`).
What the user pinned in the demand stays as it is.

[Note: lower bounds first] A candidate's step cannot be shorter than the work on its lanes.
Candidates are tried in the order of that bound, and a round ends when the bound alone is as much
as the best step found: nothing that is left can be faster by more than EQUAL_SHARE.

[Note: rounds] First a share of the blocks to keep, with the largest window of usual size that fits,
and activations as by the FIRST_LADDERS ladders; for the best few of these the other LADDERS, and smaller
windows; for the best the window; then the share more finely. Then, for the best, how many layers
are updated before the norm is known. With so many of them all rounds come once more, because
updates cost less then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from stronghold.errors import BudgetError, ConfigError
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import Demand, Workload, step_bytes, trained_bytes
from stronghold.plan.machine import LEAST_SHARE, Rates
from stronghold.plan.plan import Plan, last_that, levels_of, make_plan

USUAL_WINDOW = 3  # one computes, one is still in use or drains, one is on its way
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
SHARES = 8  # resident blocks are tried in steps of an eighth of the model, then of a part of that
FINER_SHARES = (1 / 16, 1 / 32, 1 / 64)
EARLY_SHARES = 8  # early updates are tried in steps of an eighth of the layers
EARLY_MARGINS = (0.8, 0.9, 1.0, 1.1)  # of the share of layers that backward has time for
NUM_VARIED = 3  # of the first round's best, whose window is varied
SMALLEST_LEVELS = (
    "recompute",
    "offload",
    "recompute_offload",
)  # at the beginning, of what is not kept
# Of the last blocks as many as fit have the last level, of those before them the one before, and
# the first blocks the first.
Ladder = tuple[str, ...]
FIRST_LADDERS: tuple[Ladder, ...] = (("recompute", "keep"), ("offload", "keep"))
LADDERS: tuple[Ladder, ...] = (
    *FIRST_LADDERS,
    ("recompute", "attention", "keep"),
    ("recompute_offload", "recompute"),
    ("recompute_offload", "attention", "keep"),
    ("attention_offload", "attention", "keep"),
)
UPDATE_PLACES = ("host", "gpu")  # of resident layers
WHOLE_MARGIN = 1.03  # a model that fits whole stays whole, unless another plan is faster than this
NEARLY_FASTEST = (
    1.01  # so near the fastest, that fewer early updates, which take less, are preferred
)
EQUAL_SHARE = (
    1e-3  # a plan must be faster than another by this share to be preferred to a smaller one
)
SEARCHED_KEYS = ("window", "resident_layers", "resident_updates", "activations", "early_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan, and how long its step takes."""

    plan: Plan
    forecast: Any  # what `predict` said, with its `step_s`
    ladder: Ladder = ()  # by which activations were chosen

    @property
    def step_s(self) -> float:
        return float(self.forecast.step_s)


# -- bounds ---------------------------------------------------------------------------------------
def lower_bound(layout: ModelLayout, plan: Plan, work: Workload, rates: Rates) -> float:
    """Seconds of the busiest lane's own work in a step of `plan` ([Note: lower bounds first])."""
    moved = plan.traffic
    update_s = moved.update_bytes * 1e-9 / rates.update_gbps
    compute_s = work.micro_batches * (work.forward_s + work.backward_s(plan.activations))
    compute_s += _waits_s(layout, plan, work, rates)
    return max(
        compute_s,
        update_s,
        moved.fetch_bytes * 1e-9 / rates.fetch_gbps,
        moved.drain_bytes * 1e-9 / rates.drain_gbps,
    )


def _waits_s(layout: ModelLayout, plan: Plan, work: Workload, rates: Rates) -> float:
    """Seconds that forward waits for updates at least. Those on the device are compute of their
    own. Those behind the gate begin when backward has ended, in the layers' order. Weights that
    were updated before cross host memory beside the updates, or after them."""
    num_ranks = plan.demand.num_ranks
    behind_gate = [layer for layer in layout.layers if layer.index not in plan.early]
    formats = plan.demand.formats
    byte_s = 1e-9 / rates.update_gbps / num_ranks
    # Transfers beside updates slow these by what does not fit into the memory's bandwidth.
    own, fetch, memory = rates.update_gbps, rates.fetch_gbps, rates.memory_gbps
    delay_s = 0.0
    if num_ranks == 1 and memory - rates.duplex_gbps - rates.io_gbps > LEAST_SHARE * own:
        taken = max(0.0, own + fetch - memory) / own
        delay_s = 1e-9 / fetch * taken
    updated_s = delayed_s = end_s = forward_s = 0.0
    for layer in behind_gate:
        on_host = layer.index not in plan.updated_on_gpu
        updated_s += step_bytes(layer, formats) * byte_s if on_host else 0.0
        load_s = work.layers[layer.index].forward_s
        end_s = max(end_s, updated_s + delayed_s) + load_s
        forward_s += load_s
        delayed_s += trained_bytes(layer, formats) * delay_s if on_host else 0.0
    return max(end_s - forward_s, plan.traffic.device_update_bytes * 1e-9 / rates.device_gbps)


def updates_s(plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds of a step's updates on the host: of the CPU and its norms, and of the disk."""
    moved = plan.traffic
    read, written = moved.nvme_read_bytes, moved.nvme_written_bytes
    disk = read / rates.load_gbps, written / rates.spill_gbps, (read + written) / rates.io_gbps
    return (moved.update_bytes + moved.norm_bytes) * 1e-9 / rates.update_gbps, max(disk) * 1e-9


# -- the search -----------------------------------------------------------------------------------
@dataclass(slots=True)
class Search:
    """One search, by `predict`, of the plans within the demand's budgets by `ladders`."""

    layout: ModelLayout
    demand: Demand
    work: Workload
    rates: Rates
    predict: Callable[[Plan], Any]
    ladders: Sequence[Ladder]
    seen: set[object] = field(default_factory=set)
    tried: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        searched = frozenset(key for key in SEARCHED_KEYS if getattr(self.demand, key) is None)
        self.demand = replace(self.demand, searched=searched)

    def run(self, near: Sequence[tuple[int, int]]) -> Choice:
        """The fastest plan; of those `near`, if any: with these numbers of resident blocks and
        windows. BudgetError when none fits, which names what would make the smallest plan fit."""
        is_open = self.demand.early_layers is None
        self._search(near)
        if not self.tried:
            raise _refusal(self.layout, self.demand)
        if is_open:
            self._round(self._earlier(self._best(1)[0]))
            early = len(self._best(1)[0].plan.early)
            if early:  # updates cost less now, so that another choice of the rest may be faster
                self.demand = replace(self.demand, early_layers=early)
                self._search(near)
                self._round(self._earlier(self._best(1)[0]))
        return self._chosen()

    def _search(self, near: Sequence[tuple[int, int]]) -> None:
        """Try the choices of all but early updates."""
        if near:
            wishes = (wish for kept, window in near for wish in self._demands([kept], [window]))
            self._round(self._fitting(wishes, self.ladders))
        else:
            self._rounds()

    def _earlier(self, choice: Choice) -> Iterator[tuple[Plan, Ladder]]:
        """The plan with more and more early updates, as far as the host has room."""
        plan = choice.plan
        able = [i for i in plan.updates if i not in plan.updated_on_gpu]
        shares = {k / EARLY_SHARES for k in range(EARLY_SHARES + 1)}
        backward_s = self.work.backward_s(plan.activations)
        updates = max(updates_s(plan, self.rates))
        if updates > backward_s:  # [Note: early updates] of `plan`
            shares |= {margin * backward_s / updates for margin in EARLY_MARGINS}
        counts = {round(len(able) * min(1.0, share)) for share in shares}

        def fits(count: int) -> bool:
            return _fits(self.layout, replace(plan.demand, early_layers=count))

        most = last_that(fits, 0, len(able))
        wishes = [
            replace(plan.demand, early_layers=count)
            for count in sorted({*counts, most})
            if count <= most
        ]
        return self._new(wishes, choice.ladder)

    def _rounds(self) -> None:
        num_blocks = len(self.layout.streamed)
        pinned = self.demand.resident_layers
        if pinned is not None:
            residents = [pinned]
        else:
            shares = {round(num_blocks * k / SHARES) for k in range(SHARES + 1)}
            shares |= {
                _most_resident(self.layout, self.demand, policy) for policy in SMALLEST_LEVELS
            }
            residents = sorted(shares)
        first = [ladder for ladder in FIRST_LADDERS if ladder in self.ladders]
        self._round(self._usual(residents, first or self.ladders))
        if not self.tried:
            self._round(self._usual(residents, self.ladders))
        if not self.tried:
            return
        for choice in self._best(NUM_VARIED):
            wishes = self._near(choice, [choice.plan.window, 2, USUAL_WINDOW])
            self._round(self._fitting(wishes, self.ladders))
        for choice in self._best(1):
            wishes = self._near(choice, [*WINDOWS, num_blocks])
            self._round(self._fitting(wishes, [choice.ladder]))
        for step in FINER_SHARES if pinned is None else ():
            best = self._best(1)[0]
            near, away = best.plan.demand.resident_layers or 0, max(1, round(step * num_blocks))
            around = [r for r in (near - away, near + away) if 0 <= r <= num_blocks]
            self._round(self._usual(around, [best.ladder]))
            wishes = self._demands(around, [best.plan.window])
            self._round(self._fitting(wishes, [best.ladder]))

    def _chosen(self) -> Choice:
        best = self._best(1)[0]
        # Of those that differ from it in this alone and are nearly as fast: the fewest early.
        demand = replace(best.plan.demand, early_layers=None)
        alike = [
            choice
            for choice in self.tried
            if replace(choice.plan.demand, early_layers=None) == demand
            and choice.step_s <= NEARLY_FASTEST * best.step_s
        ]
        best = min(alike, key=lambda choice: len(choice.plan.early))
        whole = next((choice for choice in self.tried if choice.plan.whole), best)
        return whole if whole.step_s <= WHOLE_MARGIN * best.step_s else best

    def _best(self, count: int) -> list[Choice]:
        """The fastest so far; of equals the one that takes the least of the gpu."""
        unit = EQUAL_SHARE * min(choice.step_s for choice in self.tried)

        def order(choice: Choice) -> tuple[int, int, int]:
            plan = choice.plan
            return round(choice.step_s / unit), _gpu_peak(plan), len(plan.early)

        return sorted(self.tried, key=order)[:count]

    def _round(self, candidates: Iterable[tuple[Plan, Ladder]]) -> None:
        """Try what is new and fits, the most promising first ([Note: lower bounds first])."""
        bounded = [
            (lower_bound(self.layout, candidate[0], self.work, self.rates), *candidate)
            for candidate in candidates
        ]
        least = min((choice.step_s for choice in self.tried), default=math.inf)
        bounded.sort(key=lambda row: (row[0], _gpu_peak(row[1])))
        for bound_s, plan, ladder in bounded:
            if bound_s >= (1.0 - EQUAL_SHARE) * least and not plan.whole:
                continue
            choice = Choice(plan=plan, forecast=self.predict(plan), ladder=ladder)
            self.tried.append(choice)
            least = min(least, choice.step_s)

    def _demands(self, residents: Iterable[int], windows: Iterable[int]) -> Iterator[Demand]:
        pinned, prefetch = self.demand.window, self.demand.prefetch
        updates = self.demand.resident_updates
        # Without blocks the plan itself decides ([Note: no blocks] of `plan`).
        open_places = updates is None and self.layout.streamed
        for resident in residents:
            streamed = len(self.layout.streamed) - resident
            tried = {max(1, min(window, streamed)) for window in windows}
            for window in sorted(tried) if pinned is None else [pinned]:
                if prefetch is None or prefetch < window:
                    for where in UPDATE_PLACES if open_places else (updates,):
                        yield replace(
                            self.demand,
                            resident_layers=resident,
                            resident_updates=where,
                            window=window,
                        )

    def _near(self, choice: Choice, windows: Iterable[int]) -> Iterator[Demand]:
        return self._demands([choice.plan.demand.resident_layers or 0], windows)

    def _usual(
        self, residents: Iterable[int], ladders: Sequence[Ladder]
    ) -> Iterator[tuple[Plan, Ladder]]:
        """With each number of resident blocks, and each place of their updates: the largest window
        of usual size that fits."""
        for resident in residents:
            done: set[str | None] = set()
            for window in range(USUAL_WINDOW, 0, -1):
                for demand in self._demands([resident], [window]):
                    if demand.resident_updates in done:
                        continue
                    for candidate in self._fitting([demand], ladders):
                        done.add(demand.resident_updates)
                        yield candidate

    def _fitting(
        self, demands: Iterable[Demand], ladders: Sequence[Ladder]
    ) -> Iterator[tuple[Plan, Ladder]]:
        for demand in demands:
            for filled, ladder in _filled(self.layout, demand, ladders):
                yield from self._new([filled], ladder)

    def _new(self, demands: Iterable[Demand], ladder: Ladder) -> Iterator[tuple[Plan, Ladder]]:
        """Their plans, as far as they fit and are new."""
        for demand in demands:
            try:
                plan = make_plan(self.layout, demand)
            except (BudgetError, ConfigError):
                continue
            slots, places = (plan.window, plan.prefetch), (plan.resident, plan.updated_on_gpu)
            key = (slots, places, plan.activations, plan.early)
            if key not in self.seen:
                self.seen.add(key)
                yield plan, ladder


def _gpu_peak(plan: Plan) -> int:
    return plan.gpu_total_bytes + plan.activation_bytes


def _filled(
    layout: ModelLayout, demand: Demand, ladders: Sequence[Ladder]
) -> Iterator[tuple[Demand, Ladder]]:
    """The demand with its activation levels: as pinned, or by each ladder as good as fit."""
    if demand.activations is not None or not demand.kept:
        yield demand, ()
        return
    num_blocks = len(layout.streamed)
    # What is not kept may be too much for the host: then nothing of this ladder fits.
    free = replace(demand, host_budget_bytes=None)
    for ladder in ladders:
        if "attention" in ladder and not any(load.attention_bytes for load in demand.kept):
            continue
        counts = dict.fromkeys(ladder, 0)
        counts[ladder[0]] = num_blocks
        if not _fits(layout, _levelled(layout, free, counts)):
            continue
        for below, level in pairwise(ladder):
            counts = _risen(layout, free, counts, below, level)
        yield _levelled(layout, demand, counts), ladder
        if counts.get("keep") == num_blocks:
            return


def _risen(
    layout: ModelLayout, demand: Demand, counts: Mapping[str, int], below: str, level: str
) -> dict[str, int]:
    """The most of the blocks at `below` that fit at `level`."""

    def risen(count: int) -> dict[str, int]:
        return {**counts, below: counts[below] - count, level: count}

    def fits(count: int) -> bool:
        return _fits(layout, _levelled(layout, demand, risen(count)))

    return risen(last_that(fits, 0, counts[below]))


def _levelled(layout: ModelLayout, demand: Demand, counts: Mapping[str, int]) -> Demand:
    """Backward needs the last blocks' first."""
    return replace(demand, activations=levels_of(layout, counts))


def _fits(layout: ModelLayout, demand: Demand) -> bool:
    try:
        make_plan(layout, demand)
    except BudgetError:
        return False
    return True


def _frugal(demand: Demand, resident: int, updates: str, policy: str) -> Demand:
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
    """How many blocks the gpu can hold with their optimizer's state, whatever the host has: what
    takes least of the host. 0 when not even the smallest plan fits."""
    free, updates = replace(demand, host_budget_bytes=None), demand.resident_updates or "gpu"

    def fits(resident: int) -> bool:
        return _fits(layout, _frugal(free, resident, updates, policy))

    return last_that(fits, 0, len(layout.streamed))


def _least(layout: ModelLayout, demand: Demand) -> Iterator[Demand]:
    """What takes least of the host where the gpu has room for it, then what takes least of the gpu:
    when none of them fits, nothing does."""
    resident, updates = demand.resident_layers, demand.resident_updates
    for policy in SMALLEST_LEVELS:  # offloading takes least of the gpu, recomputation of the host
        most = _most_resident(layout, demand, policy) if resident is None else resident
        yield _frugal(demand, most, updates or "gpu", policy)
    for policy in SMALLEST_LEVELS:
        yield _frugal(demand, resident or 0, updates or "host", policy)


def roomiest_plan(layout: ModelLayout, demand: Demand) -> Plan:
    """The plan that takes least of the gpu, within the host's budget, whatever the gpu's is: for
    activations whose size is known too late. BudgetError where the host has room for none."""
    free = replace(demand, gpu_budget_bytes=None)
    resident, updates = demand.resident_layers or 0, demand.resident_updates or "host"
    found: list[Plan] = []
    failure: BudgetError | None = None
    for policy in SMALLEST_LEVELS:
        try:
            found.append(make_plan(layout, _frugal(free, resident, updates, policy)))
        except BudgetError as error:
            failure = error
    if failure is not None and not found:
        raise failure
    return min(found, key=_gpu_peak)


def fits(layout: ModelLayout, demand: Demand) -> bool:
    """Whether any plan is within the budgets."""
    blocks = len(layout.streamed)
    whole = _frugal(demand, demand.resident_layers or blocks, "gpu", "keep")  # needs no slots
    return any(_fits(layout, wish) for wish in (*_least(layout, demand), whole))


def _refusal(layout: ModelLayout, demand: Demand) -> BudgetError:
    """Why nothing fits: the error of what needs least of the tier that is too small."""
    wishes = list(_least(layout, demand))
    on_gpu = [w for w in wishes if _fits(layout, replace(w, host_budget_bytes=None))]

    def need(wish: Demand) -> int:
        plan = make_plan(layout, replace(wish, gpu_budget_bytes=None, host_budget_bytes=None))
        if on_gpu:
            return plan.host_total_bytes + plan.offloaded_bytes
        return plan.gpu_total_bytes + plan.activation_bytes

    try:
        make_plan(layout, min(on_gpu or wishes, key=need))
    except BudgetError as error:
        return error
    return BudgetError(
        "no plan fits the budgets with what is pinned: leave stronghold.window, prefetch, "
        "resident_layers or activations out"
    )


def largest_micro_batch(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """The largest micro-batch for which `fits`, once false always false, holds; 0 for none."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, 2 * high
    return last_that(fits, low, min(high - 1, limit))
