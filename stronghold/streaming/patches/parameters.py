"""Replacements around parameters while an engine lives: values, copies, gradients.

Owns the class of each hidden parameter, the attributes that DeepSpeed finds on trained parameters,
and replacements in this process: of `nn.Parameter.data` and `.set_`, of how a parameter is copied
and pickled, of `zero_grad`, of the function that `clip_grad_norm_` calls, of six functions of
`deepspeed.utils`, and of torch's attention (`attention`). So a program that does not use the
engine's own calls (a moving average, a copy of the weights for generation, a list of parameters
that it made once) never reads weights of two steps. The last engine that closes gives every name
back. Keeps no reference to an engine: the engine is closed when its user drops it, though the model
lives on. The training thread enters; autograd's hides and shows parameters in backward.

[Note: a class for a while] A hidden parameter is of a subclass of its class, as torch's
`UninitializedParameter` is until it has values.

1. `hide` changes the class when the newest values are on their way.
2. Torch calls `__torch_function__` of the subclass for every operation.
3. The first operation that needs the values waits for them, and the parameter has its class back.

An operation that needs no values (shape, dtype, .grad) is answered at once. Parameters that a
module uses in its call are shown before it: so nothing is slower in a block, and a compiled block
never sees the class.

[Note: .data] Torch counts writes in place in a parameter's version, which all its aliases share
except those of `.data`. While an engine lives `.data` is an alias like the others: a write through
it is counted too, and `binding` sees it.

[Note: set_] `torch.nn.utils.parametrize` gives a parameter that it parametrizes to itself
(`p.set_(p)`). That changes no value, and raises the version. While an engine lives such a call does
nothing: PEFT parametrizes and restores its target parameters in each forward, where a write is
refused.

[Note: DeepSpeed's attributes] `deepspeed.utils.safe_get_full_fp32_param` and the functions beside
it look for attributes of the parameter, and return None or do nothing without them. So a trained
parameter has these while the engine lives (`fragments`). The package sets no other attributes on a
parameter, and no copy or pickle has them. The functions of partitions (`safe_get_local_grad`) ask
for ZeRO-3's attributes. Other code takes a parameter with these for a partitioned one. So while an
engine lives these six functions are replaced in `deepspeed.utils`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed.utils
import torch
from torch import nn
from torch.nn import functional as F

from stronghold.streaming.patches.attention import intercepted
from stronghold.streaming.patches.autograd import without_torch_function
from stronghold.streaming.patches.replacements import Replacements
from stronghold.streaming.patches.tensors import tree_leaves

# What needs no values: properties that are read, others that are set, and calls.
_READ = """
    _backward_hooks _grad _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu
    is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu
    itemsize layout name names nbytes ndim output_nr requires_grad retains_grad shape
"""
_SET = "_backward_hooks _grad _post_accumulate_grad_hooks grad requires_grad"
_CALLED = """
    __len__ dim element_size get_device is_complex is_contiguous is_floating_point is_pinned
    is_signed ndimension nelement numel register_hook register_post_accumulate_grad_hook
    requires_grad_ retain_grad size storage_offset stride
"""


def _attributes(names: str) -> list[Any]:
    """Those of `torch.Tensor` with these names; not every torch has all."""
    attributes = (getattr(torch.Tensor, name, None) for name in names.split())
    return [attribute for attribute in attributes if attribute]


_WITHOUT_VALUES = frozenset(
    [attribute.__get__ for attribute in _attributes(_READ)]
    + [attribute.__set__ for attribute in _attributes(_SET)]
    + [*_attributes(_CALLED), torch.is_complex, torch.is_floating_point, torch.numel]
)


# -- a class for a while ---------------------------------------------------------------------------
class _Hidden(nn.Parameter):
    """The base of all classes of hidden parameters ([Note: a class for a while])."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUES:
            hidden = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Hidden)]
            for parameter in hidden:
                _wait(parameter)
            if not any(isinstance(parameter, _Hidden) for parameter in hidden):
                return func(*args, **kwargs)
        with without_torch_function():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _wait(self)
        return self.__deepcopy__(memo)  # of its first class now

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait(self)
        return self.__reduce_ex__(protocol)


def _wait(parameter: nn.Parameter) -> None:
    _engines.reads[id(parameter)].wait(parameter)


_hidden_classes: dict[type, type] = {}  # by the class that a parameter has when it is shown
_shown_classes: dict[type, type] = {}  # the inverse


def hide(parameters: Iterable[nn.Parameter]) -> None:
    """Make every read of these parameters wait: their values are about to change. Without effect
    on parameters that no `ParameterReads` has."""
    for parameter in parameters:
        shown = type(parameter)
        if id(parameter) in _engines.reads and shown not in _shown_classes:
            if shown not in _hidden_classes:
                bases = (_Hidden,) if shown is nn.Parameter else (_Hidden, shown)
                make_class: Any = type(shown)
                hidden = make_class(f"Hidden{shown.__name__}", bases, {"__module__": __name__})
                _hidden_classes[shown], _shown_classes[hidden] = hidden, shown
            parameter.__class__ = _hidden_classes[shown]


def show(parameters: Iterable[nn.Parameter]) -> None:
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


_counted_data = property(_get_data, point, doc="torch.Tensor.data, whose writes are counted.")


