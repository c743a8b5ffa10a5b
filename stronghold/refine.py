"""The plan, refined by what the first steps showed, and by batches that are larger than those.

Owns the decision when to measure, whether another plan is worth a change, and how much room it
leaves; `Stack.replan` makes the change. The training thread alone enters, before each forward and
at the end of each step.

[Note: which steps] In the first step memory is touched for the first time, and the schedule is
learnt in it: it tells nothing. The next ones are traced, and what their layers keep for backward is
counted. Then the search runs once, with the seconds and rates that were measured.

[Note: one plan] Several ranks change to one plan, or stay. They tell each other what they measured,
the first searches with the slowest of it, and all follow.

[Note: larger batches] A refined plan fills the device, so that a batch that is larger than those it
was made from may find no room. This is the rule:
  1. While all batches have one size, the plan has room for that size, and no more: full speed. How
     long a sequence the model could take does not count.
  2. Once sizes differ, the plan has room for HEADROOM times the largest so far, but for no longer
     sequences than the model takes (`max_position_embeddings`).
  3. The engine looks at a batch before it runs. Where the plan has no room for it, by what was
     measured, the plan changes first, as by 2. Where no plan has room, the one that takes least
     takes over, with a warning.
  4. Where the plan cannot change at once (a graph waits for its backward, gradients for their step,
     something keeps aliases of weights, or there are other ranks), this forward keeps nothing that
     can be computed again, and the plan changes before a later forward; of several ranks at the end
     of the step, on all of them.
What a larger batch takes is scaled from what was measured: with its elements, and with the square
of a sequence's length where a saved tensor has that length twice.

[Note: out of memory] Where that was wrong, torch raises. Who holds what then:
  1. In a forward: the graph dies with the call. Sums of earlier micro-batches are arrays of their
     layers, and stay. The step goes on.
  2. In a backward, and in a forward that it runs again: the step is given up, as for any exception.
     Its gradients so far are dropped, and the next micro-batch is the step's first. Early updates
     of it are dropped, too: they wrote second arrays alone, and no layer has other weights.
  3. In a lane, or in an update on the device: a LaneError, which is final, as for any failure of
     theirs. Lanes copy between buffers that were made before; an update takes some kilobytes.
In 1 and 2 the engine's call raises `OutOfMemoryError`, which is torch's own for whoever catches
that. The plan does not change at once, for the program and the error's traceback may still hold the
graph: it changes before the next forward, to one with more room. The call is not run again here:
what the user's code did in it (counters, buffers, random numbers) is not ours to undo. One of
several ranks cannot go on alone after a backward that raised: all end, as for any exception.
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

from stronghold.device.base import OutOfMemoryError
from stronghold.errors import BudgetError
from stronghold.plan.cost import (
    Demand,
    Growth,
    LayerLoad,
    Workload,
    measured_rates,
    measured_workload,
    slowest,
)
from stronghold.plan.machine import AGAIN_LAUNCH_S, LAUNCH_S, WHOLE_LAUNCH_S, Rates
from stronghold.plan.plan import MIB, Plan, activation_bytes, make_plan
from stronghold.plan.search import roomiest_plan
from stronghold.predict.simulate import fastest_plan, simulate
from stronghold.runtime.runtime import Runtime
from stronghold.runtime.stack import Stack, pinned_activations, reserved_bytes
from stronghold.telemetry.metrics import BatchSize

logger = logging.getLogger("stronghold")

WARM_UP_STEPS = 1
TRACED_STEPS = 2
# Of what the GPU has for this process, without the allocator's fragments, for slots and
# activations, once these are known: the rest is for modules that load later, and for what steps of
# one size differ by.
GPU_SHARE = 0.9
HEADROOM = 1.5  # [Note: larger batches]: five changes of the plan from 512 tokens to 4096
RETRY_MARGIN = 1.5  # times what was thought to be enough, and was not
MANY_FRAGMENTS = 0.05  # of what the device has: worth a word
ADVICE_SHARE = 0.9  # of the present step: what is worth the user's attention
CHANGE_SHARE = 0.97  # of the present plan's step: a change costs a settled device, and copies
# Of lanes that moved nothing while they were traced, in 1e9 bytes/s: a PCIe 4 link, a desktop's
# memory, one solid-state disk.
DEFAULT_RATES = Rates(
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
EMULATED_RATES = replace(
    DEFAULT_RATES,
    device_gbps=8.0,  # device memory is the host's
    launch_s=0.0,
    whole_launch_s=0.0,
    again_launch_s=0.0,
)


class RefinementStage(Enum):
    """What the next step is for."""

    WARM_UP = "warm-up"
    TRACED = "traced"
    SETTLED = "settled"


class RankMemory(NamedTuple):
    """A rank's GPU in bytes, once steps were measured: what its tensors can have in
    all, as things are now (None: unknown), and what others than the plan's buffers took at most.
    `size`: of the largest batch that was measured; `largest`: of all that have come, which `differ`
    or not."""

    reachable: int | None
    peak: int | None
    chunks: int  # of a micro-batch, at least
    size: BatchSize = BatchSize()
    largest: BatchSize = BatchSize()
    differ: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of the traced steps, of all ranks. `usable` bytes of the GPU are for slots and
    activations; of these others than the plan's buffers and what blocks keep take `beside`, with
    batches of `size`: logits, the loss, the program's tensors. None where it is unknown."""

    workload: Workload
    rates: Rates
    chunks: int
    size: BatchSize
    usable: int | None
    beside: int | None

    def loads(self, size: BatchSize, margin: float) -> tuple[tuple[LayerLoad, ...], int]:
        """Each layer's load with batches of another size, and what comes beside them; `margin`
        times as much as it seems."""
        by = Growth.between(self.size, size, margin)
        squares = any(load.square_saved_bytes for load in self.workload.layers)
        beside = self.beside or 0
        return (
            tuple(load.grown(by) for load in self.workload.layers),
            by.of(beside, beside if squares else 0),
        )


