"""The schedule: the ordered list of actions of one pass over the model, as data.

Pure: no tensors, no threads. Made from the order in which layers are used, the number of slots and
the positions of updates. `runtime.executor` performs the actions before each use, and
`runtime.optimizer_step` those behind a use. Printed and read as text, compared in tests.

A pass is a sequence of uses (forward of layer 0, ..., backward of layer 0) that repeats. Before
each use its actions say which slots to give back and what to fetch; a slot is given up by the layer
whose next use lies farthest ahead, which is the choice that fetches least (Belady, 1966). After a
backward come the offload of the layer's gradients, and its update if that is early. After the last
backward come the gate, and behind it, in forward order, a commit for each early update, and the
updates of all other layers. These outdate the slots, which are given back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

SETTLING_PASSES = 4  # after these the slots begin every pass alike, or never will


class Kind(Enum):
    """What an action does. FORWARD and BACKWARD wait for the layer's fetch and let compute go on.
    OFFLOAD copies gradients to the host. GATE waits for the norm of all gradients. UPDATE before
    the gate writes other memory, and COMMIT makes that memory the layer's. WITHDRAW leaves such
    an update to the gate: a step may do that, and no schedule has it."""

    RELEASE = "release"
    FETCH = "fetch"
    FORWARD = "forward"
    BACKWARD = "backward"
    OFFLOAD = "offload"
    UPDATE = "update"
    GATE = "gate"
    COMMIT = "commit"
    WITHDRAW = "withdraw"


BEHIND_USES = frozenset({Kind.OFFLOAD, Kind.UPDATE, Kind.GATE, Kind.COMMIT})


class Position(Enum):
    """Where a layer's update stands in a step. EARLY: out of place, when its gradients are on the
    host, before the norm is known. GATE: in place, when the norm is known, in forward order."""

    EARLY = "before the gate"
    GATE = "behind the gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One entry of the schedule; `str` and `parse` round-trip. The gate has no layer: -1."""

    kind: Kind
    layer: int = -1

    def __str__(self) -> str:
        return self.kind.value if self.kind is Kind.GATE else f"{self.kind.value} {self.layer}"

    @staticmethod
    def parse(text: str) -> Action:
        kind, _, layer = text.strip().partition(" ")
        return GATE if kind == GATE.kind.value else Action(kind=Kind(kind), layer=int(layer))


GATE = Action(kind=Kind.GATE)


