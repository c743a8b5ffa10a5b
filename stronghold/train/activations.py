"""Recomputation: backward runs a block's forward again, in place of what autograd would save.

torch's checkpoint runs it. This file fills in what torch leaves to the caller: buffers, the
comparison of values, and attention that is computed once.

[Note: the second run] It must save what the first run has saved.
1. Arguments: torch's checkpoint saves tensors that it gets by position, compares their versions,
   and restores the generators of their devices. So all tensors go by position, each once.
2. Buffers: the second run gets clones, with the values that they had before the first run. So batch
   norm reads the same statistics, and counts a batch once.
3. Hazard: a block reads something else that has changed (a counter, a list, a generator of Python,
   a hook that is gone). Torch compares the number of the saved tensors, and here their shapes. So
   in calls 1, 2, 4, 8, ... of a block some elements of each tensor are compared, too, and of its
   output: autograd keeps a factor of Python's (`x * random.random()`) in no tensor.
4. Hazard: the block writes a tensor after autograd has saved it. Plain torch refuses the backward.
   Torch's checkpoint does not, so the versions are compared here.
5. Limit: what a forward changes beside its output, it changes twice.

[Note: attention once]
1. A dispatch mode sees every operator of a block, which costs 3 to 5 us each. So the modes stand
   around the calls of attention alone.
2. The first run keeps the results of the fused kernel. The second run gets them, and autograd
   records the same node over the same bits.
3. A kernel with dropout draws from the device's generator. It is computed again.
4. A block may reach its attention in another way: its own import of the function, a compiled part,
   another package's kernel, products written out. Then all of it is computed again.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError, checkpoint, noop_context_fn

from stronghold.errors import ConfigError
from stronghold.model.operators import ATTENTION_KERNELS
from stronghold.plan.cost import ATTENTION
from stronghold.private import Hooks, Replacements, saved_tensor_hooks
from stronghold.train.guards import is_cache, without_cache
from stronghold.train.layer import Layer
from stronghold.train.saved_tensors import PLAIN, Handle, Keep, kept

logger = logging.getLogger("stronghold")

Plain = Callable[..., Tensor]
Through = Callable[[Plain, tuple[Any, ...], dict[str, Any]], Tensor]

NUM_COMPARED = 256  # elements of a saved tensor, about
ROUNDING = 64  # units in the last place by which a GPU's order of additions may change a result
DROPOUT_POSITION = 4  # of `dropout_p` among the arguments of attention
REMEDY = 'set stronghold.activations to "keep", which runs it once'


class TensorNumber(int):
    """The number of a tensor among the arguments of a call. It stands in the tensor's place while
    the call waits for its second run, so that the call does not keep the tensor alive."""


def replaced(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Replace the leaves of a class. Lists and dicts stay, since a block may write into them."""
    if isinstance(tree, kind):
        return function(tree)
    if type(tree) is tuple:
        return tuple(replaced(kind, function, part) for part in tree)
    return tree


def recomputed(
    layer: Layer,
    module: nn.Module,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    call: int,
    keep: Keep,
) -> Any:
    """Call `run(*args, **kwargs)`, a forward of the layer's module, so that backward runs it again
    ([Note: the second run]).

    call  number of the call, from 1
    keep  makes the handles of attention's results
    """
    args, kwargs = without_cache(args, kwargs)
    if any(map(is_cache, (*args, *kwargs.values()))):
        return run(*args, **kwargs)  # it has keys (prefix tuning): two runs would write it twice
    tensors: dict[int, Tensor] = {}
    replaced(Tensor, lambda t: tensors.setdefault(id(t), t), (args, tuple(kwargs.values())))
    numbers = {key: TensorNumber(number) for number, key in enumerate(tensors)}
    waiting = replaced(Tensor, lambda t: numbers[id(t)], (args, tuple(kwargs.values())))
    names = tuple(kwargs)
    tables = [part._buffers for part in module.modules()]
    before = [_clones(table) for table in tables] if any(tables) else []
    compares = is_compared(call)
    runs = TwoRuns(layer.name, type(module).__name__, is_compared=compares)
    is_second = False

    def run_filled(*given: Tensor) -> Any:
        nonlocal is_second
        filled_args, values = replaced(TensorNumber, lambda number: given[number], waiting)
        filled = partial(run, *filled_args, **dict(zip(names, values, strict=True)))
        if not is_second:
            is_second = True
            with runs.first():
                output = filled()
            runs.returned(output)
            return output
        present = [dict(table) for table in tables] if before else []
        try:
            _fill(tables, map(_clones, before))
            with runs.second():
                output = filled()
            runs.returned(output, again=True)
            return output
        finally:
            _fill(tables, present)
            runs.compare()

    attention = AttentionOnce(keep) if layer.level in ATTENTION else None
    output = checkpoint(
        run_filled,
        *tensors.values(),
        use_reentrant=False,
        determinism_check="default" if compares else "none",
        context_fn=noop_context_fn if attention is None else attention.contexts,
        early_stop=not compares,  # else torch ends the second run when all is saved
    )
    if attention is not None and not attention.is_kept:
        _say_not_kept(type(module).__name__)
    return output


