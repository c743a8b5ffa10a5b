"""Hooks on the user's modules and parameters: events of modules and of autograd, nothing else.

There are four mechanisms: the `forward` of an instance, a pair of saved-tensor hooks while a
layer's forward runs, a hook on a block's outputs, and post-accumulate-grad hooks. They sit on
modules, not on the engine: evaluation and generation with the raw model stream, too.

[Note: bound]
1. A layer's parameters point at its slot while its forward runs, and while backward reads it.
2. A checkpoint inside of a block runs the block's forward again, and calls none of our hooks. So a
   block stays bound until backward reads another one.
3. Otherwise they point at the host, where a program finds them.

[Note: read without a call]
1. A forward may begin while layers outside of the blocks are still updated. It waits for such a
   layer when the layer's module is called.
2. Hazard: a model may read a weight without that call (`F.linear(x, embedding.weight)`), perhaps in
   training alone, as fused losses do. Then the layer's gradient comes without a call.
3. So a forward waits at the call only for layers that an earlier training pass has called, and that
   were never read without a call.
4. It waits for all others when it begins. An evaluation waits for all.

[Note: compiled]
1. `module.compile()` compiles the module's call. Torch cannot compile the hooks in it.
2. So the hooks stand around the compiled call. The `forward` inside of it is the module's own. So
   are those of layers outside of the blocks that a block holds.
3. A pass looks for compiled calls when it begins: a program may compile a block at any time. Until
   then, and in a compiled module around it, the module's call runs uncompiled.

[Note: inner backward] A forward may take gradients inside: a model of energies returns forces. The
layers of that forward stay bound, and its pass goes on when the inner backward ends.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from stronghold.devices.device import ComputeSpan, Device
from stronghold.errors import ConfigError
from stronghold.plan.cost import AGAIN, AWAY
from stronghold.private import (
    NO_BACKWARD,
    at_end_of_backward,
    backward_number,
    hooks_after_gradient,
    is_transformed,
    pop_saved_tensor_hooks_above,
    saved_tensor_hooks,
    without_torch_function,
)
from stronghold.train.activations import first_input, forget_attention, recomputed
from stronghold.train.chunks import Chunks
from stronghold.train.gradients import Gradients
from stronghold.train.guards import COMPILED_WHOLE, NO_TRANSFORMS
from stronghold.train.layer import Layer, Slot, WeightState
from stronghold.train.offload import ActivationOffload
from stronghold.train.order import Order
from stronghold.train.saved_tensors import Handle, Keep, Packing, is_packed, kept, pair_below
from stronghold.train.training_thread import TrainingThread
from stronghold.train.weights import SavedWeight, Weights


class ReplacedForward:
    """The `forward` of one of the model's modules while it trains. A copy of the module, by
    `copy.deepcopy` or a pickle, gets its own forward back.

    call       called with the forward, and with its arguments
    compiled   the same, if torch compiles a call around it ([Note: compiled])
    is_within  the module's own compiled call runs, and `call` around it
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        call: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        self._forward, self.call, self.is_within = forward, call, False
        self._compiled = compiled or call
        # Its name and signature, which frameworks read. Not its `__dict__`: it may be one of these.
        functools.update_wrapper(self, forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_within:
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._compiled)(self._forward, *args, **kwargs)
        return self.call(self._forward, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        forward: Any = self._forward
        while isinstance(forward, ReplacedForward):  # a model that holds parameters of its own
            forward = forward._forward
        if hasattr(forward, "__self__"):
            return getattr, (forward.__self__, forward.__name__)
        return partial, (forward,)  # another package has replaced it before


class Replaced(NamedTuple):
    """A module with its present forward, and the one that it had as an attribute before. `stays`:
    its layer is outside of the blocks."""

    module: nn.Module
    forward: ReplacedForward
    before: Any
    stays: bool


class OutsideLayers:
    """The layers outside of the blocks, and when a pass waits for each ([Note: read without a
    call])."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.all = [layer for layer in layers if not layer.is_block]
        self._seen: set[Layer] = set()  # called by a training pass
        self._read: set[Layer] = set()  # got a gradient without a call
        self._expected: set[Layer] = set()  # the running pass waits for these at their call
        self._called: set[Layer] = set()  # in the running pass
        # Since the last backward: the layers that were called, and those that were expected and
        # not called while their weights were old.
        self._called_since: set[Layer] = set()
        self._missed: set[Layer] = set()

    def begin_pass(self, *, is_training: bool) -> list[Layer]:
        """A pass of the whole model begins. Returns the layers for which it waits at once."""
        self._called.clear()
        self._expected = self._seen - self._read if is_training else set()
        return [layer for layer in self.all if layer not in self._expected]

    def call(self, layer: Layer) -> None:
        """The layer's module is called."""
        self._called.add(layer)
        self._called_since.add(layer)

    def end_pass(self, *, is_training: bool) -> None:
        """The pass has returned."""
        missed = self._expected - self._called
        self._missed |= {x for x in missed if x.weight_state is not WeightState.HERE}
        if is_training:
            self._seen |= self._called

    def fail_pass(self) -> None:
        """The pass has raised, perhaps since it read a layer that it had not waited for."""
        self._read |= self._expected - self._called

    def got_gradient(self, layer: Layer, position: int) -> None:
        """A gradient has come. ConfigError if the forward has used old weights."""
        if layer.is_block or layer in self._called_since:
            return
        self._read.add(layer)
        if layer in self._missed:
            raise ConfigError(
                f"{layer.names[position]} was read without a call of its module, which the "
                "forwards before had called: its weights may have been those of the step before. "
                "They are waited for from now on: run the same forward and backward again"
            )

    def forget_calls(self) -> None:
        """A forward begins after a backward. Until then its graph may have a further backward."""
        self._called_since.clear()
        self._missed.clear()


@dataclass(slots=True)
class ProgramBackward:
    """Callbacks for a backward that the program starts itself: `loss.backward()`.

    reached  called with False at a layer's output, with True at a parameter
    check    called before other work. Ends a backward that raised
    divisor  of gradients that arrive
    """

    reached: Callable[[bool], None] = lambda _: None
    check: Callable[[], None] = lambda: None
    divisor: int = 1


class Hooks:
    """The hooks of one model. Gradients that the optimizer does not own are dropped.

    frozen  parameters that were frozen when their optimizer was made, with their names
    chunk   sequences that go through a block together; None: all
    device  the one on which blocks run
    span    the compute lane's row of the trace: from the use of a layer to that of the next one
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[Layer, Sequence[nn.Module]],
        order: Order,
        weights: Weights,
        gradients: Gradients,
        offload: ActivationOffload,
        *,
        frozen: Sequence[tuple[str, nn.Parameter]],
        program: ProgramBackward,
        thread: TrainingThread,
        chunk: int | None,
        device: Device,
        span: ComputeSpan,
    ) -> None:
        self._model, self._modules, self._frozen = model, modules, frozen
        self._order, self._weights, self._gradients = order, weights, gradients
        self._device_type = device.torch_device.type
        self._offload = offload
        self._program, self._thread, self._span = program, thread, span
        self._layers = tuple(modules)
        self._last_away = -1  # the last layer whose activations go to the host
        self._outside = OutsideLayers(modules)
        self._in_backward = self._in_forward = self._is_training = False
        self._is_inner = False  # the running backward, within a forward ([Note: inner backward])
        self._has_gradients = False  # of parameters, from the running backward
        self._is_interrupted = False  # a forward, by Ctrl-C at any bytecode
        self._rests = False  # the model's own code runs alone
        self._is_closed = False
        self._forgets_calls = False  # at the next forward: a graph may have another backward
        # Of `order.reading`, the block that backward has bound last: its slot and version then.
        self._slot: Slot | None = None
        self._version = (0, 0)
        self._end_of_backward: Any = _nothing  # a reference to the callback that torch holds
        self._called: list[Layer] = []  # in the running forward, if it may train
        self._num_recomputed: dict[Layer, int] = defaultdict(int)
        self._replaced: list[Replaced] = []
        self._compiled: list[tuple[nn.Module, Any]] = []  # modules, with their compiled calls
        self._handles = []
        self._gradient_hooks: list[tuple[Tensor, int]] = []  # a parameter, and our hook's number
        for layer, users in modules.items():
            for module in users:
                call = partial(self._call, layer, module)
                self._replace(module, call, stays=not layer.is_block)
            for position, parameter in enumerate(layer.parameters):
                requires_grad = parameter.requires_grad
                if position < layer.num_trained or requires_grad:
                    arrived = partial(self._arrived, layer, position)
                    parameter.requires_grad_(True)  # torch refuses a hook else
                    handle = parameter.register_post_accumulate_grad_hook(arrived)
                    parameter.requires_grad_(requires_grad)
                    self._handles.append(handle)
                    self._gradient_hooks.append((parameter, handle.id))
        # Last: the model may hold parameters of its own.
        self._replace(model, self._pass, self._pass_compiled)
        self._chunks: Chunks | None = None
        if chunk is not None:
            self._chunks = Chunks(chunk, modules, self._chunk_arrived, device)

    def _replace(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
        *,
        stays: bool = False,
    ) -> None:
        before = vars(module).get("forward")
        module.forward = forward = ReplacedForward(module.forward, call, compiled)
        self._replaced.append(Replaced(module, forward, before, stays))

    def _stand_around_compiled_calls(self) -> None:
        """Put the hooks around the calls that the program has compiled since ([Note: compiled])."""
        for module in {one.module: None for one in self._replaced}:
            compiled = module._compiled_call_impl
            if compiled is None or isinstance(compiled, ReplacedForward) or module is self._model:
                continue
            self._compiled.append((module, compiled))
            within = {*module.modules()} - {module}
            forwards = [r.forward for r in self._replaced if r.stays and r.module in within]
            forwards += [r.forward for r in self._replaced if r.module is module]
            call: Callable[..., Any] = partial(_within, forwards, compiled)
            for forward in forwards:
                call = ReplacedForward(call, forward.call)
            module._compiled_call_impl = call

    @property
    def is_open(self) -> bool:
        """True within a forward or a backward."""
        return self._in_forward or self._in_backward

    def set_levels(self, levels: Sequence[str]) -> None:
        """Set the level of activations of each layer, for forwards that begin later."""
        for layer in self._layers:
            layer.level = levels[layer.index]
        self._last_away = max((x.index for x in self._layers if x.level in AWAY), default=-1)

    # -- forward ----------------------------------------------------------------------------------
    def _pass(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the whole model."""
        if self._rests:
            return forward(*args, **kwargs)
        operation = "a forward of the model"
        with ExitStack() as call:
            if self._model.training and torch.is_grad_enabled():
                call.enter_context(self._thread.training(operation))
            self._thread.check(operation)
            return self._run_pass(forward, *args, **kwargs)

    def _pass_compiled(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the whole model in one that torch compiles. It runs uncompiled."""
        if torch.is_grad_enabled():
            raise ConfigError(COMPILED_WHOLE)
        return self._pass(forward, *args, **kwargs)

    def _run_pass(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.forget_interrupted()
        if self.is_open:
            return forward(*args, **kwargs)
        outer_pair = saved_tensor_hooks()
        self._stand_around_compiled_calls()
        self._refuse_unfrozen()
        self.take_gradients_last()
        self._called.clear()
        try:
            self._in_forward, self._is_training = True, torch.is_grad_enabled()
            self._order.begin_pass(is_training=self._is_training)
            for layer in self._outside.begin_pass(is_training=self._is_training):
                self._begin_use(layer)
            output = forward(*args, **kwargs)
            self._outside.end_pass(is_training=self._is_training)
            self._end_forward(is_complete=True)
            return output
        except Exception:
            self._outside.fail_pass()
            for layer in self._called:  # its graph is dead
                layer.num_calls = max(0, layer.num_calls - 1)
            self._end_forward(is_complete=False)
            raise
        except BaseException:  # the rest is repaired later: [Note: interrupts] of `trainer`
            self._is_interrupted = True
            pop_saved_tensor_hooks_above(outer_pair)
            raise

    def _end_forward(self, *, is_complete: bool) -> None:
        self._span.end()
        for layer in self._outside.all:
            self._end_use(layer)
        if not self._is_training or not is_complete:
            self._order.end_pass(is_complete=is_complete)
        self._in_forward = False

    def _refuse_unfrozen(self) -> None:
        with without_torch_function():  # hidden parameters take long else
            unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            raise ConfigError(
                f"{unfrozen[0]} was frozen in stronghold.initialize, and is not now: it has "
                "neither masters nor moments, and would not be trained. Freeze it after initialize "
                "(a parameter without a gradient is not updated), or destroy the engine and "
                "initialize again"
            )

    def _call(
        self,
        layer: Layer,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A call of a layer's module. Its gradients may come even without grad mode: a reentrant
        checkpoint runs it without, and again in backward."""
        if self._rests:
            return forward(*args, **kwargs)
        self._thread.check("a forward of a part of the model")
        if self._weights.has_slots and is_transformed():
            raise ConfigError(NO_TRANSFORMS)
        if self._is_interrupted:
            self.forget_interrupted()
        may_train = torch.is_grad_enabled() or (self._in_forward and self._is_training)
        if backward_number() == NO_BACKWARD and may_train:
            if self._forgets_calls:
                self._gradients.forget_calls()
                self._outside.forget_calls()
                self._forgets_calls = False
            layer.num_calls += 1
            if self._in_forward:
                self._called.append(layer)
        if not layer.is_block:
            self._outside.call(layer)
        elif self._chunks and self._chunks.divides(args, kwargs):
            for other in self._chunks.inner(module):
                self._outside.call(other)
                self._begin_use(other)
            run_chunk = partial(self._run_by_level, layer, module)
            forward = partial(self._chunks.run, module, run_chunk, forward)
            return self._run(layer, kept, forward, *args, **kwargs)
        return self._run_by_level(layer, module, forward, *args, **kwargs)

    def run_with_weights(self, module: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
        """Call `compute` while the weights of a module outside of the blocks are on the device.
        Autograd may save them. It belongs to the module's last call, and counts as none."""
        if self._rests or self._is_closed:
            return compute()
        self._thread.check("a forward of a part of the model")
        for layer in self._outside.all:
            if module in self._modules[layer]:
                compute = partial(self._run, layer, kept, compute)
        return compute()

    def _run_by_level(
        self,
        layer: Layer,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a layer's forward, of the batch or of a chunk, by its level of activations."""
        if layer.level == "keep" or not layer.is_block or not torch.is_grad_enabled():
            return self._run(layer, kept, forward, *args, **kwargs)
        # The program's own pair of hooks decides where tensors wait.
        is_away = layer.level in AWAY and pair_below() is None
        if not is_away or backward_number() != NO_BACKWARD:
            return self._run_once_or_twice(layer, module, kept, forward, args, kwargs)
        with self._offload.call(layer, is_last=layer.index >= self._last_away) as keep:
            return self._run_once_or_twice(layer, module, keep, forward, args, kwargs)

    def _run_once_or_twice(
        self,
        layer: Layer,
        module: nn.Module,
        keep: Keep,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        run = partial(self._run, layer, keep, forward)
        if layer.level not in AGAIN:
            return run(*args, **kwargs)
        self._num_recomputed[layer] += 1
        call = self._num_recomputed[layer]
        if keep is kept:
            return recomputed(layer, module, run, args, kwargs, call=call, keep=keep)
        # A block inside of another one may get a weight of that one, whose slot moves on.
        pack = Packing(self._weights, self._saved_weight, first_input(keep))
        with saved_tensors_hooks(pack, Handle.__call__):
            return recomputed(layer, module, run, args, kwargs, call=call, keep=keep)

    def _run(
        self, layer: Layer, keep: Keep, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer's forward, in a forward or again in backward."""
        outer_pair = saved_tensor_hooks()
        if backward_number() != NO_BACKWARD:
            self._begin_backward()
        has_span = not self._in_backward and layer not in self._order.running
        try:
            if has_span:
                self._span.end()  # waits are no compute
            self._begin_use(layer)
            if has_span:
                self._span.begin(f"forward {layer.index}")
            if not torch.is_grad_enabled() or (keep is kept and not self._weights.has_slots):
                output = forward(*args, **kwargs)
            else:
                pack = Packing(self._weights, self._saved_weight, keep)
                with saved_tensors_hooks(pack, Handle.__call__):
                    output = forward(*args, **kwargs)
            if layer.is_block and not self._in_backward:
                self._announce(layer, output)
        except Exception as error:
            self._end_run(layer)
            if "support saved tensor hooks" in str(error):  # torch's own text has no way out
                raise ConfigError(NO_TRANSFORMS) from error
            raise
        except BaseException:
            self._is_interrupted = True
            pop_saved_tensor_hooks_above(outer_pair)
            raise
        is_written = layer.version != layer.fetched
        moved = self._weights.moved(layer) if is_written else []
        self._end_run(layer)
        if is_written:
            self._refuse_write("a forward", layer, moved)
            if layer.is_block and layer.level in AGAIN:
                raise ConfigError(
                    f"a forward wrote into the parameters of {layer.name} in place, and would "
                    'again in backward: set stronghold.activations to "keep", which runs it once'
                )
        return output

    def _refuse_write(self, writer: str, layer: Layer, moved: Sequence[str]) -> None:
        """ConfigError for code that has written weights of a bound layer, or `moved` some. It may
        write those that the device updates."""
        if moved:
            raise ConfigError(
                f"{writer} pointed {moved[0]} to other memory "
                f"({moved[0]}.data = ...), and what is assigned there is lost. Assign between two "
                "steps, after engine.step(), or let the forward compute with a tensor of its own"
            )
        if not layer.is_on_gpu:
            raise ConfigError(
                f"{writer} wrote into the parameters of {layer.name} in place: they are a copy "
                "there, and what is written is lost. Write between two steps, after "
                "engine.step(), or let the device keep and update the layer "
                '(stronghold.resident_layers, "resident_updates": "gpu")'
            )

    def _end_run(self, layer: Layer) -> None:
        if layer.is_block or not self.is_open:
            self._end_use(layer)  # a pass keeps the others bound: it may read them again
        is_alone = not self.is_open and not self._order.running
        if layer.is_block and is_alone:  # the program calls the block by itself
            self._span.end()
            self._order.end_pass(is_complete=False)

    def _begin_use(self, layer: Layer) -> None:
        """Let the layer's parameters be in its slot, and compute wait for their values."""
        is_running = layer in self._order.running
        if not is_running and layer is not self._order.reading:
            self._weights.refresh(layer)
        self._order.use(layer)
        if not is_running:  # what backward reads may have come back to another slot
            self._weights.bind(layer)
        self._order.running.append(layer)

    def _end_use(self, layer: Layer) -> None:
        running = self._order.running
        if not layer.is_block:
            running[:] = [other for other in running if other is not layer]
        elif layer in running:  # else an exception came first
            running.remove(layer)
        self._rest(layer)

    def _rest(self, layer: Layer | None) -> None:
        """Point the parameters at the host, unless the layer's forward or backward still runs."""
        order = self._order
        if layer is not None and layer is not order.reading and layer not in order.running:
            self._weights.rest(layer)

    # -- saved tensors ----------------------------------------------------------------------------
    def _saved_weight(self, saved: SavedWeight) -> Tensor:
        if torch.is_grad_enabled() and not is_packed():
            raise ConfigError(
                "create_graph=True: the graph of this backward would hold weights whose memory is "
                'a slot. Let all weights stay on the device: stronghold.resident_layers: "all"'
            )
        # False: weights that the device updates have no such handles.
        self._reached(saved.layer, saved.version, False, None)
        return self._weights.view(saved)

    # -- backward ---------------------------------------------------------------------------------
    def take_gradients_last(self) -> None:
        """Make ours the last hook of each parameter: it takes the gradient away, which the
        program's hooks read and write. torch calls them in the order of registration."""
        with without_torch_function():  # hidden parameters take long else
            for parameter, number in self._gradient_hooks:
                hooks = hooks_after_gradient(parameter)
                if next(reversed(hooks)) != number:
                    hooks[number] = hooks.pop(number)

    def _announce(self, layer: Layer, output: Any) -> None:
        """Let backward bind the layer when it comes to an output of it ([Note: bound])."""
        # The level of now: later forwards may have another one.
        reached = partial(self._reached, layer, layer.fetched, layer.level in AGAIN)
        for tensor in [output] if isinstance(output, Tensor) else tree_leaves(output):
            if not isinstance(tensor, Tensor):
                continue
            if not layer.is_resident and self._weights.has_memory_of(tensor):
                raise ConfigError(
                    f"{layer.name} returns a view of its weights, whose memory is a slot that "
                    "other layers take: return a clone, or keep the layer on the device "
                    "(stronghold.resident_layers)"
                )
            if tensor.grad_fn is not None:
                tensor.register_hook(reached)

    def _begin_backward(self) -> None:
        if self._in_backward and self._end_of_backward() is None:
            self.forget_interrupted()  # by an earlier backward, which has raised
        if self._in_backward:
            return
        if self._is_closed:
            raise ConfigError(
                "backward: the layers have moved since the forward of this graph "
                "(engine.offload_states): run the forward again"
            )
        self._program.reached(False)

        def end() -> None:
            self._end_backward()

        at_end_of_backward(end)
        # Only torch keeps it, and drops it if the backward raises.
        self._end_of_backward = weakref.ref(end)
        self._in_backward, self._has_gradients = True, False
        self._is_inner = self._in_forward or bool(self._order.running)
        self._offload.begin_backward()
        if self._is_inner:
            return
        self._order.begin_pass(is_training=True)
        for layer in self._outside.all:
            if layer.weight_state is WeightState.HERE:  # else its forward has not used it
                self._begin_use(layer)
        self._span.begin("backward")  # of what is behind the last block

    def _reached(
        self, layer: Layer, version: tuple[int, int], runs_again: bool, gradient: Tensor | None
    ) -> None:
        """Backward reads the layer."""
        self._begin_backward()
        if layer.is_seen:  # since its forward
            self._weights.refresh(layer)
        is_here = layer.weight_state is WeightState.HERE
        if not layer.is_block:  # it is bound for the whole backward
            if not is_here:
                self._order.use(layer)
            present = layer.version
        else:
            if layer is not self._order.reading or layer.slot is not self._slot or not is_here:
                before, self._order.reading = self._order.reading, layer
                self._refuse_written_in_backward(before)
                self._span.end()
                self._rest(before)
                self._order.use(layer)
                self._weights.bind(layer)
                self._span.begin(f"backward {layer.index}")
                self._slot, self._version = layer.slot, layer.version
            present = self._version
        # Of what stays in its memory and runs once, autograd itself compares versions.
        if version != present and (not layer.is_on_gpu or runs_again):
            raise ConfigError(
                f"backward needs the weights of {layer.name} as they were in its forward, and they "
                "were written since, by engine.step() or in place: call backward before the step, "
                "and write after it"
            )

    def _refuse_written_in_backward(self, layer: Layer | None) -> None:
        """ConfigError if a hook of the program has written weights that backward has bound."""
        if (
            layer is not None
            and layer.weight_state is WeightState.HERE
            and (layer.version != layer.fetched)
        ):
            self._refuse_write("a hook in backward", layer, self._weights.moved(layer))

    def _arrived(self, layer: Layer, position: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or position >= layer.num_trained:
            return
        if gradient.device.type != self._device_type:
            # Race: autograd's thread of the CPU brings it beside the device's thread.
            raise ConfigError(
                f"a gradient of {layer.names[position]} came on the CPU: the loss reads it outside "
                "of its layer, where it rests, beside the model on the device. Compute what needs "
                "it in a module that the model calls, set weight_decay for a penalty on weights, "
                "or let the device keep and update the layer (stronghold.resident_layers, "
                '"resident_updates": "gpu")'
            )
        self._program.reached(True)
        if self._program.divisor > 1:
            gradient = gradient / self._program.divisor
        self._begin_backward()
        self._has_gradients = True
        self._outside.got_gradient(layer, position)
        self._gradients.arrived(layer, position, gradient)

    def _chunk_arrived(
        self, layer: Layer, gradients: Sequence[tuple[int, Tensor]], is_last: bool
    ) -> None:
        if gradients:
            self._program.reached(True)
            self._has_gradients = True
            self._outside.got_gradient(layer, gradients[0][0])
        if self._program.divisor > 1:
            gradients = [(position, g / self._program.divisor) for position, g in gradients]
        self._begin_backward()
        self._gradients.chunk_arrived(layer, gradients, is_last=is_last)

    def _end_backward(self) -> None:
        """Autograd calls it at the end of a backward that did not raise."""
        self._span.end()
        for layer in (*self._outside.all, self._order.reading):
            self._refuse_written_in_backward(layer)
        if not self._is_inner:
            self._forgets_calls = True
            for layer in self._outside.all:
                self._end_use(layer)
        read, self._order.reading = self._order.reading, None
        self._rest(read)
        self._gradients.end_backward()
        if not self._is_inner:
            self._order.end_pass()
        self._in_backward = False

    # -- life -------------------------------------------------------------------------------------
    @contextmanager
    def resting(self) -> Iterator[None]:
        """Context manager in which the model's own code runs alone, on tensors that are not the
        layers'. Graphs and gradients may wait meanwhile."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def forget(self) -> None:
        """End every pass that an exception has left open, at any bytecode, and empty every slot."""
        self._span.drop()
        self._weights.forget()
        self._offload.forget()
        self._order.forget()
        for layer in self._layers:
            self._weights.rest(layer)
        with without_torch_function():
            for parameter, _ in self._gradient_hooks:
                parameter.grad = None
        self._outside.forget_calls()
        forget_attention()
        for replaced in self._replaced:
            replaced.forward.is_within = False
        self._in_backward = self._in_forward = self._is_interrupted = False

    def forget_interrupted(self) -> None:
        """Forget a pass whose end never came. A backward calls no hook after it has raised.

        If it has brought gradients, the step begins again. One of `torch.autograd.grad` has none,
        and the gradients of earlier micro-batches stay."""
        self._program.check()
        is_dead = backward_number() == NO_BACKWARD or self._end_of_backward() is None
        if self._in_backward and is_dead:
            if self._has_gradients:
                self._gradients.forget()
            self._forgets_calls = True
            self.forget()
        elif self._is_interrupted:
            self.forget()

    def close(self) -> None:
        """Give the modules their own forward back. Safe to call twice."""
        self._is_closed = True
        self._slot = None  # its memory is for others now
        for module, compiled in self._compiled:
            if isinstance(module._compiled_call_impl, ReplacedForward):  # else compiled once more
                module._compiled_call_impl = compiled
        self._compiled.clear()
        for module, _, before, _ in reversed(self._replaced):
            module.__dict__.pop("forward", None)
            if before is not None:  # another package has replaced it before
                module.forward = before
        for handle in self._handles:
            handle.remove()
        self._replaced.clear()
        self._handles.clear()


def _within(
    forwards: Sequence[ReplacedForward], compiled: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module's compiled call, in which these modules have their own forward."""
    for forward in forwards:
        forward.is_within = True
    try:
        return compiled(*args, **kwargs)
    finally:
        for forward in forwards:
            forward.is_within = False


def _nothing() -> None:
    return None
