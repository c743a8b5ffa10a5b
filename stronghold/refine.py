"""The plan, refined by what the first steps showed.

Owns the decision when to measure, and whether another plan is worth a change, which `Stack.replan`
makes between two steps. The training thread alone enters, at the end of each step.

[Note: which steps] In the first step memory is touched for the first time, and the schedule is
learnt in it: it tells nothing. The next ones are traced, and what their layers keep for backward is
counted. Then the search runs once, with the seconds and rates that were measured.

[Note: one plan] Several ranks change to one plan, or stay. They tell each other what they measured,
the first searches with the slowest of it, and all follow.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from stronghold.errors import BudgetError
from stronghold.plan.cost import (
    Demand,
    Gradients,
    Workload,
    measured_rates,
    measured_workload,
    slowest,
)
from stronghold.plan.machine import AGAIN_LAUNCH_S, LAUNCH_S, WHOLE_LAUNCH_S, Rates
from stronghold.plan.plan import Plan, activation_bytes, make_plan
from stronghold.predict.simulate import fastest_plan, simulate
from stronghold.runtime.runtime import Runtime
from stronghold.runtime.stack import Stack, pinned_activations, reserved_bytes

logger = logging.getLogger("stronghold")

UNTOLD_STEPS = 1
TRACED_STEPS = 2
# Of what the GPU has for this process, for slots and activations, once these are known: the rest is
# for workspaces and for what the allocator cannot use.
GPU_SHARE = 0.9
ADVISED = 0.9  # of the present step: what is worth the user's attention
WORTH = 0.97  # of the present plan's step: a change costs a settled device, and copies
# Of lanes that moved nothing while they were traced, in 1e9 bytes/s: a PCIe 4 link, a desktop's
# memory, one solid-state disk.
OTHERWISE = Rates(
    fetch_gbps=20.0,
    drain_gbps=20.0,
    duplex_gbps=35.0,
    update_gbps=40.0,
    memory_gbps=60.0,
    device_gbps=800.0,
    load_gbps=3.0,
    spill_gbps=2.0,
    io_gbps=4.0,
    launch_s=LAUNCH_S,
    whole_launch_s=WHOLE_LAUNCH_S,
    again_launch_s=AGAIN_LAUNCH_S,
)
# The emulated device computes in the calling thread: measured seconds have its launches in them.
EMULATED = replace(
    OTHERWISE,
    device_gbps=8.0,  # device memory is the host's
    launch_s=0.0,
    whole_launch_s=0.0,
    again_launch_s=0.0,
)


class Stage(Enum):
    """What the next step is for."""

    UNTOLD = "untold"
    TRACED = "traced"
    SETTLED = "settled"


class Refinement:
    """Refines the plan of `stack` once, if it leaves the search anything to choose. The user's
    trace, if there is one, goes on."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._tracing = stack.trace.recording
        self._asynchronous = stack.device.torch_device.type == "cuda"
        self._steps = 0
        self._first_span = 0
        is_open = _is_open(stack.demand) and not stack.plan.whole
        self.stage = Stage.UNTOLD if is_open else Stage.SETTLED

    def end_step(self) -> None:
        """A step has ended, and its updates are queued."""
        if self.stage is Stage.SETTLED:
            return
        self._steps += 1
        if self.stage is Stage.UNTOLD and self._steps == UNTOLD_STEPS:
            self._begin_tracing()
        elif self._steps == UNTOLD_STEPS + TRACED_STEPS:
            self.stage = Stage.SETTLED
            self._refine(self._stack.runtime)
            if not self._tracing:
                self._stack.device.record_spans(False)
                self._stack.trace.clear()

    def restart(self) -> None:
        """The buffers are new ones: what was being measured is measured from here on."""
        if self.stage is Stage.TRACED:
            self._steps = UNTOLD_STEPS
            self._begin_tracing()

    def _begin_tracing(self) -> None:
        self.stage = Stage.TRACED
        self._first_span = self._stack.trace.mark()
        self._stack.device.record_spans(True)
        # The first step is not like others, and before it the model may have been on the device.
        self._stack.device.restart_activation_peak()
        self._stack.runtime.activations.sizes.counting = True

    def _refine(self, runtime: Runtime) -> None:
        stack, sizes = self._stack, runtime.activations.sizes
        sizes.counting = False
        runtime.settle()
        stack.device.settle()
        spans = stack.trace.spans(self._first_span)
        rates = measured_rates(spans, OTHERWISE if self._asynchronous else EMULATED)
        workload = measured_workload(
            spans,
            stack.layout,
            activations=stack.plan.activations,
            saved_bytes=sizes.saved,
            boundary_bytes=sizes.boundary,
            attended=sizes.attended,
            micro_batches=stack.demand.micro_batches,
            num_steps=TRACED_STEPS,
        )
        device = stack.device
        reachable = device.reachable_bytes()
        if reachable is not None:
            reachable = max(0, reachable - reserved_bytes(but=stack)[0])
        memory = Memory(reachable, device.activation_peak_bytes(), sizes.least_chunks)
        # Weights change places with a plan, and an alias that somebody keeps would stay behind.
        kept = bool(runtime.executor.aliased(range(len(stack.parameters))))
        ranks = stack.ranks
        # [Note: one plan]
        found: Any = ranks.control.objects((rates, workload, memory, kept), "refining the plan")
        rates, workload = slowest([(each, work) for each, work, _, _ in found])
        memory = _least([of_rank for _, _, of_rank, _ in found])
        if any(of_rank for _, _, _, of_rank in found):
            logger.info("the plan stays as it is: something keeps aliases of weights")
            return
        plan = None
        if ranks.control.rank == 0:
            self._advise_chunks(workload, rates)
            plan = self._faster(workload, rates, memory)
        chosen: Any = ranks.control.objects(plan, "the refined plan")[0]
        plan = chosen and replace(chosen, cpu_threads=stack.plan.cpu_threads)
        if plan is None:
            return
        if stack.replan(plan):
            logger.info("refined after %d steps: %s", self._steps, stack.plan)
        else:
            logger.warning(
                "the plan stays as it is: of the %d bytes on the GPU that a faster one needs, "
                "others have taken some meanwhile",
                plan.gpu_total_bytes + plan.activation_bytes,
            )

    def _step_s(self, plan: Plan, workload: Workload, rates: Rates) -> float:
        """What a step of the plan is predicted to take."""
        layout, dtype = self._stack.layout, self._stack.dtype
        return simulate(
            layout, plan, workload, rates, dtype=dtype, asynchronous=self._asynchronous
        ).step_s

    def _advise_chunks(self, workload: Workload, rates: Rates) -> None:
        """Say, in figures, what one batch in chunks would take instead of micro-batches that are
        added up, where that is worth it. No plan chooses it, for it changes rounding."""
        stack, count = self._stack, self._stack.demand.micro_batches
        if count < 2 or stack.demand.chunk is not None:
            return
        demand = replace(_as_it_is(stack), accumulate=False, micro_batches=1, chunk=1, chunks=count)
        try:
            plan = make_plan(stack.layout, demand)
        except BudgetError:
            return
        predicted = self._step_s(plan, workload.together(), rates)
        present = self._step_s(stack.plan, workload, rates)
        if predicted < ADVISED * present:
            logger.info(
                "%d micro-batches that are added up take %.1f ms/step; as one batch in chunks they "
                "are predicted to take %.1f: multiply train_micro_batch_size_per_gpu by %d, set "
                "gradient_accumulation_steps to 1 and stronghold.chunk to the micro-batch of now "
                "(it changes rounding, and what head and loss take grows with the batch)",
                count,
                present * 1e3,
                predicted * 1e3,
                count,
            )

    def _faster(self, workload: Workload, rates: Rates, memory: Memory) -> Plan | None:
        """The plan to change to, or None."""
        stack = self._stack
        demand = (
            _known_demand(stack, workload, memory)
            if _layers_may_move(stack.demand)
            else _as_it_is(stack)
        )
        try:
            choice = fastest_plan(
                stack.layout,
                demand,
                workload,
                rates,
                dtype=stack.dtype,
                asynchronous=self._asynchronous,
            )
        except BudgetError as error:  # activations leave less than there was: the plan works
            logger.info("the plan stays as it is: %s", error)
            return None
        present_s = self._step_s(stack.plan, workload, rates)
        if not stack.plan.updated_on_gpu <= choice.plan.updated_on_gpu:
            return None
        if choice.forecast.step_s >= WORTH * present_s:
            return None
        logger.info(
            "a plan is predicted to take %.1f ms/step instead of %.1f",
            choice.forecast.step_s * 1e3,
            present_s * 1e3,
        )
        return choice.plan


