"""Costs: what each layer's forward computes and moves, and what autograd keeps until backward.

Owns the counting, by one forward pass over tensors without memory. Reads no value, leaves the model
as it was. Entered by one thread, before training; needs neither a GPU nor weights.

A block that is called like one before it is not run again: it answers with tensors of the same
shapes, and what the first one computed and saved is entered once more.

[Note: shared] What enters two different blocks (rotary tables, masks, an encoder's output) is kept
once, whatever policy the blocks have: it is charged to the resident layer that ran before them, and
to no block.

[Note: alike] Calls are alike when the blocks' classes, settings and shapes of parameters are, and
the inputs'. Settings are every attribute but the block's number: a difference that does not matter
costs the time of tracing a block, an overlooked one would be a wrong number.

[Note: replay] Whether a storage will be kept is known only after the operation that made it. So the
timeline is recorded first and judged when everything is known.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
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
    AsOnGpu,
    Attended,
    attended,
    in_all,
    is_causal,
)
from stronghold.model.logits import LogitsInParts
from stronghold.model.operator_bytes import OperatorBytes
from stronghold.model.partition import Layer, Partition

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Attributes that number a block.
INDEX_NAMES = frozenset(
    {"block_idx", "idx", "index", "layer_id", "layer_idx", "layer_index", "layer_number"}
)
MAX_CONTAINER = 100  # a longer list is compared by identity
_IRRELEVANT = INDEX_NAMES | (vars(nn.Module()).keys() - {"training"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer's forward of one micro-batch. `forward_flops`: of matrix products, convolutions and
    attention, as torch's `FlopCounterMode` counts them (a causal attention like one without a
    mask). `operator_bytes`: bytes of device memory that all other operators read and write
    (`model.operator_bytes`). `saved_bytes`: what autograd keeps until backward, without parameters
    and buffers, every storage once in the model. `boundary_bytes`: the tensors that enter a block,
    which recomputation keeps in their place. Neither counts what enters several blocks ([Note:
    shared]). `passing_bytes`: the most that it has at once beside what is saved; for the layer that
    ran last, the head, also in the loss and its backward. `attention_*`: of a block's fused
    attention, parts of `forward_flops` and `saved_bytes`; `causal_flops` of `attention_flops` are
    of calls with a causal mask; `head_width` is the size of one head's query."""

    forward_flops: float
    saved_bytes: int
    boundary_bytes: int
    passing_bytes: int = 0
    attention_flops: float = 0.0
    attention_bytes: int = 0
    causal_flops: float = 0.0
    head_width: int = 0
    operator_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """By layer, for one micro-batch; `dtype` is the precision: "bf16", "fp16" or "fp32"; `seq`
    the tokens of a sequence."""

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
    """The costs of `model`, in training or evaluation mode as it is, on a GPU. Values of parameters
    are not used. `inputs` are the keyword arguments of one call, on the meta device; without them
    the model gets token ids of `batch` by `seq`, and labels where it takes them. Logits are
    computed in parts where they are for the engine without a key (`logits`);
    `scaled_dot_product_attention` costs what the fused kernel of a GPU does. Work outside the
    layers' modules belongs to the resident layer that ran last.

    ConfigError for arguments of forward that are not known here, and for a forward that depends on
    values.
    """
    given = dict(inputs) if inputs is not None else _token_inputs(model, batch, seq)
    weights = _without_memory(model, DTYPES[dtype])
    tracer = _Tracer(partition, weights)
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    parts = LogitsInParts(model, None)
    with contextlib.closing(parts), tracer.attached(), torch.enable_grad():
        try:
            functional_call(_Step(model, tracer), named, (), given)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{type(model).__name__}: a step failed on tensors without values, so that "
                f"its costs cannot be counted before a run: {type(error).__name__}: {reason}"
            ) from error
        tracer.settle_head(divided=parts.num_divided > 0)
    return ModelCosts(layers=tracer.costs(), dtype=dtype, seq=seq)


class _Counts(NamedTuple):
    """FLOPs, those of attention with a causal mask, and bytes of other operators."""

    flops: float
    causal: float
    nbytes: float


class _OneModule(contextlib.nullcontext[None]):
    """For the counter: which module runs is known here, and hooks on every module's output would
    make lazy logits real."""

    parents = ("Global",)


class _Step(nn.Module):
    """Forward and backward while the model has the weights without memory: the user's own
    checkpointing calls it again in backward."""

    def __init__(self, model: nn.Module, tracer: _Tracer) -> None:
        super().__init__()
        self.model = model
        self._tracer = tracer

    def forward(self, **given: Any) -> None:
        # Of the output the loss alone lives on, as in a training loop.
        self._tracer.trace_backward(_loss(self.model(**given)))


