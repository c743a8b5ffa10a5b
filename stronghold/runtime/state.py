"""The user's own `state_dict` and `load_state_dict`, kept true while layers stream.

Owns the hooks on the user's model that wait for pending updates and make masters follow what is
loaded. Keeps no reference to the engine: one that its user drops is closed, though the model lives
on. The training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stronghold.errors import ConfigError


class StateHooks:
    """`wait` returns when every parameter holds its newest value, `read` when nobody reads the
    slabs any more; `loaded` takes over new values.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wait: Callable[[], None],
        read: Callable[[], None],
        loaded: Callable[[], None],
    ) -> None:
        self._wait = wait
        self._read = read
        self._loaded = loaded
        self._handles = (
            model.register_state_dict_pre_hook(self._before_save),
            model.register_load_state_dict_pre_hook(self._before_load),
            model.register_load_state_dict_post_hook(self._after_load),
        )

    def _before_save(self, *_: Any) -> None:
        self._wait()

    def _before_load(self, module: Any, state: Any, prefix: Any, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ConfigError(
                "load_state_dict(assign=True) would replace the parameters that the engine trains: "
                "leave assign out"
            )
        self._wait()
        self._read()

    def _after_load(self, *_: Any) -> None:
        self._loaded()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def check_free(model: nn.Module) -> None:
    """ConfigError when a live engine streams the model or a part of it."""
    for name, module in model.named_modules():
        for hook in module._state_dict_pre_hooks.values():
            if isinstance(getattr(hook, "__self__", None), StateHooks):
                raise ConfigError(
                    f"model: an engine streams {name or 'it'} already; call its destroy() first"
                )