# -- replaced while an engine lives ----------------------------------------------------------------
class _Engines:
    """The live engines of this process, and the names that are replaced for them."""

    def __init__(self) -> None:
        self.reads: dict[int, ParameterReads] = {}  # by the identity of a parameter
        self._replaced = Replacements()

    def enable(self) -> None:
        """Replace the names. Safe to call twice."""
        if "data" not in vars(nn.Parameter):
            setattr(nn.Parameter, "data", _counted_data)  # noqa: B010 - to mypy it is no property
        for name in ("__deepcopy__", "__reduce_ex__"):
            self._replaced.put(nn.Parameter, name, self._without_attributes)
        self._replaced.put(nn.Parameter, "set_", self._setting)
        for owner in (nn.Module, torch.optim.Optimizer):
            self._replaced.put(owner, "zero_grad", self._dropping)
        # `clip_grad_norm_` calls it, whatever name a program has for `clip_grad_norm_`. Torch's own
        # calls count too.
        if "_clip_grads_with_norm_" in vars(torch.nn.utils.clip_grad):
            self._replaced.put(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", self._clipping)
        for name, answer in LOCAL.items():
            self._replaced.put(deepspeed.utils, name, _of_partitions(answer))
        self._replaced.put(F, "scaled_dot_product_attention", intercepted)

    def disable(self) -> None:
        """Give the names back."""
        if vars(nn.Parameter).get("data") is _counted_data:
            del nn.Parameter.data
        self._replaced.undo()

    def of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[ParameterReads, set[int]]]:
        """The engines that train some of these parameters, with the identities of all."""
        identities = {id(parameter) for parameter in parameters}
        engines = {self.reads[identity] for identity in identities & self.reads.keys()}
        return [(reads, identities) for reads in engines if reads.trained.keys() & identities]

    def _without_attributes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def copied(parameter: nn.Parameter, *args: Any) -> Any:
            names = FRAGMENT if _has_access(parameter) else ()
            taken_out = {name: vars(parameter).pop(name) for name in names}
            try:
                return original(parameter, *args)
            finally:
                vars(parameter).update(taken_out)

        return copied

    def _setting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def set_(parameter: nn.Parameter, *source: Any, **named: Any) -> Any:
            if id(parameter) in self.reads and len(source) == 1 and source[0] is parameter:
                return parameter  # [Note: set_]
            return original(parameter, *source, **named)

        return set_

    def _dropping(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            original(owner, *args, **kwargs)
            for reads, identities in self.of(_parameters_of(owner)):
                reads.drop(identities)

        return zero_grad

    def _clipping(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> None:
            listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            for reads, _ in self.of(listed):
                reads.clipped(max_norm)
            original(listed, max_norm, *args, **kwargs)

        return clip


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
FRAGMENT = {
    "_hp_mapping": "",
    "get_full_hp_param": "get",
    "set_full_hp_param": "set",
    "get_full_hp_grad": "get_gradient",
    "set_full_hp_grad": "set_gradient",
}
# DeepSpeed's functions that ask for ZeRO-3 by name, and what answers for a trained parameter.
LOCAL: dict[str, Callable[..., Any]] = {
    "safe_get_local_fp32_param": lambda access: access.local().get().view(-1),
    "safe_get_local_optimizer_state": lambda access, key: access.local().get(key).view(-1),
    "safe_get_local_grad": lambda access: access.local().get_gradient().view(-1),
    "safe_set_local_fp32_param": lambda access, value: access.local().set(value),
    "safe_set_local_optimizer_state": lambda access, value, key: access.local().set(value, key),
    "safe_set_local_grad": lambda access, value: access.local().set_gradient(value),
}


def _has_access(parameter: nn.Parameter) -> bool:
    return isinstance(vars(parameter).get("_hp_mapping"), Access)


def _of_partitions(answer: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def local(param: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
            if _has_access(param):
                return answer(vars(param)["_hp_mapping"], *args, **kwargs)
            return original(param, *args, **kwargs)

        return local

    return make


_engines = _Engines()


class ParameterReads:
    """The parameters of one engine, from its construction to `close`.

    `places`: the layer and the name of each parameter.
    `settle(layers)`: return when the parameters of these layers point at their newest weights, and
    show them.
    `drop(name)`: throw away the gradients that wait for the step; `name` is a parameter whose
    gradient is to stay, or None.
    `clipped(norm)`: a program clips gradients by hand to `norm`.
    `fragments`: for each trained parameter, the object that answers DeepSpeed's functions.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, tuple[int, str]],
        *,
        settle: Callable[[Sequence[int]], None],
        drop: Callable[[str | None], None],
        clipped: Callable[[float], None],
        fragments: Mapping[nn.Parameter, Access],
    ) -> None:
        self._settle, self._drop_gradients, self.clipped = settle, drop, clipped
        self._places = dict(places)
        # Names of trained parameters, by identity.
        self.trained = {id(p): name for p, (_, name) in places.items() if p.requires_grad}
        self._fragments = list(fragments)
        for parameter, fragment in fragments.items():
            for attribute, method in FRAGMENT.items():
                setattr(parameter, attribute, getattr(fragment, method) if method else fragment)
        _engines.reads |= {id(parameter): self for parameter in places}
        _engines.enable()

    def wait(self, parameter: nn.Parameter) -> None:
        """Return when the parameter holds its newest values and is shown."""
        self._settle((self._places[parameter][0],))

    def drop(self, identities: set[int]) -> None:
        """Throw away the gradients of the parameters with these identities."""
        others = (name for identity, name in self.trained.items() if identity not in identities)
        self._drop_gradients(next(others, None))

    def close(self) -> None:
        """Give the parameters back to the user. Safe to call twice."""
        show(self._places)
        for identity in map(id, self._places):
            if _engines.reads.get(identity) is self:
                del _engines.reads[identity]
        for parameter in self._fragments:
            for attribute in FRAGMENT if _has_access(parameter) else ():
                delattr(parameter, attribute)
        self._places.clear()
        self.trained.clear()
        self._fragments.clear()
        if not _engines.reads:
            _engines.disable()