def is_compared(call: int) -> bool:
    """True for a power of two: these calls of a block are compared."""
    return call & (call - 1) == 0


def first_input(keep: Keep) -> Keep:
    """For the arguments that torch's checkpoint saves: `keep` makes the handle of the first one
    with a graph, which are the hidden states. The others stay, since all blocks may share them."""
    is_first = True

    def keep_first(tensor: Tensor) -> Handle:
        nonlocal is_first
        goes = is_first and tensor.grad_fn is not None
        is_first = is_first and not goes
        return keep(tensor) if goes else kept(tensor)

    return keep_first


Buffers = dict[str, Tensor | None]


def _clones(buffers: Buffers) -> Buffers:
    return {name: None if b is None else b.clone() for name, b in buffers.items()}


def _fill(tables: Sequence[Buffers], contents: Iterable[Buffers]) -> None:
    """Replace the buffers of modules, also those that a forward has made."""
    for table, buffers in zip(tables, contents, strict=False):  # no contents: no buffers
        table.clear()
        table.update(buffers)


# -- the two runs save the same --------------------------------------------------------------------
class TwoRuns:
    """The tensors that a block saves and returns in its first and in its second run: hooks between
    the block and torch's checkpoint. They raise CheckpointError with the block's name."""

    def __init__(self, name: str, kind: str, *, is_compared: bool) -> None:
        self._name, self._kind = name, kind
        self._values: list[Tensor] | None = [] if is_compared else None  # of the first run
        self._values_again: list[Tensor] = []
        self._num_saved = 0
        self._has_returned = False  # the first run
        self._has_second = False  # run, or a part of it
        self._versions: list[int] = []  # of each tensor when the second run saved it

    def first(self) -> saved_tensors_hooks:
        """Context manager for the first run."""
        pack_below, unpack_below = _pair_of_checkpoint()

        def pack(tensor: Tensor) -> tuple[int, Any]:
            if self._values is not None:
                self._values.append(some_values(tensor))
            self._num_saved += 1
            return self._num_saved - 1, pack_below(tensor)

        def unpack(packed: tuple[int, Any]) -> Tensor:
            number, below = packed
            if not self._has_returned:
                raise ConfigError(
                    f"{self._name}: its forward takes gradients inside, and would run again for "
                    f"them before it has ended: {REMEDY}"
                )
            try:
                tensor = unpack_below(below)  # the second run, if it was not yet
            except RuntimeError as error:
                if self._has_second and not isinstance(error, CheckpointError):
                    raise  # the forward's own
                raise self._refusal(error) from error
            if tensor._version != self._versions[number]:
                raise RuntimeError(
                    f"{self._name}: a tensor needed for backward was modified in place after it "
                    f"was saved: {tensor.dtype} {list(tensor.shape)}; write out of place "
                    "(y = y + x, not y += x)"
                )
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def second(self) -> saved_tensors_hooks:
        """Context manager for a second run."""
        pack_below, unpack_below = _pair_of_checkpoint()
        self._has_second = True
        self._versions.clear()
        self._values_again.clear()

        def pack(tensor: Tensor) -> Any:
            self._versions.append(tensor._version)
            if self._values is not None:
                self._values_again.append(some_values(tensor))
            return pack_below(tensor)  # the last one ends the run, by an exception

        return saved_tensors_hooks(pack, unpack_below)

    def returned(self, output: Any, *, again: bool = False) -> None:
        """A run has ended. Outputs come after the saved tensors."""
        self._has_returned = True
        if self._values is not None:
            values = self._values_again if again else self._values
            values += [some_values(leaf) for leaf in tree_leaves(output) if type(leaf) is Tensor]

    def compare(self) -> None:
        """CheckpointError if the second run has saved or returned other values than the first."""
        if self._values is None or len(self._values_again) != len(self._values):
            return  # torch refuses another number
        pairs = list(zip(self._values_again, self._values, strict=True))
        self._values = None
        self._values_again.clear()
        differences = [difference(got, expected) for got, expected in pairs]
        different = [got for (got, _), units in zip(pairs, differences, strict=True) if units]
        on_cpu = any(got.device.type == "cpu" for got in different)
        saved, returned = differences[: self._num_saved], differences[self._num_saved :]
        if different and not on_cpu and may_be_rounding(saved, returned):
            _warn_of_rounding(self._kind)
        elif different:
            num_different = f"{len(different)} of {len(pairs)}"
            raise CheckpointError(f"{num_different} tensors have other values")

    def _refusal(self, error: RuntimeError) -> RuntimeError:
        text = str(error).removeprefix("torch.utils.checkpoint: ").partition("\nTip:")[0]
        text = text.partition("; write out of place")[0]  # ours: it follows
        reason = " ".join(text.split()).rstrip(".")
        if not self._has_second:
            return RuntimeError(
                f"{self._name}: its forward cannot run again in backward, since an argument was "
                f"written in place ({reason}). Write out of place (y = y + x, not y += x), or "
                f"{REMEDY}"
            )
        return CheckpointError(
            f"{self._name}: its forward computes other values when it runs again in backward "
            f"({reason}). {self._kind} depends on something that has changed since: an attribute, "
            "a list, a counter, a generator that is not torch's, a hook, or its mode. Let it "
            f"depend on its arguments, parameters and buffers alone, or {REMEDY}"
        )