class Refinement:
    """Refines the plan of `stack` once, if it leaves the search anything to choose, and changes it
    where a batch needs more room. The user's trace, if there is one, goes on."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._tracing = stack.trace.recording
        self._asynchronous = stack.device.torch_device.type == "cuda"
        self._steps = 0
        self._first_span = 0
        is_open = _is_open(stack.demand) and not stack.plan.whole
        self.stage = RefinementStage.WARM_UP if is_open else RefinementStage.SETTLED
        # [Note: larger batches]
        self._makes_room = stack.demand.training and _layers_may_move(stack.demand)
        self._longest = _longest(stack.partition.model)
        self._size = BatchSize()  # of the largest batch in the traced steps
        self._largest = BatchSize()  # that has come so far
        self._differ = False
        self._measured: Measurements | None = None
        self._margin = 1.0  # on what is thought to be enough
        self._lacks = False  # memory ran out, and the plan is still that one
        self._num_failures = stack.device.num_failures()
        # By whether batches train: the largest that have room, and that found none and wait for it.
        self._roomy = {True: BatchSize(), False: BatchSize()}
        self._waiting = {True: BatchSize(), False: BatchSize()}
        self._warns = True  # once, of a batch that no plan has room for

    def end_step(self) -> None:
        """A step has ended, and its updates are queued."""
        if self.stage is RefinementStage.SETTLED:
            if self._stack.ranks.several and self._knows_room:
                self._make_room_together()
            return
        self._steps += 1
        if self.stage is RefinementStage.WARM_UP and self._steps == WARM_UP_STEPS:
            self._begin_tracing()
        elif self._steps == WARM_UP_STEPS + TRACED_STEPS:
            self.stage = RefinementStage.SETTLED
            self._refine(self._stack.runtime)
            if not self._tracing:
                self._stack.device.record_spans(False)
                self._stack.trace.clear()

    def restart(self) -> None:
        """The buffers are new ones: what was being measured is measured from here on."""
        if self.stage is RefinementStage.TRACED:
            self._steps = WARM_UP_STEPS
            self._begin_tracing()

    def _begin_tracing(self) -> None:
        self.stage = RefinementStage.TRACED
        self._first_span = self._stack.trace.mark()
        self._stack.device.record_spans(True)
        # The first step is not like others, and before it the model may have been on the device.
        self._stack.device.restart_activation_peak()
        self._stack.runtime.activations.sizes.counting = True
        self._size = BatchSize()

    # -- larger batches ---------------------------------------------------------------------------
    @property
    def _knows_room(self) -> bool:
        return self._measured is not None and self._measured.usable is not None

    def begin_forward(self, size: BatchSize, *, trains: bool, waits: bool) -> None:
        """A forward begins with a batch of this size, which `trains` or is without gradients: make
        room for it first, where the plan has none ([Note: larger batches]). `waits`: a graph waits
        for its backward, so that no layer may move."""
        if not self._makes_room:
            return
        stack = self._stack
        if trains:
            self._differ |= self._largest not in (BatchSize(), size)
            self._largest = self._largest.maximum(size)
            if self.stage is RefinementStage.TRACED:
                self._size = self._size.maximum(size)
                stack.runtime.activations.sizes.length = size.length
        lacks = self._lacks or not self._has_room(size, trains=trains)
        if lacks and stack.ranks.several:
            self._waiting[trains] = self._waiting[trains].maximum(size)
        elif lacks and not waits and stack.runtime.is_between_passes and not self._is_aliased():
            self._make_room(size, trains=trains)
            lacks = False
        stack.runtime.activations.spares = lacks and stack.section.activations is None

    def _is_aliased(self) -> bool:
        """True while something keeps aliases of weights, which would stay behind where weights
        change places with a plan."""
        self._stack.runtime.settle()
        return bool(self._stack.runtime.executor.aliased(range(len(self._stack.parameters))))

    def out_of_memory(self, call: str, error: torch.OutOfMemoryError) -> OutOfMemoryError:
        """The error that the engine's `call` raises in place of `error` ([Note: out of memory])."""
        if isinstance(error, OutOfMemoryError):  # of an engine inside of this one's call
            return error
        traceback.clear_frames(error.__traceback__)  # they hold what the call has computed
        stack = self._stack
        planned = f"{stack.plan.gpu_total_bytes / MIB:,.1f} MiB for the model"
        remedy = "use a smaller batch, or shorter sequences"
        if self._can_leave_more():
            self._lacks = True
            when = "at the next step's end" if stack.ranks.several else "before the next forward"
            remedy = (
                f"the plan changes to one that leaves more room {when}, so that the same batch may "
                f"train then; else {remedy}"
            )
        dropped = ""
        if call == "engine.backward":
            dropped = "; the gradients of this step so far are dropped, the next is its first"
        return OutOfMemoryError(
            f"{stack.device.name} is out of memory. It was in {call}, by a plan with {planned}"
            f"{dropped}; {remedy}. Torch reports: {error}"
        )

    def note_failures(self) -> None:
        """A step was given up: where memory has run out meanwhile, the next one shall have more."""
        count, before = self._stack.device.num_failures(), self._num_failures
        self._num_failures = count
        if count > before and self._can_leave_more():
            self._lacks = True

    def _can_leave_more(self) -> bool:
        return self._makes_room and self._roomiest() is not None

    def _loads(self, size: BatchSize) -> tuple[tuple[LayerLoad, ...], int]:
        assert self._measured is not None
        return self._measured.loads(size, self._margin)

    def _need(self, plan: Plan, size: BatchSize, *, trains: bool) -> int:
        """Bytes of the GPU that `plan` and a batch take."""
        assert self._measured is not None
        return plan.gpu_total_bytes + self._activation_bytes(plan, size, trains=trains)

    def _activation_bytes(self, plan: Plan, size: BatchSize, *, trains: bool) -> int:
        layout = self._stack.layout
        demand = self._demand(size)
        if trains:
            return activation_bytes(layout, plan.activations, demand)
        outside = sum(demand.kept[index].saved_bytes for index in layout.resident)
        return outside + max((demand.kept[i].saved_bytes for i in layout.streamed), default=0)

    def _has_room(self, size: BatchSize, *, trains: bool) -> bool:
        """True if the present plan has room for the batch, as far as that is known."""
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
        """Larger than the largest so far, as far as the model takes longer sequences."""
        most = size.maximum(self._largest)
        times = HEADROOM
        if self._longest is not None and most.length:
            times = min(times, max(1.0, self._longest / most.length))
        return BatchSize(*(math.ceil(times * number) for number in most))

    def _make_room(self, size: BatchSize, *, trains: bool) -> None:
        """Change to a plan with room for the batch, or to the one that takes least."""
        stack = self._stack
        stack.runtime.ledger.check()
        if self._lacks:
            self._lacks, self._margin = False, self._margin * RETRY_MARGIN
            self._roomy = dict.fromkeys(self._roomy, BatchSize())
            gc.collect()  # graphs without an owner
            stack.device.trim()
        found: Any = None
        if stack.ranks.control.rank == 0:
            found = self._plan_for(size, trains=trains)
        found = stack.ranks.control.objects(found, "a plan with more room")[0]
        if found is not None:
            plan, room = found
            stack.replan(replace(plan, cpu_threads=stack.plan.cpu_threads))
            self._roomy = dict.fromkeys(self._roomy, BatchSize())
            logger.info(
                "another plan, for a batch of %d tokens (%s): %s", size.tokens, room, stack.plan
            )
            self.restart()
        if self._warns and not self._has_room(size, trains=trains):
            self._warns = False
            logger.warning(
                "a batch of %d tokens may find no room on %s: by what was measured it takes more "
                "than the plan leaves that takes least. If it does not train, use a smaller one, "
                "or shorter sequences",
                size.tokens,
                stack.device.name,
            )
        self._num_failures = stack.device.num_failures()
        self._roomy[trains] = self._roomy[trains].maximum(size)  # or there is nothing to be done

    def _make_room_together(self) -> None:
        """Change the plan of all ranks if a batch of any rank found no room in it."""
        group = self._stack.ranks.control
        both = [*self._waiting[True], *self._waiting[False]]
        lacks = self._lacks or any(both)
        mine = torch.tensor([self._lacks, lacks and self._is_aliased(), *both])
        rows = group.numbers(mine.to(torch.int64), "sizes of batches").amax(dim=0).tolist()
        if rows[1]:  # on any rank: the plan stays
            return
        self._waiting = dict.fromkeys(self._waiting, BatchSize())
        width = len(BatchSize())
        sizes = {True: BatchSize(*rows[2 : 2 + width]), False: BatchSize(*rows[2 + width :])}
        self._lacks = bool(rows[0])
        for trains, size in sizes.items():
            self._largest = self._largest.maximum(size) if trains else self._largest
            if self._lacks or not self._has_room(size, trains=trains):
                self._make_room(size, trains=trains)

    def _plan_for(self, size: BatchSize, *, trains: bool) -> tuple[Plan, str] | None:
        """The fastest plan with room for the batch, else the one that takes least, and in words how
        much room it has; None where none has more than the present one."""
        if self._knows_room:
            for wanted in (self._with_headroom(size), size.maximum(self._largest)):
                plan = self._fastest_with_room(wanted, trains=trains)
                if plan is not None and self._takes_less(plan):
                    return plan, f"with room for {wanted.tokens}"
        plan = self._roomiest()
        return None if plan is None else (plan, "it takes the least that one can")

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
                asynchronous=self._asynchronous,
            ).plan
        except BudgetError:
            return None

    def _takes_less(self, plan: Plan) -> bool:
        """True if the plan leaves more to a batch than the present one."""
        present = self._stack.plan
        if self._measured is None:
            return plan.gpu_total_bytes < present.gpu_total_bytes
        size = self._largest
        return self._need(plan, size, trains=True) < self._need(present, size, trains=True)

    def _roomiest(self) -> Plan | None:
        stack = self._stack
        demand = stack.demand if self._measured is None else self._demand(self._largest)
        try:
            plan = roomiest_plan(stack.layout, demand)
        except BudgetError:  # the host has no room for what would come back
            return None
        return plan if self._takes_less(plan) else None

    def _demand(self, size: BatchSize) -> Demand:
        """What the planner is asked once it is known what each block saves and what enters it, in
        bytes, here with batches of another size: activations take their part of the GPU's memory.
        The emulated device's are the host's: nothing is known of their budget."""
        stack, measured = self._stack, self._measured
        assert measured is not None
        section, budget = stack.section, measured.usable
        if budget is None:
            return stack.demand
        loads, beside = self._loads(size)
        kept = list(loads)
        outside = [layer.index for layer in stack.layout.layers if not layer.streamed]
        if outside:
            last = kept[outside[-1]]
            kept[outside[-1]] = replace(last, saved_bytes=last.saved_bytes + beside)
        return replace(
            stack.demand,
            activations=pinned_activations(section, stack.layout),
            gpu_budget_bytes=budget,
            kept=tuple(kept),
            chunks=measured.chunks,
            reserve_bytes=0 if section.gpu_memory is None else budget - section.gpu_memory,
        )

    # -- once -------------------------------------------------------------------------------------
    def _refine(self, runtime: Runtime) -> None:
        stack, sizes = self._stack, runtime.activations.sizes
        sizes.counting = False
        runtime.settle()
        stack.device.settle()
        spans = stack.trace.spans(self._first_span)
        rates = measured_rates(spans, DEFAULT_RATES if self._asynchronous else EMULATED_RATES)
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
        reachable = device.reachable_bytes()
        if reachable is not None:
            reachable = self._without_fragments(reachable)
            reachable = max(0, reachable - reserved_bytes(but=stack)[0])
        memory = RankMemory(
            reachable,
            device.activation_peak_bytes(),
            sizes.least_chunks,
            self._size,
            self._largest,
            self._differ,
        )
        kept = self._is_aliased()
        ranks = stack.ranks
        # [Note: one plan]
        found: Any = ranks.control.objects((rates, workload, memory, kept), "refining the plan")
        rates, workload = slowest([(each, work) for each, work, _, _ in found])
        memory = _least([of_rank for _, _, of_rank, _ in found])
        self._measured = _measured(stack, workload, rates, memory)
        self._largest, self._differ = memory.largest, memory.differ
        if any(of_rank for _, _, _, of_rank in found):
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
            logger.info("refined after %d steps%s: %s", self._steps, room, stack.plan)
        else:
            logger.warning(
                "the plan stays as it is: of the %d bytes on the GPU that a faster one needs, "
                "others have taken some meanwhile",
                plan.gpu_total_bytes + plan.activation_bytes,
            )
        self._num_failures = device.num_failures()  # one in the trial of the plan is none

    def _without_fragments(self, reachable: int) -> int:
        """The part of `reachable` bytes that the allocator can give to tensors, by what it could
        not give to them in the traced steps."""
        fragments = self._stack.device.fragment_bytes()
        if fragments > MANY_FRAGMENTS * reachable:
            logger.info(
                "torch's allocator left %.0f MiB of the GPU's memory in fragments: the plan does "
                "without them. Started with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in "
                "its environment, a program has fewer, where the system supports that",
                fragments / MIB,
            )
        return reachable - fragments

    def _step_s(self, plan: Plan, workload: Workload, rates: Rates) -> float:
        """What a step of the plan is predicted to take."""
        layout = self._stack.layout
        return simulate(layout, plan, workload, rates, asynchronous=self._asynchronous).step_s

    def _advise_chunks(self, workload: Workload, rates: Rates) -> None:
        """Say, in figures, what one batch in chunks would take instead of micro-batches that are
        added up, where that is worth it. No plan chooses it, for it changes rounding."""
        stack, count = self._stack, self._stack.demand.micro_batches
        if count < 2 or stack.demand.chunk is not None or not stack.layout.streamed:
            return
        demand = replace(_as_it_is(stack), accumulate=False, micro_batches=1, chunk=1, chunks=count)
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
                "gradient_accumulation_steps to 1 and stronghold.chunk to the micro-batch of now "
                "(it changes rounding, and what head and loss take grows with the batch)",
                count,
                present * 1e3,
                predicted * 1e3,
                count,
            )

    def _faster(self, measured: Measurements) -> tuple[Plan, str] | None:
        """The plan to change to, and in words for which batches it has room; or None."""
        stack, workload, rates = self._stack, measured.workload, measured.rates
        for size in [self._with_headroom(self._largest)] * self._differ + [self._largest]:
            demand = self._demand(size) if _layers_may_move(stack.demand) else _as_it_is(stack)
            try:
                choice = fastest_plan(
                    stack.layout,
                    demand,
                    workload,
                    rates,
                    asynchronous=self._asynchronous,
                )
                break
            except BudgetError as error:  # activations leave less than there was: the plan works
                refusal = error
        else:
            logger.info("the plan stays as it is: %s", refusal)
            return None
        present_s = self._step_s(stack.plan, workload, rates)
        if choice.forecast.step_s >= CHANGE_SHARE * present_s:
            return None
        logger.info(
            "a plan is predicted to take %.1f ms/step instead of %.1f",
            choice.forecast.step_s * 1e3,
            present_s * 1e3,
        )
        room = ""
        if self._knows_room:
            why = f", since they differ: up to {self._largest.tokens} so far" * self._differ
            room = (
                f", with room for batches of {size.tokens} tokens{why} (before a larger one runs "
                "the plan changes)"
            )
        return choice.plan, room


