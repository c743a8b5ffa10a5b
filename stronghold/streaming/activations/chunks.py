"""Chunks: a block takes its batch a few sequences at a time, while its weights are on the device.

Owns how a block's call is divided, and the views through which each chunk sees the weights. Weights
cross the link twice per call of the model, and gradients once, for any number of chunks. Never
moves a layer. The training thread enters in forward, and autograd's thread in backward.
`chunk_values` splits and joins ([Note: what is split] there). `chunk_trial` tries a division.
`chunk_effects` has the rules for what a block leaves besides its output.

[Note: gradients of a chunk] To its surroundings a divided call is an undivided one:

1. Training thread: each chunk enters through a node of its own (`_ChunkEntry`), which returns views
   of the weights.
2. Autograd's thread: it runs nodes in the reverse order of their construction. So all chunks of a
   layer come before any chunk of the layer below, and a chunk's entry is its last node.
3. Autograd's thread: the entry's backward hands over all gradients of the chunk at once. They are
   added in fp32 in the layer's gradient slot.
4. Autograd's thread: after the last chunk of the call the sums are rounded once. The gradients of
   several calls are added as PyTorch adds them, in the compute dtype.

[Note: streams] Chunks may take turns on several streams of the device (`cuda`, [Note: side
streams]). Two chunks must not race on memory that one of them writes:

1. Of each chunk, the entry is the last node in backward, for its weights and for its share of the
   batch. The main stream follows the entry.
2. What the block holds may only be read (`chunk_effects`, [Note: what a block holds]), and so may
   arguments that all chunks get. Both are compared after the last chunk.
3. Nothing sees that a block writes a tensor of a closure or of a global, or writes through a
   kernel that torch does not know. Such a block needs one stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from stronghold.devices.base import Device
from stronghold.errors import ConfigError
from stronghold.model.logits import Forward
from stronghold.model.partition import Layer
from stronghold.streaming.activations.block_state import BlockState
from stronghold.streaming.activations.chunk_effects import (
    InnerHooks,
    Records,
    containers_of,
    refuse_change,
)
from stronghold.streaming.activations.chunk_trial import Trial
from stronghold.streaming.activations.chunk_values import (
    KEY,
    Call,
    batch_of,
    join,
    split,
    tensors_of,
)
from stronghold.streaming.activations.key_value_caches import is_cache
from stronghold.streaming.executor import Executor
from stronghold.streaming.patches.modules import (
    hooks_after_gradient,
    hooks_on_gradient,
    is_call_compiled,
    parameter_table,
)
from stronghold.streaming.patches.tensors import tree_map_only, version_of

AroundChunk = Callable[[int, nn.Module, Any, Any], contextlib.AbstractContextManager[None]]


class _ChunkEntry(torch.autograd.Function):
    """Returns views of the tensors with which a chunk is computed.

    The first `num_weights` are a block's parameters: their gradients go to `take`, and not to the
    parameters. The others are inputs: their gradients go on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        take: Callable[[Sequence[torch.Tensor | None]], None],
        num_weights: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Keep `take`, and return the views."""
        ctx.take = take
        ctx.num_weights = num_weights
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Hand the weights' gradients over, and return those of the inputs."""
        count = ctx.num_weights
        ctx.take(gradients[:count])
        no_gradients = (None,) * (2 + count)
        return no_gradients + gradients[count:]


_enter: Any = _ChunkEntry.apply


