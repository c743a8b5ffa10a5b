"""Backwards that the user's code starts: `loss.backward()` instead of `engine.backward(loss)`.

Owns the one that is running. The training thread enters, and autograd's thread in backward; the two
never run at once.

[Note: the life of a backward]
1. Autograd comes to the first output or parameter of the model. The backward begins.
2. Autograd calls `_end` at the end of that backward.
3. If a backward raised, `_end` never runs. The next call of the engine or of the model notices the
   open backward, drops it, and begins the step again.

[Note: accumulation]
1. A backward that `engine.backward` does not run divides by the accumulation steps if the model was
   called through the engine. DeepSpeed does so too.
2. DeepSpeed divides the gradient of each output. It divides twice where one output was computed
   from another (a loss and its logits).
3. This engine divides gradients of parameters, once, as they arrive.
4. Where the number of steps is a power of two, the bits are those of `engine.backward`.

[Note: one loss, several engines]
1. One engine multiplies the loss by its loss scale.
2. Each engine that the backward reaches divides its gradients by its own loss scale.
3. So scales that differ are refused.

[Note: a loss without its scale]
1. In fp16, `step` divides gradients by the loss scale.
2. `loss.backward()` after `engine(batch)` leaves that scale out. It is refused, as by DeepSpeed.
3. A program may call the raw module, and scale the loss by hand. No engine can see that.
4. So such a backward is accepted, and warned about once. `step` divides, as DeepSpeed does.

[Note: autograd.grad]
1. A program asks `torch.autograd.grad` for gradients of inputs. That is no backward of a step.
2. Autograd then executes no parameter's node. `_trains` asks autograd which nodes it will execute.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch

from stronghold.config.source import warn_once
from stronghold.errors import ConfigError
from stronghold.private import (
    NO_BACKWARD,
    at_end_of_backward,
    backward_number,
    running_node,
    will_execute,
)
from stronghold.telemetry.metrics import named_tensors
from stronghold.train.hooks import ProgramBackward
from stronghold.train.optimizer import EngineOptimizer

# Node of a checkpoint that runs backward in backward. No parameter shows behind it. It refuses
# torch.autograd.grad.
_REENTRANT = "CheckpointFunctionBackward"
# loss scale of each running `engine.backward`, of any engine
_announced_scales: list[float] = []
# scale of `engine.scale`, if the running backward came through it
_scaled_by: list[float] = []


class _CallGraph:
    """Autograd graph of one call of the engine, and the hook on the call's outputs.

    Autograd alone owns it. So it dies with the graph.
    """

    def __init__(self, backward: UserBackward) -> None:
        self._backward = backward
        self.is_used = False  # a backward has come through it

    def __call__(self, gradient: torch.Tensor) -> None:
        self._backward.reached_output(self)


class _ScaleNote:
    """Hook on a scaled loss: notes the scale while a backward comes through it."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, gradient: torch.Tensor) -> None:
        _scaled_by[:] = [self._scale]
        at_end_of_backward(_scaled_by.clear)


