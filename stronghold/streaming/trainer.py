"""Trains one model by one plan: passes, steps, and changes of weights from outside.

This file owns the window, executor, updates, activations and hooks, and the order in which an event
of the step reaches them. The training thread alone calls.

A model that fits on the device has a plan in which nothing moves: no hooks and no slots. Autograd
accumulates as in a plain loop. When backward has ended, the gradients are taken out of `.grad`, and
wait for the step where they lie. No hook sees such a gradient arrive. So a gradient of outputs that
the engine did not make is refused later, at the next backward or `engine.step`.

[Note: interrupts] Ctrl-C, or an exception in a user's hook, may end a step at any bytecode.
1. It may leave a layer in two states at once: claimed and not fetched, released in the window and
   still bound, some parameters in a slot and others at rest.
2. It may leave an operation on a lane whose fence was lost.
3. It may leave gradients: in `.grad`, in slots, on their way to the host.
4. It may leave a pass open: its phase, its blocks, its saved-tensor hooks, its position among uses.
5. It may leave steps that were counted, with or without their update.
6. Nothing of this is repaired one by one. The lanes end all queued operations. Then every slot is
   empty, every gradient is dropped, every parameter is at rest, and no pass is open.
7. The arrays are whole, for lanes alone write them. The ledger knows whether they belong to one
   step: it notes the begin of a change, and its end. If they do not, a load writes arrays and
   counts anew.
8. With several ranks, one rank that raises ends all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window
from stronghold.model.partition import Partition
from stronghold.plan.homes import GPU
from stronghold.plan.plan import Plan
from stronghold.streaming.activations.policies import Activations
from stronghold.streaming.executor import Executor, Phase
from stronghold.streaming.guards import WITHIN_PASS
from stronghold.streaming.hooks import Hooks
from stronghold.streaming.ledger import Ledger
from stronghold.streaming.optimizer_step import GateResult, OptimizerStep
from stronghold.streaming.parameter_views import Bindings
from stronghold.streaming.parts import Parts, Written
from stronghold.streaming.patches.autograd import (
    NO_BACKWARD,
    backward_number,
    without_torch_function,
)
from stronghold.streaming.patches.tensors import version_of
from stronghold.streaming.pieces import LayerGradients, PerParameter

logger = logging.getLogger("stronghold")


class Runtime:
    """Passes and updates of one model by `plan`.

    Between steps every parameter holds its newest value once `settle` has returned.
    `host_room_bytes`: the most host memory for offloaded activations; None: all that is free.
    `check_trains(operation)`: raises ConfigError while masters and moments are away.
    """

    # Peak bytes of gradients in torch's own memory on the device.
    kept_gradient_bytes = 0

    def __init__(
        self,
        parts: Parts,
        plan: Plan,
        *,
        host_room_bytes: int | None,
        check_trains: Callable[[str], None],
    ) -> None:
        host, device = parts.host, parts.device
        self._check_trains = check_trains
        self._device, self._host, self._store = device, host, parts.store
        self._steps = parts.steps
        self._team, self._outside = parts.team, parts.outside
        self._plan = plan
        self.window = Window(
            device,
            host.layers,
            resident=plan.resident,
            num_slots=plan.window,
            num_gradient_slots=plan.gradient_slots,
            own_gradients=plan.own_gradients,
            sums=plan.demand.chunk is not None,
        )
        bindings = Bindings(host.layers, plan.resident)
        self.ledger = Ledger(parts.layers)
        self.step = OptimizerStep(parts, self.ledger, plan, self.window, bindings)
        self._hooks: Hooks | None = None
        # Layers on whose arrays a program's write to a parameter does not show: they are updated on
        # the host, and the parameter lies on the device, or has a master of its own (fp16).
        in_fp16 = any(made.dtype is torch.float16 and made.states for made in host.formats)
        everything = range(len(parts.layers)) if in_fp16 else plan.resident
        self._unseen = [layer for layer in everything if layer not in plan.updated_on_gpu]
        for state in parts.layers:
            state.views.saved_versions = None
        self._has_warned_of_aliases = False
        self._num_calls = 0  # calls of the engine that are running
        device.side_streams.open(plan.demand.streams)
        self.executor = Executor(parts, self.window, self.step, self.ledger, plan, bindings)
        self.activations = Activations(parts, plan, self.executor, host_room_bytes)

    # -- life -------------------------------------------------------------------------------------
    def start(self, partition: Partition) -> None:
        """Attach the hooks. Every layer is adopted, so the model may be called now."""
        if self._plan.whole:
            return
        chunk = self._plan.demand.chunk
        self._hooks = Hooks(partition, self.executor, self.activations, self._device, chunk)
        self.settle()

    def detach(self) -> None:
        """Remove every hook from the model's modules, before the model is given back."""
        if self._hooks is not None:
            self._abandon_forward()
            self._hooks.close()
            self._hooks = None
            self.adopt_edited()

    def resting_hooks(self) -> AbstractContextManager[None]:
        """Context manager in which the model's own code runs alone: no hook of the engine acts."""
        return nullcontext() if self._hooks is None else self._hooks.resting()

    def give_back(self) -> None:
        """Point every parameter at its layer's arrays on the host. The lanes have ended. Gradients
        that wait on the device are dropped."""
        if self._plan.whole:
            self._drop_grad()
            self.step.forget()
        self.executor.bindings.rest_all()
        self.executor.weights.decoded.start_again()

    def close(self) -> None:
        """Drop every buffer."""
        self.activations.close()
        self.executor.weights.decoded.close()
        self.window.close()

    # -- the step ---------------------------------------------------------------------------------
    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Context manager for one call of the model. It ends open uses on return and on any
        exception."""
        self._device.check()  # what failed before explains what is refused now
        self.ledger.check()
        self._abandon_forward()  # a call of the raw module may have been interrupted
        self._num_calls += 1
        try:
            yield
        except BaseException as error:
            self._abandon_forward(interrupted=not isinstance(error, Exception))
            raise
        finally:
            self._num_calls -= 1

    def check_between_passes(self, operation: str) -> None:
        """Raise ConfigError within a call of the engine, and within a backward. Ends a call of the
        raw module that was interrupted."""
        if self._num_calls or backward_number() != NO_BACKWARD:
            raise ConfigError(WITHIN_PASS.format(operation=operation))
        self._abandon_forward()

    def _abandon_forward(self, *, interrupted: bool = False) -> None:
        left_open = self._hooks is not None and self._hooks.abandon_forward()
        if left_open or interrupted:
            self._start_again()

    def _start_again(self) -> None:
        """Empty all slots, drop all gradients, rest all parameters ([Note: interrupts])."""
        self._device.finish()
        if self._team.writable:
            # Slots are fetched anew. A resident one may hold a program's write that no array has.
            for layer in self._unseen:
                if layer in self._plan.resident:
                    self._adopt_layer(layer)
        self.executor.start_again()

    def begin_backward(self, *, boundary: bool) -> None:
        """Autograd is about to run. `boundary`: this micro-batch ends the step. Raises ConfigError
        if no further gradients can be taken."""
        self._device.check()
        self._check_trains("a backward")
        self._abandon_forward()
        self._steps.refuse_unfrozen()
        # The graph keeps aliases, too (W.t() of a head). `close_gate` looks for them.
        self.adopt_edited(through_aliases=False)
        # Inside a running backward, `.grad` has gradients of this very backward.
        if self._plan.whole or backward_number() == NO_BACKWARD:
            self._refuse_strays()
        self.ledger.begin_backward(boundary=boundary)
        self._store.prepare_training()
        if self._hooks is not None:
            self._hooks.begin_backward()
        self.executor.begin_backward_pass()

    def end_backward(self) -> None:
        """Autograd has returned: take every gradient over. No parameter keeps one."""
        if self._plan.whole:
            self._take_grad()
        self.executor.end_backward_pass()
        if self._hooks is not None:
            self._hooks.end_backward()

    def abandon_backward(self) -> None:
        """Drop the step's gradients so far. Autograd raised, or a step raised before it changed
        anything."""
        if self._hooks is not None:
            self._hooks.end_backward()
        if self.executor.phase is Phase.BACKWARD:  # else no layer was reduced
            self._team.fail("engine.backward raised")
        self.step.abandon_backward()
        self._start_again()
        self.executor.forget_calls()
        self._drop_grad()

    def drop_gradients(self) -> None:
        """Drop the step's gradients so far, as the user asked."""
        self._drop_grad()
        self.step.forget()
        self._team.dropped()

    def close_gate(
        self, *, clipping: float, loss_scale: float, skip_on_overflow: bool
    ) -> GateResult:
        """End the step: wait for the norm, then queue the updates, or nothing where it is not
        finite and `skip_on_overflow` is true.

        `clipping`: largest global norm, 0 for none. Gradients carry `loss_scale`.
        """
        self._refuse_strays()
        self.adopt_edited()
        gate, changed = self.step.close_gate(
            clipping=clipping, loss_scale=loss_scale, skip_on_overflow=skip_on_overflow
        )
        self.executor.outdate(changed)
        self.executor.performed.end_step()
        self.executor.fetch_ahead()
        if kept := self.executor.aliased(changed):
            self._wait_for_aliased(kept)
        return gate

    def _wait_for_aliased(self, layers: Sequence[int]) -> None:
        if not self._has_warned_of_aliases:
            self._has_warned_of_aliases = True
            logger.warning(
                "something keeps aliases of weights (p.data, p.detach(), a view, a state dict), of "
                "%s first: engine.step() waits for the updates of these layers, so that they show "
                "the newest values. Keep clones, or the parameters themselves, and it need not",
                self._host.layers[layers[0]].layout.name,
            )
        self.settle(layers)

    # -- gradients in .grad -----------------------------------------------------------------------
    def _with_gradient(self) -> list[tuple[LayerState, int, torch.Tensor]]:
        with without_torch_function():  # hidden parameters need not be shown
            return [
                (state, k, parameter)
                for state in self._host.layers
                for k, parameter in enumerate(state.parameters)
                if parameter.grad is not None
            ]

    def _refuse_strays(self) -> None:
        """Raise ConfigError if a parameter has a gradient that no backward of the engine made. The
        gradient is dropped."""
        strays = []
        for state, k, parameter in self._with_gradient():
            parameter.grad = None
            if k in state.optimizer.trained:
                strays.append(state.layout.slices[k].name)
        if strays:
            raise ConfigError(
                f"{strays[0]}.grad was set by hand, or by a backward of outputs that the engine "
                "has not made: call the engine, not its module, or engine.backward(loss); change a "
                "gradient in a hook of the parameter (parameter.register_hook)"
            )

    def _drop_grad(self) -> None:
        """Drop gradients that autograd left in parameters, because no hook ran."""
        for _, _, parameter in self._with_gradient():
            parameter.grad = None

    def _take_grad(self) -> None:
        """Take the gradients of a model that fits on the device out of `.grad`."""
        taken: dict[int, dict[int, torch.Tensor]] = {}
        nbytes = sum(
            g.nbytes for state in self._host.layers for g in state.gradients.per_parameter.values()
        )
        for state, k, parameter in self._with_gradient():
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            nbytes += gradient.nbytes
            if k in state.optimizer.trained:
                # The kernels take neither sparse gradients nor other strides.
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                dense = self._outside.scaled(dense)
                taken.setdefault(state.index, {})[k] = dense.contiguous()
        self.kept_gradient_bytes = max(self.kept_gradient_bytes, nbytes)
        batch = []
        for layer, tensors in taken.items():
            state = self._host.layers[layer]
            elements = state.updated_elements(frozenset(tensors))
            batch.append(LayerGradients(state, elements, PerParameter(tensors)))
        pending = self.step.pending
        pending.take(batch, pending.array_for(more_may_come=False))

    # -- between steps ----------------------------------------------------------------------------
    def settle(self, layers: Sequence[int] | None = None) -> None:
        """Wait until the parameters of these layers, or of all (None), have their newest values."""
        chosen = range(len(self._host.layers)) if layers is None else layers
        self.step.cancel_early(chosen)
        self.executor.settle(chosen)
        self.executor.given_out(chosen)
        if self.executor.phase is Phase.IDLE and self._team.writable:
            self.adopt_edited()

    def restart(self) -> None:
        """Finish queued operations, before the arrays are written anew, or moved.

        Drops the remains of an exception, and gradients of a step that has not ended.
        """
        self._device.check()
        if self._hooks is not None:
            self._hooks.abandon_forward()
            self._hooks.end_backward()
        self._drop_grad()
        self.step.restart()
        self.executor.forget_calls()
        self.executor.begin_training()
        self._start_again()
        self._team.barrier("before a load")

    @property
    def is_between_passes(self) -> bool:
        """True if layers may move now: no pass is running, and no gradient waits for its step."""
        return self.executor.phase is Phase.IDLE and not self.ledger.is_in_step

    def loaded(self, layers: Sequence[int] | None = None) -> None:
        """New values were written to the arrays of these layers, or of all (None).

        The parameters have them after `settle`. Autograd refuses a graph that needs older values.
        """
        self._team.spread("after a load")
        self._steps.num_changes += 1
        chosen = range(len(self._host.layers)) if layers is None else layers
        for layer in chosen:
            # earlier writes are gone
            self._host.layers[layer].views.saved_versions = None
            if layer in self._plan.updated_on_gpu:
                torch.autograd.graph.increment_version(self._host.layers[layer].parameters)
        self.executor.weights_changed(chosen)

    def adopt_edited(self, *, through_aliases: bool = True) -> None:
        """Bring values that a program wrote in place into the arrays, before an update on the host.

        A changed version of a parameter shows the write. Several ranks refuse it. Masters keep
        their lower bits, so that weights which return to earlier values have the earlier masters.
        """
        # A write through an alias changes no version of the parameter.
        silent = self._plan.resident if through_aliases and self._team.writable else ()
        for layer in self._unseen:
            is_saved = self._adopt_layer(layer)
            if not is_saved and layer in silent and self.executor.aliased((layer,)):
                self._save(layer)

    def _adopt_layer(self, layer: int) -> bool:
        """Save the layer's values in its arrays, if a version has changed. Return True if so."""
        versions = self.versions_of(layer)
        state = self._host.layers[layer]
        if state.views.saved_versions is None:
            state.views.saved_versions = versions
        if versions == state.views.saved_versions:
            return False
        if self._hooks is not None:  # else the model is given back
            self._team.refuse_write(state)
        state.views.saved_versions = versions
        self._save(layer)
        return True

    def versions_of(self, layer: int) -> list[int]:
        """Version of each parameter: torch counts writes in place."""
        with without_torch_function():  # else hidden parameters take long
            return [version_of(parameter) for parameter in self._host.layers[layer].parameters]

    def adopt_weights(self, written: Written | None = None) -> None:
        """Make new values of these parameters, or of all (None), the arrays' values and masters.
        They were written to the memory that the parameters point to."""
        layers = list(range(len(self._host.layers)) if written is None else written)
        self._steps.num_changes += 1
        for index in layers:
            self._save(index)
        self._team.agree("after new weights")
        for index in layers:
            self._host.access.restart_master(index, written and written[index])
            self._host.layers[index].views.saved_versions = self.versions_of(index)
            self.executor.bindings.written(index)
        self._team.barrier("after new weights")
        self.executor.weights_changed([i for i in layers if i not in self._plan.resident])

    def _save(self, layer: int) -> None:
        """Copy values from the memory that the layer's parameters point to into its arrays."""
        self.step.cancel_early((layer,))
        device, state = self._device, self._host.layers[layer]
        # None where the model is away, too: then they point at the arrays
        slot = state.on_gpu.slot
        if layer in self._plan.resident and state.home is not GPU and slot is not None:
            save = partial(device.copy, state.weights, slot.weights[: state.weights.numel()])
            nbytes = state.weights.numel() * state.weights.element_size()
            device.offload.submit(
                f"save {layer}",
                save,
                (device.compute.record(f"weights {layer} written"),),
                reads=(slot.record,),
                writes=(state.records["weights"],),
                nbytes=nbytes,
            ).wait()
        self._host.access.flush(layer)
