"""Effects of a divided call: what a block does beside its output.

[Note: what a block holds] The first chunk may make attributes, buffers, lists and objects of the
block's modules: a table of positions is the same for all chunks. A later change belongs to one
chunk and not to the batch (a running mean, an output that is kept). It is refused. Nothing sees
globals, closures, large NumPy arrays, and the inside of objects of C.

[Note: trial] The first call of each class of blocks computes two chunks, and both at once, without
dropout and gradients. They must be equal but for rounding. So a norm or a sum over the batch is
noticed before it trains. The first of these three calls may change what the block holds, as the
first chunk may.

[Note: hooks inside] Hooks on the modules inside a divided block wait while the chunks run. After
the last chunk they are called as for the whole batch, with the joined arguments and output.
Transformers' recorders (router logits, attentions, hidden states) are such hooks. Hooks that could
change a chunk, and hooks on gradients, are refused by name. The engine's own hooks are let through.
"""

from __future__ import annotations

import enum
import logging
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stronghold.devices.device import random_state, set_random_state
from stronghold.errors import ConfigError
from stronghold.private import has_gradient_hooks
from stronghold.train.chunk_values import KEY, Call, join, split, tensors_of
from stronghold.train.guards import OwnHook

Result = TypeVar("Result")


# -- hooks inside a block -------------------------------------------------------------------------
Records = list[tuple[Any, ...]]  # of a chunk: (hook, what it was to be called with), in order


class InnerHooks:
    """The hooks on the modules inside one block, and on their gradients ([Note: hooks inside])."""

    def __init__(self, block_name: str, block: nn.Module) -> None:
        self._block_name = block_name
        self._modules: dict[str, nn.Module] = {}
        self._forwards: dict[str, Any] = {}  # the instances' own, which replace their classes'
        for name, module in block.named_modules():
            if module is not block:
                self._modules[name] = module
                self._forwards[name] = vars(module).get("forward")

    def refuse(self) -> None:
        """ConfigError for what would see, or change, the call of a chunk as that of the batch."""
        for name, module in self._modules.items():
            if vars(module).get("forward") is not self._forwards[name]:
                found = "forward that was replaced after initialize"
            elif not all(isinstance(hook, OwnHook) for hook in module._forward_pre_hooks.values()):
                found = "hook before its forward"
            elif has_gradient_hooks(module):
                found = "hook on its gradient"
            else:
                continue
            raise ConfigError(
                f"{KEY}: {self._block_name}.{name} has a {found}, which would get a chunk in place "
                f"of the batch: put it on {self._block_name}, or leave the key out"
            )

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Return the hooked modules' names inside the block, each with the number of its hooks."""
        counts = []
        for name, module in self._modules.items():
            if hooks := module._forward_hooks:
                counts.append((name, len(hooks)))
        return tuple(counts)

    def run(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Records]:
        """Call `forward`, and return its output and the calls of the hooks, which wait."""
        records: Records = []
        waiting = []
        for name, _ in self.counts():
            table = self._modules[name]._forward_hooks
            waiting.append((table, dict(table)))

        def work() -> Any:
            for table, hooks in waiting:
                for key, hook in hooks.items():
                    table[key] = partial(_record, records, hook)
            return forward(*args, **kwargs)

        def restore() -> None:
            for table, hooks in waiting:
                for key in table.keys() & hooks.keys():
                    table[key] = hooks[key]

        return run_and_restore(work, restore), records

    def call(self, records: Records) -> None:
        """Call the hooks that waited. ConfigError for one that returns another output."""
        for hook, *given in records:
            if hook(*given) is not None:
                raise ConfigError(
                    f"{KEY}: a forward hook on a {type(given[0]).__name__} in {self._block_name} "
                    "returns another output, which chunks have not got: let it return None, or "
                    "leave the key out"
                )


def _record(records: Records, hook: Callable[..., Any], *given: Any) -> None:
    records.append((hook, *given))


# -- what a block holds ----------------------------------------------------------------------------
MAX_DEPTH = 5  # of containers and objects inside one another
MAX_ITEMS = 1024  # of a longer container the length alone is compared
MAX_ARRAY_BYTES = 4096  # of a larger NumPy array the identity alone is compared
_BY_VALUE = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# Objects that are not entered.
_CODE = (types.FunctionType, types.MethodType, partial, type)
_WHOLE = (nn.Module, enum.Enum, logging.Logger, types.ModuleType, *_CODE)
_SKIPPED = frozenset({*vars(nn.Module()), "forward"})


