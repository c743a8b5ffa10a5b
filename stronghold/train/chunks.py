"""Chunks: a block takes its batch a few sequences at a time, while its weights are on the device.

Weights cross the link twice per call of the model, and gradients once, for any number of chunks.

[Note: gradients of a chunk] To its surroundings a divided call is an undivided one.
1. Each chunk enters by a node of its own, which gives views of the weights (`ChunkEntry`).
2. Autograd runs nodes in the reverse order of their making. So all chunks of a layer come before
   any chunk of the layer below.
3. The node's backward hands over all gradients of its chunk. They are added in fp32 in the layer's
   gradient slot, and never reach the parameters.
4. The last chunk of the call rounds the sums. The gradients of several calls are added in the
   compute dtype, as autograd adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stronghold.errors import ConfigError
from stronghold.streaming.activations.chunk_values import (
    KEY,
    Call,
    batch_of,
    join,
    split,
    tensors_of,
)
from stronghold.streaming.activations.key_value_caches import is_cache
from stronghold.streaming.interrupts import run_and_restore
from stronghold.streaming.patches.autograd import NO_BACKWARD, backward_number, will_execute
from stronghold.streaming.patches.modules import (
    has_gradient_hooks,
    hooks_after_forward,
    hooks_after_gradient,
    hooks_before_forward,
    hooks_on_gradient,
    is_call_compiled,
    parameter_table,
)
from stronghold.streaming.patches.tensors import version_of
from stronghold.train.chunk_effects import Forward, Held, InnerHooks, Records, tried
from stronghold.train.layer import Layer

Arrived = Callable[[Layer, Sequence[tuple[int, Tensor]], bool], None]
"""Called with the gradients of a chunk, by position. True: it is the last of its call."""
RunChunk = Callable[..., Any]
"""Called with the function that computes a chunk, and with its arguments."""


class ChunkEntry(torch.autograd.Function):
    """Returns views of the weights with which a chunk is computed, and takes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, take: Callable[[Sequence[Tensor | None]], None], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        leaves = (leaf for leaf, _ in ctx.next_functions)
        pairs = zip(leaves, gradients, strict=True)
        ctx.take([gradient if _is_wanted(leaf) else None for leaf, gradient in pairs])
        return (None,) * (1 + len(gradients))


enter: Any = ChunkEntry.apply  # torch has no type for it


def _is_wanted(leaf: Any) -> bool:
    """True if the running backward would give the parameter its gradient: not if it has `inputs`
    without this one."""
    try:
        return will_execute(leaf)
    except RuntimeError as error:
        raise ConfigError(
            f"{KEY}: torch.autograd.grad asks for the gradient of a block's weight, which comes in "
            "chunks and never to the parameter: leave the key out"
        ) from error


class Place(NamedTuple):
    """The place of a parameter in a module, and its position in the layer."""

    table: dict[str, Any]
    name: str
    position: int