def canonical_uses(layers: Sequence[int], *, backward: bool) -> tuple[Action, ...]:
    """Each layer once forward, in order, then (with `backward`) once backward in reverse."""
    uses = [Action(kind=Kind.FORWARD, layer=layer) for layer in layers]
    if backward:
        uses += [Action(kind=Kind.BACKWARD, layer=layer) for layer in reversed(layers)]
    return tuple(uses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`actions` of one pass. `steps[k]` are the actions of the k-th use, the use itself last;
    `after[k]` what follows it: offloads, updates, the gate and commits."""

    uses: tuple[Action, ...]
    steps: tuple[tuple[Action, ...], ...]
    after: tuple[tuple[Action, ...], ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        pairs = zip(self.steps, self.after, strict=True)
        return tuple(action for step, after in pairs for action in (*step, *after))

    @property
    def early(self) -> tuple[int, ...]:
        """The layers whose updates stand before the gate, in the order of these updates."""
        return tuple(a.layer for a in self._around_gate[0] if a.kind is Kind.UPDATE)

    @property
    def behind_gate(self) -> tuple[Action, ...]:
        """Commits, updates and releases behind the gate, in order."""
        return self._around_gate[1]

    @property
    def offloads(self) -> tuple[int, ...]:
        """The layers whose gradients are offloaded, in order."""
        return tuple(a.layer for a in self._around_gate[0] if a.kind is Kind.OFFLOAD)

    @property
    def _around_gate(self) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        behind_uses = [action for after in self.after for action in after]
        if GATE not in behind_uses:
            return tuple(behind_uses), ()
        at = behind_uses.index(GATE)
        return tuple(behind_uses[:at]), tuple(behind_uses[at + 1 :])

    def __str__(self) -> str:
        return "\n".join(str(action) for action in self.actions)


def parse_schedule(text: str) -> Schedule:
    """Inverse of `str(schedule)`."""
    steps: list[list[Action]] = []
    after: list[list[Action]] = []
    for action in map(Action.parse, text.splitlines()):
        if action.kind in BEHIND_USES or (after and GATE in after[-1]):
            after[-1].append(action)
            continue
        if len(steps) == len(after):
            steps.append([])
        steps[-1].append(action)
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            after.append([])
    return Schedule(
        uses=tuple(step[-1] for step in steps),
        steps=tuple(map(tuple, steps)),
        after=tuple(map(tuple, after)),
    )


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
    """The actions for `uses`, repeated for ever, with `num_slots` slots.

    `prefetch`: how many layers behind the one that computes are fetched ahead (at most
    num_slots - 1). Layers in `resident` need no slot; they are fetched once a pass, after their
    update, when they come within reach. Those of them that are updated `on_gpu` are never fetched.
    The steady state is returned: the pass that begins with
    what the previous one left in the slots, and has not updated. `updates`: of each layer that
    trains, where its update stands; None where nothing trains. `offloads`: the layers whose
    gradients came in an earlier pass, in order; None: every layer's will come.
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
    start, end = frozenset[int](), planner.run(frozenset())[1]
    for _ in range(SETTLING_PASSES):  # the first pass starts with empty slots
        if start == end:
            break
        start, end = end, planner.run(end)[1]
    takes_turns = start != end  # no choice of one pass is its own successor
    while not start <= end:
        start &= end
        end = planner.run(start, keep=True)[1]
    steps, end = planner.run(start, keep=takes_turns)
    steps[0] = _after(end - start, steps[0])
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
    """What follows each use. A layer's gradients are complete after its last backward. A layer that
    has none (embedding, head) comes with the layers around it in `expected`."""
    after: list[list[Action]] = [[] for _ in uses]
    last = {use.layer: k for k, use in enumerate(uses) if use.kind is Kind.BACKWARD}
    at = max(0, min(last.values(), default=len(uses)) - 1)
    for layer in expected:
        at = max(at, last.get(layer, at))
        after[at].append(Action(kind=Kind.OFFLOAD, layer=layer))
        if updates[layer] is Position.EARLY:
            after[at].append(Action(kind=Kind.UPDATE, layer=layer))
    after[-1] += [GATE] if updates else []
    for layer in sorted(expected):
        kind = Kind.COMMIT if updates[layer] is Position.EARLY else Kind.UPDATE
        after[-1].append(Action(kind=kind, layer=layer))
    return after


def _after(left: frozenset[int], step: tuple[Action, ...]) -> tuple[Action, ...]:
    """The pass's first step when its predecessor left these layers too: give back what the step
    does not need, and do not fetch the rest."""
    fetched = {action.layer for action in step if action.kind is Kind.FETCH}
    releases = [Action(kind=Kind.RELEASE, layer=layer) for layer in sorted(left - fetched)]
    releases += [action for action in step if action.kind is Kind.RELEASE]
    fetches = [a for a in step if a.kind is Kind.FETCH and a.layer not in left]
    return (*releases, *fetches, step[-1])


class _Pass:
    """Chooses the actions of one pass, from what is in the slots when it begins. `outdated`: what
    the last pass left in slots, and has `updated`."""

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
        # Residents whose weights do not change stay as they are; in an evaluation nothing is known
        # of what was updated before.
        self._steady = on_gpu | (resident - updated if updated else frozenset())
        self._uses, self._updated = uses, updated
        self._num_slots = num_slots
        self._reach = 1 + max(0, min(prefetch, num_slots - 1))
        self._resident = resident
        self._kept: frozenset[int] = frozenset()
        self._positions: dict[int, list[int]] = {}
        for position, use in enumerate(uses):
            self._positions.setdefault(use.layer, []).append(position)

    def run(
        self, start: frozenset[int], *, keep: bool = False
    ) -> tuple[list[tuple[Action, ...]], frozenset[int]]:
        """The actions of every use, and the streamed layers that are in slots at the end and have
        their newest weights.

        With `keep` the layers of `start` are the last to go of those that the pass is done with, so
        that it ends as it began. Resident layers that train are old when a pass begins: they were
        updated.
        """
        held = {*start, *self._steady}
        self._kept = start if keep else frozenset(self._positions)
        steps = [self._actions(position, held) for position in range(len(self._uses))]
        left = frozenset(held - self._resident)
        self.outdated = left & self._updated
        return steps, left - self._updated

    def _actions(self, position: int, held: set[int]) -> tuple[Action, ...]:
        ahead = _next_layers(self._uses, position, self._reach, self._resident)
        actions: list[Action] = []
        for layer in ahead:
            if layer in held:
                continue
            if layer not in self._resident and len(held - self._resident) >= self._num_slots:
                spare = [other for other in held - self._resident if other not in ahead]
                victim = max(spare, key=lambda other: (self._distance(position, other), other))
                held.remove(victim)
                actions.append(Action(kind=Kind.RELEASE, layer=victim))
            held.add(layer)
            actions.append(Action(kind=Kind.FETCH, layer=layer))
        return (*actions, self._uses[position])

    def _distance(self, position: int, layer: int) -> int:
        """Uses until `layer` is needed again, from `position` on: cyclically, if it is kept."""
        positions = self._positions[layer]
        following = bisect_right(positions, position)
        if following < len(positions):
            return positions[following] - position
        turns = 1 if layer in self._kept else 2
        return positions[0] + turns * len(self._uses) - position


def _next_layers(
    uses: tuple[Action, ...], position: int, count: int, resident: frozenset[int]
) -> list[int]:
    """The first `count` distinct streamed layers used from `position` on, cyclically, in order of
    need, and the resident ones that are used forward between them."""
    layers: dict[int, None] = {}
    num_streamed = 0
    for k in range(position - len(uses), position):
        use = uses[k]
        if use.layer in layers or (use.layer in resident and use.kind is not Kind.FORWARD):
            continue
        layers[use.layer] = None
        num_streamed += use.layer not in resident
        if num_streamed == count:
            break
    return list(layers)
