"""Parameters whose newest weights are still on their way: whoever reads one waits for it.

Owns, while an engine lives, the class of each such parameter, what DeepSpeed finds on it, and
replacements in this process's memory: of `nn.Parameter.data`, of how a parameter is copied and
pickled, and of `zero_grad`, which throws gradients away that wait for the step elsewhere. So code
that knows nothing of the engine (a copy of the weights for generation, a moving average, a list of
parameters that was made once) never reads weights of two steps, however it came by them. All of it
is taken back at the end. The training thread hides and shows, and autograd's in backward.

[Note: a class for a while] A parameter that is hidden is of a subclass of its own class, as torch's
`UninitializedParameter` is until it has values. It asks torch to be told of every operation on it
(`__torch_function__`): the first one waits, and gives the parameter its own class back. What is
true without a value (shape, dtype, .grad) is answered at once. Parameters that a module uses in its
call are shown before it, so that nothing is slower there, and a compiled block never sees the
class.

[Note: .data] Torch counts writes in place in a parameter's version, of all its aliases together,
but for those of `.data`. While an engine lives that is an alias like the others: a write through it
is counted too, and `binding` finds it.

[Note: DeepSpeed's attributes] `deepspeed.utils.safe_get_full_fp32_param` and its kin look for
attributes of the parameter, and where there are none they return None, or do nothing. So a
parameter that is trained has these while the engine lives, and they raise. They are the only ones
that this package ever sets on a parameter, and no copy or pickle has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from stronghold.errors import ConfigError

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


def _without_values() -> frozenset[Any]:
    def known(names: str) -> list[Any]:  # not every torch has all
        return [found for name in names.split() if (found := getattr(torch.Tensor, name, None))]

    found = [one.__get__ for one in known(_READ)] + [one.__set__ for one in known(_SET)]
    found += [*known(_CALLED), torch.is_complex, torch.is_floating_point, torch.numel]
    return frozenset(found)


_WITHOUT_VALUES = _without_values()


# -- a class for a while ---------------------------------------------------------------------------
class _Hidden(nn.Parameter):
    """What all classes of hidden parameters share."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUES:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Hidden)]
            for parameter in given:
                _replacement.wait(parameter)
            if not any(isinstance(each, _Hidden) for each in given):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _replacement.wait(self)
        return self.__deepcopy__(memo)  # of its own class now

    def __reduce_ex__(self, protocol: Any) -> Any:
        _replacement.wait(self)
        return self.__reduce_ex__(protocol)


_hidden_class: dict[type, type] = {}
_own_class: dict[type, type] = {}


def hide(parameters: Iterable[nn.Parameter]) -> None:
    """Their values are about to change: whoever reads one of them waits first. Without effect on
    those that no `ParameterReads` knows."""
    for parameter in parameters:
        own = type(parameter)
        if id(parameter) in _replacement.waits and own not in _own_class:
            if own not in _hidden_class:
                bases = (_Hidden,) if own is nn.Parameter else (_Hidden, own)
                make: Any = type(own)
                made = make(f"Hidden{own.__name__}", bases, {"__module__": __name__})
                _hidden_class[own], _own_class[made] = made, own
            parameter.__class__ = _hidden_class[own]


def show(parameters: Iterable[nn.Parameter]) -> None:
    """They hold their newest values."""
    for parameter in parameters:
        own = _own_class.get(type(parameter))
        if own is not None:
            parameter.__class__ = own


# -- .data -----------------------------------------------------------------------------------------
_data: Any = torch.Tensor.data
# `point(parameter, values)` is `parameter.data = values`.
point: Callable[[nn.Parameter, torch.Tensor], None] = _data.__set__


def _get_data(parameter: nn.Parameter) -> torch.Tensor:
    if id(parameter) in _replacement.waits:
        return torch.Tensor.detach(parameter)  # [Note: .data]
    alias: torch.Tensor = _data.__get__(parameter)
    return alias


_counted_data = property(_get_data, point, doc="torch.Tensor.data, whose writes are counted.")


