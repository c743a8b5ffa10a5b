"""What the user's code does to parameters and modules beside training, and what keeps that true.

It reads parameters whose newest weights are still on their way (and waits for them), saves and
loads state dicts, copies and pickles the model. Owns, while an engine lives, the class of each
hidden parameter, what DeepSpeed finds on it, the hooks for state dicts, and replacements in this
process's memory: of `nn.Parameter.data` and `.set_`, of how a parameter is copied and pickled, of
`zero_grad`, which throws gradients away that wait for the step elsewhere, of what `clip_grad_norm_`
calls, which finds none, and of torch's attention (`attention`). So code that knows nothing of the
engine (a copy of the weights for generation, a moving average, a list of parameters that was made
once) never reads weights of two steps, however it came by them. All of it is taken back at the end.
Keeps no reference to the engine: one that its user drops is closed, though the model lives on. The
training thread enters; autograd's hides and shows, in backward.

[Note: a class for a while] A parameter that is hidden is of a subclass of its own class, as torch's
`UninitializedParameter` is until it has values. It asks torch to be told of every operation on it
(`__torch_function__`): the first one waits, and gives the parameter its own class back. What is
true without a value (shape, dtype, .grad) is answered at once. Parameters that a module uses in its
call are shown before it, so that nothing is slower there, and a compiled block never sees the
class.

[Note: .data] Torch counts writes in place in a parameter's version, of all its aliases together,
but for those of `.data`. While an engine lives that is an alias like the others: a write through it
is counted too, and `binding` finds it.

[Note: set_] `torch.nn.utils.parametrize` gives a parameter that it parametrizes to itself
(`p.set_(p)`). That changes no value, and raises the version. While an engine lives such a call does
nothing: PEFT parametrizes and restores its target parameters in each forward, where a write is
refused.

[Note: DeepSpeed's attributes] `deepspeed.utils.safe_get_full_fp32_param` and its kin look for
attributes of the parameter, and where there are none they return None, or do nothing. So a
parameter that is trained has these while the engine lives (`fragments`). They are the only ones
that this package ever sets on a parameter, and no copy or pickle has them. The functions of
partitions (`safe_get_local_grad`) ask for ZeRO-3's attributes, by which other code would take the
parameter for a partitioned one: while an engine lives these six are replaced in `deepspeed.utils`.

[Note: copies] `copy.deepcopy(model)` and `torch.save(model)` take a module's hooks along: those of
a live engine would move its layers when the copy is called, and hold locks that cannot be pickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import deepspeed.utils
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack

from stronghold.errors import ConfigError
from stronghold.process import Replacements
from stronghold.runtime.attention import intercepted
from stronghold.runtime.parts import Written


class OwnHook:
    """A hook of ours on the user's module. Of one that is copied or pickled the copy has one that
    does nothing ([Note: copies]). `compiled` is called instead where the module's call is compiled,
    and its hooks with it; never what either calls."""

    __slots__ = ("_call", "_compiled")

    def __init__(
        self, call: Callable[..., Any], compiled: Callable[..., Any] | None = None
    ) -> None:
        self._call = call
        self._compiled = compiled or call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._compiled)(*args, **kwargs)
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> OwnHook:
        return without_effect()

    def __reduce__(self) -> Any:
        return without_effect, ()


NO_TRANSFORMS = (
    "torch.func's grad, vjp, jacrev, hessian and vmap cannot go through a streamed block, whose "
    "weights come and go and whose saved tensors are handed over: use torch.autograd.grad (with "
    "create_graph=True where its result is trained through), or let all weights stay on the gpu: "
    'stronghold.resident_layers: "all"'
)
COMPILED_WHOLE = (
    "torch.compile of a whole model that streams: got one graph, expected one per block, since "
    "layers come and go between them. Leave torch.compile(model) or model.compile() out and call "
    "engine.compile() after initialize, or block.compile() of each block"
)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile stands around the whole model."""
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def without_effect() -> OwnHook:
    """What stands in a copy for a hook of the original's engine."""
    return OwnHook(_nothing)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def serves(hook: Any) -> bool:
    """Whether `hook` is one of ours whose engine has it, not a copy's."""
    return isinstance(hook, OwnHook) and hook._call is not _nothing


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
                _wait(parameter)
            if not any(isinstance(each, _Hidden) for each in given):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _wait(self)
        return self.__deepcopy__(memo)  # of its own class now

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait(self)
        return self.__reduce_ex__(protocol)


def _wait(parameter: nn.Parameter) -> None:
    _replacement.reads[id(parameter)].wait(parameter)


_hidden_class: dict[type, type] = {}
_own_class: dict[type, type] = {}


def hide(parameters: Iterable[nn.Parameter]) -> None:
    """Their values are about to change: whoever reads one of them waits first. Without effect on
    those that no `ParameterReads` knows."""
    for parameter in parameters:
        own = type(parameter)
        if id(parameter) in _replacement.reads and own not in _own_class:
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
    if id(parameter) in _replacement.reads:
        return torch.Tensor.detach(parameter)  # [Note: .data]
    alias: torch.Tensor = _data.__get__(parameter)
    return alias


