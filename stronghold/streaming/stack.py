"""The parts of one engine, built in order and closed in reverse.

Owns the life of every part: device, host slabs, and the runtime that trains with them. Nothing here
is DeepSpeed's; `engine` puts that border around it. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from stronghold.devices.lane_name import LaneName
from stronghold.errors import ConfigError, LaneError, StateError, format_size
from stronghold.limits import available_host_bytes, update_cores
from stronghold.memory.nvme import BLOCK_BYTES, NvmeStore
from stronghold.memory.slab import check_mappings, trim_heap
from stronghold.memory.staging import NO_RING, StagingRing, open_ring
from stronghold.memory.stores import Extent, Store
from stronghold.memory.tiers import Tiers, extent_requests
from stronghold.model.costs import DTYPES
from stronghold.model.layout import ModelLayout, layout
from stronghold.model.logits import Forward, LogitsInParts
from stronghold.model.partition import (
    Partition,
    WeightSource,
    forget_source,
    materialize,
    partition,
    source_of,
    why_no_blocks,
)
from stronghold.optim.states import LEAN, States, states_of
from stronghold.plan.cost import Demand
from stronghold.plan.homes import FILE, GPU, Home
from stronghold.plan.places import levels_of
from stronghold.plan.plan import Plan, make_plan
from stronghold.process import check_not_forked, forked_from
from stronghold.streaming.activations.key_value_caches import forbid_caches
from stronghold.streaming.formats import CAST, COMPUTED, model_formats, page_items
from stronghold.streaming.guards import COMPILED_WHOLE
from stronghold.streaming.optimizer import EngineOptimizer
from stronghold.streaming.parts import Written, assemble
from stronghold.streaming.patches.modules import is_compiled
from stronghold.streaming.patches.versions import report_untried
from stronghold.streaming.trainer import Runtime
from stronghold.team.group import Ranks
from stronghold.team.ranks import NodeWeights, check_alike
from stronghold.telemetry.metrics import Metrics
from stronghold.telemetry.trace import Trace, open_path

# Without stronghold.gpu_memory half of what the GPU has free goes to slots; the rest is left to
# activations.
GPU_SHARE = 0.5
# Keys without effect where there are no blocks.
OF_BLOCKS = ("window", "prefetch", "activations", "kept_activations", "chunk", "streams")
TRIM_BYTES = 256 << 20  # of the model's own memory may wait in the heap when it was taken over

logger = logging.getLogger("stronghold")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Peak bytes per tier, as planned (the most of the plans so far) and as measured; activations
    excepted. `gpu_process_peak` is all that tensors of this process had on a GPU at once, with
    activations: `torch.cuda.max_memory_allocated` begins anew after the first step, when the engine
    measures the next ones (0 on the emulated device)."""

    gpu_planned: int
    gpu_peak: int
    host_planned: int
    host_peak: int
    host_activations: int
    nvme_planned: int = 0
    nvme_peak: int = 0
    gpu_process_peak: int = 0


