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
from operator import itemgetter
from typing import NamedTuple

from stronghold.errors import StateError
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.plan.cost import AGAIN, Demand, Workload, disk_s, owners
from stronghold.plan.machine import LEAST_SHARE, Rates
from stronghold.plan.plan import Plan

MAX_PIECES = 8  # of a layer in files: more would change the step by less than a per cent


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """One step in the steady state.

    step_s  seconds of the step
    busy    by lane: the share of the step in which it works
    waits   by lane: the share of the step in which compute waits for it. "launch" is the calling
            thread, "gradients" the lane of norms and sums
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

    def __str__(self) -> str:
        descending = sorted(self.shares.items(), key=itemgetter(1), reverse=True)
        shares = ", ".join(f"{lane} {share:.0%}" for lane, share in descending if share >= 0.005)
        return f"{self.step_s * 1e3:,.0f} ms per step: {shares}"


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
    steps = _StepClocks(layout, plan, work, rates, asynchronous=asynchronous)
    # One step settles, to 0.5 % where updates are early. Two count, because slots may alternate.
    begin_s = steps.run()
    steps.forget_shares()
    steps.run()
    both_s = steps.run() - begin_s
    # No step is faster than the disk alone. The rule for transfers that share it is generous.
    on_disk_s = 2 * disk_s(plan.traffic, rates.load_gbps, rates.spill_gbps, rates.io_gbps)
    if on_disk_s > both_s:
        steps.waits_s["load"] += on_disk_s - both_s
        both_s = on_disk_s
    return StepEstimate(
        step_s=both_s / 2,
        busy={lane: seconds / both_s for lane, seconds in steps.lanes.busy_s.items()},
        waits={lane: seconds / both_s for lane, seconds in steps.waits_s.items()},
    )


# -- lanes ----------------------------------------------------------------------------------------
class End(NamedTuple):
    """The end of an operation, and the lane that a later operation waits for.

    An operation and those that it waited for make a chain. `lane` is the lane of the longest one,
    which took `seconds`; "" if compute is the last of the chain.
    """

    at_s: float
    lane: str = ""
    seconds: float = 0.0


class _Transfer(NamedTuple):
    """A transfer between two times, at `rate` bytes/s."""

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
        # By lane: its rate alone, and beside each lane that shares the link or the disk.
        after_load, after_spill = rates.io_gbps - rates.load_gbps, rates.io_gbps - rates.spill_gbps
        gbps: dict[str, tuple[float, dict[str, float]]] = {
            "fetch": (rates.fetch_gbps, {"offload": rates.duplex_gbps - rates.offload_gbps}),
            "offload": (rates.offload_gbps, {"fetch": rates.duplex_gbps - rates.fetch_gbps}),
            "gradients": (rates.update_gbps, {}),
            "load": (rates.load_gbps, {"spill": after_spill, "stage": 0.0}),
            "stage": (rates.load_gbps, {"spill": after_spill, "load": 0.0}),
            "spill": (rates.spill_gbps, {"load": after_load, "stage": after_load}),
        }
        update_gbps = min(rates.update_gbps, rates.memory_gbps)
        gbps["update"] = (update_gbps, dict.fromkeys(gbps, rates.update_gbps))
        gbps["reduce"] = (rates.reduce_gbps, {})
        gbps["exchange"] = (rates.exchange_gbps, {"reduce": rates.exchange_gbps / 2})
        self._rates = {
            lane: (1e9 * alone, {other: 1e9 * rate for other, rate in beside.items()})
            for lane, (alone, beside) in gbps.items()
        }

    def move(self, lane: str, nbytes: float, *after: End) -> End:
        """Submit a transfer that waits for all of `after`. Returns its end."""
        last = max(after)
        free_s = self.free_s[lane]
        has_waited = last.at_s > free_s
        begin_s = now_s = max(free_s, last.at_s)
        alone, beside = self._rates[lane]
        others = [
            (other, rate) for name, rate in beside.items() for other in self._after(name, begin_s)
        ]
        if others:
            now_s = self._shared_end_s(lane, begin_s, nbytes, others)
        else:
            now_s += nbytes / alone
        if now_s > begin_s:
            self._transfers[lane].append(_Transfer(begin_s, now_s, nbytes / (now_s - begin_s)))
            self.busy_s[lane] += now_s - begin_s
        self.free_s[lane] = now_s
        if has_waited and last.seconds > now_s - begin_s:
            return End(now_s, last.lane, last.seconds)
        return End(now_s, lane, now_s - begin_s)

    def _shared_end_s(
        self, lane: str, begin_s: float, nbytes: float, others: list[tuple[_Transfer, float]]
    ) -> float:
        """The end of a transfer beside others, each of which leaves it a rate."""
        alone, _ = self._rates[lane]
        now_s, left = begin_s, nbytes
        edges = {time_s for other, _ in others for time_s in (other.begin_s, other.end_s)}
        for edge_s in (*sorted(edge_s for edge_s in edges if edge_s > begin_s), inf):
            running = [each for each in others if each[0].begin_s <= now_s < each[0].end_s]
            rate = min([alone, *(rate for _, rate in running)])
            if lane == "update":
                rate = min(rate, self._memory - sum(other.rate for other, _ in running))
            rate = max(rate, LEAST_SHARE * alone)
            if now_s + left / rate <= edge_s:
                break
            left -= (edge_s - now_s) * rate
            now_s = edge_s
        return now_s + left / rate

    def _after(self, lane: str, begin_s: float) -> list[_Transfer]:
        """The lane's transfers that end after `begin_s`. A lane's transfers end in order."""
        transfers: list[_Transfer] = []
        for transfer in reversed(self._transfers[lane]):
            if transfer.end_s <= begin_s:
                break
            transfers.append(transfer)
        return transfers


# -- bytes ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerBytes:
    """Bytes that one rank moves for a layer.

    fetched                weights over the link, in each pass
    gradients, reduced     gradients over the link, and from other ranks, in each micro-batch
    sums                   fp32 sums of gradients over micro-batches
    updated                memory that an update reads and writes
    exchanged              updated weights from other nodes
    stages_weights         a fetch reads the weights from files
    loaded, spilled        files that an update reads, and writes
    """

    fetched: float
    gradients: float
    reduced: float
    sums: float
    updated: float
    exchanged: float
    stages_weights: bool
    loaded: int
    spilled: int


def _largest_share(layout: ModelLayout, demand: Demand) -> float:
    """The part of all trained bytes that the rank with the most updates."""
    trained = [layer.gradient_bytes for layer in layout.layers]
    loads = [0] * demand.num_ranks
    for nbytes, owner in zip(trained, owners(trained, demand.num_ranks), strict=True):
        loads[owner] += nbytes
    return max(loads) / max(1, sum(loads)) if demand.num_ranks > 1 else 1.0


def _layer_bytes(layer: LayerLayout, plan: Plan, share: float) -> _LayerBytes:
    """`share` is the rank's part of the updates."""
    demand = plan.demand
    trained = layer.gradient_bytes
    staged = plan.in_files[layer.index]
    file_bytes = {array: int(layer.array_bytes(array) * share) for array in staged}
    in_update = file_bytes | {name: trained for name in staged if name == "weights"}
    if not trained:
        in_update = {}
    updated = layer.update_bytes
    if plan.accumulates:  # it reads sums in place of gradients
        updated += layer.array_bytes("accumulated") - trained
    return _LayerBytes(
        fetched=layer.weight_bytes,
        gradients=trained * share,
        reduced=trained if demand.num_ranks > 1 else 0.0,
        sums=layer.array_bytes("accumulated") * share,
        updated=updated * share,
        exchanged=trained / demand.ranks_per_node * (1 - 1 / demand.num_nodes),
        stages_weights="weights" in staged,
        loaded=sum(in_update.values()),
        spilled=sum(in_update.values()),
    )


