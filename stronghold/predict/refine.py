"""Refinement of the plan: by measurements of the first steps, and for larger batches.

Owns the decisions when to measure, whether another plan is worth a change, and how much room it
leaves. `Stack.replan` makes the change. The training thread enters, before each forward and at the
end of each step.

[Note: which steps]
    1. The first step is a warm-up. Memory is touched for the first time, and the executor learns
       the schedule: its times mean nothing.
    2. The next steps are traced. The bytes that their layers keep for backward are counted.
    3. The rules make a plan once, with the measured seconds and rates.

[Note: one plan] Several ranks change to one plan, or all stay.
    1. The ranks exchange their measurements.
    2. The first rank plans with the slowest of them.
    3. All ranks follow its choice.

[Note: larger batches] A refined plan fills the device. So a batch may find no room if it is larger
than those from which the plan was made. The rule:
    1. While all batches have one size, the plan has room for that size and no more, for full speed.
       The longest sequence that the model could take does not count.
    2. Once sizes differ, the plan has room for HEADROOM times the largest so far. But it has no
       room for longer sequences than the model takes (`max_position_embeddings`).
    3. The engine checks a batch before it runs. If by the measurements the plan has no room, the
       plan changes first, as in 2. If no plan has room, the one that takes least takes over, with a
       warning.
    4. The plan cannot change at once while a graph waits for its backward, while gradients wait for
       their step, while something keeps aliases of weights, or if there are other ranks. Then this
       forward keeps nothing that can be computed again. The plan changes before a later forward.
       Several ranks change together at the end of the step.
The memory of a larger batch is scaled from the measurements: with its elements, and with the square
of a sequence's length if a saved tensor has that length twice.

[Note: out of memory] Torch raises if that estimate was too low.
    1. In a forward: the graph dies with the call. Sums of earlier micro-batches are arrays of their
       layers, and stay. The step goes on.
    2. In a backward, and in a forward that it runs again: the step is given up, as for any
       exception. Its gradients so far are dropped, and the next micro-batch is the step's first.
       Its early updates are dropped, too: they wrote second arrays alone, and no layer has other
       weights.
    3. In a lane, or in an update on the device: a LaneError, which is final, as for any failure of
       theirs. Lanes copy between buffers that exist. An update takes some kilobytes.
In 1 and 2 the engine's call raises `OutOfMemoryError`, a subclass of torch's class, for programs
that catch it. The program and the error's traceback may still hold the graph. So the plan changes
before the next forward, to one with more room. The engine does not run the call again: the user's
code has changed counters, buffers and random numbers in it. After a backward that raised, one of
several ranks cannot go on alone: all end, as for any exception.
"""

from __future__ import annotations

import gc
import logging
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from stronghold.devices.base import OutOfMemoryError
from stronghold.errors import BudgetError
from stronghold.plan.cost import (
    Demand,
    Growth,
    LayerWork,
    Workload,
    measured_rates,
    measured_workload,
    slowest,
)
from stronghold.plan.estimate import estimate
from stronghold.plan.gpu_memory import activation_bytes
from stronghold.plan.machine import Rates, rates_of
from stronghold.plan.places import MIB
from stronghold.plan.plan import Plan, make_plan
from stronghold.plan.rules import fastest_plan, roomiest_plan
from stronghold.streaming.demand import pinned_activations
from stronghold.streaming.stack import Stack, reserved_bytes
from stronghold.streaming.trainer import Runtime
from stronghold.telemetry.metrics import BatchSize

logger = logging.getLogger("stronghold")

WARM_UP_STEPS = 1
TRACED_STEPS = 2
# Share of the GPU's memory for this process, without the allocator's fragments, that slots and
# activations may take once these are measured. The remainder is for modules that load later, and
# for differences between steps of one size.
GPU_SHARE = 0.9
# [Note: larger batches]: five changes of the plan from 512 tokens to 4096
HEADROOM = 1.5
RETRY_MARGIN = 1.5  # factor on an estimate of memory that turned out too low
MANY_FRAGMENTS = 0.05  # share of the device's memory from which the log has a hint
ADVICE_SHARE = 0.9  # of the present step: a shorter one is worth the user's attention
CHANGE_SHARE = 0.97  # of the present step: a change costs a settled device, and copies


