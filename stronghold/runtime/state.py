"""The user's own `state_dict` and `load_state_dict`, kept true while layers stream.

Owns the hooks on the user's modules, the whole model's and those of its parts, that wait for
pending updates and make masters follow what is loaded. Keeps no reference to the engine: one that
its user drops is closed, though the model lives on. The training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from stronghold.errors import ConfigError
from stronghold.runtime.own_hooks import OwnHook, serves
from stronghold.runtime.runtime import Written

Layers = Sequence[int]


class StateHooks:
    """`wait` returns when every parameter of these layers holds its newest value, `read` when
    nobody reads the slabs any more; `loaded` takes over new values of these parameters, and of no
    others: what a partial load leaves keeps its masters.
    `parameters[i]` are those of layer i.
    """

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