_counted_data = property(_get_data, point, doc="torch.Tensor.data, whose writes are counted.")


# -- what stands elsewhere while an engine lives ---------------------------------------------------
class _Replacement:
    """What stands in torch, what stood there before, and whom to ask, by a parameter's identity."""

    def __init__(self) -> None:
        self.reads: dict[int, ParameterReads] = {}
        self._replaced = Replacements()

    def enable(self) -> None:
        if "data" not in vars(nn.Parameter):
            setattr(nn.Parameter, "data", _counted_data)  # noqa: B010 - to mypy it is no property
        for name in ("__deepcopy__", "__reduce_ex__"):
            self._replaced.put(nn.Parameter, name, self._without_attributes)
        self._replaced.put(nn.Parameter, "set_", self._setting)
        for owner in (nn.Module, torch.optim.Optimizer):
            self._replaced.put(owner, "zero_grad", self._dropping)
        # What `clip_grad_norm_` calls, under whatever name a program has it; torch's own matter.
        if "_clip_grads_with_norm_" in vars(torch.nn.utils.clip_grad):
            self._replaced.put(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", self._clipping)
        for name, answer in LOCAL.items():
            self._replaced.put(deepspeed.utils, name, _of_partitions(answer))
        self._replaced.put(F, "scaled_dot_product_attention", intercepted)

    def disable(self) -> None:
        if vars(nn.Parameter).get("data") is _counted_data:
            del nn.Parameter.data
        self._replaced.undo()

    def of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[ParameterReads, set[int]]]:
        """The engines that train some of these parameters, with the identities of all."""
        found = {id(parameter) for parameter in parameters}
        engines = {self.reads[identity] for identity in found & self.reads.keys()}
        return [(reads, found) for reads in engines if reads.trained.keys() & found]

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
            for reads, found in self.of(_parameters_of(owner)):
                reads.drop(found)

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
    """What answers DeepSpeed's functions for one parameter ([Note: DeepSpeed's attributes])."""

    __slots__ = ()


# What DeepSpeed looks for on a parameter, and the method of its `Access` that answers.
FRAGMENT = {
    "_hp_mapping": "",
    "get_full_hp_param": "get",
    "set_full_hp_param": "set",
    "get_full_hp_grad": "get_gradient",
    "set_full_hp_grad": "set_gradient",
}
# DeepSpeed's functions that ask for ZeRO-3 by name, and what answers for a parameter of ours.
LOCAL: dict[str, Callable[..., Any]] = {
    "safe_get_local_fp32_param": lambda own: own.local().get().view(-1),
    "safe_get_local_optimizer_state": lambda own, key: own.local().get(key).view(-1),
    "safe_get_local_grad": lambda own: own.local().get_gradient().view(-1),
    "safe_set_local_fp32_param": lambda own, value: own.local().set(value),
    "safe_set_local_optimizer_state": lambda own, value, key: own.local().set(value, key),
    "safe_set_local_grad": lambda own, value: own.local().set_gradient(value),
}


def _is_ours(parameter: nn.Parameter) -> bool:
    return isinstance(vars(parameter).get("_hp_mapping"), Access)


