"""Replacements around parameters while an engine lives: values, copies, gradients.

Owns the class of each hidden parameter, the attributes that DeepSpeed finds on trained parameters,
and these replacements in this process:
* `nn.Parameter.data` and `.set_`;
* the functions by which a parameter is copied and pickled;
* `zero_grad`, and the function that `clip_grad_norm_` calls;
* six functions of `deepspeed.utils`;
* functions of libraries whose quantised weights an engine has (`quantised`);
* torch's attention (`attention`).

A program may not use the engine's calls: it has a moving average, a copy of the weights for
generation, a list of parameters that it made once. With the replacements such a program never reads
weights of two steps (a race of its read with the update). The last engine that closes gives every
name back.

Keeps no reference to an engine: the engine is closed when its user drops it, though the model lives
on. The training thread enters. Autograd's thread hides and shows parameters in backward.

[Note: a class for a while] A hidden parameter is of a subclass of its class, as torch's
`UninitializedParameter` is until it has values.

1. The engine calls `hide`, which changes the class, when the newest values are on their way.
2. Torch calls `__torch_function__` of the subclass for every operation.
3. The first operation that needs the values waits for them, and the parameter has its class back.
4. An operation that needs no values (shape, dtype, .grad) is answered at once.
5. The engine shows the parameters that a module uses before the module's call. So nothing is slower
   in a block, and a compiled block never sees the class.

[Note: .data] Torch counts writes in place in a parameter's version. All aliases of the parameter
share the version, except those of `.data`. While an engine lives, `.data` returns an alias that
shares it: a write through the alias is counted, and `parameter_views` sees it.

[Note: moved]
1. `model.to(device)`, `model.cpu()` and `p.data = p.data.to(device)` point a parameter at a copy of
   its values on another device. Programs do so for every parameter, around a rollout.
2. Hazard: the copies of all layers together are a whole model on the GPU.
3. So while an engine lives, a copy with the same bits on another device is dropped at once. The
   parameter stays where the engine has it.
4. Hazard: the program keeps the copy, and writes into it. `parameter_views` refuses that when it
   next moves the layer.

[Note: set_]
1. `torch.nn.utils.parametrize` sets a parameter that it parametrizes to itself (`p.set_(p)`). That
   changes no value, and raises the version.
2. PEFT parametrizes and restores its target parameters in each forward. The engine refuses a write
   in forward.
3. So while an engine lives, such a call does nothing.

[Note: DeepSpeed's attributes]
1. `deepspeed.utils.safe_get_full_fp32_param` and the functions beside it look for attributes of the
   parameter. Without them they return None or do nothing. So a trained parameter has these
   attributes while the engine lives (`fragments`). The package sets no other attributes on a
   parameter, and no copy or pickle has them.
2. The functions that write (`safe_set_full_grad`) are refused.
3. The functions of partitions (`safe_get_local_grad`) ask for ZeRO-3's attributes, and raise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stronghold.streaming.patches.attention import intercepted
from stronghold.streaming.patches.autograd import without_torch_function
from stronghold.streaming.patches.quantised import replace_quantised
from stronghold.streaming.patches.replacements import Replacements
from stronghold.streaming.patches.tensors import tree_leaves

# Operations that need no values: reads of properties, writes of properties, and calls.
_READ = """
    _backward_hooks _grad _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu
    is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu
    itemsize layout name names nbytes ndim output_nr requires_grad retains_grad shape
"""
_SET = "_backward_hooks _grad _post_accumulate_grad_hooks grad requires_grad"
_CALLED = """
    __len__ dim element_size get_device is_complex is_floating_point is_pinned
    is_signed ndimension nelement numel register_hook register_post_accumulate_grad_hook
    requires_grad_ retain_grad size storage_offset
