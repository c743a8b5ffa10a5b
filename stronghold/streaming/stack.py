"""The parts of one engine, built in order and closed in reverse.

Owns the life of every part: device, host slabs, and the runtime that trains with them. Nothing here
is DeepSpeed's; `engine` puts that border around it. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from stronghold import native
from stronghold.config import Settings, StrongholdConfig
from stronghold.devices import cuda
from stronghold.devices.base import Device
from stronghold.devices.cuda import CudaDevice
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.forks import check_not_forked, forked_from
from stronghold.devices.lane_name import LaneName
from stronghold.distributed.node_weights import shared_weights
from stronghold.distributed.process_groups import Ranks, share_of_cores
from stronghold.distributed.sharding import check_alike
from stronghold.errors import ConfigError, LaneError, StateError, format_size
from stronghold.limits import available_host_bytes
from stronghold.memory.nvme import BLOCK_BYTES, NvmeStore
from stronghold.memory.rates import machine_at_start
from stronghold.memory.slab import check_mappings, trim_heap
from stronghold.memory.staging import NO_RING, StagingRing, open_ring
from stronghold.memory.stores import Extent, Store
from stronghold.memory.tiers import Tiers, extent_requests
from stronghold.model.costs import DTYPES
from stronghold.model.inner_tensors import follow_device, wrappers
from stronghold.model.layout import ModelLayout, layout
from stronghold.model.logits import Forward, LogitsInParts
from stronghold.model.packed_formats import FORMATS, PackingError
from stronghold.model.packing import choose_packed, kind_of_weight, sum_of_errors
from stronghold.model.partition import Layer, NamedParameter, Partition, partition, why_no_blocks
from stronghold.model.stored_tensors import PackedParameter, stored_tensors
from stronghold.optim.states import States, states_of
from stronghold.plan.cost import Demand
from stronghold.plan.estimate import StepEstimate
from stronghold.plan.homes import FILE, GPU, Home
from stronghold.plan.machine import MachineProfile
from stronghold.plan.plan import Plan, make_plan
from stronghold.streaming.activations.key_value_caches import forbid_caches
from stronghold.streaming.decoded_weights import return_packed
from stronghold.streaming.demand import FreeResources, demand_of, pinned_activations, ram_bytes
from stronghold.streaming.formats import CAST, COMPUTED, OWN, model_formats, page_items
from stronghold.streaming.guards import COMPILED_WHOLE
from stronghold.streaming.optimizer import EngineOptimizer
from stronghold.streaming.optimizer_step import GateResult
from stronghold.streaming.parts import Written, assemble
from stronghold.streaming.patches.modules import is_compiled
from stronghold.streaming.patches.versions import report_untried
from stronghold.streaming.steps import StalledWeights
from stronghold.streaming.trainer import Runtime
from stronghold.telemetry.metrics import Metrics
from stronghold.telemetry.trace import Trace, open_path

# Keys without effect where there are no blocks.
OF_BLOCKS = ("window", "prefetch", "activations", "kept_activations", "chunk", "streams")
# of the model's own memory may wait in the heap when it was taken over
TRIM_BYTES = 256 << 20

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


class Stack:
    """The parts that train one model. Opens them in order, and closes them in reverse.

    1. Formats, layers and the layout of the model; then the plan. ConfigError or BudgetError come
       before anything is allocated.
    2. Device, threads of the update kernels, files.
    3. Layers, adopted one by one, so that RAM never has two copies of the model.
    4. Hooks: the model may be called.

    `close` gives the model back: every parameter is a CPU tensor with its newest value, and every
    hook is removed.
    """

    can_plan_again = False  # layers move to the device alone

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        optimizer: EngineOptimizer | None,
        *,
        local_rank: int,
        ranks: Ranks,
    ) -> None:
        section = settings.stronghold
        self._closed = False
        self._off_device = OffDevice.NOTHING
        self.section = section
        self._process = os.getpid()
        self.precision = settings.precision
        self.dtype = DTYPES[settings.precision]
        groups = {} if optimizer is None else optimizer.group_of()
        self.stored = stored_tensors(model)
        rule = section.dtypes or (OWN if self.stored.quantised else CAST)
        if section.frozen is not None:
            self.stored = stored_tensors(model, self._packed(model, section.frozen, rule))
        chosen = model_formats(
            self.stored,
            dtype=self.dtype,
            kind=section.states,
            rule=rule,
            optimizers={parameter: group[1] for parameter, group in groups.items()},
            default=None if optimizer is None else optimizer.default,
        )
        self.formats = chosen.formats
        self.partition: Partition = partition(model, section.layers, chosen.of, self.stored.packed)
        check_parameters(self._values_of_model(), settings.precision, cast=rule == CAST)
        self.ranks = ranks
        page = page_items(self.formats, in_files=section.nvme is not None)
        self.layout: ModelLayout = layout(self.partition, self.ranks.num_ranks, page, chosen.of)
        kind = section.device or ("cuda" if cuda.available() else "emulated")
        on_gpu = kind == "cuda" and cuda.available()
        on_device, host_reserved_bytes = reserved_bytes()
        self.gpu_free_bytes = None
        if on_gpu:
            self.gpu_free_bytes = max(0, cuda.free_bytes(local_rank) - on_device)
        self.ranks.cores = self._own_cores()
        moments = () if optimizer is None else optimizer.default.moments
        self.states: States = states_of(self.dtype, section.states, moments)
        self.demand: Demand = demand_of(
            settings,
            self.layout,
            self.formats,
            self.states,
            self.ranks,
            FreeResources(
                gpu_free_bytes=self.gpu_free_bytes,
                host_reserved_bytes=host_reserved_bytes,
                model_bytes=self._model_bytes(),
                cores=self.ranks.cores,
            ),
            training=optimizer is not None,
        )
        rank = self.ranks.global_rank
        self._trace_path = section.trace and open_path(section.trace, rank)
        self.plan: Plan = make_plan(self.layout, self.demand)
        self.predicted: StepEstimate | None = None  # for the batch for which the plan was made
        check_alike(self.ranks, self.layout, self.plan, settings.precision)
        if rank == 0:
            report_untried()
            if not self.partition.streamed:
                say_no_blocks(model, section)
        if not self.plan.whole and is_compiled(model):
            raise ConfigError(f"model: {COMPILED_WHOLE}")
        self.trace = Trace(rank, recording=section.trace is not None)
        self.metrics = Metrics(
            num_parameters=self.layout.num_parameters,
            recomputed=self.plan.recomputed,
            trace=self.trace,
        )
        # a failure closes the parts that were opened before
        with contextlib.ExitStack() as undo:
            undo.callback(self.ranks.close)
            # None if the plan has nothing to learn from the machine's rates
            self.machine: MachineProfile | None = None
            if self.demand.is_open and not self.plan.whole:
                self.machine = self._machine(kind, local_rank)
            self.device = self._open_device(kind, local_rank, section.gpu_memory, self.trace)
            undo.callback(self.device.close)
            self.pool = native.Pool(self.plan.cpu_threads, self.ranks.cores or None)
            undo.callback(self.pool.close)
            self._build(model, optimizer, self._open_tiers(undo), undo)
            if self.demand.training:
                forbid_caches(model, undo)
            undo.callback(LogitsInParts(model, section.loss_chunk, self._updates_of).close)
            self._parts = undo.pop_all()
        self._planned = (self.plan.gpu_total_bytes, self.plan.host_total_bytes)
        open_models.add(self)

    def _own_cores(self) -> tuple[int, ...]:
        """The cores of the update threads: of several ranks each has its share. Empty for one rank,
        which has all. Every rank calls it."""
        if not self.ranks.several:
            return ()
        on_node = self.ranks.on_node
        allowed = on_node.of_node(sorted(os.sched_getaffinity(0)))
        return share_of_cores(allowed, on_node.index)

    def _packed(
        self, model: nn.Module, format_name: str, rule: str
    ) -> dict[nn.Parameter, PackedParameter]:
        """Describe the frozen weights that are packed. `rule`: that of `stronghold.dtypes`."""

        def dtype_of(tensor: torch.Tensor) -> torch.dtype:
            is_cast = rule == CAST and tensor.dtype in COMPUTED
            return self.dtype if is_cast else tensor.dtype

        blocks = partition(model, self.section.layers)
        return choose_packed(blocks, FORMATS[format_name], dtype_of)

    def _values_of_model(self) -> list[NamedParameter]:
        """The stored tensors whose values the model has: no packed ones."""
        return [
            named
            for layer in self.partition.layers
            for named in layer.parameters
            if named.parameter not in _packed_tensors(layer)
        ]

    def _updates_of(self, weight: torch.Tensor) -> int | None:
        """Number of updates of the layer of a parameter. None for a streamed layer."""
        for layer, parameters in zip(self.partition.layers, self.parameters, strict=True):
            if any(parameter is weight for parameter in parameters):
                counts = self.host.layers[layer.index].optimizer.counts
                return None if layer.streamed else sum(counts)
        return None

    def _model_bytes(self) -> int:
        """Bytes of the model's own parameters in RAM. The slabs replace them."""
        tensors: list[torch.Tensor] = []
        for layer in self.partition.layers:
            tensors += [named.parameter for named in layer.parameters]
            tensors += [described.parameter for described in layer.packed]
        return ram_bytes(tensors)

    def _machine(self, kind: str, local_rank: int) -> MachineProfile:
        """This machine's profile. Every rank calls it; a node's first rank measures alone."""
        on_node, alone = self.ranks.on_node, self.plan.cpu_threads
        threads = tuple(sorted({alone, alone * on_node.count}))

        def of_first_rank() -> MachineProfile | None:
            if on_node.index > 0:
                return None
            on_gpu = kind == "cuda" and cuda.available()
            gpu = cuda.identity(local_rank)[0] if on_gpu else None
            open_device = functools.partial(self._open_device, kind, local_rank)
            return machine_at_start(open_device, gpu, threads, self.precision)

        profile = on_node.together(of_first_rank)[0]
        assert profile is not None
        return profile

    def _open_device(
        self,
        kind: str,
        local_rank: int,
        budget_bytes: int | None = None,
        trace: Trace | None = None,
    ) -> Device:
        if kind == "cuda":
            return CudaDevice(local_rank, budget_bytes=budget_bytes, trace=trace)
        settings = self.section.emulated.model_dump()  # EmulatedDevice has the same names
        if settings["nvme_gbps"] is not None:  # ranks share the node's disks
            settings["nvme_gbps"] /= self.ranks.on_node.count
        return EmulatedDevice(budget_bytes=budget_bytes, trace=trace, **settings)

    def _open_tiers(self, undo: contextlib.ExitStack) -> Tiers:
        """Open the stores of the plan's staged homes. `undo` closes them. Every rank calls it."""
        plan, ranks, homes = self.plan, self.ranks, self.plan.homes
        ring, stores = NO_RING, dict[Home, Store]()
        if homes.staged_homes:
            staging = plan.staging

            def make_ring() -> None:
                nonlocal ring
                ring = open_ring(
                    staging.entries,
                    staging.piece_bytes,
                    undo,
                    num_updates=staging.update_entries,
                    device=self.device,
                )

            ranks.on_disks.together(make_ring)  # if it fails on one rank, all raise
            for home in homes.staged_homes:
                extents = extent_requests(self.layout, self.formats, homes, ranks.shards, home)
                stores[home] = STORES[home](self, extents, ring)
                undo.callback(stores[home].close)
            # closed first: lanes may still use the stores
            undo.callback(self.device.close)
        return Tiers(self.layout, self.formats, homes, stores, ring, shards=ranks.shards)

    def _build(
        self,
        model: nn.Module,
        optimizer: EngineOptimizer | None,
        tiers: Tiers,
        undo: contextlib.ExitStack,
    ) -> None:
        """Assemble the parts, take the model over layer by layer, and attach the hooks."""
        parameters = [
            [named.parameter for named in layer.parameters] for layer in self.partition.layers
        ]
        shared = shared_weights(self.layout, self.formats, self.ranks)
        self._made = made = assemble(
            layout=self.layout,
            device=self.device,
            plan=self.plan,
            parameters=parameters,
            groups={} if optimizer is None else optimizer.group_of(),
            kernels=self.pool,
            metrics=self.metrics,
            tiers=tiers,
            undo=undo,
            weights=shared,
            aliases=self.stored.aliases,
            packed=[layer.packed for layer in self.partition.layers],
        )
        self.host, self.store, self.steps = made.host, made.store, made.steps
        self._stalled_weights = StalledWeights(self.host, self.steps)
        for state in self.host.layers:
            state.pool = self.pool
        self.team, self.outside, self.trainer = made.team, made.outside, made.trainer
        self.parameters = parameters
        self.runtime = self._make_runtime(self.plan)
        # A large model takes minutes. A small one shows no bar.
        bar = tqdm(
            parameters,
            desc="taking the model over",
            unit="layer",
            delay=2.0,
            leave=False,
            disable=shared is not None and not shared.fills,
        )
        freed_bytes = 0
        for index, layer_parameters in enumerate(bar):
            packed = [described.parameter for described in self.partition.layers[index].packed]
            freed_bytes += sum(p.nbytes for p in (*layer_parameters, *packed))
            made.adopt(index)
            self.runtime.executor.rest(index)
            if self.demand.training:
                self.host.map_ahead(index)
            if freed_bytes >= TRIM_BYTES:
                freed_bytes = 0
                trim_heap()
        trim_heap()
        self._report_packing()
        self._move_buffers(self.device.torch_device)
        self.team.agree("taking the model over")
        self.runtime.start(self.partition)

    def _report_packing(self) -> None:
        """Log the error of the weights that were packed, for each kind of layer."""
        errors: dict[str, list[PackingError]] = {}
        for state in self.host.layers:
            for name, error in state.packing_errors.items():
                errors.setdefault(kind_of_weight(state.layout.name, name), []).append(error)
        for kind, of_kind in errors.items():
            error = sum_of_errors(of_kind)
            logger.info(
                "packed in %s: %d x %s, error %.2g rms, %.2g at most",
                self.section.frozen,
                len(of_kind),
                kind,
                error.rms,
                error.largest,
            )

    def _move_buffers(self, device: torch.device) -> None:
        """Move the buffers.

        Modules may keep tensors that are no buffers, and move them in their own way when they are
        moved (torchmetrics' metrics). So modules of which a layer stores nothing are moved whole.
        """
        for buffer in self.partition.model.buffers():
            buffer.data = buffer.data.to(device)
        for module in self.partition.modules_without_stored():
            module.to(device)

    def hide_packed(self) -> None:
        """Hide the packed parameters: from now on a read decodes them."""
        for layer in self.partition.layers:
            self.runtime.executor.weights.decoded.rest(layer.index)

    def decode_at_rest(self, layer: int) -> None:
        """Give the layer's packed parameters their values: a program reads them."""
        self.host.layers[layer].wait()
        self.runtime.executor.weights.decoded.decode_at_rest(layer)

    def note_copy(self, layer: int, parameter: nn.Parameter, copy: torch.Tensor) -> None:
        """A program pointed a parameter at a copy of its values on another device."""
        self.runtime.executor.bindings.note_copy(layer, parameter, copy)

    def _make_runtime(self, plan: Plan) -> Runtime:
        budget = self.demand.host_budget_bytes
        room = None if budget is None else budget - plan.host_total_bytes
        return Runtime(self._made, plan, host_room_bytes=room, check_trains=self.check_here)

    def check_process(self, operation: str, *, any_thread: bool = False) -> None:
        """Raise ConfigError in a forked child, and in another thread than the one that trains.

        `any_thread`: the operation changes no layer's state.
        """
        check_not_forked(self._process, operation)
        if not any_thread:
            self.trainer.check(operation)

    @property
    def can_train(self) -> bool:
        """False while something is away from the device."""
        return self._off_device is OffDevice.NOTHING

    @property
    def is_away(self) -> bool:
        """True while the whole model is away from the device."""
        return self._off_device is OffDevice.EVERYTHING

    def check_here(self, operation: str, *, evaluates: bool = False) -> None:
        """Raise ConfigError as `check_process` does, and while the model is away from the device.

        `evaluates`: the operation needs the weights alone.
        """
        self.check_process(operation)
        if self.is_away or not (evaluates or self.can_train):
            raise ConfigError(
                f"{operation}: engine.offload_states() has taken {self._off_device.value} off the "
                "device: call engine.reload_states() first"
            )

    def settle(self, layers: Sequence[int] | None = None) -> None:
        """Wait until the parameters of these layers, or of all (None), have their newest values."""
        self.check_process("reading parameters")
        self.outside.check()
        if not self.is_away:
            self.runtime.settle(layers)

    def wait_for_readers(self) -> None:
        """Block until no operation reads the arrays, before the program writes them."""
        self.check_process("writing parameters")
        for state in self.host.layers:
            state.wait_unused()
        # other ranks may still read the old ones
        self.team.barrier("before new weights")

    # -- the step ---------------------------------------------------------------------------------
    def training(self, operation: str) -> contextlib.AbstractContextManager[None]:
        return self.trainer.training(operation)

    def forward_pass(self) -> contextlib.AbstractContextManager[None]:
        return self.runtime.forward_pass()

    def begin_backward(self, *, ends_step: bool) -> None:
        self.runtime.begin_backward(boundary=ends_step)

    def end_backward(self) -> None:
        self.runtime.end_backward()

    def end_micro_batch(self) -> None:
        """Nothing is left to do."""

    def abandon_backward(self) -> None:
        self.runtime.abandon_backward()

    def step(self, *, clipping: float, loss_scale: float, skips_overflow: bool) -> GateResult:
        result = self.runtime.close_gate(
            clipping=clipping, loss_scale=loss_scale, skip_on_overflow=skips_overflow
        )
        if not result.overflow:
            self._stalled_weights.end_step()
        return result

    @property
    def is_in_step(self) -> bool:
        return self.runtime.ledger.is_in_step

    @property
    def is_between_passes(self) -> bool:
        return self.runtime.is_between_passes

    @property
    def has_trained(self) -> bool:
        return self.host.training

    @property
    def host_bytes(self) -> int:
        return self.host.allocated_bytes

    def trains(self, parameter: torch.Tensor) -> bool:
        return self.steps.trains(parameter)

    def resting_hooks(self) -> contextlib.AbstractContextManager[None]:
        return self.runtime.resting_hooks()

    def take_levels(self, levels: Sequence[str]) -> None:
        self.runtime.activations.spares = tuple(levels) != self.plan.activations

    @property
    def pinned_activations(self) -> str | tuple[str, ...] | None:
        return pinned_activations(self.section, self.layout)

    def is_aliased(self) -> bool:
        self.runtime.settle()
        return bool(self.runtime.executor.aliased(range(len(self.parameters))))

    def check_whole(self) -> None:
        self.runtime.ledger.check()

    def begin_save(self) -> None:
        self.runtime.ledger.check()
        self.partition.names.check()
        self.runtime.check_between_passes("save_checkpoint")
        self.runtime.adopt_edited()

    def check_between_passes(self, operation: str) -> None:
        """Raise ConfigError within a forward or a backward."""
        if not self.is_away:
            self.runtime.check_between_passes(operation)

    @property
    def num_changes(self) -> int:
        """Steps and loads so far."""
        return self.steps.num_changes

    def layer_of_tensors(self) -> dict[int, int]:
        """The number of the layer of each parameter and stored tensor, by identity."""
        layer_of: dict[int, int] = {}
        for state in self.host.layers:
            layer_of |= {id(tensor): state.index for tensor in state.parameters}
            layer_of |= {id(packed.parameter): state.index for packed in state.packed}
        return layer_of

    def drop_decoded(self, layers: Sequence[int]) -> None:
        """Drop decoded values of these layers' packed weights, which a program has read."""
        for layer in layers:
            self.runtime.executor.weights.decoded.rest(layer)

    def changing(self, operation: str) -> contextlib.AbstractContextManager[None]:
        return self.runtime.ledger.changing(operation)

    def adopt_weights(self, written: Written | None = None) -> None:
        """Make new values of these parameters, or of all (None), the masters."""
        if self.is_away:
            self.steps.num_changes += 1
            for index in range(len(self.parameters)) if written is None else written:
                self.host.access.restart_master(index, written and written[index])
        else:
            self.runtime.adopt_weights(written)

    def drop_gradients(self, part: str | None = None) -> None:
        """Drop the gradients that wait for the step. Raises ConfigError for one `part` of the
        model."""
        if not self.runtime.ledger.is_in_step:
            return
        if part is not None:
            raise ConfigError(
                f"zero_grad between backward and step of a part of the model, without {part}: "
                "gradients are thrown away together; call it on the whole model or on the engine, "
                "or freeze the part before backward (requires_grad_(False))"
            )
        self.runtime.drop_gradients()

    def take_plan(self, plan: Plan) -> None:
        """Go on with the plan for the first batch, while no gradient exists. Every rank calls it.

        Buffers of one plan at a time are on the device. Layers may move to the device alone.
        """
        try:
            self._finish_runtime()
            self._drop_runtime()
            for layer in sorted(plan.updated_on_gpu):
                if self.host.layers[layer].home is not GPU:
                    self.store.move_to_device(layer)
            self.host.apply_plan(plan.pending, plan.ring_entries, plan.early)
            # The plan before has allocated no gradients on the device.
            gpu_before, host_before = self.plan.gpu_weight_bytes, self._planned[1]
            self._planned = (
                max(gpu_before, plan.gpu_total_bytes),
                max(host_before, plan.host_total_bytes),
            )
            self.plan = plan
            self.metrics.recomputed = plan.recomputed
            self._start(plan)
        # after Ctrl-C parts of two plans are mixed for good
        except BaseException as error:
            self.device.report(LaneError(LaneName.COMPUTE, "the plan for the first batch", error))
            raise

    def compile_blocks(self, options: Mapping[str, Any]) -> None:
        """Compile each block's forward by `torch.compile`. The engine's hooks stay uncompiled.

        `close` undoes it. Raises ConfigError within a step.
        """
        self.check_here("engine.compile")
        if self.runtime.ledger.is_in_step:
            raise ConfigError("engine.compile: call it between two steps, after engine.step")
        self.runtime.settle()
        self.runtime.detach()
        for module in (module for layer in self.partition.streamed for module in layer.modules):
            self._parts.callback(_give_forward, module, vars(module).get("forward"))
            run: Any = torch.compile(module.forward, **options)
            run.__wrapped__ = module.forward
            vars(module)["forward"] = Forward(module, run)
        self.runtime.start(self.partition)

    # -- away from the device ---------------------------------------------------------------------
    def leave_device(self, *, keeps_weights: bool = False) -> None:
        """Move the whole model off the device, until `return_to_device`. Safe to call twice.

        Every parameter has its newest value on the CPU, and the module is a plain one.
        `keeps_weights`: masters, moments and gradient slots leave alone. The model can still be
        evaluated. Every rank calls it, between two steps. Raises ConfigError while gradients wait
        for their step.
        """
        target = OffDevice.TRAINING if keeps_weights else OffDevice.EVERYTHING
        if self._off_device in (target, OffDevice.EVERYTHING):
            return
        self.check_process("engine.offload_states")
        self.runtime.check_between_passes("engine.offload_states")
        if self.runtime.ledger.is_in_step:
            raise ConfigError(
                "engine.offload_states: gradients of a step that has not ended are waiting: call "
                "it after engine.step, or throw them away with engine.zero_grad"
            )
        self._finish_runtime()
        self.store.offload_arrays(keeps_weights=keeps_weights)
        self._drop_runtime()
        self._off_device = target
        if keeps_weights:
            self._start(self.plan)
        else:
            self._move_buffers(torch.device("cpu"))

    def return_to_device(self) -> None:
        """Undo `leave_device`. Raises ConfigError, and changes nothing, if other programs have
        taken the memory on any rank."""
        if self.can_train:
            return
        self.check_process("engine.reload_states")
        plan, device = self.plan, self.device
        need = plan.gpu_total_bytes - device.memory.allocated_bytes
        if self.ranks.least(device.memory.has_room(need, plan.activation_bytes)) != 1:
            raise ConfigError(
                f"engine.reload_states: the plan needs {format_size(need)} on {device.name} and "
                f"{format_size(plan.activation_bytes)} for activations, and other programs have "
                "taken that memory: free it, "
                "or lower stronghold.gpu_memory and make the engine again from a checkpoint"
            )
        if not self.is_away:
            self._finish_runtime()
            self._drop_runtime()
        self.store.reload_arrays()
        self._move_buffers(device.torch_device)
        self._off_device = OffDevice.NOTHING
        self._start(plan)

    def _finish_runtime(self) -> None:
        """Finish all work of the plan between two steps, and detach the hooks."""
        # while the slots still have the values that a program wrote
        self.runtime.adopt_edited()
        self.runtime.restart()
        self.runtime.settle()
        self.runtime.detach()
        self.device.finish()

    def _drop_runtime(self) -> None:
        """Point every parameter at its arrays, and drop the plan's buffers."""
        self.runtime.give_back()
        self.runtime.close()

    def _start(self, plan: Plan) -> None:
        self.runtime = self._make_runtime(plan)
        for layer in range(len(self.parameters)):
            self.runtime.executor.rest(layer)
        self.runtime.start(self.partition)

    def prepare_training(self) -> None:
        """Allocate masters, moments and gradient buffers on the host. Safe to call twice."""
        self.host.prepare_training()
        self.store.prepare_training()

    def memory_report(self) -> MemoryReport:
        """Return bytes so far. The first backward allocates gradient slots, and what trains on the
        device."""
        return MemoryReport(
            gpu_planned=self._planned[0],
            gpu_peak=self.device.memory.peak_bytes + self.runtime.kept_gradient_bytes,
            host_planned=self._planned[1],
            host_peak=self.host.peak_bytes,
            host_activations=self.runtime.activations.host_bytes,
            nvme_planned=self.plan.nvme_total_bytes,
            nvme_peak=self.host.tiers.stored_bytes,
            gpu_process_peak=self.device.memory.process_peak_bytes(),
        )

    def write_trace(self) -> None:
        """Write the trace file, if the config asks for one."""
        if self._trace_path is not None:
            self.device.settle()
            self.trace.write(self._trace_path)

    def finish(self, first: Callable[[], object]) -> None:
        """The process ends: call `first`, then finish queued operations.

        Hazard: a lane that computes while the interpreter shuts down aborts the process. Raises
        LaneError as `close` does.
        """
        try:
            first()
        finally:
            self.device.finish()
            self.write_trace()
        self.device.check_unsurfaced()

    def close(self) -> None:
        """Finish pending work, end the lanes, give the model back. Safe to call twice.

        Raises LaneError after that, for a failure that no call has raised yet: the weights may
        belong to two steps.
        """
        if self._closed or forked_from(self._process):
            return
        self._closed = True
        open_models.discard(self)
        with self._parts:  # the lanes and the pool end whatever happens below
            self.runtime.detach()
            self.device.close()
            self.store.return_weights()
            try:
                self.host.unspill_weights(available_host_bytes())
            # if a layer cannot be read, its parameters are NaN, and the error names it
            finally:
                self.runtime.give_back()
                return_packed(self.host.layers, available_host_bytes())
                follow_device(wrappers(self.partition.model))
                self._move_buffers(torch.device("cpu"))
                self.host.close()
                self.runtime.close()
                self.team.close()
                self.write_trace()  # the last, since a full disk makes it fail
            self.device.check_unsurfaced()