class RefinementStage(Enum):
    """The purpose of the next step ([Note: which steps])."""

    WARM_UP = "warm-up"
    TRACED = "traced"
    SETTLED = "settled"


class RankMemory(NamedTuple):
    """A rank's GPU memory in bytes, after the measured steps.

    reachable     bytes that its tensors can have in all, as things are now. None: unknown
    peak          most bytes that tensors outside of the plan's buffers took. None: unknown
    chunks        least number of chunks of a micro-batch
    size          the largest batch that was measured
    largest       the largest batch so far
    sizes_differ  batches had different sizes
    """

    reachable: int | None
    peak: int | None
    chunks: int
    size: BatchSize = BatchSize()
    largest: BatchSize = BatchSize()
    sizes_differ: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of the traced steps, of all ranks.

    workload  seconds and bytes of each layer
    rates     rates of the lanes
    chunks    least number of chunks of a micro-batch
    size      the largest measured batch
    usable    bytes of the GPU for slots and activations. None: unknown
    beside    bytes of these that batches of `size` take outside of the plan's buffers and of the
              blocks' activations: logits, the loss, the program's tensors. None: unknown
    """

    workload: Workload
    rates: Rates
    chunks: int
    size: BatchSize
    usable: int | None
    beside: int | None

    def loads(self, size: BatchSize, margin: float) -> tuple[tuple[LayerWork, ...], int]:
        """Each layer's load with batches of another size, and the bytes that come beside them.

        `margin`: factor on the estimate.
        """
        growth = Growth.between(self.size, size, margin)
        loads = tuple(load.grown(growth) for load in self.workload.layers)
        beside = self.beside or 0
        has_squares = any(load.square_saved_bytes for load in self.workload.layers)
        square_beside = beside if has_squares else 0
        return loads, growth.of(beside, square_beside)


class Refinement:
    """Refines the plan of `stack` once, and changes it if a batch needs more room.

    It does nothing if the rules have nothing to choose. The user's trace goes on, if there is one.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._is_tracing_for_user = stack.trace.recording
        self._is_asynchronous = stack.device.torch_device.type == "cuda"
        self._num_steps = 0
        self._first_span = 0
        self.stage = RefinementStage.SETTLED
        if stack.machine is not None:  # the rules have something to choose
            self.stage = RefinementStage.WARM_UP
        # [Note: larger batches]
        self._makes_room = stack.demand.training and stack.demand.layers_may_move
        self._longest = _longest_sequence(stack.partition.model)
        self._measured_size = BatchSize()  # the largest batch in the traced steps
        self._largest = BatchSize()  # the largest batch so far
        self._sizes_differ = False
        self._measured: Measurements | None = None
        self._margin = 1.0  # factor on estimates of memory
        self._lacks_room = False  # memory ran out, and the plan has not changed since
        self._num_failures = stack.device.memory.num_failures()
        # By whether batches train: the largest that have room, and the largest that wait for it.
        self._roomy = {True: BatchSize(), False: BatchSize()}
        self._waiting = {True: BatchSize(), False: BatchSize()}
        self._may_warn = True  # once, of a batch for which no plan has room

    def end_step(self) -> None:
        """Measure, refine or make room, after a step whose updates are queued."""
        if self.stage is RefinementStage.SETTLED:
            if self._stack.ranks.several and self._knows_room:
                self._make_room_together()
            return
        self._num_steps += 1
        if self.stage is RefinementStage.WARM_UP and self._num_steps == WARM_UP_STEPS:
            self._begin_tracing()
        elif self._num_steps == WARM_UP_STEPS + TRACED_STEPS:
            self.stage = RefinementStage.SETTLED
            self._refine(self._stack.runtime)
            if not self._is_tracing_for_user:
                self._stack.device.record_spans(False)
                self._stack.trace.clear()

    def restart(self) -> None:
        """Start the measurements again: the buffers are new ones."""
        if self.stage is RefinementStage.TRACED:
            self._num_steps = WARM_UP_STEPS
            self._begin_tracing()

    def _begin_tracing(self) -> None:
        self.stage = RefinementStage.TRACED
        self._first_span = self._stack.trace.mark()
        self._stack.device.record_spans(True)
        # The warm-up's peak does not count: the model may have been on the device before it.
        self._stack.device.memory.restart_activation_peak()
        self._stack.runtime.activations.sizes.counting = True
        self._measured_size = BatchSize()

    # -- larger batches ---------------------------------------------------------------------------
    @property
    def _knows_room(self) -> bool:
        return self._measured is not None and self._measured.usable is not None

    def begin_forward(self, size: BatchSize, *, trains: bool, waits: bool) -> None:
        """Make room for a batch before its forward, if the plan has none ([Note: larger batches]).

        trains  the forward keeps a graph
        waits   an earlier graph waits for its backward, so that no layer may move
        """
        if not self._makes_room:
            return
        stack = self._stack
        if trains:
            self._sizes_differ |= self._largest not in (BatchSize(), size)
            self._largest = self._largest.maximum(size)
            if self.stage is RefinementStage.TRACED:
                self._measured_size = self._measured_size.maximum(size)
                stack.runtime.activations.sizes.length = size.length
        lacks_room = self._lacks_room or not self._has_room(size, trains=trains)
        may_change = not waits and stack.runtime.is_between_passes
        if lacks_room and stack.ranks.several:
            self._waiting[trains] = self._waiting[trains].maximum(size)
        elif lacks_room and may_change and not self._is_aliased():
            self._make_room(size, trains=trains)
            lacks_room = False
        stack.runtime.activations.spares = lacks_room and stack.section.activations is None

    def _is_aliased(self) -> bool:
        """True if something keeps aliases of weights: a change of plan would move the weights."""
        self._stack.runtime.settle()
        all_layers = range(len(self._stack.parameters))
        return bool(self._stack.runtime.executor.aliased(all_layers))

    def out_of_memory(self, call: str, error: torch.OutOfMemoryError) -> OutOfMemoryError:
        """The error that the engine's `call` raises in place of `error` ([Note: out of memory])."""
        # from an engine inside of this one's call
        if isinstance(error, OutOfMemoryError):
            return error
        traceback.clear_frames(error.__traceback__)  # they keep the call's tensors
        stack = self._stack
        planned = f"{stack.plan.gpu_total_bytes / MIB:,.1f} MiB for the model"
        remedy = "use a smaller batch, or shorter sequences"
        if self._can_leave_more():
            self._lacks_room = True
            when = "at the next step's end" if stack.ranks.several else "before the next forward"
            remedy = (
                f"the plan changes to one that leaves more room {when}, and the same batch may "
                f"train then; else {remedy}"
            )
        dropped = ""
        if call == "engine.backward":
            dropped = "; this step's gradients are dropped, and the next micro-batch is its first"
        return OutOfMemoryError(
            f"{stack.device.name} is out of memory. It was in {call}, by a plan with {planned}"
            f"{dropped}; {remedy}. Torch reports: {error}"
        )

    def note_failures(self) -> None:
        """Note for the next step if memory ran out in a step that was given up."""
        count, before = self._stack.device.memory.num_failures(), self._num_failures
        self._num_failures = count
        if count > before and self._can_leave_more():
            self._lacks_room = True

    def _can_leave_more(self) -> bool:
        return self._makes_room and self._roomiest() is not None

    def _loads(self, size: BatchSize) -> tuple[tuple[LayerWork, ...], int]:
        assert self._measured is not None
        return self._measured.loads(size, self._margin)

    def _need(self, plan: Plan, size: BatchSize, *, trains: bool) -> int:
        """Bytes of the GPU that `plan` and a batch take together."""
        assert self._measured is not None
        return plan.gpu_total_bytes + self._activation_bytes(plan, size, trains=trains)

    def _activation_bytes(self, plan: Plan, size: BatchSize, *, trains: bool) -> int:
        layout = self._stack.layout
        demand = self._demand(size)
        if trains:
            return activation_bytes(layout, plan.activations, demand)
        resident_bytes = sum(demand.work[index].saved_bytes for index in layout.resident)
        streamed_bytes = [demand.work[index].saved_bytes for index in layout.streamed]
        return resident_bytes + max(streamed_bytes, default=0)

    def _has_room(self, size: BatchSize, *, trains: bool) -> bool:
        """True if the present plan has room for the batch, or if its room is unknown."""
        if not self._knows_room or size.is_within(self._roomy[trains]):
            return True
        assert self._measured is not None
        assert self._measured.usable is not None
        size = size.maximum(self._roomy[trains])
        if self._need(self._stack.plan, size, trains=trains) > self._measured.usable:
            return False
        self._roomy[trains] = size
        return True

    def _with_headroom(self, size: BatchSize) -> BatchSize:
        """HEADROOM times the largest batch so far, unless the model takes no longer sequences."""
        largest = size.maximum(self._largest)
        factor = HEADROOM
        if self._longest is not None and largest.length:
            factor = min(factor, max(1.0, self._longest / largest.length))
        return BatchSize(*(math.ceil(factor * number) for number in largest))

    def _make_room(self, size: BatchSize, *, trains: bool) -> None:
        """Change to a plan with room for the batch, or to the plan that takes least."""
        stack = self._stack
        stack.runtime.ledger.check()
        if self._lacks_room:
            self._lacks_room = False
            self._margin *= RETRY_MARGIN
            self._roomy = dict.fromkeys(self._roomy, BatchSize())
            gc.collect()  # graphs that only cycles keep alive
            stack.device.memory.trim()
        choice: Any = None
        if stack.ranks.control.rank == 0:
            choice = self._plan_for(size, trains=trains)
        choice = stack.ranks.control.objects(choice, "a plan with more room")[0]
        if choice is not None:
            plan, room = choice
            stack.replan(replace(plan, cpu_threads=stack.plan.cpu_threads))
            self._roomy = dict.fromkeys(self._roomy, BatchSize())
            logger.info(
                "another plan, for a batch of %d tokens (%s): %s", size.tokens, room, stack.plan
            )
            self.restart()
        if self._may_warn and not self._has_room(size, trains=trains):
            self._may_warn = False
            logger.warning(
                "a batch of %d tokens may find no room on %s: by the measurements it takes more "
                "than the smallest plan leaves. If it does not train, use a smaller batch, or "
                "shorter sequences",
                size.tokens,
                stack.device.name,
            )
        self._num_failures = stack.device.memory.num_failures()
        # no other plan would have more
        self._roomy[trains] = self._roomy[trains].maximum(size)

    def _make_room_together(self) -> None:
        """Change the plan of all ranks if a batch of any rank found no room."""
        group = self._stack.ranks.control
        sizes_of_rank = [*self._waiting[True], *self._waiting[False]]
        lacks_room = self._lacks_room or any(sizes_of_rank)
        is_stuck = lacks_room and self._is_aliased()
        of_rank = torch.tensor([self._lacks_room, is_stuck, *sizes_of_rank]).to(torch.int64)
        of_all = group.numbers(of_rank, "sizes of batches")
        ran_out, any_stuck, *sizes_of_all = of_all.amax(dim=0).tolist()
        if any_stuck:  # weights of some rank have aliases: the plan stays
            return
        self._waiting = dict.fromkeys(self._waiting, BatchSize())
        width = len(BatchSize())
        sizes = {True: BatchSize(*sizes_of_all[:width]), False: BatchSize(*sizes_of_all[width:])}
        self._lacks_room = bool(ran_out)
        for trains, size in sizes.items():
            if trains:
                self._largest = self._largest.maximum(size)
            if self._lacks_room or not self._has_room(size, trains=trains):
                self._make_room(size, trains=trains)

    def _plan_for(self, size: BatchSize, *, trains: bool) -> tuple[Plan, str] | None:
        """The fastest plan with room for the batch, else the plan that takes least.

        Returns the plan, and its room in words for the log. None if no plan has more room than the
        present one.
        """
        if self._knows_room:
            for wanted in (self._with_headroom(size), size.maximum(self._largest)):
                plan = self._fastest_with_room(wanted, trains=trains)
                if plan is not None and self._takes_less(plan):
                    return plan, f"with room for {wanted.tokens}"
        plan = self._roomiest()
        if plan is None:
            return None
        return plan, "it takes the least that one can"

    def _fastest_with_room(self, size: BatchSize, *, trains: bool) -> Plan | None:
        stack, measured = self._stack, self._measured
        assert measured is not None
        demand = self._demand(size if trains else self._largest)
        if not trains:
            need = self._activation_bytes(stack.plan, size, trains=False)
            demand = replace(demand, reserve_bytes=max(demand.reserve_bytes, need))
        try:
            return fastest_plan(
                stack.layout,
                demand,
                measured.workload,
                measured.rates,
                asynchronous=self._is_asynchronous,
            ).plan
        except BudgetError:
            return None

    def _takes_less(self, plan: Plan) -> bool:
        """True if the plan leaves more room for a batch than the present one."""
        present = self._stack.plan
        if self._measured is None:
            return plan.gpu_total_bytes < present.gpu_total_bytes
        need = self._need(plan, self._largest, trains=True)
        present_need = self._need(present, self._largest, trains=True)
        return need < present_need

    def _roomiest(self) -> Plan | None:
        stack = self._stack
        demand = stack.demand if self._measured is None else self._demand(self._largest)
        try:
            plan = roomiest_plan(stack.layout, demand)
        # the host has no room for layers that would move back to it
        except BudgetError:
            return None
        return plan if self._takes_less(plan) else None

    def _demand(self, size: BatchSize) -> Demand:
        """The planner's question with batches of another size, from the measured bytes.

        Activations take their part of the GPU's memory. The emulated device's activations lie on
        the host, and their budget is unknown.
        """
        stack, measured = self._stack, self._measured
        assert measured is not None
        section, budget = stack.section, measured.usable
        if budget is None:
            return stack.demand
        loads, beside = self._loads(size)
        work = list(loads)
        not_streamed = [layer.index for layer in stack.layout.layers if not layer.streamed]
        if not_streamed:
            head = not_streamed[-1]
            saved_bytes = work[head].saved_bytes + beside
            work[head] = replace(work[head], saved_bytes=saved_bytes)
        return replace(
            stack.demand,
            activations=pinned_activations(section, stack.layout),
            gpu_budget_bytes=budget,
            work=tuple(work),
            chunks=measured.chunks,
            reserve_bytes=0 if section.gpu_memory is None else budget - section.gpu_memory,
        )

    # -- the refinement, once ---------------------------------------------------------------------
    def _refine(self, runtime: Runtime) -> None:
        """Plan with the measurements of all ranks, and change to a faster plan."""
        stack = self._stack
        sizes = runtime.activations.sizes
        sizes.counting = False
        runtime.settle()
        stack.device.settle()
        spans = stack.trace.spans(self._first_span)
        rates = measured_rates(spans, self._rates_at_start())
        workload = measured_workload(
            spans,
            stack.layout,
            activations=stack.plan.activations,
            saved_bytes=sizes.saved,
            boundary_bytes=sizes.boundary,
            attended=sizes.attended,
            square_saved_bytes=sizes.square_saved,
            square_boundary_bytes=sizes.square_boundary,
            micro_batches=stack.demand.micro_batches,
            num_steps=TRACED_STEPS,
        )
        device = stack.device
        memory = RankMemory(
            self._reachable_bytes(),
            device.memory.activation_peak_bytes(),
            sizes.least_chunks,
            self._measured_size,
            self._largest,
            self._sizes_differ,
        )
        is_aliased = self._is_aliased()
        ranks = stack.ranks
        # [Note: one plan]
        measured: Any = (rates, workload, memory, is_aliased)
        of_ranks: Any = ranks.control.objects(measured, "refining the plan")
        rates, workload = slowest([(rates, workload) for rates, workload, _, _ in of_ranks])
        memory = _least_room([memory for _, _, memory, _ in of_ranks])
        self._measured = _measurements(stack, workload, rates, memory)
        self._largest = memory.largest
        self._sizes_differ = memory.sizes_differ
        if any(is_aliased for _, _, _, is_aliased in of_ranks):
            logger.info("the plan stays as it is: something keeps aliases of weights")
            return
        chosen: Any = None
        if ranks.control.rank == 0:
            self._advise_chunks(workload, rates)
            chosen = self._faster(self._measured)
        chosen = ranks.control.objects(chosen, "the refined plan")[0]
        if chosen is None:
            return
        plan, room = chosen
        plan = replace(plan, cpu_threads=stack.plan.cpu_threads)
        if stack.replan(plan):
            logger.info("refined after %d steps%s: %s", self._num_steps, room, stack.plan)
        else:
            logger.warning(
                "the plan stays as it is: a faster one needs %d bytes on the GPU, and other "
                "programs have taken some of them meanwhile",
                plan.gpu_total_bytes + plan.activation_bytes,
            )
        self._num_failures = (
            device.memory.num_failures()
        )  # a failed trial of the plan does not count

    def _rates_at_start(self) -> Rates:
        """The machine's rates, for lanes that moved nothing in the traced steps."""
        stack = self._stack
        assert stack.machine is not None
        rates = rates_of(
            stack.machine,
            stack.plan.cpu_threads,
            sharing=stack.ranks.on_node.count,
            num_nodes=stack.ranks.num_nodes,
            states=stack.section.states,
        )
        if self._is_asynchronous:
            return rates
        # The emulated device computes in the calling thread: measured seconds have its launches.
        return replace(rates, launch_s=0.0, whole_launch_s=0.0, recompute_launch_s=0.0)

    def _reachable_bytes(self) -> int | None:
        """Bytes of the GPU that this engine's tensors can have in all. None: unknown."""
        reachable = self._stack.device.memory.reachable_bytes()
        if reachable is None:
            return None
        other_engines = reserved_bytes(but=self._stack)[0]
        return max(0, self._without_fragments(reachable) - other_engines)

    def _without_fragments(self, reachable: int) -> int:
        """The part of `reachable` bytes that the allocator can give to tensors.

        The fragments of the traced steps are left out.
        """
        fragments = self._stack.device.memory.fragment_bytes()
        if fragments > MANY_FRAGMENTS * reachable:
            logger.info(
                "torch's allocator left %.0f MiB of the GPU's memory in fragments, and the plan "
                "does not use them. To have fewer, set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the program's environment, if "
                "the system supports that",
                fragments / MIB,
            )
        return reachable - fragments

    def _step_s(self, plan: Plan, workload: Workload, rates: Rates) -> float:
        """Predicted seconds of a step of the plan."""
        return estimate(
            self._stack.layout, plan, workload, rates, asynchronous=self._is_asynchronous
        ).step_s

    def _advise_chunks(self, workload: Workload, rates: Rates) -> None:
        """Log the predicted time of one batch in chunks instead of several micro-batches.

        Only if that is faster. No plan chooses it, because it changes rounding.
        """
        stack = self._stack
        count = stack.demand.micro_batches
        if count < 2 or stack.demand.chunk is not None or not stack.layout.streamed:
            return
        demand = replace(
            _present_demand(stack), accumulate=False, micro_batches=1, chunk=1, chunks=count
        )
        try:
            plan = make_plan(stack.layout, demand)
        except BudgetError:
            return
        predicted = self._step_s(plan, workload.together(), rates)
        present = self._step_s(stack.plan, workload, rates)
        if predicted < ADVICE_SHARE * present:
            logger.info(
                "%d micro-batches that are added up take %.1f ms/step; as one batch in chunks they "
                "are predicted to take %.1f: multiply train_micro_batch_size_per_gpu by %d, set "
                "gradient_accumulation_steps to 1, and stronghold.chunk to the present micro-batch "
                "(it changes rounding, and the memory of head and loss grows with the batch)",
                count,
                present * 1e3,
                predicted * 1e3,
                count,
            )

    def _faster(self, measured: Measurements) -> tuple[Plan, str] | None:
        """A faster plan, and its room in words for the log. None if the present plan stays."""
        stack = self._stack
        sizes = [self._largest]
        if self._sizes_differ:
            sizes.insert(0, self._with_headroom(self._largest))
        for size in sizes:
            may_move = stack.demand.layers_may_move
            demand = self._demand(size) if may_move else _present_demand(stack)
            try:
                choice = fastest_plan(
                    stack.layout,
                    demand,
                    measured.workload,
                    measured.rates,
                    asynchronous=self._is_asynchronous,
                )
                break
            # no plan fits the measured activations: this one works
            except BudgetError as error:
                refusal = error
        else:
            logger.info("the plan stays as it is: %s", refusal)
            return None
        present_s = self._step_s(stack.plan, measured.workload, measured.rates)
        if choice.forecast.step_s >= CHANGE_SHARE * present_s:
            return None
        logger.info(
            "a plan is predicted to take %.1f ms/step instead of %.1f",
            choice.forecast.step_s * 1e3,
            present_s * 1e3,
        )
        return choice.plan, self._room_in_words(size)

    def _room_in_words(self, size: BatchSize) -> str:
        if not self._knows_room:
            return ""
        why = ""
        if self._sizes_differ:
            why = f", since they differ: up to {self._largest.tokens} so far"
        return (
            f", with room for batches of {size.tokens} tokens{why} (before a larger one runs the "
            "plan changes)"
        )