class Memory(NamedTuple):
    """What a rank knows of its GPU in bytes: what its tensors can have in all, as things are now
    (None: unknown), and what others than the plan's buffers took at most."""

    reachable: int | None
    peak: int | None
    chunks: int  # of a micro-batch, at least


def _least(found: Sequence[Memory]) -> Memory:
    """What all ranks have room for."""
    known = all(memory.reachable is not None and memory.peak is not None for memory in found)
    return Memory(
        min(memory.reachable or 0 for memory in found) if known else None,
        max(memory.peak or 0 for memory in found) if known else None,
        min(memory.chunks for memory in found),
    )


def _known_demand(stack: Stack, workload: Workload, memory: Memory) -> Demand:
    """What the planner is asked once it is known what each block saves and what enters it, in
    bytes: activations take their part of the GPU's memory. The emulated device's are the host's:
    nothing is known of their budget."""
    section, measured = stack.section, memory.peak
    if memory.reachable is None or measured is None:
        return stack.demand
    budget = int(memory.reachable * GPU_SHARE)
    known = replace(
        stack.demand,
        activations=pinned_activations(section, stack.layout),
        gpu_budget_bytes=budget,
        kept=workload.layers,
        chunks=memory.chunks,
        reserve_bytes=0 if section.gpu_memory is None else budget - section.gpu_memory,
    )
    # What was in use beside the blocks' own: logits, the loss, the caller's tensors.
    beside = measured - activation_bytes(stack.layout, stack.plan.activations, known)
    outside = [layer.index for layer in stack.layout.layers if not layer.streamed]
    if outside and beside > 0:
        more, last = list(known.kept), outside[-1]
        more[last] = replace(more[last], saved_bytes=more[last].saved_bytes + beside)
        known = replace(known, kept=tuple(more))
    return known


def _as_it_is(stack: Stack) -> Demand:
    """The demand of the present plan, but for which updates are deferred."""
    plan, blocks = stack.plan, stack.layout.streamed
    return replace(
        stack.demand,
        window=plan.window or None,  # none where every block stays
        prefetch=plan.prefetch if plan.window else None,
        resident_layers=len(plan.resident.intersection(blocks)),
        resident_updates="gpu" if plan.updated_on_gpu else "host",
        activations=plan.activations,
        spilled=plan.spilled,
    )


def _is_open(demand: Demand) -> bool:
    """Whether anything is left to choose that the user did not pin."""
    if not demand.training:
        return False
    defers = demand.gradients is Gradients.RING and demand.deferred_layers is None
    return defers or _layers_may_move(demand)


def _layers_may_move(demand: Demand) -> bool:
    """Whether layers may stay on the device: there is a budget, and none has arrays in files."""
    pinned = (demand.window, demand.resident_layers, demand.activations)
    return not demand.nvme and demand.gpu_budget_bytes is not None and None in pinned