def _loss(output: Any) -> torch.Tensor | None:
    """The output's first scalar with a graph."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return next((leaf for leaf in leaves if leaf.requires_grad and leaf.numel() == 1), None)


def _token_inputs(model: nn.Module, batch: int, seq: int) -> dict[str, Any]:
    """Arguments of a language model's forward: ids, labels where they are known, and no cache, as a
    trainer calls it."""
    parameters = inspect.signature(model.forward).parameters
    ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
    known = {"input_ids": ids, "labels": ids, "use_cache": False}
    given = {name: value for name, value in known.items() if name in parameters}
    unnamed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in given
    ]
    if "input_ids" not in given and unnamed:  # nanoGPT's `idx`, a Sequential's `input`
        given[unnamed.pop(0)] = ids
    if unnamed or not given:
        raise ConfigError(
            f"{type(model).__name__}.forward needs {', '.join(unnamed) or 'unnamed arguments'}, "
            "which are not known here; expected a model that is called with input_ids (and labels)"
        )
    return given


def _without_memory(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters in `dtype` and buffers, by name, tied ones once, on the meta device."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        found[name] = torch.empty_like(
            parameter, dtype=kind, device="meta", requires_grad=parameter.requires_grad
        )
        if parameter.requires_grad:
            found[name].register_post_accumulate_grad_hook(_drop_gradient)
    for name, buffer in model.named_buffers():
        found[name] = torch.empty_like(buffer, device="meta")
    return found


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


# -- tracing --------------------------------------------------------------------------------------
class _Tracer:
    """The books of one forward pass: who is running, what was saved, what entered which block."""

    def __init__(self, partition: Partition, weights: Mapping[str, torch.Tensor]) -> None:
        self._partition = partition
        self._flops = [0.0] * len(partition.layers)
        self._causal_flops = [0.0] * len(partition.layers)
        self._operator_bytes = [0.0] * len(partition.layers)
        self._saved: list[tuple[int, int]] = []  # (layer, storage), first come first served
        self._entered: dict[int, set[int]] = {}  # storage -> blocks
        self._around: dict[int, int] = {}  # storage -> resident layer that ran last, on entry
        self._bytes: dict[int, int] = {}
        # Storages by identity; held, so that none is reused for another.
        self._held: dict[int, torch.UntypedStorage] = {}
        self._attended: list[list[Attended]] = [[] for _ in partition.layers]
        self._passing = Passing(lambda: self._now, self._attend)
        self._weights = {self._key(tensor) for tensor in weights.values()}
        self._running: list[int] = []
        self._forward_is_over = False
        resident = [layer.index for layer in partition.layers if not layer.streamed]
        self._outside = resident[0] if resident else 0
        self._counter = FlopCounterMode(display=False, custom_mapping=MORE_FLOPS)
        self._counter.mod_tracker = _OneModule()  # type: ignore[assignment]
        self._moved = OperatorBytes()
        self._causal = 0.0
        self._head_width: dict[int, int] = {}  # of layers that ran
        self._counted = _Counts(0.0, 0.0, 0.0)
        # The layer that was called, its counts, how to answer as it did, and what attention took.
        self._known: dict[Any, tuple[int, _Counts, Answer, list[Attended]]] = {}
        self._like: dict[int, int] = {}  # layer that did not run -> layer that ran in its place

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The layers' modules report to this tracer inside, and are as before afterwards."""
        inside = {
            inner for layer in self._partition.streamed for inner in layer.modules[0].modules()
        }
        with ExitStack() as undo:
            for layer in self._partition.layers:
                for module in layer.modules:
                    if layer.streamed:
                        undo.enter_context(_calling(module, self._block_call(layer, module)))
                    elif module not in inside:
                        undo.enter_context(_calling(module, self._resident_call(layer, module)))
            undo.enter_context(saved_tensors_hooks(self._pack, lambda packed: packed))
            undo.enter_context(AsOnGpu())
            undo.enter_context(self._passing)
            undo.enter_context(self._moved)
            undo.enter_context(self._counter)
            yield

    def trace_backward(self, loss: torch.Tensor | None) -> None:
        """Backward of the loss, for what it has in passing: through the head, to the last block
        that did not run. A parameter's gradient is gone when it is whole, as in a training step."""
        self._settle()
        self._forward_is_over = True
        if loss is not None:
            torch.autograd.backward(loss)

    def settle_head(self, *, divided: bool) -> None:
        """Of logits in parts two of four products were counted in forward ([Note: four products] of
        `logits`), and backward is taken for two of three: a third of all. Other operators pass over
        the logits in forward as often as in backward, too."""
        if divided:
            self._flops[self._outside] *= 2 / 3
            self._operator_bytes[self._outside] *= 2 / 3

    def costs(self) -> tuple[LayerCost, ...]:
        """Per layer, once the forward is over."""
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
        attended = [in_all(calls) for calls in self._attended]
        return tuple(
            LayerCost(
                forward_flops=self._flops[index],
                saved_bytes=saved[index],
                boundary_bytes=boundary[index],
                passing_bytes=passing[self._like.get(index, index)],
                attention_flops=attended[index].flops,
                attention_bytes=attended[index].nbytes,
                causal_flops=self._causal_flops[index],
                head_width=self._head_width.get(self._like.get(index, index), 0),
                operator_bytes=self._operator_bytes[index],
            )
            for index in range(len(saved))
        )

    # -- who runs ---------------------------------------------------------------------------------
    def _resident_call(self, layer: Layer, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._forward_is_over:
                return forward(*args, **kwargs)
            self._settle()  # what ran before this call belongs to the layer before
            self._outside = layer.index
            with self._running_layer(layer.index):
                return forward(*args, **kwargs)

        return call

    def _block_call(self, layer: Layer, block: nn.Module) -> Callable[..., Any]:
        forward, made_like = block.forward, structure(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._forward_is_over or layer.index in self._running:  # the same call, again
                return forward(*args, **kwargs)
            leaves, spec = tree_flatten((args, kwargs))
            with self._running_layer(layer.index):
                for leaf in leaves:
                    if isinstance(leaf, torch.Tensor):
                        self._enter(layer.index, leaf)
                kind = (made_like, spec, kinds(leaves), torch.is_grad_enabled())
                if kind in self._known:
                    self._like[layer.index], counts, answer, calls = self._known[kind]
                    self._attended[layer.index] += calls
                    self._charge(layer.index, counts)
                    output, tensors = answer(leaves)
                    self._counted = self._total()  # the answer's copies are not the model's
                    self._saved += [(layer.index, self._key(tensor)) for tensor in tensors]
                    return output
                begin, attended = len(self._saved), len(self._attended[layer.index])
                output = forward(*args, **kwargs)
                counts = self._settle()
                saved = {key: self._bytes[key] for _, key in self._saved[begin:]}
                found = answer_like(saved, leaves, output, self._key)
                if found is not None:
                    calls = self._attended[layer.index][attended:]
                    self._known[kind] = layer.index, counts, found, calls
                return output

        return run

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
    def _now(self) -> int:
        return self._running[-1] if self._running else self._outside

    # -- the books --------------------------------------------------------------------------------
    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        self._held[key] = storage
        self._bytes[key] = storage.nbytes()
        return key

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._forward_is_over:
            return tensor
        key = self._key(tensor)
        if key not in self._weights:
            self._saved.append((self._now, key))
        return tensor

    def _enter(self, layer: int, tensor: torch.Tensor) -> None:
        key = self._key(tensor)
        if key not in self._weights:
            self._entered.setdefault(key, set()).add(layer)
            self._around.setdefault(key, self._outside)

    def _attend(
        self, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
    ) -> None:
        if not self._running or self._forward_is_over:
            return
        call = attended(args[:3], results)
        self._attended[self._now].append(call)
        self._causal += call.flops if is_causal(kernel, args, kwargs) else 0.0
        self._head_width[self._now] = args[0].shape[-1]

    def _settle(self) -> _Counts:
        """Charge what was counted since the last call to the layer that runs; returns it."""
        before, self._counted = self._counted, self._total()
        new = _Counts(*map(operator.sub, self._counted, before))
        self._charge(self._now, new)
        return new

    def _total(self) -> _Counts:
        flops = float(self._counter.get_total_flops())
        return _Counts(flops, self._causal, float(self._moved.total))

    def _charge(self, layer: int, counts: _Counts) -> None:
        self._flops[layer] += counts.flops
        self._causal_flops[layer] += counts.causal
        self._operator_bytes[layer] += counts.nbytes


@contextmanager
def _calling(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Calls of `module` go to `call` inside; an instance's own `forward` is put back."""
    own = vars(module).get("forward")
    module.forward = call
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


# -- calls that need not run ----------------------------------------------------------------------
# From the input leaves of a call: its output, and a tensor of each storage that it saves.
Answer = Callable[[Sequence[Any]], tuple[Any, list[torch.Tensor]]]


def answer_like(
    saved: Mapping[int, int],
    leaves: Sequence[Any],
    output: Any,
    key_of: Callable[[torch.Tensor], int],
) -> Answer | None:
    """How to answer calls that are like the one with these input `leaves` and `output`; None when
    outputs share memory with each other or are views of an input. `saved`: bytes by storage;
    `key_of`: the storage of a tensor. Nothing of the call lives on in the answer."""
    inputs: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            inputs.setdefault(key_of(leaf), number)
    outputs, spec = tree_flatten(output)
    makers: list[Callable[[Sequence[Any]], Any]] = []
    made: dict[int, int] = {}
    for number, leaf in enumerate(outputs):
        alias = next((i for i, other in enumerate(leaves) if other is leaf), None)
        if not isinstance(leaf, torch.Tensor):
            makers.append(functools.partial(_given, leaf))
        elif alias is not None:
            makers.append(operator.itemgetter(alias))
        elif (key := key_of(leaf)) in made or key in inputs:
            return None
        else:
            made[key] = number
            form = leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
            makers.append(functools.partial(_new, *form))
    return functools.partial(_answer, makers, spec, saved, inputs, made)


def _answer(
    makers: Sequence[Callable[[Sequence[Any]], Any]],
    spec: TreeSpec,
    saved: Mapping[int, int],
    inputs: Mapping[int, int],
    made: Mapping[int, int],
    leaves: Sequence[Any],
) -> tuple[Any, list[torch.Tensor]]:
    answers = [make(leaves) for make in makers]
    kept = [
        leaves[inputs[key]]
        if key in inputs
        else answers[made[key]]
        if key in made
        else torch.empty(nbytes, dtype=torch.uint8, device="meta")
        for key, nbytes in saved.items()
    ]
    return tree_unflatten(answers, spec), kept


def _given(leaf: Any, _: Sequence[Any]) -> Any:
    return leaf


def _new(shape: Any, stride: Any, dtype: torch.dtype, requires_grad: bool, _: Any) -> torch.Tensor:
    new = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    # The clone is no leaf: the model may change its blocks' outputs in place.
    return new.requires_grad_().clone() if requires_grad else new


def structure(block: nn.Module) -> tuple[Any, ...]:
    """Everything of a block that decides what it computes, except values ([Note: alike])."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, _setting(value))
                for key, value in vars(module).items()
                if key not in _IRRELEVANT
            ),
            tuple((key, _kind(value)) for key, value in module._parameters.items()),
            tuple((key, _kind(value)) for key, value in module._buffers.items()),
        )
        for name, module in block.named_modules()
    )


def kinds(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What decides of each input leaf; of tensors that share memory also which is the first."""
    first: dict[int, int] = {}
    found = []
    for number, leaf in enumerate(leaves):
        shares = None
        if isinstance(leaf, torch.Tensor):
            shares = first.setdefault(id(leaf.untyped_storage()), number)
        found.append((_kind(leaf), shares))
    return tuple(found)


def _setting(value: Any) -> Any:
    if isinstance(value, tuple | list | dict | set) and len(value) <= MAX_CONTAINER:
        return repr(value)
    if isinstance(value, functools.partial):
        return id(value.func), repr(value.args), repr(value.keywords)
    return _kind(value)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, str | int | float | None | torch.dtype):
        return value
    return id(value)


# -- bytes in passing -----------------------------------------------------------------------------
class Passing(TorchDispatchMode):
    """Records what every operation makes, and when it is gone. `running` names the layer;
    `attend` is called with each of attention's kernels, its arguments and its results."""

    def __init__(self, running: Callable[[], int], attend: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = running
        self._attend = attend
        self._events: list[tuple[int, int, int]] = []  # (storage, bytes or minus them, layer)
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
            self._attend(func, args, kwargs or {}, result)
        return result

    def number(self, storage: torch.UntypedStorage) -> int:
        """The storage's number in the timeline; addresses are used again, numbers are not."""
        key, nbytes = id(storage), storage.nbytes()
        if key in self._alive:
            return self._alive[key][0]
        self._num_storages += 1
        number = self._num_storages

        def gone(_: Any) -> None:
            del self._alive[key]
            self._events.append((number, -nbytes, -1))

        self._alive[key] = (number, weakref.ref(storage, gone))
        self._events.append((number, nbytes, self._running()))
        return number

    def most(self, num_layers: int, kept: Container[int]) -> list[int]:
        """Per layer the most bytes at once, while it ran, of storages not in `kept`."""
        most, now = [0] * num_layers, 0
        for number, nbytes, layer in self._events:
            if number in kept:
                continue
            now += nbytes
            if layer >= 0:
                most[layer] = max(most[layer], now)
        return most
