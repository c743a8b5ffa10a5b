"""The job: one model in training by one config.

It turns the config into layers and a plan, opens the device, and makes the trainer. The engine
calls it, and knows neither layers nor lanes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold import native
from stronghold.config import Settings, StrongholdConfig
from stronghold.devices import cuda
from stronghold.devices.cuda import CudaDevice
from stronghold.devices.device import Device
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.fences import LaneName
from stronghold.devices.threads import check_not_forked, forked_from
from stronghold.errors import ConfigError, LaneError, format_size
from stronghold.model.costs import DTYPES
from stronghold.model.inner_tensors import HeldTensors
from stronghold.model.layout import ModelLayout
from stronghold.model.logits import LogitsInParts
from stronghold.model.packed_weight import pack_frozen
from stronghold.model.partition import (
    NamedParameter,
    Partition,
    find_blocks,
    partition,
    why_no_blocks,
)
from stronghold.model.stored_tensors import CAST, COMPUTED, OWN, stored_tensors, training_dtypes
from stronghold.optim.states import states_of
from stronghold.plan.cost import Demand
from stronghold.plan.estimate import StepEstimate
from stronghold.plan.machine import MachineProfile
from stronghold.plan.plan import Plan, make_plan
from stronghold.private import report_untried
from stronghold.telemetry.metrics import Metrics
from stronghold.telemetry.trace import Trace, open_path
from stronghold.train import fragments
from stronghold.train.demand import FreeResources, demand_of, pinned_activations, ram_bytes
from stronghold.train.guards import COMPILED_WHOLE, Written, forbid_caches
from stronghold.train.layer import Layer, layers_of, layout_of
from stronghold.train.optimizer import EngineOptimizer
from stronghold.train.processes import RankGroup
from stronghold.train.rates import machine_at_start
from stronghold.train.stalled import StalledWeights
from stronghold.train.trainer import Trainer
from stronghold.train.training_thread import TrainingThread
from stronghold.train.updates import StepResult

# Keys without effect where there are no blocks.
OF_BLOCKS = ("window", "activations", "chunk", "streams")

logger = logging.getLogger("stronghold")


class OffDevice(Enum):
    """The part of an engine's state that has left the device. The value completes an error."""

    NOTHING = "nothing"
    TRAINING = "masters, moments and gradients"
    EVERYTHING = "the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Peak bytes per tier, as planned (the most of the plans before and after the first batch) and
    as measured; activations excepted. `gpu_process_peak` is all that tensors of this process had on
    a GPU at once, with activations (0 on the emulated device)."""

    gpu_planned: int
    gpu_peak: int
    host_planned: int
    host_peak: int
    host_activations: int
    nvme_planned: int = 0
    nvme_peak: int = 0
    gpu_process_peak: int = 0


class Job:
    """Trains `model` by `settings`, from the take-over until `close`.

    plan       the present one; `predicted` is its estimate of a step, for the batch that it was
               made for. `demand` is the question that it answers
    layout     sizes of the layers, for the planner
    machine    rates of this machine. None if the plan leaves nothing to choose
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        optimizer: EngineOptimizer | None,
        *,
        local_rank: int,
        ranks: RankGroup,
        make_trainer: Callable[..., Trainer] = Trainer,
    ) -> None:
        self.section, self.ranks, self._process = settings.stronghold, ranks, os.getpid()
        self._trace_path = self.section.trace and open_path(self.section.trace, ranks.rank)
        self.precision = settings.precision
        self.predicted: StepEstimate | None = None
        self._training_thread = TrainingThread()
        groups = {} if optimizer is None else optimizer.group_of()
        with contextlib.ExitStack() as undo:
            self._take_layers(model, settings, optimizer, undo)
            self._make_plan(settings, optimizer, local_rank)
            self.trace = Trace(ranks.rank, recording=self.section.trace is not None)
            self.metrics = Metrics(
                num_parameters=self.layout.num_parameters,
                recomputed=self.plan.recomputed,
                trace=self.trace,
            )
            self.machine = self._machine(local_rank) if self.demand.is_open else None
            self.device = self._open_device(local_rank, self.section.gpu_memory, self.trace)
            undo.callback(self.device.close)
            pool = native.Pool(self.plan.cpu_threads, ranks.cores or None)
            undo.callback(pool.close)
            # First: the trainer's hooks stand around the head's replaced forward.
            parts = LogitsInParts(
                model,
                self.section.loss_chunk,
                self._updates_of,
                lambda head, compute: self.trainer.run_with_weights(head, compute),
            )
            undo.callback(parts.close)
            nvme = self.section.nvme
            self.trainer: Trainer = make_trainer(
                self.partition,
                self.layers,
                groups,
                plan=self.plan,
                device=self.device,
                kernels=pool,
                metrics=self.metrics,
                thread=self._training_thread,
                folders=[] if nvme is None else [Path(path) for path in nvme.paths],
            )
            undo.callback(self.trainer.close)
            undo.push(self._end_others)  # first: the trainer's end waits for the other ranks
            self._stalled_weights = StalledWeights(self.trainer)
            attached = fragments.attach(self.trainer, clipping=settings.gradient_clipping)
            undo.callback(fragments.detach, attached)
            self._undo = undo.pop_all()
        self._planned = (self.plan.gpu_total_bytes, self.plan.host_total_bytes)
        self._off_device = OffDevice.NOTHING
        open_models.add(self)

    # -- opening ----------------------------------------------------------------------------------
    def _take_layers(
        self,
        model: nn.Module,
        settings: Settings,
        optimizer: EngineOptimizer | None,
        undo: contextlib.ExitStack,
    ) -> None:
        """Cut the model into layers, and look at the dtype and the optimizer of each parameter."""
        section, dtype = self.section, DTYPES[settings.precision]
        stored = stored_tensors(model)
        rule = section.dtypes or (OWN if stored.quantised else CAST)
        if section.frozen is not None:
            blocks = find_blocks(model, section.layers)
            pack_frozen(model, blocks, dtype if rule == CAST else None)
            stored = stored_tensors(model)
        groups = {} if optimizer is None else optimizer.group_of()
        dtypes = training_dtypes(stored, dtype=dtype, rule=rule)
        trained = {parameter: dtypes[parameter] for parameter in groups}
        self.partition: Partition = partition(model, section.layers, trained.get)
        named = [named for layer in self.partition.layers for named in layer.parameters]
        check_parameters(named, settings.precision, cast=rule == CAST)
        if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
            raise ConfigError(f"model: {COMPILED_WHOLE}")
        self.layers: list[Layer] = layers_of(
            self.partition,
            groups,
            dtype_of=dtypes.__getitem__,
            kind=section.states,
            aliases=stored.aliases,
        )
        self._held = HeldTensors(model)
        self.layout: ModelLayout = layout_of(self.layers, self.partition)
        self._stored = stored
        if self.ranks.rank == 0:
            report_untried()
            if not self.partition.streamed:
                say_no_blocks(model, section)
        if optimizer is not None:
            forbid_caches(model, undo)

    def _make_plan(
        self, settings: Settings, optimizer: EngineOptimizer | None, local_rank: int
    ) -> None:
        """Make the plan of before the first batch. BudgetError before anything is allocated."""
        on_device, on_host = reserved_bytes()
        free = cuda.free_bytes(local_rank) if self._is_on_gpu else None
        moments = () if optimizer is None else optimizer.default.moments
        self.states = states_of(DTYPES[self.precision], self.section.states, moments)
        self.demand: Demand = demand_of(
            settings,
            self.layout,
            self.states,
            self.ranks,
            FreeResources(
                gpu_free_bytes=None if free is None else max(0, free - on_device),
                host_reserved_bytes=on_host,
                model_bytes=ram_bytes(p for layer in self.layers for p in layer.parameters),
                cores=self.ranks.cores,
            ),
            training=optimizer is not None,
        )
        self.plan: Plan = make_plan(self.layout, self.demand)

    @property
    def _is_on_gpu(self) -> bool:
        return self.section.device != "emulated" and cuda.available()

    def _machine(self, local_rank: int) -> MachineProfile:
        """This machine's profile. A node's first rank measures alone."""
        ranks, threads = self.ranks, self.plan.cpu_threads
        profile: MachineProfile | None = None
        if ranks.index == 0:
            gpu = cuda.identity(local_rank)[0] if self._is_on_gpu else None
            profile = machine_at_start(
                lambda: self._open_device(local_rank), gpu, threads * ranks.count, self.precision
            )
        profile = ranks.of_node(profile)[0]
        assert profile is not None
        return profile

    def _end_others(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an exception no other rank waits for this one."""
        if error is not None:
            self.ranks.fail(f"{type(error).__name__}: {error}")

    def _open_device(
        self, local_rank: int, budget_bytes: int | None = None, trace: Trace | None = None
    ) -> Device:
        if self.section.device == "cuda" or self._is_on_gpu:
            return CudaDevice(local_rank, budget_bytes=budget_bytes, trace=trace)
        settings = self.section.emulated.model_dump()  # EmulatedDevice has the same names
        if settings["nvme_gbps"] is not None:  # ranks share the node's disks
            settings["nvme_gbps"] /= self.ranks.count
        return EmulatedDevice(budget_bytes=budget_bytes, trace=trace, **settings)

    def _updates_of(self, parameter: torch.Tensor) -> int | None:
        """Number of updates of the layer of a parameter. None for a block."""
        for layer in self.layers:
            if any(parameter is own for own in layer.parameters):
                return None if layer.is_block else layer.num_updates
        return None

    # -- the step ---------------------------------------------------------------------------------
    def training(self, operation: str) -> contextlib.AbstractContextManager[None]:
        """Context manager for a call of the thread that trains."""
        return self._training_thread.training(operation)

    def forward_pass(self) -> contextlib.AbstractContextManager[None]:
        self._held.check()
        return self.trainer.forward_pass()

    def begin_backward(self, *, ends_step: bool) -> None:
        self.check_here("backward")
        self.trainer.begin_backward(ends_step=ends_step)

    def step(self, *, clipping: float, loss_scale: float, skips_overflow: bool) -> StepResult:
        result = self.trainer.step(
            clipping=clipping, loss_scale=loss_scale, skips_overflow=skips_overflow
        )
        if not result.overflow:
            self._stalled_weights.end_step()
        return result

    @property
    def has_trained(self) -> bool:
        """True if a parameter was updated, here or before its checkpoint."""
        return any(counts.any() for counts in self.trainer.updates.counts.values())

    def trains(self, parameter: torch.Tensor) -> bool:
        """True if the optimizer owns the parameter."""
        return any(
            parameter is own
            for layer in self.layers
            for own in layer.parameters[: layer.num_trained]
        )

    # -- the plan ---------------------------------------------------------------------------------
    @property
    def is_between_passes(self) -> bool:
        """True if layers may move now."""
        return not (self.trainer.is_in_pass or self.trainer.is_in_step)

    @property
    def pinned_activations(self) -> str | tuple[str, ...] | None:
        """The config's levels. None leaves them to the rules."""
        return pinned_activations(self.section, self.layout)

    def take_plan(self, plan: Plan) -> None:
        """Go on with a plan for the next batch, between two passes, while no gradient exists."""
        with self._moving("a plan for the batch"):
            self.trainer.take_plan(plan)
        self.plan, self.metrics.recomputed = plan, plan.recomputed
        self._planned = (
            max(self._planned[0], plan.gpu_total_bytes),
            max(self._planned[1], plan.host_total_bytes),
        )

    @contextlib.contextmanager
    def _moving(self, operation: str) -> Iterator[None]:
        """Context manager in which layers move. After an exception some have moved, and nothing
        goes on."""
        self.trainer.refresh()  # first: it refuses values of another shape
        try:
            yield
        except BaseException as error:
            self.device.report(LaneError(LaneName.COMPUTE, operation, error))
            raise

    def compile_blocks(self, options: Mapping[str, Any]) -> None:
        """Compile each block's call with these options of `torch.compile`, until `close`. Blocks
        that the program has compiled stay as they are.

        ConfigError within a step.
        """
        self.check_here("engine.compile")
        self.trainer.check_between_passes("engine.compile")
        if self.trainer.is_in_step:
            raise ConfigError("engine.compile: call it between two steps, after engine.step")
        for module in (module for layer in self.partition.streamed for module in layer.modules):
            if module._compiled_call_impl is None:
                self._undo.callback(setattr, module, "_compiled_call_impl", None)
                module.compile(**options)

    # -- away from the device ---------------------------------------------------------------------
    def leave_device(self, *, keeps_weights: bool = False) -> None:
        """Move the model to the host, until `return_to_device`. Safe to call twice.

        keeps_weights  those stay on the device, and the model can be evaluated

        ConfigError within a pass, and while gradients wait for their step.
        """
        target = OffDevice.TRAINING if keeps_weights else OffDevice.EVERYTHING
        if self._off_device in (target, OffDevice.EVERYTHING):
            return
        self.check_process("engine.offload_states")
        self.trainer.check()
        self.trainer.check_between_passes("engine.offload_states")
        if self.trainer.is_in_step:
            raise ConfigError(
                "engine.offload_states: gradients of a step that has not ended are waiting: call "
                "it after engine.step, or throw them away with engine.zero_grad"
            )
        with self._moving("engine.offload_states"):
            if keeps_weights:
                self.trainer.keep_weights(self.plan)
            else:
                self.trainer.leave_device()
        self._off_device = target

    def return_to_device(self) -> None:
        """Undo `leave_device`. ConfigError, and nothing changes, if other programs have taken the
        memory."""
        self.device.check()
        if self.can_train:
            return
        self.check_process("engine.reload_states")
        self.trainer.check_between_passes("engine.reload_states")
        plan, memory = self.plan, self.device.memory
        need = plan.gpu_total_bytes - memory.allocated_bytes
        if not all(self.ranks.of_all(memory.has_room(need, plan.activation_bytes))):
            raise ConfigError(
                f"engine.reload_states: the plan needs {format_size(need)} on {self.device.name} "
                f"and {format_size(plan.activation_bytes)} for activations, and other programs "
                "have taken that memory: free it, or lower stronghold.gpu_memory and make the "
                "engine again from a checkpoint"
            )
        with self._moving("engine.reload_states"):
            self.trainer.take_plan(plan)
        self._off_device = OffDevice.NOTHING

    @property
    def can_train(self) -> bool:
        """False while something is away from the device."""
        return self._off_device is OffDevice.NOTHING

    @property
    def is_away(self) -> bool:
        """True while the whole model is away from the device."""
        return self._off_device is OffDevice.EVERYTHING

    # -- between steps ----------------------------------------------------------------------------
    @property
    def parameters(self) -> list[list[torch.Tensor]]:
        """Of each layer."""
        return [layer.parameters for layer in self.layers]

    def settle(self, layers: Sequence[int] | None = None) -> None:
        """Wait until the parameters of these layers, or of all (None), have their newest values.
        Between two passes the program may also write all of them."""
        self.check_process("reading parameters")
        if layers is None and not self.trainer.is_in_pass:
            self.trainer.synchronize()
            return
        for index in range(len(self.layers)) if layers is None else layers:
            self.layers[index].weight_record.wait()

    def adopt_weights(self, written: Written | None = None) -> None:
        """Make new values of these parameters, or of all (None), the masters. They were written to
        the memory that the parameters point to."""

        def positions(layer: Layer) -> Collection[int]:
            return range(layer.num_trained) if written is None else written.get(layer.index, ())

        self.trainer.adopt(positions)

    def layer_of_tensors(self) -> dict[int, int]:
        """The number of the layer of each parameter, by identity. A quantised one is in the layer
        of its inner tensors, as all that its module holds."""
        layer_of = {id(p): layer.index for layer in self.layers for p in layer.parameters}
        for module in self.partition.model.modules():
            for inner in self._stored.held_by(module):
                for parameter in module.parameters(recurse=False):
                    layer_of.setdefault(id(parameter), layer_of[id(inner)])
        return layer_of

    def begin_save(self) -> None:
        """Raise ConfigError unless a checkpoint may be saved now. Adopt weights that the program
        has pointed elsewhere."""
        self.trainer.check()
        self.partition.names.check()
        self._held.check()
        self.trainer.check_between_passes("save_checkpoint")
        self.trainer.refresh()

    def check_process(self, operation: str, *, any_thread: bool = False) -> None:
        """Raise ConfigError in a forked child, and in another thread than the one that trains."""
        if any_thread:
            check_not_forked(self._process, operation)
        else:
            self._training_thread.check(operation)

    def check_here(self, operation: str, *, evaluates: bool = False) -> None:
        """Raise ConfigError as `check_process` does, and while what the operation needs is away
        from the device.

        evaluates  it needs the weights alone
        """
        self.check_process(operation)
        if self.is_away or not (evaluates or self.can_train):
            raise ConfigError(
                f"{operation}: engine.offload_states() has taken {self._off_device.value} off the "
                "device: call engine.reload_states() first"
            )

    # -- reports ----------------------------------------------------------------------------------
    def memory_report(self) -> MemoryReport:
        """Bytes so far, and as planned."""
        return MemoryReport(
            gpu_planned=self._planned[0],
            gpu_peak=self.device.memory.peak_bytes,
            host_planned=self._planned[1],
            host_peak=self.trainer.arrays.host_peak_bytes,
            host_activations=self.trainer.offload.host_bytes,
            nvme_planned=self.plan.nvme_total_bytes,
            nvme_peak=self.trainer.arrays.file_bytes,
            gpu_process_peak=self.device.memory.process_peak_bytes(),
        )

    def write_trace(self) -> None:
        """Write the trace file, if the config asks for one."""
        if self._trace_path is not None:
            self.device.settle()
            self.trace.write(self._trace_path)

    # -- life -------------------------------------------------------------------------------------
    def finish(self, first: Callable[[], object]) -> None:
        """The process ends: call `first`, then finish queued operations."""
        try:
            first()
        finally:
            self.device.finish()
            self.write_trace()
        self.device.check_unsurfaced()

    def close(self) -> None:
        """Finish pending work, end the lanes, give the model back. Safe to call twice. Raises
        LaneError after that, for a failure that no call has raised yet."""
        if self not in open_models or forked_from(self._process):
            return
        open_models.discard(self)
        try:
            with self._undo:  # the lanes and the pool end whatever happens
                self.device.finish()
        finally:
            self.ranks.close()
        self.write_trace()
        self.device.check_unsurfaced()


open_models: weakref.WeakSet[Any] = weakref.WeakSet()


def reserved_bytes(but: Any = None) -> tuple[int, int]:
    """Return bytes on the device and in RAM that other engines of this process will still take.

    The first backward allocates gradient slots, each step activations. An engine that is away from
    the device has left its room there to others. `but`: an engine that does not count.
    """
    on_device = on_host = 0
    for job in open_models:
        if job is but:
            continue
        plan = job.plan
        if job.can_train:
            need = plan.gpu_total_bytes + plan.activation_bytes
            on_device += max(0, need - job.device.memory.allocated_bytes)
        need = plan.host_total_bytes + plan.offloaded_bytes
        on_host += max(0, need - job.trainer.arrays.host_bytes)
    return on_device, on_host


def check_parameters(parameters: Sequence[NamedParameter], precision: str, *, cast: bool) -> None:
    """Raise ConfigError for a parameter without values, or in another precision than the config.
    Warn of parameters that are not contiguous."""
    for named in parameters:
        dtype = named.parameter.dtype
        if named.parameter.is_meta:
            raise ConfigError(
                f"{named.name} is on the meta device: load its values before stronghold.initialize"
            )
        if cast and precision == "fp32" and dtype in COMPUTED and dtype is not torch.float32:
            section = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
            add = f'add "{section}": {{"enabled": true}} or ' if section else ""
            raise ConfigError(
                f"{named.name} is {dtype}, but the config asks for fp32: "
                f"{add}load the model in torch.float32"
            )
    strided = [named.name for named in parameters if not named.parameter.is_contiguous()]
    if strided:
        # Kernels are chosen by strides, too: transposed weights multiply in another order.
        logger.warning(
            "%s and %d more parameters are not contiguous (transposed, or channels_last): layers "
            "are trained as contiguous arrays. Bits are those of the model with "
            "p.data = p.data.contiguous(), to which it can be changed before stronghold.initialize",
            strided[0],
            len(strided) - 1,
        )


def say_no_blocks(model: nn.Module, section: StrongholdConfig) -> None:
    keys = [key for key in OF_BLOCKS if getattr(section, key) is not None]
    names = ", ".join(f"stronghold.{key}" for key in keys)
    logger.warning(
        "the whole model stays on the device: %s%s",
        why_no_blocks(model),
        f" Without effect, since blocks alone are streamed: {names}." if keys else "",
    )