# -- what stands elsewhere while an engine lives ---------------------------------------------------
class _Replacement:
    """What stands in torch, what stood there before, and whom to ask, by a parameter's identity:
    what returns when it holds its newest values and is shown, and what drops its gradients.
    """

    def __init__(self) -> None:
        self.waits: dict[int, Callable[[], None]] = {}
        self.drops: dict[int, Callable[[set[int]], None]] = {}  # given what else is dropped
        # By class and name: what stood there, and what stands there now.
        self._replaced: dict[tuple[type, str], tuple[Any, Any]] = {}

    def enable(self) -> None:
        if "data" not in vars(nn.Parameter):
            setattr(nn.Parameter, "data", _counted_data)  # noqa: B010 - to mypy it is no property
        for name in ("__deepcopy__", "__reduce_ex__"):
            self._replace(nn.Parameter, name, self._without_attributes)
        for owner in (nn.Module, torch.optim.Optimizer):
            self._replace(owner, "zero_grad", self._dropping)

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        if (owner, name) not in self._replaced:  # else: another wrapper kept ours inside
            original = getattr(owner, name)
            self._replaced[owner, name] = (original, make(original))
            setattr(owner, name, self._replaced[owner, name][1])

    def disable(self) -> None:
        if vars(nn.Parameter).get("data") is _counted_data:
            del nn.Parameter.data
        for (owner, name), (original, installed) in list(self._replaced.items()):
            if getattr(owner, name) is installed:
                setattr(owner, name, original)
                del self._replaced[owner, name]

    def wait(self, parameter: nn.Parameter) -> None:
        self.waits[id(parameter)]()

    def _without_attributes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def copied(parameter: nn.Parameter, *args: Any) -> Any:
            names = FRAGMENT if _is_ours(parameter) else ()
            ours = {name: vars(parameter).pop(name) for name in names}
            try:
                return original(parameter, *args)
            finally:
                vars(parameter).update(ours)

        return copied

    def _dropping(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            original(owner, *args, **kwargs)
            found = {id(parameter) for parameter in _parameters_of(owner)}
            for drop in {self.drops[identity] for identity in found & self.drops.keys()}:
                drop(found)

        return zero_grad


def _parameters_of(owner: nn.Module | torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    if isinstance(owner, torch.optim.Optimizer):
        for group in owner.param_groups:
            yield from group["params"]
        return
    yield from owner.parameters()


def _refuse(name: str, functions: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"{name}: {functions} cannot be used in this release, for an engine keeps masters, moments "
        "and gradients of its own. Weights: the parameter itself, or engine.module_state_dict(); "
        "to write them, with torch.no_grad(): p.copy_(values) after engine.synchronize(), or "
        "engine.load_module_state_dict. Masters and moments: engine.save_checkpoint, and "
        "`stronghold export`"
    )


FRAGMENT = {  # what DeepSpeed looks for, and the functions that then call it
    "_hp_mapping": "",
    "get_full_hp_param": "safe_get_full_fp32_param and safe_get_full_optimizer_state",
    "set_full_hp_param": "safe_set_full_fp32_param and safe_set_full_optimizer_state",
    "get_full_hp_grad": "safe_get_full_grad",
    "set_full_hp_grad": "safe_set_full_grad",
}


def _is_ours(parameter: nn.Parameter) -> bool:
    made = vars(parameter).get("get_full_hp_param")
    return isinstance(made, functools.partial) and made.func is _refuse


_replacement = _Replacement()


class ParameterReads:
    """Of one engine. `places` have each parameter's layer and name; `settle` returns when the
    newest weights of the layers that it is given are where their parameters point, and shows them;
    `drop` throws the gradients away that wait for the step; it is given the name of one that shall
    stay, if one shall.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, tuple[int, str]],
        *,
        settle: Callable[[Sequence[int]], None],
        drop: Callable[[str | None], None],
    ) -> None:
        self._drop_gradients = drop
        self._waits = {
            id(parameter): functools.partial(settle, (layer,))
            for parameter, (layer, _) in places.items()
        }
        self._parameters = list(places)
        self._trained = {p: name for p, (_, name) in places.items() if p.requires_grad}
        for parameter, name in self._trained.items():
            for attribute, functions in FRAGMENT.items():
                refuse = functools.partial(_refuse, name, functions) if functions else None
                setattr(parameter, attribute, refuse)
        _replacement.waits |= self._waits
        _replacement.drops |= {id(parameter): self._drop for parameter in self._trained}
        _replacement.enable()

    def _drop(self, found: set[int]) -> None:
        """Somebody throws the gradients of these parameters away."""
        others = (name for p, name in self._trained.items() if id(p) not in found)
        self._drop_gradients(next(others, None))

    def close(self) -> None:
        """The parameters are the user's alone again. Safe to call twice."""
        show(self._parameters)
        for identity, wait in self._waits.items():
            if _replacement.waits.get(identity) is wait:
                del _replacement.waits[identity]
        for parameter in self._trained:
            if _replacement.drops.get(id(parameter)) == self._drop:
                del _replacement.drops[id(parameter)]
                for attribute in FRAGMENT if _is_ours(parameter) else ():
                    delattr(parameter, attribute)
        self._waits.clear()
        self._parameters.clear()
        self._trained.clear()
        if not _replacement.waits:
            _replacement.disable()
