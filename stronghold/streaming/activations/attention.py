"""What attention's forward gave, kept for the second run of a block.

Owns the results of the kernels of `torch.nn.functional.scaled_dot_product_attention` in a block's
forward: the output and the logarithms of the rows' sums. `patches.attention` replaces the function.
In the second run they are returned again, and nothing is multiplied; autograd, which stands above,
records the same node over the same bits. Entered by the training thread in forward and by
autograd's in backward.

[Note: dropout] A kernel that drops draws from the device's generator, and where it does not run,
what comes after it in the block must draw as if it had: the generator's state is kept as well.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.model.gpu_operators import ATTENTION_KERNELS, AttentionCost, attention_cost
from stronghold.streaming.patches.attention import Plain, Through
from stronghold.streaming.patches.autograd import TorchDispatchMode

logger = logging.getLogger("stronghold")


class _Call(NamedTuple):
    """A kernel's call, and the generator after it. Of what it returned: what gives each tensor
    again; a GPU's kernels also return numbers, and None for tensors that are not there."""

    kernel: Any
    kept: tuple[Any, ...]
    generator: torch.Tensor | None


class _Watch(TorchDispatchMode):
    """Remembers what attention's kernels return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Kernels, what they were given, and what they returned.
        self.found: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ATTENTION_KERNELS:
            self.found.append((func, args[:3], result))
        return result


class _Answer(TorchDispatchMode):
    """Returns what they returned, in their order."""

    def __init__(self, calls: list[_Call], device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = iter(calls)
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = next(self._calls, None) if func in ATTENTION_KERNELS else None
        if call is None or call.kernel is not func:
            return func(*args, **(kwargs or {}))
        if call.generator is not None:
            set_random_state(self._device.torch_device, call.generator)
        return tuple(part() if callable(part) else part for part in call.kept)


class AttentionCalls:
    """Of one forward that will run again. `keep` keeps a tensor in between, and returns what gives
    it again."""

    def __init__(
        self, keep: Callable[[torch.Tensor], Callable[[], torch.Tensor]], device: Device
    ) -> None:
        self._keep = keep
        self._device = device
        self._calls: list[list[_Call]] = []  # of kernels, by call of the function
        self._next = 0

    @property
    def any(self) -> bool:
        """Whether anything is kept."""
        return any(self._calls)

    def first(self, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """A call in the first run."""
        with _Watch() as watch:
            output = plain(*args, **kwargs)
        drops = watch.found and (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0
        generator = random_state(self._device.torch_device) if drops else None
        self._calls.append(
            [
                _Call(kernel, tuple(map(self._kept, results)), generator)
                for kernel, _, results in watch.found
            ]
        )
        return output

    def _kept(self, value: Any) -> Any:
        return self._keep(value) if isinstance(value, torch.Tensor) else value

    def again(self) -> Through:
        """What the calls of a second run, which begins now, go through."""
        self._next = 0
        return self._answer

    def _answer(self, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        index, self._next = self._next, self._next + 1
        calls = self._calls[index] if index < len(self._calls) else []
        if not calls:
            return plain(*args, **kwargs)
        with _Answer(calls, self._device):
            return plain(*args, **kwargs)


def watched(tell: Callable[[AttentionCost], None]) -> Through:
    """Calls as they are; `tell` is called for each that a kernel computed."""

    def through(plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with _Watch() as watch:
            output = plain(*args, **kwargs)
        for _, given, results in watch.found:
            tell(attention_cost(given, results))
        return output

    return through


@functools.cache
def say_not_kept(name: str) -> None:
    """A block whose attention no kernel of torch's computed; once for each class of blocks."""
    logger.warning(
        "%s: activations are to keep what attention's backward needs, but its attention does not "
        "come from a fused kernel of torch's scaled_dot_product_attention: it is computed again "
        'like the rest, as under "recompute"',
        name,
    )
