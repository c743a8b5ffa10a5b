"""Chunks: a block takes its batch a few sequences at a time, while its weights are there.

Owns how a block's call is divided: which arguments are split, how outputs are joined, and through
what each chunk sees the weights. Weights cross the link twice per call of the model, and gradients
once, however many chunks there are. Never moves a layer. The training thread enters in forward, and
autograd's in backward.

A chunk sees the weights through views of its own (`_Entry`), whose backward hands over the chunk's
gradients, all at once: they are added in fp32 in the layer's gradient slot, and rounded once, when
the last chunk of the call has come. So to the rest a call is what it is undivided: the gradients of
several are added as PyTorch adds them, in the compute dtype. Autograd runs nodes by the order in
which they were made, the last first: so all chunks of a layer before any of the layer below, and a
chunk's weights after all else of it.

[Note: what is split] A tensor whose first dimension is the batch's, in lists, tuples and tables,
too; all else is given to every chunk. What comes back is joined along the first dimension. Whether
that is what the block means is tried once for each class of blocks, before the first step trains:
without dropout a chunked forward must be the whole batch's but for rounding. Norms over the batch
and sums over it are found so, and refused.

[Note: several rows] An argument may have several rows for each sequence, as ALiBi's biases have one
for each head. Where the trial fails, such arguments are looked for:

1. The rows of an argument are a multiple of the batch's.
2. The whole batch is computed, and computed again with other values in the argument's rows of all
   sequences but the first chunk's.
3. What the block gives for the first chunk has not changed, and what it gives for the others has.

Only then is the argument split, and the trial repeated. Rows in another order (all sequences of the
first head, then those of the second), or a table that happens to have so many, fail at the third.
The comparison of step 3 is not within rounding: a bias changes little of what a block gives, and a
wrong one would pass.

[Note: streams] Chunks may take turns on several streams of the device, whose rules are there
(`cuda`, [Note: side streams]). Of a chunk this file keeps together what these need: its entry is
the node of autograd that it ends with in backward, for its weights and for its part of the batch,
and the main stream follows it. A block that holds tensors besides its parameters (running
statistics, a table that grows) may write in any chunk what another reads: it takes them on the main
stream, from the first one that finds such a tensor. So does a block that writes in one chunk what
another uses, however it is kept (a closure, a global, a plain object): its first call is on the
main stream, and every operator of it is looked at (`Carried`). What a block begins to carry later,
or carries through compiled code or kernels that torch does not know, is not seen. What all chunks
are given they may only read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.errors import ConfigError
from stronghold.model.logits import Forward
from stronghold.model.partition import Layer
from stronghold.streaming.activations.key_value_caches import is_cache
from stronghold.streaming.executor import Executor
from stronghold.streaming.interrupts import run_and_restore
from stronghold.streaming.patches.autograd import TorchDispatchMode
from stronghold.streaming.patches.modules import (
    hooks_after_gradient,
    hooks_on_gradient,
    is_batch_norm,
    is_call_compiled,
    parameter_table,
)
from stronghold.streaming.patches.tensors import (
    arguments_of,
    tree_leaves,
    tree_map_only,
    version_of,
)

logger = logging.getLogger("stronghold")

KEY = "stronghold.chunk"
MIXED = 1e-2  # the share of a change from which on it has reached other sequences
# Of a batch that is joined again: rounding of another matrix shape, not another function.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


Path = tuple[Any, ...]  # to a tensor among a call's arguments: a position or a name, then inwards
Rows = Mapping[Path, int]  # of the arguments with several for each sequence
NO_ROWS: Rows = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How calls of a class of blocks are divided: the arguments with several rows for each sequence
    ([Note: several rows]), and the numbers of the returned tensors that are one for all chunks."""

    rows: Rows
    shared: frozenset[int]


