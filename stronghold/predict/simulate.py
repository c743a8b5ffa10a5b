"""Predicts a step: the real executor on virtual clocks.

Owns the model of compute (how long each layer's forward and backward take, what they keep) and the
imitation of what a training step calls: hooks, backward, gate. Moves no byte and computes nothing.
The calling thread alone enters; a simulation takes milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stronghold.device.base import Fence
from stronghold.distributed.node_weights import SimulatedWeights
from stronghold.distributed.process_groups import simulated_ranks
from stronghold.errors import StateError
from stronghold.memory.slab import meta_slab
from stronghold.memory.staging import StagingRing
from stronghold.memory.stores import NullStore
from stronghold.memory.tiers import Tiers, extent_requests
from stronghold.model.layout import ModelLayout, Shards, condensed
from stronghold.native import ALIGNMENT
from stronghold.optim import DEFAULT
from stronghold.optim.contract import Group
from stronghold.plan.cost import AGAIN, Demand, Workload
from stronghold.plan.homes import Home
from stronghold.plan.machine import Rates
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Kind
from stronghold.plan.search import LADDERS, Choice, Ladder, Search
from stronghold.predict.simulated_device import Operation, SimulatedDevice
from stronghold.runtime.parts import assemble
from stronghold.runtime.runtime import Runtime
from stronghold.telemetry.metrics import Metrics

STEPS = 4  # from the third on a step begins as it ends
SIMULATED_PIECES = 8  # of a layer in files, at most
MEASURED = 2  # of the last ones: two alternate where the window holds an odd share
# Of every parameter: the numbers do not matter.
GROUP: Group = DEFAULT.hyperparameters({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step in the steady state: each lane's share of it, and seconds of it on the critical
    path; `bound` has the most of these. Peaks are of slots and slabs, activations excepted.
    `operations` are the last step's, with times of the simulation."""

    step_s: float
    busy: dict[str, float]
    critical: dict[str, float]
    bound: str
    gpu_peak_bytes: int
    host_peak_bytes: int
    operations: tuple[Operation, ...]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """The cycle collector rests: a simulation makes hundreds of thousands of objects that live as
    long as it does, and looking through them again and again took a fifth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collection()
def simulate(
    layout: ModelLayout,
    plan: Plan,
    workload: Workload,
    rates: Rates,
    *,
    asynchronous: bool = True,
) -> Prediction:
    """What a step of `plan` takes. `asynchronous`: the device is a GPU, not the emulated one."""
    if len(workload.layers) != len(layout.layers):
        raise StateError(f"simulate: {len(workload.layers)} loads for {len(layout.layers)} layers")
    run = _Run(condensed(layout), plan, workload, rates, asynchronous)
    ends = []
    for _ in range(STEPS):
        begun = len(run.device.operations)
        run.step()
        ends.append(run.device.compute_s)
    step_s = (ends[-1] - ends[-1 - MEASURED]) / MEASURED
    operations = run.device.operations
    critical = _critical(operations, ends[-1], ends[-1 - MEASURED])
    critical = {lane: seconds / MEASURED for lane, seconds in critical.items()}
    busy: dict[str, float] = defaultdict(float)
    for operation in operations:
        inside = min(operation.end_s, ends[-1]) - max(operation.start_s, ends[-1 - MEASURED])
        busy[operation.lane] += max(0.0, inside) / (MEASURED * step_s) if step_s > 0.0 else 0.0
    return Prediction(
        step_s=step_s,
        busy=dict(busy),
        critical=critical,
        bound=max(critical, key=lambda lane: critical[lane], default="compute"),
        gpu_peak_bytes=run.gpu_peak_bytes,
        host_peak_bytes=run.host.peak_bytes,
        operations=tuple(operations[begun:]),
    )


def fastest_plan(
    layout: ModelLayout,
    demand: Demand,
    workload: Workload,
    rates: Rates,
    *,
    asynchronous: bool = True,
    ladders: Sequence[Ladder] = LADDERS,
    near: Sequence[tuple[int, int]] = (),
) -> Choice:
    """The fastest plan for `demand`, by simulation: `Search.run`."""

    def predict(plan: Plan) -> Prediction:
        return simulate(layout, plan, workload, rates, asynchronous=asynchronous)

    return Search(layout, demand, workload, rates, predict, ladders).run(near)


class _Run:
    """The parts of one engine on a simulated device, and what calls them in a step."""

    def __init__(
        self,
        layout: ModelLayout,
        plan: Plan,
        workload: Workload,
        rates: Rates,
        asynchronous: bool,
    ) -> None:
        self._plan = plan
        self._work = workload
        self._layout = layout
        formats = plan.demand.formats
        self.device = device = SimulatedDevice(rates, asynchronous=asynchronous)
        self._parameters = [
            [
                nn.Parameter(
                    torch.empty(part.shape, dtype=formats[part.format].dtype, device="meta"),
                    requires_grad=part.trainable,
                )
                for part in layer.slices
            ]
            for layer in layout.layers
        ]
        weights = shards = None
        if plan.demand.num_ranks > 1:
            ranks = simulated_ranks(plan.demand.num_ranks, plan.demand.num_nodes)
            weights, shards = SimulatedWeights(layout, formats, ranks), ranks.shards
        parts = assemble(
            layout=layout,
            device=device,
            plan=plan,
            parameters=self._parameters,
            groups={
                p: (GROUP, DEFAULT)
                for of_layer in self._parameters
                for p in of_layer
                if p.requires_grad
            },
            kernels=device.kernels,
            metrics=Metrics(num_parameters=layout.num_parameters),
            tiers=_tiers(layout, plan, shards),
            undo=contextlib.ExitStack(),
            weights=weights,
            allocate=meta_slab,
        )
        self.host = parts.host
        self._runtime = Runtime(parts, plan)
        for index in range(len(layout.layers)):
            parts.adopt(index)
            self._runtime.executor.rest(index)
        self._runtime.settle()
        self._stored: dict[int, Fence] = {}
        self._coming: dict[int, Fence] = {}

    def step(self) -> None:
        """One optimizer step, as `engine` and `runtime.hooks` drive it."""
        for micro_batch in range(self._work.micro_batches):
            self._forward()
            boundary = micro_batch == self._work.micro_batches - 1
            self._runtime.begin_backward(boundary=boundary)
            self._backward()
            self._runtime.end_backward()
        self._runtime.close_gate(clipping=1.0, loss_scale=1.0, skip_on_overflow=True)

    @property
    def gpu_peak_bytes(self) -> int:
        return self.device.peak_bytes + self._runtime.kept_gradient_bytes

    def _forward(self) -> None:
        executor = self._runtime.executor
        executor.begin_forward_pass(training=True)
        for layer in self._layout.layers:
            index = layer.index
            executor.begin_use(index, Kind.FORWARD)
            seconds = self._work.layers[index].forward_s
            self.device.run_compute(f"forward {index}", seconds, self._launch_s)
            if self._moved(index):
                self._stored[index] = self.device.drain.submit(
                    f"offload {index}",
                    _nothing,
                    (self.device.record_compute("activations"),),
                    nbytes=self._moved(index),
                )
            executor.end_forward(index)
        executor.end_forward_pass()

    def _backward(self) -> None:
        executor = self._runtime.executor
        for layer in reversed(self._layout.layers):
            index, load = layer.index, self._work.layers[layer.index]
            if layer.streamed:
                executor.begin_use(index, Kind.BACKWARD)
                self._bring_back(index)
                following = executor.next_backward()
                if following is not None:
                    self._bring_back(following)
                if index in self._coming:
                    self.device.compute_wait(self._coming.pop(index))
            level, launch_s = self._level(index), self._launch_s
            if level in AGAIN:
                launch_s += self.device.rates.again_launch_s
            seconds = load.backward_s + load.again_s(level)
            self.device.run_compute(f"backward {index}", seconds, launch_s)
            for position, part in enumerate(layer.slices):
                if part.trainable:
                    parameter = self._parameters[index][position]
                    parameter.grad = torch.empty_like(parameter)
                    if not self._plan.whole:
                        executor.gradient_arrived(self.host.layers[index], position, parameter)

    @property
    def _launch_s(self) -> float:
        rates = self.device.rates
        return rates.whole_launch_s if self._plan.whole else rates.launch_s

    def _level(self, index: int) -> str:
        return self._plan.activations[index] if self._layout.layers[index].streamed else "keep"

    def _moved(self, index: int) -> int:
        return self._work.layers[index].moved_bytes(self._level(index))

    def _bring_back(self, index: int) -> None:
        stored = self._stored.pop(index, None)
        if stored is not None:
            after = (stored, self.device.record_compute("room for activations"))
            self._coming[index] = self.device.fetch.submit(
                f"onload {index}", _nothing, after, nbytes=self._moved(index)
            )


def _nothing() -> None:
    pass


def _tiers(layout: ModelLayout, plan: Plan, shards: Shards | None) -> Tiers:
    """Tiers without bytes. Where a layer takes many pieces they are simulated as few: the pipeline
    is the same, its ends a little coarser, and a simulation takes milliseconds again."""
    formats, homes, staging = plan.demand.formats, plan.homes, plan.staging
    by_layer: Counter[int] = Counter()
    stores: dict[Home, NullStore] = {}
    for home in homes.staged_homes:
        extents = extent_requests(layout, formats, homes, shards or Shards(), home)
        stores[home] = NullStore(extents)
        for extent in extents:
            by_layer[extent.layer] += extent.nbytes
    coarse = max(by_layer.values(), default=0) // SIMULATED_PIECES // ALIGNMENT * ALIGNMENT
    piece_bytes = max(staging.piece_bytes, coarse)
    ring = StagingRing(
        memory=meta_slab(staging.entries * piece_bytes, torch.uint8),
        piece_bytes=piece_bytes,
        num_updates=staging.update_entries,
        nbytes=staging.nbytes,
    )
    return Tiers(layout, formats, homes, stores, ring, shards=shards)


def _critical(operations: Sequence[Operation], end_s: float, since_s: float) -> dict[str, float]:
    """Seconds of each lane on the path of causes that ends with compute at `end_s`."""
    seconds: dict[str, float] = defaultdict(float)
    index, until_s = len(operations) - 1, end_s
    while index >= 0 and (operations[index].lane != "compute" or operations[index].end_s > end_s):
        index -= 1
    while index >= 0:
        operation = operations[index]
        begin_s = max(operation.start_s, since_s)
        seconds[operation.lane] += max(0.0, min(operation.end_s, until_s) - begin_s)
        if operation.start_s <= since_s:
            break
        index, until_s = operation.cause, operation.start_s
    return dict(seconds)
