"""The search: which of the plans that fit is the fastest.

Pure: no tensors, no threads. Owns the candidates and the order in which they are tried; what a
candidate takes is told by `predict`, which runs the real executor on virtual clocks (`simulate`).
What the user pinned in the demand stays as it is.

[Note: lower bounds first] A candidate's step cannot be shorter than the work on its lanes.
Candidates are tried in the order of that bound, and a round ends when the bound alone is more than
the best step found: nothing that is left can be faster.

[Note: rounds] First a share of the blocks to keep and what happens to activations, with the largest
window of usual size that fits; then the window, for the best few of these; then the share more
finely. Last, for the best, which updates are deferred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from stronghold.errors import BudgetError, ConfigError
from stronghold.model.layout import ModelLayout
from stronghold.plan.bounds import Lanes as Lanes
from stronghold.plan.bounds import deferrals, lower_bound
from stronghold.plan.planner import Demand, Plan, make_plan

USUAL_WINDOW = 3  # one computes, one is still in use or drains, one is on its way
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
SHARES = 8  # resident blocks are tried in steps of an eighth of the model, then of a part of that
FINER = (1 / 16, 1 / 32, 1 / 64)
FEW = 3  # of the first round's best, whose window is varied
POLICIES = ("recompute", "offload")  # of what is not kept
UPDATES = ("host", "gpu")  # of resident layers
WHOLE = 1.03  # a model that fits whole stays whole, unless another plan is faster than this
ENOUGH = 1.01  # so near the fastest, that deferring fewer updates, which takes less, is preferred
EQUAL = 1e-3  # a plan must be faster than another by this share to be preferred to a smaller one


class Forecast(Protocol):
    """What the search reads of a prediction."""

    @property
    def step_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest plan, its forecast, and how many were simulated of those that fit."""

    plan: Plan
    forecast: Forecast
    demand: Demand
    num_tried: int
    num_fitting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A plan that fits; `bound_s` is the least that its step can take, `nbytes` its gpu's peak."""

    demand: Demand
    plan: Plan
    bound_s: float
    nbytes: int


def search(
    layout: ModelLayout, demand: Demand, lanes: Lanes, predict: Callable[[Plan], Forecast]
) -> Choice:
    """The fastest plan within the demand's budgets, by `predict`.

    BudgetError when none fits: it is the one of the smallest plan, and names what would make it
    fit.
    """
    return _Search(layout, demand, lanes, predict).run()