def _least_room(memories: Sequence[RankMemory]) -> RankMemory:
    """The memory that all ranks have: the least of each number that limits the plan."""
    size, largest = BatchSize(), BatchSize()
    for memory in memories:
        size = size.maximum(memory.size)
        largest = largest.maximum(memory.largest)
    reachable = [memory.reachable for memory in memories if memory.reachable is not None]
    peaks = [memory.peak for memory in memories if memory.peak is not None]
    is_known = len(reachable) == len(peaks) == len(memories)
    return RankMemory(
        min(reachable) if is_known else None,
        max(peaks) if is_known else None,
        min(memory.chunks for memory in memories),
        size,
        largest,
        any(memory.sizes_differ or memory.largest != largest for memory in memories),
    )


def _measurements(
    stack: Stack, workload: Workload, rates: Rates, memory: RankMemory
) -> Measurements:
    usable = beside = None
    if memory.reachable is not None and memory.peak is not None:
        usable = int(memory.reachable * GPU_SHARE)
        demand = replace(stack.demand, work=workload.layers, chunks=memory.chunks)
        kept_bytes = activation_bytes(stack.layout, stack.plan.activations, demand)
        beside = max(0, memory.peak - kept_bytes)
    return Measurements(
        workload=workload,
        rates=rates,
        chunks=memory.chunks,
        size=memory.size,
        usable=usable,
        beside=beside,
    )


def _longest_sequence(model: nn.Module) -> int | None:
    """Tokens of the longest sequence that a Transformers model takes. None: unknown."""
    config: Any = getattr(model, "config", None)
    for text_config in (config, getattr(config, "text_config", None)):
        length = getattr(text_config, "max_position_embeddings", None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def _present_demand(stack: Stack) -> Demand:
    """The planner's question whose answer is the present plan. Early updates stay open."""
    plan, blocks = stack.plan, stack.layout.streamed
    return replace(
        stack.demand,
        window=plan.window or None,  # 0 if every block stays
        prefetch=plan.prefetch if plan.window else None,
        resident_layers=len(plan.resident.intersection(blocks)),
        resident_updates="gpu" if plan.updated_on_gpu else "host",
        activations=plan.activations,
        homes=plan.homes,
    )