def _open_files(stack: Stack, extents: Sequence[Extent], ring: StagingRing) -> NvmeStore:
    nvme = stack.section.nvme
    if nvme is None:
        raise StateError("the plan has arrays in files, and the config names no directory for them")
    mapped = sum(extent.nbytes for extent in extents if extent.array == "weights")
    check_mappings(mapped, len(nvme.paths), nvme.block or BLOCK_BYTES)
    return NvmeStore(
        nvme.paths,
        extents=extents,
        staging=ring.memory,
        engine=nvme.engine,
        depth=nvme.depth,
        block_bytes=nvme.block,
        neighbours=stack.ranks.on_disks,
    )


# Functions that open the store of each staged home. The extents pass the ring.
STORES: dict[Home, Callable[[Stack, Sequence[Extent], StagingRing], Store]] = {FILE: _open_files}

open_models: weakref.WeakSet[Any] = weakref.WeakSet()


def reserved_bytes(but: Any = None) -> tuple[int, int]:
    """Return bytes on the device and in RAM that other engines of this process will still take.

    The first backward allocates gradient slots, each step activations. An engine that is away from
    the device has left its room there to others. `but`: an engine that does not count.
    """
    on_device = on_host = 0
    for stack in open_models:
        if stack is but:
            continue
        plan = stack.plan
        if stack.can_train:
            need = plan.gpu_total_bytes + plan.activation_bytes
            on_device += max(0, need - stack.device.memory.allocated_bytes)
        need = plan.host_total_bytes + plan.offloaded_bytes
        on_host += max(0, need - stack.host_bytes)
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


def _give_forward(module: nn.Module, forward: Any) -> None:
    """Remove the compiled forward of a module, and restore an attribute `forward` of its own."""
    del vars(module)["forward"]
    if forward is not None:
        vars(module)["forward"] = forward


def _packed_tensors(layer: Layer) -> set[torch.Tensor]:
    """The packed tensors of a layer's packed parameters."""
    return {inner for described in layer.packed for inner in described.inner.values()}
