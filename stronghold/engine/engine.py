"""The DeepSpeed-compatible engine.

Owns the counters of micro-batches and steps, the accumulation boundary, and the border with
DeepSpeed: what a user, an LR schedule or a monitor sees. Never moves a byte: `streaming.stack`
does. The training thread alone enters.

It is a `deepspeed.DeepSpeedEngine` by name, so that frameworks recognise it, but runs none of that
class's core: its `__init__` is not called, the one-line accessors read the `DeepSpeedConfig` that
is kept here, and what cannot apply is refused with its reason (`REFUSED`). A test walks the
installed class: every public name must be implemented here, refused, or known to the test as an
accessor that answers. Another reads what that class assigns to itself: every public attribute must
be here, and those that are of no use here come from `engine.attributes`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from stronghold.config import Settings
from stronghold.devices.base import off_lanes
from stronghold.engine.attributes import REMOVED_SWITCHES, unused_attributes
from stronghold.engine.backward import UserBackward
from stronghold.engine.checkpoints import Checkpoints
from stronghold.engine.inspection import Inspection, inspect
from stronghold.engine.instruments import Instruments
from stronghold.errors import ConfigError
from stronghold.plan.plan import Plan
from stronghold.predict.refine import Refinement
from stronghold.process import forked_from
from stronghold.streaming.fragments import fragments
from stronghold.streaming.guards import NO_TRANSFORMS, StateHooks, check_free
from stronghold.streaming.optimizer import EngineOptimizer, make_scaler
from stronghold.streaming.patches.parameters import ParameterReads
from stronghold.streaming.stack import MemoryReport, Stack
from stronghold.streaming.steps import StalledWeights
from stronghold.team.group import Ranks, local_rank_of
from stronghold.telemetry.metrics import StepRecord, batch_size

logger = logging.getLogger("stronghold")

_PARALLEL = "stronghold runs data-parallel ranks only: shard the model with DeepSpeed itself"
_REDUCE = "gradients leave for the host layer by layer during backward: nothing is left to reduce"
_DATA = "build the data loader yourself and pass batches to the engine"
_COMPILE = "DeepCompile rewrites the graph of the whole model: engine.compile() compiles each block"
_ALIEN = "stronghold's optimizer runs: set its type in the config, or pass a torch optimizer"

# Names that would run DeepSpeed's own core on state that this engine does not have: by reason, then
# one by one.
_BY_REASON = {
    _REDUCE: """allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain
        buffered_allreduce_fallback coalesce_grad_reduction sparse_allreduce
        sparse_allreduce_bucket sparse_allreduce_no_retain""",
    _PARALLEL: "all_gather_scalar load_moe_state_dict sparse_all_gather",
    _COMPILE: """get_autosp_backend get_autotp_backend get_compile_time
        get_deepcompile_backend get_deepspeed_compile_backend register_compile_pass
        compile_zero_optimization_stage""",
    _DATA: "set_custom_curriculum_learning_schedule set_data_post_process_func",
    _ALIEN: "get_optimizer_configuration",
}
REFUSED: dict[str, str] = {
    **{name: reason for reason, names in _BY_REASON.items() for name in names.split()},
    "clip_fp32_gradients": "engine.step clips by the global norm: set gradient_clipping",
    "print_forward_breakdown": "set stronghold.trace to a file for a timeline of the step",
    "random_ltd_initialize": "random layer-token drop changes the model's layers while they stream",
    "swap_tensor_config": "set stronghold.nvme: it says where state spills, and how",
}


def _refusal(name: str, reason: str) -> Any:
    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"engine.{name} does not apply to stronghold: {reason}")

    refused.__name__ = name
    refused.__doc__ = f"Refused: {reason}."
    return refused


def _take_over(model: nn.Module, trains: bool) -> None:
    """An engine that streams this very model ends where the next one may take over: it has trained
    nothing, as where a reference's log-probabilities are computed before training; or the next one
    trains, too, and no gradient waits for a step, as under DeepSpeed."""
    for engine in list(_living):
        if engine._destroyed or engine.module is not model:
            continue
        if engine.micro_steps == 0 and (
            engine.optimizer is None or not engine._stack.host.training
        ):
            engine.destroy()
        elif trains and engine.micro_steps and not engine._stack.runtime.ledger.is_in_step:
            logger.warning(
                "the engine that has trained this model for %d steps ends, since another one is "
                "made of it: that begins with new moments, from the weights in their own dtype",
                engine.global_steps,
            )
            engine.destroy()


def _check_loss(name: str, loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        raise ConfigError(
            f"engine.{name}: expected a scalar loss with a graph (a tensor of one element); for "
            "another tensor, output.backward(gradient)"
        )


def _check_clipping(configured: float, max_norm: float) -> None:
    """`clip_grad_norm_` by hand finds no gradient: Accelerate calls step before it, in backward."""
    if math.isfinite(max_norm) and max_norm != configured:
        raise ConfigError(
            f"clip_grad_norm_ by hand to {max_norm}: gradients have left the model, and the engine "
            f"clips them in step, to the config's gradient_clipping: got {configured}. Set "
            f'"gradient_clipping": {max_norm}, and leave the call out'
        )
    warnings.warn(
        "clip_grad_norm_ by hand finds no gradient, and returns 0: the engine clips in step; "
        "engine.get_global_grad_norm() is the norm afterwards",
        stacklevel=6,
    )


WEAR_STEP = 3  # the first step that starts as it ends: its seconds tell the wear per hour
_living: weakref.WeakSet[StrongholdEngine] = weakref.WeakSet()


@atexit.register
def finish_engines() -> None:
    """Programs whose framework made the engine never destroy it: their last checkpoint and their
    trace are finished before the interpreter takes modules down."""
    for engine in list(_living):
        try:
            engine.finish()
        except Exception:
            logger.exception("the process ends with work unfinished")


class StrongholdEngine(deepspeed.DeepSpeedEngine):  # type: ignore[misc]
    """Trains `model` through a window of layers. Made by `stronghold.initialize`.

    `optimizer` is None for a forward-only engine, which holds the weights alone.
    """

    training: bool

    def __init__(
        self,
        *,
        args: Any,
        model: nn.Module,
        settings: Settings,
        optimizer: EngineOptimizer | None,
        lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Any = None,
        mpu: Any = None,
        ranks: Ranks,
    ) -> None:
        nn.Module.__init__(self)
        self._process = os.getpid()
        self._config = settings.deepspeed
        self.config = settings.original
        self.settings = settings
        self.local_rank = local_rank_of(args)
        self._ranks = ranks
        self.global_rank, self.world_size = ranks.global_rank, ranks.world_size
        self.dp_world_size, self.mp_world_size = ranks.num_ranks, ranks.model_parallel_size
        self.mpu = mpu
        self.__dict__.update(
            unused_attributes(
                module=model, config=self._config, ranks=ranks, training_data=training_data
            )
        )
        self.collate_fn = collate_fn
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.optimizer = self.basic_optimizer = optimizer
        self.client_optimizer = self.client_lr_scheduler = self.seq_parallel_group = None
        self.enable_backward_allreduce = False
        self.inside_no_sync_ctxt = self.has_moe_layers = False
        self.sparse_tensor_module_names: set[str] = set()
        self.loaded_checkpoint_mp_world_size = self.loaded_checkpoint_dp_world_size = None
        self._boundary_override: bool | None = None
        self._num_backwards = 0  # since the last step, where the program's step() ends each
        self._step_applied = False
        self._loss_sum: torch.Tensor | None = None
        self.last_record: StepRecord | None = None
        self._destroyed = self._is_compiled = self._has_run = False
        _take_over(model, optimizer is not None)
        check_free(model)
        if optimizer is not None:
            optimizer.connect(self.step, self.zero_grad, self.offload_states, self.reload_states)
            if settings.precision == "fp16":
                stage = self.zero_optimization_stage()
                optimizer.loss_scaler = make_scaler(self._config.float16_config, stage)
        self.lr_scheduler = lr_scheduler
        self._stack = stack = Stack(
            model, settings, optimizer, local_rank=self.local_rank, ranks=ranks
        )
        asynchronous = settings.stronghold.async_checkpoint
        self._checkpoints = Checkpoints(stack, optimizer, asynchronous=asynchronous)
        self._stalled_weights = StalledWeights(stack.host, stack.steps)
        self._refinement = Refinement(stack)
        self._user_backward = UserBackward(self, stack.outside)
        self.module = model
        self.device = stack.device.torch_device
        self._state_hooks = StateHooks(
            model,
            stack.parameters,
            wait=stack.settle,
            read=stack.wait_for_readers,
            loaded=stack.adopt_weights,
        )
        owned = {
            parameter: (layer.index, part.name)
            for of_layer, layer in zip(stack.parameters, stack.layout.layers, strict=True)
            for parameter, part in zip(of_layer, layer.slices, strict=True)
        }
        self._reads = ParameterReads(
            owned,
            settle=stack.settle,
            drop=stack.drop_gradients,
            clipped=partial(_check_clipping, settings.gradient_clipping),
            fragments=fragments(stack),
        )
        _living.add(self)
        try:
            self._instruments = parts = Instruments(self._config, self, model)
            self.timers, self.tput_timer = parts.timers, parts.throughput
            self.monitor, self.flops_profiler = parts.monitor, parts.profiler
            wanted = training_data is not None
            self.training_dataloader = self.deepspeed_io(training_data) if wanted else None
        except BaseException:
            self.destroy()
            raise
        logger.info("%s", stack.plan)

    # -- the step ---------------------------------------------------------------------------------
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the user's module, as it is at this moment, and return its output unchanged.

        LaneError, once, for an asynchronous save that has failed meanwhile: the next call goes on.
        """
        if self._destroyed:  # the model is the user's again, or another engine's
            return self.module(*inputs, **kwargs)
        self._stack.check_here("engine.forward")
        self._checkpoints.raise_failure()
        self._user_backward.check()
        if not self._has_run:  # not before: a framework that sets up warns of its own matters first
            self._has_run = True
            self.settings.warn_of_ignored()
        size, with_graph = batch_size(inputs, kwargs), torch.is_grad_enabled()
        self._refinement.begin_forward(size, trains=with_graph, waits=self._user_backward.waits)
        if self.module.training and with_graph:
            self._stack.metrics.add_tokens(size.tokens)
        with self._instruments.forward(self.global_steps), self._stack.runtime.forward_pass():
            try:
                output = self.module(*inputs, **kwargs)
            except torch.OutOfMemoryError as error:
                raise self._refinement.out_of_memory("engine.forward", error) from error
            except RuntimeError as error:
                if str(error) == NO_TRANSFORMS:
                    raise ConfigError(NO_TRANSFORMS) from error
                raise
        if self.optimizer is not None and torch.is_grad_enabled():
            self._user_backward.watch(output)
        return output

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for `engine.scale(loss).backward()`, which is what fp16
        needs; elsewhere `loss.backward()` is the same. The engine divides by the accumulation
        steps itself."""
        self._needed_optimizer("scale")
        _check_loss("scale", loss)
        return self._user_backward.scale(loss)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run autograd on a scalar loss, divided by the accumulation steps if `scale_wrt_gas`;
        returns that quotient. Parameters have no gradients afterwards. When autograd raises, the
        step starts again: its earlier micro-batches are dropped too."""
        optimizer = self._needed_optimizer("backward")
        _check_loss("backward", loss)
        self._user_backward.check()
        steps = self.gradient_accumulation_steps()
        scaled: torch.Tensor = loss / steps if scale_wrt_gas and steps > 1 else loss
        runtime, begun = self._stack.runtime, False
        if not runtime.ledger.is_in_step:  # the step's first, or the first that is not thrown away
            self._loss_sum = None
        try:
            runtime.begin_backward(boundary=self.is_gradient_accumulation_boundary())
            begun = True
            waiting = self._user_backward.none(keeps=retain_graph)
            with self._instruments.time("backward"), waiting:
                optimizer.scaled(scaled).backward(retain_graph=retain_graph)
            runtime.end_backward()
            self._num_backwards += 1
        except BaseException as error:
            if begun or not isinstance(error, Exception):  # else it is refused, and changes nothing
                self._abandon_step()
            if isinstance(error, torch.OutOfMemoryError):
                raise self._refinement.out_of_memory("engine.backward", error) from error
            raise
        value = scaled.detach()
        self._loss_sum = value if self._loss_sum is None else self._loss_sum + value
        return scaled

    def _abandon_step(self) -> None:
        """The step's gradients so far are void: the next micro-batch is its first."""
        self._stack.runtime.abandon_backward()
        if self.managed_gradient_accumulation():
            self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        self._loss_sum, self._num_backwards = None, 0
        self._refinement.note_failures()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the micro-batch; at an accumulation boundary clip, queue the updates and advance the
        schedule. Waits for the gradients' norm, except where a model that is whole on the device
        clips and checks nothing; never for the updates, for which the next forward waits layer by
        layer. When Ctrl-C ends it before a weight has changed, the step starts again; later it asks
        for a checkpoint."""
        optimizer = self._needed_optimizer("step")
        self._user_backward.check()
        self._step_applied = False
        step, managed = self.global_steps, self.managed_gradient_accumulation()
        boundary = not managed or self.is_gradient_accumulation_boundary()
        try:
            with self._instruments.time("step"):
                if boundary:
                    self._take_step(optimizer, lr_kwargs or {})
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: its gradients are no further step's
                self._abandon_step()
            raise
        self._instruments.end_micro_batch(step=step, samples=self.global_samples, boundary=boundary)
        self.micro_steps += 1

    def _take_step(self, optimizer: EngineOptimizer, lr_kwargs: dict[str, Any]) -> None:
        stack = self._stack
        stack.device.check()
        optimizer.check_groups()
        learning_rate = float(optimizer.param_groups[0]["lr"])
        if not stack.runtime.ledger.is_in_step:
            self._loss_sum = None
        clipping = float(self.gradient_clipping() or 0.0)
        gate = stack.runtime.close_gate(
            clipping=clipping,
            loss_scale=optimizer.loss_scale,
            skip_on_overflow=self.settings.skip_on_overflow,
        )
        optimizer.grad_norm = gate.grad_norm
        optimizer.overflow = gate.overflow
        self._step_applied = not gate.overflow
        optimizer.count_step()
        if gate.overflow:
            self.skipped_steps += 1
            logger.warning("step %d skipped: the gradients are not finite", self.global_steps + 1)
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self._samples_of_step()
        if optimizer.dynamic_loss_scale:
            optimizer.loss_scaler.update_scale(gate.overflow)
        self._report(optimizer, learning_rate)
        self._refinement.end_step()
        if not gate.overflow:
            self._stalled_weights.end_step()

    def _samples_of_step(self) -> int:
        if self.managed_gradient_accumulation():
            return int(self.train_batch_size())
        count, self._num_backwards = self._num_backwards, 0
        return int(self.train_batch_size()) // int(self.gradient_accumulation_steps()) * count

    def _report(self, optimizer: EngineOptimizer, learning_rate: float) -> None:
        stack, loss = self._stack, self._loss_sum
        self._loss_sum = None
        stack.device.settle()
        record = stack.metrics.end_step(
            step=self.global_steps,
            loss=loss,
            grad_norm=optimizer.grad_norm,
            learning_rate=learning_rate,
            skipped=optimizer.overflow,
        )
        self.last_record = record
        if self.plan.nvme_bytes and self.global_steps == WEAR_STEP:
            logger.info("%s", self.plan.wear(record.step_s))
        every = self.settings.steps_per_print
        if every and self.global_steps % every == 0:
            logger.info("%s", stack.metrics.format(record))
        scale = optimizer.loss_scale if self.fp16_enabled() else None
        self._instruments.end_step(record, samples=self.global_samples, loss_scale=scale)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last micro-batch, and of the step so far, by DeepSpeed's names."""
        return self._instruments.last_times_ms

    @property
    def engine_timers_cache(self) -> dict[str, float]:
        """DeepSpeed's name of what `get_wall_clock_timers` returns."""
        return self._instruments.last_times_ms

    def get_pld_theta(self) -> None:
        """None: no layer is dropped."""

    def _check_alive(self, what: str) -> None:
        if self._destroyed:
            raise ConfigError(f"engine.{what}: this engine was destroyed; initialize a new one")

    def _needed_optimizer(self, what: str) -> EngineOptimizer:
        self._check_alive(what)
        self._stack.check_here(f"engine.{what}")
        if self.optimizer is None:
            raise ConfigError(
                f'engine.{what}: this engine has no optimizer; add an "optimizer" section to the '
                "config, or pass optimizer= to stronghold.initialize"
            )
        return self.optimizer

    # -- accumulation -----------------------------------------------------------------------------
    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends a step. With managed_gradient_accumulation false
        that is never known in backward: each `step` is the end of one."""
        if not self.managed_gradient_accumulation():
            return False
        if self._boundary_override is not None:
            return self._boundary_override
        return bool((self.micro_steps + 1) % self.gradient_accumulation_steps() == 0)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Override the boundary from now on; set it before the micro-batch's forward."""
        if not self.managed_gradient_accumulation():
            raise ConfigError(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so "
                "that every engine.step() ends a step: leave the call out, or the key"
            )
        self._boundary_override = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps; from one to several is refused: nothing holds the sums."""
        before = self.gradient_accumulation_steps()
        super().set_train_batch_size(train_batch_size)
        after = self.gradient_accumulation_steps()
        if before == 1 and after > 1:
            self._config.gradient_accumulation_steps = before
            each = self.train_micro_batch_size_per_gpu() * before
            self._config.train_batch_size = each * self.dp_world_size
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}) needs {after} accumulation steps, but "
                "the plan has no fp32 accumulators: start with gradient_accumulation_steps above 1"
            )

    def _backward_prologue(self) -> None:
        """Nothing: a backward is seen by itself. Programs with several engines and one loss call
        DeepSpeed's by hand."""

    _backward_epilogue = _backward_prologue

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A null context: gradients of every micro-batch leave for the host at once."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away the gradients of every micro-batch since the last step, as in a plain loop;
        without effect where none is waiting."""
        if not self._destroyed:
            self._user_backward.check()
            self._stack.drop_gradients()

    # -- what is read -----------------------------------------------------------------------------
    def get_global_grad_norm(self) -> float | None:
        """Global L2 norm of the last step's gradients before clipping; None before the first. Waits
        for backward on the device where the step did not."""
        return None if self.optimizer is None else self.optimizer._global_grad_norm

    def loss_scale(self) -> float:
        """`fp16.loss_scale` of the config in fp16, where 0 means that the scale is dynamic and
        `optimizer.loss_scale` has its newest value; 1 elsewhere, where no loss is scaled."""
        return float(super().loss_scale()) if self.fp16_enabled() else 1.0

    def dynamic_loss_scale(self) -> bool:
        """True in fp16 with a scale that follows the overflows."""
        return bool(self.fp16_enabled() and super().dynamic_loss_scale())

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Between two steps: take everything off the device, for a generator, say, until
        `reload_states`. Meanwhile the parameters show their newest values on the CPU, the module is
        a plain one there, and the engine neither trains nor runs forward.

        `include` chooses nothing: slots belong to all layers, so that all of it leaves together.
        Host memory is pinned where training's is; it has returned when all is done.
        """
        self._check_alive("offload_states")
        if str(getattr(device, "value", device)) == "none":
            logger.warning("engine.offload_states: device none: nothing is moved")
            return
        if str(getattr(device, "value", device)) != "cpu":
            raise ConfigError(f'engine.offload_states: device: got {device!r}, expected "cpu"')
        self._stack.leave_device()
        self.empty_partition_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """What `offload_states` took away is on the device again, and training goes on with the
        same bits. ConfigError where others have taken the room."""
        self._check_alive("reload_states")
        self._stack.return_to_device()
        self._refinement.restart()

    def empty_partition_cache(self) -> None:
        """Give other processes the device memory that torch keeps of tensors that are gone; no
        partition of the weights is cached."""
        gc.collect()
        self._stack.device.memory.trim()

    @property
    def data_parallel_group(self) -> Any:
        """torch's group of the ranks that share the model's state, for collectives of your own;
        None in a process without a process group."""
        if not torch.distributed.is_initialized():
            return None
        world = torch.distributed.group.WORLD
        return world if self.mpu is None else self.mpu.get_data_parallel_group()

    seq_data_parallel_group = data_parallel_group

    def get_data_parallel_rank(self) -> int:
        """This rank among those that share the model's state."""
        return self._ranks.control.rank

    def get_model_parallel_rank(self) -> int:
        """This rank among those of `mpu`, 0 without one."""
        return self._ranks.model_parallel_rank

    get_tensor_parallel_rank = get_model_parallel_rank

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each block's forward with torch.compile: layers come and go between blocks. What
        is around them stays as it is. Twice is harmless. ConfigError for what rewrites the graph of
        the whole model (`schedule`, compiled autograd)."""
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                f"engine.compile: got schedule={schedule!r}, compiled_autograd_enabled="
                f"{compiled_autograd_enabled!r}, expected None and False: there is no graph of the "
                "whole model; leave them out"
            )
        if not self._is_compiled:
            options = {**(compile_kwargs or {}), "backend": backend}
            self._stack.compile_blocks(lambda forward: torch.compile(forward, **options))
            self._is_compiled = True

    @property
    def plan(self) -> Plan:
        """Where every byte is, and why."""
        return self._stack.plan

    def memory_report(self) -> MemoryReport:
        """Peak bytes per tier, planned and measured."""
        return self._stack.memory_report()

    def inspect(self) -> Inspection:
        """A read-only view: layers, plan, schedule, recorded operations, bytes. Waits for nothing.
        Put `print(engine.inspect())` into a bug report."""
        return inspect(self._stack)

    def replan(self, plan: Plan) -> bool:
        """Go on with another plan of this model, between two steps: no bit changes. True where it
        took over, False where the device has no room for it. Every rank calls it, with one plan.

        ConfigError while gradients wait for their step: a change would drop them. StateError for a
        plan that gathers gradients in another way, or that moves layers from the device to files.
        """
        self._check_alive("replan")
        self._stack.check_here("engine.replan")
        moves = self._stack.plan.accumulates and not self._stack.ranks.several
        if self._stack.runtime.ledger.is_in_step and not moves:
            raise ConfigError(
                "engine.replan: gradients of a step that has not ended are waiting: call it after "
                "engine.step, or throw them away with engine.zero_grad"
            )
        return self._stack.replan(plan)

    def synchronize(self) -> None:
        """Wait until every parameter holds its newest value. Code that reads or writes parameters
        in Python waits by itself, one by one; extensions in C++, and other threads, do not."""
        if not self._destroyed:
            self._stack.settle()

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The user module's state dict, after pending updates."""
        self.synchronize()
        state: dict[str, Any] = super().module_state_dict(*args, **kwargs)
        return state

    def load_module_state_dict(
        self, checkpoint: Any, strict: bool = True, custom_load_fn: Any = None, **zero3: Any
    ) -> None:
        """Load weights into the user's module; masters become these weights, moments stay.

        `checkpoint` holds them under "module", as in DeepSpeed, or is the state dict itself. What
        DeepSpeed takes for ZeRO-3 and for expert parallelism has nothing to act on.
        """
        nested = checkpoint.get("module")
        state = nested if isinstance(nested, dict) else checkpoint
        if custom_load_fn is not None:
            self.synchronize()
            self._stack.wait_for_readers()
            custom_load_fn(src=state, dst=self.module)
            self._stack.runtime.adopt_weights()
        else:
            self.module.load_state_dict(state, strict=strict)

    # -- checkpoints ------------------------------------------------------------------------------
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that the next step depends on as `save_dir/tag` (`global_step{N}` without
        one); True.

        The tag appears complete or not at all, then `latest` names it. With
        stronghold.async_checkpoint the files are written while the next steps compute, and a
        failure is raised once, as LaneError, by the next forward, save, load or
        wait_for_checkpoint; else OSError is raised here. Either way training can go on.
        ConfigError between the micro-batches of one step.
        """
        self._checkpoints.save(
            self,
            save_dir,
            f"global_step{self.global_steps}" if tag is None else tag,
            client=client_state or {},
            exclude_frozen=exclude_frozen_parameters,
            latest=save_latest,
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until a save that runs beside training is complete; raise its error if it failed."""
        self._checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag` (the tag that `latest` names, without one) and return the path of
        its state file, as DeepSpeed does, and the client state that was saved; (None, None) when
        there is no `latest`.

        Everything is verified before anything in memory changes: CheckpointError for files that are
        missing, cut off, changed or foreign, ConfigError for a checkpoint of another model.
        `load_module_only` loads the weights alone: masters become these weights, moments, counters
        and random states stay. No code of the checkpoint's runs for them: where the client state
        has objects that need it, it is None.
        """
        return self._checkpoints.load(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            states=load_optimizer_states,
            schedule=load_lr_scheduler_states,
            weights_only=load_module_only,
            custom=custom_load_fn,
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's state dict in the compute dtype to one file: safetensors by its suffix,
        else torch's own format. True. Tied parameters are stored once."""
        self._checkpoints.save_weights(
            save_dir, save_filename, exclude_frozen=exclude_frozen_parameters
        )
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor]:
        """The state dict on the CPU without a copy: values change with the next step."""
        return self._checkpoints.weights(exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # -- modes and life ---------------------------------------------------------------------------
    def train(self, mode: bool = True) -> StrongholdEngine:
        """Training mode of the module. An evaluation does not count as a step's time."""
        if mode and not self.training:
            self._stack.metrics.restart_clock()
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self) -> StrongholdEngine:
        """Evaluation mode of the module."""
        return self.train(False)

    def _apply(self, fn: Any, recurse: bool = True) -> StrongholdEngine:
        """`to`, `cuda`, `half` and their kin: without effect, since where weights are and in which
        dtype is the plan's."""
        logger.warning(
            "engine.to, cuda, half and the like are without effect: weights are where the plan "
            "puts them, in the dtype that the config asks for"
        )
        return self

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's own data loader over `dataset`."""
        kwargs.setdefault("pin_memory", self.device.type == "cuda")
        return super().deepspeed_io(dataset, *args, **kwargs)

    def destroy(self) -> None:
        """Finish pending work, end the lanes and give the model back whole, on the CPU. Safe to
        call twice. LaneError after that, if an update failed and nothing has told so yet. In a
        forked child it does nothing."""
        if not self._destroyed and not forked_from(self._process):
            self._destroyed = True
            self._state_hooks.close()
            self._reads.close()
            try:
                self._checkpoints.wait()
            finally:
                self._stack.close()

    close = destroy

    def finish(self) -> None:
        """Write the rest of a checkpoint, and the trace: at the latest when the process ends."""
        if not self._destroyed and not forked_from(self._process):
            self._stack.finish(self._checkpoints.wait)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "an engine has threads and files, and cannot be copied or pickled: copy or torch.save "
            "engine.module or its state_dict(), or call engine.save_checkpoint"
        )

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else modules are gone
            off_lanes(self.destroy)  # also of one that is half-built


def _switch_that_is_off(name: str) -> Any:
    def is_off(self: Any) -> bool:
        return False

    is_off.__name__ = name
    is_off.__doc__ = "False: DeepSpeed has removed the feature, and the config refuses its key."
    return is_off


for _name in REMOVED_SWITCHES:
    setattr(StrongholdEngine, _name, _switch_that_is_off(_name))
for _name, _reason in REFUSED.items():
    setattr(StrongholdEngine, _name, _refusal(_name, _reason))