def _least(found: Sequence[RankMemory]) -> RankMemory:
    """What all ranks have room for."""
    known = all(memory.reachable is not None and memory.peak is not None for memory in found)
    size, largest = BatchSize(), BatchSize()
    for memory in found:
        size, largest = size.maximum(memory.size), largest.maximum(memory.largest)
    return RankMemory(
        min(memory.reachable or 0 for memory in found) if known else None,
        max(memory.peak or 0 for memory in found) if known else None,
        min(memory.chunks for memory in found),
        size,
        largest,
        any(memory.differ or memory.largest != largest for memory in found),
    )


def _measured(stack: Stack, workload: Workload, rates: Rates, memory: RankMemory) -> Measurements:
    usable = beside = None
    if memory.reachable is not None and memory.peak is not None:
        usable = int(memory.reachable * GPU_SHARE)
        known = replace(stack.demand, kept=workload.layers, chunks=memory.chunks)
        kept = activation_bytes(stack.layout, stack.plan.activations, known)
        beside = max(0, memory.peak - kept)
    return Measurements(
        workload=workload,
        rates=rates,
        chunks=memory.chunks,
        size=memory.size,
        usable=usable,
        beside=beside,
    )


def _longest(model: nn.Module) -> int | None:
    """The most tokens of a sequence that a Transformers model takes; None where it is unknown."""
    config: Any = getattr(model, "config", None)
    for of_text in (config, getattr(config, "text_config", None)):
        found = getattr(of_text, "max_position_embeddings", None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def _as_it_is(stack: Stack) -> Demand:
    """The demand of the present plan, but for which updates are early."""
    plan, blocks = stack.plan, stack.layout.streamed
    return replace(
        stack.demand,
        window=plan.window or None,  # none where every block stays
        prefetch=plan.prefetch if plan.window else None,
        resident_layers=len(plan.resident.intersection(blocks)),
        resident_updates="gpu" if plan.updated_on_gpu else "host",
        activations=plan.activations,
        homes=plan.homes,
    )


def _is_open(demand: Demand) -> bool:
    """Whether anything is left to choose that the user did not pin."""
    if not demand.training:
        return False
    return _may_update_early(demand) or _layers_may_move(demand)


def _may_update_early(demand: Demand) -> bool:
    """Whether the number of early updates is open, and known room of the host could serve them."""
    is_open = demand.early_layers is None and not demand.meets_others
    return is_open and demand.host_budget_bytes is not None


def _layers_may_move(demand: Demand) -> bool:
    """Whether layers may stay on the device: there is a budget, and none has arrays in files."""
    pinned = (demand.window, demand.resident_layers, demand.activations)
    return not demand.nvme and demand.gpu_budget_bytes is not None and None in pinned