"""
# Properties of a contiguous tensor of the parameter's shape. A packed parameter at rest has other
# ones: it points at one element.
_LAYOUT = "is_contiguous stride"


def _attributes(names: str) -> list[Any]:
    """Return the attributes of `torch.Tensor` with these names. A torch may lack some of them."""
    attributes = (getattr(torch.Tensor, name, None) for name in names.split())
    return [attribute for attribute in attributes if attribute]


_WITHOUT_VALUES = frozenset(
    [attribute.__get__ for attribute in _attributes(_READ)]
    + [attribute.__set__ for attribute in _attributes(_SET)]
    + [*_attributes(_CALLED), torch.is_complex, torch.is_floating_point, torch.numel]
)
_OF_LAYOUT = frozenset(_attributes(_LAYOUT))


# -- a class for a while ---------------------------------------------------------------------------
class _Hidden(nn.Parameter):
    """The base of all classes of hidden parameters ([Note: a class for a while])."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_LAYOUT:
            with without_torch_function():
                contiguous = torch.empty(args[0].shape, device="meta")
                return func(contiguous, *args[1:], **kwargs)
        if func not in _WITHOUT_VALUES:
            leaves = tree_leaves((args, kwargs))
            hidden = [leaf for leaf in leaves if isinstance(leaf, _Hidden)]
            for parameter in hidden:
                _wait(parameter)
            if not any(isinstance(parameter, _Hidden) for parameter in hidden):
                return func(*args, **kwargs)
        with without_torch_function():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _wait(self)
        return self.__deepcopy__(memo)  # it has its first class now

    def __copy__(self) -> Any:
        _wait(self)
        return copy.copy(self)  # bitsandbytes makes a copy of the class that it has

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait(self)
        return self.__reduce_ex__(protocol)


def _wait(parameter: nn.Parameter) -> None:
    _engines.reads[id(parameter)].wait(parameter)


# by the class that a parameter has when it is shown
_hidden_classes: dict[type, type] = {}
_shown_classes: dict[type, type] = {}  # the inverse


def hide(parameters: Iterable[torch.Tensor]) -> None:
    """Make every read of these parameters wait: their values are about to change. Does nothing to
    parameters that no `ParameterReads` has."""
    for parameter in parameters:
        shown = type(parameter)
        if id(parameter) not in _engines.reads or shown in _shown_classes:
            continue
        if shown not in _hidden_classes:
            hidden = _make_hidden_class(shown)
            _hidden_classes[shown] = hidden
            _shown_classes[hidden] = shown
        parameter.__class__ = _hidden_classes[shown]


def _make_hidden_class(shown: type) -> type:
    """Return a subclass of a class of parameters whose operations wait for values.

    It has the name of a library's class: PEFT and Transformers know "Params4bit" by its name.
    """
    is_ordinary = shown is nn.Parameter
    bases = (_Hidden,) if is_ordinary else (_Hidden, shown)
    name = "HiddenParameter" if is_ordinary else shown.__name__
    metaclass: Any = type(shown)
    hidden: type = metaclass(name, bases, {"__module__": __name__})
    return hidden


def show(parameters: Iterable[torch.Tensor]) -> None:
    """Give these parameters their first class back: they hold their newest values."""
    for parameter in parameters:
        shown = _shown_classes.get(type(parameter))
        if shown is not None:
            parameter.__class__ = shown


# -- .data -----------------------------------------------------------------------------------------
_data: Any = torch.Tensor.data
# `point(parameter, values)` is `parameter.data = values`.
point: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__


def _get_data(parameter: nn.Parameter) -> torch.Tensor:
    if id(parameter) in _engines.reads:
        return torch.Tensor.detach(parameter)  # [Note: .data]
    alias: torch.Tensor = _data.__get__(parameter)
    return alias


def _set_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    reads = _engines.reads.get(id(parameter))
    if reads is None or not reads.is_copy_elsewhere(parameter, values):
        point(parameter, values)


