"""Costs: the FLOPs and bytes of each layer's forward, and the bytes that autograd saves.

Owns the counting, by one forward pass over tensors without memory. Reads no value and leaves the
model unchanged. One thread enters it, before training. It needs neither a GPU nor weights.

The tracer does not run a block whose call is like an earlier one. It returns tensors of the same
shapes, and counts the first call's costs again.

[Note: shared]

1. A tensor may enter two different blocks: rotary tables, masks, an encoder's output.
2. It is kept once, whatever the blocks' activation levels.
3. It counts for the resident layer that ran before them, and for no block.

[Note: alike]

1. Calls are alike if the blocks' classes, settings and shapes of parameters are equal, and the
   shapes of the inputs.
2. Settings are all attributes but the block's number.
3. A difference without effect costs the time of tracing a block. An overlooked difference would
   give a wrong number.

[Note: replay] It is known only later whether the result of an operation is saved. So the tracer
records the timeline first, and evaluates it at the end.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import re
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from stronghold.errors import ConfigError
from stronghold.model.gpu_operators import (
    ATTENTION_KERNELS,
    MORE_FLOPS,
    AttentionCost,
    GpuOperators,
    attention_cost,
    is_causal,
    total_attention,
)
from stronghold.model.logits import LogitsInParts
from stronghold.model.operator_bytes import OperatorBytes
from stronghold.model.partition import Partition
from stronghold.model.product_gradients import ProductGradients

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Attributes that number a block.
INDEX_NAMES = frozenset(
    {"block_idx", "idx", "index", "layer_id", "layer_idx", "layer_index", "layer_number"}
)
MAX_CONTAINER = 100  # longer containers are compared by identity
# A block's number in a module's path, which PEFT's layers keep in a dict.
_NUMBER_IN_PATH = re.compile(r"\.\d+\.")
_IRRELEVANT = INDEX_NAMES | (vars(nn.Module()).keys() - {"training"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The costs of one layer's forward of one micro-batch.

    forward_flops    products, convolutions and attention, as torch's `FlopCounterMode` counts
                     them. A causal attention counts like one without a mask
    operator_bytes   device memory that all other operators read and write (`model.operator_bytes`)
    saved_bytes      tensors that autograd saves until backward, without parameters and buffers.
                     Each storage counts once in the model
    boundary_bytes   tensors that enter a block. Recomputation keeps them in place of saved tensors.
                     Neither number counts a tensor that enters several blocks ([Note: shared])
    passing_bytes    the most transient bytes at once, beside the saved ones. For the layer that ran
                     last, the head, also in the loss and its backward
    attention_flops, attention_bytes  shares of `forward_flops` and `saved_bytes` of a block's fused
                     attention
    causal_flops     share of `attention_flops` of calls with a causal mask
    head_width       elements of one head's query
    gradients_per_product  FLOPs of backward's products, as a multiple of forward's, without
                     attention (`model.product_gradients`): 2 in full training
    """

    forward_flops: float
    saved_bytes: int
    boundary_bytes: int
    passing_bytes: int = 0
    attention_flops: float = 0.0
    attention_bytes: int = 0
    causal_flops: float = 0.0
    head_width: int = 0
    operator_bytes: float = 0.0
    gradients_per_product: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """The costs of a model, by layer, for one micro-batch.

    `dtype` is the precision: "bf16", "fp16" or "fp32". `seq` is the number of tokens of a sequence.
    """

    layers: tuple[LayerCost, ...]
    dtype: str
    seq: int


