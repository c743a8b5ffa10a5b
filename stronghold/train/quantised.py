"""Replacements in libraries of quantised weights while an engine with such weights lives.

Owns no tensor between calls. The training thread enters in forward, and autograd's thread in
backward.

[Note: weights on ctx]
1. Some autograd Functions of bitsandbytes keep the weight and its scales as attributes of `ctx`.
   So these pass no saved-tensor hook.
2. Hazard: backward reads the attributes when the slot holds another layer. The gradients would be
   wrong, with no error.
3. torchao's `LinearNF4` saves the weight as a wrapper, whose memory no hook can see.
4. So the name of each such Function is replaced. The replacement calls the library's own forward
   and backward with a context of ours. It saves every dense tensor of that context by
   `ctx.save_for_backward`, and puts the tensors back before backward.
5. The library's arithmetic stays: the bits are the same.

[Note: a layout for evaluation]
1. On CPUs with AVX512-BF16, `Linear4bit.forward` in eval mode without gradients rewrites the weight
   and its scales for another kernel, in other dtypes and with rounding.
2. Hazard: the engine would move the old tensors, and training would go on with rounded scales.
3. So while an engine with such weights lives, `Linear4bit` computes as on other CPUs.

[Note: a weight that is there already]
1. torch's `tensor.to(device)` returns the tensor itself if it is on that device. bitsandbytes'
   quantised weights return a new object.
2. PEFT's DoRA puts the result into the module in each forward on a CPU.
3. Hazard: the engine moves the first object. The module would compute with a view of a slot.
4. So while an engine with such weights lives, these weights return themselves, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stronghold.model.inner_tensors import format_of, is_wrapper
from stronghold.private import Replacements

# Module and name of each Function that keeps weights out of sight of saved-tensor hooks.
FUNCTIONS = (
    ("bitsandbytes.autograd._functions", "MatMul4Bit"),
    ("bitsandbytes.autograd._functions", "MatMul8bitLt"),
    ("bitsandbytes.autograd._functions", "MatMul8bitFp"),
    ("torchao.quantization.quantize_.workflows.nf4.nf4_tensor", "LinearNF4"),
)
# Classes of objects that such a Function keeps on `ctx`, and that hold tensors as attributes.
_STATES = {"QuantState", "MatmulLtState"}


def replace_quantised(replacements: Replacements, tensors: Iterable[torch.Tensor]) -> None:
    """Replace the names if one of `tensors` is quantised, or is an inner tensor of a quantised
    parameter. Safe to call twice."""
    if not any(_is_quantised(tensor) for tensor in tensors):
        return
    for module_name, name in FUNCTIONS:
        if module_name in sys.modules:
            replacements.put(sys.modules[module_name], name, WithSavedTensors)
    if "bitsandbytes.nn.modules" in sys.modules:
        modules = sys.modules["bitsandbytes.nn.modules"]
        replacements.wrap(modules, "_convert_weight_packed_for_cpu", _as_it_is)
        replacements.wrap(modules.Params4bit, "to", itself_if_there)
        replacements.wrap(modules.Int8Params, "to", itself_if_there)


def _is_quantised(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter) or format_of(tensor) is not None


def _as_it_is(original: Any, weight: torch.Tensor, state: Any, *args: Any) -> tuple[Any, Any]:
    """Replace `_convert_weight_packed_for_cpu` ([Note: a layout for evaluation])."""
    return weight, state


def itself_if_there(original: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `Params4bit.to` and `Int8Params.to` ([Note: a weight that is there already])."""
    like = torch.empty(0, dtype=weight.dtype, device=weight.device)
    if _has_codes(weight) and like.to(*args, **kwargs) is like:
        return weight
    return original(weight, *args, **kwargs)


def _has_codes(weight: Any) -> bool:
    """True if bitsandbytes has quantised the weight. `to` quantises other ones.

    PEFT merges into decoded values that it gives a weight's old `quant_state`.
    """
    return getattr(weight, "bnb_quantized", False) or weight.dtype is torch.int8


# -- Functions that save tensors -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WithSavedTensors:
    """Stands for a library's autograd Function, `original` ([Note: weights on ctx])."""

    original: type[torch.autograd.Function]

    def apply(self, *args: Any) -> Any:
        """Call the Function as `original.apply` does."""
        return _save_and_call(self.original, *args)


class _Context:
    """Stands for autograd's context in a library's forward and backward."""

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


class _Saving(torch.autograd.Function):
    """Calls `original.forward` and `original.backward`. The first argument is `original`."""

    @staticmethod
    def forward(ctx: Any, original: Any, *args: Any) -> Any:
        inner = _Context(ctx.needs_input_grad[1:])
        result = original.forward(inner, *args)
        tensors: list[torch.Tensor] = []
        ctx.attributes = {key: _taken_out(value, tensors) for key, value in vars(inner).items()}
        ctx.original = original
        ctx.save_for_backward(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inner = _Context(ctx.needs_input_grad[1:])
        tensors = ctx.saved_tensors
        for key, value in ctx.attributes.items():
            setattr(inner, key, _put_back(value, tensors))
        return None, *ctx.original.backward(inner, *gradients)


_save_and_call: Any = _Saving.apply


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the saved tensor with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class _State:
    """Stands for an object of a library. `held` has its attributes with tensors, taken out."""

    state: Any
    held: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrapper:
    """Stands for a wrapper subclass. `inner` has its inner tensors, taken out."""

    made_by: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _taken_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` without tensors. Each tensor goes to the end of `tensors`."""
    if isinstance(value, torch.Tensor):
        if is_wrapper(value):
            return _wrapper_taken_out(value, tensors)
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(_taken_out(item, tensors) for item in value)
    if type(value).__name__ in _STATES:
        held = {}
        for key, item in vars(value).items():
            taken_out = _taken_out(item, tensors)
            if taken_out is not item:
                held[key] = taken_out
        # Another forward may change the object, and the engine points its tensors elsewhere.
        return _State(copy.copy(value), held)
    return value


def _wrapper_taken_out(wrapper: Any, tensors: list[torch.Tensor]) -> _Wrapper:
    names, context = wrapper.__tensor_flatten__()
    return _Wrapper(
        made_by=type(wrapper),
        inner={name: _taken_out(getattr(wrapper, name), tensors) for name in names},
        context=context,
        size=wrapper.size(),
        stride=wrapper.stride(),
    )


def _put_back(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value from which `_taken_out` made `value`, with `tensors` in it."""
    if isinstance(value, _Place):
        return tensors[value.number]
    if type(value) in (tuple, list):
        return type(value)(_put_back(item, tensors) for item in value)
    if isinstance(value, _State):
        state = copy.copy(value.state)
        for key, item in value.held.items():
            setattr(state, key, _put_back(item, tensors))
        return state
    if isinstance(value, _Wrapper):
        inner = {name: _put_back(item, tensors) for name, item in value.inner.items()}
        return value.made_by.__tensor_unflatten__(inner, value.context, value.size, value.stride)
    return value