class Divided:
    """One divided call. `remaining`: chunks whose gradients have not come in `backward`."""

    def __init__(self, layer: Layer, num_chunks: int, arrived: Arrived) -> None:
        self._layer, self._num_chunks, self._arrived = layer, num_chunks, arrived
        self._backward, self._remaining = NO_BACKWARD, num_chunks

    def take(self, positions: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of one chunk. None: the chunk has not used the weight."""
        if self._backward != backward_number():  # the first one, or one more of a graph that stays
            self._backward, self._remaining = backward_number(), self._num_chunks
        self._remaining -= 1
        pairs = zip(positions, gradients, strict=True)
        arrived = [(position, g) for position, g in pairs if g is not None]
        self._arrived(self._layer, arrived, self._remaining == 0)


class Block:
    """A block whose calls are divided. `name`: of the block, for errors."""

    def __init__(self, layer: Layer, module: nn.Module) -> None:
        self.layer, self.module = layer, module
        self.name = layer.name or type(module).__name__
        self.hooks = InnerHooks(self.name, module)
        positions = {id(p): k for k, p in enumerate(layer.parameters[: layer.num_trained])}
        tables = (parameter_table(part) for part in module.modules())
        self._places = [
            Place(table, name, positions[id(parameter)])
            for table in tables
            for name, parameter in table.items()
            if id(parameter) in positions
        ]

    def refuse(self) -> None:
        """ConfigError for a block whose calls cannot be divided."""
        hooks = [*hooks_before_forward(self.module), *hooks_after_forward(self.module)]
        if is_call_compiled(self.module) and (hooks or has_gradient_hooks(self.module)):
            raise ConfigError(
                f"{KEY}: {self.name} is compiled with the hooks on it, which would get chunks in "
                "place of the batch: compile parts inside of the block, or leave the key out"
            )
        self.hooks.refuse()
        for name, parameter in zip(self.layer.names, self.layer.parameters, strict=True):
            # one of them is the engine's own
            if hooks_on_gradient(parameter) or len(hooks_after_gradient(parameter)) > 1:
                raise ConfigError(
                    f"{KEY}: {name} has a hook on its gradient, which comes in chunks and never to "
                    "the parameter: remove the hook, or leave the key out"
                )

    def run_with_views(self, work: Callable[[], Any], divided: Divided) -> Any:
        """Call `work`, the forward of one chunk. The block's modules have views of their weights
        ([Note: gradients of a chunk])."""
        trained = enumerate(self.layer.parameters[: self.layer.num_trained])
        weights = {position: p for position, p in trained if p.requires_grad}
        if not weights:
            return work()
        views = enter(partial(divided.take, [*weights]), *weights.values())
        by_position = dict(zip(weights, views, strict=True))
        restored = [(place, place.table[place.name]) for place in self._places]

        def run() -> Any:
            for table, name, position in self._places:
                if position in by_position:
                    table[name] = by_position[position]
            return work()

        def restore() -> None:
            for (table, name, _), parameter in restored:
                table[name] = parameter

        return run_and_restore(run, restore)


class Chunks:
    """Divides the calls of blocks into chunks of `size` sequences.

    modules  of the blocks, with their layers
    arrived  takes the gradients of each chunk
    device   the one on which the blocks run
    """

    def __init__(
        self, size: int, modules: Mapping[nn.Module, Layer], arrived: Arrived, device: torch.device
    ) -> None:
        self._size, self._arrived, self._device = size, arrived, device
        self._blocks = {module: Block(layer, module) for module, layer in modules.items()}
        # By class, and hooks inside: numbers of the returned tensors that are equal for all chunks.
        self._shared: dict[tuple[type, Any], frozenset[int]] = {}

    def divides(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if a call of a block with these arguments is divided."""
        if not torch.is_grad_enabled() or any(map(is_cache, (*args, *kwargs.values()))):
            return False
        return batch_of(args, kwargs) > self._size

    def run(
        self, module: nn.Module, run_chunk: RunChunk, forward: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a block chunk by chunk. Its weights are on the device meanwhile.

        run_chunk  runs a chunk's forward by the block's level of activations
        forward    the module's own

        ConfigError if the block leaves something of one chunk where the whole batch's belongs.
        """
        block = self._blocks[module]
        block.refuse()
        batch = batch_of(args, kwargs)
        sizes = [min(self._size, batch - begin) for begin in range(0, batch, self._size)]
        run_hooked = partial(block.hooks.run, forward)
        kind = type(module), block.hooks.counts()
        if kind not in self._shared:
            self._shared[kind] = tried(
                block.name, module, run_hooked, (args, kwargs), sizes, self._device
            )
        chunks = split((args, kwargs), batch, sizes)
        outputs = self._run_chunks(block, partial(run_chunk, run_hooked), (args, kwargs), chunks)
        output, records = join(outputs, sizes, block.name, self._shared[kind])
        block.hooks.call(records)
        return output

    def _run_chunks(
        self, block: Block, run_chunk: Callable[..., Any], call: Call, chunks: Sequence[Call]
    ) -> list[tuple[Any, Records]]:
        """The block's output for each chunk of the call, with its hooks' records."""
        whole = set(map(id, tensors_of(call)))
        shared = [tensor for tensor in tensors_of(chunks[0]) if id(tensor) in whole]
        read = [*block.layer.parameters, *shared]
        versions = _versions_of(read)
        divided = Divided(block.layer, len(chunks), self._arrived)
        outputs = []
        for number, (args, kwargs) in enumerate(chunks):
            if number == 1:
                held = Held(block.module)
            values = (*args, *kwargs.values())
            given = Held(arguments=[x for x in values if not isinstance(x, Tensor | tuple)])
            run = partial(run_chunk, *args, **kwargs)
            outputs.append(block.run_with_views(run, divided))
            given.refuse_change(block.name)
        held.refuse_change(block.name)
        if versions != _versions_of(read):
            raise ConfigError(
                f"{KEY}: {block.name} writes into a parameter or an argument that all its chunks "
                "read: leave the key out, or let the block write into a copy"
            )
        return outputs


def _versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """The version counters of the tensors; 0 for inference tensors, which have none."""
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]
