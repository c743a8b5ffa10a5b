"""Prediction of a step: the real executor on virtual clocks.

Owns the model of compute: seconds of each layer's forward and backward, and the bytes that they
keep. Owns the imitation of a training step's calls: hooks, backward, gate. Moves no byte and
computes no number. The calling thread alone enters. A simulation takes milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stronghold.devices.base import Fence
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
from stronghold.optim.states import Formats
from stronghold.plan.cost import AGAIN, Demand, Workload
from stronghold.plan.homes import Home
from stronghold.plan.machine import Rates
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Kind
from stronghold.plan.search import LADDERS, Choice, Ladder, Search
from stronghold.predict.simulated_device import Operation, SimulatedDevice
from stronghold.streaming.parts import assemble
from stronghold.streaming.trainer import Runtime
from stronghold.telemetry.metrics import Metrics

NUM_STEPS = 4  # simulated; from the third on a step begins as it ends
# of the last steps: two alternate if the window holds an odd share of the layers
NUM_MEASURED = 2
MAX_PIECES = 8  # of a layer in files
# Hyper-parameters of every parameter: their values do not matter.
GROUP: Group = DEFAULT.hyperparameters({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step in the steady state.

    step_s          seconds of the step
    busy            by lane: its busy share of the step
    critical        by lane: seconds of the step on the critical path
    bound           the lane with the most of these
    gpu_peak_bytes  peak of the slots, without activations
    host_peak_bytes peak of the slabs, without activations
    operations      of the last step, in times of the simulation
    """

    step_s: float
    busy: dict[str, float]
    critical: dict[str, float]
    bound: str
    gpu_peak_bytes: int
    host_peak_bytes: int
    operations: tuple[Operation, ...]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Turn Python's cycle collector off.

    A simulation makes hundreds of thousands of objects, which live as long as it does. To search
    through them again and again took a fifth of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collection()