class _ChunkGradients:
    """Takes the gradients of one chunk in backward.

    layer      index of the layer
    positions  positions of the chunk's weights in the layer
    number     the chunk's number
    pending    numbers of the call's chunks whose gradients have not come yet
    main       the main stream, which follows the chunk's
    """

    def __init__(
        self,
        executor: Executor,
        device: Device,
        layer: int,
        positions: Sequence[int],
        number: int,
        pending: set[int],
        main: object,
    ) -> None:
        self._executor = executor
        self._device = device
        self._layer = layer
        self._positions = positions
        self._trained = executor.layers[layer].optimizer.trained
        self._number = number
        self._pending = pending
        self._main = main

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hand over one gradient per weight. None: the chunk did not use the weight."""
        arrived = []
        for position, gradient in zip(self._positions, gradients, strict=True):
            if gradient is not None and position in self._trained:
                arrived.append((position, gradient))
        if self._positions:
            self._pending.discard(self._number)
            self._executor.chunk_gathered(self._layer, arrived, not self._pending)
        self._device.side_streams.follow(self._main)


class _ParameterPlace(NamedTuple):
    """The place of a parameter in a module, and its position in the layer."""

    table: dict[str, Any]
    name: str
    position: int


class Chunks:
    """Divides the calls of one model's blocks into chunks of `size` sequences.

    size      the number of sequences in a chunk
    executor  takes the chunks' gradients
    device    has the streams
    around    called with (layer, module, args, kwargs); the context manager of a chunk's forward
    """

    def __init__(
        self, size: int, executor: Executor, device: Device, *, around: AroundChunk
    ) -> None:
        self.size = size
        self.executor = executor
        self.device = device
        self.around = around
        # by kind of blocks: numbers of the returned tensors that are equal for all chunks
        self._shared: dict[tuple[type, Any], frozenset[int]] = {}
        self._blocks: dict[nn.Module, _DividedBlock] = {}

    def attach(self, layer: Layer) -> None:
        """Divide the calls of the layer's modules. ConfigError for a module that cannot be."""
        for module in layer.modules:
            name = layer.name or type(module).__name__
            if is_call_compiled(module):
                raise ConfigError(
                    f"{KEY}: {name} is compiled, and a compiled forward cannot be divided: compile "
                    "parts inside of the block, or leave the key out"
                )
            self._blocks[module] = _DividedBlock(self, layer, module, name)
            vars(module)["forward"] = Forward(module, self._blocks[module])

    def close(self) -> None:
        """Give the modules their own forward back. Safe to call twice."""
        for module, block in self._blocks.items():
            del vars(module)["forward"]
            if getattr(module, "forward", None) != block.inner:  # another wrapper's
                vars(module)["forward"] = block.inner
        self._blocks.clear()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Context manager in which the modules have their own forward."""
        divided = {module: vars(module)["forward"] for module in self._blocks}
        try:
            for module, block in self._blocks.items():
                vars(module)["forward"] = block.inner
            yield
        finally:
            for module, forward in divided.items():
                vars(module)["forward"] = forward

    def divides(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if this call will be divided."""
        if not torch.is_grad_enabled() or module not in self._blocks:
            return False
        if any(map(is_cache, (*args, *kwargs.values()))):
            return False
        return batch_of(args, kwargs) > self.size

    def run_again(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run a chunk's forward in backward. No hook inside the block is called again."""
        block = self._blocks[module]
        block.hooks.run(block.inner, args, kwargs)

    def try_once(
        self, kind: tuple[type, Any], trial: Trial, call: Call, sizes: Sequence[int]
    ) -> frozenset[int]:
        """Return what the trial of the first block of this kind has found.

        `kind`: the block's class, and the hooks inside it.
        """
        if kind not in self._shared:
            self._shared[kind] = trial.shared(call, sizes)
        return self._shared[kind]


class _DividedBlock:
    """The divided forward of one module.

    inner  its own forward
    hooks  those on modules inside it
    """

    def __init__(self, chunks: Chunks, layer: Layer, module: nn.Module, name: str) -> None:
        self._chunks = chunks
        self._executor = chunks.executor
        self._device = chunks.device
        self._layer = layer
        self._module = module
        self._name = name
        self.inner: Callable[..., Any] = module.forward
        self.hooks = InnerHooks(name, module)
        self._trial = Trial(name, module, self.inner, self.hooks, self._device.torch_device)
        self._places = _places(layer, module)
        self._state: BlockState | None = None
        self.__wrapped__ = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chunks = self._chunks
        if not chunks.divides(self._module, args, kwargs):
            if torch.is_grad_enabled():
                self._executor.undivided_begun(self._layer.index)
            return self.inner(*args, **kwargs)
        self.hooks.refuse()
        self._refuse_gradient_hooks()
        batch = batch_of(args, kwargs)
        sizes = [min(chunks.size, batch - begin) for begin in range(0, batch, chunks.size)]
        call = (args, kwargs)
        kind = type(self._module), self.hooks.counts()
        shared = chunks.try_once(kind, self._trial, call, sizes)
        outputs = self._run_chunks(call, split(call, batch, sizes))
        output, records = join(outputs, sizes, self._name, shared)
        self.hooks.call(records)
        return output

    def _refuse_gradient_hooks(self) -> None:
        for named in self._layer.parameters:
            # one of them is the engine's own
            after = hooks_after_gradient(named.parameter)
            if hooks_on_gradient(named.parameter) or len(after) > 1:
                raise ConfigError(
                    f"{KEY}: {named.name} has a hook on its gradient, which comes in chunks and "
                    "never to the parameter: remove the hook, or leave the key out"
                )

    # -- the chunks of one call -------------------------------------------------------------------
    def _run_chunks(self, call: Call, chunks: Sequence[Call]) -> list[tuple[Any, Records]]:
        """Return the block's output for each chunk of the call, in order, and its hooks' records.

        ConfigError if one of them has changed what the others read ([Note: streams])."""
        side_streams = self._device.side_streams
        uses_streams = len(side_streams.streams) > 1
        key = "stronghold.streams" if uses_streams else KEY
        whole = set(map(id, tensors_of(call)))
        shared = [tensor for tensor in tensors_of(chunks[0]) if id(tensor) in whole]
        read = [*self._module.parameters(), *shared]
        versions = _versions_of(read)
        outputs: list[tuple[Any, Records]] = []
        pending: set[int] = set()
        with side_streams.forked() as main:
            for number, chunk in enumerate(chunks):
                if number == (0 if uses_streams else 1):
                    held = self._held()
                inputs = []
                if uses_streams:
                    tensors = tensors_of(chunk)
                    inputs = [t for t in tensors if t.requires_grad and id(t) not in whole]
                entered = self._entered(chunk, inputs, number, pending, main)
                outputs.append(self._run_chunk(chunk, number, entered, uses_streams))
        refuse_change(self._name, held, key)
        if versions != _versions_of(read):
            raise ConfigError(
                f"{key}: {self._name} writes into a parameter or an argument that all its chunks "
                "read: leave the key out, or let the block write into a copy"
            )
        return outputs

    def _held(self) -> BlockState:
        """Return a snapshot of what the block holds."""
        if self._state is None or self._state.difference() is not None:
            self._state = BlockState(self._module)
        return self._state

    def _run_chunk(
        self,
        chunk: Call,
        number: int,
        entered: contextlib.AbstractContextManager[Call],
        on_side_stream: bool,
    ) -> tuple[Any, Records]:
        """Return the block's output for one chunk, and its hooks' records."""
        index = self._layer.index
        containers = containers_of(chunk)
        stream: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if on_side_stream:
            name = f"chunk {number} of {index}"
            stream = self._device.side_streams.beside(number, name)
        around = self._chunks.around
        # One statement: an interrupt finds a context manager either closed or entered.
        with stream, entered as (args, kwargs), around(index, self._module, args, kwargs):
            output = self.hooks.run(self.inner, args, kwargs)
        refuse_change(self._name, containers)
        return output

    @contextlib.contextmanager
    def _entered(
        self,
        chunk: Call,
        inputs: Sequence[torch.Tensor],
        number: int,
        pending: set[int],
        main: object,
    ) -> Iterator[Call]:
        """Context manager for one chunk: the block's modules have views of their parameters.

        Args:
            chunk: its arguments.
            inputs: the tensors among them that the chunk enters by views of.
            number: the chunk's number.
            pending: numbers of the call's chunks whose gradients have not come yet.
            main: the main stream.

        Yields:
            The arguments, with views in the place of `inputs`.
        """
        positions, parameters = [], []
        for position, named in enumerate(self._layer.parameters):
            if named.parameter.requires_grad:
                positions.append(position)
                parameters.append(named.parameter)
        if not positions and not inputs:
            yield chunk
            return
        index, num_weights = self._layer.index, len(positions)
        gradients = _ChunkGradients(
            self._executor, self._device, index, positions, number, pending, main
        )
        views = _enter(gradients.take, num_weights, *parameters, *inputs)
        weights = dict(zip(positions, views[:num_weights], strict=True))
        if inputs:
            chunk = _with_views(chunk, inputs, views[num_weights:])
        if positions:
            self._executor.chunk_begun(index, not pending)
            pending.add(number)
        restored = [(place, place.table[place.name]) for place in self._places]
        try:
            try:
                for place in self._places:
                    if place.position in weights:
                        place.table[place.name] = weights[place.position]
                del views
                weights.clear()
                yield chunk
            finally:
                _put_back(restored)
        except BaseException:
            # again, whole: an interrupt may have ended the first time
            _put_back(restored)
            raise


def _versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the version counters of the tensors; 0 for inference tensors, which have none."""
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _with_views(chunk: Call, inputs: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> Call:
    """Return the chunk's arguments with views in the place of `inputs`."""
    by_input = dict(zip(map(id, inputs), views, strict=True))
    result: Call = tree_map_only(torch.Tensor, functools.partial(_view_of, by_input), chunk)
    return result


def _view_of(by_input: Mapping[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return by_input.get(id(tensor), tensor)


def _put_back(restored: Sequence[tuple[_ParameterPlace, Any]]) -> None:
    for place, parameter in restored:
        place.table[place.name] = parameter


def _places(layer: Layer, module: nn.Module) -> list[_ParameterPlace]:
    """Return the places of the layer's parameters in the block's modules."""
    positions = {id(named.parameter): k for k, named in enumerate(layer.parameters)}
    places = []
    for submodule in module.modules():
        table = parameter_table(submodule)
        for name, parameter in table.items():
            if parameter is not None and id(parameter) in positions:
                places.append(_ParameterPlace(table, name, positions[id(parameter)]))
    return places
