"""Hooks on the user's modules and parameters: they call the executor at module and autograd events.

This file owns the hooks and removes them. It never moves a byte. It uses three mechanisms: module
forward hooks, tensor hooks on a layer's outputs, and post-accumulate-grad hooks on parameters. The
hooks sit on modules, not on the engine: evaluation and generation with the raw model stream, too.
The training thread enters, and autograd's thread in backward. The two never run at once.

[Note: read without a call]
1. A forward may begin while resident layers are still updated. So it waits for a resident layer's
   weights when the layer's module is called.
2. Hazard: a model may read a weight without that call (`F.linear(x, embedding.weight)`), perhaps in
   training alone, as fused losses do. Then the layer's gradient comes without a call.
3. So a forward waits at the call only for layers that an earlier training pass has called, and that
   were never read without a call.
4. It waits for all other resident layers in advance. Evaluation waits for all in advance, and so
   does a call of a part of the model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stronghold.devices.base import Device
from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.model.inner_tensors import HeldTensors
from stronghold.model.partition import Partition
from stronghold.plan.schedule import Kind
from stronghold.streaming.activations.chunks import Chunks
from stronghold.streaming.activations.key_value_caches import without_cache
from stronghold.streaming.activations.policies import Activations
from stronghold.streaming.executor import Executor, Phase
from stronghold.streaming.guards import COMPILED_WHOLE, NO_TRANSFORMS, OwnHook
from stronghold.streaming.patches.autograd import is_transformed, without_torch_function
from stronghold.streaming.patches.modules import hooks_after_gradient
from stronghold.streaming.patches.tensors import tree_leaves


class ResidentCalls:
    """Decides which resident layers a forward waits for at their call ([Note: read without a
    call])."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.all = tuple(layers)
        self._seen: set[int] = set()  # called by a training pass
        self._read: set[int] = set()  # got a gradient without a call
        # the running pass waits for these at their call
        self._expected: set[int] = set()
        self._called: set[int] = set()  # called in the running pass
        self._reached: set[int] = set()  # called since the last backward
        # outdated, expected since the last backward, not called
        self._missed: set[int] = set()

    @property
    def known(self) -> frozenset[int]:
        """Layers for which a training pass need not wait before their call."""
        return frozenset(self._seen - self._read)

    def in_advance(self, *, training: bool) -> list[int]:
        """A pass of the whole model begins: return the layers to wait for in advance."""
        self._called.clear()
        self._expected = set(self.known) if training else set()
        return [layer for layer in self.all if layer not in self._expected]

    def called(self, layer: int) -> None:
        """The layer's module is called."""
        self._called.add(layer)
        self._reached.add(layer)

    def end_pass(self, *, training: bool, stale: Iterable[int]) -> None:
        """The model has returned. `stale`: resident layers whose newest weights compute has not
        waited for."""
        self._missed |= (self._expected - self._called).intersection(stale)
        if training:
            self._seen |= self._called

    def got_gradient(self, state: LayerState, position: int) -> None:
        """A gradient of the layer has come. Raises ConfigError if forward used outdated weights."""
        if state.index not in self._reached:
            self._read.add(state.index)
        if state.index in self._missed:
            raise ConfigError(
                f"{state.layout.slices[position].name} was read without a call of its module, "
                "which the forwards before had called: its weights may have been those of the step "
                "before. They are waited for from now on: run the same forward and backward again"
            )

    def end_backward(self) -> None:
        """Backward has ended, or was abandoned."""
        self._missed.clear()
        self._reached.clear()


