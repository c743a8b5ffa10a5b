"""The trainer: one model in training.

It makes the nouns in order (layers, arrays, weights, gradients, updates, order, hooks), and closes
them in reverse.

[Note: interrupts] Ctrl-C, or an exception in a hook of the program, may end a step at any
bytecode.
1. It may leave a layer in two states at once, an operation on a lane whose fence was lost,
   gradients anywhere, and a pass open.
2. Nothing of this is repaired one by one. The lanes end all queued operations. Then every slot is
   empty, every gradient is dropped, every parameter points at the host, and no pass is open.
3. The arrays are whole, for lanes alone write them.
4. If updates were being queued, some layers may be a step ahead of others. Then nothing goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold import native
from stronghold.devices.device import ComputeSpan, Device
from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import follow_device, wrappers
from stronghold.model.partition import Partition
from stronghold.plan.plan import Plan
from stronghold.private import NO_BACKWARD, backward_number, without_torch_function
from stronghold.telemetry.metrics import Metrics
from stronghold.train.activations import intercepted_attention
from stronghold.train.arrays import Arrays
from stronghold.train.early_updates import EarlyUpdates
from stronghold.train.gradients import Gradients
from stronghold.train.guards import WITHIN_PASS
from stronghold.train.hooks import Hooks, ProgramBackward
from stronghold.train.layer import GradientState, Groups, Layer
from stronghold.train.offload import ActivationOffload
from stronghold.train.order import Order
from stronghold.train.training_thread import TrainingThread
from stronghold.train.updates import StepResult
from stronghold.train.visible import Visible
from stronghold.train.weights import Weights


class Trainer:
    """Trains a partition's model by `plan` on `device`.

    layers   of the partition, in its order (`layers_of`)
    groups   the hyper-parameters of each trained parameter, live, and their optimizer
    kernels  run on the update lane
    metrics  count the seconds for which compute waits
    thread   the one that trains
    folders  for the arrays that the plan puts in files

    num_changes     counts steps, and loads of weights
    can_plan_again  layers may move between any two steps, not only before the first batch
    make_*          make the nouns. `rank_trainer` has others
    """

    can_plan_again = True
    weights: Weights
    gradients: Gradients
    offload: ActivationOffload
    make_arrays: Callable[..., Arrays] = Arrays
    make_weights: Callable[..., Weights] = Weights
    make_gradients: Callable[..., Gradients] = Gradients
    make_updates: Callable[..., EarlyUpdates] = EarlyUpdates

    def __init__(
        self,
        partition: Partition,
        layers: list[Layer],
        groups: Groups,
        *,
        plan: Plan,
        device: Device,
        kernels: native.Pool,
        metrics: Metrics,
        thread: TrainingThread,
        folders: Sequence[Path] = (),
    ) -> None:
        self.model, self.layers = partition.model, layers
        self._partition, self._device, self._kernels = partition, device, kernels
        self._metrics, self._thread = metrics, thread
        self.program = ProgramBackward()
        self._changing: str | None = None  # change of the arrays
        self.num_changes = 0
        # Now: a program may freeze and thaw parameters before the first batch has its plan.
        named = self.model.named_parameters()
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        for layer in layers:
            layer.is_on_gpu = layer.index in plan.updated_on_gpu
        with ExitStack() as undo:
            undo.enter_context(intercepted_attention())
            undo.callback(self._move_buffers, torch.device("cpu"))
            self._move_buffers(device.torch_device)
            undo.callback(self._follow_device)
            self.arrays = self.make_arrays(
                device,
                layers,
                accumulates=plan.accumulates,
                in_files={layer: plan.in_files[layer.index] for layer in layers},
                staging=plan.staging,
                folders=folders,
            )
            undo.callback(self.arrays.close)
            self._visible = Visible(layers, thread)
            undo.callback(self._visible.close)
            self._follow_device()
            self.updates = self.make_updates(device, self.arrays, kernels, layers, groups, metrics)
            self._start(plan)
            self._give_back = undo.pop_all()

    def _follow_device(self) -> None:
        """Let quantised weights say the device on which their inner tensors are."""
        follow_device(wrappers(self.model))

    def _move_buffers(self, device: torch.device) -> None:
        """Move the buffers, and the modules without a parameter: these may keep tensors that are no
        buffers, and move them in their own way (torchmetrics' metrics)."""
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(device)
        for module in self._partition.modules_without_stored():
            module.to(device)

    # -- the plan ---------------------------------------------------------------------------------
    def _start(self, plan: Plan, *, trains: bool = True) -> None:
        """Make slots and hooks by `plan`. The model may be called now."""
        device, layers, span = self._device, self.layers, ComputeSpan(self._device)
        self._visible.set_device(device.torch_device)
        for layer in layers:
            layer.is_resident = layer.index in plan.resident
            if trains:
                self.arrays.make_gradients(layer)
        if trains:
            self.updates.open(layer for layer in layers if layer.index in plan.early)
        device.side_streams.open(plan.demand.streams)
        self.weights = self.make_weights(
            device, self.arrays, layers, plan.window, metrics=self._metrics, visible=self._visible
        )
        self.gradients = self.make_gradients(
            device,
            self.arrays,
            self._kernels,
            layers,
            plan.gradient_slots,
            trains=trains,
            accumulates=plan.accumulates,
            in_chunks=plan.demand.chunk is not None,
            metrics=self._metrics,
            span=span,
            change=self.updates.cancel,
            complete=self.updates.start,
        )
        budget = plan.demand.host_budget_bytes
        self.offload = ActivationOffload(
            device,
            metrics=self._metrics,
            room_bytes=None if budget is None else budget - plan.host_total_bytes,
            expected_bytes=plan.offloaded_bytes,
            weights=self.weights.staying,
        )
        self._order = Order(self.weights)
        modules = {layer: self._partition.layers[layer.index].modules for layer in layers}
        self._hooks = Hooks(
            self.model,
            modules,
            self._order,
            self.weights,
            self.gradients,
            self.offload,
            frozen=self._frozen,
            program=self.program,
            thread=self._thread,
            chunk=plan.demand.chunk,
            device=device,
            span=span,
        )
        self.set_levels(plan.activations)

    def set_levels(self, levels: Sequence[str]) -> None:
        """Set the level of activations of each layer, for forwards that begin later."""
        self._hooks.set_levels(levels)

    def _stop(self) -> None:
        """Finish lanes and compute, and remove hooks and slots. The model is a plain one. Safe to
        call twice."""
        self._device.finish()
        self._hooks.close()
        self._device.compute.finish()  # the device may still update its layers
        self.offload.close()
        self.gradients.close()
        self.updates.close()
        self.weights.close()

    def take_plan(self, plan: Plan) -> None:
        """Go on by another plan, between two steps. Layers may move to the device alone: files, and
        what lies there, stay. Slots of one plan at a time are on the device. Backward refuses
        graphs of earlier forwards."""
        self._leave_plan(plan.updated_on_gpu)
        self._move_buffers(self._device.torch_device)
        self._start(plan)

    def keep_weights(self, plan: Plan) -> None:
        """Keep on the device what a forward by `plan` needs, until `take_plan`. The model can be
        evaluated."""
        self._leave_plan(())
        self._start(plan, trains=False)

    def leave_device(self) -> None:
        """Keep nothing on the device, until `take_plan`. The model is a plain one on the host."""
        self._leave_plan(())
        self._move_buffers(torch.device("cpu"))
        self._visible.set_device(None)

    def _leave_plan(self, on_gpu: Collection[int]) -> None:
        """Stop, and move layers. Afterwards the device has all arrays of the layers with these
        indices."""
        self.refresh()  # a layer that moves takes what the program has written along
        self._stop()
        for layer in self.layers:
            if layer.is_on_gpu != (layer.index in on_gpu):
                self.arrays.move(layer, to_device=not layer.is_on_gpu)
        self.updates.forget_addresses()
        self._follow_device()

    # -- the step ---------------------------------------------------------------------------------
    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Context manager for a call of the model. If it raises, the gradients of earlier
        micro-batches stay."""
        self.check()
        try:
            yield
        except Exception:
            raise  # the hooks have ended the pass
        except BaseException:
            self._hooks.forget()
            raise

    def run_with_weights(self, module: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
        """Call `compute` while the weights of a module outside of the blocks are on the device. Its
        forward has been called since the last step."""
        return self._hooks.run_with_weights(module, compute)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with self.forward_pass():
            return self.model(*args, **kwargs)

    def begin_backward(self, *, ends_step: bool = True) -> None:
        """Autograd is about to run. Gradients leave for the host layer by layer meanwhile. The
        hooks notice its end. If it raises, the caller calls `forget`.

        ends_step  `step` follows
        """
        self.check()
        self._hooks.take_gradients_last()
        self.gradients.ends_step = ends_step

    def backward(self, loss: Tensor, *, ends_step: bool = True, retain_graph: bool = False) -> None:
        """Run autograd. If it raises, the step's gradients are dropped."""
        self.begin_backward(ends_step=ends_step)
        try:
            loss.backward(retain_graph=retain_graph)
        except BaseException:
            self.forget()
            raise

    def end_micro_batch(self) -> None:
        """The micro-batch has no further backward, and the step goes on with the next one."""
        self.gradients.end_micro_batch()

    def step(
        self, *, clipping: float = 0.0, loss_scale: float = 1.0, skips_overflow: bool = False
    ) -> StepResult:
        """Queue the updates of all layers with gradients (`Updates.step`). ConfigError for a
        gradient that was set by hand."""
        self.check()
        self._refuse_strays()
        self.num_changes += 1
        try:
            return self.updates.step(
                self.weights,
                self.gradients,
                clipping=clipping,
                loss_scale=loss_scale,
                skips_overflow=skips_overflow,
            )
        except BaseException:
            self.forget()
            raise

    def check_between_passes(self, operation: str) -> None:
        """Raise what has failed, and ConfigError within a forward or a backward."""
        self._device.check()
        self._hooks.forget_interrupted()
        if self.is_in_pass or backward_number() != NO_BACKWARD:
            raise ConfigError(WITHIN_PASS.format(operation=operation))

    def check(self) -> None:
        """Raise what has failed. End a pass that an exception of the program left open."""
        self._device.check()
        self._hooks.forget_interrupted()
        if self.unfinished is not None:
            raise ConfigError(
                f"{self.unfinished} did not end: some layers have new values and others have not. "
                "Nothing can go on from that: load a checkpoint (engine.load_checkpoint)"
            )

    @property
    def unfinished(self) -> str | None:
        """The operation that did not end, so that layers have values of two states. None: all have
        those of one."""
        return "a step" if self.updates.is_broken else self._changing

    def _refuse_strays(self) -> None:
        """ConfigError for a trained parameter that has a gradient: hooks take all that autograd
        makes. The gradient is dropped."""
        strays = []
        with without_torch_function():  # hidden parameters take long else
            for layer in self.layers:
                for name, parameter in zip(
                    layer.names[: layer.num_trained], layer.parameters, strict=False
                ):
                    if parameter.grad is not None:
                        parameter.grad = None
                        strays.append(name)
        if strays:
            raise ConfigError(
                f"{strays[0]}.grad was set by hand: change a gradient in a hook of the parameter "
                "(parameter.register_hook)"
            )

    # -- between steps ----------------------------------------------------------------------------
    @property
    def is_in_step(self) -> bool:
        """True if a layer has gradients of a step that has not ended."""
        return any(layer.gradient_state is not GradientState.NONE for layer in self.layers)

    @property
    def is_in_pass(self) -> bool:
        """True within a forward or a backward."""
        return self._hooks.is_open

    def drop_gradients(self) -> None:
        """Drop the gradients that wait for the step. The graph of a forward stays alive."""
        for layer in self.layers:
            self.gradients.drop(layer)

    def drop_gradient(self, layer: Layer, position: int) -> None:
        """Drop the gradient of one parameter that waits for the step, if there is one. ConfigError
        in another thread than the one that trains."""
        if layer.gradient_state is not GradientState.NONE:
            self._thread.check(f"dropping the gradient of {layer.names[position]}")
            self.gradients.drop(layer, [position])

    def forget(self) -> None:
        """After an exception: drop the step's gradients, and end every pass ([Note:
        interrupts])."""
        self._hooks.forget()
        self.gradients.forget()
        self.updates.forget()

    def resting_hooks(self) -> AbstractContextManager[None]:
        """Context manager in which the model's own code runs alone."""
        return self._hooks.resting()

    def synchronize(self) -> None:
        """Wait until every parameter has its newest value. Between two passes the program may use
        what it has kept of them now, and write through it; the next pass uses what it finds."""
        self._hooks.forget_interrupted()
        self._visible.see_all()
        self._device.check()

    def settle(self, layer: Layer, operation: str) -> None:
        """Wait until a layer's weights, remainders and moments may be read. They have what the
        program has written. ConfigError in another thread than the one that trains."""
        self._thread.check(operation)
        if layer.is_seen:
            self.weights.refresh(layer)
        layer.weight_record.wait()  # the readers, too: the spill of moments is one

    def of_owner(self, layer: Layer, numel: int, read: Callable[[], Tensor]) -> Tensor:
        """What `read` gives on the rank that owns the layer: so many items, flat, as fp32."""
        return read().float()

    def gradient(self, layer: Layer, position: int) -> Tensor:
        """A parameter's gradient that waits for the step, flat, as fp32: the sum over
        micro-batches, and the mean over ranks. Zeros if it got none."""
        numel = layer.parameters[position].numel()

        def read() -> Tensor:
            if position not in layer.waiting:
                return torch.zeros(numel)
            layer.gradient_record.wait()
            return self.arrays.gradient(layer, position)

        return self.of_owner(layer, numel, read)

    def wait_for_readers(self) -> None:
        """Wait until no operation reads the weights, before the program writes them."""
        for layer in self.layers:
            layer.weight_record.wait()

    def adopt(self, written: Callable[[Layer], Iterable[int]]) -> None:
        """Make the weights at these positions the masters. The program has written them, to the
        memory that the parameters point to."""
        self.wait_for_readers()
        self.num_changes += 1
        for layer in self.layers:
            for k in written(layer):
                if k < layer.num_trained:
                    self.arrays.restart_master(layer, k)
        self.synchronize()

    def refresh(self) -> None:
        """Take over what the program has written so far, between two passes. Its next look at a
        parameter waits for the operations that are queued until then."""
        for layer in self.layers:
            self.weights.refresh(layer)

    @contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """Context manager in which the caller writes the arrays, instead of an optimizer. Gradients
        are dropped, and nothing is queued. If it raises, nothing goes on until a later one ends.

        ConfigError within a forward or a backward."""
        self.check_between_passes(operation)
        self._device.finish()
        self._device.compute.finish()  # the device may still update its layers
        self.forget()
        for layer in self.layers:  # the load takes the place of what the program has written
            layer.is_seen = False
            self.weights.rest(layer)
        self._changing = operation
        self.num_changes += 1
        yield
        # Slots of residents have older values now, and autograd refuses a graph that needs them.
        for layer in self.layers:
            torch.autograd.graph.increment_version(layer.parameters)
        self.updates.is_broken, self._changing = False, None

    def close(self) -> None:
        """Finish the lanes, and give the model back: every parameter is a CPU tensor with its
        newest value. The caller closes the device and the kernels."""
        self._stop()
        self._give_back.close()
