"""The estimate: seconds of a step, by one pass over its operations with one clock for each lane.

Pure: no tensors, no threads. It takes milliseconds, and so a plan is chosen by comparing estimates.

[Note: clocks]

1. An operation starts when its lane is free and when all that it waits for has ended. A lane works
   in the order of submission. So the end of an operation is known when it is submitted.
2. The calling thread launches compute. On a GPU it runs ahead, and waits until the fetch of the
   next layer is queued on its stream. On the emulated device it computes itself.
3. The two directions of the link share its duplex rate. Loads and spills share the disk. The
   operation that was submitted first keeps its rate; a later one gets the rest while both run.
4. Updates on the host get the memory bandwidth that the other lanes leave.
5. The engine submits the updates behind the clip barrier at once, and fetches ahead of their use.
   Here forward submits both when it comes to the layer. The order on each lane is the same, and the
   transfers that run beside an update are known by then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, inf

from stronghold.errors import StateError
from stronghold.model.arrays import array_bytes
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.plan.cost import (
    AGAIN,
    SUM_BYTES,
    Workload,
    disk_s,
    step_bytes,
    trained_bytes,
    weight_bytes,
)
from stronghold.plan.machine import LEAST_SHARE, Rates
from stronghold.plan.plan import Plan

MAX_PIECES = 8  # of a layer in files: more would change the step by less than a per cent
GRADIENT_ARRAYS = ("gradients", "accumulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """One step in the steady state.

    step_s  seconds of the step
    busy    by lane: the share of the step in which it works
    waits   by lane: the share of the step in which compute waits for it. "launch" is the calling
            thread
    """

    step_s: float
    busy: dict[str, float]
    waits: dict[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """The step in shares: compute, and the lanes that it waits for."""
        return {"compute": 1.0 - sum(self.waits.values()), **self.waits}

    @property
    def bound(self) -> str:
        """The lane with the largest of `shares`."""
        return max(self.shares, key=self.shares.__getitem__)


def estimate(
    layout: ModelLayout, plan: Plan, work: Workload, rates: Rates, *, asynchronous: bool = True
) -> StepEstimate:
    """Estimate a step of `plan`.

    work          seconds and bytes of each layer
    rates         rates of the lanes
    asynchronous  the device is a GPU, not the emulated one

    Raises StateError if the work has another number of layers.
    """
    if len(work.layers) != len(layout.layers):
        raise StateError(f"estimate: work of {len(work.layers)} layers for {len(layout.layers)}")
    steps = _Steps(layout, plan, work, rates, asynchronous=asynchronous)
    # Two steps settle. Two count, because slots may alternate.
    steps.run()
    begin_s = steps.run()
    steps.forget_shares()
    steps.run()
    on_disk_s = disk_s(plan.traffic, rates.load_gbps, rates.spill_gbps, rates.io_gbps)
    both_s = max(steps.run() - begin_s, 2 * on_disk_s)
    return StepEstimate(
        step_s=both_s / 2,
        busy={lane: seconds / both_s for lane, seconds in steps.lanes.busy_s.items()},
        waits={lane: seconds / both_s for lane, seconds in steps.waits_s.items()},
    )


# -- lanes ----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Transfer:
    """Bytes that a lane moved between two times, at `rate` bytes/s."""

    begin_s: float
    end_s: float
    rate: float


class Lanes:
    """The clocks of the lanes that move bytes ([Note: clocks])."""

    def __init__(self, rates: Rates) -> None:
        self.free_s: dict[str, float] = defaultdict(float)
        self.busy_s: dict[str, float] = defaultdict(float)
        self._transfers: dict[str, list[_Transfer]] = defaultdict(list)
        self._memory = rates.memory_gbps * 1e9
        beside_fetch, beside_offload = (
            rates.duplex_gbps - rates.fetch_gbps,
            rates.duplex_gbps - rates.offload_gbps,
        )
        beside_load, beside_spill = (
            rates.io_gbps - rates.load_gbps,
            rates.io_gbps - rates.spill_gbps,
        )
        # By lane: its rate alone, and beside each lane that shares its resource.
        gbps: dict[str, tuple[float, dict[str, float]]] = {
            "fetch": (rates.fetch_gbps, {"offload": beside_offload}),
            "offload": (rates.offload_gbps, {"fetch": beside_fetch}),
            "gradients": (rates.update_gbps, {}),
            "load": (rates.load_gbps, {"spill": beside_spill, "stage": 0.0}),
            "stage": (rates.load_gbps, {"spill": beside_spill, "load": 0.0}),
            "spill": (rates.spill_gbps, {"load": beside_load, "stage": beside_load}),
        }
        gbps["update"] = (rates.update_gbps, dict.fromkeys(gbps, rates.update_gbps))
        gbps["gather"] = (rates.wire_gbps, {})
        gbps["reduce"] = (rates.reduce_gbps, {})
        gbps["exchange"] = (rates.exchange_gbps, {"reduce": rates.exchange_gbps / 2})
        self._rates = {
            lane: (1e9 * alone, {other: 1e9 * rate for other, rate in beside.items()})
            for lane, (alone, beside) in gbps.items()
        }

    def move(self, lane: str, nbytes: float, *after_s: float) -> float:
        """Submit a transfer that waits for the times `after_s`. Returns its end."""
        begin_s = now_s = max(self.free_s[lane], *after_s)
        alone, beside = self._rates[lane]
        others = [
            (other, rate) for name, rate in beside.items() for other in self._after(name, begin_s)
        ]
        edges = {time_s for other, _ in others for time_s in (other.begin_s, other.end_s)}
        left = nbytes
        for edge_s in (*sorted(edge_s for edge_s in edges if edge_s > begin_s), inf):
            running = [each for each in others if each[0].begin_s <= now_s < each[0].end_s]
            rate = min([alone, *(rate for _, rate in running)])
            if lane == "update":
                rate = min(rate, self._memory - sum(other.rate for other, _ in running))
            rate = max(rate, LEAST_SHARE * alone)
            if now_s + left / rate <= edge_s:
                now_s += left / rate
                break
            left -= (edge_s - now_s) * rate
            now_s = edge_s
        if now_s > begin_s:
            self._transfers[lane].append(_Transfer(begin_s, now_s, rate=nbytes / (now_s - begin_s)))
            self.busy_s[lane] += now_s - begin_s
        self.free_s[lane] = now_s
        return now_s

    def _after(self, lane: str, begin_s: float) -> list[_Transfer]:
        """The lane's transfers that end after `begin_s`. A lane's transfers end in order."""
        found: list[_Transfer] = []
        for transfer in reversed(self._transfers[lane]):
            if transfer.end_s <= begin_s:
                break
            found.append(transfer)
        return found


# -- bytes ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerBytes:
    """Bytes that one rank moves for a layer: `fetched` weights and what it `gathered` of other
    ranks', in each pass; `gradients` and the `reduced` ones of other ranks, in each micro-batch;
    `updated`, `exchanged`, and files, once a step. `sums` are those of accumulated gradients."""

    fetched: float
    gathered: float
    gradients: float
    reduced: float
    sums: float
    updated: float
    exchanged: float
    stages_weights: bool  # a fetch reads them from files
    gathers_in_files: int  # bytes of gradients that go to files as they come
    loaded: int
    spilled: int


def _layer_bytes(layer: LayerLayout, plan: Plan) -> _LayerBytes:
    demand = plan.demand
    formats, num_ranks, num_nodes = demand.formats, demand.num_ranks, demand.num_nodes
    on_node = demand.sharers("weights")
    weights, trained = weight_bytes(layer, formats), trained_bytes(layer, formats)
    staged = plan.homes.staged(layer.index)
    file_bytes = {
        array: array_bytes(layer, formats, array, demand.sharers(array)) for array in staged
    }
    in_update = file_bytes | {name: trained for name in staged if name == "weights"}
    if not layer.trainable_numel:
        in_update = {}
    updated = step_bytes(layer, formats)
    if plan.accumulates:  # it reads sums in place of gradients
        updated += SUM_BYTES * layer.num_trainable - trained
    kept = sum(nbytes for array, nbytes in in_update.items() if array in GRADIENT_ARRAYS)
    return _LayerBytes(
        fetched=weights / on_node,
        gathered=weights * (1 - 1 / on_node),
        gradients=trained / num_ranks,
        reduced=trained * (1 - 1 / num_ranks),
        sums=SUM_BYTES * layer.num_trainable / num_ranks,
        updated=updated / num_ranks,
        exchanged=trained / on_node * (1 - 1 / num_nodes),
        stages_weights="weights" in staged,
        gathers_in_files=kept,
        loaded=sum(in_update.values()),
        spilled=sum(in_update.values()) - kept,
    )


# -- steps ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Fetched:
    """A layer's weights on the device: from when on, since when a stream may wait for them, and the
    lane that decided it."""

    end_s: float
    issued_s: float
    cause: str


NEVER = _Fetched(0.0, 0.0, "")


class _Steps:
    """The operations of steps, in the order in which the engine submits them."""

    def __init__(
        self, layout: ModelLayout, plan: Plan, work: Workload, rates: Rates, *, asynchronous: bool
    ) -> None:
        self._layers, self._plan, self._work, self._rates = layout.layers, plan, work.layers, rates
        self._num_micro_batches = work.micro_batches
        self._asynchronous = asynchronous
        self.lanes = Lanes(rates)
        self.waits_s: dict[str, float] = defaultdict(float)
        self._launch_s = rates.whole_launch_s if plan.whole else rates.launch_s
        of_layers: dict[object, _LayerBytes] = {}  # layers with equal ranges are alike
        self._bytes: list[_LayerBytes] = []
        for layer in layout.layers:
            key = (layer.ranges, plan.homes.row(layer.index))
            if key not in of_layers:
                of_layers[key] = _layer_bytes(layer, plan)
            self._bytes.append(of_layers[key])
        self._blocks = [layer.index for layer in layout.layers if layer.streamed]
        self._streamed = [index for index in self._blocks if index not in plan.resident]
        # Clocks: of the calling thread, and of compute.
        self._thread_s = self._compute_s = self._barrier_s = 0.0
        count = len(layout.layers)
        self._used_s = [0.0] * count  # end of the last compute with the layer
        self._gathered_s = [0.0] * count  # its gradients are complete on the host
        self._updated: list[tuple[float, str]] = [(0.0, "update")] * count
        self._next_update = count  # updates of all layers before it are submitted
        self._is_early = [False] * count  # updated before the barrier of the last step
        self._here: dict[int, _Fetched] = {}
        # by layer: when its fetch was asked for, and when its slot is free
        self._asked: dict[int, tuple[float, float]] = {}
        self._away_s: dict[int, float] = {}  # activations on the host, by layer
        self._gradient_slots = deque([0.0] * max(1, plan.gradient_slots))  # when each is free
        self._ring = deque([0.0] * plan.ring_entries)
        self._staged = deque([0.0] * max(1, plan.staging.fetch_entries))
        self._pieces = deque([0.0] * max(1, plan.staging.update_entries))

    def run(self) -> float:
        """Run a step. Returns the end of its compute."""
        for number in range(self._num_micro_batches):
            self._forward()
            self._backward(is_first=number == 0, is_last=number == self._num_micro_batches - 1)
        self._close_barrier()
        return self._compute_s

    def forget_shares(self) -> None:
        """Count the lanes' work and the waits from now on."""
        self.lanes.busy_s.clear()
        self.waits_s.clear()

    # -- compute ----------------------------------------------------------------------------------
    def _compute(self, index: int, seconds: float, launch_s: float, *ready: _Fetched) -> None:
        """Compute with a layer, once the thread has launched it and all of `ready` is there."""
        self._thread_s = max([self._thread_s, *(fetched.issued_s for fetched in ready)])
        self._thread_s += launch_s
        last_s, cause = self._thread_s, "launch"
        for fetched in ready:
            if fetched.end_s > last_s:
                last_s, cause = fetched.end_s, fetched.cause
        # the thread stood still until a fetch was issued
        issued = max(ready, key=lambda fetched: fetched.issued_s, default=NEVER)
        if cause == "launch" and issued.issued_s + launch_s >= last_s:
            cause = issued.cause or cause
        self._wait(last_s, cause)
        self._compute_s += seconds
        self.lanes.busy_s["compute"] += seconds
        self._used_s[index] = self._compute_s
        if not self._asynchronous:
            self._thread_s = self._compute_s

    def _wait(self, until_s: float, cause: str) -> None:
        """Compute waits."""
        if until_s > self._compute_s:
            self.waits_s[cause] += until_s - self._compute_s
            self._compute_s = until_s
        if not self._asynchronous:
            self._thread_s = max(self._thread_s, self._compute_s)

    def _use_device_memory(self, nbytes: float) -> None:
        """Compute moves so many bytes of device memory."""
        seconds = nbytes / (self._rates.device_gbps * 1e9)
        self._compute_s += seconds
        self.lanes.busy_s["compute"] += seconds

    # -- forward ----------------------------------------------------------------------------------
    def _forward(self) -> None:
        for index, load in enumerate(self._work):
            for near in self._ahead(index):
                self._ask(near, leaving=min)
            self._update_through(index)
            self._fetch(index)
            ready = self._here.get(index, NEVER)
            self._compute(index, load.decode_s + load.forward_s, self._launch_s, ready)
            moved = self._moved_bytes(index)
            if moved:
                self._away_s[index] = self.lanes.move("offload", moved, self._compute_s)

    def _ahead(self, index: int) -> Iterable[int]:
        """The layers from `index` on that are fetched now, in forward."""
        first = bisect_left(self._streamed, index)
        last = first + self._plan.prefetch
        if last < len(self._streamed):
            return range(index, self._streamed[last] + 1)
        return range(index, len(self._layers))

    def _moved_bytes(self, index: int) -> int:
        """Bytes of the layer's activations that go to the host and come back."""
        if not self._layers[index].streamed:
            return 0
        return self._work[index].moved_bytes(self._plan.activations[index])

    def _ask(self, index: int, leaving: Callable[[Iterable[int]], int]) -> None:
        """Ask for a layer's fetch, if it is not there. If no slot is free, the layer `leaving` is
        released: the one whose next use is farthest."""
        plan = self._plan
        stays = index in plan.resident
        is_refreshed = index in plan.updates and index not in plan.updated_on_gpu
        if index in self._here or index in self._asked or (stays and not is_refreshed):
            return
        room_s = self._compute_s if stays else 0.0  # compute that was launched may still read it
        held = [each for each in (*self._here, *self._asked) if each not in plan.resident]
        if not stays and len(held) >= plan.window:
            victim = leaving(held)
            room_s = self._used_s[victim]
            del self._here[victim]
        self._asked[index] = self._thread_s + self._rates.handover_s, room_s

    def _fetch(self, index: int) -> None:
        """Fetch a layer that was asked for, once it is updated."""
        if index not in self._asked:
            return
        lanes, layer = self.lanes, self._bytes[index]
        asked_s, room_s = self._asked.pop(index)
        updated_s, updated_by = self._updated[index]
        cause = "fetch"
        if updated_s > max(lanes.free_s["fetch"], room_s, asked_s):
            cause = updated_by
        issued_s = max(asked_s, updated_s)
        if layer.stages_weights:
            cause = "stage" if cause == "fetch" else cause
            count = self._num_pieces(layer.fetched)
            for _ in range(count):
                entry_s = self._staged.popleft()
                issued_s = lanes.move("stage", layer.fetched / count, issued_s, entry_s)
                self._staged.append(lanes.move("fetch", layer.fetched / count, issued_s, room_s))
        else:
            lanes.move("fetch", layer.fetched, issued_s, room_s)
        end_s = lanes.free_s["fetch"]
        if layer.gathered:
            end_s = lanes.move("gather", layer.gathered, end_s)
            cause = "gather" if cause == "fetch" else cause
        self._here[index] = _Fetched(end_s, issued_s, cause)

    def _num_pieces(self, nbytes: float) -> int:
        pieces = ceil(nbytes / max(1, self._plan.staging.piece_bytes))
        return max(1, min(MAX_PIECES, pieces))

    # -- backward ---------------------------------------------------------------------------------
    def _backward(self, *, is_first: bool, is_last: bool) -> None:
        back: dict[int, _Fetched] = {}
        before = dict(zip(self._blocks[1:], self._blocks, strict=False))
        for index in reversed(range(len(self._layers))):
            load, level = self._work[index], "keep"
            if self._layers[index].streamed:
                level = self._plan.activations[index]
                last = bisect_right(self._streamed, index)
                for near in reversed(self._streamed[max(0, last - 1 - self._plan.prefetch) : last]):
                    self._ask(near, leaving=max)
                    self._fetch(near)
                for near in (index, before.get(index, index)):
                    if near in self._away_s:
                        back[near] = self._bring_back(near)
            launch_s = self._launch_s
            if level in AGAIN:
                launch_s += self._rates.recompute_launch_s
            seconds = load.decode_s + load.backward_s + load.recompute_s(level)
            ready = (self._here.get(index, NEVER), back.pop(index, NEVER))
            self._compute(index, seconds, launch_s, *ready)
            if index in self._plan.updates:
                self._take_gradients(index, is_first=is_first, is_last=is_last)

    def _bring_back(self, index: int) -> _Fetched:
        """Fetch a layer's activations from the host."""
        after_s = (self._away_s.pop(index), self._compute_s, self._thread_s)
        end_s = self.lanes.move("fetch", self._moved_bytes(index), *after_s)
        return _Fetched(end_s, self._thread_s, "fetch")

    def _take_gradients(self, index: int, *, is_first: bool, is_last: bool) -> None:
        """Move a layer's gradients to the host, and into the norm or into the sums."""
        plan, lanes, layer = self._plan, self.lanes, self._bytes[index]
        if index in plan.updated_on_gpu:
            if plan.accumulates:
                self._use_device_memory(layer.gradients + layer.sums * (1 if is_first else 2))
            return
        is_shared = index not in plan.own_gradients
        if is_shared:
            self._wait(self._gradient_slots.popleft(), "offload")
        after_s = self._compute_s
        if layer.reduced:
            after_s = lanes.move("reduce", layer.reduced, after_s)
        entry_s = self._ring.popleft() if plan.ring_entries else 0.0
        offloaded_s = lanes.move("offload", layer.gradients, after_s, entry_s)
        if is_shared:
            self._gradient_slots.append(offloaded_s)
        moved = layer.gradients
        if plan.accumulates:  # the last sum is read once more, for the norm
            moved += layer.sums * (3 if is_last else 2)
            if layer.gathers_in_files and not is_first:
                offloaded_s = lanes.move("load", layer.gathers_in_files, offloaded_s)
        summed_s = lanes.move("gradients", moved, offloaded_s)
        self._gathered_s[index] = summed_s if plan.accumulates else offloaded_s
        self._barrier_s = max(self._barrier_s, summed_s)
        if layer.gathers_in_files:
            summed_s = lanes.move("spill", layer.gathers_in_files, summed_s)
        if plan.ring_entries:
            self._ring.append(summed_s)

    # -- updates ----------------------------------------------------------------------------------
    def _close_barrier(self) -> None:
        """The norm is known. An early update counts if it has begun. All others follow."""
        plan, lanes = self._plan, self.lanes
        on_gpu = [index for index in plan.updates if index in plan.updated_on_gpu]
        self._use_device_memory(sum(self._bytes[index].gradients for index in on_gpu))
        barrier_s = max(self._barrier_s, self._thread_s, self._compute_s if on_gpu else 0.0)
        self._is_early = [False] * len(self._layers)
        for index in sorted(plan.early, reverse=True):
            if max(lanes.free_s["update"], self._gathered_s[index]) >= barrier_s:
                break
            self._submit_update(index, self._gathered_s[index])
            self._is_early[index] = True
        self._thread_s = self._barrier_s = barrier_s
        self._wait(barrier_s, "offload")
        self._use_device_memory(sum(self._bytes[index].updated for index in on_gpu))
        if not self._asynchronous:
            self._thread_s = self._compute_s
        self._next_update = 0
        outdated = plan.updates.keys() & self._here.keys()
        for index in outdated:
            del self._here[index]

    def _update_through(self, index: int) -> None:
        """Submit the updates of all layers up to this one, if they are due."""
        while self._next_update <= min(index, len(self._layers) - 1):
            due = self._next_update
            self._next_update += 1
            is_on_host = due in self._plan.updates and due not in self._plan.updated_on_gpu
            if is_on_host and not self._is_early[due]:
                self._submit_update(due, self._barrier_s)

    def _submit_update(self, index: int, after_s: float) -> None:
        """Update a layer on the host, in pieces if it has arrays in files."""
        lanes, layer = self.lanes, self._bytes[index]
        if not layer.loaded:
            end_s, cause = lanes.move("update", layer.updated, after_s), "update"
        else:
            count = self._num_pieces(layer.loaded)
            for _ in range(count):
                loaded_s = lanes.move("load", layer.loaded / count, after_s, self._pieces.popleft())
                cause = "load" if loaded_s > lanes.free_s["update"] else "update"
                end_s = lanes.move("update", layer.updated / count, loaded_s)
                self._pieces.append(lanes.move("spill", layer.spilled / count, end_s))
            if layer.stages_weights:  # a fetch reads what was spilled
                end_s, cause = self._pieces[-1], "spill"
        if layer.exchanged:
            end_s, cause = lanes.move("exchange", layer.exchanged, end_s), "exchange"
        self._updated[index] = end_s, cause
