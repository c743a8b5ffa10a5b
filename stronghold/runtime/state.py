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

Layers = Sequence[int]


class StateHooks:
    """`wait` returns when every parameter of these layers holds its newest value, `read` when
    nobody reads the slabs any more; `loaded` takes over new values of these layers.
    `parameters[i]` are those of layer i.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Sequence[nn.Parameter]],
        *,
        wait: Callable[[Layers], None],
        read: Callable[[], None],
        loaded: Callable[[Layers], None],
    ) -> None:
        self._wait = wait
        self._read = read
        self._loaded = loaded
        self._layer_of = {p: layer for layer, of_layer in enumerate(parameters) for p in of_layer}
        # The outermost of our modules that is being loaded, and the prefix of its names.
        self._loading: tuple[nn.Module, str] | None = None
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
        modules = module.modules() if recurse else (module,)
        held = {p for each in modules for p in each._parameters.values() if p is not None}
        return sorted({self._layer_of[p] for p in held if p in self._layer_of})

    def _before_save(self, layers: Layers, *_: Any) -> None:
        self._wait(layers)

    def _before_load(self, module: Any, state: Any, prefix: Any, metadata: Any, *_: Any) -> None:
        if self._loading is not None and len(prefix) > len(self._loading[1]):
            return  # inside the load of a larger part
        if metadata.get("assign_to_params_buffers", False):
            raise ConfigError(
                "load_state_dict(assign=True) would replace the parameters that the engine trains: "
                "leave assign out"
            )
        self._loading = module, prefix
        self._wait(self._layers_of(module, recurse=True))
        self._read()

    def _after_load(self, module: nn.Module, *_: Any) -> None:
        if self._loading is not None and module is self._loading[0]:
            self._loading = None
            self._loaded(self._layers_of(module, recurse=True))

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