def trace_costs(
    model: nn.Module,
    partition: Partition,
    *,
    batch: int,
    seq: int,
    dtype: str,
    inputs: Mapping[str, Any] | None = None,
) -> ModelCosts:
    """Count the costs of `model` on a GPU, in its present mode (training or evaluation).

    It uses no values of parameters. `inputs` are the keyword arguments of one call, on the meta
    device. None: token ids int64 [batch, seq], and labels if the model takes them.

    1. Logits are computed in parts if the engine does so by default (`model.logits`).
    2. `scaled_dot_product_attention` costs as much as a GPU's fused kernel.
    3. Work outside the layers' modules counts for the resident layer that ran last.

    ConfigError if forward has arguments that are not known, or depends on values.
    """
    arguments = dict(inputs) if inputs is not None else _token_inputs(model, batch, seq)
    weights = _without_memory(model, DTYPES[dtype])
    tracer = _Tracer(partition, weights)
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    parts = LogitsInParts(model, None)
    with contextlib.closing(parts), tracer.attached(), torch.enable_grad():
        try:
            functional_call(_Step(model, tracer), named, (), arguments)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{type(model).__name__}: a step failed on tensors without values, so that "
                f"its costs cannot be counted before a run: {type(error).__name__}: {reason}"
            ) from error
        tracer.settle_head(divided=parts.num_divided > 0)
    return ModelCosts(layers=tracer.costs(), dtype=dtype, seq=seq)


class _Counts(NamedTuple):
    """Counts of a piece of the forward."""

    flops: float  # of products and attention
    causal: float  # FLOPs of attention with a causal mask
    nbytes: float  # of all other operators
    gradients: float  # FLOPs of the products' gradients in backward


class _OneModule(contextlib.nullcontext[None]):
    """A module tracker without hooks, for torch's FLOP counter.

    The tracer knows which module runs. Hooks on every module's output would compute lazy logits.
    """

    parents = ("Global",)


class _Step(nn.Module):
    """Forward and backward while the model has weights without memory.

    The user's own checkpointing calls the model again in backward, so both run inside.
    """

    def __init__(self, model: nn.Module, tracer: _Tracer) -> None:
        super().__init__()
        self.model = model
        self._tracer = tracer

    def forward(self, **arguments: Any) -> None:
        # Only the loss of the output stays alive, as in a training loop.
        self._tracer.trace_backward(_loss(self.model(**arguments)))