class UserBackward:
    """Notices backwards of one engine that `engine.backward` does not run.

    It keeps a weak reference to the engine. Hooks on layers call it through `outside`.
    """

    def __init__(self, engine: Any, outside: ProgramBackward) -> None:
        self._engine = weakref.ref(engine)
        self._outside = outside
        self._task: int | None = None  # torch's number of the backward that is open
        # Number of the backward for which `_trains` was computed last, and its answer.
        self._last_answer: tuple[int, bool] = (NO_BACKWARD, False)
        self._is_announced = False
        self._keeps_graph = False
        self._live_graphs: weakref.WeakSet[_CallGraph] = weakref.WeakSet()
        outside.reached = self._reached
        outside.check = self.check

    @contextlib.contextmanager
    def announced(self, *, keeps_graph: bool = False) -> Iterator[None]:
        """Context manager for autograd's run in `engine.backward`: no backward begins here.

        `keeps_graph`: another backward uses the graph again.
        """
        engine: Any = self._engine()
        _announced_scales.append(engine.optimizer.loss_scale)
        self._is_announced = True
        self._keeps_graph = keeps_graph
        try:
            yield
        finally:
            _announced_scales.pop()
            self._is_announced = False
            self._keeps_graph = False

    @property
    def waits(self) -> bool:
        """True while a graph of the engine is alive that no backward has used yet."""
        return any(not graph.is_used for graph in self._live_graphs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for a `backward` of the program's own."""
        optimizer: EngineOptimizer = cast(Any, self._engine()).optimizer
        scaled = optimizer.scaled(loss)
        if optimizer.loss_scale != 1.0:
            register: Any = scaled.register_hook
            register(_ScaleNote(optimizer.loss_scale))
        return scaled

    def watch(self, output: Any) -> None:
        """Register a hook on the tensors of the model's output, in sequences and mappings too."""
        graph = _CallGraph(self)
        self._live_graphs.add(graph)
        for _, tensor in named_tensors(output):
            if tensor.grad_fn is not None:
                # lazy logits refuse the user's hooks
                register: Any = torch.Tensor.register_hook
                register(tensor, graph)

    def reached_output(self, graph: _CallGraph) -> None:
        """Begin a backward at an output of the model, if none is open."""
        if self._task not in (None, backward_number()):
            self._abandon()  # it raised, and the same graph is tried again
        self._reached(gradient=False, is_engine_call=True)
        is_open = self._task is not None
        if (self._is_announced or is_open) and not self._keeps_graph:
            graph.is_used = True
        engine = self._engine()
        if engine is not None and self._task is not None and not _announced_scales:
            self._outside.divisor = engine.gradient_accumulation_steps()

    # -- one backward ([Note: the life of a backward]) --------------------------------------------
    def _reached(self, gradient: bool, is_engine_call: bool = False) -> None:
        """Begin a backward at an output of a layer, or (`gradient` true) at a parameter.

        `is_engine_call`: the output is that of a call of the engine, not of the raw module.
        """
        engine = self._engine()
        task = backward_number()
        if engine is None or engine._destroyed or engine.optimizer is None or task == NO_BACKWARD:
            return
        if self._is_announced or self._task is not None:
            return
        if not (gradient or self._trains(engine, task)):
            return
        _check_scale(engine.optimizer.loss_scale, is_engine_call)
        job = engine._job
        if not job.trainer.is_in_step:
            engine._loss_sum = None
        job.begin_backward(ends_step=engine.is_gradient_accumulation_boundary())
        self._task = task
        at_end_of_backward(self._end)

    def _trains(self, engine: Any, task: int) -> bool:
        """True if this backward computes a parameter's gradient ([Note: autograd.grad])."""
        if self._last_answer[0] != task:
            self._last_answer = (task, _reaches_parameter(engine))
        return self._last_answer[1]

    def _end(self) -> None:
        engine = self._engine()
        if engine is None or self._task is None:
            return
        try:
            engine._num_backwards += 1
        except BaseException:
            self._abandon()
            raise
        self._close()

    def check(self) -> None:
        """Abandon the step of a backward that raised. Without effect inside a backward."""
        if backward_number() == NO_BACKWARD:
            _scaled_by.clear()
            if self._task is not None:
                self._abandon()

    def _abandon(self) -> None:
        self._close()
        engine = self._engine()
        if engine is not None and not engine._destroyed:
            engine._abandon_step()

    def _close(self) -> None:
        self._task = None
        self._outside.divisor = 1
        _scaled_by.clear()


def _check_scale(expected: float, is_engine_call: bool) -> None:
    """Raise ConfigError unless the running backward's loss was multiplied by `expected`.

    Warns instead where the raw module was called ([Note: a loss without its scale]).
    """
    scales = _announced_scales or _scaled_by
    if not scales and expected != 1.0:
        if not is_engine_call:
            warn_once(
                "fp16: loss.backward() after a call of the raw module. The engine cannot see "
                "whether the loss was scaled, and step() divides gradients by the loss scale, as "
                "under DeepSpeed. Call engine.scale(loss).backward()"
            )
            return
        raise ConfigError(
            "loss.backward() of a loss that was not scaled, in fp16: call "
            "engine.scale(loss).backward() or engine.backward(loss)"
        )
    scale = scales[-1] if scales else 1.0
    if scale != expected:
        raise ConfigError(
            f"backward of a loss that another engine scaled by {scale}, where this one's loss "
            f"scale is {expected}: give both the same precision and fp16.loss_scale, or each a "
            "loss and a backward of its own"
        )


def _reaches_parameter(engine: Any) -> bool:
    """True if autograd will execute the node of a trained parameter behind the running node."""
    for node in _nodes_behind(running_node()):
        if node.name() == _REENTRANT:
            return True
        variable = getattr(node, "variable", None)
        if engine._job.trains(variable) and _will_execute(node):
            return True
    return False


def _nodes_behind(node: Any) -> Iterator[Any]:
    """The node of a graph, and every node to which its backward leads."""
    seen, waiting = {None}, [node]
    while waiting:
        next_node = waiting.pop()
        if next_node not in seen:
            seen.add(next_node)
            yield next_node
            waiting += [function for function, _ in next_node.next_functions]


def _will_execute(leaf: Any) -> bool:
    try:
        return will_execute(leaf)
    except RuntimeError:  # torch.autograd.grad asked for this very parameter
        return False
