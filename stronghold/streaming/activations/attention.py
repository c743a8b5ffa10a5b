"""Results of attention kernels, kept for the second run of a recomputed block.

Owns the results of the kernels inside `torch.nn.functional.scaled_dot_product_attention`: the
output and the log-sum-exp of the rows. `patches.attention` replaces the function. In the second run
the kept results are returned, and nothing is multiplied. Autograd, which stands above, records the
same node over the same bits. Entered by the training thread in forward and by autograd's thread in
backward.

[Note: dropout] A kernel with dropout draws from the device's generator:

1. Training thread, first run: the kernel draws. The generator's state after the call is kept.
2. Autograd's thread, second run: the kernel does not run. The generator is set to the kept state,
   so that later draws of the block are those of the first run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.model.gpu_operators import ATTENTION_KERNELS
from stronghold.streaming.activations.offload import LayerOffload
from stronghold.streaming.activations.saved import SavedActivation, SavedTensor
from stronghold.streaming.patches.attention import Plain, Through
from stronghold.streaming.patches.autograd import TorchDispatchMode
from stronghold.streaming.patches.tensors import version_of

logger = logging.getLogger("stronghold")

DROPOUT_POSITION = 4  # of `dropout_p` among the function's arguments


class _KernelCall(NamedTuple):
    """One call of a kernel, and its results."""

    kernel: Any
    results: tuple[Any, ...]


class _KeptCall(NamedTuple):
    """The kept results of one kernel call.

    results    handles of tensors. A GPU's kernels also return numbers and None, which stay
    generator  the device generator's state after a call with dropout; None without
    """

    kernel: Any
    results: tuple[Any, ...]
    generator: torch.Tensor | None


class _KernelRecorder(TorchDispatchMode):
    """Records the calls of attention's kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_KernelCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in ATTENTION_KERNELS:
            self.calls.append(_KernelCall(func, results))
        return results


class _KernelReplay(TorchDispatchMode):
    """Returns the kept results in place of the kernels' calls, in their order."""

    def __init__(self, calls: Sequence[_KeptCall], kept: AttentionCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = iter(calls)
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = next(self._calls, None) if func in ATTENTION_KERNELS else None
        if call is None or call.kernel is not func:
            return func(*args, **(kwargs or {}))
        return self._kept.results_of(call)


class AttentionCalls:
    """The attention calls of one forward that will run again.

    offload  takes the results meanwhile, if given; else they stay on the device
    """

    def __init__(self, device: Device, offload: LayerOffload | None) -> None:
        self._device = device
        self._offload = offload
        # By call of the function: the calls of kernels inside.
        self._calls: list[list[_KeptCall]] = []
        self._next = 0

    @property
    def any(self) -> bool:
        """True if a result is kept."""
        return any(self._calls)

    def first(self, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Call `plain` in the first run, and keep the results of its kernels."""
        with _KernelRecorder() as recorder:
            output = plain(*args, **kwargs)
        generator = None
        if recorder.calls and _dropout_of(args, kwargs) > 0.0:
            generator = random_state(self._device.torch_device)
        kept_calls = []
        for call in recorder.calls:
            results = tuple(map(self._keep, call.results))
            kept_calls.append(_KeptCall(call.kernel, results, generator))
        self._calls.append(kept_calls)
        return output

    def _keep(self, result: Any) -> Any:
        """Return the handle of a tensor; other values as they are."""
        if not isinstance(result, torch.Tensor):
            return result
        stored = None if self._offload is None else self._offload.store_result(result)
        if stored is not None:
            return stored
        return SavedTensor(result.detach(), version_of(result))

    def begin_second_run(self) -> Through:
        """Begin a second run, and return the function that its attention calls go through."""
        self._next = 0
        return self._replay

    def _replay(self, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        index = self._next
        self._next += 1
        calls = self._calls[index] if index < len(self._calls) else []
        if not calls:
            return plain(*args, **kwargs)
        with _KernelReplay(calls, self):
            return plain(*args, **kwargs)

    def results_of(self, call: _KeptCall) -> tuple[Any, ...]:
        """Return the results of a kept call, and advance the generator as the kernel did."""
        if call.generator is not None:
            set_random_state(self._device.torch_device, call.generator)
        return tuple(map(self._resolve, call.results))

    def _resolve(self, result: Any) -> Any:
        if isinstance(result, SavedActivation):
            assert self._offload is not None
            return self._offload.load(result)
        return result.unwritten() if isinstance(result, SavedTensor) else result


def _dropout_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    if len(args) > DROPOUT_POSITION:
        return float(args[DROPOUT_POSITION])
    return float(kwargs.get("dropout_p", 0.0))


@functools.cache
def say_not_kept(name: str) -> None:
    """Log once per class that no fused kernel of torch computes the block's attention."""
    logger.warning(
        "%s: activations are to keep what attention's backward needs, but its attention does not "
        "come from a fused kernel of torch's scaled_dot_product_attention: it is computed again "
        'like the rest, as under "recompute"',
        name,
    )