class Item(NamedTuple):
    """One value, by reference, with its version (tensor) or length (container). `owner`: class of
    the module that holds it, by the attribute `name`."""

    owner: str
    name: str
    value: Any
    size: int


class Held:
    """A snapshot of all that these modules hold, or the arguments of a call."""

    def __init__(self, modules: Sequence[nn.Module] = (), *, arguments: Sequence[Any] = ()) -> None:
        self._modules, self._arguments = modules, arguments
        self._items = self._present()

    def refuse_change(self, block_name: str, key: str = KEY) -> None:
        """ConfigError if something has changed since ([Note: what a block holds])."""
        changed = _first_change(self._items, self._present())
        if changed is not None:
            name = f"{changed.owner}.{changed.name}" if changed.owner else changed.name
            raise ConfigError(
                f"{key}: {block_name} changes {name} in its forward, which would have what one "
                "chunk wrote, and not the batch: leave the key out, or let the block return it"
            )

    def _present(self) -> list[Item]:
        items: list[Item] = []
        entered: set[int] = set()
        for argument in self._arguments:
            _add("", "an argument", argument, items, entered)
        for module in self._modules:
            owner = type(module).__name__
            for table in (vars(module), module._buffers):
                for name, value in table.items():
                    if name not in _SKIPPED:
                        _add(owner, name, value, items, entered)
        return items


def _add(
    owner: str, name: str, value: Any, items: list[Item], entered: set[int], depth: int = 0
) -> None:
    """Add a value, and what it holds, to `items`. `entered`: identities, for cycles."""
    if type(value) in _BY_VALUE:
        items.append(Item(owner, name, value, 0))
        return
    if isinstance(value, Tensor):
        items.append(Item(owner, name, value, 0 if value.is_inference() else value._version))
        return
    if isinstance(value, np.ndarray) and value.nbytes <= MAX_ARRAY_BYTES:
        items.append(Item(owner, name, value.tobytes(), 0))
        return
    is_container = isinstance(value, _CONTAINERS)
    items.append(Item(owner, name, value, len(value) if is_container else 0))
    if depth == MAX_DEPTH or isinstance(value, _WHOLE) or id(value) in entered:
        return
    entered.add(id(value))
    inner = value if is_container else _attributes(value)
    if len(inner) <= MAX_ITEMS:
        for one in [*inner.values()] if isinstance(inner, dict) else [*inner]:
            _add(owner, name, one, items, entered, depth + 1)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, also of one with `__slots__`."""
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
    present = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **present}


def _first_change(before: Sequence[Item], after: Sequence[Item]) -> Item | None:
    for one, other in zip(before, after, strict=False):
        same = one.value is other.value
        if not same and type(one.value) in _BY_VALUE:
            same = type(one.value) is type(other.value) and one.value == other.value
        if not same or one.size != other.size or one.name != other.name:
            return one
    longer = max(before, after, key=len)
    shorter = min(len(before), len(after))
    return longer[shorter] if len(longer) > shorter else None


def containers_of(call: Call) -> list[Any]:
    """The lists, tables and objects among a call's arguments."""
    args, kwargs = call
    values = (*args, *kwargs.values())
    return [value for value in values if not isinstance(value, Tensor | tuple)]


# -- the trial -------------------------------------------------------------------------------------
# Rounding of another matrix shape, not another function: relative to the largest element.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}

# of a block that gets unexpected arguments
FAILURES = (RuntimeError, IndexError, ValueError)


