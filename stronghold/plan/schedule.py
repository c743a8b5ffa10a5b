"""The schedule: the ordered list of actions of one pass over the model, as data.

Pure: no tensors, no threads. `make_schedule` derives the actions from the order of the layers'
uses, the number of slots and the positions of updates. `streaming.executor` performs the actions
before each use. `streaming.optimizer_step` performs those behind a use.

A pass is a sequence of uses (forward of layer 0, ..., backward of layer 0) that repeats. It has:

1. Before each use: the slots to release (reshard, evict), and the layers to fetch (unshard,
   prefetch). If no slot is free, the layer with the farthest next use is released. This choice
   fetches least (Belady, 1966).
2. After a layer's last backward: the offload of its gradients, and its update if that is early.
3. After the last backward of the pass: the gate, at which the global gradient norm is known.
4. Behind the gate, in forward order: a commit for each early update, and all other updates.
5. Last: a release of every slot whose weights an update has outdated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

SETTLING_PASSES = 4  # after these the slots begin every pass alike, or never will


class Kind(Enum):
    """The verb of an action.

    RELEASE gives a slot back (reshard). FETCH copies weights to a slot (unshard, prefetch).
    FORWARD and BACKWARD wait for the layer's fetch and let compute go on. OFFLOAD copies gradients
    to the host. GATE waits for the norm of all gradients. UPDATE before the gate writes other
    memory, and COMMIT makes that memory the layer's. WITHDRAW leaves an early update to the gate:
    a step may withdraw, but no schedule contains it.
    """

    RELEASE = "release"
    FETCH = "fetch"
    FORWARD = "forward"
    BACKWARD = "backward"
    OFFLOAD = "offload"
    UPDATE = "update"
    GATE = "gate"
    COMMIT = "commit"
    WITHDRAW = "withdraw"


class Position(Enum):
    """The position of a layer's update in a step.

    EARLY: out of place, once the layer's gradients are on the host, before the norm is known.
    GATE: in place, once the norm is known, in forward order.
    """

    EARLY = "before the gate"
    GATE = "behind the gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One entry of the schedule: a verb and the index of a layer. The gate has no layer: -1."""

    kind: Kind
    layer: int = -1

    def __str__(self) -> str:
        if self.kind is Kind.GATE:
            return str(self.kind.value)
        return f"{self.kind.value} {self.layer}"


GATE = Action(kind=Kind.GATE)


