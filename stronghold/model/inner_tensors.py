"""Inner tensors: the plain dense tensors that a parameter consists of.

Owns the one table of quantised formats that libraries make (`FORMATS`). No other file branches on a
library's class. Owns no bytes, never copies or decodes a weight, and imports no such library: the
classes of a parameter are compared by name. The training thread enters.

An ordinary parameter is its only inner tensor. A quantised one has several: packed codes, scales,
code books. Each is a dense tensor with a dtype of its own. The engine moves their bytes, and points
each at memory by `tensor.data = view`.

[Note: pointed by .data]
1. The library's objects hold the inner tensors as attributes, and read these in each call.
2. `tensor.data = view` changes where a tensor object points. The object stays the same.
3. So the engine keeps the objects, and never writes an attribute of the library's.
4. This holds as long as no call of the library puts another object in such an attribute.
   bitsandbytes does so in two places: [Note: int8 states], and in `train.quantised`.

[Note: int8 states]
1. The first forward of `Linear8bitLt` moves the attributes `CB` and `SCB` of its weight to the
   module's `state`. The objects stay the same.
2. `CB` is a second tensor object over the weight's memory. So both are pointed (`aliases`).
3. The inner tensors of a weight that has run a forward already are on the module. `settle` gives
   the weight its two attributes back.
4. Hazard: a forward that runs as a trial, or a second time, puts back what the module holds, and
   not what its weight holds. Without scales the library takes the codes for values.
5. So `HeldTensors` moves the attributes before any forward does. No forward finds any to move.

[Note: biases that a forward casts]
1. The first forward of `Linear4bit` points its bias at a copy in the compute dtype.
2. Hazard: the engine refuses a parameter that a program points at other memory.
3. So `settle` does so before the engine takes the bias. The bits are those of the library's.

[Note: the device of a wrapper]
1. A wrapper subclass (torchao) has a device that was fixed when the object was made. Pointing its
   inner tensors at the GPU does not change it: `weight.device` stays the CPU.
2. torchao's products read the inner tensors alone. A test computes forward and backward with
   wrappers whose device is meta. So a block computes while its weights are in a slot.
3. `detach` makes a wrapper anew, and fails if the devices differ. A state dict detaches.
4. So `follow_device` puts a wrapper with the inner tensors' device into the parameter: where the
   weight rests, and before a state dict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stronghold.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InnerTensor:
    """A dense tensor of a parameter.

    name     "" for the parameter's data; otherwise the library's name, in state dicts where it has
             one there: "absmax". The full name of an inner tensor is "PARAMETER.name"
    tensor   the object to point: the parameter itself, or an attribute of the library's. Contiguous
    aliases  further objects of the library over the same memory. They are pointed with `tensor`

    A tensor that several parameters share is the same object in all of them.
    """

    name: str
    tensor: torch.Tensor
    aliases: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The weight that a parameter stands for: its shape, and the dtype that it is decoded to."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


Holder = tuple[Any, str]
"""An object, and the name of its attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFormat:
    """A row: one way in which a library keeps quantised weights.

    name     for logs and errors
    matches  True for a parameter of this format
    inner    the inner tensors of such a parameter. ConfigError if it cannot be moved: the message
             begins with the reason
    decoded  shape and dtype of the weight that it stands for
    holders  objects and their attributes that hold the inner tensors of such a parameter
    """

    name: str
    matches: Callable[[torch.Tensor], bool]
    inner: Callable[[nn.Parameter], tuple[InnerTensor, ...]]
    decoded: Callable[[nn.Parameter], Decoded]
    holders: Callable[[nn.Parameter], tuple[Holder, ...]]


# The dtypes in which modules compute, and in which a weight can train or be cast.
_COMPUTED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class Unmovable(ConfigError):
    """A parameter whose inner tensors cannot be moved. The message has the reason and the way, and
    not yet the parameter's name."""


# -- bitsandbytes ----------------------------------------------------------------------------------
def _is_a(module: str, name: str) -> Callable[[torch.Tensor], bool]:
    """Return a function: True for a tensor of class `name` of `module`, or of a subclass."""

    def matches(tensor: torch.Tensor) -> bool:
        classes = type(tensor).__mro__
        return any(cls.__module__ == module and cls.__name__ == name for cls in classes)

    return matches