def _of_partitions(answer: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def local(param: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
            if _is_ours(param):
                return answer(vars(param)["_hp_mapping"], *args, **kwargs)
            return original(param, *args, **kwargs)

        return local

    return make


_replacement = _Replacement()


class ParameterReads:
    """Of one engine. `places` have each parameter's layer and name; `settle` returns when the
    newest weights of the layers that it is given are where their parameters point, and shows them;
    `drop` throws the gradients away that wait for the step; it is given the name of one that shall
    stay, if one shall. `clipped` is given the norm to which a program clips by hand. `found` has
    what DeepSpeed shall find on parameters that are trained."""

    def __init__(
        self,
        places: Mapping[nn.Parameter, tuple[int, str]],
        *,
        settle: Callable[[Sequence[int]], None],
        drop: Callable[[str | None], None],
        clipped: Callable[[float], None],
        found: Mapping[nn.Parameter, Access],
    ) -> None:
        self._settle, self._drop_gradients, self.clipped = settle, drop, clipped
        self._places = dict(places)
        # Their names, by identity.
        self.trained = {id(p): name for p, (_, name) in places.items() if p.requires_grad}
        self._fragments = list(found)
        for parameter, fragment in found.items():
            for attribute, method in FRAGMENT.items():
                setattr(parameter, attribute, getattr(fragment, method) if method else fragment)
        _replacement.reads |= {id(parameter): self for parameter in places}
        _replacement.enable()

    def wait(self, parameter: nn.Parameter) -> None:
        """Return when the parameter holds its newest values and is shown."""
        self._settle((self._places[parameter][0],))

    def drop(self, found: set[int]) -> None:
        """Somebody throws the gradients of these parameters away."""
        others = (name for identity, name in self.trained.items() if identity not in found)
        self._drop_gradients(next(others, None))

    def close(self) -> None:
        """The parameters are the user's alone again. Safe to call twice."""
        show(self._places)
        for identity in map(id, self._places):
            if _replacement.reads.get(identity) is self:
                del _replacement.reads[identity]
        for parameter in self._fragments:
            for attribute in FRAGMENT if _is_ours(parameter) else ():
                delattr(parameter, attribute)
        self._places.clear()
        self.trained.clear()
        self._fragments.clear()
        if not _replacement.reads:
            _replacement.disable()


Layers = Sequence[int]


def _own_storages(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """What a state dict gives out shows the parameter's memory, as ever, through a storage that is
    no larger than that: who saves it saves no more. Its version is the parameter's still."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and value is not parameter and not value.is_meta:
            whole = value.untyped_storage().nbytes()
            if value.is_contiguous() and value.nbytes < whole and value.nbytes:
                point(value, from_dlpack(torch._C._to_dlpack(value.detach())))  # type: ignore[arg-type]


class StateHooks:
    """`wait` returns when every parameter of these layers holds its newest value, `read` when
    nobody reads the slabs any more; `loaded` takes over new values of these parameters, and of no
    others: what a partial load leaves keeps its masters.
    `parameters[i]` are those of layer i."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Sequence[nn.Parameter]],
        *,
        wait: Callable[[Layers], None],
        read: Callable[[], None],
        loaded: Callable[[Written], None],
    ) -> None:
        self._wait = wait
        self._read = read
        self._loaded = loaded
        self._place_of = {
            parameter: (layer, k)
            for layer, of_layer in enumerate(parameters)
            for k, parameter in enumerate(of_layer)
        }
        # The outermost of our modules that is being loaded, and the prefix of its names.
        self._loading: tuple[nn.Module, str] | None = None
        # Of its parameters: the versions before it, and those that the state dict has a value for.
        # A module with a loader of its own may know either way alone.
        self._versions: dict[nn.Parameter, int] = {}
        self._named: set[nn.Parameter] = set()
        self._handles = []
        for module in model.modules():
            # A part's state dict is made of its modules', each of which waits for its own.
            own = self._layers_of(module, recurse=module is model)
            if own or module is model:
                waiting = OwnHook(partial(self._before_save, own))
                self._handles.append(module.register_state_dict_pre_hook(waiting))
            if own:
                hook = module._register_state_dict_hook(OwnHook(_own_storages))
                self._handles.append(hook)
            self._handles += (
                module.register_load_state_dict_pre_hook(OwnHook(self._before_load)),
                module.register_load_state_dict_post_hook(OwnHook(self._after_load)),
            )

    def _layers_of(self, module: nn.Module, *, recurse: bool) -> list[int]:
        return sorted({self._place_of[p][0] for p in self._held(module, recurse=recurse)})

    def _held(self, module: nn.Module, *, recurse: bool) -> set[nn.Parameter]:
        modules = module.modules() if recurse else (module,)
        held = {p for each in modules for p in each._parameters.values() if p is not None}
        return held & self._place_of.keys()

    def _before_save(self, layers: Layers, *_: Any) -> None:
        self._wait(layers)

    def _before_load(self, module: Any, state: Any, prefix: Any, metadata: Any, *_: Any) -> None:
        if self._loading is not None and len(prefix) > len(self._loading[1]):
            self._note(module, state, prefix)
            return  # inside the load of a larger part
        if metadata.get("assign_to_params_buffers", False):
            raise ConfigError(
                "load_state_dict(assign=True) would replace the parameters that the engine trains: "
                "leave assign out"
            )
        self._loading = module, prefix
        self._wait(self._layers_of(module, recurse=True))
        self._read()
        self._versions = {p: p._version for p in self._held(module, recurse=True)}
        self._named.clear()
        self._note(module, state, prefix)

    def _note(self, module: nn.Module, state: Any, prefix: str) -> None:
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if parameter in self._versions and getattr(value, "shape", None) == parameter.shape:
                self._named.add(parameter)

    def _after_load(self, module: nn.Module, *_: Any) -> None:
        if self._loading is not None and module is self._loading[0]:
            self._loading = None
            written: dict[int, set[int]] = {}
            for parameter, version in self._versions.items():
                if parameter in self._named or parameter._version != version:
                    layer, k = self._place_of[parameter]
                    written.setdefault(layer, set()).add(k)
            self._versions.clear()
            self._loaded(written)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def check_free(model: nn.Module) -> None:
    """ConfigError when a live engine streams the model or a part of it."""
    for name, module in model.named_modules():
        if any(map(serves, module._state_dict_pre_hooks.values())):
            raise ConfigError(
                f"model: an engine streams {name or 'it'} already; call its destroy() first"
            )
