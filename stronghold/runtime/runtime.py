"""What trains one model by one plan: what an engine asks for, and its checkpoints.

Owns window, executor, updates, activations and hooks, the account of the step, and the order in
which an event of the step reaches them. Each part's own file says what it does. The training thread
alone calls.

A model that is whole on the device is a plan in which nothing moves. There are no hooks and no
slots, so that nothing stands on its path: autograd accumulates as in a plain loop, and when a
backward has ended its gradients are taken out of `.grad`, and wait for the step where they are.
Since nobody is called when a gradient comes, one of outputs that the engine did not make is found,
and refused, at the next backward or `engine.step`.

[Note: interrupts] Ctrl-C, or an exception in a user's hook, may end any of this at any bytecode.
What it may leave:
  * a layer in two states at once: claimed and not fetched, released in the window and still bound,
    some of its parameters in a slot and others at rest
  * an operation that a lane performs and whose fence nobody has
  * gradients: in `.grad`, in slots that gather, on their way, counted as arrived or not
  * a pass that nobody ended: its phase, its blocks, its saved-tensor hooks, its place among uses
  * steps of the optimizer that were counted, with or without their update
None of it is repaired one by one. The lanes end what is queued, and then nothing is anywhere: no
layer in a slot, no gradient, no pass, every parameter at rest. The arrays are whole, for the lanes
alone write them; whether they are of one step is what the ledger knows, which is told before the
first of them changes, and after the last. Arrays of two steps, and counts, are what a load writes.
Of several ranks one that raises ends them all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window
from stronghold.model.partition import Partition
from stronghold.plan.homes import GPU
from stronghold.plan.plan import Plan
from stronghold.runtime.activations import Activations
from stronghold.runtime.binding import Bindings
from stronghold.runtime.executor import Executor, Phase
from stronghold.runtime.hooks import Hooks
from stronghold.runtime.optimizer_step import GateResult, Ledger, OptimizerStep
from stronghold.runtime.parts import Parts, Written
from stronghold.runtime.pieces import Gradients, Loose

logger = logging.getLogger("stronghold")


class Runtime:
    """One model's passes and updates by `plan`. Between steps every parameter of the model holds
    its newest value once `settle` has returned. Offloaded activations take `host_room_bytes` of the
    host at most (None: what it has)."""

    # The most bytes of gradients that were ever left in torch's own memory on the device.
    kept_gradient_bytes = 0

    def __init__(self, parts: Parts, plan: Plan, *, host_room_bytes: int | None = None) -> None:
        host, device = parts.host, parts.device
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
        # Updated on the host, where writes to what is on the device, or to what has a master of
        # its own, do not show; and the versions of their parameters that did.
        in_fp16 = any(made.dtype is torch.float16 and made.states for made in host.formats)
        everything = range(len(parts.layers)) if in_fp16 else plan.resident
        self._unseen = [layer for layer in everything if layer not in plan.updated_on_gpu]
        for state in parts.layers:
            state.views.saved_versions = None
        self._has_aliases = False  # said once
        device.open_streams(plan.demand.streams)
        self.executor = Executor(parts, self.window, self.step, self.ledger, plan, bindings)
        self.activations = Activations(parts, plan, self.executor, host_room_bytes)

    # -- life -------------------------------------------------------------------------------------
    def start(self, partition: Partition) -> None:
        """Every layer is adopted: the model may be called."""
        if self._plan.whole:
            return
        chunk = self._plan.demand.chunk
        self._hooks = Hooks(partition, self.executor, self.activations, self._device, chunk)
        self.settle()

    def detach(self) -> None:
        """The model is about to be given back: take everything off its modules."""
        if self._hooks is not None:
            self._abandon_forward()
            self._hooks.close()
            self._hooks = None
            self.adopt_edited()

    def give_back(self, *, keep_gradients: bool = False) -> None:
        """The lanes have ended: point every parameter at its layer's own arrays. Gradients that
        wait on the device for the step are dropped, unless they are kept."""
        if self._plan.whole and not keep_gradients:
            self._drop_grad()
            self.step.forget()
        self.executor.bindings.rest_all()

    def close(self) -> None:
        """Drop every buffer."""
        self.activations.close()
        self.window.close()

    # -- the step ---------------------------------------------------------------------------------
    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around a call of the model; what leaves it in whatever way leaves nothing open."""
        self._device.check()  # what failed before explains what is refused now
        self.ledger.check()
        self._abandon_forward()  # of a call of the module itself, which nobody saw end
        try:
            yield
        except BaseException as error:
            self._abandon_forward(interrupted=not isinstance(error, Exception))
            raise

    def _abandon_forward(self, *, interrupted: bool = False) -> None:
        left_open = self._hooks is not None and self._hooks.abandon_forward()
        if left_open or interrupted:
            self._start_again()

    def _start_again(self) -> None:
        """Nothing is anywhere ([Note: interrupts])."""
        self._device.finish()
        self.executor.start_again()

    def begin_backward(self, *, boundary: bool) -> None:
        """Autograd is about to run on a micro-batch that ends the step (`boundary`) or not.
        ConfigError when no further gradients can be taken."""
        self._device.check()
        self._abandon_forward()
        self._steps.refuse_unfrozen()
        # The graph keeps aliases, too (W.t() of a head): `close_gate` asks for them.
        self.adopt_edited(through_aliases=False)
        # Else what is there is of this very backward.
        if self._plan.whole or torch._C._current_graph_task_id() == -1:
            self._refuse_strays()
        self.ledger.begin_backward(boundary=boundary)
        self._store.prepare_training()
        if self._hooks is not None:
            self._hooks.begin_backward()
        self.executor.begin_backward_pass()

    def end_backward(self) -> None:
        """Autograd has returned: every gradient is taken over, and no parameter has one."""
        if self._plan.whole:
            self._take_grad()
        self.executor.end_backward_pass()
        if self._hooks is not None:
            self._hooks.end_backward()

    def abandon_backward(self) -> None:
        """Autograd, or a step before it changed anything, raised: the step's gradients so far are
        void, and no parameter has one."""
        if self._hooks is not None:
            self._hooks.end_backward()
        if self.executor.phase is Phase.BACKWARD:  # else no layer was reduced
            self._team.fail("engine.backward raised")
        self.step.abandon_backward()
        self._start_again()
        self.executor.forget_calls()
        self._drop_grad()

    def drop_gradients(self) -> None:
        """The user throws the step's gradients so far away."""
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
        if not self._has_aliases:
            self._has_aliases = True
            logger.warning(
                "something keeps aliases of weights (p.data, p.detach(), a view, a state dict), of "
                "%s first: engine.step() waits for the updates of these layers, so that they show "
                "the newest values. Keep clones, or the parameters themselves, and it need not",
                self._host.layers[layers[0]].layout.name,
            )
        self.settle(layers)

    # -- what lies in .grad -----------------------------------------------------------------------
    def _with_gradient(self) -> list[tuple[LayerState, int, nn.Parameter]]:
        with torch._C.DisableTorchFunctionSubclass():  # hidden parameters need not be shown
            return [
                (state, k, parameter)
                for state in self._host.layers
                for k, parameter in enumerate(state.parameters)
                if parameter.grad is not None
            ]

    def _refuse_strays(self) -> None:
        """ConfigError for gradients that nobody has taken over; they are dropped."""
        strays = []
        for state, k, parameter in self._with_gradient():
            parameter.grad = None
            if k in state.optimizer.trained:
                strays.append(state.layout.slices[k].name)
        if strays:
            raise ConfigError(
                f"{strays[0]}.grad was set by hand, or by a backward of outputs that the engine "
                "has not made: call the engine, not its module, or engine.backward(loss); a "
                "gradient of your own takes deepspeed.utils.safe_set_full_grad after backward"
            )

    def _drop_grad(self) -> None:
        """What autograd left in parameters, whose hooks did not come to take it away."""
        for _, _, parameter in self._with_gradient():
            parameter.grad = None

    def _take_grad(self) -> None:
        """Of a model that is whole on the device."""
        taken: dict[int, dict[int, torch.Tensor]] = {}
        nbytes = sum(
            g.nbytes for state in self._host.layers for g in state.gradients.loose.values()
        )
        for state, k, parameter in self._with_gradient():
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            nbytes += gradient.nbytes
            if k in state.optimizer.trained:
                # Sparse, or laid out as nobody asked: the kernels take neither.
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                dense = self._outside.scaled(dense)
                taken.setdefault(state.index, {})[k] = dense.contiguous()
        self.kept_gradient_bytes = max(self.kept_gradient_bytes, nbytes)
        batch = [
            Gradients(self._host.layers[layer], frozenset(tensors), Loose(tensors))
            for layer, tensors in taken.items()
        ]
        self.step.take(batch, self.step.array_for(more_may_come=False))

    # -- between steps ----------------------------------------------------------------------------
    def settle(self, layers: Sequence[int] | None = None) -> None:
        """Wait until the newest weights of these layers, or of all, are where their parameters
        point."""
        asked = range(len(self._host.layers)) if layers is None else layers
        self.step.cancel_early(asked)
        self.executor.settle(asked)
        self.executor.given_out(asked)
        if self.executor.phase is Phase.IDLE and self._team.writable:
            self.adopt_edited()

    def restart(self, *, keep_gradients: bool = False) -> None:
        """The arrays are about to be written anew, or moved: finish what is queued, drop whatever
        an exception left half done, and the gradients of a step that has not ended, unless they are
        kept."""
        self._device.check()
        if self._hooks is not None:
            self._hooks.abandon_forward()
            self._hooks.end_backward()
        self._drop_grad()
        self.step.restart(keep_gradients=keep_gradients)
        self.executor.forget_calls()
        self.executor.begin_training()
        self._start_again()
        self._team.barrier("before a load")

    @property
    def is_between_passes(self) -> bool:
        """True if layers may move now, and nothing of the step is lost: no pass is running, and
        what earlier micro-batches gave is nothing, or sums, which are arrays of their layers."""
        idle = self.executor.phase is Phase.IDLE
        return idle and (self._plan.accumulates or not self.ledger.is_in_step)

    def loaded(self, layers: Sequence[int] | None = None) -> None:
        """New values were written to the arrays of these layers, or of all: after `settle` the
        parameters show them, and a graph that needs what they were is refused by autograd."""
        self._team.spread("after a load")
        chosen = range(len(self._host.layers)) if layers is None else layers
        for layer in chosen:
            self._host.layers[layer].views.saved_versions = None  # what was written before is gone
            if layer in self._plan.updated_on_gpu:
                torch.autograd.graph.increment_version(self._host.layers[layer].parameters)
        self.executor.weights_changed(chosen)

    def adopt_edited(self, *, through_aliases: bool = True) -> None:
        """What was written in place, from outside, where an update on the host would not see it:
        take it over before that, or refuse it among several ranks. A parameter's version tells.
        Masters keep what is below them, so that weights that come back to what they were are the
        same masters."""
        # Through an alias anything may have been written.
        silent = self._plan.resident if through_aliases and self._team.writable else ()
        for layer in self._unseen:
            versions = self.versions_of(layer)
            state = self._host.layers[layer]
            if state.views.saved_versions is None:
                state.views.saved_versions = versions
            if versions != state.views.saved_versions:
                if self._hooks is not None:  # else the model is given back
                    self._team.refuse_write(state)
                self._save(layer)
                state.views.saved_versions = versions
            elif layer in silent and self.executor.aliased((layer,)):
                self._save(layer)

    def versions_of(self, layer: int) -> list[int]:
        """How often each parameter was written in place."""
        with torch._C.DisableTorchFunctionSubclass():  # else those that are hidden take long
            return [parameter._version for parameter in self._host.layers[layer].parameters]

    def adopt_weights(self, written: Written | None = None) -> None:
        """New values were written where these parameters, or all, point: make them the arrays'
        values and their masters."""
        layers = list(range(len(self._host.layers)) if written is None else written)
        for index in layers:
            self._save(index)
        self._team.agree("after new weights")
        for index in layers:
            self._host.access.restart_master(index, written and written[index])
            self._host.layers[index].views.saved_versions = self.versions_of(index)
            self.executor.bindings.written(index)  # what was written is theirs
        self._team.barrier("after new weights")
        self.executor.weights_changed([i for i in layers if i not in self._plan.resident])

    def _save(self, layer: int) -> None:
        """Bring what was written where the layer's parameters point to its arrays."""
        self.step.cancel_early((layer,))
        device, state = self._device, self._host.layers[layer]
        slot = state.on_gpu.slot  # None where the model is away, too: then they point at the arrays
        if layer in self._plan.resident and state.home is not GPU and slot is not None:
            save = partial(device.copy, state.weights, slot.weights[: state.weights.numel()])
            nbytes = state.weights.numel() * state.weights.element_size()
            device.drain.submit(
                f"save {layer}",
                save,
                (device.record_compute(f"weights {layer} written"),),
                reads=(slot.record,),
                writes=(state.records["weights"],),
                nbytes=nbytes,
            ).wait()
        self._host.access.flush(layer)