_counted_data = property(
    _get_data, _set_data, doc="torch.Tensor.data, whose writes are counted ([Note: moved])."
)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The values as bytes: NaN equals NaN."""
    return values.contiguous().view(-1).view(torch.uint8)


# -- replaced while an engine lives ----------------------------------------------------------------
class _Engines:
    """The live engines of this process, and the names that are replaced for them."""

    def __init__(self) -> None:
        # By the identity of a parameter.
        self.reads: dict[int, ParameterReads] = {}
        self._replacements = Replacements()

    def enable(self, moving: Iterable[torch.Tensor]) -> None:
        """Replace the names for an engine that moves these tensors. Safe to call twice."""
        if "data" not in vars(nn.Parameter):
            setattr(nn.Parameter, "data", _counted_data)  # noqa: B010 - to mypy it is no property
        wrap = self._replacements.wrap
        for name in ("__deepcopy__", "__reduce_ex__"):
            wrap(nn.Parameter, name, self._copy)
        wrap(nn.Parameter, "set_", self._set)
        for owner in (nn.Module, torch.optim.Optimizer):
            wrap(owner, "zero_grad", self._zero_grad)
        # `clip_grad_norm_` calls this function, under any name that a program has for
        # `clip_grad_norm_`. Calls by torch count, too.
        clip_grad = torch.nn.utils.clip_grad
        if "_clip_grads_with_norm_" in vars(clip_grad):
            wrap(clip_grad, "_clip_grads_with_norm_", self._clip)
        self._replacements.put(F, "scaled_dot_product_attention", intercepted)
        replace_quantised(self._replacements, moving)

    def disable(self) -> None:
        """Give the names back."""
        if vars(nn.Parameter).get("data") is _counted_data:
            del nn.Parameter.data
        self._replacements.undo()

    def of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[ParameterReads, set[int]]]:
        """Return the engines that train some of these parameters, each with the identities of all
        these parameters."""
        identities = {id(parameter) for parameter in parameters}
        engines = {self.reads[identity] for identity in identities & self.reads.keys()}
        return [(reads, identities) for reads in engines if reads.trained.keys() & identities]

    def _copy(self, original: Callable[..., Any], parameter: nn.Parameter, *args: Any) -> Any:
        """Replace `__deepcopy__` and `__reduce_ex__`: neither sees DeepSpeed's attributes."""
        names = ACCESS_ATTRIBUTES if _has_access(parameter) else ()
        taken_out = {name: vars(parameter).pop(name) for name in names}
        try:
            return original(parameter, *args)
        finally:
            vars(parameter).update(taken_out)

    def _set(
        self, original: Callable[..., Any], parameter: nn.Parameter, *source: Any, **named: Any
    ) -> Any:
        """Replace `nn.Parameter.set_` ([Note: set_])."""
        is_set_to_itself = len(source) == 1 and source[0] is parameter
        if is_set_to_itself and id(parameter) in self.reads:
            return parameter
        return original(parameter, *source, **named)

    def _zero_grad(
        self, original: Callable[..., None], owner: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Replace `zero_grad` of modules and optimizers: gradients that wait are dropped, too."""
        original(owner, *args, **kwargs)
        for reads, identities in self.of(_parameters_of(owner)):
            reads.drop(identities)

    def _clip(
        self,
        original: Callable[..., None],
        parameters: Any,
        max_norm: float,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Replace the function that `clip_grad_norm_` calls."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for reads, _ in self.of(listed):
            reads.clipped(max_norm)
        original(listed, max_norm, *args, **kwargs)


def _parameters_of(owner: nn.Module | torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    if isinstance(owner, torch.optim.Optimizer):
        for group in owner.param_groups:
            yield from group["params"]
        return
    yield from owner.parameters()


class Access:
    """Answers DeepSpeed's functions for one parameter ([Note: DeepSpeed's attributes])."""

    __slots__ = ()


# Attributes that DeepSpeed looks for on a parameter, and the method of its `Access` that answers.
# The first attribute is the `Access` itself.
ACCESS_ATTRIBUTES = {
    "_hp_mapping": "",
    "get_full_hp_param": "get",
    "set_full_hp_param": "refuse",
    "get_full_hp_grad": "get_gradient",
    "set_full_hp_grad": "refuse",
}


def _has_access(parameter: torch.Tensor) -> bool:
    return isinstance(vars(parameter).get("_hp_mapping"), Access)


_engines = _Engines()


class ParameterReads:
    """Reads of the parameters of one engine, from its construction to `close`.

    `places`: the layer and the name of each parameter.
    `settle(layers)`: waits until the parameters of these layers point at their newest weights, and
    shows them.
    `decode(layer)`: gives the layer's packed parameters their values, and shows them.
    `drop(name)`: drops the gradients that wait for the step. `name` is a parameter whose gradient
    should stay, or None.
    `clipped(norm)`: called when a program clips gradients by hand to `norm`.
    `moved(layer, parameter, copy)`: called when a program has pointed a parameter at a copy of its
    values on another device. The parameter keeps its place ([Note: moved]).
    `fragments`: for each trained parameter, the object that answers DeepSpeed's functions.
    `moving`: all tensors that the engine moves: parameters, and inner tensors of quantised ones.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, tuple[int, str]],
        *,
        settle: Callable[[Sequence[int]], None],
        decode: Callable[[int], None],
        drop: Callable[[str | None], None],
        clipped: Callable[[float], None],
        moved: Callable[[int, nn.Parameter, torch.Tensor], None],
        fragments: Mapping[torch.Tensor, Access],
        moving: Iterable[torch.Tensor],
    ) -> None:
        self._settle = settle
        self._decode = decode
        self._drop_gradients = drop
        self.clipped = clipped
        self._moved = moved
        self._places = dict(places)
        # Names of trained parameters, by identity.
        self.trained = {id(p): name for p, (_, name) in places.items() if p.requires_grad}
        self._fragments = list(fragments)
        for parameter, fragment in fragments.items():
            for attribute, method in ACCESS_ATTRIBUTES.items():
                value = getattr(fragment, method) if method else fragment
                setattr(parameter, attribute, value)
        _engines.reads |= {id(parameter): self for parameter in places}
        _engines.enable(moving)

    def wait(self, parameter: nn.Parameter) -> None:
        """Wait until the parameter holds its newest values and is shown."""
        layer, _ = self._places[parameter]
        self._settle((layer,))
        if isinstance(parameter, _Hidden):
            self._decode(layer)

    def is_copy_elsewhere(self, parameter: nn.Parameter, values: torch.Tensor) -> bool:
        """True if `values` are the parameter's, to the bit, on another device. Then the parameter
        keeps its place ([Note: moved]). Waits for the parameter's newest values."""
        if values.device == parameter.device or values.is_meta or parameter.is_meta:
            return False
        if values.dtype is not parameter.dtype or values.shape != parameter.shape:
            return False
        present = torch.Tensor.detach(parameter)
        if not torch.equal(_bits(values.detach().to(present.device)), _bits(present)):
            return False
        self._moved(self._places[parameter][0], parameter, values)
        return True

    def drop(self, identities: set[int]) -> None:
        """Drop the gradients of the parameters with these identities."""
        others = (name for identity, name in self.trained.items() if identity not in identities)
        self._drop_gradients(next(others, None))

    def close(self) -> None:
        """Give the parameters back to the user. Safe to call twice."""
        show(self._places)
        for identity in map(id, self._places):
            if _engines.reads.get(identity) is self:
                del _engines.reads[identity]
        for parameter in self._fragments:
            if _has_access(parameter):
                for attribute in ACCESS_ATTRIBUTES:
                    delattr(parameter, attribute)
        self._places.clear()
        self.trained.clear()
        self._fragments.clear()
        if not _engines.reads:
            _engines.disable()
