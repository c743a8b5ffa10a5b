"""What lanes reach, alone and beside each other: shared resources of a simulated machine.

Owns which operations moved bytes lately, and which updates nobody has seen the end of. Never knows
what waits for what. The calling thread alone enters.

[Note: shared resources] Both directions of the link share what duplex allows, loads and stages
share the disk with each other and with spills. Who was submitted first keeps its rate; who overlaps
it later gets what is left for as long as they overlap, so that no byte is moved twice. The CPU's
Adam has what all transfers leave of the host's memory: what crosses the link beside updates that
were submitted before it delays them, whose fences nobody has waited for yet.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

SHARING_MEMORY = 16  # operations of another lane that may still overlap a new one
LINK_LANES = ("fetch", "drain")
MEMORY_LANES = (*LINK_LANES, "load", "stage", "spill")  # whose bytes pass host memory
LEAST_SHARE = 0.05  # of its own rate that a lane keeps beside others, whatever is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the lanes reach, in 1e9 bytes/s, and the seconds that a hand-over costs.

    `duplex_gbps` is the sum of both directions of the link when both are busy; `update_gbps` the
    CPU Adam's, `memory_gbps` the host memory's as a whole; `io_gbps` the sum of loads and spills
    when both are busy; `device_gbps` the device memory's; `wire_gbps` what comes from other ranks
    of the node, `reduce_gbps` the gradients from all ranks, `exchange_gbps` the weights from other
    nodes. `handover_s` passes between a submission and its lane's start, `launch_s` is the calling
    thread's share of a piece of compute.
    """

    fetch_gbps: float
    drain_gbps: float
    duplex_gbps: float
    update_gbps: float
    memory_gbps: float
    device_gbps: float
    load_gbps: float = 1.0
    spill_gbps: float = 1.0
    io_gbps: float = 2.0
    wire_gbps: float = 25.0
    reduce_gbps: float = 25.0
    exchange_gbps: float = 25.0
    handover_s: float = 3e-5
    launch_s: float = 0.0


class Timed(Protocol):
    """A fence whose time may still change."""

    issued_s: float
    done_s: float


@dataclass(slots=True, kw_only=True)
class Moving:
    """An operation that moves `nbytes` between two times, the device's operation `index`."""

    lane: str
    begin_s: float
    end_s: float
    nbytes: int
    fence: Timed
    index: int
    delayed: bool = False

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return self.nbytes / (self.end_s - self.begin_s)


class _Left(NamedTuple):
    """The rate that is left in an interval, bytes/s."""

    begin_s: float
    end_s: float
    rate: float