class Stack:
    """Trains one model. Raises ConfigError or BudgetError before anything is allocated.

    `close` gives the model back: every parameter a CPU tensor with its newest value, every hook
    removed.
    """

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
        self._closed = self._away = False
        self._process = os.getpid()
        self.dtype = DTYPES[settings.precision]
        groups = {} if optimizer is None else optimizer.group_of()
        chosen = model_formats(
            model.named_parameters(),
            dtype=self.dtype,
            kind=section.states,
            rule=section.dtypes,
            optimizers={parameter: of_group for parameter, (_, of_group) in groups.items()},
            default=None if optimizer is None else optimizer.default,
        )
        self.formats = chosen.formats
        self.partition: Partition = partition(model, section.layers, chosen.of)
        _check_parameters(
            self.partition, settings.precision, source_of(model), cast=section.dtypes == CAST
        )
        self.ranks = ranks
        page = page_items(self.formats, in_files=section.nvme is not None)
        self.layout: ModelLayout = layout(self.partition, self.ranks.num_ranks, page, chosen.of)
        kind = section.device or ("cuda" if cuda.available() else "emulated")
        self.section = section
        on_gpu = kind == "cuda" and cuda.available()
        on_device, self._host_reserved_bytes = reserved_bytes()
        self.gpu_free_bytes = None
        if on_gpu:
            self.gpu_free_bytes = max(0, cuda.free_bytes(local_rank) - on_device)
        moments = () if optimizer is None else optimizer.default.moments
        self.states: States = states_of(self.dtype, section.states, moments)
        self.demand: Demand = self._demand(settings, training=optimizer is not None)
        rank = self.ranks.global_rank
        self._trace_path = section.trace and open_path(section.trace, rank)
        self.plan: Plan = make_plan(self.layout, self.demand)
        check_alike(self.ranks, self.layout, self.plan, settings.precision)
        if rank == 0:
            report_untried()
            if not self.partition.streamed:
                _say_no_blocks(model, section)
        if not self.plan.whole and is_compiled(model):
            raise ConfigError(f"model: {COMPILED_WHOLE}")
        self.trace = Trace(rank, recording=section.trace is not None)
        self.metrics = Metrics(
            num_parameters=self.layout.num_parameters,
            recomputed=self.plan.recomputed,
            trace=self.trace,
        )
        with contextlib.ExitStack() as undo:  # if a part cannot be made, those before it are closed
            undo.callback(self.ranks.close)
            self.device = self._open_device(kind, local_rank)
            undo.callback(self.device.close)
            self.pool = native.Pool(self.plan.cpu_threads, self.ranks.cores or None)
            undo.callback(self.pool.close)
            self._build(model, optimizer, self._open_tiers(undo), undo)
            if self.demand.training:
                forbid_caches(model, undo)
            undo.callback(LogitsInParts(model, section.loss_chunk, self._updates_of).close)
            self._parts = undo.pop_all()
        self._planned = (self.plan.gpu_total_bytes, self.plan.host_total_bytes)
        _open.add(self)

    def _updates_of(self, weight: torch.Tensor) -> int | None:
        """How often a parameter of a layer that is not streamed was updated; None for others."""
        for layer, of_layer in zip(self.partition.layers, self.parameters, strict=True):
            if any(parameter is weight for parameter in of_layer):
                return (
                    None if layer.streamed else sum(self.host.layers[layer.index].optimizer.counts)
                )
        return None

    def _demand(self, settings: Settings, *, training: bool) -> Demand:
        section, gpu_free_bytes = self.section, self.gpu_free_bytes
        gpu_budget = section.gpu_memory
        if gpu_budget is None and gpu_free_bytes is not None:
            gpu_budget = int(gpu_free_bytes * GPU_SHARE)
        ranks = self.ranks
        if gpu_budget is not None:
            gpu_budget = ranks.least(gpu_budget)  # one plan: all ranks move the same layers
        # The model's own memory, which the slabs replace.
        held = [
            p
            for layer in self.partition.layers
            for p in layer.parameters
            if not p.parameter.is_meta
        ]
        held_now = sum(named.parameter.nbytes for named in held)
        sharers = ranks.on_node.count
        available = max(0, available_host_bytes() // sharers - self._host_reserved_bytes)
        host_budget = section.host_memory or available + held_now
        if section.nvme is not None:
            host_budget = ranks.least(host_budget)  # the same arrays spill
        resident = section.resident_layers
        num_blocks = sum(layer.streamed for layer in self.layout.layers)
        cores = len(ranks.cores or os.sched_getaffinity(0))
        capacity = section.nvme.capacity if section.nvme else None
        compute_threads = torch.get_num_threads() if gpu_free_bytes is None else 1
        return Demand(
            states=self.states,
            all_formats=self.formats,
            accumulate=settings.accumulates,
            training=training,
            gpu_budget_bytes=gpu_budget,
            host_budget_bytes=host_budget,
            window=section.window,
            prefetch=section.prefetch,
            resident_layers=num_blocks if resident == "all" else resident,
            resident_updates=_resident_updates(section, ranks, on_gpu=gpu_free_bytes is not None),
            # On a GPU of unknown room: the policy that takes least, until what is kept is known.
            activations=pinned_activations(section, self.layout)
            or (None if gpu_free_bytes is None else "recompute"),
            chunk=section.chunk,
            streams=section.streams or 1,
            cpu_threads=section.cpu_threads,
            early_layers=_early_layers(section, self.layout),
            num_cores=update_cores(cores, compute_threads),
            nvme=section.nvme is not None,
            nvme_capacity_bytes=capacity and capacity // ranks.on_disks.count,
            spill=section.nvme.spill if section.nvme else None,
            micro_batches=settings.gradient_accumulation_steps,
            num_ranks=ranks.num_ranks,
            num_nodes=ranks.num_nodes,
            reduces_in_room=ranks.several and gpu_free_bytes is None,
            shares_weights=ranks.several,
        )

    def _open_device(self, kind: str, local_rank: int) -> Device:
        section = self.section
        if kind == "cuda":
            return CudaDevice(local_rank, budget_bytes=section.gpu_memory, trace=self.trace)
        settings = section.emulated.model_dump()  # of the same names
        if section.emulated.nvme_gbps is not None:  # of the node's disks
            settings["nvme_gbps"] = section.emulated.nvme_gbps / self.ranks.on_node.count
        return EmulatedDevice(budget_bytes=section.gpu_memory, trace=self.trace, **settings)

    def _open_tiers(self, undo: contextlib.ExitStack) -> Tiers:
        """Open the stores of the plan's staged homes, which `undo` closes; every rank calls it."""
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

            ranks.on_disks.together(make_ring)  # when it fails on one rank, all raise
            for home in homes.staged_homes:
                extents = extent_requests(self.layout, self.formats, homes, ranks.shards, home)
                stores[home] = STORES[home](self, extents, ring)
                undo.callback(stores[home].close)
            undo.callback(self.device.close)  # first: lanes may still read and write the stores
        return Tiers(self.layout, self.formats, homes, stores, ring, shards=ranks.shards)

    def _build(
        self,
        model: nn.Module,
        optimizer: EngineOptimizer | None,
        tiers: Tiers,
        undo: contextlib.ExitStack,
    ) -> None:
        parameters = [
            [named.parameter for named in layer.parameters] for layer in self.partition.layers
        ]
        shared = None
        if self.ranks.several:
            shared = NodeWeights(self.layout, self.formats, self.ranks)
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
        )
        self.host, self.store, self.steps = made.host, made.store, made.steps
        self.team, self.outside = made.team, made.outside
        self.parameters = parameters
        self.runtime = self._make_runtime(self.plan)
        # Never two copies of a layer; a large model takes minutes, a small one shows no bar.
        bar = tqdm(
            parameters,
            desc="taking the model over",
            unit="layer",
            delay=2.0,
            leave=False,
            disable=shared is not None and not shared.fills,
        )
        source = source_of(model)
        freed_bytes = 0
        for index, of_layer in enumerate(bar):
            freed_bytes += sum(p.nbytes for p in of_layer if not p.is_meta)
            made.adopt(index, source)
            for parameter in of_layer:
                if parameter.is_meta:
                    materialize(parameter, torch.empty(0, dtype=parameter.dtype))
            self.runtime.executor.rest(index)
            if freed_bytes >= TRIM_BYTES:
                freed_bytes = 0
                trim_heap()
        trim_heap()
        forget_source(model)
        _move_buffers(model, self.device.torch_device)
        self.team.agree("taking the model over")
        self.runtime.start(self.partition)

    def _make_runtime(self, plan: Plan) -> Runtime:
        budget = self.demand.host_budget_bytes
        room = None if budget is None else budget - plan.host_total_bytes
        return Runtime(self._made, plan, host_room_bytes=room)

    def check_process(self, operation: str) -> None:
        """ConfigError in a forked child."""
        check_not_forked(self._process, operation)

    def check_here(self, operation: str) -> None:
        """ConfigError while the model is away from the device, too."""
        self.check_process(operation)
        if self._away:
            raise ConfigError(
                f"{operation}: engine.offload_states() has taken the model off the device: call "
                "engine.reload_states() first"
            )

    def settle(self, layers: Sequence[int] | None = None) -> None:
        """Wait until the parameters of these layers, or of all, show their newest values."""
        self.check_process("reading parameters")
        self.outside.check()
        if not self._away:
            self.runtime.settle(layers)

    def wait_for_readers(self) -> None:
        """Block until nothing reads the arrays: before they are written from outside."""
        self.check_process("writing parameters")
        for state in self.host.layers:
            state.wait_unused()
        self.team.barrier("before new weights")  # other ranks may still read what they are made of

    def adopt_weights(self, written: Written | None = None) -> None:
        """New values were written where these parameters, or all, point: make them the masters."""
        if self._away:
            for index in range(len(self.parameters)) if written is None else written:
                self.host.access.restart_master(index, written and written[index])
        else:
            self.runtime.adopt_weights(written)

    def drop_gradients(self, part: str | None = None) -> None:
        """Throw away the gradients that wait for the step, if there are any. ConfigError when only
        those of `part` are meant."""
        if not self.runtime.ledger.is_in_step:
            return
        if part is not None:
            raise ConfigError(
                f"zero_grad between backward and step of a part of the model, without {part}: "
                "gradients are thrown away together; call it on the whole model or on the engine, "
                "or freeze the part before backward (requires_grad_(False))"
            )
        self.runtime.drop_gradients()

    def replan(self, plan: Plan) -> bool:
        """Go on with `plan`, between two passes: nothing is lost, and no more than one plan's
        buffers are on the device at a time. Sums of the micro-batches of a step move with their
        layers; other gradients that wait for the step are dropped. No graph waits for its backward.
        False, and with the present plan, where the device has no room for a plan that takes more
        any more; of several ranks, on any of them.

        StateError for another way to gather gradients, and for layers that would have to come back
        from the device to files.
        """
        back = self.plan.updated_on_gpu - plan.updated_on_gpu
        if (back and self.demand.nvme) or plan.accumulates is not self.plan.accumulates:
            raise StateError(f"replan: layers {sorted(back)} or gradients cannot change places")
        keep_gradients = self.plan.accumulates and not self.ranks.several
        self.runtime.adopt_edited()  # before what was written in slots is no longer theirs
        self.runtime.restart(keep_gradients=keep_gradients)
        self.runtime.settle()
        try:
            return self._change_to(plan, keep_gradients=keep_gradients)
        except BaseException as error:  # Ctrl-C: parts of two plans cannot be put together again
            self.device.report(LaneError(LaneName.COMPUTE, "change of the plan", error))
            raise

    def _change_to(self, plan: Plan, *, keep_gradients: bool) -> bool:
        before = self.plan
        self.device.finish()  # lanes may read gradient slots whose step was given up
        self.runtime.detach()
        self.runtime.give_back(keep_gradients=keep_gradients)
        self.runtime.close()
        self.device.memory.restart_peak(self.runtime.kept_gradient_bytes)
        for layer in sorted(before.updated_on_gpu - plan.updated_on_gpu):
            self.store.move_to_host(layer)
        fits = True
        if plan.gpu_total_bytes > before.gpu_total_bytes:  # else it takes what the other one had
            more = plan.gpu_total_bytes - self.device.memory.allocated_bytes
            fits = self.device.memory.has_room(more, plan.activation_bytes)
            fits = self.ranks.least(fits) == 1
        if not fits:
            plan = before
        for layer in sorted(plan.updated_on_gpu):
            if self.host.layers[layer].home is not GPU:
                self.store.move_to_device(layer)
        self.host.apply_plan(plan.pending, plan.ring_entries, plan.early)
        self.plan = plan
        self.metrics.recomputed = plan.recomputed
        self._start(plan)
        gpu, host = self._planned
        self._planned = (max(gpu, plan.gpu_total_bytes), max(host, plan.host_total_bytes))
        return fits

    def compile_blocks(self, compiled: Callable[[Any], Any]) -> None:
        """From now on each block's forward is what `compiled` makes of it; our hooks stay around
        it, uncompiled. Undone when the model is given back. ConfigError within a step."""
        self.check_here("engine.compile")
        if self.runtime.ledger.is_in_step:
            raise ConfigError("engine.compile: call it between two steps, after engine.step")
        self.runtime.settle()
        self.runtime.detach()
        for module in (module for layer in self.partition.streamed for module in layer.modules):
            self._parts.callback(_give_forward, module, vars(module).get("forward"))
            run = compiled(module.forward)
            run.__wrapped__ = module.forward
            vars(module)["forward"] = Forward(module, run)
        self.runtime.start(self.partition)

    # -- away from the device ---------------------------------------------------------------------
    def leave_device(self) -> None:
        """Between two steps: nothing of the model is on the device until `return_to_device`; every
        parameter shows its newest value on the CPU, and the module is a plain one. Every rank
        calls it. ConfigError while gradients wait for their step. Twice is harmless."""
        if self._away:
            return
        self.check_process("engine.offload_states")
        if self.runtime.ledger.is_in_step:
            raise ConfigError(
                "engine.offload_states: gradients of a step that has not ended are waiting: call "
                "it after engine.step, or throw them away with engine.zero_grad"
            )
        self.runtime.adopt_edited()  # before what was written in slots is no longer theirs
        self.runtime.restart()
        self.runtime.settle()
        self.runtime.detach()
        self.device.finish()
        self.store.offload_arrays()
        self.runtime.give_back()
        self.runtime.close()
        _move_buffers(self.partition.model, torch.device("cpu"))
        self._away = True

    def return_to_device(self) -> None:
        """Undo `leave_device`. ConfigError, and nothing is changed, where others have taken the
        room meanwhile, on any rank."""
        if not self._away:
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
        self.store.reload_arrays()
        _move_buffers(self.partition.model, device.torch_device)
        self._away = False
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        self.runtime = self._make_runtime(plan)
        for layer in range(len(self.parameters)):
            self.runtime.executor.rest(layer)
        self.runtime.start(self.partition)

    def prepare_training(self) -> None:
        """Make masters, moments and what gathers gradients on the host; harmless when they are
        there."""
        self.host.prepare_training()
        self.store.prepare_training()

    def memory_report(self) -> MemoryReport:
        """Bytes so far; masters, moments and gradient slots are made at the first backward."""
        return MemoryReport(
            gpu_planned=self._planned[0],
            gpu_peak=self.device.memory.peak_with(self.runtime.kept_gradient_bytes),
            host_planned=self._planned[1],
            host_peak=self.host.peak_bytes,
            host_activations=self.runtime.activations.host_bytes,
            nvme_planned=self.plan.nvme_total_bytes,
            nvme_peak=self.host.tiers.stored_bytes,
            gpu_process_peak=self.device.memory.process_peak_bytes(),
        )

    def write_trace(self) -> None:
        """Write the trace file, when the config asks for one."""
        if self._trace_path is not None:
            self.device.settle()
            self.trace.write(self._trace_path)

    def finish(self, first: Callable[[], object]) -> None:
        """The process ends: `first`, then what is queued, since a lane that computes while the
        interpreter goes down aborts the process. LaneError as in `close`."""
        try:
            first()
        finally:
            self.device.finish()
            self.write_trace()
        self.device.check_unheard()

    def close(self) -> None:
        """Finish pending work, end the lanes, give the model back. Safe to call twice.

        LaneError, when all of that is done, for a failure that no caller has seen: the weights may
        be of two steps.
        """
        if self._closed or forked_from(self._process):
            return
        self._closed = True
        _open.discard(self)
        with self._parts:  # the lanes and the pool end whatever happens below
            self.runtime.detach()
            self.device.close()
            self.store.return_weights()
            try:
                self.host.unspill_weights(available_host_bytes())
            finally:  # a layer that cannot be read has NaN in every parameter, and an error
                self.runtime.give_back()
                _move_buffers(self.partition.model, torch.device("cpu"))
                self.host.close()
                self.runtime.close()
                self.team.close()
                self.write_trace()  # the last: it can fail, of a full disk
            self.device.check_unheard()


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


