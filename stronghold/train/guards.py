"""Hooks on the user's modules for state dicts, copies, pickles and key-value caches.

Owns the hooks for state dicts, the hooks that switch Transformers' caches off, and the class of
every hook that the engine puts on a module. A saved state dict has the newest values. A loaded one
becomes the masters. A cache that the caller passes in never changes. The training thread enters.

[Note: copies]
1. `copy.deepcopy(model)` and `torch.save(model)` copy a module's hooks, too.
2. Hazard: a copied hook would move the engine's layers when the copy is called. It would hold locks
   that cannot be pickled.
3. So the copy of an `OwnHook` does nothing.

[Note: no cache in training] Transformers' models make a key-value cache in every forward, unless
`use_cache` is False, and training never reads it. Keys and values joined to a cache lie in memory
differently, so that other kernels multiply them and other bits come out. A block that runs twice
(recomputation) must not write into one cache twice. So a cache in some plans alone would change
bits. Hence no forward with gradients makes a cache, whatever the plan. Trainer and gradient
checkpointing do the same. A cache that the caller passes in is an input, and stays.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stronghold.config.source import warn_once
from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import follow_device, wrappers
from stronghold.private import with_own_storage
from stronghold.train.layer import point


class OwnHook:
    """A hook of the engine on the user's module. Its copies do nothing ([Note: copies]). torch
    never compiles it."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._call)(*args, **kwargs)
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
WITHIN_PASS = (
    "{operation}: called within a forward or a backward, where weights come and go: call it after "
    "engine.step"
)
COMPILED_WHOLE = (
    "torch.compile of a whole model that streams: got one graph, expected one per block, since "
    "layers come and go between them. Leave torch.compile(model) or model.compile() out and call "
    "engine.compile() after initialize, or block.compile() of each block"
)


def without_effect() -> OwnHook:
    """Return the hook that a copy of a module has in place of the engine's."""
    return OwnHook(_nothing)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def serves(hook: Any) -> bool:
    """True if `hook` is an engine's hook, and no copy of one."""
    return isinstance(hook, OwnHook) and hook._call is not _nothing


Layers = Sequence[int]
Written = Mapping[int, Collection[int]]
"""Parameters by layer and their positions in it."""


def _own_storages(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give each tensor of a state dict a storage as large as itself, over the parameter's memory.

    A program that saves the tensor then saves no other parameter. The tensor keeps the parameter's
    version.
    """
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and value is not parameter and not value.is_meta:
            whole = value.untyped_storage().nbytes()
            if value.is_contiguous() and value.nbytes < whole and value.nbytes:
                point(value, with_own_storage(value.detach()))


class StateHooks:
    """Hooks for state dicts of the model and its modules.

    `parameters[i]`: parameters of layer i. `wait(layers)` returns when every parameter of these
    layers has its newest value. `read()` returns when no operation reads the slabs.
    `loaded(written)` takes over new values of these parameters alone: the others keep their
    masters.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Sequence[torch.Tensor]],
        *,
        wait: Callable[[Layers], None],
        read: Callable[[], None],
        loaded: Callable[[Written], None],
    ) -> None:
        self._wait = wait
        self._read = read
        self._loaded = loaded
        self._wrappers = wrappers(model)
        follow_device(self._wrappers)
        self._place_of = {
            parameter: (layer, k)
            for layer, of_layer in enumerate(parameters)
            for k, parameter in enumerate(of_layer)
        }
        # The outermost module that is loading now, and the prefix of its names.
        self._loading: tuple[nn.Module, str] | None = None
        # Versions of its parameters before the load, and parameters with a value in the state dict.
        # A module with its own loader may show one of the two alone.
        self._versions: dict[torch.Tensor, int] = {}
        self._named: set[torch.Tensor] = set()
        self._handles = []
        for module in model.modules():
            # A state dict consists of those of its modules. Each module waits for its own layers.
            layers = self._layers_of(module, recurse=module is model)
            if layers or module is model:
                waiting = OwnHook(partial(self._before_save, layers))
                self._handles.append(module.register_state_dict_pre_hook(waiting))
            if layers:
                hook = module._register_state_dict_hook(OwnHook(_own_storages))
                self._handles.append(hook)
            self._handles += (
                module.register_load_state_dict_pre_hook(OwnHook(self._before_load)),
                module.register_load_state_dict_post_hook(OwnHook(self._after_load)),
            )

    def _layers_of(self, module: nn.Module, *, recurse: bool) -> list[int]:
        return sorted({self._place_of[p][0] for p in self._held(module, recurse=recurse)})

    def _held(self, module: nn.Module, *, recurse: bool) -> set[torch.Tensor]:
        modules = module.modules() if recurse else (module,)
        tables = (each._parameters for each in modules)
        held = (p for table in tables for p in table.values() if p is not None)
        return {p for p in held if p in self._place_of}

    def _before_save(self, layers: Layers, *_: Any) -> None:
        self._wait(layers)
        follow_device(self._wrappers)

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


# -- key-value caches -----------------------------------------------------------------------------
def forbid_caches(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Make forwards with gradients create no key-value cache, until `undo` is closed."""
    for module in model.modules():
        if _comes_from_transformers(type(module), "PreTrainedModel"):
            hook = OwnHook(_without_cache)
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before a forward: set its argument `use_cache` to False. None: nothing changes."""
    if not torch.is_grad_enabled() or any(map(is_cache, (*args, *kwargs.values()))):
        return None
    # Frameworks put other functions in the place of a module's forward: read the present one.
    names = list(inspect.signature(module.forward).parameters)
    if "use_cache" not in names:
        return None
    position = names.index("use_cache")
    is_positional = len(args) > position
    use_cache = args[position] if is_positional else kwargs.get("use_cache")
    if use_cache:
        warn_once(
            f"{type(module).__name__} was asked for a key-value cache (use_cache=True) while "
            "gradients are wanted: none is made. Call it under torch.no_grad(), or pass a cache of "
            "your own as past_key_values."
        )
    if is_positional:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments without empty key-value caches, which training never reads.

    Transformers' own checkpointing drops them in the same way. A cache with keys is an input
    (prefix tuning), and stays.
    """
    args = tuple(map(_without_empty_cache, args))
    kwargs = {name: _without_empty_cache(value) for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _without_empty_cache(value: Any) -> Any:
    is_empty_cache = is_cache(value) and not value.get_seq_length()
    return None if is_empty_cache else value


def is_cache(value: Any) -> bool:
    """True for one of Transformers' key-value caches."""
    if value is None or isinstance(value, (torch.Tensor, bool, tuple)):
        return False
    return _comes_from_transformers(type(value), "Cache")


def _comes_from_transformers(value_type: type, base_name: str) -> bool:
    """True if the type has a base of this name in transformers.

    Names are compared, since transformers need not be installed, and its import takes seconds.
    """
    for base in value_type.__mro__:
        if base.__name__ == base_name and base.__module__.startswith("transformers"):
            return True
    return False