# -- steps ----------------------------------------------------------------------------------------
class _Fetch(NamedTuple):
    """A fetch. `issued_s`: when its copy was queued on the stream."""

    end: End
    issued_s: float


NO_FETCH = _Fetch(End(0.0), 0.0)


class _StepClocks:
    """The operations of steps, in the order in which the engine submits them."""

    def __init__(
        self, layout: ModelLayout, plan: Plan, work: Workload, rates: Rates, *, asynchronous: bool
    ) -> None:
        self._layers, self._plan, self._work, self._rates = layout.layers, plan, work.layers, rates
        self._num_micro_batches = work.micro_batches
        self._asynchronous = asynchronous
        self.lanes = Lanes(rates)
        self.waits_s: dict[str, float] = defaultdict(float)
        self._launch_s = rates.launch_s
        share = _largest_share(layout, plan.demand)
        self._bytes = [_layer_bytes(layer, plan, share) for layer in layout.layers]
        self._blocks = [layer.index for layer in layout.layers if layer.streamed]
        self._streamed = [index for index in self._blocks if index not in plan.resident]
        self._thread_s = self._compute_s = 0.0  # clocks of the calling thread and of compute
        self._barrier = End(0.0)
        count = len(layout.layers)
        self._used_s = [0.0] * count  # end of the last compute with the layer
        self._gathered = [End(0.0)] * count  # its gradients are complete on the host
        self._updated = [End(0.0)] * count
        self._next_update = count  # updates of all layers before it are submitted
        self._is_early = [False] * count  # updated before the barrier of the last step
        self._fetched: dict[int, _Fetch] = {}  # layers on the device
        # by layer: when its fetch was asked for, and when its slot is free
        self._asked: dict[int, tuple[float, float]] = {}
        self._offloaded: dict[int, End] = {}  # activations on the host, by layer
        # the last use of each buffer
        self._gradient_slots = deque([End(0.0)] * max(1, plan.gradient_slots))
        self._ring = deque([End(0.0)] * plan.ring_entries)
        self._fetch_entries = deque([End(0.0)] * max(1, plan.staging.fetch_entries))
        self._update_entries = deque([End(0.0)] * max(1, plan.staging.update_entries))

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
    def _compute(self, index: int, seconds: float, launch_s: float, *fetches: _Fetch) -> None:
        """Compute with a layer, once the thread has launched it and all of `fetches` have ended."""
        cause = "launch"
        for fetch in fetches:  # the thread stands still until each is issued
            if fetch.issued_s > self._thread_s:
                self._thread_s, cause = fetch.issued_s, fetch.end.lane
        self._thread_s += launch_s
        self._wait(max([End(self._thread_s, cause), *(fetch.end for fetch in fetches)]))
        self._compute_s += seconds
        self.lanes.busy_s["compute"] += seconds
        self._used_s[index] = self._compute_s
        if not self._asynchronous:
            self._thread_s = self._compute_s

    def _wait(self, end: End) -> None:
        """Compute waits until `end`."""
        if end.at_s > self._compute_s:
            self.waits_s[end.lane] += end.at_s - self._compute_s
            self._compute_s = end.at_s
        if not self._asynchronous:
            self._thread_s = max(self._thread_s, self._compute_s)

    def _use_device_memory(self, nbytes: float) -> None:
        """Compute moves so many bytes of device memory."""
        seconds = nbytes / (self._rates.device_gbps * 1e9)
        self._compute_s += seconds
        self.lanes.busy_s["compute"] += seconds

    # -- forward ----------------------------------------------------------------------------------
    def _forward(self) -> None:
        for index, work in enumerate(self._work):
            for following in self._ahead(index):
                self._ask(following, leaving=min)
            self._update_through(index)
            self._fetch(index)
            fetch = self._fetched.get(index, NO_FETCH)
            self._compute(index, work.forward_s, self._launch_s, fetch)
            moved = self._moved_bytes(index)
            if moved:
                self._offloaded[index] = self.lanes.move("offload", moved, End(self._compute_s))

    def _ahead(self, index: int) -> Iterable[int]:
        """The layers from `index` on that are fetched now, in forward."""
        first = bisect_left(self._streamed, index)
        last = first + max(0, self._plan.window - 1)
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
        is_refreshed = index in plan.trained and index not in plan.updated_on_gpu
        if index in self._fetched or index in self._asked or (stays and not is_refreshed):
            return
        room_s = self._compute_s if stays else 0.0  # compute that was launched may still read it
        held = [each for each in (*self._fetched, *self._asked) if each not in plan.resident]
        if not stays and len(held) >= plan.window:
            victim = leaving(held)
            room_s = self._used_s[victim]
            del self._fetched[victim]
        self._asked[index] = self._thread_s + self._rates.handover_s, room_s

    def _fetch(self, index: int) -> None:
        """Fetch a layer that was asked for, once it is updated."""
        if index not in self._asked:
            return
        lanes, layer = self.lanes, self._bytes[index]
        asked_s, room_s = self._asked.pop(index)
        updated, room = self._updated[index], End(room_s)
        issued_s = max(asked_s, updated.at_s)
        if layer.stages_weights:
            count = self._num_pieces(layer.fetched)
            nbytes = layer.fetched / count
            for _ in range(count):
                entry = self._fetch_entries.popleft()
                staged = lanes.move("stage", nbytes, End(asked_s), updated, entry)
                end = lanes.move("fetch", nbytes, staged, room)
                self._fetch_entries.append(end)
            issued_s = staged.at_s
        else:
            end = lanes.move("fetch", layer.fetched, End(asked_s), updated, room)
        self._fetched[index] = _Fetch(end, issued_s)

    def _num_pieces(self, nbytes: float) -> int:
        pieces = ceil(nbytes / max(1, self._plan.staging.piece_bytes))
        return max(1, min(MAX_PIECES, pieces))

    # -- backward ---------------------------------------------------------------------------------
    def _backward(self, *, is_first: bool, is_last: bool) -> None:
        returning: dict[int, _Fetch] = {}
        before = dict(zip(self._blocks[1:], self._blocks, strict=False))
        for index in reversed(range(len(self._layers))):
            work, level = self._work[index], "keep"
            if self._layers[index].streamed:
                level = self._plan.activations[index]
                end = bisect_right(self._streamed, index)
                begin = max(0, end - max(1, self._plan.window))
                for following in reversed(self._streamed[begin:end]):
                    self._ask(following, leaving=max)
                    self._fetch(following)
                for block in (index, before.get(index, index)):
                    if block in self._offloaded:
                        returning[block] = self._bring_back(block)
            launch_s = self._launch_s
            if level in AGAIN:
                launch_s += self._rates.recompute_launch_s
            seconds = work.backward_s + work.recompute_s(level)
            fetches = (self._fetched.get(index, NO_FETCH), returning.pop(index, NO_FETCH))
            self._compute(index, seconds, launch_s, *fetches)
            if index in self._plan.trained:
                self._take_gradients(index, is_first=is_first, is_last=is_last)

    def _bring_back(self, index: int) -> _Fetch:
        """Fetch a layer's activations from the host."""
        launched = End(max(self._compute_s, self._thread_s))
        offloaded = self._offloaded.pop(index)
        end = self.lanes.move("fetch", self._moved_bytes(index), offloaded, launched)
        return _Fetch(end, self._thread_s)

    def _take_gradients(self, index: int, *, is_first: bool, is_last: bool) -> None:
        """Move a layer's gradients to the host, and into the norm or into the sums."""
        plan, lanes, layer = self._plan, self.lanes, self._bytes[index]
        if index in plan.updated_on_gpu:
            if plan.accumulates:
                self._use_device_memory(layer.gradients + layer.sums * (1 if is_first else 2))
            return
        is_shared = index not in plan.own_gradients
        if is_shared:
            self._wait(self._gradient_slots.popleft())
        complete = End(self._compute_s)
        if layer.reduced:
            complete = lanes.move("reduce", layer.reduced, complete)
        entry = self._ring.popleft() if plan.ring_entries else End(0.0)
        end = lanes.move("offload", layer.gradients, complete, entry)
        if is_shared:
            self._gradient_slots.append(end)
        if plan.accumulates:
            # a sum is read and written, and read once more for the norm
            summed_bytes = layer.gradients + layer.sums * (3 if is_last else 2)
            summed = self._gathered[index] = lanes.move("gradients", summed_bytes, end)
        else:
            self._gathered[index] = end
            summed = lanes.move("gradients", layer.gradients, end)
        self._barrier = max(self._barrier, summed)
        if plan.ring_entries:
            self._ring.append(summed)

    # -- updates ----------------------------------------------------------------------------------
    def _close_barrier(self) -> None:
        """The norm is known. An early update counts if it has begun. All others follow."""
        plan, lanes = self._plan, self.lanes
        on_gpu = sorted(plan.trained & plan.updated_on_gpu)
        self._use_device_memory(sum(self._bytes[index].gradients for index in on_gpu))
        computed_s = self._compute_s if on_gpu else 0.0
        barrier = max(self._barrier, End(max(self._thread_s, computed_s), "launch"))
        self._is_early = [False] * len(self._layers)
        for index in sorted(plan.early, reverse=True):
            gathered = self._gathered[index]
            if max(lanes.free_s["update"], gathered.at_s) >= barrier.at_s:
                break
            self._submit_update(index, gathered)
            self._is_early[index] = True
        self._wait(barrier)
        self._use_device_memory(sum(self._bytes[index].updated for index in on_gpu))
        self._thread_s = barrier.at_s if self._asynchronous else self._compute_s
        self._barrier = End(barrier.at_s)
        self._next_update = 0
        for index in plan.trained & self._fetched.keys():
            del self._fetched[index]  # the update outdates it

    def _update_through(self, index: int) -> None:
        """Submit the updates of all layers up to this one, if they are due."""
        plan = self._plan
        while self._next_update <= index:
            due = self._next_update
            self._next_update += 1
            is_on_host = due in plan.trained and due not in plan.updated_on_gpu
            if is_on_host and not self._is_early[due]:
                self._submit_update(due, self._barrier)

    def _submit_update(self, index: int, after: End) -> None:
        """Update a layer on the host, in pieces if it has arrays in files."""
        lanes, layer = self.lanes, self._bytes[index]
        if layer.loaded:
            count = self._num_pieces(layer.loaded)
            for _ in range(count):
                entry = self._update_entries.popleft()
                loaded = lanes.move("load", layer.loaded / count, after, entry)
                end = lanes.move("update", layer.updated / count, loaded)
                spilled = lanes.move("spill", layer.spilled / count, end)
                self._update_entries.append(spilled)
            if layer.stages_weights:  # a fetch reads what was spilled
                end = spilled
        else:
            end = lanes.move("update", layer.updated, after)
        if layer.exchanged:
            end = lanes.move("exchange", layer.exchanged, end)
        self._updated[index] = end