class _Search:
    def __init__(
        self,
        layout: ModelLayout,
        demand: Demand,
        lanes: Lanes,
        predict: Callable[[Plan], Forecast],
    ) -> None:
        self._layout = layout
        keys = ("window", "resident_layers", "resident_updates", "activations", "deferred_layers")
        self._demand = replace(
            demand, searched=frozenset(key for key in keys if getattr(demand, key) is None)
        )
        self._lanes = lanes
        self._predict = predict
        self._seen: set[object] = set()
        self._tried: list[tuple[Forecast, _Candidate]] = []
        self._num_fitting = 0

    def run(self) -> Choice:
        num_blocks = len(self._layout.streamed)
        pinned = self._demand.resident_layers
        shares = {round(num_blocks * k / SHARES) for k in range(SHARES + 1)}
        shares |= {_most_resident(self._layout, self._demand, policy) for policy in POLICIES}
        residents = sorted(shares) if pinned is None else [pinned]
        self._round(self._usual(residents))
        if not self._tried:
            raise _refusal(self._layout, self._demand)
        for _, candidate in self._best(FEW):
            resident = self._residents(candidate)
            self._round(self._fitting(self._demands([resident], [*WINDOWS, num_blocks])))
        for step in FINER if pinned is None else ():
            for _, candidate in self._best(1):
                near, away = self._residents(candidate), max(1, round(step * num_blocks))
                around = [r for r in (near - away, near + away) if 0 <= r <= num_blocks]
                self._round(self._usual(around))
                self._round(self._fitting(self._demands(around, [candidate.plan.window])))
        if self._demand.deferred_layers is None:
            self._round(self._deferring(self._best(1)[0][1]))
        forecast, best = self._chosen()
        return Choice(
            plan=best.plan,
            forecast=forecast,
            demand=best.demand,
            num_tried=len(self._tried),
            num_fitting=self._num_fitting,
        )

    def _chosen(self) -> tuple[Forecast, _Candidate]:
        best = self._fewest_deferred(self._best(1)[0])
        whole = [pair for pair in self._tried if pair[1].plan.whole]
        if whole and whole[0][0].step_s <= WHOLE * best[0].step_s:
            return whole[0]
        return best

    def _fewest_deferred(self, best: tuple[Forecast, _Candidate]) -> tuple[Forecast, _Candidate]:
        """Of those that differ from the best in this alone and are nearly as fast."""
        demand = replace(best[1].demand, deferred_layers=None)
        alike = [
            (forecast, candidate)
            for forecast, candidate in self._tried
            if replace(candidate.demand, deferred_layers=None) == demand
            and forecast.step_s <= ENOUGH * best[0].step_s
        ]
        return min(alike, key=lambda pair: len(pair[1].plan.deferred))

    def _residents(self, candidate: _Candidate) -> int:
        return candidate.demand.resident_layers or 0

    def _best(self, count: int) -> list[tuple[Forecast, _Candidate]]:
        """The fastest so far; of equals the one that takes the least of the gpu."""
        least = min(forecast.step_s for forecast, _ in self._tried)
        return sorted(
            self._tried,
            key=lambda pair: (
                round(pair[0].step_s / (least * EQUAL)),
                pair[1].nbytes,
                len(pair[1].plan.deferred),
            ),
        )[:count]

    def _round(self, candidates: Iterable[_Candidate]) -> None:
        """Try what is new and fits, the most promising first ([Note: lower bounds first])."""
        fitting = sorted(candidates, key=lambda entry: (entry.bound_s, entry.nbytes))
        self._num_fitting += len(fitting)
        least = min((forecast.step_s for forecast, _ in self._tried), default=math.inf)
        for candidate in fitting:
            if candidate.bound_s >= least and not candidate.plan.whole:
                continue
            forecast = self._predict(candidate.plan)
            self._tried.append((forecast, candidate))
            least = min(least, forecast.step_s)

    def _demands(self, residents: Iterable[int], windows: Iterable[int]) -> Iterator[Demand]:
        pinned, prefetch = self._demand.window, self._demand.prefetch
        updates = self._demand.resident_updates
        for resident in residents:
            streamed = len(self._layout.streamed) - resident
            tried = {max(1, min(window, streamed)) for window in windows}
            for window in sorted(tried) if pinned is None else [pinned]:
                if prefetch is None or prefetch < window:
                    for where in UPDATES if updates is None else (updates,):
                        yield replace(
                            self._demand,
                            resident_layers=resident,
                            resident_updates=where,
                            window=window,
                        )

    def _usual(self, residents: Iterable[int]) -> Iterator[_Candidate]:
        """With each number of resident blocks, and each place of their updates: the largest window
        of usual size that fits.
        """
        for resident in residents:
            done: set[str | None] = set()
            for window in range(USUAL_WINDOW, 0, -1):
                for wish in self._demands([resident], [window]):
                    if wish.resident_updates not in done and (found := list(self._fitting([wish]))):
                        done.add(wish.resident_updates)
                        yield from found

    def _fitting(self, demands: Iterable[Demand]) -> Iterator[_Candidate]:
        for wish in demands:
            for filled in _filled(self._layout, wish):
                yield from self._as_candidate(filled)

    def _as_candidate(self, demand: Demand) -> Iterator[_Candidate]:
        """The demand's plan, if it fits and is new."""
        try:
            plan = make_plan(self._layout, demand)
        except (BudgetError, ConfigError):
            return
        key = (
            plan.window,
            plan.prefetch,
            plan.resident,
            plan.updated_on_gpu,
            plan.activations,
            plan.deferred,
        )
        if key not in self._seen:
            self._seen.add(key)
            yield _Candidate(
                demand=demand,
                plan=plan,
                bound_s=lower_bound(self._layout, plan, self._lanes),
                nbytes=plan.gpu_total_bytes + plan.activation_bytes,
            )

    def _deferring(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """The candidate with updates deferred, as many as may pay."""
        for count in deferrals(self._layout, candidate.plan, self._lanes):
            yield from self._as_candidate(replace(candidate.demand, deferred_layers=count))


def _filled(layout: ModelLayout, demand: Demand) -> Iterator[Demand]:
    """The demand with its activation policies: as pinned; or as many blocks kept as fit, and the
    others recomputed or offloaded."""
    if demand.activations is not None or not demand.saved_bytes:
        yield demand
        return
    blocks = layout.streamed
    # What is not kept may be too much for the host: then nothing of this policy fits.
    free = replace(demand, host_budget_bytes=None)
    for other in POLICIES:
        low, high = -1, len(blocks)  # `low` kept blocks fit, `high + 1` do not
        while low < high:
            middle = (low + high + 1) // 2
            if _fits(layout, _with_kept(layout, free, middle, other)):
                low = middle
            else:
                high = middle - 1
        if low >= 0:
            yield _with_kept(layout, demand, low, other)
            if low == len(blocks):
                return


def _with_kept(layout: ModelLayout, demand: Demand, kept: int, other: str) -> Demand:
    """The last `kept` blocks keep what they save: backward needs it first."""
    blocks = layout.streamed
    chosen = set(blocks[len(blocks) - kept :])
    policies = tuple(
        other if layer.streamed and layer.index not in chosen else "keep" for layer in layout.layers
    )
    return replace(demand, activations=policies)


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
    takes least of the host. 0 when not even the smallest plan fits.
    """
    free = replace(demand, host_budget_bytes=None)
    low, high = 0, len(layout.streamed)
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(layout, _frugal(free, middle, demand.resident_updates or "gpu", policy)):
            low = middle
        else:
            high = middle - 1
    return low


def _least(layout: ModelLayout, demand: Demand) -> Iterator[Demand]:
    """What takes least of the host where the gpu has room for it, then what takes least of the gpu:
    when none of them fits, nothing does.
    """
    resident, updates = demand.resident_layers, demand.resident_updates
    for policy in POLICIES:  # offloading takes least of the gpu, recomputation of the host
        most = _most_resident(layout, demand, policy) if resident is None else resident
        yield _frugal(demand, most, updates or "gpu", policy)
    for policy in POLICIES:
        yield _frugal(demand, resident or 0, updates or "host", policy)


def fits(layout: ModelLayout, demand: Demand) -> bool:
    """Whether any plan is within the budgets."""
    blocks = len(layout.streamed)
    whole = _frugal(demand, demand.resident_layers or blocks, "gpu", "keep")  # needs no slots
    return any(_fits(layout, wish) for wish in (*_least(layout, demand), whole))


def _refusal(layout: ModelLayout, demand: Demand) -> BudgetError:
    """Why nothing fits: the error of what needs least of the tier that is too small, which names
    how much that is.
    """
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
    """The largest micro-batch for which `fits` holds, 0 when not even one does. `fits` may not
    become true again once it was false.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