def simulate(
    layout: ModelLayout, plan: Plan, workload: Workload, rates: Rates, *, asynchronous: bool = True
) -> Prediction:
    """Predict a step of `plan`.

    workload      seconds and bytes of each layer
    rates         rates of the lanes
    asynchronous  the device is a GPU, not the emulated one

    Raises StateError if the workload has another number of layers.
    """
    if len(workload.layers) != len(layout.layers):
        raise StateError(f"simulate: {len(workload.layers)} loads for {len(layout.layers)} layers")
    run = _Run(condensed(layout), plan, workload, rates, asynchronous)
    ends = []
    for _ in range(NUM_STEPS):
        first_operation = len(run.device.operations)
        run.step()
        ends.append(run.device.compute_s)
    end_s = ends[-1]
    since_s = ends[-1 - NUM_MEASURED]
    step_s = (end_s - since_s) / NUM_MEASURED
    operations = run.device.operations
    critical = _critical_seconds(operations, end_s, since_s)
    critical = {lane: seconds / NUM_MEASURED for lane, seconds in critical.items()}
    return Prediction(
        step_s=step_s,
        busy=_busy_shares(operations, end_s, since_s),
        critical=critical,
        bound=max(critical, key=critical.__getitem__, default="compute"),
        gpu_peak_bytes=run.gpu_peak_bytes,
        host_peak_bytes=run.host.peak_bytes,
        operations=tuple(operations[first_operation:]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predictor:
    """Predicts plans of one workload."""

    layout: ModelLayout
    workload: Workload
    rates: Rates
    asynchronous: bool

    def predict(self, plan: Plan) -> Prediction:
        return simulate(
            self.layout, plan, self.workload, self.rates, asynchronous=self.asynchronous
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
    """Find the fastest plan for `demand` by simulation. `Search.run` has `ladders` and `near`."""
    predictor = _Predictor(layout=layout, workload=workload, rates=rates, asynchronous=asynchronous)
    search = Search(layout, demand, workload, rates, predictor.predict, ladders)
    return search.run(near)


class _Run:
    """The parts of one engine on a simulated device, and the calls of a step."""

    def __init__(
        self, layout: ModelLayout, plan: Plan, workload: Workload, rates: Rates, asynchronous: bool
    ) -> None:
        self._plan = plan
        self._workload = workload
        self._layout = layout
        self.device = SimulatedDevice(rates, asynchronous=asynchronous)
        self._parameters = _meta_parameters(layout, plan.demand.formats)
        trainable = [
            parameter
            for parameters in self._parameters
            for parameter in parameters
            if parameter.requires_grad
        ]
        weights = shards = None
        if plan.demand.num_ranks > 1:
            ranks = simulated_ranks(plan.demand.num_ranks, plan.demand.num_nodes)
            weights = SimulatedWeights(layout, plan.demand.formats, ranks)
            shards = ranks.shards
        parts = assemble(
            layout=layout,
            device=self.device,
            plan=plan,
            parameters=self._parameters,
            groups=dict.fromkeys(trainable, (GROUP, DEFAULT)),
            kernels=self.device.kernels,
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
        # By layer: fences of the offload of activations, and of their way back.
        self._offloaded: dict[int, Fence] = {}
        self._returning: dict[int, Fence] = {}

    def step(self) -> None:
        """Run one optimizer step with the calls of `engine` and `streaming.hooks`."""
        for micro_batch in range(self._workload.micro_batches):
            self._forward()
            boundary = micro_batch == self._workload.micro_batches - 1
            self._runtime.begin_backward(boundary=boundary)
            self._backward()
            self._runtime.end_backward()
        self._runtime.close_gate(clipping=1.0, loss_scale=1.0, skip_on_overflow=True)

    @property
    def gpu_peak_bytes(self) -> int:
        """Peak of the device's buffers, and of gradients that stay on the GPU."""
        return self.device.memory.peak_bytes + self._runtime.kept_gradient_bytes

    def _forward(self) -> None:
        executor = self._runtime.executor
        executor.begin_forward_pass(training=True)
        for layer in self._layout.layers:
            index = layer.index
            executor.begin_use(index, Kind.FORWARD)
            work = self._workload.layers[index]
            seconds = work.decode_s + work.forward_s
            self.device.run_compute(f"forward {index}", seconds, self._launch_s)
            if self._offloaded_bytes(index):
                self._offload(index)
            executor.end_forward(index)
        executor.end_forward_pass()

    def _backward(self) -> None:
        executor = self._runtime.executor
        for layer in reversed(self._layout.layers):
            index = layer.index
            if layer.streamed:
                executor.begin_use(index, Kind.BACKWARD)
                self._onload(index)
                following = executor.next_backward()
                if following is not None:
                    self._onload(following)
                if index in self._returning:
                    self.device.compute.wait(self._returning.pop(index))
            self._compute_backward(index)
            for position, part in enumerate(layer.slices):
                if part.trainable:
                    self._give_gradient(index, position)

    def _compute_backward(self, index: int) -> None:
        load = self._workload.layers[index]
        level = self._level(index)
        launch_s = self._launch_s
        if level in AGAIN:
            launch_s += self.device.rates.recompute_launch_s
        seconds = load.decode_s + load.backward_s + load.recompute_s(level)
        self.device.run_compute(f"backward {index}", seconds, launch_s)

    def _give_gradient(self, index: int, position: int) -> None:
        parameter = self._parameters[index][position]
        parameter.grad = torch.empty_like(parameter)
        if not self._plan.whole:
            state = self.host.layers[index]
            self._runtime.executor.gradient_arrived(state, position, parameter)

    @property
    def _launch_s(self) -> float:
        rates = self.device.rates
        return rates.whole_launch_s if self._plan.whole else rates.launch_s

    def _level(self, index: int) -> str:
        """The activation level of the layer."""
        is_streamed = self._layout.layers[index].streamed
        return self._plan.activations[index] if is_streamed else "keep"

    def _offloaded_bytes(self, index: int) -> int:
        """Bytes of the layer's activations that go to the host and come back."""
        return self._workload.layers[index].moved_bytes(self._level(index))

    def _offload(self, index: int) -> None:
        computed = self.device.compute.record("activations")
        self._offloaded[index] = self.device.offload.submit(
            f"offload {index}", _nothing, (computed,), nbytes=self._offloaded_bytes(index)
        )

    def _onload(self, index: int) -> None:
        """Bring the layer's activations back, if they are on the host."""
        offloaded = self._offloaded.pop(index, None)
        if offloaded is None:
            return
        has_room = self.device.compute.record("room for activations")
        self._returning[index] = self.device.fetch.submit(
            f"onload {index}", _nothing, (offloaded, has_room), nbytes=self._offloaded_bytes(index)
        )


def _meta_parameters(layout: ModelLayout, formats: Formats) -> list[list[nn.Parameter]]:
    """By layer and position: parameters on torch's meta device."""
    parameters = []
    for layer in layout.layers:
        of_layer = []
        for part in layer.slices:
            dtype = formats[part.format].dtype
            values = torch.empty(part.shape, dtype=dtype, device="meta")
            of_layer.append(nn.Parameter(values, requires_grad=part.trainable))
        parameters.append(of_layer)
    return parameters


def _nothing() -> None:
    pass


def _tiers(layout: ModelLayout, plan: Plan, shards: Shards | None) -> Tiers:
    """Tiers without bytes.

    A layer of many pieces is simulated in few larger ones. The pipeline is the same, and its ends
    are a little coarser. A simulation then takes milliseconds.
    """
    formats, homes, staging = plan.demand.formats, plan.homes, plan.staging
    by_layer: Counter[int] = Counter()
    stores: dict[Home, NullStore] = {}
    for home in homes.staged_homes:
        extents = extent_requests(layout, formats, homes, shards or Shards(), home)
        stores[home] = NullStore(extents)
        for extent in extents:
            by_layer[extent.layer] += extent.nbytes
    coarse = max(by_layer.values(), default=0) // MAX_PIECES // ALIGNMENT * ALIGNMENT
    piece_bytes = max(staging.piece_bytes, coarse)
    ring = StagingRing(
        memory=meta_slab(staging.entries * piece_bytes, torch.uint8),
        piece_bytes=piece_bytes,
        num_updates=staging.update_entries,
        nbytes=staging.nbytes,
    )
    return Tiers(layout, formats, homes, stores, ring, shards=shards)


def _busy_shares(operations: Sequence[Operation], end_s: float, since_s: float) -> dict[str, float]:
    """By lane: the share of the time from `since_s` to `end_s` in which it is busy."""
    shares: dict[str, float] = defaultdict(float)
    period_s = end_s - since_s
    for operation in operations:
        inside_s = min(operation.end_s, end_s) - max(operation.start_s, since_s)
        shares[operation.lane] += max(0.0, inside_s) / period_s if period_s > 0.0 else 0.0
    return dict(shares)


def _critical_seconds(
    operations: Sequence[Operation], end_s: float, since_s: float
) -> dict[str, float]:
    """Seconds of each lane on the path of causes that ends with compute at `end_s`.

    The path is followed back to `since_s`.
    """
    seconds: dict[str, float] = defaultdict(float)
    index = len(operations) - 1
    while index >= 0:
        last = operations[index]
        if last.lane == "compute" and last.end_s <= end_s:
            break
        index -= 1
    until_s = end_s
    while index >= 0:
        operation = operations[index]
        begin_s = max(operation.start_s, since_s)
        seconds[operation.lane] += max(0.0, min(operation.end_s, until_s) - begin_s)
        if operation.start_s <= since_s:
            break
        index = operation.cause
        until_s = operation.start_s
    return dict(seconds)
