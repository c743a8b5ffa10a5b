"""A block's forward that is run again in backward: torch's non-reentrant checkpoint, from hooks.

Owns what the second run needs to be the first one again: its arguments, and the block as it was;
and what that run finds, until autograd takes it. Entered by the training thread in forward and by
autograd's in backward.

[Note: one for all] Torch's hooks of a saved tensor take ten microseconds each, twice. They are
asked for one tensor that stands for all of a forward's: torch runs the forward again when that one
is wanted, and ends it once that one has come, after the last of ours. What torch looks at is looked
at here: how many tensors come, and of which shape, dtype and device. As torch has it, a tensor that
was found lives until it is taken, or its node is gone, and serves one backward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from stronghold.runtime.kept_arguments import put_back, taken
from stronghold.runtime.kept_module import KeptModule


def recomputation(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], None]
) -> Generator[None, None, None]:
    """A generator: the first `next` opens what stands around the forward, the second closes it.
    `check` comes before each further run, and raises where the module must not run again.

    Every tensor among the arguments, however deep, goes through torch's hands: it refuses one that
    was written in place meanwhile, and finds the devices whose random states it keeps.
    """
    kept = KeptModule(module, (args, kwargs))
    call, tensors = taken((args, kwargs))

    def again(*tensors: torch.Tensor) -> None:
        check()
        args, kwargs = put_back(call, tensors)
        module(*args, **kwargs)

    options: dict[str, Any] = {
        "preserve_rng_state": True,
        "context_fn": lambda: (contextlib.nullcontext(), kept),
        "determinism_check": "default",
        "debug": False,
        "early_stop": True,
    }
    positional = [options[name] for name in _names() if name in options]
    generator: Generator[None, None, None] = _make(again, *positional, *tensors)
    return generator


_make = torch_checkpoint._checkpoint_without_reentrant_generator


@functools.cache
def _names() -> tuple[str, ...]:
    """What this release of torch takes after the function."""
    return tuple(inspect.signature(_make).parameters)[1:]


class SavedTensor(NamedTuple):
    """A saved tensor that stays where it is, and its version then."""

    tensor: torch.Tensor
    version: int


class Recomputed:
    """What autograd keeps of a tensor that the second run will find."""

    __slots__ = ("__weakref__", "device", "dtype", "found", "rerun", "shape", "task")

    def __init__(self, rerun: Rerun, tensor: torch.Tensor) -> None:
        self.rerun = rerun
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.found: SavedTensor | None = None
        self.task: object = None  # of the backward for which it was found

    def take(self, run: Callable[[Rerun], None]) -> SavedTensor:
        """What was found for this backward, after a `run` if nothing was."""
        task = _task()
        if self.found is None or self.task != task or task == -1:
            run(self.rerun)
        found, self.found = self.found, None
        if found is None:
            raise torch_checkpoint.CheckpointError(
                "a tensor was saved in the forward, and not when it was run again"
            )
        return found


class Rerun:
    """One forward's saved tensors; `pair` are torch's hooks that stand around it."""

    __slots__ = ("_different", "_num_found", "_pair", "_saved", "_stands_for_all", "_task")

    def __init__(self, pair: tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]) -> None:
        self._pair = pair
        self._saved: list[weakref.ref[Recomputed]] = []
        self._stands_for_all: Any = None
        self._num_found = 0
        self._different: list[str] = []
        self._task: object = None

    def save(self, tensor: torch.Tensor) -> Recomputed:
        """Autograd saves the tensor in the first run."""
        if not self._saved:
            self._stands_for_all = self._pair[0](_ALL)
        saved = Recomputed(self, tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def run(self) -> None:
        """Run the forward again. CheckpointError where it does not find what the first one did."""
        self._num_found, self._different, self._task = 0, [], _task()
        try:
            self._pair[1](self._stands_for_all)
        except torch_checkpoint.CheckpointError as error:
            if self._num_found == len(self._saved):
                raise
            raise torch_checkpoint.CheckpointError(
                f"a forward that was run again in backward saved {self._num_found} tensors, "
                f"expected {len(self._saved)} as in the first run: it takes another way when it is "
                'run again; set stronghold.activations to "keep" or "offload"'
            ) from error
        if self._different:
            raise torch_checkpoint.CheckpointError(
                "a forward that was run again in backward found other tensors than the first run: "
                f"{'; '.join(self._different)}; set stronghold.activations to "
                '"keep" or "offload"'
            )

    def find(self, tensor: torch.Tensor, torchs: Callable[[torch.Tensor], Any]) -> SavedTensor:
        """Autograd saves the tensor in the second run; `torchs` is what torch does then."""
        index, self._num_found = self._num_found, self._num_found + 1
        if index >= len(self._saved):
            torchs(tensor)  # raises: only where its user forbade to stop early do we come here
        found = SavedTensor(tensor.detach(), tensor._version)
        saved = self._saved[index]() if index < len(self._saved) else None
        if saved is not None:
            saved.found, saved.task = found, self._task
            was, now = (
                (saved.shape, saved.dtype, saved.device),
                (tensor.shape, tensor.dtype, tensor.device),
            )
            if was != now:
                self._different.append(f"tensor {index}: got {_words(now)}, expected {_words(was)}")
        if index + 1 == len(self._saved):
            torchs(_ALL)  # ends the second run
        return found


_ALL = torch.empty(0)


def _words(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{dtype} {list(shape)} on {device}"


def _task() -> object:
    """The backward that runs, or what torch takes several for; -1 outside of any."""
    return _group() or torch._C._current_graph_task_id()


_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)