def split(
    value: Any, batch: int, sizes: Sequence[int], rows: Rows = NO_ROWS, path: Path = ()
) -> list[Any]:
    """The part of `value`, at `path`, of each chunk of these sizes ([Note: what is split])."""
    if isinstance(value, torch.Tensor):
        for each in (1, rows.get(path, 1)):
            if value.dim() and value.size(0) == each * batch:
                return list(value.split([each * size for size in sizes]))
        return [value] * len(sizes)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        parts = [split(part, batch, sizes, rows, (*path, k)) for k, part in enumerate(value)]
        return [_like(value, [part[k] for part in parts]) for k in range(len(sizes))]
    if isinstance(value, dict):
        tables = {key: split(part, batch, sizes, rows, (*path, key)) for key, part in value.items()}
        return [{key: parts[k] for key, parts in tables.items()} for k in range(len(sizes))]
    return [value] * len(sizes)


def _mapped(value: Any, change: Callable[[Path, torch.Tensor], Any], path: Path = ()) -> Any:
    """`value` with what `change` makes of each tensor in it, given the tensor's path."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return _like(value, [_mapped(part, change, (*path, k)) for k, part in enumerate(value)])
    if isinstance(value, dict):
        return {key: _mapped(part, change, (*path, key)) for key, part in value.items()}
    return value


def join(
    parts: Sequence[Any],
    sizes: Sequence[int],
    where: str,
    shared: frozenset[int] = frozenset(),
    _number: Iterator[int] | None = None,
) -> Any:
    """The inverse of `split`, of what a block returned for each chunk; tensors whose numbers are
    `shared` are the same for every chunk. ConfigError, naming `where`, for what cannot be joined.
    """
    number = itertools.count() if _number is None else _number
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if next(number) in shared:
            return first if first.grad_fn is None else first.view_as(first)
        rows = [part.size(0) if part.dim() else 0 for part in parts]
        each = rows[0] // sizes[0] if sizes[0] else 0
        if each and all(n == each * size for n, size in zip(rows, sizes, strict=True)):
            return torch.cat(list(parts))
        if all(torch.equal(first, part) for part in parts[1:]):
            return first
        raise ConfigError(
            f"{KEY}: {where} returns a tensor of {list(first.shape)} for {sizes[0]} sequences, "
            "which cannot be joined along the batch (a sum or a mean over it?). Leave the key out, "
            "or let the block return one row for each sequence"
        )
    if isinstance(first, tuple | list):
        columns = zip(*parts, strict=True)
        return _like(first, [join(each, sizes, where, shared, number) for each in columns])
    if isinstance(first, Mapping):  # Transformers' outputs are tables and dataclasses at once
        joined = {
            key: join([part[key] for part in parts], sizes, where, shared, number) for key in first
        }
        make: Any = type(first)
        return make(**joined) if dataclasses.is_dataclass(first) else make(joined)
    if all(part is first or part == first for part in parts[1:]):
        return first
    raise ConfigError(
        f"{KEY}: {where} returns a {type(first).__name__} that differs between chunks and cannot "
        "be joined. Leave the key out"
    )


def _like(value: Any, parts: list[Any]) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many sequences the call has: the first dimension of its first tensor; 0 without one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.size(0)
    return 0


class _Entry(torch.autograd.Function):
    """Views of what a chunk is computed with: inputs, whose gradients go on, and a block's
    `num_weights` parameters, whose gradients go to `take` and not to the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        take: Callable[[Sequence[torch.Tensor | None]], None],
        num_weights: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.take, ctx.num_weights = take, num_weights
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        count = ctx.num_weights
        ctx.take(gradients[:count])
        return (None,) * (2 + count) + gradients[count:]


_enter: Any = _Entry.apply


