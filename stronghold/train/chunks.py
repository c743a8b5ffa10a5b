"""Chunks: a block takes its batch a few sequences at a time, while its weights are on the device.

Weights cross the link twice per call of the model, and gradients once, for any number of chunks.

[Note: gradients of a chunk] Other layers cannot tell a divided call from a whole one.
1. Each chunk enters by a node of its own, which gives views of the weights (`ChunkEntry`).
2. Autograd runs nodes in the reverse order of their making. So all chunks of a layer come before
   any chunk of the layer below.
3. The node's backward hands over all gradients of its chunk. They are added in fp32 in the layer's
   gradient slot, and never reach the parameters.
4. The last chunk of the call rounds the sums. The gradients of several calls are added in the
   compute dtype, as autograd adds them.

[Note: streams] Chunks may take turns on several streams of the device (`cuda`, [Note: side
streams]). Two chunks must not race on memory that one of them writes.
1. A chunk enters with its share of the batch, too. So its entry is its last node in backward, and
   the main stream follows the entry.
2. What the block holds may only be read, also by the first chunk. So may arguments that all chunks
   get. Both are compared after the last chunk.
3. Limit: nothing sees that a block writes a tensor of a closure or of a global, or by a kernel that
   torch does not know. Such a block needs one stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from stronghold.devices.device import Device
from stronghold.errors import ConfigError
from stronghold.private import (
    NO_BACKWARD,
    backward_number,
    has_gradient_hooks,
    hooks_after_gradient,
    will_execute,
)
from stronghold.train.chunk_effects import (
    Held,
    InnerHooks,
    Records,
    containers_of,
    run_and_restore,
    tried,
)
from stronghold.train.chunk_values import KEY, Call, batch_of, join, split, tensors_of
from stronghold.train.guards import is_cache
from stronghold.train.layer import Layer

Arrived = Callable[[Layer, Sequence[tuple[int, Tensor]], bool], None]
"""Called with the gradients of a chunk, by position. True: it is the last of its call."""
Run = Callable[..., Any]


class ChunkEntry(torch.autograd.Function):
    """Returns views of the tensors with which a chunk is computed. The first ones are weights: it
    takes their gradients. The gradients of the others, the inputs, go on."""

    @staticmethod
    def forward(
        ctx: Any,
        take: Callable[[Sequence[Tensor | None]], None],
        num_weights: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.take, ctx.num_weights = take, num_weights
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves = (leaf for leaf, _ in ctx.next_functions)
        pairs = zip(leaves, gradients[: ctx.num_weights], strict=False)
        ctx.take([gradient if _is_wanted(leaf) else None for leaf, gradient in pairs])
        inputs = gradients[ctx.num_weights :]
        return *(None,) * (2 + ctx.num_weights), *inputs


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


class Weight(NamedTuple):
    """A trained parameter of a block: its layer, its position there, and its places in modules."""

    parameter: Tensor
    layer: Layer
    position: int
    places: list[tuple[dict[str, Any], str]]


class Divided:
    """One divided call. `remaining`: chunks whose gradients have not come in `backward`. `follow`:
    lets the main stream wait for the calling thread's."""

    def __init__(self, num_chunks: int, arrived: Arrived, follow: Callable[[], None]) -> None:
        self._num_chunks, self._arrived, self._follow = num_chunks, arrived, follow
        self._backward, self._remaining = NO_BACKWARD, num_chunks

    def take(self, weights: Sequence[Weight], gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of one chunk. None: the chunk has not used the weight."""
        if self._backward != backward_number():  # the first one, or one more of a graph that stays
            self._backward, self._remaining = backward_number(), self._num_chunks
        self._remaining -= 1
        of_layer: dict[Layer, list[tuple[int, Tensor]]] = {weight.layer: [] for weight in weights}
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                of_layer[weight.layer].append((weight.position, gradient))
        for layer, arrived in of_layer.items():
            self._arrived(layer, arrived, self._remaining == 0)
        self._follow()


class Block:
    """A block whose calls are divided.

    name     of the block, for errors
    modules  the block's own one, and those inside it
    hooks    of those inside it
    inner    layers outside of the blocks that this block alone holds: a block's layer trains one
             dtype
    """

    def __init__(self, layer: Layer, module: nn.Module, inner: Sequence[Layer]) -> None:
        self.layer, self.module, self.inner = layer, module, inner
        self.name = layer.name or type(module).__name__
        self.hooks, self.modules = InnerHooks(self.name, module), [*module.modules()]
        self._weights = {
            id(parameter): Weight(parameter, one, position, [])
            for one in (layer, *inner)
            for position, parameter in enumerate(one.parameters[: one.num_trained])
        }
        for one in self.modules:
            table = one._parameters
            for name, parameter in table.items():
                if id(parameter) in self._weights:
                    self._weights[id(parameter)].places.append((table, name))

    def refuse(self) -> None:
        """ConfigError for a block whose calls cannot be divided."""
        block = self.module
        has_hooks = block._forward_pre_hooks or block._forward_hooks or has_gradient_hooks(block)
        if block._compiled_call_impl is not None and has_hooks:
            raise ConfigError(
                f"{KEY}: {self.name} is compiled with the hooks on it, which would get chunks in "
                "place of the batch: compile parts inside of the block, or leave the key out"
            )
        self.hooks.refuse()
        layers = (self.layer, *self.inner)
        names = (zip(layer.names, layer.parameters, strict=True) for layer in layers)
        for name, parameter in chain.from_iterable(names):
            # one of them is the engine's own
            if parameter._backward_hooks or len(hooks_after_gradient(parameter)) > 1:
                raise ConfigError(
                    f"{KEY}: {name} has a hook on its gradient, which comes in chunks and never to "
                    "the parameter: remove the hook, or leave the key out"
                )

    def run_hooked(self, forward: Run, *args: Any, **kwargs: Any) -> tuple[Any, Records]:
        """Call `forward` while the hooks inside the block wait. Returns its output, and the hooks'
        calls."""
        return self.hooks.run(forward, args, kwargs)

    def run_with_views(
        self, work: Callable[..., Any], chunk: Call, inputs: Sequence[Tensor], divided: Divided
    ) -> Any:
        """Call `work` with a chunk's arguments. The block's modules have views of weights, and the
        arguments have views of `inputs` ([Note: gradients of a chunk])."""
        weights = [w for w in self._weights.values() if w.places and w.parameter.requires_grad]
        args, kwargs = chunk
        if not weights and not inputs:
            return work(*args, **kwargs)
        take = partial(divided.take, weights)
        views = enter(take, len(weights), *(weight.parameter for weight in weights), *inputs)
        if inputs:
            by_input = dict(zip(map(id, inputs), views[len(weights) :], strict=True))
            args, kwargs = tree_map_only(Tensor, lambda x: by_input.get(id(x), x), chunk)

        def run() -> Any:
            for weight, view in zip(weights, views, strict=False):
                for table, name in weight.places:
                    table[name] = view
            return work(*args, **kwargs)

        def restore() -> None:
            for weight in weights:
                for table, name in weight.places:
                    table[name] = weight.parameter

        return run_and_restore(run, restore)


class Chunks:
    """Divides the calls of blocks into chunks of `size` sequences.

    modules  of all layers
    arrived  takes the gradients of each chunk
    device   the one on which the blocks run, with its side streams
    """

    def __init__(
        self,
        size: int,
        modules: Mapping[Layer, Sequence[nn.Module]],
        arrived: Arrived,
        device: Device,
    ) -> None:
        self._size, self._arrived, self._device = size, arrived, device
        inner: dict[Layer | None, list[Layer]] = defaultdict(list)
        for layer in modules:
            inner[layer.block].append(layer)
        self._blocks = {
            module: Block(layer, module, inner[layer])
            for layer, users in modules.items()
            for module in (users if layer.is_block else ())
        }
        # By class, and hooks inside: numbers of the returned tensors that are equal for all chunks.
        self._shared: dict[tuple[type, Any], frozenset[int]] = {}

    def divides(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if a call of a block with these arguments is divided."""
        if not torch.is_grad_enabled() or any(map(is_cache, (*args, *kwargs.values()))):
            return False
        return batch_of(args, kwargs) > self._size

    def inner(self, module: nn.Module) -> Sequence[Layer]:
        """The layers outside of the blocks that this block alone holds."""
        return self._blocks[module].inner

    def run(
        self, module: nn.Module, run_chunk: Run, forward: Run, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a block chunk by chunk. Its weights are on the device meanwhile.

        run_chunk  called with the function that computes a chunk, and with its arguments. Runs it
                   by the block's level of activations
        forward    the module's own

        ConfigError if the block leaves something of one chunk where the whole batch's belongs.
        """
        block = self._blocks[module]
        block.refuse()
        batch = batch_of(args, kwargs)
        sizes = [min(self._size, batch - begin) for begin in range(0, batch, self._size)]
        run_hooked = partial(block.run_hooked, forward)
        kind = type(module), block.hooks.counts()
        if kind not in self._shared:
            self._shared[kind] = tried(
                block.name, module, run_hooked, (args, kwargs), sizes, self._device.torch_device
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
        sides, index = self._device.side_streams, block.layer.index
        on_sides = len(sides.streams) > 1
        key = "stronghold.streams" if on_sides else KEY
        whole = set(map(id, tensors_of(call)))
        shared = [tensor for tensor in tensors_of(chunks[0]) if id(tensor) in whole]
        layers = (block.layer, *block.inner)
        read = [*chain.from_iterable(layer.parameters for layer in layers), *shared]
        versions = _versions_of(read)
        outputs = []
        with sides.forked() as main:
            divided = Divided(len(chunks), self._arrived, partial(sides.follow, main))
            for number, chunk in enumerate(chunks):
                if number == (0 if on_sides else 1):
                    held = Held(block.modules)
                given = Held(arguments=containers_of(chunk))
                inputs = [t for t in tensors_of(chunk) if t.requires_grad and id(t) not in whole]
                with sides.beside(number, f"chunk {number} of {index}"):
                    outputs.append(
                        block.run_with_views(run_chunk, chunk, inputs if on_sides else (), divided)
                    )
                given.refuse_change(block.name)
        held.refuse_change(block.name, key)
        if versions != _versions_of(read):
            raise ConfigError(
                f"{key}: {block.name} writes into a parameter or an argument that all its chunks "
                "read: leave the key out, or let the block write into a copy"
            )
        return outputs


def _versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """The version counters of the tensors; 0 for inference tensors, which have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
