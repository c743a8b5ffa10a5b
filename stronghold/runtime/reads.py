"""The user's own `parameters()`, `named_parameters()` and copies, true while updates are pending.

Owns replacements, in this process's memory and only while an engine lives: that of
`torch.nn.Module.named_parameters`, which `parameters` calls, and those of how a parameter is copied
and pickled. They give a parameter that an engine trains once that one's newest weights are where it
points. So code that knows nothing of the engine (a copy of the weights for generation, a moving
average, a sum of norms) never reads weights of two steps. Other modules are given as they are;
nothing is written on any module. The training thread enables, closes and iterates, and autograd's
in backward.

[Note: one at a time] A parameter waits for its own layer when it is reached: what asks for a device
or a dtype, `next(parameters())`, waits for no more than the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

Named = Iterator[tuple[str, nn.Parameter]]


class _Replacement:
    """What stands at `nn.Module.named_parameters`, what stood there before, and whom to wait for:
    by a parameter's identity, what returns when it holds its newest values.
    """

    def __init__(self) -> None:
        self.waits: dict[int, Callable[[], None]] = {}
        # By class and name: what stood there, and what stands there now.
        self._replaced: dict[tuple[type, str], tuple[Any, Any]] = {}

    def enable(self) -> None:
        self._replace(nn.Module, "named_parameters", self._waiting)
        for name in ("__deepcopy__", "__reduce_ex__"):
            self._replace(nn.Parameter, name, self._waiting_for_itself)

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        if (owner, name) not in self._replaced:  # else: another wrapper kept ours inside
            original = getattr(owner, name)
            self._replaced[owner, name] = (original, make(original))
            setattr(owner, name, self._replaced[owner, name][1])

    def disable(self) -> None:
        for (owner, name), (original, installed) in list(self._replaced.items()):
            if getattr(owner, name) is installed:
                setattr(owner, name, original)
                del self._replaced[owner, name]

    def _wait(self, parameter: Any) -> None:
        wait = self.waits.get(id(parameter))
        if wait is not None:
            wait()

    def _waiting(self, original: Callable[..., Named]) -> Callable[..., Named]:
        @functools.wraps(original)
        def named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Named:
            for name, parameter in original(module, *args, **kwargs):
                self._wait(parameter)
                yield name, parameter

        return named_parameters

    def _waiting_for_itself(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def copied(parameter: nn.Parameter, *args: Any) -> Any:
            self._wait(parameter)
            return original(parameter, *args)

        return copied


_replacement = _Replacement()


class ParameterReads:
    """Of one engine. `parameters[i]` are those of layer i; `settle` returns when the newest weights
    of the layers that it is given are where their parameters point.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        settle: Callable[[Sequence[int]], None],
    ) -> None:
        self._waits = {
            id(parameter): functools.partial(settle, (layer,))
            for layer, of_layer in enumerate(parameters)
            for parameter in of_layer
        }
        _replacement.waits |= self._waits
        _replacement.enable()

    def close(self) -> None:
        """The parameters are the user's alone again. Safe to call twice."""
        for identity, wait in self._waits.items():
            if _replacement.waits.get(identity) is wait:
                del _replacement.waits[identity]
        self._waits.clear()
        if not _replacement.waits:
            _replacement.disable()