def _loss(output: Any) -> torch.Tensor | None:
    """The first scalar of the output that has a graph; None if there is none."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.numel() == 1:
            return leaf
    return None


def _token_inputs(model: nn.Module, batch: int, seq: int) -> dict[str, Any]:
    """The arguments with which a trainer calls a language model's forward.

    They are token ids int64 [batch, seq], labels if the model takes them, and no cache. ConfigError
    if forward needs other arguments.
    """
    parameters = inspect.signature(model.forward).parameters
    ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
    known = {"input_ids": ids, "labels": ids, "use_cache": False}
    arguments = {name: value for name, value in known.items() if name in parameters}
    unknown: list[str] = []
    for name, parameter in parameters.items():
        is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        is_required = parameter.default is parameter.empty and not is_variadic
        if is_required and name not in arguments:
            unknown.append(name)
    # nanoGPT's `idx`, a Sequential's `input`
    if "input_ids" not in arguments and unknown:
        arguments[unknown.pop(0)] = ids
    if unknown or not arguments:
        raise ConfigError(
            f"{type(model).__name__}.forward needs {', '.join(unknown) or 'unnamed arguments'}, "
            "which are not known here; expected a model that is called with input_ids (and labels)"
        )
    return arguments


def _without_memory(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters in `dtype`, and buffers, on the meta device, by name. Tied ones stand once."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        weight_dtype = dtype if parameter.is_floating_point() else parameter.dtype
        weight = torch.empty_like(
            parameter, dtype=weight_dtype, device="meta", requires_grad=parameter.requires_grad
        )
        if parameter.requires_grad:
            weight.register_post_accumulate_grad_hook(_drop_gradient)
        tensors[name] = weight
    for name, buffer in model.named_buffers():
        tensors[name] = torch.empty_like(buffer, device="meta")
    return tensors


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


# -- tracing --------------------------------------------------------------------------------------
class _Tracer:
    """The records of one forward pass: the running layers, saved tensors, and blocks' inputs."""

    def __init__(self, partition: Partition, weights: Mapping[str, torch.Tensor]) -> None:
        self._partition = partition
        self._flops = [0.0] * len(partition.layers)
        self._causal_flops = [0.0] * len(partition.layers)
        self._operator_bytes = [0.0] * len(partition.layers)
        self._gradient_flops = [0.0] * len(partition.layers)
        # (layer, storage); a storage's first layer counts
        self._saved: list[tuple[int, int]] = []
        self._entered: dict[int, set[int]] = {}  # storage -> blocks
        # storage -> resident layer that ran last, on entry
        self._around: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        # Storages by identity. They are kept alive, so that no identity is used again.
        self._held: dict[int, torch.UntypedStorage] = {}
        self._attended: list[list[AttentionCost]] = [[] for _ in partition.layers]
        self._passing = TransientBytes(self)
        self._weights = {self._key(tensor) for tensor in weights.values()}
        self._running: list[int] = []
        self._forward_is_over = False
        resident = [layer.index for layer in partition.layers if not layer.streamed]
        self._outside = resident[0] if resident else 0
        self._counter = FlopCounterMode(display=False, custom_mapping=MORE_FLOPS)
        self._counter.mod_tracker = _OneModule()  # type: ignore[assignment]
        self._moved = OperatorBytes()
        self._gradients = ProductGradients(self._counter.flop_registry)
        self._causal = 0.0
        self._head_width: dict[int, int] = {}  # of layers that ran
        self._counted = _Counts(0.0, 0.0, 0.0, 0.0)
        # by everything in which calls must be alike
        self._known: dict[Any, _KnownCall] = {}
        # layer that did not run -> layer that ran in its place
        self._like: dict[int, int] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context manager in which the layers' modules report to this tracer. It restores them."""
        inside_blocks: set[nn.Module] = set()
        for layer in self._partition.streamed:
            inside_blocks.update(layer.modules[0].modules())
        with ExitStack() as undo:
            for layer in self._partition.layers:
                for module in layer.modules:
                    call: Callable[..., Any]
                    if layer.streamed:
                        call = _BlockCall(self, layer.index, module)
                    elif module not in inside_blocks:
                        call = functools.partial(self._run_resident, layer.index, module.forward)
                    else:
                        continue
                    undo.enter_context(_calling(module, call))
            undo.enter_context(saved_tensors_hooks(self._pack, _unpack))
            undo.enter_context(GpuOperators())
            undo.enter_context(self._passing)
            undo.enter_context(self._moved)
            undo.enter_context(self._gradients)
            undo.enter_context(self._counter)
            yield

    def trace_backward(self, loss: torch.Tensor | None) -> None:
        """Run backward of the loss, for its transient bytes: through the head, to the last block
        that did not run. A parameter's gradient is freed once it is complete, as in training."""
        self._settle()
        self._forward_is_over = True
        if loss is not None:
            torch.autograd.backward(loss)

    def settle_head(self, *, divided: bool) -> None:
        """Correct the head's costs if its logits are divided into parts.

        Forward then counts two of four products ([Note: four products] of `model.logits`). The
        usual backward has twice the forward's FLOPs, so forward's share of four is a third: 4 / 3.
        Other operators pass over the logits in forward as often as in backward, too.

        A frozen head has these two products and no more, and operators in forward alone. So its
        backward counts one product, as of any frozen weight.
        """
        if not divided:
            return
        head = self._outside
        layer = self._partition.layers[head]
        trains = any(named.parameter.requires_grad for named in layer.parameters)
        self._flops[head] *= 2 / 3 if trains else 1 / 2
        self._operator_bytes[head] *= 2 / 3 if trains else 1 / 3
        self._gradient_flops[head] = self._flops[head] * (2 if trains else 1)

    def costs(self) -> tuple[LayerCost, ...]:
        """The costs of each layer, once the forward is over."""
        shared = {key for key, blocks in self._entered.items() if len(blocks) > 1}
        saved = [0] * len(self._flops)
        boundary = [0] * len(self._flops)
        for key in shared:
            saved[self._around[key]] += self._bytes[key]
        counted = set(shared)
        for layer, key in self._saved:
            if key not in counted:
                counted.add(key)
                saved[layer] += self._bytes[key]
        for key, blocks in self._entered.items():
            if key not in shared:
                boundary[next(iter(blocks))] += self._bytes[key]
        kept = {self._passing.number(storage) for storage in self._held.values()}
        passing = self._passing.most(len(saved), kept)
        layers: list[LayerCost] = []
        for index, calls in enumerate(self._attended):
            attention = total_attention(calls)
            ran = self._like.get(index, index)  # the layer that ran in its place
            layers.append(
                LayerCost(
                    forward_flops=self._flops[index],
                    saved_bytes=saved[index],
                    boundary_bytes=boundary[index],
                    passing_bytes=passing[ran],
                    attention_flops=attention.flops,
                    attention_bytes=attention.nbytes,
                    causal_flops=self._causal_flops[index],
                    head_width=self._head_width.get(ran, 0),
                    operator_bytes=self._operator_bytes[index],
                    gradients_per_product=self._gradients_per_product(index, attention.flops),
                )
            )
        return tuple(layers)

    def _gradients_per_product(self, index: int, attention_flops: float) -> float:
        """FLOPs of the layer's products in backward, by those in forward; 2 without products."""
        products = self._flops[index] - attention_flops
        return self._gradient_flops[index] / products if products > 0.0 else 2.0

    # -- the running layer ------------------------------------------------------------------------
    def _run_resident(
        self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of a resident layer's module."""
        if self._forward_is_over:
            return forward(*args, **kwargs)
        self._settle()  # work before this call belongs to the layer before
        self._outside = layer
        with self._running_layer(layer):
            return forward(*args, **kwargs)

    def run_block(self, call: _BlockCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward of a block, or answer like an earlier call ([Note: alike])."""
        layer = call.layer
        is_recomputation = self._forward_is_over or layer in self._running
        if is_recomputation:
            return call.forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        with self._running_layer(layer):
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    self._enter(layer, leaf)
            key = (call.structure, spec, leaf_kinds(leaves), torch.is_grad_enabled())
            if key in self._known:
                return self._answer(layer, self._known[key], leaves)
            num_saved = len(self._saved)
            num_attended = len(self._attended[layer])
            output = call.forward(*args, **kwargs)
            counts = self._settle()
            saved = {storage: self._bytes[storage] for _, storage in self._saved[num_saved:]}
            answer = answer_like(saved, leaves, output, self._key)
            if answer is not None:
                attended = self._attended[layer][num_attended:]
                self._known[key] = _KnownCall(layer, counts, answer, attended)
            return output

    def _answer(self, layer: int, known: _KnownCall, leaves: Sequence[Any]) -> Any:
        """The output of a block that does not run. Counts the costs of the known call."""
        self._like[layer] = known.layer
        self._attended[layer] += known.attended
        self._charge(layer, known.counts)
        output, tensors = known.answer(leaves)
        self._counted = self._total()  # the answer's copies are no work of the model
        self._saved += [(layer, self._key(tensor)) for tensor in tensors]
        return output

    @contextmanager
    def _running_layer(self, index: int) -> Iterator[None]:
        self._settle()
        self._running.append(index)
        try:
            yield
            self._settle()
        finally:
            self._running.pop()

    @property
    def running_layer(self) -> int:
        """The layer that runs, or the resident one that ran last."""
        return self._running[-1] if self._running else self._outside

    # -- the records ------------------------------------------------------------------------------
    def _key(self, tensor: torch.Tensor) -> int:
        """The identity of the tensor's storage, which is kept alive."""
        storage = tensor.untyped_storage()
        key = id(storage)
        self._held[key] = storage
        self._bytes[key] = storage.nbytes()
        return key

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves."""
        if self._forward_is_over:
            return tensor
        key = self._key(tensor)
        if key not in self._weights:
            self._saved.append((self.running_layer, key))
        return tensor

    def _enter(self, layer: int, tensor: torch.Tensor) -> None:
        """Record an input of a block."""
        key = self._key(tensor)
        if key not in self._weights:
            self._entered.setdefault(key, set()).add(layer)
            self._around.setdefault(key, self._outside)

    def attend(
        self, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
    ) -> None:
        """Record a call of an attention kernel."""
        if not self._running or self._forward_is_over:
            return
        layer = self.running_layer
        cost = attention_cost(args[:3], results)
        self._attended[layer].append(cost)
        self._head_width[layer] = args[0].shape[-1]
        if is_causal(kernel, args, kwargs):
            self._causal += cost.flops

    def _settle(self) -> _Counts:
        """Charge the counts since the last call to the running layer. Returns them."""
        before = self._counted
        self._counted = self._total()
        new = _Counts(*map(operator.sub, self._counted, before))
        self._charge(self.running_layer, new)
        return new

    def _total(self) -> _Counts:
        flops = float(self._counter.get_total_flops())
        return _Counts(flops, self._causal, float(self._moved.total), self._gradients.total)

    def _charge(self, layer: int, counts: _Counts) -> None:
        """Add the counts to the layer's costs."""
        self._flops[layer] += counts.flops
        self._causal_flops[layer] += counts.causal
        self._operator_bytes[layer] += counts.nbytes
        self._gradient_flops[layer] += counts.gradients


class _BlockCall:
    """The forward of one block while a tracer is attached."""

    def __init__(self, tracer: _Tracer, layer: int, block: nn.Module) -> None:
        self._tracer = tracer
        self.layer = layer
        self.forward: Callable[..., Any] = block.forward
        self.structure = structure(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tracer.run_block(self, args, kwargs)


def _unpack(packed: Any) -> Any:
    return packed


@contextmanager
def _calling(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which calls of `module` go to `call`. It restores `forward`."""
    instance_forward = vars(module).get("forward")
    module.forward = call
    try:
        yield
    finally:
        if instance_forward is None:
            del module.forward
        else:
            module.forward = instance_forward


# -- calls that need not run ----------------------------------------------------------------------
Answer = Callable[[Sequence[Any]], tuple[Any, list[torch.Tensor]]]
"""From the input leaves of a call: its output, and a tensor of each storage that it saves."""


class _KnownCall(NamedTuple):
    """A block's call that ran, for later calls that are like it."""

    layer: int
    counts: _Counts
    answer: Answer
    attended: list[AttentionCost]


def answer_like(
    saved: Mapping[int, int],
    leaves: Sequence[Any],
    output: Any,
    key_of: Callable[[torch.Tensor], int],
) -> Answer | None:
    """The function that answers calls like the one with these input `leaves` and `output`.

    `saved` has bytes by storage. `key_of` gives a tensor's storage. The function keeps no tensor of
    the call alive. None if outputs share memory with each other, or are views of an input.
    """
    inputs: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            inputs.setdefault(key_of(leaf), number)
    output_leaves, spec = tree_flatten(output)
    makers: list[Callable[[Sequence[Any]], Any]] = []
    outputs: dict[int, int] = {}
    for number, leaf in enumerate(output_leaves):
        if not isinstance(leaf, torch.Tensor):
            makers.append(functools.partial(_constant, leaf))
            continue
        input_number = _position_of(leaf, leaves)
        if input_number is not None:
            makers.append(operator.itemgetter(input_number))
            continue
        key = key_of(leaf)
        if key in outputs or key in inputs:
            return None
        outputs[key] = number
        form = leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
        makers.append(functools.partial(_new, *form))
    return functools.partial(_answer, makers, spec, saved, inputs, outputs)


def _position_of(leaf: Any, leaves: Sequence[Any]) -> int | None:
    """The number of the same object among `leaves`, or None."""
    for number, other in enumerate(leaves):
        if other is leaf:
            return number
    return None


def _answer(
    makers: Sequence[Callable[[Sequence[Any]], Any]],
    spec: TreeSpec,
    saved: Mapping[int, int],
    inputs: Mapping[int, int],
    outputs: Mapping[int, int],
    leaves: Sequence[Any],
) -> tuple[Any, list[torch.Tensor]]:
    """An output like the known call's, and a tensor of each storage that the call would save."""
    output_leaves = [make(leaves) for make in makers]
    kept: list[torch.Tensor] = []
    for key, nbytes in saved.items():
        if key in inputs:
            kept.append(leaves[inputs[key]])
        elif key in outputs:
            kept.append(output_leaves[outputs[key]])
        else:
            kept.append(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    return tree_unflatten(output_leaves, spec), kept


def _constant(leaf: Any, _: Sequence[Any]) -> Any:
    return leaf


def _new(shape: Any, stride: Any, dtype: torch.dtype, requires_grad: bool, _: Any) -> torch.Tensor:
    new = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    # The clone is no leaf: the model may change its blocks' outputs in place.
    return new.requires_grad_().clone() if requires_grad else new


def structure(block: nn.Module) -> tuple[Any, ...]:
    """All properties of a block that decide its computation, except values ([Note: alike])."""
    modules: list[Any] = []
    for name, module in block.named_modules():
        settings = [
            (key, _setting(value)) for key, value in vars(module).items() if key not in _IRRELEVANT
        ]
        parameters = [(key, _kind(value)) for key, value in module._parameters.items()]
        buffers = [(key, _kind(value)) for key, value in module._buffers.items()]
        modules.append((name, type(module), tuple(settings), tuple(parameters), tuple(buffers)))
    return tuple(modules)


def leaf_kinds(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The properties of each input leaf that decide a block's costs.

    A tensor has the number of the first leaf that shares its memory, too.
    """
    first: dict[int, int] = {}
    kinds: list[Any] = []
    for number, leaf in enumerate(leaves):
        first_number = None
        if isinstance(leaf, torch.Tensor):
            storage = id(leaf.untyped_storage())
            first_number = first.setdefault(storage, number)
        kinds.append((_kind(leaf), first_number))
    return tuple(kinds)


def _setting(value: Any) -> Any:
    """A comparable form of a module's attribute."""
    if isinstance(value, tuple | list | dict | set) and len(value) <= MAX_CONTAINER:
        return _NUMBER_IN_PATH.sub(".", repr(value))
    if isinstance(value, functools.partial):
        return id(value.func), repr(value.args), repr(value.keywords)
    return _kind(value)


def _kind(value: Any) -> Any:
    """A comparable form of a value: a tensor's layout, a plain value, or the object's identity."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, str | int | float | None | torch.dtype):
        return value
    return id(value)


# -- transient bytes ------------------------------------------------------------------------------
class TransientBytes(TorchDispatchMode):
    """Context manager that records the storages that operations make, and when these are freed.

    It passes calls of attention kernels on to the tracer, which knows the running layer.
    """

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer
        # (storage, bytes or minus them, layer)
        self._events: list[tuple[int, int, int]] = []
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._num_storages = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.number(leaf.untyped_storage())
        if func in ATTENTION_KERNELS:
            self._tracer.attend(func, args, kwargs or {}, result)
        return result

    def number(self, storage: torch.UntypedStorage) -> int:
        """The storage's number in the timeline. An address may be used again, a number is not."""
        key = id(storage)
        nbytes = storage.nbytes()
        if key in self._alive:
            return self._alive[key][0]
        self._num_storages += 1
        number = self._num_storages
        freed = functools.partial(self._freed, key, number, nbytes)
        self._alive[key] = (number, weakref.ref(storage, freed))
        self._events.append((number, nbytes, self._tracer.running_layer))
        return number

    def _freed(self, key: int, number: int, nbytes: int, _: Any) -> None:
        """Record that a storage is freed."""
        del self._alive[key]
        self._events.append((number, -nbytes, -1))

    def most(self, num_layers: int, kept: Container[int]) -> list[int]:
        """By layer, the most bytes at once while it ran, of storages that are not in `kept`."""
        most = [0] * num_layers
        live_bytes = 0
        for number, nbytes, layer in self._events:
            if number in kept:
                continue
            live_bytes += nbytes
            if layer >= 0:
                most[layer] = max(most[layer], live_bytes)
        return most
