"""Costs: FLOPs and bytes of each layer's forward and backward, and the bytes that autograd saves.

Owns the counting, by one step over tensors without memory. Reads no value and leaves the model
unchanged. One thread enters it, before training. It needs neither a GPU nor weights.

Each kind of block runs once, forward and backward, on its own. In the model's step a function takes
the place of each block. It makes the tensors that the block would make, and counts nothing.

[Note: shared]

1. A tensor may enter two different blocks: rotary tables, masks, an encoder's output.
2. It is kept once, whatever the blocks' activation levels.
3. It counts for the resident layer that ran before them, and for no block.

[Note: alike]

1. Calls are of one kind if the blocks' classes, settings and shapes of parameters are equal, and
   the shapes of the inputs.
2. Settings are all attributes but the block's number.
3. A difference without effect costs the time of running a block. An overlooked difference would
   give a wrong number.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import random
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from stronghold.errors import ConfigError
from stronghold.model.logits import LogitsInParts
from stronghold.model.operators import Counts, GpuOperators, OperatorCounts
from stronghold.model.packed_weight import STORED_BYTES, PackedWeight
from stronghold.model.partition import Partition

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Attributes that number a block.
INDEX_NAMES = frozenset(
    {"block_idx", "idx", "index", "layer_id", "layer_idx", "layer_index", "layer_number"}
)
HOOKS_AFTER = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
CONTAINERS = (list, dict, set, OrderedDict, defaultdict)  # subclasses may forbid to change them
MAX_CONTAINER = 100  # longer containers are compared by identity
# A block's number in a module's path, which PEFT's layers keep in a dict.
_NUMBER_IN_PATH = re.compile(r"\.\d+\.")
_IRRELEVANT = INDEX_NAMES | (vars(nn.Module()).keys() - {"training"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The costs of one layer in one micro-batch.

    forward, backward  what the layer's operators compute and move. Backward has the products of the
                       gradients that are needed: for one product of forward two, or one if its
                       weight is frozen. Attention counts in forward alone
    saved_bytes        tensors that autograd saves until backward, without parameters and buffers.
                       Each storage counts once in the model
    boundary_bytes     tensors that enter a block. Recomputation keeps them in place of saved
                       tensors. Neither number counts a tensor that enters several blocks ([Note:
                       shared])
    passing_bytes      the most transient bytes at once, beside the saved ones: in a block's forward
                       and backward; for the layer that ran last, the head, also in the loss. 0 for
                       other layers
    """

    forward: Counts
    backward: Counts
    saved_bytes: int
    boundary_bytes: int
    passing_bytes: int = 0

    @property
    def forward_flops(self) -> float:
        """FLOPs of forward: products and attention."""
        return self.forward.product_flops + self.forward.attention_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """The costs of a model, by layer, for one micro-batch.

    `dtype` is the precision: "bf16", "fp16" or "fp32".
    """

    layers: tuple[LayerCost, ...]
    dtype: str


def trace_costs(
    model: nn.Module,
    partition: Partition,
    *,
    batch: int,
    seq: int,
    dtype: str,
    inputs: Mapping[str, Any] | None = None,
) -> ModelCosts:
    """Count the costs of `model` with token ids, before any engine has it.

    `inputs` are the keyword arguments of one call. None: token ids int64 [batch, seq], and labels
    if the model takes them. Parameters count in `dtype`. Logits are computed in parts if the engine
    does so by default (`model.logits`).

    ConfigError if forward has arguments that are not known, and as `count_costs`.
    """
    arguments = dict(inputs) if inputs is not None else _token_inputs(model, batch, seq)
    with closing(LogitsInParts(model, None)):
        return count_costs(model, partition, (), arguments, dtype=dtype, cast_to=DTYPES[dtype])


