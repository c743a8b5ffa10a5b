"""The plan for an engine's batches: made once, for the first batch that trains.

Owns two decisions: which plan the engine has, and whether a later batch has room. `Stack.take_plan`
makes the one change. The training thread enters, before each forward.

[Note: one plan]
1. `initialize` does not know a batch. Its plan has three slots, and no block that stays on the
   device. It serves evaluation and checkpoints.
2. Before the first forward that trains, the model's code runs once with the shapes of this batch,
   over tensors without memory (`model.costs`). The rules make a plan for these costs, and layers
   move once. Gradients do not exist yet.
3. If the code needs values, costs are unknown. The rules then plan for the seconds of products, in
   the memory that `initialize` had for weights, and leave the rest to activations.
4. Several ranks plan for the largest of their batches. The first rank plans, and all follow.

[Note: larger batches]
1. The plan leaves room for HEADROOM times the first batch, or for `stronghold.batch_tokens`. A
   batch that needs this room keeps nothing that backward can compute again.
2. A batch that is larger than any before is counted like the first, before its forward. By these
   counts it runs by the plan's levels, or keeps nothing, or is refused with the numbers.
3. If its costs are unknown, it runs, and torch raises where memory ends.

[Note: out of memory] Torch raises if an estimate was too low.
1. In a forward: the graph dies with the call. Sums of earlier micro-batches stay. The step goes on.
2. In a backward, and in a forward that it runs again: the step is given up, as for any exception.
3. In a lane, or in an update on the device: a LaneError, which is final.
In 1 and 2 the engine's call raises `OutOfMemoryError`, a subclass of torch's class. Later forwards
keep nothing that backward can compute again. The engine does not run the call again: the user's
code has changed counters, buffers and random numbers in it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from stronghold.devices.base import OutOfMemoryError
from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.errors import BudgetError, ConfigError, format_size
from stronghold.model.costs import count_costs
from stronghold.plan.cost import Demand, LayerWork, Workload, spared, with_decoding, workload_of
from stronghold.plan.gpu_memory import activation_bytes
from stronghold.plan.machine import Rates, rates_of
from stronghold.plan.rules import Choice, fastest_plan
from stronghold.streaming.stack import Stack, reserved_bytes
from stronghold.telemetry.metrics import BatchSize

logger = logging.getLogger("stronghold")

# Share of the device's memory that a plan fills with buffers and activations. The remainder is for
# the allocator's fragments, for modules that load later, and for errors of the counts.
GPU_SHARE = 0.9
HEADROOM = 1.5  # later batches may have so many times the first one's tokens
CHECKED_AHEAD = 1.25  # a batch that has ample room stands for larger ones, up to this factor


class _Room(NamedTuple):
    """The largest batches that have room: by the plan's levels, if they keep nothing that can be
    computed again, and without a graph."""

    kept: BatchSize = BatchSize()
    spared: BatchSize = BatchSize()
    evaluated: BatchSize = BatchSize()


class _FirstBatch(NamedTuple):
    """What a rank knows before its first forward that trains.

    work        None: unknown
    free_bytes  of the device for buffers and activations. None: unknown
    may_move    layers may move now
    """

    size: BatchSize
    work: Workload | None
    free_bytes: int | None
    may_move: bool


class Planner:
    """Makes the plan of `stack` for its first batch, and checks each larger one."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._is_asynchronous = stack.device.torch_device.type == "cuda"
        self._is_open = stack.machine is not None  # the rules have something to choose
        # Bytes of the device for buffers and activations. None: unknown, and no batch is checked.
        self._limit_bytes: int | None = None
        self._first = BatchSize()
        self._room = _Room()
        self._ran_out = False  # of memory, in some call

    def begin_forward(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        size: BatchSize,
        *,
        trains: bool,
        waits: bool,
    ) -> None:
        """Plan for the first batch, and check a larger one, before a forward with these arguments.

        trains  the forward keeps a graph
        waits   an earlier graph waits for its backward, so that no layer may move

        `OutOfMemoryError` if the device has no room for the batch by any plan.
        """
        if trains and self._is_open:
            self._plan_for(args, kwargs, size, waits=waits)
            self._is_open = False
        spares = self._check(args, kwargs, size, trains=trains)
        self._stack.spare_activations(self._may_spare and (spares or self._ran_out))

    def out_of_memory(self, call: str, error: torch.OutOfMemoryError) -> OutOfMemoryError:
        """The error that the engine's `call` raises in place of `error` ([Note: out of memory])."""
        # from an engine inside of this one's call, or from `begin_forward`
        if isinstance(error, OutOfMemoryError):
            return error
        traceback.clear_frames(error.__traceback__)  # they keep the call's tensors
        stack = self._stack
        remedy = "use a smaller batch, or shorter sequences"
        if self._may_spare and not self._ran_out:
            remedy = (
                "from now on backward computes again what it can, and the same batch may train "
                f"then; else {remedy}"
            )
        self._ran_out = True
        dropped = ""
        if call == "engine.backward":
            dropped = "; this step's gradients are dropped, and the next micro-batch is its first"
        return OutOfMemoryError(
            f"{stack.device.name} is out of memory. It was in {call}, by a plan with "
            f"{format_size(stack.plan.gpu_total_bytes)} for the model{dropped}; {remedy}. Torch "
            f"reports: {error}"
        )

    @property
    def _may_spare(self) -> bool:
        """True if a forward may keep less than the plan says."""
        return self._stack.section.activations is None and not self._stack.plan.whole

    # -- the plan, once ---------------------------------------------------------------------------
    def _plan_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], size: BatchSize, *, waits: bool
    ) -> None:
        """Take the rules' plan for the batch ([Note: one plan]). Every rank calls it."""
        stack, ranks = self._stack, self._stack.ranks
        may_move = not waits and stack.is_between_passes and not stack.is_aliased()
        free_bytes = stack.device.memory.free_bytes()
        if free_bytes is not None:
            free_bytes = max(0, free_bytes - reserved_bytes(but=stack)[0])
        first = _FirstBatch(size, self._count(args, kwargs, size), free_bytes, may_move)
        of_ranks: Any = ranks.control.objects(first, "the first batch")
        first = _largest(of_ranks)
        if not first.may_move:
            logger.info("the plan stays as it is: aliases of weights are kept, or a graph waits")
            return
        self._first = first.size
        self._limit_bytes = None if first.work is None else first.free_bytes
        chosen: Any = None
        if ranks.control.rank == 0:
            chosen = self._chosen(first)
        chosen = ranks.control.objects(chosen, "the plan")[0]
        if isinstance(chosen, BudgetError):
            # by these words Accelerate's loops know an error of memory
            raise OutOfMemoryError(
                f"{stack.device.name} would be out of memory. {chosen}"
            ) from chosen
        self._room = _Room(kept=self._first, evaluated=self._first)
        plan = replace(chosen.plan, cpu_threads=stack.plan.cpu_threads)
        stack.take_plan(plan)
        logger.info("for batches of %d tokens: %s", self._first.tokens, plan)
        if first.work is not None:
            tokens_of_step = self._first.tokens * stack.demand.micro_batches
            stack.metrics.predicted_s = {tokens_of_step: chosen.step_s}
            stack.predicted = chosen.forecast
            logger.info("predicted: %s", chosen.forecast)

    def _chosen(self, first: _FirstBatch) -> Choice | BudgetError:
        """The plan of the rules and its forecast, or the reason why there is none."""
        stack, rates = self._stack, self._rates()
        workload = first.work or self._uncounted(first.size)
        demand = stack.demand
        if not demand.layers_may_move:
            demand = _present_demand(stack)
        elif self._limit_bytes is not None:
            budget = int(GPU_SHARE * self._limit_bytes)
            for_buffers = min(budget, stack.section.gpu_memory or budget)
            demand = replace(
                self._demand(workload.layers, first.size),
                gpu_budget_bytes=budget,
                reserve_bytes=budget - for_buffers,
                growth=self._growth(),
            )
        demands = [demand]
        if stack.section.batch_tokens is None:
            demands.append(replace(demand, growth=1.0))  # no room to spare
        for demand in demands:
            try:
                return fastest_plan(
                    stack.layout, demand, workload, rates, asynchronous=self._is_asynchronous
                )
            except BudgetError as error:
                refusal = error
        return refusal

    def _growth(self) -> float:
        """How many times the first batch's tokens a later batch may have."""
        most_tokens = self._stack.section.batch_tokens
        if most_tokens is None or not self._first.tokens:
            return HEADROOM
        return max(1.0, most_tokens / self._first.tokens)

    def _demand(self, work: tuple[LayerWork, ...], size: BatchSize) -> Demand:
        """The planner's question for a batch of counted work. Activations take their part of the
        device's memory."""
        stack = self._stack
        sequences = size.tokens // size.length if size.length else size.tokens
        chunk = stack.demand.chunk
        return replace(
            stack.demand,
            activations=stack.pinned_activations,
            work=work,
            sequences=sequences,
            tokens=size.tokens,
            chunks=1 if chunk is None else max(1, -(-sequences // chunk)),
        )

    def _rates(self) -> Rates:
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
        # The emulated device computes in the calling thread, which launches nothing.
        return replace(rates, launch_s=0.0, whole_launch_s=0.0, recompute_launch_s=0.0)

    # -- work -------------------------------------------------------------------------------------
    def _count(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], size: BatchSize
    ) -> Workload | None:
        """The work of a batch. None: unknown, since the model's code needs values."""
        stack = self._stack
        device = stack.device.torch_device
        generator = random_state(device)
        try:
            with stack.resting_hooks(), torch.compiler.set_stance("force_eager"):
                costs = count_costs(
                    stack.partition.model,
                    stack.partition,
                    args,
                    kwargs,
                    seq=size.length or size.tokens,
                    dtype=stack.precision,
                )
        except ConfigError as error:
            logger.info("%s. The plan leaves memory to activations without a count", error)
            return None
        finally:
            if generator is not None:
                set_random_state(device, generator)
        assert stack.machine is not None
        workload = workload_of(costs, stack.machine, micro_batches=stack.demand.micro_batches)
        return with_decoding(workload, stack.layout, stack.formats, stack.machine)

    def _uncounted(self, size: BatchSize) -> Workload:
        """The seconds of products, if every parameter takes part for every token."""
        stack = self._stack
        assert stack.machine is not None
        token_s = 2.0 * max(1, size.tokens) / stack.machine.flops[stack.precision]
        layers = [
            LayerWork(forward_s=layer_s, backward_s=2.0 * layer_s)
            for layer_s in (token_s * layer.num_parameters for layer in stack.layout.layers)
        ]
        return Workload(layers=tuple(layers), micro_batches=stack.demand.micro_batches)

    # -- larger batches ---------------------------------------------------------------------------
    def _check(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], size: BatchSize, *, trains: bool
    ) -> bool:
        """True if the batch has room only if it keeps nothing that can be computed again.

        `OutOfMemoryError` if it has none ([Note: larger batches]).
        """
        room = self._room
        if self._limit_bytes is None or size.is_within(room.kept if trains else room.evaluated):
            return False
        if not trains and size.tokens <= room.evaluated.tokens:
            return False  # text that is written token by token
        if trains and size.is_within(room.spared):
            return True
        workload = self._count(args, kwargs, size)
        if workload is None:
            return False
        needs = self._needs(workload.layers, size, trains=trains)
        for number, (kind, need) in enumerate(needs.items(), start=1):
            share = 1.0 if number == len(needs) else GPU_SHARE  # the last way may use all
            free_bytes = int(share * self._limit_bytes) - self._stack.plan.gpu_total_bytes
            if need > free_bytes:
                continue
            known = size.times(CHECKED_AHEAD) if need * CHECKED_AHEAD**2 <= free_bytes else size
            self._room = room._replace(**{kind: known.maximum(getattr(room, kind))})
            return kind == "spared"
        raise OutOfMemoryError(self._refusal(size, min(needs.values())))

    def _needs(
        self, work: tuple[LayerWork, ...], size: BatchSize, *, trains: bool
    ) -> dict[str, int]:
        """Bytes of the batch's activations, by the field of `_Room`."""
        stack = self._stack
        layout, levels = stack.layout, stack.plan.activations
        if not trains:
            made = [load.saved_bytes + load.passing_bytes for load in work]
            outside = sum(made[index] for index in layout.resident)
            blocks = max((made[index] for index in layout.streamed), default=0)
            return {"evaluated": outside + blocks}
        demand = self._demand(work, size)
        needs = {"kept": activation_bytes(layout, levels, demand)}
        if self._may_spare:
            needs["spared"] = activation_bytes(layout, spared(levels), demand)
        return needs

    def _refusal(self, size: BatchSize, need_bytes: int) -> str:
        stack = self._stack
        assert self._limit_bytes is not None
        need = format_size(need_bytes, round_up=True)
        plan, limit = format_size(stack.plan.gpu_total_bytes), format_size(self._limit_bytes)
        return (
            f"{stack.device.name} would be out of memory. By estimate the activations of a batch "
            f"of {size.tokens:,} tokens take {need}, and the plan for batches of "
            f"{self._first.tokens:,} tokens takes {plan} of {limit}. Set stronghold.batch_tokens "
            "to the tokens of the largest micro-batch, so that the plan leaves room for it; or use "
            "smaller batches, or shorter sequences"
        )


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


def _largest(of_ranks: Sequence[_FirstBatch]) -> _FirstBatch:
    """The first batch for which all ranks plan: the largest one, in the least memory."""
    size, all_work, all_free = BatchSize(), [], []
    for first in of_ranks:
        size = size.maximum(first.size)
        all_work += [first.work] if first.work is not None else []
        all_free += [first.free_bytes] if first.free_bytes is not None else []
    return _FirstBatch(
        size,
        max(all_work, key=_saved_bytes) if len(all_work) == len(of_ranks) else None,
        min(all_free) if len(all_free) == len(of_ranks) else None,
        all(first.may_move for first in of_ranks),
    )


def _saved_bytes(workload: Workload) -> int:
    return sum(load.saved_bytes for load in workload.layers)