class Contention:
    """Who gets how much of the link, the disk and the host's memory ([Note: shared resources])."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._alone_and_beside = _alone_and_beside(rates)
        self._recent: dict[str, deque[Moving]] = defaultdict(lambda: deque(maxlen=SHARING_MEMORY))
        self._updates: deque[Moving] = deque()
        self._delayed: list[Moving] = []

    def end_of(self, lane: str, start_s: float, nbytes: int) -> float:
        """When an operation of `nbytes` that starts on the lane now ends."""
        if lane == "update":
            own, beside = self._rates.update_gbps * 1e9, self._beside_transfers(start_s)
        else:
            own, shared = self._alone_and_beside.get(lane, (0.0, {}))
            beside = self._overlaps(shared, start_s)
        return _end_s(start_s, nbytes, own, beside) if nbytes > 0 and own > 0.0 else start_s

    def add(self, moving: Moving) -> None:
        """It was submitted, and ends when `end_of` said."""
        if moving.lane == "update":
            self._updates.append(moving)
        else:
            self._recent[moving.lane].append(moving)

    def delay_updates(self, transfer: Moving, seen_s: float) -> float:
        """Make the updates that share memory with a new transfer longer, and those behind them
        later, but for ends that somebody may have waited for before `seen_s`. Returns when the last
        one that changed ends, or 0.
        """
        updates = self._updates
        while updates and updates[0].end_s <= seen_s:
            updates.popleft()
        own = self._rates.update_gbps * 1e9
        beside: list[_Left] | None = None
        free_s = 0.0  # the end of the one before, where it has become later
        for update in updates:
            if update.end_s <= transfer.begin_s:
                continue
            begin_s = update.begin_s
            if begin_s >= free_s:
                if begin_s >= transfer.end_s:
                    break
            else:
                begin_s = free_s
            if begin_s >= transfer.end_s:
                end_s = update.end_s + begin_s - update.begin_s
            else:
                if beside is None:
                    beside = self._beside_transfers(begin_s)
                end_s = _end_s(begin_s, update.nbytes, own, beside)
            if end_s > update.end_s:
                update.begin_s, update.end_s, free_s = begin_s, end_s, end_s
                update.fence.issued_s = update.fence.done_s = end_s
                if not update.delayed:
                    update.delayed = True
                    self._delayed.append(update)
        return free_s

    def delayed(self) -> list[Moving]:
        """The updates whose times have changed since the last call."""
        found, self._delayed = self._delayed, []
        for update in found:
            update.delayed = False
        return found

    def _beside_transfers(self, from_s: float) -> list[_Left]:
        """Where transfers run after `from_s`, and the update's rate there."""
        own, memory = self._rates.update_gbps * 1e9, self._rates.memory_gbps * 1e9
        changes = []
        for name in MEMORY_LANES:
            for other in reversed(self._recent[name]):
                if other.end_s <= from_s:
                    break  # a lane's operations end in order
                rate = other.rate
                changes += [(other.begin_s, rate), (other.end_s, -rate)]
        changes.sort()
        found, used = [], 0.0
        for (at_s, change), (until_s, _) in pairwise(changes):
            used += change
            if until_s > at_s and used > 0.0:
                left = min(own, max(memory - used, LEAST_SHARE * own))
                found.append(_Left(at_s, until_s, left))
        return found

    def _overlaps(self, shared: dict[str, float], from_s: float) -> list[_Left]:
        """Disjoint intervals after `from_s` in which others run, and the rate that is left."""
        found = sorted(
            (other.begin_s, other.end_s, rate)
            for name, rate in shared.items()
            for other in self._recent[name]
            if other.end_s > from_s
        )
        disjoint: list[_Left] = []
        for begin_s, end_s, rate in found:
            if disjoint and begin_s < disjoint[-1].end_s:
                begin_s = disjoint[-1].end_s  # two at once: the first one's rate stands
            if end_s > begin_s:
                disjoint.append(_Left(begin_s, end_s, rate))
        return disjoint


def _alone_and_beside(rates: Rates) -> dict[str, tuple[float, dict[str, float]]]:
    """Bytes/s of each lane alone, and beside each lane that shares its resource."""
    beside_loads, beside_spills = rates.io_gbps - rates.load_gbps, rates.io_gbps - rates.spill_gbps
    found: dict[str, tuple[float, dict[str, float]]] = {
        "fetch": (rates.fetch_gbps, {"drain": rates.duplex_gbps - rates.drain_gbps}),
        "drain": (rates.drain_gbps, {"fetch": rates.duplex_gbps - rates.fetch_gbps}),
        "gather": (rates.wire_gbps, {}),
        "reduce": (rates.reduce_gbps, {}),
        "exchange": (rates.exchange_gbps, {"reduce": rates.exchange_gbps / 2}),
        "spill": (rates.spill_gbps, {"load": beside_loads, "stage": beside_loads}),
        "load": (rates.load_gbps, {"spill": beside_spills, "stage": 0.0}),
        "stage": (rates.load_gbps, {"spill": beside_spills, "load": 0.0}),
    }
    return {
        lane: (
            own * 1e9,
            {name: min(own, max(left, LEAST_SHARE * own)) * 1e9 for name, left in shared.items()},
        )
        for lane, (own, shared) in found.items()
    }


def _end_s(start_s: float, nbytes: float, own: float, beside: Sequence[_Left]) -> float:
    """When `nbytes` are moved: at the rate `own`, but in the intervals `beside` at theirs."""
    left, now_s = nbytes, start_s
    for begin_s, end_s, rate in beside:
        if end_s <= now_s:
            continue
        alone = max(0.0, begin_s - now_s)
        if left <= alone * own:
            return now_s + left / own
        left -= alone * own
        now_s = max(now_s, begin_s)
        if left <= (end_s - now_s) * rate:
            return now_s + left / rate
        left -= (end_s - now_s) * rate
        now_s = end_s
    return now_s + left / own