class Chunks:
    """The blocks of one model, whose calls are divided into chunks of `size` sequences.

    `around(layer, module, args, kwargs)` is entered for each chunk; `executor` takes its gradients.
    """

    def __init__(
        self,
        size: int,
        executor: Executor,
        device: Device,
        *,
        around: Callable[[int, nn.Module, Any, Any], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._size = size
        self._executor = executor
        self._device = device
        self._around = around
        self._divisions: dict[type, Division] = {}  # of the classes that were tried
        self._inner: dict[nn.Module, Callable[..., Any]] = {}
        self._in_turn: dict[nn.Module, bool] = {}  # of those that were called on several streams
        self._again = False  # a chunk's forward runs again

    def attach(self, layer: Layer) -> None:
        """Divide the calls of the layer's modules. ConfigError for what cannot be."""
        for module in layer.modules:
            name = layer.name or type(module).__name__
            if is_call_compiled(module):
                raise ConfigError(
                    f"{KEY}: {name} is compiled, and a compiled forward cannot be divided: compile "
                    "parts inside of the block, or leave the key out"
                )
            for part_name, part in module.named_modules():
                if is_batch_norm(part):
                    raise ConfigError(
                        f"{KEY}: {name}.{part_name} is a {type(part).__name__}, whose statistics "
                        "are the whole batch's: leave the key out"
                    )
            self._inner[module] = module.forward
            run = self._divided(layer, module, module.forward)
            run.__wrapped__ = module.forward  # type: ignore[attr-defined]
            vars(module)["forward"] = Forward(module, run)

    def close(self) -> None:
        """Give the modules their own forward back. Safe to call twice."""
        for module, forward in self._inner.items():
            del vars(module)["forward"]
            if getattr(module, "forward", None) != forward:  # another wrapper's
                vars(module)["forward"] = forward
        self._inner.clear()

    def divides(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call will be divided."""
        if self._again or not torch.is_grad_enabled() or module not in self._inner:
            return False
        if any(map(is_cache, (*args, *kwargs.values()))):
            return False
        return batch_of(args, kwargs) > self._size

    def count(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """How many chunks the call has."""
        return -(-batch_of(args, kwargs) // self._size)

    def run_again(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A chunk's forward, in backward."""
        return self._inner[module](*args, **kwargs)

    def _divided(
        self, layer: Layer, module: nn.Module, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        name = layer.name or type(module).__name__
        places = _places(layer, module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.divides(module, args, kwargs):
                if torch.is_grad_enabled() and not self._again:
                    self._executor.undivided_begun(layer.index)
                return inner(*args, **kwargs)
            self._refuse_hooks(layer)
            batch = batch_of(args, kwargs)
            sizes = [min(self._size, batch - at) for at in range(0, batch, self._size)]
            if type(module) not in self._divisions:
                trial = _Trial(name, module, inner, (args, kwargs), sizes, self._device)
                self._divisions[type(module)] = trial.division()
            division = self._divisions[type(module)]
            each_args = split(args, batch, sizes, division.rows)
            each_kwargs = split(kwargs, batch, sizes, division.rows)
            outputs: list[Any] = []
            to_come: set[int] = set()
            device = self._device
            several = len(device.side_streams.streams) > 1 and not self._in_turn.get(module, False)
            seen = Carried() if several and module not in self._in_turn else None
            whole = set(map(id, _tensors((args, kwargs)) if several else ()))
            parameters = list(module.parameters())
            with contextlib.ExitStack() as forks:
                main = forks.enter_context(device.side_streams.forked())
                for k, given in enumerate(zip(each_args, each_kwargs, strict=True)):
                    if several and _holds_tensors(module):
                        several, seen = False, None  # [Note: streams]
                        self._take_in_turn(name, module, "holds tensors besides its parameters")
                        forks.close()
                    parts = _tensors(given) if several else []
                    inputs = [t for t in parts if t.requires_grad and id(t) not in whole]
                    read = [*parameters, *(t for t in parts if id(t) in whole)] if several else []
                    versions, contents = _versions(read), _contents(given)
                    beside = device.side_streams.beside(k, f"chunk {k} of {layer.index}")
                    entered = self._entered(layer, places, given, inputs, main, k, to_come)
                    with (
                        beside if several and seen is None else contextlib.nullcontext(),
                        entered as (of_args, of_kwargs),
                        self._around(layer.index, module, of_args, of_kwargs),
                        contextlib.nullcontext() if seen is None else seen.chunk(k),
                    ):
                        outputs.append(inner(*of_args, **of_kwargs))
                    _refuse_change(name, contents)
                    if versions != _versions(read):
                        raise ConfigError(
                            f"stronghold.streams: {name} writes into a parameter or an argument "
                            "that its other chunks read at the same time: leave the key out, or "
                            "keep what it writes in a buffer of the block"
                        )
            if seen is not None:
                self._in_turn[module] = False
                if seen.found:
                    self._take_in_turn(name, module, f"writes in one chunk {seen.found}")
            return join(outputs, sizes, name, division.shared)

        return forward

    def _take_in_turn(self, name: str, module: nn.Module, why: str) -> None:
        said = {type(other) for other, in_turn in self._in_turn.items() if in_turn}
        self._in_turn[module] = True
        if type(module) not in said:
            logger.warning(
                "stronghold.streams: %s %s, so that its chunks go through it one after the other "
                "on one stream (this is said once for blocks of its class)",
                name,
                why,
            )

    @contextlib.contextmanager
    def _entered(
        self,
        layer: Layer,
        places: Sequence[tuple[dict[str, Any], str, int]],
        given: tuple[Any, Any],
        inputs: Sequence[torch.Tensor],
        main: object,
        number: int,
        to_come: set[int],
    ) -> Iterator[tuple[Any, Any]]:
        """Inside, the block's modules have views of their parameters, for one chunk. Its arguments,
        with views of `inputs` in their places. `to_come`: the numbers of the call's chunks whose
        gradients have not come yet."""
        owned = [
            (k, named.parameter)
            for k, named in enumerate(layer.parameters)
            if named.parameter.requires_grad
        ]
        if not owned and not inputs:
            yield given
            return

        trained = self._executor.layers[layer.index].optimizer.trained

        def take(gradients: Sequence[torch.Tensor | None]) -> None:
            found = [
                (k, gradient)
                for (k, _), gradient in zip(owned, gradients, strict=True)
                if gradient is not None and k in trained
            ]
            if owned:
                to_come.discard(number)
                self._executor.chunk_gathered(layer.index, found, not to_come)
            self._device.side_streams.follow(main)

        views = _enter(take, len(owned), *(parameter for _, parameter in owned), *inputs)
        of = {k: view for (k, _), view in zip(owned, views[: len(owned)], strict=True)}
        if inputs:
            seen = dict(zip(map(id, inputs), views[len(owned) :], strict=True))
            given = tree_map_only(torch.Tensor, lambda one: seen.get(id(one), one), given)
            seen.clear()
        if owned:
            self._executor.chunk_begun(layer.index, not to_come)
            to_come.add(number)
        kept = [(table, name, table[name]) for table, name, _ in places]
        try:
            try:
                for table, name, k in places:
                    if k in of:
                        table[name] = of[k]
                del views
                of.clear()
                yield given
            finally:
                _put_back(kept)
        except BaseException:
            _put_back(kept)  # again, whole: an interrupt may have ended the first time
            raise

    def _refuse_hooks(self, layer: Layer) -> None:
        for named in layer.parameters:
            # The engine's own is one that comes after accumulation.
            after = hooks_after_gradient(named.parameter)
            if hooks_on_gradient(named.parameter) or len(after) > 1:
                raise ConfigError(
                    f"{KEY}: {named.name} has a hook on its gradient, which comes in chunks and "
                    "never to the parameter: remove the hook, or leave the key out"
                )


class _Trial:
    """Finds how a block's calls are divided, by calls of it without dropout and gradients. `given`:
    the arguments of the call that comes first, and `sizes`: of its chunks."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        inner: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        sizes: Sequence[int],
        device: Device,
    ) -> None:
        self._name, self._module, self._inner = name, module, inner
        self._given, self._sizes, self._batch = given, sizes, sum(sizes)
        self._device = device

    def division(self) -> Division:
        """ConfigError when two chunks do not give what both give at once."""
        try:
            return self._divided(NO_ROWS)
        except ConfigError as error:
            refusals: list[str] = []
            rows = self._several_rows(refusals)
            if rows:
                return self._divided(rows)
            if not refusals:
                raise
            raise ConfigError(f"{error}. {'. '.join(refusals)}") from error

    def _divided(self, rows: Rows) -> Division:
        first = self._sizes[:2]
        two = sum(first)  # as many as would be in one chunk of twice the size
        halves = [two, self._batch - two]
        both = [split(given, self._batch, halves, rows)[0] for given in self._given]
        args, kwargs = (split(given, self._batch, self._sizes, rows) for given in self._given)
        calls = [both, *zip(args[:2], kwargs[:2], strict=True)]
        contents = _contents(both)
        try:
            expected, *outputs = self._outputs(calls)
        except (RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{KEY}: {self._name} fails with {first[0]} of the batch's sequences at a time "
                f"({error}): an argument with as many rows as the batch is none, or the block "
                "needs them all. Leave the key out"
            ) from error
        _refuse_change(self._name, contents)
        # A table of relative positions, say: it is what it is for one chunk, and not one per chunk.
        columns = zip(*map(_tensors, outputs), strict=True)
        shared = frozenset(
            number
            for number, (column, one) in enumerate(zip(columns, _tensors(expected), strict=False))
            if all(part.shape == one.shape for part in column)
        )
        found = join(outputs, first, self._name, shared)
        pairs = zip(_tensors(found), _tensors(expected), strict=True)
        if not all(_alike(one, other) for one, other in pairs):
            raise ConfigError(
                f"{KEY}: {self._name} does not give for {first[0]} sequences at a time what it "
                f"gives for {two}: it mixes the sequences of a batch (a norm or a sum over it), or "
                f"an argument with {two} rows is no batch. Leave the key out"
            )
        return Division(rows=rows, shared=shared)

    def _several_rows(self, refusals: list[str]) -> Rows:
        """The arguments that have several rows for each sequence; `refusals` gets a sentence for
        each of the others whose rows are a multiple of the batch's."""
        candidates: dict[Path, int] = {}

        def look(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and tensor.size(0) > self._batch and not tensor.size(0) % self._batch:
                candidates[path] = tensor.size(0) // self._batch
            return tensor

        for given in self._given:
            _mapped(given, look)
        several: dict[Path, int] = {}
        for path, each in candidates.items():
            why = self._why_not_split(path, each)
            if not why:
                several[path] = each
                continue
            refusals.append(
                f"Its argument {'.'.join(map(str, path))} has {each} rows for each sequence, but "
                f"cannot be split: {why}"
            )
        return several

    def _why_not_split(self, path: Path, each: int) -> str:
        """The objection of step 3 of [Note: several rows]; "" for none."""
        try:
            expected, output = self._outputs([self._given, self._with_others(path, each)])
        except (RuntimeError, IndexError, ValueError) as error:
            return f"with other values in it the block fails ({error})"
        first, later = self._changes(expected, output)
        if later == 0.0:
            return "other values in it change nothing that the block gives"
        if first > MIXED * later:
            return "the rows of some sequences change what the block gives for others"
        return ""

    def _with_others(self, path: Path, each: int) -> Any:
        """The arguments, with other values in the rows of all sequences but the first chunk's."""
        begin = each * self._sizes[0]

        def change(at: Path, tensor: torch.Tensor) -> torch.Tensor:
            if at != path:
                return tensor
            return torch.cat([tensor[:begin], _other_values(tensor[begin:])])

        return [_mapped(given, change) for given in self._given]

    def _changes(self, expected: Any, output: Any) -> tuple[float, float]:
        """By how much two results differ at most for the first chunk, and for the others."""
        first = later = 0.0
        for one, other in zip(_tensors(expected), _tensors(output), strict=True):
            if one.dim() and one.numel() and not one.size(0) % self._batch:
                apart = (one.float() - other.float()).abs().nan_to_num(0.0)
                begin = one.size(0) // self._batch * self._sizes[0]
                first = max(first, apart[:begin].max().item())
                later = max(later, apart[begin:].max().item())
        return first, later

    def _outputs(self, calls: Iterable[Any]) -> list[Any]:
        """The block's output for these arguments, without dropout. Generators stay."""
        modes = [(part, part.training) for part in self._module.modules()]
        chance = random_state(self._device.torch_device)

        def work() -> list[Any]:
            for part, _ in modes:
                part.training = False
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return [self._inner(*args, **kwargs) for args, kwargs in calls]

        def restore() -> None:
            for part, mode in modes:
                part.training = mode
            if chance is not None:
                set_random_state(self._device.torch_device, chance)

        return run_and_restore(work, restore)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if they are the same but for rounding."""
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape
    limit = TOLERANCE.get(one.dtype, 1e-3)
    scale = other.float().abs().max().clamp_min(1e-6)
    apart = (one.float() - other.float()).abs() > limit * scale
    return not apart.any()  # NaN is no difference


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Values that differ from these, and are as good: for numbers near them, for integers the same
    ones in another order, since they may be indices."""
    chance = torch.Generator().manual_seed(0)
    if tensor.is_floating_point():
        return tensor + torch.randn(tensor.shape, generator=chance).to(tensor)
    if tensor.dtype is torch.bool:
        return tensor ^ (torch.rand(tensor.shape, generator=chance) < 0.5).to(tensor.device)
    order = torch.randperm(tensor.numel(), generator=chance).to(tensor.device)
    return tensor.flatten()[order].view(tensor.shape)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Carried(TorchDispatchMode):
    """Finds memory that a block writes in one chunk and reads or writes in another, whoever keeps
    it: `found` names it, and the operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""
        self._number = 0
        # By address: a reference that keeps the address from being another's, the chunk that used
        # it first, whether others did, and whether one of them wrote.
        self._used: dict[int, tuple[StorageWeakRef, int, bool, bool]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled parts run as they will: the same bits

    @contextlib.contextmanager
    def chunk(self, number: int) -> Iterator[None]:
        self._number = number
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for position, argument in enumerate(arguments_of(func)):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(given):
                self._use(func, tensor, writes)
        for tensor in _tensors(result):
            self._use(func, tensor, None)
        return result

    def _use(self, func: Any, tensor: torch.Tensor, writes: bool | None) -> None:
        """`writes`: None of a result, whose memory is new unless it is an argument's."""
        try:
            reference = StorageWeakRef(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
            return
        known = self._used.get(reference.cdata)
        if known is None:
            self._used[reference.cdata] = (reference, self._number, False, writes is not False)
            return
        reference, first, others, written = known
        others, written = others or first != self._number, written or bool(writes)
        self._used[reference.cdata] = (reference, first, others, written)
        if others and written and not self.found:
            self.found = f"what another one uses ({func}, {list(tensor.shape)})"


Contents = list[tuple[Any, list[Any]]]


def _contents(given: Sequence[Any]) -> Contents:
    """The lists, tables and plain objects among a call's arguments, with what each has."""
    args, kwargs = given
    found: Contents = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | dict) or (
            hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | nn.Module | type)
        ):
            found.append((value, _items(value)))
    return found


def _items(value: Any) -> list[Any]:
    if isinstance(value, list):
        return list(value)
    table = value if isinstance(value, dict) else vars(value)
    return [*table.keys(), *table.values()]


def _refuse_change(name: str, contents: Contents) -> None:
    """ConfigError where the block has changed an argument, of which each chunk has one of its own,
    or the others another."""
    for value, before in contents:
        after = _items(value)
        if len(after) != len(before) or any(a is not b for a, b in zip(after, before, strict=True)):
            raise ConfigError(
                f"{KEY}: {name} changes a {type(value).__name__} that it is given, which would "
                "have what one chunk wrote: leave the key out, or let the block return it"
            )


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _holds_tensors(module: nn.Module) -> bool:
    """Whether the block's parts hold tensors besides parameters, also in lists and tables."""
    return any(
        value is not parameter_table(part) and _has_tensor(value)
        for part in module.modules()
        for value in vars(part).values()
    )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _put_back(kept: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
    for table, name, parameter in kept:
        table[name] = parameter


def _places(layer: Layer, module: nn.Module) -> list[tuple[dict[str, Any], str, int]]:
    """Where the block's modules have parameters: the table, the name, the position in the layer."""
    position = {id(named.parameter): k for k, named in enumerate(layer.parameters)}
    return [
        (parameter_table(part), name, position[id(parameter)])
        for part in module.modules()
        for name, parameter in parameter_table(part).items()
        if parameter is not None and id(parameter) in position
    ]