def tried(
    block_name: str,
    module: nn.Module,
    run: Callable[..., tuple[Any, Records]],
    call: Call,
    sizes: Sequence[int],
    device: torch.device,
) -> frozenset[int]:
    """Try whether a block's calls can be divided ([Note: trial]).

    run    returns the block's output, and the records of its hooks, which are tried, too
    sizes  sequences in each chunk

    Returns the numbers of the returned tensors that are equal for all chunks: a table of relative
    positions, say. ConfigError if the first two chunks differ from both at once.
    """
    batch, (first, second) = sum(sizes), sizes[:2]
    both = split(call, batch, [first + second, batch - first - second])[0]
    try:
        expected, *outputs = _outputs(
            block_name, module, run, [both, *split(call, batch, sizes)[:2]], device
        )
    except ConfigError:
        raise
    except FAILURES as error:
        raise refusal(block_name, first, error) from error
    return shared_tensors(block_name, expected, outputs, sizes[:2])


def _outputs(
    block_name: str,
    module: nn.Module,
    run: Callable[..., tuple[Any, Records]],
    calls: Sequence[Call],
    device: torch.device,
) -> list[Any]:
    """The block's output for each call, without dropout, from copies of the arguments. ConfigError
    if the later calls change what the block holds."""
    modes = [(part, part.training) for part in module.modules()]
    random, random_on_cpu = random_state(device), torch.get_rng_state()

    def work() -> list[Any]:
        for part, _ in modes:
            part.training = False
        outputs = []
        torch.set_grad_enabled(False)
        with torch.compiler.set_stance("force_eager"):  # else it compiles more shapes
            for args, kwargs in tree_map_only(Tensor, torch.clone, list(calls)):
                outputs.append(run(*args, **kwargs))
                if len(outputs) == 1:
                    held = Held([*module.modules()])
        held.refuse_change(block_name)
        return outputs

    def restore() -> None:
        for part, mode in modes:
            part.training = mode
        torch.set_grad_enabled(True)  # a call without gradients is not divided
        torch.set_rng_state(random_on_cpu)
        if random is not None:
            set_random_state(device, random)

    return run_and_restore(work, restore)


def refusal(block_name: str, size: int, error: Exception) -> ConfigError:
    """The error for a block that has failed with `size` sequences."""
    return ConfigError(
        f"{KEY}: {block_name} fails with {size} of the batch's sequences at a time ({error}): an "
        "argument with as many rows as the batch is none, or has several for each sequence, or "
        "the block needs them all. Leave the key out"
    )


def shared_tensors(
    block_name: str, expected: Any, outputs: Sequence[Any], sizes: Sequence[int]
) -> frozenset[int]:
    """Return the numbers of returned tensors with the same shape for a chunk and for both. A table
    of relative positions, say, is one for all chunks.

    expected  what the block has returned for two chunks at once
    outputs   what it has returned for each; `sizes`: sequences in each

    ConfigError if they differ.
    """
    whole = tensors_of(expected)
    columns = zip(*map(tensors_of, outputs), strict=False)
    shared = frozenset(
        number
        for number, (column, tensor) in enumerate(zip(columns, whole, strict=False))
        if all(one.shape == tensor.shape for one in column)
    )
    joined = tensors_of(join(outputs, sizes, block_name, shared))
    if len(joined) != len(whole) or not all(map(_is_close, joined, whole)):
        raise ConfigError(
            f"{KEY}: {block_name} does not give for {sizes[0]} sequences at a time what it gives "
            f"for {sum(sizes)}: it mixes the sequences of a batch (a norm or a sum over it), or an "
            f"argument with {sum(sizes)} rows is no batch. Leave the key out"
        )
    return shared


def _is_close(tensor: Tensor, expected: Tensor) -> bool:
    """True if the tensors are equal but for rounding. NaN is no difference."""
    if tensor.shape != expected.shape or not tensor.is_floating_point():
        return tensor.shape == expected.shape
    limit = TOLERANCE.get(tensor.dtype, 1e-3)
    scale = expected.float().abs().max().clamp_min(1e-6)
    is_apart = (tensor.float() - expected.float()).abs() > limit * scale
    return not is_apart.any()


# -- interrupts -----------------------------------------------------------------------------------
def run_and_restore(work: Callable[[], Result], restore: Callable[[], object]) -> Result:
    """Call `work`, then `restore`, however `work` ends.

    A KeyboardInterrupt may come between any two bytecodes, also of `restore`. Then `restore` runs
    again from its beginning. A context manager is not enough: an interrupt can come before its
    exit, which then waits until the traceback is gone.
    """
    try:
        try:
            return work()
        finally:
            restore()
    except BaseException:
        restore()
        raise