# What opens the store of each staged home, for these extents, which pass the ring.
STORES: dict[Home, Callable[[Stack, Sequence[Extent], StagingRing], Store]] = {FILE: _open_files}

_open: weakref.WeakSet[Stack] = weakref.WeakSet()


def reserved_bytes(but: Stack | None = None) -> tuple[int, int]:
    """Bytes on the device and in host memory that this process's other engines have planned and not
    taken: masters, moments and gradient slots come with the first backward, activations in each
    step. One that is away from the device has left its room there to others."""
    on_device = on_host = 0
    for stack in _open:
        if stack is but:
            continue
        plan = stack.plan
        if not stack._away:
            need = plan.gpu_total_bytes + plan.activation_bytes
            on_device += max(0, need - stack.device.memory.allocated_bytes)
        need = plan.host_total_bytes + plan.offloaded_bytes
        on_host += max(0, need - stack.host.allocated_bytes)
    return on_device, on_host


def _check_parameters(
    found: Partition, precision: str, source: WeightSource | None, *, cast: bool
) -> None:
    parameters = [named for layer in found.layers for named in layer.parameters]
    for named in parameters:
        dtype = named.parameter.dtype
        has_values = source is not None and source.has(named.parameter)
        if named.parameter.is_meta and not has_values:
            raise ConfigError(
                f"{named.name} is on the meta device: load its values before "
                "stronghold.initialize, or build the model with stronghold.from_pretrained"
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


def _say_no_blocks(model: nn.Module, section: StrongholdConfig) -> None:
    keys = [key for key in OF_BLOCKS if getattr(section, key) is not None]
    names = ", ".join(f"stronghold.{key}" for key in keys)
    logger.warning(
        "the whole model stays on the device: %s%s",
        why_no_blocks(model),
        f" Without effect, since blocks alone are streamed: {names}." if keys else "",
    )


def _resident_updates(section: StrongholdConfig, ranks: Ranks, *, on_gpu: bool) -> str | None:
    """Where resident layers are updated: on one rank alone, and lean states not by a GPU."""
    ways = 'set it to "host"'
    why = "which this release does on one rank alone" if ranks.several else ""
    if not why and section.states == LEAN and on_gpu:
        why, ways = "but lean states are updated on the host", 'set stronghold.states to "exact"'
    if why and section.resident_updates == "gpu":
        raise ConfigError(f'stronghold.resident_updates: got "gpu", {why}: leave it out, or {ways}')
    return "host" if why else section.resident_updates


def _early_layers(section: StrongholdConfig, layout: ModelLayout) -> int | None:
    """The config's number of early layers for the planner; None leaves it to the search."""
    if not section.speculation:
        return 0
    return len(layout.layers) if section.early_layers == "all" else section.early_layers


def pinned_activations(
    section: StrongholdConfig, layout: ModelLayout
) -> str | tuple[str, ...] | None:
    """Return the config's activations in the planner's form."""
    given = section.activations
    if isinstance(given, str) and section.kept_activations:
        num_blocks = len(layout.streamed)
        kept = min(section.kept_activations, num_blocks)
        return levels_of(layout, Counter({given: num_blocks - kept}) + Counter(keep=kept))
    if isinstance(given, dict):
        return levels_of(layout, {str(level): count for level, count in given.items()})
    return given


def _give_forward(module: nn.Module, own: Any) -> None:
    del vars(module)["forward"]
    if own is not None:
        vars(module)["forward"] = own


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
