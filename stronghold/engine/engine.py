"""The DeepSpeed-compatible engine.

Owns the counters of micro-batches and steps, the accumulation boundary, and the border with
DeepSpeed: everything that a user, an LR schedule or a monitor reads. It never moves a byte:
`train.job` does. The training thread alone enters.

[Note: DeepSpeed's class] The engine is a `deepspeed.DeepSpeedEngine` by name:

1. Frameworks recognise it by that class.
2. It runs none of that class's core, and never calls its `__init__`.
3. Inherited one-line accessors read the `DeepSpeedConfig` that this engine keeps.
4. `engine.refusals` lists the methods that cannot apply. Each raises its reason.
5. Tests walk the installed class. They fail for a method that has none of these places.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn

from stronghold.config import Settings
from stronghold.devices.threads import forked_from, off_lanes
from stronghold.engine import live_engines
from stronghold.engine.backward import UserBackward
from stronghold.engine.checkpoints import Checkpoints
from stronghold.engine.inspection import Inspection, inspect
from stronghold.engine.monitors import make_monitor, write_step
from stronghold.engine.planner import Planner
from stronghold.engine.refusals import REFUSED, check_loss, refused_method
from stronghold.errors import ConfigError, did_you_mean, format_size
from stronghold.plan.plan import Plan
from stronghold.telemetry.metrics import Start, StepRecord, batch_size
from stronghold.train.guards import NO_TRANSFORMS, StateHooks, check_free
from stronghold.train.job import Job, MemoryReport
from stronghold.train.named_weights import named_weights
from stronghold.train.optimizer import EngineOptimizer, make_scaler
from stronghold.train.processes import RankGroup, local_rank_of
from stronghold.train.trainer import Trainer

logger = logging.getLogger("stronghold")
_Method = TypeVar("_Method", bound=Callable[..., Any])

# the first step that starts as it ends: its seconds give the wear per hour
WEAR_STEP = 3


def _trains(method: _Method) -> _Method:
    """Decorator: the thread that calls the method trains. Raises ConfigError within a call of
    another thread."""

    @functools.wraps(method)
    def call(engine: StrongholdEngine, *args: Any, **kwargs: Any) -> Any:
        with engine._job.training(f"engine.{method.__name__}"):
            return method(engine, *args, **kwargs)

    return cast(_Method, call)


class StrongholdEngine(deepspeed.DeepSpeedEngine):  # type: ignore[misc]
    """Trains a model whose layers stream through a window on the GPU.

    `stronghold.initialize` makes it. A training loop calls it as DeepSpeed's engine:

        loss = engine(batch)
        engine.backward(loss)
        engine.step()

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
        ranks: RankGroup,
    ) -> None:
        nn.Module.__init__(self)
        self._start: Start | None = Start()
        self._process = os.getpid()
        self._config = settings.deepspeed
        self.config = settings.original
        self.settings = settings
        self.local_rank = local_rank_of(args)
        self._ranks = ranks
        self.global_rank, self.world_size = ranks.rank, ranks.num_ranks
        self.dp_world_size, self.mp_world_size = ranks.num_ranks, 1
        self.collate_fn = collate_fn
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.optimizer = optimizer
        self.basic_optimizer = optimizer
        self.client_optimizer = None  # `optimizer_name` reads it
        # Code that is written for any engine of DeepSpeed reads these two.
        self.has_moe_layers = False
        self.sparse_tensor_module_names: set[str] = set()
        self._boundary_override: bool | None = None
        # Backwards since the last step. Samples are counted by them if every `step` ends a step.
        self._num_backwards = 0
        self._step_applied = False
        self._loss_sum: torch.Tensor | None = None
        self.last_record: StepRecord | None = None
        self._destroyed = False
        self._is_compiled = False
        self._has_run = False
        live_engines.end_previous_engines(model, trains=optimizer is not None)
        check_free(model)
        if optimizer is not None:
            optimizer.connect(self.step, self.zero_grad, self.offload_states, self.reload_states)
            if settings.precision == "fp16":
                stage = self.zero_optimization_stage()
                optimizer.loss_scaler = make_scaler(self._config.float16_config, stage)
        self.lr_scheduler = lr_scheduler
        self._job = job = Job(
            model,
            settings,
            optimizer,
            local_rank=self.local_rank,
            ranks=ranks,
            make_trainer=_trainer_of(ranks),
        )
        asynchronous = settings.stronghold.async_checkpoint
        self._checkpoints = Checkpoints(job, optimizer, asynchronous=asynchronous)
        self._planner = Planner(job)
        self._user_backward = UserBackward(self, job.trainer.program)
        self.module = model
        self.device = job.device.torch_device
        self._state_hooks = StateHooks(
            model,
            job.parameters,
            wait=job.settle,
            read=job.trainer.wait_for_readers,
            loaded=job.adopt_weights,
        )
        live_engines.register(self)
        try:
            self.monitor = make_monitor(self._config)
            self.mpu = self.tput_timer = None  # `deepspeed_io` reads them
            self.training_dataloader = None
            if training_data is not None:
                self.training_dataloader = self.deepspeed_io(training_data)
        except BaseException:
            self.destroy()
            raise
        logger.info("%s", job.plan)
        self._start.end("in it (the model is taken over)")

    # -- the step ---------------------------------------------------------------------------------
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the user's module, with its present `forward`, and return the output unchanged.

        * `inputs`, `kwargs`: arguments of the module.

        Each layer waits until its weights have arrived on the device (unshard, swap in). After
        `destroy` the module runs alone.

        Raises LaneError, once, if an asynchronous save has failed since the last call. Raises
        `OutOfMemoryError` if the device has no room for the activations. Raises ConfigError after
        `offload_states`, and for transforms of `torch.func`.
        """
        if self._destroyed:  # the model is the user's again, or another engine's
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.module.training:
            with self._job.training("engine.forward"):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with_graph = torch.is_grad_enabled()
        self._job.check_here("engine.forward", evaluates=True)
        self._checkpoints.raise_failure()
        self._user_backward.check()
        # not before: a framework that sets up logs its own warnings first
        if not self._has_run:
            self._has_run = True
            if self._start is not None:
                self._start.end("until the first forward")
            self.settings.warn_of_ignored()
        size = batch_size(inputs, kwargs)
        if with_graph:
            self._job.partition.names.check()
        if self._job.can_train:
            waits = self._user_backward.waits
            self._planner.begin_forward(inputs, kwargs, size, trains=with_graph, waits=waits)
        if self.module.training and with_graph:
            self._job.metrics.add_tokens(size.tokens)
        with self._job.forward_pass():
            output = self._call_module(inputs, kwargs)
        if self.optimizer is not None and torch.is_grad_enabled():
            self._user_backward.watch(output)
        return output

    def _call_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the user's module. Its errors of memory and of transforms become the engine's."""
        try:
            return self.module(*inputs, **kwargs)
        except torch.OutOfMemoryError as error:
            raise self._planner.out_of_memory("engine.forward", error) from error
        except RuntimeError as error:
            if str(error) == NO_TRANSFORMS:
                raise ConfigError(NO_TRANSFORMS) from error
            raise

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for `engine.scale(loss).backward()`.

        * `loss`: a tensor of one element with a graph.

        fp16 needs this call before a `loss.backward()` of the program's own. Without fp16 the
        result is the loss. The engine divides by the accumulation steps itself.

        Raises ConfigError for another kind of loss, and for an engine without an optimizer.
        """
        self._needed_optimizer("scale")
        check_loss("scale", loss)
        return self._user_backward.scale(loss)

    @_trains
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run autograd on a scalar loss. Gradients leave for the host layer by layer meanwhile.

        * `loss`: a tensor of one element with a graph.
        * `retain_graph`: keep the graph for another backward, as in torch.
        * `scale_wrt_gas`: divide the loss by the accumulation steps first.

        Returns the loss after that division. Afterwards no parameter has a `grad`.

        Each layer waits until its weights have arrived on the device again. If autograd raises, the
        step starts again: gradients of its earlier micro-batches are dropped.

        Raises ConfigError for another kind of loss, and for an engine without an optimizer. Raises
        `OutOfMemoryError` if the device has no room.
        """
        optimizer = self._needed_optimizer("backward")
        check_loss("backward", loss)
        self._user_backward.check()
        num_accumulated = self.gradient_accumulation_steps()
        is_divided = scale_wrt_gas and num_accumulated > 1
        divided: torch.Tensor = loss / num_accumulated if is_divided else loss
        job = self._job
        # the step's first backward, or all before were dropped
        if not job.trainer.is_in_step:
            self._loss_sum = None
        has_begun = False
        try:
            job.begin_backward(ends_step=self.is_gradient_accumulation_boundary())
            has_begun = True
            with self._user_backward.announced(keeps_graph=retain_graph):
                optimizer.scaled(divided).backward(retain_graph=retain_graph)
            self._num_backwards += 1
        except BaseException as error:
            is_refusal = not has_begun and isinstance(error, Exception)
            if not is_refusal:  # a refusal has changed nothing
                self._abandon_step()
            if isinstance(error, torch.OutOfMemoryError):
                raise self._planner.out_of_memory("engine.backward", error) from error
            raise
        value = divided.detach()
        self._loss_sum = value if self._loss_sum is None else self._loss_sum + value
        return divided

    def _abandon_step(self) -> None:
        """Drop the step's gradients so far: the next micro-batch is its first."""
        self._job.trainer.forget()
        self._begin_step_again()

    def _begin_step_again(self) -> None:
        """The step has no gradients any more: the next micro-batch is its first."""
        if self.managed_gradient_accumulation():
            self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        self._loss_sum = None
        self._num_backwards = 0

    @_trains
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the micro-batch. At an accumulation boundary: clip, queue the updates, and advance
        the schedule of learning rates.

        * `lr_kwargs`: keyword arguments of the schedule's `step`.

        Waits for the norm of all gradients if clipping or a check for overflow needs it. It does
        not wait for the updates: the next forward waits for them layer by layer.

        If Ctrl-C ends it before a weight has changed, the step starts again. If Ctrl-C ends it
        later, the next call raises ConfigError until a checkpoint is loaded.

        Raises ConfigError for an engine without an optimizer, and for parameter groups that have
        changed. Raises LaneError if an operation on a lane has failed.
        """
        optimizer = self._needed_optimizer("step")
        self._user_backward.check()
        self._step_applied = False
        is_managed = self.managed_gradient_accumulation()
        boundary = not is_managed or self.is_gradient_accumulation_boundary()
        try:
            if boundary:
                self._take_step(optimizer, lr_kwargs or {})
            else:
                self._job.trainer.end_micro_batch()
        except BaseException as error:
            # Ctrl-C: no further step may use its gradients
            if not isinstance(error, Exception):
                self._abandon_step()
            raise
        self.micro_steps += 1

    def _take_step(self, optimizer: EngineOptimizer, lr_kwargs: dict[str, Any]) -> None:
        """Close the clip barrier, then advance schedule, counters and loss scale."""
        job = self._job
        job.device.check()
        optimizer.check_groups()
        learning_rate = float(optimizer.param_groups[0]["lr"])
        if not job.trainer.is_in_step:
            self._loss_sum = None
        result = job.step(
            clipping=float(self.gradient_clipping() or 0.0),
            loss_scale=optimizer.loss_scale,
            skips_overflow=self.settings.skip_on_overflow,
        )
        optimizer.grad_norm = result.grad_norm
        optimizer.overflow = result.overflow
        self._step_applied = not result.overflow
        optimizer.count_step()
        if result.overflow:
            self.skipped_steps += 1
            logger.warning("step %d skipped: the gradients are not finite", self.global_steps + 1)
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self._samples_of_step()
        if optimizer.dynamic_loss_scale:
            optimizer.loss_scaler.update_scale(result.overflow)
        self._report(optimizer, learning_rate)

    def _samples_of_step(self) -> int:
        """Samples of the step on all ranks. It sets the count of backwards to 0."""
        if self.managed_gradient_accumulation():
            return int(self.train_batch_size())
        num_backwards = self._num_backwards
        self._num_backwards = 0
        samples_of_backward = int(self.train_batch_size()) // int(
            self.gradient_accumulation_steps()
        )
        return samples_of_backward * num_backwards

    def _report(self, optimizer: EngineOptimizer, learning_rate: float) -> None:
        """Record the step, log it when it is due, and send it to the monitors."""
        job = self._job
        loss = self._loss_sum
        self._loss_sum = None
        job.device.settle()
        record = job.metrics.end_step(
            step=self.global_steps,
            loss=loss,
            grad_norm=optimizer.grad_norm,
            learning_rate=learning_rate,
            skipped=optimizer.overflow,
        )
        self.last_record = record
        if self._start is not None and self._start.end_step():
            touched = job.device.first_touch
            size = format_size(touched.nbytes)
            logger.info("%s; %s touched in %.1f s meanwhile", self._start, size, touched.seconds)
            self._start = None
        if self.plan.nvme_bytes and self.global_steps == WEAR_STEP:
            logger.info("%s", self.plan.wear(record.step_s))
        steps_per_print = self.settings.steps_per_print
        if steps_per_print and self.global_steps % steps_per_print == 0:
            logger.info("%s", job.metrics.format(record))
        scale = optimizer.loss_scale if self.fp16_enabled() else None
        write_step(self.monitor, record, samples=self.global_samples, loss_scale=scale)

    def was_step_applied(self) -> bool:
        """Return True if the last `step` changed weights. Waits for nothing.

        It is False between accumulation boundaries, and for a step that was skipped because its
        gradients were not finite.
        """
        return self._step_applied

    def __getattr__(self, name: str) -> Any:
        """Return what the module has under a name that the engine lacks."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"{error}. If it is one of DeepSpeed's own engine: docs/members.md lists what this "
                'engine has, and "stronghold": {"enabled": false} selects that one'
            ) from None

    def _check_alive(self, method: str) -> None:
        if self._destroyed:
            raise ConfigError(f"engine.{method}: this engine was destroyed; initialize a new one")

    def _needed_optimizer(self, method: str) -> EngineOptimizer:
        """The optimizer. ConfigError without one, after `destroy`, and after `offload_states`."""
        self._check_alive(method)
        self._job.check_here(f"engine.{method}")
        if self.optimizer is None:
            raise ConfigError(
                f'engine.{method}: this engine has no optimizer; add an "optimizer" section to the '
                "config, or pass optimizer= to stronghold.initialize"
            )
        return self.optimizer

    # -- accumulation -----------------------------------------------------------------------------
    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current micro-batch ends a step.

        It is always False if `managed_gradient_accumulation` is false: then each `step` ends one,
        and backward cannot know which backward is the last.
        """
        if not self.managed_gradient_accumulation():
            return False
        if self._boundary_override is not None:
            return self._boundary_override
        num_micro_batches = self.micro_steps + 1
        return bool(num_micro_batches % self.gradient_accumulation_steps() == 0)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Override the boundary from now on.

        * `is_boundary`: answer of `is_gradient_accumulation_boundary`. Set it before the
          micro-batch's forward.

        Raises ConfigError if `managed_gradient_accumulation` is false.
        """
        if not self.managed_gradient_accumulation():
            raise ConfigError(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so "
                "that every engine.step() ends a step: leave the call out, or the key"
            )
        self._boundary_override = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of accumulation steps.

        * `train_batch_size`: samples of one step on all ranks.

        Raises ConfigError for a change from one accumulation step to several, because no memory
        holds the sums. The batch size then stays.
        """
        num_before = self.gradient_accumulation_steps()
        super().set_train_batch_size(train_batch_size)
        num_after = self.gradient_accumulation_steps()
        if num_before == 1 and num_after > 1:
            self._config.gradient_accumulation_steps = num_before
            samples_of_rank = self.train_micro_batch_size_per_gpu() * num_before
            self._config.train_batch_size = samples_of_rank * self.dp_world_size
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}) needs {num_after} accumulation steps, "
                "but the plan has no fp32 accumulators: start with gradient_accumulation_steps "
                "above 1"
            )

    def _backward_prologue(self) -> None:
        """Do nothing: hooks notice every backward. Programs with several engines and one loss call
        DeepSpeed's method by hand."""

    _backward_epilogue = _backward_prologue

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager without effect: gradients of every micro-batch leave for the host at
        once."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away the gradients of every micro-batch since the last step.

        * `set_to_none`: without effect, since no parameter has a `grad`.

        Without effect if no gradient waits for a step, and after `destroy`. Early updates of the
        step are dropped with its gradients. Every rank calls it, and waits for the others.
        """
        if not self._destroyed:
            self._user_backward.check()
            self._job.trainer.drop_gradients()

    # -- values that a program reads --------------------------------------------------------------
    def get_global_grad_norm(self) -> float | None:
        """Return the global L2 norm of the last step's gradients, before clipping.

        None before the first step, and without an optimizer. Waits for backward on the device if
        the step did not wait for it.
        """
        return None if self.optimizer is None else self.optimizer._global_grad_norm

    def loss_scale(self) -> float:
        """Return `fp16.loss_scale` of the config in fp16, and 1 in other precisions.

        0 means a dynamic scale. `optimizer.loss_scale` has its newest value.
        """
        return float(super().loss_scale()) if self.fp16_enabled() else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Return True in fp16 with a scale that follows the overflows."""
        return bool(self.fp16_enabled() and super().dynamic_loss_scale())

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Take state off the device until `reload_states`, for example for a generator.

        * `include`: kinds of state, by DeepSpeed's `OffloadStateTypeEnum`. None, or a list with
          `lp_params`: everything leaves. A list without it: masters, moments and gradient slots
          leave together, and the weights stay, so that the model can still be evaluated.
        * `device`: "cpu". With "none" nothing moves, and the log has a warning.
        * `pin_memory`: without effect. Host memory is pinned where training pins it.
        * `non_blocking`: without effect. The memory is free when the call returns.

        Call it between two steps. If everything has left, the parameters show their newest values
        on the CPU, the module is a plain one, and the engine runs no forward. In both cases it runs
        neither backward nor step. A second call with more kinds takes more away. Waits for all work
        on the device.

        Raises ConfigError for another device or an unknown kind, after `destroy`, within a forward
        or backward, and while gradients wait for a step.
        """
        self._check_alive("offload_states")
        device_name = str(getattr(device, "value", device))
        if device_name == "none":
            logger.warning("engine.offload_states: device none: nothing is moved")
            return
        if device_name != "cpu":
            raise ConfigError(f'engine.offload_states: device: got {device!r}, expected "cpu"')
        kinds = _kinds_of_state(include)
        if kinds:
            self._job.leave_device(keeps_weights=OffloadStateTypeEnum.lp_params not in kinds)
            self.empty_partition_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring everything that `offload_states` took away back to the device.

        * `non_blocking`: without effect.

        Training goes on with the same bits. Raises ConfigError after `destroy`, and if other
        programs have taken the memory meanwhile. Then nothing changes.
        """
        self._check_alive("reload_states")
        self._job.return_to_device()

    def empty_partition_cache(self) -> None:
        """Give device memory of freed tensors, which torch caches, to other processes.

        No partition of the weights is cached.
        """
        gc.collect()
        self._job.device.memory.trim()

    @property
    def data_parallel_group(self) -> Any:
        """torch's group of all ranks, for a program's own collectives.

        None in a process without a process group.
        """
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None

    def get_data_parallel_rank(self) -> int:
        """This rank among those that share the model's state."""
        return self._ranks.rank

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of each block with `torch.compile`.

        * `backend`: torch.compile's backend.
        * `compile_kwargs`: further arguments of torch.compile.
        * `schedule`, `compiled_autograd_enabled`: None and False alone, since both rewrite the
          graph of the whole model.

        Layers are fetched and evicted between blocks, so code around the blocks stays as it is. A
        second call has no effect. Waits for pending updates. torch compiles at the next forward.

        Raises ConfigError for other values, after `offload_states`, and within a step.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                f"engine.compile: got schedule={schedule!r}, compiled_autograd_enabled="
                f"{compiled_autograd_enabled!r}, expected None and False: there is no graph of the "
                "whole model; leave them out"
            )
        if not self._is_compiled:
            self._job.compile_blocks({**(compile_kwargs or {}), "backend": backend})
            self._is_compiled = True

    @contextlib.contextmanager
    def write(self) -> Iterator[bool]:
        """Context manager in which the program writes parameters in place, between two steps. It
        has torch's `no_grad`.

            with engine.write() as writes:
                if writes:
                    model.lm_head.weight.mul_(0.5)

        The ranks of a node share one copy of the weights. So one of them writes: `writes` is True
        there, and False on the others. Every rank enters, and waits for the others. Masters follow,
        and moments stay, as after any write.

        One rank alone may write without it. `load_state_dict` does not need it. Raises ConfigError
        within a forward or a backward.
        """
        self._check_alive("write")
        self._job.trainer.check_between_passes("engine.write")
        self.synchronize()
        self._job.trainer.wait_for_readers()
        try:
            with torch.no_grad():
                yield self._ranks.index == 0
        except BaseException as error:
            self._ranks.fail(f"{type(error).__name__}: {error}")
            raise
        self._job.adopt_weights({})  # no master restarts

    @property
    def plan(self) -> Plan:
        """The plan: where every array lies, and the reasons. `print(engine.plan)` explains it."""
        return self._job.plan

    def memory_report(self) -> MemoryReport:
        """Return peak bytes per tier (GPU, host, NVMe), planned and measured. Waits for nothing.

        Gradient slots, and what trains on the GPU, get memory at the first backward.
        """
        return self._job.memory_report()

    def inspect(self) -> Inspection:
        """Return a read-only view: layers, plan, schedule, recorded operations, bytes.

        Waits for nothing. Put `print(engine.inspect())` into a bug report.
        """
        return inspect(self._job, self.last_record)

    def synchronize(self) -> None:
        """Wait until every parameter holds its newest value.

        Python code that reads or writes a parameter waits by itself, for that parameter. Extensions
        in C++ do not wait: call this first. Without effect after `destroy`.

        Raises LaneError if an update has failed.
        """
        if not self._destroyed:
            self._job.settle()

    def named_weights(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the newest weights, for a generation server.

            llm.load_weights(engine.named_weights(device="cuda"))

        * `device`: where the tensors shall be. None: where they lie. A streamed layer's are in host
          memory.
        * `dtype`: of floating-point tensors. None: their own.

        Yields (name, tensor) of the module's state dict in registration order, with the values of
        `module.state_dict()` after `synchronize`. Tied parameters come once, under their first
        name. Packed weights (`stronghold.frozen`) are decoded.

        A tensor that needs no copy is a view of the engine's memory. It shows these values until
        the next `step`: clone it to keep it. At most one tensor is copied or decoded at a time.

        Each layer waits for its own update, while later layers are still being updated. Works after
        `offload_states`, too. One rank may call it alone.

        Raises ConfigError after `destroy`, within a forward or backward, and for an iterator that
        is used after a further step or load.
        """
        self._check_alive("named_weights")
        place = None if device is None else torch.device(device)
        return named_weights(self._job, place, dtype)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the user module's state dict. Waits for pending updates.

        Arguments are those of DeepSpeed's method.
        """
        self.synchronize()
        state: dict[str, Any] = super().module_state_dict(*args, **kwargs)
        return state

    def load_module_state_dict(
        self, checkpoint: Any, strict: bool = True, custom_load_fn: Any = None, **zero3: Any
    ) -> None:
        """Load weights into the user's module. Masters become these weights, and moments stay.

        * `checkpoint`: a state dict, or a dict that holds it under "module", as in DeepSpeed.
        * `strict`: as in `torch.nn.Module.load_state_dict`.
        * `custom_load_fn`: called as `custom_load_fn(src=state, dst=module)` in its place.
        * `zero3`: DeepSpeed's arguments for ZeRO-3 and expert parallelism, without effect.

        Waits for pending updates, and for operations that read the weights.
        """
        nested = checkpoint.get("module")
        state = nested if isinstance(nested, dict) else checkpoint
        if custom_load_fn is not None:
            self.synchronize()
            self._job.trainer.wait_for_readers()
            custom_load_fn(src=state, dst=self.module)
            self._job.adopt_weights()
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
        """Save everything that the next micro-batch depends on as `save_dir/tag`. Returns True.

        * `save_dir`: every rank sees it under this path.
        * `tag`: name of one directory. None: `global_step{N}`.
        * `client_state`: values of the program, which `load_checkpoint` returns.
        * `save_latest`: make the file `latest` name this tag.
        * `exclude_frozen_parameters`: leave frozen parameters out.

        The tag appears complete or not at all. Then `latest` names it. Every rank calls the method.
        It waits for an earlier save, for pending updates, and for the disk.

        With `stronghold.async_checkpoint` the files are written while the next steps compute. Then
        a failure is raised once, as LaneError, by the next forward, save, load or
        `wait_for_checkpoint`. Otherwise OSError is raised here. In both cases training can go on.

        Gradients of a step that has not ended are not saved, as in DeepSpeed. A warning says so
        once. The run that loads the tag begins that step again.

        Raises ConfigError within a forward or a backward.
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
        """Wait until an asynchronous save is complete. Raises LaneError, once, if it failed."""
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
        """Load the checkpoint `load_dir/tag`.

        * `load_dir`: every rank sees it under this path.
        * `tag`: name of one directory. None: the tag that `latest` names.
        * `load_module_strict`: raise ConfigError if model and checkpoint differ in their names.
        * `load_optimizer_states`: load masters, moments and hyper-parameters too.
        * `load_lr_scheduler_states`: load the schedule of learning rates too.
        * `load_module_only`: load the weights alone. Masters become these weights. Moments and
          counters stay. No code of the checkpoint runs. The client state is None
          if reading it would run code.
        * `custom_load_fn`: called as `custom_load_fn(src=state_dict, dst=module)` to place the
          weights.

        Returns the path of the state file and the client state, as DeepSpeed does. The client state
        has `ds_version`, the version that wrote it, beside the program's entries. Returns
        (None, None) without `tag` and without a file `latest`. Waits for a running save and for the
        disk. Every rank calls the method. Random generators stay as they are, as in DeepSpeed: see
        `restore_random_states`.

        Every file is verified before anything in memory changes. Raises CheckpointError for files
        that are missing, cut off, changed or foreign. Raises ConfigError for a checkpoint of
        another model.
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

    def restore_random_states(self) -> None:
        """Set the generators of Python, NumPy, torch and the GPU to their states at the save.

        Call it after `load_checkpoint`, and after the data loader has skipped the samples of the
        epoch that the run has seen. Then dropout draws what the uninterrupted run draws. If another
        number of ranks saved, the first rank alone gets states.

        Raises ConfigError if no checkpoint was loaded.
        """
        self._checkpoints.restore_random_states()

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's state dict in the compute dtype to one file. Returns True.

        * `save_dir`: directory of the file, made if it is missing.
        * `save_filename`: the suffix `.safetensors` selects that format, any other torch's own.
        * `exclude_frozen_parameters`: leave frozen parameters out.

        Tied parameters are stored once. The first rank writes, and every rank calls the method.
        Waits for pending updates, a running save, and the disk.

        Raises OSError of the disk.
        """
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
        """Set the module to training mode, or (`mode` false) to evaluation mode. Returns the
        engine.

        Time in evaluation mode does not count as a step's time.
        """
        if mode and not self.training:
            self._job.metrics.restart_clock()
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self) -> StrongholdEngine:
        """Set the module to evaluation mode. Returns the engine."""
        return self.train(False)

    def _apply(self, fn: Any, recurse: bool = True) -> StrongholdEngine:
        """Do nothing for `to`, `cuda`, `half` and their kin: the plan decides places and dtypes."""
        logger.warning(
            "engine.to, cuda, half and the like are without effect: weights are where the plan "
            "puts them, in the dtype that the config asks for"
        )
        return self

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return DeepSpeed's own data loader over `dataset`. Other arguments are DeepSpeed's."""
        kwargs.setdefault("pin_memory", self.device.type == "cuda")
        return super().deepspeed_io(dataset, *args, **kwargs)

    def destroy(self) -> None:
        """Finish pending work, end the lanes, and give the model back whole, on the CPU.

        Waits for a running save and for pending updates. A second call has no effect. In a forked
        child it does nothing.

        Raises LaneError, after all of that, if an update failed and no call has raised it yet.
        """
        if not self._destroyed and not forked_from(self._process):
            self._destroyed = True
            self._state_hooks.close()
            try:
                self._checkpoints.wait()
            finally:
                self._job.close()

    close = destroy

    def finish(self) -> None:
        """Write the rest of a checkpoint, and the trace. The end of the process calls it too.

        Waits for a running save and for queued work. Raises LaneError if one of them failed.
        Without effect after `destroy`, and in a forked child.
        """
        if not self._destroyed and not forked_from(self._process):
            self._job.finish(self._checkpoints.wait)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "an engine has threads and files, and cannot be copied or pickled: copy or torch.save "
            "engine.module or its state_dict(), or call engine.save_checkpoint"
        )

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else modules are gone
            off_lanes(self.destroy)  # also of an engine that is half-built


def _trainer_of(ranks: Any) -> Callable[..., Trainer]:
    """Return the class, or the function, that makes this rank's trainer."""
    if ranks.num_ranks == 1:
        return Trainer
    from stronghold.train.rank_trainer import RankTrainer  # one rank never needs it

    return functools.partial(RankTrainer, ranks=ranks)


def _kinds_of_state(include: Iterable[Any] | None) -> set[OffloadStateTypeEnum]:
    """The kinds that `offload_states` gets, all for None. Raises ConfigError for an unknown one."""
    known = [kind.value for kind in OffloadStateTypeEnum]
    kinds = set()
    for kind in OffloadStateTypeEnum if include is None else include:
        name = str(getattr(kind, "value", kind))
        if name not in known:
            raise ConfigError(
                f"engine.offload_states: include: got {name!r}, expected kinds among "
                f"{', '.join(known)}.{did_you_mean(name, known)}"
            )
        kinds.add(OffloadStateTypeEnum(name))
    return kinds


for _name in REFUSED:
    setattr(StrongholdEngine, _name, refused_method(_name))
