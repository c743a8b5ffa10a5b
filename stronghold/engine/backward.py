"""Backwards that the user's code starts: `loss.backward()` instead of `engine.backward(loss)`.

Owns the one that is running. It begins when autograd comes to the first output or parameter of the
model, and ends with autograd's own callback at the end of that backward; one that raised is found,
and its step begun again, at the next call of the engine or the model. Entered by the training
thread, and by autograd's in backward; the two never run at once.

[Note: accumulation] As in DeepSpeed, a backward that `engine.backward` does not run divides by the
accumulation steps where the model was called through the engine. DeepSpeed divides the gradient of
each output, and so twice where one output was computed from another (a loss and its logits); here
gradients of parameters are divided, once, as they arrive: the bits of `engine.backward` where the
number of steps is a power of two.

[Note: one loss, several engines] Each engine that a backward reaches divides its gradients by its
own loss scale, whichever of them has multiplied the loss: scales that differ are refused.

[Note: autograd.grad] What asks for gradients of inputs is no backward of ours. In torch.autograd.
grad no parameter's node is executed, and that is what tells.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch

from stronghold.errors import ConfigError
from stronghold.streaming.optimizer import EngineOptimizer
from stronghold.streaming.parts import UnannouncedBackward
from stronghold.streaming.patches.autograd import (
    NO_BACKWARD,
    at_end_of_backward,
    backward_number,
    running_node,
    will_execute,
)
from stronghold.telemetry.metrics import named_tensors

# Of a checkpoint that runs backward in backward: no parameter shows behind it, and torch.autograd.
# grad it refuses.
_REENTRANT = "CheckpointFunctionBackward"
_running: list[float] = []  # loss scales of each `engine.backward`, of any engine, that runs
_scaled: list[float] = []  # of the `engine.scale` whose loss the running backward came through


class _Graph:
    """One call's graph. The hooks on the call's outputs own it, and autograd owns those."""

    def __init__(self) -> None:
        self.used = False  # a backward has come through it


class UserBackward:
    """Of one engine, to which it keeps no reference that counts. `outside` calls it."""

    def __init__(self, engine: Any, outside: UnannouncedBackward) -> None:
        self._engine = weakref.ref(engine)
        self._outside = outside
        self._task: int | None = None  # torch's number of the backward that is open
        # The number of the backward that was asked about, and whether it trains.
        self._asked: tuple[int, bool] = (NO_BACKWARD, False)
        self._own = self._keeps = False
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()  # that are alive
        self._timing = contextlib.ExitStack()
        outside.reached, outside.check = self._reached, self.check

    @contextlib.contextmanager
    def none(self, *, keeps: bool = False) -> Iterator[None]:
        """Around autograd's run in `engine.backward`: what it reaches begins nothing here. `keeps`:
        the graph is used again."""
        engine: Any = self._engine()
        _running.append(engine.optimizer.loss_scale)
        self._own, self._keeps = True, keeps
        try:
            yield
        finally:
            _running.pop()
            self._own = self._keeps = False

    @property
    def waits(self) -> bool:
        """True while the graph of a call of the engine is alive and its backward has not come."""
        return any(not graph.used for graph in self._graphs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a `backward` of its own."""
        optimizer: EngineOptimizer = cast(Any, self._engine()).optimizer
        scaled = optimizer.scaled(loss)
        if optimizer.loss_scale != 1.0:
            note: Any = scaled.register_hook
            note(functools.partial(_note_scale, optimizer.loss_scale))
        return scaled

    def watch(self, output: Any) -> None:
        """Hang on the tensors of an output of the model: in sequences and mappings."""
        graph = _Graph()
        self._graphs.add(graph)
        for _, tensor in named_tensors(output):
            if tensor.grad_fn is not None:
                hang: Any = torch.Tensor.register_hook  # lazy logits' own refuses the user's
                hang(tensor, functools.partial(self._at_output, graph))

    def _at_output(self, graph: _Graph, _: torch.Tensor) -> None:
        if self._task not in (None, backward_number()):
            self._abandon()  # it raised, and the same graph is tried again
        self._reached(gradient=False)
        if (self._own or self._task is not None) and not self._keeps:
            graph.used = True
        engine = self._engine()
        if engine is not None and self._task is not None and not _running:
            self._outside.divisor = engine.gradient_accumulation_steps()

    # -- its life ---------------------------------------------------------------------------------
    def _reached(self, gradient: bool) -> None:
        engine, task = self._engine(), backward_number()
        if engine is None or engine._destroyed or engine.optimizer is None or task == NO_BACKWARD:
            return
        if self._own or self._task is not None:
            return
        if not (gradient or self._trains(engine, task)):
            return
        optimizer, runtime = engine.optimizer, engine._stack.runtime
        by, own = (_running or _scaled or [1.0])[-1], optimizer.loss_scale
        if not (_running or _scaled) and own != 1.0:
            raise ConfigError(
                "loss.backward() of a loss that was not scaled, in fp16: call "
                "engine.scale(loss).backward() or engine.backward(loss)"
            )
        if by != own:
            raise ConfigError(
                f"backward of a loss that another engine scaled by {by}, where this one's loss "
                f"scale is {own}: give both the same precision and fp16.loss_scale, or each a loss "
                "and a backward of its own"
            )
        if not runtime.ledger.is_in_step:
            engine._loss_sum = None
        runtime.begin_backward(boundary=engine.is_gradient_accumulation_boundary())
        self._task = task
        self._timing.enter_context(engine._instruments.time("backward"))
        at_end_of_backward(self._end)

    def _trains(self, engine: Any, task: int) -> bool:
        """Whether a gradient of a parameter will come of this backward ([Note: autograd.grad])."""
        if self._asked[0] != task:
            self._asked = (
                task,
                any(
                    node.name() == _REENTRANT
                    or (
                        engine._stack.steps.trains(getattr(node, "variable", None))
                        and _will_execute(node)
                    )
                    for node in _behind(running_node())
                ),
            )
        return self._asked[1]

    def _end(self) -> None:
        engine = self._engine()
        if engine is None or self._task is None:
            return
        try:
            engine._stack.runtime.end_backward()
            engine._num_backwards += 1
        except BaseException:
            self._abandon()
            raise
        self._close()

    def check(self) -> None:
        """Abandon the step of a backward that raised: none is running here."""
        if backward_number() == NO_BACKWARD:
            _scaled.clear()
            if self._task is not None:
                self._abandon()

    def _abandon(self) -> None:
        self._close()
        engine = self._engine()
        if engine is not None and not engine._destroyed:
            engine._abandon_step()

    def _close(self) -> None:
        self._task, self._outside.divisor = None, 1
        _scaled.clear()
        self._timing.close()


def _note_scale(scale: float, _: torch.Tensor) -> None:
    _scaled[:] = [scale]
    at_end_of_backward(_scaled.clear)


def _behind(node: Any) -> Iterator[Any]:
    """The node of a graph and all that its backward leads to."""
    seen, waiting = {None}, [node]
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen.add(found)
            yield found
            waiting += [behind for behind, _ in found.next_functions]


def _will_execute(leaf: Any) -> bool:
    try:
        return will_execute(leaf)
    except RuntimeError:  # of torch.autograd.grad, which asked for this very parameter
        return False