def _pair_of_checkpoint() -> Hooks:
    pair = saved_tensor_hooks()
    assert pair is not None, "a run outside of torch's checkpoint"
    return pair


def some_values(tensor: Tensor) -> Tensor:
    """Some elements of a saved tensor, at fixed positions: [n], with n near `NUM_COMPARED`.

    [0] for tensors without strided memory, and for those that a kernel may leave unwritten: the
    work space of a library, and seed and offset of fused attention without dropout."""
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_meta
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    is_seed = is_integer and tensor.dtype is not torch.bool and tensor.numel() <= 2
    if not is_plain or is_seed or tensor.dtype in (torch.uint8, torch.int8):
        return torch.empty(0)
    per_dimension = max(1, int(NUM_COMPARED ** (1 / max(1, tensor.dim()))))
    strides = [max(1, size // per_dimension) for size in tensor.shape]
    with torch.no_grad():
        positions = tuple(slice(None, None, stride) for stride in strides)
        return tensor.detach()[positions].reshape(-1).clone()


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference, in units in the last place of the largest element. 0.0: equal to the
    bit. Infinity: not comparable."""
    if torch.equal(got, expected):
        return 0.0
    if got.shape != expected.shape or not got.is_floating_point():
        return math.inf
    is_same = (got == expected) | (got.isnan() & expected.isnan())
    distance = (got.double() - expected.double()).abs().masked_fill(is_same, 0.0)
    unit = expected.double().nan_to_num().abs().max() * torch.finfo(got.dtype).eps
    if not distance.any():
        return 0.0
    return float((distance.max() / unit).nan_to_num(nan=math.inf, posinf=math.inf))


def may_be_rounding(saved: Sequence[float], returned: Sequence[float]) -> bool:
    """True if a GPU may find these differences between two runs of the same operators: some add in
    an undefined order, and some leave elements of one tensor that they save unwritten."""
    num_different = sum(units > 0.0 for units in saved)
    is_near = max(saved, default=0.0) <= ROUNDING
    return (num_different <= 1 or is_near) and max(returned, default=0.0) <= ROUNDING


@functools.cache
def _warn_of_rounding(kind: str) -> None:
    """Log once per class that a second run differs within rounding."""
    logger.warning(
        "%s: its forward saves other bits when it runs again in backward, as operators without a "
        "defined order of additions do (torch.use_deterministic_algorithms(True) names them). "
        "Gradients are as exact as with torch's own checkpoint (logged once for each class)",
        kind,
    )


# -- attention once --------------------------------------------------------------------------------
class AttentionOnce:
    """Attention in the two runs of one call of a block. `is_kept`: a fused kernel has run, and its
    results are kept, by `keep`."""

    def __init__(self, keep: Keep) -> None:
        self._keep, self.is_kept = keep, False
        self._calls: list[list[KernelCall]] = []  # by call of attention

    def contexts(self) -> tuple[_Passing, _Passing]:
        """The contexts of the two runs, for torch's checkpoint."""
        return _Passing(lambda: self._compute), _Passing(self._begin_second)

    def _compute(self, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A call of attention in the first run."""
        calls: list[KernelCall] = []
        self._calls.append(calls)
        if _dropout(args, kwargs):
            return plain(*args, **kwargs)
        with _Keeping(calls, self._keep):
            output = plain(*args, **kwargs)
        self.is_kept = self.is_kept or bool(calls)
        return output

    def _begin_second(self) -> Through:
        by_call = iter(self._calls)

        def give(plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            calls = next(by_call, [])
            if not calls:
                return plain(*args, **kwargs)
            with _Giving(calls):
                return plain(*args, **kwargs)

        return give


class KernelCall(NamedTuple):
    """A call of an attention kernel. `results`: handles of tensors; a GPU's kernels also return
    numbers and None, which stay."""

    kernel: Any
    results: tuple[Any, ...]


class _Keeping(TorchDispatchMode):
    """Keeps the results of attention's kernels in `calls`."""

    def __init__(self, calls: list[KernelCall], keep: Keep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._keep = calls, keep

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in ATTENTION_KERNELS:
            handles = tuple(self._keep(x) if isinstance(x, Tensor) else x for x in results)
            self._calls.append(KernelCall(func, handles))
        return results


class _Giving(TorchDispatchMode):
    """Returns the kept results of `calls` in place of the kernels' calls, in their order."""

    def __init__(self, calls: Iterable[KernelCall]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = iter(calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = next(self._calls, None) if func in ATTENTION_KERNELS else None
        if call is None or call.kernel is not func:
            return func(*args, **(kwargs or {}))
        # Autograd writes its node into the tensor that it gets: another run gets another alias.
        return tuple(x().detach() if isinstance(x, partial) else x for x in call.results)


class _Running(threading.local):
    """Per thread: the function that attention goes through in the block that this thread runs."""

    through: Through | None = None


running = _Running()


def intercepted(plain: Plain) -> Plain:
    """The function that replaces `plain`, torch's `scaled_dot_product_attention`."""

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or running.through is None:
            return plain(*args, **kwargs)
        return running.through(plain, args, kwargs)

    # Pickle finds a function by these names.
    attention.__module__ = F.__name__
    attention.__name__ = "scaled_dot_product_attention"
    attention.__qualname__ = "scaled_dot_product_attention"
    attention.__doc__ = plain.__doc__
    return attention


class _Passing:
    """Context manager that may be entered again. Inside, attention passes through what `begin` has
    returned."""

    def __init__(self, begin: Callable[[], Through]) -> None:
        self._begin = begin
        self._outside: Through | None = None

    def __enter__(self) -> None:
        self._outside, running.through = running.through, self._begin()

    def __exit__(self, *_: object) -> None:
        running.through = self._outside


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    is_positional = len(args) > DROPOUT_POSITION
    return float(args[DROPOUT_POSITION] if is_positional else kwargs.get("dropout_p", 0.0))


@functools.cache
def _say_not_kept(kind: str) -> None:
    """Log once per class that no fused kernel of torch computes the block's attention."""
    logger.warning(
        "%s: stronghold.activations keeps the results of attention, but no fused kernel of torch's "
        "scaled_dot_product_attention computes its attention without dropout: it is computed "
        'again like the rest, as under "recompute" (logged once for each class)',
        kind,
    )


# The number of models in training, and the name that is replaced for them.
_num_models = 0
_replacements = Replacements()


@contextmanager
def intercepted_attention() -> Iterator[None]:
    """Context manager in which calls of torch's attention pass through `running.through`."""
    global _num_models
    _num_models += 1
    _replacements.put(F, "scaled_dot_product_attention", intercepted)
    try:
        yield
    finally:
        _num_models -= 1
        if not _num_models:
            _replacements.undo()


def forget_attention() -> None:
    """After an interrupt at any bytecode: this thread's calls are torch's own again."""
    running.through = None