def _inner_4bit(parameter: Any) -> tuple[InnerTensor, ...]:
    """Codes, and the scales of `quant_state`: codes, too, with double quantisation."""
    state = parameter.quant_state
    if state is None:
        raise Unmovable(
            "is a Params4bit whose values are not quantised yet. bitsandbytes quantises when the "
            'model moves to a device: call model.to("cpu") or model.to("cuda") first.'
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise Unmovable(
            "has bitsandbytes' layout for evaluation on the CPU: a forward in eval mode without "
            "gradients has changed it. Load the model again, and wrap it before such a forward."
        )
    inner = [
        InnerTensor(name="", tensor=parameter),
        InnerTensor(name="absmax", tensor=state.absmax),
        InnerTensor(name="quant_map", tensor=state.code),
    ]
    if state.nested:
        inner += [
            InnerTensor(name="nested_absmax", tensor=state.state2.absmax),
            InnerTensor(name="nested_quant_map", tensor=state.state2.code),
            InnerTensor(name="nested_offset", tensor=state.offset),
        ]
    return tuple(inner)


def _holders_4bit(parameter: Any) -> tuple[Holder, ...]:
    state = parameter.quant_state
    holders = [(parameter, "quant_state"), (state, "absmax"), (state, "code")]
    if state.nested:
        holders += [(state, "offset"), (state.state2, "absmax"), (state.state2, "code")]
    return tuple(holders)


def _decoded_4bit(parameter: Any) -> Decoded:
    state = parameter.quant_state
    return Decoded(shape=tuple(state.shape), dtype=state.dtype)


def _inner_int8(parameter: Any) -> tuple[InnerTensor, ...]:
    """Codes of one byte, and a scale of each row ([Note: int8 states])."""
    if parameter.has_fp16_weights or parameter.dtype is not torch.int8:
        raise Unmovable(
            "is an Int8Params that keeps its values in floating point "
            "(has_fp16_weights, or not quantised yet). Make the module with "
            'has_fp16_weights=False and call model.to("cpu") or model.to("cuda"), or use '
            "torch.nn.Linear."
        )
    if parameter.CB is None or parameter.SCB is None:
        raise Unmovable(
            "is an Int8Params without its scales (SCB). Its module is no Linear8bitLt of "
            "bitsandbytes, or the weight was taken out of it. Load the model again."
        )
    return (
        InnerTensor(name="", tensor=parameter, aliases=(parameter.CB,)),
        InnerTensor(name="SCB", tensor=parameter.SCB),
    )


def _no_holders(parameter: nn.Parameter) -> tuple[Holder, ...]:
    """The objects change their place ([Note: int8 states])."""
    return ()


def _decoded_int8(parameter: nn.Parameter) -> Decoded:
    # The library computes in the dtype of the input. fp16 is the dtype that it was quantised from.
    return Decoded(shape=tuple(parameter.shape), dtype=torch.float16)


# -- torch's protocol: torchao ---------------------------------------------------------------------
def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a tensor of a class that names its inner tensors, and can be made of such."""
    names = ("__tensor_flatten__", "__tensor_unflatten__")
    return all(getattr(type(tensor), name, None) is not None for name in names)


def _inner_wrapper(parameter: Any) -> tuple[InnerTensor, ...]:
    """The tensors that `__tensor_flatten__` names. A wrapper may consist of wrappers."""
    if _is_a("torch.distributed.tensor", "DTensor")(parameter):
        raise Unmovable(
            "is a DTensor: sharded weights are not supported. Wrap the model before it is sharded."
        )
    return tuple(InnerTensor(name=name, tensor=tensor) for name, tensor in _dense(parameter))


def _dense(wrapper: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    names, _ = wrapper.__tensor_flatten__()
    for name in names:
        inner = getattr(wrapper, name)
        if is_wrapper(inner):
            yield from _dense(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _holders_wrapper(wrapper: Any) -> tuple[Holder, ...]:
    holders: list[Holder] = []
    for name in wrapper.__tensor_flatten__()[0]:
        holders.append((wrapper, name))
        inner = getattr(wrapper, name)
        if is_wrapper(inner):
            holders += _holders_wrapper(inner)
    return tuple(holders)


def _decoded_wrapper(parameter: nn.Parameter) -> Decoded:
    return Decoded(shape=tuple(parameter.shape), dtype=parameter.dtype)


# -- the table -------------------------------------------------------------------------------------
_BITSANDBYTES_4BIT = LibraryFormat(
    name="bitsandbytes 4-bit",
    matches=_is_a("bitsandbytes.nn.modules", "Params4bit"),
    inner=_inner_4bit,
    decoded=_decoded_4bit,
    holders=_holders_4bit,
)
_BITSANDBYTES_INT8 = LibraryFormat(
    name="bitsandbytes int8",
    matches=_is_a("bitsandbytes.nn.modules", "Int8Params"),
    inner=_inner_int8,
    decoded=_decoded_int8,
    holders=_no_holders,
)
_WRAPPER = LibraryFormat(
    name="torchao and other wrapper subclasses",
    matches=is_wrapper,
    inner=_inner_wrapper,
    decoded=_decoded_wrapper,
    holders=_holders_wrapper,
)
FORMATS = (_BITSANDBYTES_4BIT, _BITSANDBYTES_INT8, _WRAPPER)
_NAMES = ", ".join(row.name for row in FORMATS)  # for messages


def format_of(parameter: nn.Parameter) -> LibraryFormat | None:
    """Return the row of a quantised parameter. None for an ordinary one."""
    for row in FORMATS:
        if row.matches(parameter):
            return row
    return None


def inner_tensors(parameter: nn.Parameter, name: str = "") -> tuple[InnerTensor, ...]:
    """Return the dense tensors that a parameter consists of, in a fixed order.

    An ordinary parameter is its only one, under the name "". Call `settle` for the model first.

    `name` of the parameter is for messages.

    ConfigError, which names the class, the reason and the way: an unknown class of tensors, a
    quantised weight that requires grad, or one that its library has not quantised yet.
    """
    row = format_of(parameter)
    if row is None:
        _check_ordinary(parameter, name)
        return (InnerTensor(name="", tensor=parameter),)
    if parameter.requires_grad:
        raise ConfigError(
            f'parameter "{name}" is a {type(parameter).__name__} ({row.name}) that requires grad: '
            "quantised weights have no gradient that an optimizer could use. Call "
            "requires_grad_(False) on it and train adapters (PEFT), or load the model unquantised."
        )
    try:
        result = row.inner(parameter)
    except Unmovable as error:
        raise ConfigError(f'parameter "{name}" {error}') from None
    for inner in result:
        if not inner.tensor.is_contiguous():
            raise ConfigError(
                f'parameter "{name}" ({row.name}): its {inner.name or "data"} is not contiguous '
                f"(shape {tuple(inner.tensor.shape)}, stride {inner.tensor.stride()}), which no "
                "array of weights can hold. Quantise the model again with contiguous weights."
            )
    return result


def decoded(parameter: nn.Parameter) -> Decoded:
    """Return shape and dtype of the weight that a parameter stands for."""
    row = format_of(parameter)
    if row is None:
        return Decoded(shape=tuple(parameter.shape), dtype=parameter.dtype)
    return row.decoded(parameter)


def _check_ordinary(parameter: nn.Parameter, name: str) -> None:
    """ConfigError for a parameter of a class that no row has, and that is no plain tensor."""
    cls = type(parameter)
    values = type(parameter.data)
    if values is not torch.Tensor:
        raise ConfigError(
            f'parameter "{name}" is a {values.__module__}.{values.__name__}: its tensors are not '
            "known, because the class has no __tensor_flatten__. Known are plain tensors, "
            f"{_NAMES}. Wrap the model before the weights are converted, or load it in one of "
            "these formats."
        )
    if cls is nn.Parameter:
        return
    held = [key for key, value in vars(parameter).items() if isinstance(value, torch.Tensor)]
    if held and not parameter.requires_grad:
        raise ConfigError(
            f'parameter "{name}" is a {cls.__module__}.{cls.__name__}, a class that no storage '
            f"format has: it keeps further tensors ({', '.join(held)}), which would not move with "
            f"it. Known are {_NAMES}. Load the model in one of these formats, or unquantised."
        )


# -- while an engine lives -------------------------------------------------------------------------
class HeldTensors:
    """The objects of a model's quantised parameters that an engine points at memory.

    A library may put other objects in their place: PEFT does so when it merges an adapter into a
    weight of bitsandbytes. The engine would go on to move the old ones.

    The scales of int8 weights go to their modules, as a first forward puts them there.
    """

    def __init__(self, model: nn.Module) -> None:
        settle(model)
        # holder, attribute, object, name
        self._held: list[tuple[Any, str, Any, str]] = []
        for prefix, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                row = format_of(parameter)
                if row is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                self._held.append((module, key, parameter, name))
                for holder, attribute in row.holders(parameter):
                    held = getattr(holder, attribute)
                    self._held.append((holder, attribute, held, f"{name} ({attribute})"))
        _begin_int8(model)

    def check(self) -> None:
        """ConfigError if a program has put another object in the place of one of these."""
        for holder, attribute, held, name in self._held:
            if getattr(holder, attribute) is not held:
                _refuse_replaced(name)


def _refuse_replaced(name: str) -> None:
    raise ConfigError(
        f"{name} is another object than the one that the engine moves: a program has put new "
        "quantised values in its place, as PEFT's merge_adapter, merge_and_unload and unmerge do. "
        "Merge after engine.destroy()."
    )


# -- before an engine ------------------------------------------------------------------------------
def settle(model: nn.Module) -> None:
    """Do what the first forward of a library's module would do to its tensors.

    Afterwards `inner_tensors` sees every inner tensor ([Note: int8 states]), and no forward points
    a parameter elsewhere ([Note: biases that a forward casts]). Safe to call twice.
    """
    for module in model.modules():
        parameters: dict[str, Any] = dict(module.named_parameters(recurse=False))
        weight = parameters.get("weight")
        if weight is None:
            continue
        state: Any = getattr(module, "state", None)
        if _BITSANDBYTES_INT8.matches(weight) and weight.CB is None and state is not None:
            weight.CB, weight.SCB = state.CB, state.SCB
        bias, dtype = parameters.get("bias"), getattr(module, "compute_dtype", None)
        is_4bit = _BITSANDBYTES_4BIT.matches(weight)
        if is_4bit and bias is not None and dtype is not None and bias.dtype is not dtype:
            bias.data = bias.data.to(dtype)


def _begin_int8(model: nn.Module) -> None:
    """Move scales from int8 weights to their modules, as a first forward does ([Note: int8
    states])."""
    for module in model.modules():
        weight: Any = dict(module.named_parameters(recurse=False)).get("weight")
        if _BITSANDBYTES_INT8.matches(weight) and weight.CB is not None:
            linear: Any = module
            linear.init_8bit_state()


def has_codes(module: nn.Module) -> bool:
    """True if a frozen parameter of the module itself is a matrix of codes.

    Codes are quantised, or have a dtype that no module computes with: float8, int8. The module's
    arithmetic needs the dtypes of its other frozen tensors. So none of these is cast: the scales of
    Transformers' FP8Linear stay fp32.
    """
    parameters = module.parameters(recurse=False)
    return any(_is_code(parameter) for parameter in parameters if not parameter.requires_grad)


def _is_code(parameter: nn.Parameter) -> bool:
    is_matrix = parameter.dim() > 1
    return format_of(parameter) is not None or (is_matrix and parameter.dtype not in _COMPUTED)


# -- wrappers --------------------------------------------------------------------------------------
def wrappers(model: nn.Module) -> list[nn.Parameter]:
    """The model's parameters of wrapper subclasses."""
    return [parameter for parameter in model.parameters() if is_wrapper(parameter)]


def follow_device(parameters: Iterable[Any]) -> None:
    """Give each of these wrappers its inner tensors' device ([Note: the device of a wrapper]).

    The parameters and their inner tensors stay the same objects.
    """
    for parameter in parameters:
        device = next(tensor.device for _, tensor in _dense(parameter))
        if parameter.device != device:
            made: Any = nn.Parameter(_made_anew(parameter, device), requires_grad=False)
            # `nn.Parameter` detaches. The engine points the objects that it took.
            for name in parameter.__tensor_flatten__()[0]:
                setattr(made, name, getattr(parameter, name))
            torch.utils.swap_tensors(parameter, made)


def _made_anew(wrapper: Any, device: torch.device) -> torch.Tensor:
    """Return a wrapper like `wrapper`, on `device`, around the same inner tensors."""
    names, context = wrapper.__tensor_flatten__()
    inner: dict[str, torch.Tensor] = {}
    for name in names:
        value = getattr(wrapper, name)
        inner[name] = _made_anew(value, device) if is_wrapper(value) else value
    made: torch.Tensor = type(wrapper).__tensor_unflatten__(
        inner, _on_device(context, device), wrapper.size(), wrapper.stride()
    )
    return made


def _on_device(context: Any, device: torch.device) -> Any:
    """Return what a wrapper keeps beside its inner tensors, with `device` where it has a device."""
    if isinstance(context, torch.device):
        return device
    if isinstance(context, dict):
        return {key: _on_device(value, device) for key, value in context.items()}
    is_record = dataclasses.is_dataclass(context) and not isinstance(context, type)
    if is_record and isinstance(getattr(context, "device", None), torch.device):
        record: Any = context
        return dataclasses.replace(record, device=device)
    return context
