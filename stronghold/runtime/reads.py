"""The user's own `parameters()` and `named_parameters()`, kept true while updates are pending.

Owns one replacement, in this process's memory and only while an engine lives: that of
`torch.nn.Module.named_parameters`, which `parameters` calls. It gives a parameter that an engine
trains once that one's newest weights are where it points. So code that knows nothing of the engine
(a copy of the weights for generation, a moving average, a sum of norms) never reads weights of two
steps. Other modules are given as they are; nothing is written on any module. The training thread
enables, closes and iterates, and autograd's in backward.

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
        self._original: Callable[..., Named] | None = None
        self._installed: Callable[..., Named] | None = None

    def enable(self) -> None:
        if self._installed is None:  # else: another wrapper kept ours inside
            self._original = nn.Module.named_parameters
            self._installed = self._waiting(self._original)
            nn.Module.named_parameters = self._installed  # type: ignore[method-assign]

    def disable(self) -> None:
        if nn.Module.named_parameters is self._installed and self._original is not None:
            nn.Module.named_parameters = self._original  # type: ignore[method-assign]
            self._original = self._installed = None

    def _waiting(self, original: Callable[..., Named]) -> Callable[..., Named]:
        @functools.wraps(original)
        def named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Named:
            for name, parameter in original(module, *args, **kwargs):
                wait = self.waits.get(id(parameter))
                if wait is not None:
                    wait()
                yield name, parameter

        return named_parameters


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