def canonical_uses(layers: Sequence[int], *, backward: bool) -> tuple[Action, ...]:
    """Uses of the common pass: each layer forward in order, then (with `backward`) in reverse."""
    uses = [Action(kind=Kind.FORWARD, layer=layer) for layer in layers]
    if backward:
        uses += [Action(kind=Kind.BACKWARD, layer=layer) for layer in reversed(layers)]
    return tuple(uses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of one pass.

    `steps[k]` are the actions before the k-th use, and the use itself as the last one. `after[k]`
    are the actions that follow it: offloads, updates, the gate and commits.
    """

    uses: tuple[Action, ...]
    steps: tuple[tuple[Action, ...], ...]
    after: tuple[tuple[Action, ...], ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        """All actions of the pass in order."""
        actions: list[Action] = []
        for step, after in zip(self.steps, self.after, strict=True):
            actions += [*step, *after]
        return tuple(actions)

    @property
    def early(self) -> tuple[int, ...]:
        """The layers whose updates stand before the gate, in the order of these updates."""
        before_gate, _ = self._around_gate
        return tuple(action.layer for action in before_gate if action.kind is Kind.UPDATE)

    @property
    def behind_gate(self) -> tuple[Action, ...]:
        """Commits, updates and releases behind the gate, in order."""
        _, behind_gate = self._around_gate
        return behind_gate

    @property
    def offloads(self) -> tuple[int, ...]:
        """The layers whose gradients are offloaded, in order."""
        before_gate, _ = self._around_gate
        return tuple(action.layer for action in before_gate if action.kind is Kind.OFFLOAD)

    @property
    def _around_gate(self) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """Actions behind uses: those before the gate, and those behind it."""
        behind_uses: list[Action] = []
        for after in self.after:
            behind_uses += after
        if GATE not in behind_uses:
            return tuple(behind_uses), ()
        gate_index = behind_uses.index(GATE)
        return tuple(behind_uses[:gate_index]), tuple(behind_uses[gate_index + 1 :])


def make_schedule(
    uses: Iterable[Action],
    *,
    num_slots: int,
    prefetch: int,
    resident: frozenset[int] = frozenset(),
    on_gpu: frozenset[int] = frozenset(),
    updates: Mapping[int, Position] | None = None,
    offloads: Sequence[int] | None = None,
) -> Schedule:
    """The steady state of a pass of `uses` that repeats for ever, with `num_slots` slots.

    The pass begins with the layers that the previous pass left in the slots and did not update.

    prefetch   number of layers that are fetched ahead of the one that computes, at most
               num_slots - 1
    resident   layers that need no slot. They are fetched once a pass, after their update, when
               they come within reach
    on_gpu     resident layers whose update runs on the GPU. They are never fetched
    updates    the position of each trained layer's update; None: no layer trains
    offloads   the layers whose gradients came in an earlier pass, in order; None: every trained
               layer's gradients will come
    """
    uses, updates = tuple(uses), updates or {}
    if not uses:
        return Schedule(uses=(), steps=(), after=())
    expected = sorted(updates, reverse=True)
    if offloads is not None:
        expected = [layer for layer in offloads if layer in updates]
    planner = _Pass(
        uses=uses,
        num_slots=num_slots,
        prefetch=prefetch,
        resident=resident,
        updated=frozenset(expected),
        on_gpu=on_gpu,
    )
    start = frozenset[int]()
    _, end = planner.run(start)
    for _ in range(SETTLING_PASSES):  # the first pass starts with empty slots
        if start == end:
            break
        start = end
        _, end = planner.run(start)
    alternates = start != end  # no choice of one pass is its own successor
    while not start <= end:
        start &= end
        _, end = planner.run(start, keep=True)
    steps, end = planner.run(start, keep=alternates)
    steps[0] = _first_step(end - start, steps[0])
    after = _after_uses(uses, updates, expected)
    after[-1] += [Action(kind=Kind.RELEASE, layer=layer) for layer in sorted(planner.outdated)]
    return Schedule(uses=uses, steps=tuple(steps), after=tuple(map(tuple, after)))


def update_order(updates: Mapping[int, Position]) -> list[int]:
    """Layers in the order in which a step updates them."""
    early = [layer for layer in sorted(updates) if updates[layer] is Position.EARLY]
    behind_gate = [layer for layer in sorted(updates) if updates[layer] is Position.GATE]
    return [*reversed(early), *behind_gate]


def _after_uses(
    uses: tuple[Action, ...], updates: Mapping[int, Position], expected: Sequence[int]
) -> list[list[Action]]:
    """The actions that follow each use.

    A layer's gradients are complete after its last backward. A layer without a backward (embedding,
    head) comes with the layers around it in `expected`.
    """
    after: list[list[Action]] = [[] for _ in uses]
    last_backward = {use.layer: k for k, use in enumerate(uses) if use.kind is Kind.BACKWARD}
    first_end = min(last_backward.values(), default=len(uses))
    use_index = max(0, first_end - 1)
    for layer in expected:
        use_index = max(use_index, last_backward.get(layer, use_index))
        after[use_index].append(Action(kind=Kind.OFFLOAD, layer=layer))
        if updates[layer] is Position.EARLY:
            after[use_index].append(Action(kind=Kind.UPDATE, layer=layer))
    if updates:
        after[-1].append(GATE)
    for layer in sorted(expected):
        kind = Kind.COMMIT if updates[layer] is Position.EARLY else Kind.UPDATE
        after[-1].append(Action(kind=kind, layer=layer))
    return after


def _first_step(leftover: frozenset[int], step: tuple[Action, ...]) -> tuple[Action, ...]:
    """The first step of a pass whose predecessor left `leftover` in slots, too.

    It releases those of them that the step does not fetch, and fetches none of the others.
    """
    releases = [action for action in step if action.kind is Kind.RELEASE]
    fetches = [action for action in step if action.kind is Kind.FETCH]
    unneeded = leftover - {fetch.layer for fetch in fetches}
    return (
        *(Action(kind=Kind.RELEASE, layer=layer) for layer in sorted(unneeded)),
        *releases,
        *(fetch for fetch in fetches if fetch.layer not in leftover),
        step[-1],
    )


class _Pass:
    """Chooses the actions of one pass, from the layers in the slots when it begins.

    `outdated`: layers that the last pass left in slots, and whose weights it has `updated`.
    """

    def __init__(
        self,
        *,
        uses: tuple[Action, ...],
        num_slots: int,
        prefetch: int,
        resident: frozenset[int],
        updated: frozenset[int],
        on_gpu: frozenset[int],
    ) -> None:
        self.outdated = frozenset[int]()
        # Resident layers whose weights do not change stay as they are. An evaluation has no
        # updates, and knows nothing about those before it.
        unchanged = resident - updated if updated else frozenset[int]()
        self._steady = on_gpu | unchanged
        self._uses = uses
        self._updated = updated
        self._num_slots = num_slots
        # layers from the one that computes
        self._reach = 1 + max(0, min(prefetch, num_slots - 1))
        self._resident = resident
        self._kept: frozenset[int] = frozenset()
        self._positions: dict[int, list[int]] = {}
        for position, use in enumerate(uses):
            self._positions.setdefault(use.layer, []).append(position)

    def run(
        self, start: frozenset[int], *, keep: bool = False
    ) -> tuple[list[tuple[Action, ...]], frozenset[int]]:
        """Plan one pass that begins with the layers of `start` in slots.

        Returns the actions of every use, and the streamed layers that are in slots at the end with
        their newest weights. With `keep` the layers of `start` leave last among those that the pass
        no longer needs, so that it ends as it began. Resident layers that train are outdated when a
        pass begins, because they were updated.
        """
        present = {*start, *self._steady}
        self._kept = start if keep else frozenset(self._positions)
        steps = [self._actions(position, present) for position in range(len(self._uses))]
        in_slots = frozenset(present - self._resident)
        self.outdated = in_slots & self._updated
        return steps, in_slots - self._updated

    def _actions(self, position: int, present: set[int]) -> tuple[Action, ...]:
        """The actions before the use at `position`, and the use. Changes `present`, the layers
        whose newest weights are on the device."""
        ahead = _next_layers(self._uses, position, self._reach, self._resident)
        actions: list[Action] = []
        for layer in ahead:
            if layer in present:
                continue
            in_slots = present - self._resident
            if layer not in self._resident and len(in_slots) >= self._num_slots:
                victim = self._victim(position, in_slots.difference(ahead))
                present.remove(victim)
                actions.append(Action(kind=Kind.RELEASE, layer=victim))
            present.add(layer)
            actions.append(Action(kind=Kind.FETCH, layer=layer))
        return (*actions, self._uses[position])

    def _victim(self, position: int, candidates: Iterable[int]) -> int:
        """The layer whose next use lies farthest ahead; of equals the last one."""
        _, victim = max((self._distance(position, layer), layer) for layer in candidates)
        return victim

    def _distance(self, position: int, layer: int) -> int:
        """Number of uses from `position` until `layer` is needed again: cyclically, if it is
        kept."""
        positions = self._positions[layer]
        following = bisect_right(positions, position)
        if following < len(positions):
            return positions[following] - position
        num_passes = 1 if layer in self._kept else 2
        return positions[0] + num_passes * len(self._uses) - position


def _next_layers(
    uses: tuple[Action, ...], position: int, count: int, resident: frozenset[int]
) -> list[int]:
    """The next `count` distinct streamed layers, used from `position` on, cyclically.

    The list is in order of need. It includes the resident layers with a forward between them.
    """
    layers: dict[int, None] = {}
    num_streamed = 0
    for k in range(position - len(uses), position):
        use = uses[k]
        is_resident = use.layer in resident
        needs_no_fetch = is_resident and use.kind is not Kind.FORWARD
        if use.layer in layers or needs_no_fetch:
            continue
        layers[use.layer] = None
        if not is_resident:
            num_streamed += 1
        if num_streamed == count:
            break
    return list(layers)
