"""State that a block carries from one chunk of a call to the next.

Owns the records by which such state is noticed: memory that several chunks use (`Carried`), and
containers among the arguments. Such chunks may not run at the same time, since they would race. The
training thread enters in forward.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from stronghold.errors import ConfigError
from stronghold.streaming.activations.chunk_values import KEY, tensors_of
from stronghold.streaming.patches.autograd import TorchDispatchMode
from stronghold.streaming.patches.modules import parameter_table
from stronghold.streaming.patches.tensors import arguments_of, version_of


@dataclass(slots=True)
class _StorageUse:
    """The uses of one storage by the chunks of a call.

    reference    keeps the address from being used again; the memory itself may be freed
    first_chunk  number of the chunk that used it first
    has_others   whether other chunks used it, too
    is_written   whether one of them wrote
    """

    reference: StorageWeakRef
    first_chunk: int
    has_others: bool
    is_written: bool


class Carried(TorchDispatchMode):
    """Notices memory that a block writes in one chunk, and reads or writes in another (a hazard).

    conflict  describes the first such use, with its operator; "": there is none
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conflict = ""
        self._chunk = 0  # the number of the running chunk
        self._uses: dict[int, _StorageUse] = {}  # by address of the storage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts run as they are, with the same bits."""
        return True

    @contextlib.contextmanager
    def chunk(self, number: int) -> Iterator[None]:
        """Context manager around the forward of one chunk."""
        self._chunk = number
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for position, argument in enumerate(arguments_of(func)):
            is_positional = position < len(args)
            value = args[position] if is_positional else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_of(value):
                self._use(func, tensor, is_written=writes, is_new=False)
        for tensor in tensors_of(result):
            self._use(func, tensor, is_written=False, is_new=True)
        return result

    def _use(self, func: Any, tensor: torch.Tensor, *, is_written: bool, is_new: bool) -> None:
        """Record a use. `is_new`: the tensor is a result, which the operator wrote unless its
        memory is an argument's."""
        try:
            reference = StorageWeakRef(tensor.untyped_storage())
        # a subclass without memory of its own
        except (NotImplementedError, RuntimeError):
            return
        use = self._uses.get(reference.cdata)
        if use is None:
            self._uses[reference.cdata] = _StorageUse(
                reference, self._chunk, has_others=False, is_written=is_written or is_new
            )
            return
        use.has_others = use.has_others or use.first_chunk != self._chunk
        use.is_written = use.is_written or is_written
        if use.has_others and use.is_written and not self.conflict:
            self.conflict = f"what another one uses ({func}, {list(tensor.shape)})"


# -- containers among the arguments ----------------------------------------------------------------
Contents = list[tuple[Any, list[Any]]]  # containers, each with its keys and values


def contents_of(call: Sequence[Any]) -> Contents:
    """Return the lists, dicts and plain objects among a call's (args, kwargs), with their items."""
    args, kwargs = call
    contents: Contents = []
    for value in (*args, *kwargs.values()):
        if _is_container(value):
            contents.append((value, _container_items(value)))
    return contents


def _is_container(value: Any) -> bool:
    if isinstance(value, list | dict):
        return True
    is_opaque = isinstance(value, torch.Tensor | nn.Module | type)
    return hasattr(value, "__dict__") and not is_opaque


def _container_items(value: Any) -> list[Any]:
    if isinstance(value, list):
        return list(value)
    table = value if isinstance(value, dict) else vars(value)
    return [*table.keys(), *table.values()]


def refuse_change(block_name: str, contents: Contents) -> None:
    """ConfigError if the block has changed an argument: another chunk has another container."""
    for value, before in contents:
        after = _container_items(value)
        is_same = len(after) == len(before)
        is_same = is_same and all(new is old for new, old in zip(after, before, strict=True))
        if not is_same:
            raise ConfigError(
                f"{KEY}: {block_name} changes a {type(value).__name__} that it is given, which "
                "would have what one chunk wrote: leave the key out, or let the block return it"
            )


# -- tensors ---------------------------------------------------------------------------------------
def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the version counters of the tensors; 0 for inference tensors, which have none."""
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def holds_tensors(module: nn.Module) -> bool:
    """True if the block's modules hold tensors besides parameters, also in lists and dicts."""
    for submodule in module.modules():
        for value in vars(submodule).values():
            if value is not parameter_table(submodule) and _has_tensor(value):
                return True
    return False


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)