def count_costs(
    model: nn.Module,
    partition: Partition,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dtype: str,
    cast_to: torch.dtype | None = None,
) -> ModelCosts:
    """Count the costs of a call `model(*args, **kwargs)` and its backward on a GPU.

    The model is in its present mode (training or evaluation). Only the values of an attention mask
    are read. Parameters have the dtype `cast_to`, or their own.

    1. `scaled_dot_product_attention` costs as much as a GPU's fused kernel.
    2. Work outside the layers' modules counts for the resident layer that ran last.
    3. If the call returns no loss, the program is taken to compute one from each output by a
       log-softmax in fp32.
    4. Of hooks on modules only those before a forward run. All attributes of modules, and Python's
       and torch's random numbers on the CPU, are as before.

    ConfigError if the model's code needs values.
    """
    packed = [_packed_weights(layer.modules) for layer in partition.layers]
    with ExitStack() as undo:
        undo.enter_context(_unchanged(model))
        try:
            trace = _Trace(partition, _without_memory(model, cast_to))
            undo.enter_context(trace.attached(is_padded=_is_padded(kwargs)))
            undo.enter_context(torch.enable_grad())
            args, kwargs = tree_map_only(torch.Tensor, _on_meta, (tuple(args), dict(kwargs)))
            # of the output it alone stays alive, as in training
            loss = _loss(model(*args, **kwargs))
            trace.begin_backward()
            if loss is not None:
                loss.backward()
            trace.end()
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{type(model).__name__}: a step failed on tensors without values, so that "
                f"its costs cannot be counted before a run: {type(error).__name__}: {reason}"
            ) from error
    layers = tuple(map(_with_decoding, trace.costs(), packed))
    return ModelCosts(layers=layers, dtype=dtype)


def _packed_weights(modules: Sequence[nn.Module]) -> list[PackedWeight]:
    parameters = itertools.chain.from_iterable(module.parameters() for module in modules)
    return [parameter for parameter in parameters if isinstance(parameter, PackedWeight)]


def _with_decoding(cost: LayerCost, packed: Sequence[PackedWeight]) -> LayerCost:
    """The cost with that of decoding. A trace does not see it, for `PackedWeight` decodes below it.

    An operator decodes its weight in forward and in backward, and frees the values afterwards.
    """
    if not packed:
        return cost
    decoded = [weight.numel() * weight.dtype.itemsize for weight in packed]
    stored = sum(weight.numel() for weight in packed) * STORED_BYTES
    moved = Counts(moved_bytes=stored + sum(decoded))
    return replace(
        cost,
        forward=cost.forward + moved,
        backward=cost.backward + moved,
        passing_bytes=cost.passing_bytes + max(decoded),
    )


def _loss(output: Any) -> torch.Tensor | None:
    """The first scalar of the output that has a graph; else a loss of all that has one, or None."""
    leaves = [leaf for leaf in tree_leaves(output) if getattr(leaf, "requires_grad", False)]
    for leaf in leaves:
        if leaf.numel() == 1:
            return leaf  # type: ignore[no-any-return]
    if not leaves:
        return None
    return torch.stack([leaf.float().log_softmax(-1).sum() for leaf in leaves]).sum()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    return made.requires_grad_(tensor.requires_grad)