class Hooks:
    """The hooks of one engine. Gradients that the optimizer does not own are dropped."""

    def __init__(
        self,
        partition: Partition,
        executor: Executor,
        activations: Activations,
        device: Device,
        chunk: int | None,
    ) -> None:
        self._executor = executor
        self._activations = activations
        self._handles: list[RemovableHandle] = []
        # parameter, the hook's number
        self._gradient_hooks: list[tuple[torch.Tensor, int]] = []
        self._held = HeldTensors(partition.model)
        self._depth = 0
        self._rests = False  # the hooks before a forward do nothing
        self._training_call = contextlib.ExitStack()  # of the model, if it trains
        self._running: list[tuple[int, nn.Module]] = []  # blocks, the outermost first
        self._training = False  # whether the running pass of the model wants gradients
        residents = [layer.index for layer in partition.layers if not layer.streamed]
        self._residents = ResidentCalls(residents)
        self._chunks: Chunks | None = None
        if chunk is not None:
            self._chunks = Chunks(chunk, executor, device, around=self._around_chunk)
            for layer in partition.streamed:
                self._chunks.attach(layer)
        for layer in partition.layers:
            for module in layer.modules:
                if layer.streamed:
                    before = self._own(partial(self._before_layer, layer.index))
                    after = OwnHook(partial(self._after_layer, layer.index))
                    self._attach(module, before, after)
                else:
                    hook = self._own(partial(self._before_resident, layer.index))
                    self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            state = executor.layers[layer.index]
            for position, parameter in enumerate(state.parameters):
                if parameter.requires_grad:
                    arrived = partial(self._arrived, state, position)
                    handle = parameter.register_post_accumulate_grad_hook(arrived)
                    self._handles.append(handle)
                    self._gradient_hooks.append((parameter, handle.id))
        # Attached last, it is the first to run: the root may hold parameters of its own.
        before = self._own(self._before_model, self._before_compiled)
        self._attach(partition.model, before, OwnHook(self._after_model))

    def _own(self, call: Callable[..., Any], compiled: Callable[..., Any] | None = None) -> OwnHook:
        """The hook before a forward that calls `call`, unless the hooks rest."""
        return OwnHook(
            partial(self._unless_resting, call), partial(self._unless_resting, compiled or call)
        )

    def _unless_resting(self, call: Callable[..., Any], *args: Any) -> Any:
        return None if self._rests else call(*args)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Context manager in which the model's own code runs alone, on tensors that are not the
        engine's. Graphs and gradients may wait meanwhile."""
        self._rests = True
        try:
            with contextlib.ExitStack() as undo:
                if self._chunks is not None:
                    undo.enter_context(self._chunks.resting())
                yield
        finally:
            self._rests = False

    def _attach(self, module: nn.Module, before: OwnHook, after: OwnHook) -> None:
        self._handles += (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        )

    # -- the whole model --------------------------------------------------------------------------
    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        trainer, operation = self._executor.trainer, "a forward of the model"
        # before any change: another thread may be within a call
        if self._depth == 0 and module.training and torch.is_grad_enabled():
            self._training_call.enter_context(trainer.training(operation))
        trainer.check(operation)
        self._depth += 1  # before what may raise: `_after_model` follows
        self._check()
        if self._depth > 1 or self._executor.phase is Phase.BACKWARD:
            return
        self._held.check()
        self._training = torch.is_grad_enabled()
        self._executor.begin_forward_pass(training=self._training)
        for index in self._residents.in_advance(training=self._training):
            self._executor.make_ready(index)

    def _before_compiled(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(COMPILED_WHOLE)
        self._before_model(module, args, kwargs)

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._executor.trainer.is_another:
            return
        self._depth -= 1
        if self._depth == 0:
            self._training_call.close()
            returned = output is not None  # torch passes None if the model raised
            if returned and self._executor.phase is Phase.FORWARD:
                stale = self._executor.weights.outdated_residents()
                self._residents.end_pass(training=self._training, stale=stale)
            self._executor.end_forward_pass()

    def _called_by_itself(self) -> None:
        """A part of the model is called, and not by the model. It may read any resident layer, so
        compute waits for all of them."""
        self._check()
        if self._depth == 0 and self._executor.phase is Phase.IDLE:
            for index in self._residents.all:
                self._executor.make_ready(index)

    def _check(self) -> None:
        self._executor.outside.check()
        if is_transformed():
            raise ConfigError(NO_TRANSFORMS)

    # -- layers -----------------------------------------------------------------------------------
    def _before_resident(self, index: int, module: nn.Module, args: Any) -> None:
        self._executor.trainer.check("a forward of a part of the model")
        self._called_by_itself()
        self._residents.called(index)
        self._executor.begin_use(index, Kind.FORWARD)

    def _before_layer(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._executor.trainer.check("a forward of a block")
        recomputing = self._executor.phase is Phase.BACKWARD
        self._running.append((index, module))
        self._called_by_itself()
        self._executor.begin_use(index, Kind.FORWARD)
        if (
            self._chunks is not None
            and self._chunks.divides(module, args, kwargs)
            and self._activations.will_recompute(index, recomputing=recomputing)
        ):
            return without_cache(args, kwargs)  # each chunk enters by itself
        return self._activations.enter(index, module, args, kwargs, recomputing=recomputing)

    @contextlib.contextmanager
    def _around_chunk(
        self, index: int, module: nn.Module, args: Any, kwargs: Any
    ) -> Iterator[None]:
        """Context manager around one chunk's forward. If the block is recomputed, each chunk is
        recomputed by itself."""
        if not self._activations.will_recompute(index, recomputing=False):
            yield
            return
        run = partial(self._chunk_again, index, module)
        self._activations.enter(index, module, args, kwargs, recomputing=False, run=run)
        try:
            yield
        finally:
            self._activations.leave(index, chunk=True)

    def _chunk_again(self, index: int, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        assert self._chunks is not None
        self._running.append((index, module))
        self._executor.begin_use(index, Kind.FORWARD)
        self._activations.enter(index, module, args, kwargs, recomputing=True)
        try:
            self._chunks.run_again(module, args, kwargs)
        finally:
            self._running.pop()
            self._activations.leave(index)
            self._executor.end_forward(index)

    def _after_layer(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._executor.trainer.is_another:
            return
        if self._running and self._running[-1] == (index, module):
            self._running.pop()
        self._activations.leave(index)
        self._executor.end_forward(index)
        if output is not None:
            again = self._activations.recomputes(index)
            self._executor.refuse_writes(index, again=again)
        else:
            error = sys.exc_info()[1]
            if error is not None and "support saved tensor hooks" in str(error):
                error.args = (NO_TRANSFORMS,)  # torch's own ends with its issue tracker
        if torch.is_grad_enabled():
            for tensor in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._before_backward, index))

    def _before_backward(self, index: int, gradient: torch.Tensor) -> None:
        if self._executor.reached(gradient=False):
            self._executor.begin_use(index, Kind.BACKWARD)
            self._activations.prefetch(index)
            following = self._executor.next_backward()
            if following is not None:
                self._activations.prefetch(following)

    def _arrived(self, state: LayerState, position: int, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # of chunks, whose gradients went another way
            return
        if position not in state.optimizer.trained:
            parameter.grad = None
            return
        try:
            self._residents.got_gradient(state, position)
        except ConfigError:
            parameter.grad = None
            raise
        self._executor.gradient_arrived(state, position, parameter)

    def begin_backward(self) -> None:
        """Backward is about to run: make ours the last hook of each parameter.

        torch calls hooks in the order of their registration. Ours takes the gradient away, after
        the user's hooks have seen it.
        """
        with without_torch_function():  # hidden parameters need not be shown
            for parameter, number in self._gradient_hooks:
                hooks = hooks_after_gradient(parameter)
                if next(reversed(hooks)) != number:
                    hooks[number] = hooks.pop(number)

    def end_backward(self) -> None:
        """Backward has ended, or was abandoned."""
        while self._running:  # by an interrupt in a recomputation
            index, _ = self._running.pop()
            self._executor.end_forward(index)
        self._activations.abandon(in_backward=True)
        self._residents.end_backward()

    def abandon_forward(self) -> bool:
        """Close uses that a forward has left open. No forward is running.

        torch calls the hooks above after an Exception, and not after a KeyboardInterrupt. Returns
        True if anything was open.
        """
        left_open = self._depth > 0 or bool(self._running)
        self._depth = 0
        self._training_call.close()
        self._running.clear()
        return self._activations.abandon() or left_open

    def close(self) -> None:
        """Remove every hook. No forward is running."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._chunks is not None:
            self._chunks.close()
