"""The plan for an engine's batches: made for the first batch that trains.

Owns two decisions: which plan the engine has, and by which levels of activations a later batch has
room. The training thread enters, before each forward.

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
1. A batch that is larger than any before is counted like the first, before its forward. It gets the
   levels of activations at which a step is shortest by estimate, among those that have room.
2. If none has room, the engine plans for this batch as for a first one, and layers move again. They
   cannot move while a graph or gradients wait, nor with files, nor on several ranks.
3. Then the batch may use all of the device, and keeps nothing that backward can compute again. If
   even that has no room, it is refused with the numbers.
4. So a plan leaves room for a larger batch only where layers may be unable to move, and where
   batches have grown before: for HEADROOM times its own, or for `stronghold.batch_tokens`.
5. If the costs are unknown, the batch runs, and torch raises where memory ends.

[Note: out of memory] Torch raises if an estimate was too low, or if another program has taken
memory of the device.
1. In a forward: the graph dies with the call. Sums of earlier micro-batches stay. The step goes on.
2. In a backward, and in a forward that it runs again: the step is given up, as for any exception.
3. In a lane, or in an update on the device: a LaneError, which is final.
In 1 and 2 the engine's call raises `OutOfMemoryError`, a subclass of torch's class. Later forwards
keep nothing that backward can compute again. After a second time the next batch gets a new plan.
The engine does not run the call again: the user's code has changed counters, buffers and random
numbers in it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from stronghold.devices.device import OutOfMemoryError, random_state, set_random_state
from stronghold.errors import BudgetError, ConfigError, format_size
from stronghold.model.costs import count_costs
from stronghold.plan.cost import Demand, LayerWork, Workload, spared, workload_of
from stronghold.plan.machine import Rates, rates_of
from stronghold.plan.memory import activation_bytes
from stronghold.plan.rules import Choice, fastest_levels, fastest_plan
from stronghold.telemetry.metrics import BatchSize
from stronghold.train.job import Job, reserved_bytes

logger = logging.getLogger("stronghold")

# Share of the device's memory that a plan fills with buffers and activations. The remainder is for
# the allocator's fragments, for modules that load later, and for errors of the counts.
GPU_SHARE = 0.9
HEADROOM = 1.5  # later batches may have so many times the tokens of the planned one
CHECKED_AHEAD = 1.25  # a batch that has ample room stands for larger ones, up to this factor


class _Levels(NamedTuple):
    """Levels of activations, by layer, by which batches up to this size have room."""

    size: BatchSize
    levels: tuple[str, ...]


class _FirstBatch(NamedTuple):
    """The counted batch of a rank, before its forward.

    work        None: unknown
    free_bytes  of the device for buffers and activations. None: unknown
    may_move    layers may move now
    """

    size: BatchSize
    work: Workload | None
    free_bytes: int | None
    may_move: bool


class Planner:
    """Makes the plan of `job` for its first batch, and checks each larger one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_asynchronous = job.device.torch_device.type == "cuda"
        self._is_open = job.machine is not None  # the rules have something to choose
        self._plans_again = False  # for the next batch
        # What the plan was made for. `_limit_bytes` are those of the device for buffers and
        # activations. None: unknown, and no batch is checked.
        self._planned = BatchSize()
        self._work: Workload | None = None
        self._limit_bytes: int | None = None
        self._levels: list[_Levels] = []  # of larger batches, in the order in which they came
        self._evaluated = BatchSize()  # the largest batch that has room without a graph
        self._evaluated_bytes = 0  # which such batches took, where a plan had no room for them
        self._grows = False  # a plan had no room for a later batch
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
        job = self._job
        if not trains:
            self._check_evaluation(args, kwargs, size, waits=waits)
            return
        if self._is_open or (self._plans_again and self._may_plan_again(waits)):
            self._plan_for(size, self._count(args, kwargs, size), may_move=self._may_move(waits))
            self._is_open = self._plans_again = False
        levels = self._levels_for(args, kwargs, size, waits=waits)
        job.trainer.set_levels(spared(levels) if self._may_spare and self._ran_out else levels)

    def out_of_memory(self, call: str, error: torch.OutOfMemoryError) -> OutOfMemoryError:
        """The error that the engine's `call` raises in place of `error` ([Note: out of memory])."""
        # from an engine inside of this one's call, or from `begin_forward`
        if isinstance(error, OutOfMemoryError):
            return error
        traceback.clear_frames(error.__traceback__)  # they keep the call's tensors
        job = self._job
        remedy = "use a smaller batch, or shorter sequences"
        if self._may_spare and not self._ran_out:
            remedy = (
                "from now on backward computes again what it can, and the same batch may train "
                f"then; else {remedy}"
            )
        elif self._can_plan_again and self._limit_bytes is not None:
            self._plans_again = True
            remedy = (
                f"the next batch gets a new plan, by the memory that is free then; else {remedy}"
            )
        self._ran_out = True
        dropped = ""
        if call == "engine.backward":
            dropped = "; this step's gradients are dropped, and the next micro-batch is its first"
        return OutOfMemoryError(
            f"{job.device.name} is out of memory. It was in {call}, by a plan with "
            f"{format_size(job.plan.gpu_total_bytes)} for the model{dropped}; {remedy}. Torch "
            f"reports: {error}"
        )

    @property
    def _may_spare(self) -> bool:
        """True if a forward may keep less than the plan says."""
        return self._job.section.activations is None

    # -- the plan ---------------------------------------------------------------------------------
    def _may_move(self, waits: bool) -> bool:
        job = self._job
        return not waits and job.is_between_passes

    @property
    def _can_plan_again(self) -> bool:
        return self._job.trainer.can_plan_again and self._job.demand.layers_may_move

    def _may_plan_again(self, waits: bool) -> bool:
        return self._can_plan_again and self._may_move(waits)

    def _plan_for(self, size: BatchSize, work: Workload | None, *, may_move: bool) -> None:
        """Take the rules' plan for the batch ([Note: one plan]). Every rank calls it."""
        job, ranks = self._job, self._job.ranks
        free_bytes = job.device.memory.free_bytes()
        if free_bytes is not None:
            free_bytes = max(0, free_bytes - reserved_bytes(but=job)[0])
        first = _FirstBatch(size, work, free_bytes, may_move)
        first = _largest(ranks.of_all(first))
        if not first.may_move:
            logger.info("the plan stays as it is: a graph waits, or a step has begun")
            return
        chosen: Any = None
        if ranks.rank == 0:
            chosen = self._chosen(first)
        chosen = ranks.of_all(chosen)[0]
        if isinstance(chosen, BudgetError):
            # by these words Accelerate's loops know an error of memory
            raise OutOfMemoryError(
                f"{job.device.name} would be out of memory. {chosen}"
            ) from chosen
        job.take_plan(replace(chosen.plan, cpu_threads=job.plan.cpu_threads))
        self._planned, self._work = first.size, first.work
        self._limit_bytes = None if first.work is None else first.free_bytes
        self._levels.clear()
        self._evaluated = first.size
        logger.info("for batches of %d tokens: %s", first.size.tokens, job.plan)
        if first.work is not None:
            tokens_of_step = first.size.tokens * job.demand.micro_batches
            job.metrics.predicted_s = {tokens_of_step: chosen.step_s}
            job.predicted = chosen.forecast
            logger.info("predicted: %s", chosen.forecast)

    def _chosen(self, first: _FirstBatch) -> Choice | BudgetError:
        """The plan of the rules and its forecast, or the reason why there is none."""
        job, rates = self._job, self._rates()
        workload = first.work or self._uncounted(first.size)
        demand = job.demand
        if not demand.layers_may_move:
            demand = _present_demand(job)
        elif first.work is not None and first.free_bytes is not None:
            budget = int(GPU_SHARE * first.free_bytes)
            for_buffers = min(budget, job.section.gpu_memory or budget)
            demand = replace(
                self._demand(demand, workload, first.size),
                gpu_budget_bytes=budget,
                reserve_bytes=max(budget - for_buffers, self._evaluated_bytes),
                growth=self._growth(first.size),
            )
        demands = [demand]
        if job.section.batch_tokens is None and demand.growth > 1.0:
            demands.append(replace(demand, growth=1.0))  # no room to spare
        for demand in demands:
            try:
                return fastest_plan(
                    job.layout, demand, workload, rates, asynchronous=self._is_asynchronous
                )
            except BudgetError as error:
                refusal = error
        return refusal

    def _growth(self, size: BatchSize) -> float:
        """How many times the tokens of this batch a later one may have ([Note: larger batches])."""
        job = self._job
        most_tokens = job.section.batch_tokens
        if most_tokens is not None and size.tokens:
            return max(1.0, most_tokens / size.tokens)
        may_move = self._can_plan_again and job.demand.micro_batches == 1
        return 1.0 if may_move and not self._grows else HEADROOM

    def _demand(self, base: Demand, workload: Workload, size: BatchSize) -> Demand:
        """The planner's question `base` for a batch of counted work. Activations take their part of
        the device's memory."""
        sequences = size.tokens // size.length if size.length else size.tokens
        return replace(
            base,
            activations=self._job.pinned_activations,
            work=workload.layers,
            sequences=sequences,
            tokens=size.tokens,
            chunks=1 if base.chunk is None else max(1, -(-sequences // base.chunk)),
        )

    def _rates(self) -> Rates:
        job = self._job
        assert job.machine is not None
        rates = rates_of(
            job.machine,
            job.plan.cpu_threads,
            sharing=job.ranks.count,
            num_nodes=job.ranks.num_nodes,
            states=job.section.states,
        )
        if self._is_asynchronous:
            return rates
        # The emulated device computes in the calling thread, which launches nothing.
        return replace(rates, launch_s=0.0, recompute_launch_s=0.0)

    # -- work -------------------------------------------------------------------------------------
    def _count(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], size: BatchSize
    ) -> Workload | None:
        """The work of a batch. None: unknown, since the model's code needs values."""
        job = self._job
        device = job.device.torch_device
        generator = random_state(device)
        try:
            with job.trainer.resting_hooks(), torch.compiler.set_stance("force_eager"):
                costs = count_costs(
                    job.partition.model, job.partition, args, kwargs, dtype=job.precision
                )
        except ConfigError as error:
            logger.info("%s. The plan leaves memory to activations without a count", error)
            return None
        finally:
            if generator is not None:
                set_random_state(device, generator)
        assert job.machine is not None
        return workload_of(costs, job.machine, micro_batches=job.demand.micro_batches)

    def _uncounted(self, size: BatchSize) -> Workload:
        """The seconds of products, if every parameter takes part for every token."""
        job = self._job
        assert job.machine is not None
        token_s = 2.0 * max(1, size.tokens) / job.machine.flops[job.precision]
        layers = [
            LayerWork(forward_s=layer_s, backward_s=2.0 * layer_s)
            for layer_s in (token_s * layer.num_parameters for layer in job.layout.layers)
        ]
        return Workload(layers=tuple(layers), micro_batches=job.demand.micro_batches)

    # -- larger batches ---------------------------------------------------------------------------
    def _levels_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], size: BatchSize, *, waits: bool
    ) -> tuple[str, ...]:
        """The levels of a batch that trains ([Note: larger batches]). Layers may move.

        `OutOfMemoryError` if it has no room.
        """
        job = self._job
        if self._limit_bytes is None or size.is_within(self._planned):
            return job.plan.activations
        for known in self._levels:
            if size.is_within(known.size):
                return known.levels
        workload = self._count(args, kwargs, size)
        if workload is None:
            return job.plan.activations
        levels = self._levels_within(workload, size)
        if levels is None and self._may_plan_again(waits):
            self._grows = True
            try:
                self._plan_for(size, workload, may_move=True)
                return job.plan.activations
            except OutOfMemoryError as error:
                levels = self._last_levels(workload, size, error)
        elif levels is None:
            levels = self._last_levels(workload, size)
        elif self._needs(levels, _grown(workload), size) <= self._room_bytes():
            size = size.times(CHECKED_AHEAD)
        self._levels.append(_Levels(size, levels))
        return levels

    def _levels_within(self, workload: Workload, size: BatchSize) -> tuple[str, ...] | None:
        """The fastest levels that leave the allocator its share. None if none does."""
        job, room_bytes = self._job, self._room_bytes()
        if not job.trainer.can_plan_again:
            levels = job.plan.activations
            return levels if self._needs(levels, workload, size) <= room_bytes else None
        return fastest_levels(
            job.layout,
            self._demand(_present_demand(job), workload, size),
            workload,
            self._rates(),
            room_bytes,
            asynchronous=self._is_asynchronous,
        )

    def _last_levels(
        self, workload: Workload, size: BatchSize, refusal: OutOfMemoryError | None = None
    ) -> tuple[str, ...]:
        """The levels that take least, in all of the device. If they have no room, it raises
        `refusal`, or an `OutOfMemoryError` with the numbers of the present plan."""
        levels = self._job.plan.activations
        levels = spared(levels) if self._may_spare else levels
        need = self._needs(levels, workload, size)
        if need > self._room_bytes(1.0):
            raise refusal or OutOfMemoryError(self._refusal(size, need))
        return levels

    def _room_bytes(self, share: float = GPU_SHARE) -> int:
        """Bytes of the device for activations."""
        assert self._limit_bytes is not None
        return int(share * self._limit_bytes) - self._job.plan.gpu_total_bytes

    def _needs(self, levels: Sequence[str], workload: Workload, size: BatchSize) -> int:
        """Bytes of the activations of a batch that trains."""
        job = self._job
        return activation_bytes(job.layout, levels, self._demand(job.demand, workload, size))

    def _check_evaluation(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], size: BatchSize, *, waits: bool
    ) -> None:
        """Let a batch without a graph have room. `OutOfMemoryError` if it has none."""
        # Of no more tokens: text that is written token by token
        if self._limit_bytes is None or size.tokens <= self._evaluated.tokens:
            return
        workload = self._count(args, kwargs, size)
        if workload is None:
            return
        layout = self._job.layout
        made = [load.saved_bytes + load.passing_bytes for load in workload.layers]
        need = sum(made[index] for index in layout.resident)
        need += max((made[index] for index in layout.streamed), default=0)
        if need > self._room_bytes(1.0):
            if not self._may_plan_again(waits):
                raise OutOfMemoryError(self._refusal(size, need))
            self._plan_beside(size, need)
        is_ample = need * CHECKED_AHEAD**2 <= self._room_bytes()
        checked = size.times(CHECKED_AHEAD) if is_ample else size
        self._evaluated = self._evaluated.maximum(checked)

    def _plan_beside(self, size: BatchSize, need_bytes: int) -> None:
        """Plan again, with room for a batch without a graph. `OutOfMemoryError` if no plan has
        it."""
        before, self._evaluated_bytes = self._evaluated_bytes, need_bytes
        try:
            self._plan_for(self._planned, self._work, may_move=True)
        except OutOfMemoryError as error:
            self._evaluated_bytes = before
            raise OutOfMemoryError(self._refusal(size, need_bytes)) from error

    def _refusal(self, size: BatchSize, need_bytes: int) -> str:
        job = self._job
        assert self._limit_bytes is not None
        need = format_size(need_bytes, round_up=True)
        plan, limit = format_size(job.plan.gpu_total_bytes), format_size(self._limit_bytes)
        return (
            f"{job.device.name} would be out of memory. By estimate the activations of a batch "
            f"of {size.tokens:,} tokens take {need}, and the plan for batches of "
            f"{self._planned.tokens:,} tokens takes {plan} of {limit}. Set stronghold.batch_tokens "
            "to the tokens of the largest micro-batch, so that the plan leaves room for it; or use "
            "smaller batches, or shorter sequences"
        )


def _grown(workload: Workload) -> Workload:
    """The work of a batch that is CHECKED_AHEAD times as large. Attention grows by the square."""
    layers = [layer.grown(CHECKED_AHEAD**2) for layer in workload.layers]
    return replace(workload, layers=tuple(layers))


def _present_demand(job: Job) -> Demand:
    """The planner's question whose answer is the present plan. Early updates stay open."""
    plan, blocks = job.plan, job.layout.streamed
    return replace(
        job.demand,
        window=plan.window or None,  # 0 if every block stays
        resident_layers=len(plan.resident.intersection(blocks)),
        resident_updates="gpu" if plan.updated_on_gpu else "host",
        activations=plan.activations,
        in_files=plan.in_files,
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