def _is_padded(kwargs: Mapping[str, Any]) -> bool:
    """True if an attention mask among the arguments masks a token."""
    masks = [value for name, value in kwargs.items() if "attention_mask" in name]
    return any(isinstance(m, torch.Tensor) and not m.is_meta and not m.all() for m in masks)


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


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Context manager that restores what a forward may change: attributes of modules, the contents
    of their lists, dicts and sets, and random numbers. Of hooks on modules only those before a
    forward run in it."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, copy.copy(value))
        for _, before in attributes
        for value in before.values()
        if type(value) in CONTAINERS
    ]
    for own, _ in attributes:  # probes, which would keep what they see
        own |= {name: OrderedDict() for name in HOOKS_AFTER}
    generators = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        for own, before in attributes:
            own.clear()
            own.update(before)
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def _without_memory(model: nn.Module, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Give the model weights and buffers without memory, and return them. Parameters have `dtype`,
    or their own. They change by hand, since modules may take some out in forward, and put them
    back: PEFT's adapters of fused experts."""
    made: dict[int, torch.Tensor] = {}  # by identity of the model's own; tied ones are one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _weight_like(parameter, dtype)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                made.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
                module._buffers[name] = made[id(buffer)]
    return list(made.values())


def _weight_like(parameter: torch.Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    is_cast = dtype is not None and parameter.is_floating_point()
    # by its shape, for a hidden parameter would wait if its values were asked for
    values = torch.empty(
        parameter.shape, dtype=dtype if is_cast else parameter.dtype, device="meta"
    )
    weight = nn.Parameter(values, requires_grad=parameter.requires_grad)
    if weight.requires_grad:
        weight.register_post_accumulate_grad_hook(_drop_gradient)
    return weight


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


# -- tracing --------------------------------------------------------------------------------------
class _Trace:
    """The records of one step: the running layers, their counts, saved tensors, blocks' inputs."""

    def __init__(self, partition: Partition, weights: Sequence[torch.Tensor]) -> None:
        self._partition = partition
        self._forward = [Counts()] * len(partition.layers)
        self._backward = [Counts()] * len(partition.layers)
        self._is_backward = False
        # Storages by identity. Forward keeps them alive, so that no identity is used again.
        self._held: dict[int, torch.UntypedStorage] = {}
        self._bytes: dict[int, int] = {}
        self._weights = {self._key(tensor) for tensor in weights}
        # (layer, storage); a storage's first layer counts
        self._saved: list[tuple[int, int]] = []
        self._inner_bytes = [0] * len(partition.layers)  # saved inside of blocks
        self._entered: dict[int, set[int]] = {}  # storage -> blocks
        # storage -> resident layer that ran last, on entry
        self._around: dict[int, int] = {}
        # The resident layer that ran last: work outside of all layers counts for it.
        resident = [layer.index for layer in partition.layers if not layer.streamed]
        self._outside = resident[0] if resident else 0
        self._kinds: dict[Any, _Kind] = {}  # by everything in which calls must be alike
        self._operators = OperatorCounts(self._weights)
        self._existed = set(self._held)  # storages that existed when the last block had run
        self._saved_after_blocks = 0  # bytes that autograd saves of what was made after it
        self._passing_bytes = [0] * len(partition.layers)

    @contextmanager
    def attached(self, *, is_padded: bool) -> Iterator[None]:
        """Context manager in which the layers' modules report to this trace. It restores them.

        `is_padded`: an attention mask masks tokens.
        """
        inside_blocks: set[nn.Module] = set()
        for layer in self._partition.streamed:
            inside_blocks.update(layer.modules[0].modules())
        with ExitStack() as undo:
            for layer in self._partition.layers:
                for module in layer.modules:
                    call: Callable[..., Any]
                    if layer.streamed:
                        call = functools.partial(
                            self._run_block, layer.index, module.forward, structure(module)
                        )
                    elif module not in inside_blocks:
                        call = functools.partial(self._run_resident, layer.index, module.forward)
                    else:
                        continue
                    undo.enter_context(_calling(module, call))
            undo.enter_context(saved_tensors_hooks(self._pack, _unpack))
            undo.enter_context(GpuOperators(self._operators, is_padded=is_padded))
            undo.enter_context(self._operators)
            yield

    def begin_backward(self) -> None:
        """Forward is over. What was saved after the blocks lives as long as backward needs it."""
        self._charge()
        self._is_backward = True
        after_blocks = {key for _, key in self._saved} - self._existed
        self._saved_after_blocks = sum(self._bytes[key] for key in after_blocks)
        for key in after_blocks:
            del self._held[key]

    def end(self) -> None:
        """Backward is over."""
        self.passed_back(self._outside)

    def costs(self) -> tuple[LayerCost, ...]:
        """The costs of each layer, once the step is over."""
        shared = {key for key, blocks in self._entered.items() if len(blocks) > 1}
        saved = list(self._inner_bytes)
        boundary = [0] * len(saved)
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
        return tuple(
            LayerCost(
                forward=self._forward[index],
                backward=self._backward[index],
                saved_bytes=saved[index],
                boundary_bytes=boundary[index],
                passing_bytes=self._passing_bytes[index],
            )
            for index in range(len(saved))
        )

    # -- the running layer ------------------------------------------------------------------------
    def _run_resident(
        self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of a resident layer's module."""
        if not self._is_backward:
            self._charge()  # work before this call belongs to the layer before
            self._outside = layer
        return forward(*args, **kwargs)

    def _run_block(
        self,
        layer: int,
        forward: Callable[..., Any],
        structure: tuple[Any, ...],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stand for the forward of a block, after the first call of its kind has run."""
        self._charge()  # work before this call belongs to the layer before
        leaves, spec = tree_flatten((args, kwargs))
        key = (structure, spec, leaf_kinds(leaves), torch.is_grad_enabled())
        if key not in self._kinds:
            self._kinds[key] = self._measured(forward, leaves, spec)
        kind = self._kinds[key]
        self._forward[layer] += kind.forward
        self._backward[layer] += kind.backward
        self._inner_bytes[layer] += kind.inner_bytes
        self._passing_bytes[layer] = max(self._passing_bytes[layer], kind.passing_bytes)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._enter(layer, leaf)
        output = self._stand_in(kind, leaves)
        outputs = tree_leaves(output)
        for leaf in outputs:
            if isinstance(leaf, torch.Tensor):
                self._key(leaf)
        self._saved += [(layer, self._key(leaves[number])) for number in kind.saved_inputs]
        self._saved += [(layer, self._key(outputs[number])) for number in kind.saved_outputs]
        self._existed = set(self._held)
        self._operators.restart_peak()
        return output

    def _measured(
        self, forward: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec
    ) -> _Kind:
        """Run forward and backward of a block on its own, and count them."""
        own = [_alone(leaf) for leaf in leaves]
        args, kwargs = tree_unflatten(own, spec)
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in self._weights:
                saved[id(storage)] = storage
            return tensor

        self._operators.restart_peak()
        with saved_tensors_hooks(pack, _unpack):
            output = forward(*args, **kwargs)
        forward_counts = self._operators.take()
        outputs, output_spec = tree_flatten(output)
        forms = [_form(leaf, own) for leaf in outputs]
        saved_inputs, saved_outputs = _taken_out(saved, own), _taken_out(saved, outputs)
        inner_bytes = sum(storage.nbytes() for storage in saved.values())
        results = [leaf for leaf in outputs if getattr(leaf, "requires_grad", False)]
        saved.clear()  # backward frees what it has used
        del output, outputs
        if results:
            gradients = [torch.empty_like(leaf) for leaf in results]
            torch.autograd.backward(results, gradients)
        return _Kind(
            forward=forward_counts,
            backward=self._operators.take(),
            saved_inputs=saved_inputs,
            saved_outputs=saved_outputs,
            inner_bytes=inner_bytes,
            passing_bytes=max(0, self._operators.peak() - inner_bytes),
            outputs=forms,
            spec=output_spec,
        )

    def _stand_in(self, kind: _Kind, leaves: Sequence[Any]) -> Any:
        """The output of a block of this kind, which does not run."""
        forms = [form for form in kind.outputs if isinstance(form, _NewTensor)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # A block whose inputs need no gradient may have weights that need one.
        anchor = torch.empty(0, device="meta", requires_grad=True)
        apply: Any = _Block.apply
        made = iter(apply(self, self._outside, forms, anchor, *tensors) if forms else ())
        outputs: list[Any] = []
        for form in kind.outputs:
            if isinstance(form, _NewTensor):
                outputs.append(next(made))
            else:
                outputs.append(leaves[form.number] if isinstance(form, _Input) else form)
        return tree_unflatten(outputs, kind.spec)

    def passed_back(self, outside: int) -> None:
        """Backward has come to a block. Then it goes on in the resident layer `outside`."""
        self._charge()
        if self._operators.sees_storages:
            self._operators.sees_storages = False
            passing_bytes = max(0, self._operators.peak() - self._saved_after_blocks)
            self._passing_bytes[self._outside] = passing_bytes
        self._outside = outside

    # -- the records ------------------------------------------------------------------------------
    def _key(self, tensor: torch.Tensor) -> int:
        """The identity of the tensor's storage, which stays alive."""
        storage = tensor.untyped_storage()
        self._held[id(storage)] = storage
        self._bytes[id(storage)] = storage.nbytes()
        return id(storage)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves outside of blocks."""
        if not self._is_backward:
            key = self._key(tensor)
            if key not in self._weights:
                self._saved.append((self._outside, key))
        return tensor

    def _enter(self, layer: int, tensor: torch.Tensor) -> None:
        """Record an input of a block."""
        key = self._key(tensor)
        if key not in self._weights:
            self._entered.setdefault(key, set()).add(layer)
            self._around.setdefault(key, self._outside)

    def _charge(self) -> None:
        """Charge the counts since the last call to the resident layer that ran last."""
        counts = self._backward if self._is_backward else self._forward
        counts[self._outside] += self._operators.take()


class _Block(torch.autograd.Function):
    """Stands for a block: makes its outputs in forward, and the gradients of its inputs in
    backward."""

    @staticmethod
    def forward(
        ctx: Any,
        trace: _Trace,
        outside: int,
        forms: Sequence[_NewTensor],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.trace, ctx.outside = trace, outside
        ctx.forms = [(tensor.shape, tensor.dtype) for tensor in inputs]
        made = tuple(form.make() for form in forms)
        pairs = zip(made, forms, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, form in pairs if not form.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.trace.passed_back(ctx.outside)
        needed = ctx.needs_input_grad[4:]
        return (
            *(None, None, None, None),
            *(
                torch.empty(shape, dtype=dtype, device="meta") if is_needed else None
                for (shape, dtype), is_needed in zip(ctx.forms, needed, strict=True)
            ),
        )


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


# -- kinds of blocks ------------------------------------------------------------------------------
class _NewTensor(NamedTuple):
    """An output that a block makes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Input(NamedTuple):
    """An output that is an input itself."""

    number: int


class _Kind(NamedTuple):
    """The costs of a call of a block, and its outputs, for all calls of the kind ([Note: alike]).

    inner_bytes    saved tensors that are neither inputs nor outputs
    passing_bytes  the most transient bytes at once, in forward and backward
    saved_inputs, saved_outputs  numbers of the inputs and outputs that autograd saves
    outputs        of each output a `_NewTensor`, an `_Input`, or the value itself
    """

    forward: Counts
    backward: Counts
    inner_bytes: int
    passing_bytes: int
    saved_inputs: list[int]
    saved_outputs: list[int]
    outputs: list[Any]
    spec: TreeSpec


def _alone(leaf: Any) -> Any:
    """An input without the graph that it comes from."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _taken_out(saved: dict[int, torch.UntypedStorage], leaves: Sequence[Any]) -> list[int]:
    """Take the storages of these leaves out of `saved`. Return the leaves' numbers."""
    taken: list[int] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) in saved:
            del saved[id(leaf.untyped_storage())]
            taken.append(number)
    return taken


def _form(leaf: Any, inputs: Sequence[Any]) -> Any:
    """A description of an output, for `_Kind`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    for number, other in enumerate(inputs):
        if other is leaf:
            return _Input(number)
    return _NewTensor(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)


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
