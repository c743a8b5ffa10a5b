"""A block's forward that runs again in backward (activation checkpointing, recomputation).

Owns what the second run needs, for as long as autograd's graph may ask for it: the arguments, the
states of random generators, autocast, the default device, and a snapshot of the block's state
(`block_state`). Owns also the tensors that the second run saves, until autograd takes them. Decides
call by call whether a forward can run again. Entered by the training thread in forward and by
autograd's in backward, never by both at once.

[Note: run again] A second run must compute what the first one computed. The steps, in order:

1. Training thread, before the forward: a snapshot of the block's state and of mutable arguments.
   Tensors among the arguments are detached, and their versions noted. The states of the CPU's, the
   device's, Python's and NumPy's global generator are read.
2. Training thread, during the forward: autograd saves tensors. Each is held until step 3, so that
   nothing is lost yet. Backward needs as much room for the block when it runs again, with more
   beside it, so that the peak of a step does not change.
3. Training thread, after the forward: the snapshot is compared. If an attribute, a buffer, a hook,
   an argument or a generator of the block has changed, this call keeps what it saved
   (`Activations` offloads it where the host has room), and step 4 never comes. Otherwise the held
   tensors are dropped. States of global generators that did not move are dropped, too.
4. Autograd's thread, when backward asks for the first of the tensors: the versions of arguments and
   of the block's tensors are compared; one that was written since is refused. Attributes and hooks
   that the program has changed since are put back as they were. Global generators that moved in the
   forward are set to their old states.
5. Autograd's thread: the forward runs as far as its last saved tensor.
6. Autograd's thread: attributes, hooks and generators are again what they were before step 4,
   also after an exception and after Ctrl-C. A tensor that was written in step 5 is refused.

Each call is compared, so that a change that comes in a later call is kept there. A snapshot does
not see a global counter, a closure, or a generator behind a global name. So calls 1, 2, 4, 8, ...
of each block also compare values: some elements of every saved tensor, to the bit. A difference
is an error, since the gradient would be wrong. On a GPU a difference within rounding, or in one
tensor alone, is a warning: some operators add in an undefined order, or leave elements unwritten.

[Note: as torch has it] torch's non-reentrant checkpoint has the same rules, without steps 1, 3, 6
and the comparison of values. The second run ends when it has saved as many tensors as the first
one. They must have the same shapes, dtypes and devices. A tensor lives until autograd takes it, or
the forward's nodes are gone, and serves one backward. An argument that was written in place in
between is refused.

[Note: hooks before ours] The arguments are those that our own pre-hook was given. Hooks that ran
before it (`prepend=True` after initialize, and torch's global ones) have had their effect on them,
and do not run again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from stronghold.devices.base import Device
from stronghold.streaming.activations.attention import AttentionCalls
from stronghold.streaming.activations.block_state import BEFORE, GLOBAL_HOOKS, BlockState
from stronghold.streaming.activations.random_states import RandomStates, set_states
from stronghold.streaming.guards import serves
from stronghold.streaming.interrupts import run_and_restore
from stronghold.streaming.patches.autograd import (
    backward_group,
    backward_number,
    num_function_modes,
)
from stronghold.streaming.patches.tensors import version_of

logger = logging.getLogger("stronghold")

NUM_COMPARED = 256  # elements of a saved tensor, about
ROUNDING = 64  # units in the last place by which operators without a defined order may differ
INSTEAD = 'set stronghold.activations to "keep" or "offload"'


class SavedTensor(NamedTuple):
    """A saved tensor that stays where it is, and its version then."""

    tensor: torch.Tensor
    version: int


class Place:
    """One tensor that autograd saves in a first run, the `index`-th of them.

    `kept` is the tensor until the forward ends. After that it is what stands for the tensor if this
    call keeps it, and None if the forward will run again.
    """

    __slots__ = ("index", "kept")

    def __init__(self, index: int, kept: Any) -> None:
        self.index = index
        self.kept = kept


Signature = tuple[torch.Size, torch.dtype, torch.device]


def _signature(tensor: torch.Tensor) -> Signature:
    return tensor.shape, tensor.dtype, tensor.device


class _AllSavedError(Exception):
    """Ends a second run; to modules and their hooks it is an error like others."""


class RecomputedModule:
    """A module whose forward may run again: its newest snapshot, and how often it ran."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.module = module
        self.kind = type(module).__name__
        self.parameters = parameters
        self._num_calls = 0
        self._state: BlockState | None = None

    def begin(self) -> tuple[BlockState, bool]:
        """A first run begins: the state now, and whether this call compares values."""
        if self._state is None or self._state.difference() is not None:
            self._state = BlockState(self.module)
        self._num_calls += 1
        return self._state, self._num_calls & (self._num_calls - 1) == 0


class Recomputation:
    """One forward of `block`, called `name` in errors, that begins now.

    `check` comes before each further run, and raises where the module must not run again. `run` is
    called for a further run, if it is not the module: a part of its forward. `store` may put the
    first tensor among the arguments elsewhere meanwhile. It returns a function that brings the
    tensor back, or None.
    """

    def __init__(
        self,
        block: RecomputedModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        device: Device,
        check: Callable[[], None],
        run: Callable[..., Any] | None = None,
        store: Callable[[torch.Tensor], Callable[[], torch.Tensor] | None] | None = None,
    ) -> None:
        self.block = block
        self._forward: Callable[..., Any] = block.module if run is None else run
        self._name = name
        self._check = check
        self._store = store
        self._tensors: list[SavedTensor] = []  # among the arguments
        self._away: dict[int, Callable[[], torch.Tensor]] = {}  # by id of what stands for it
        arguments = _Arguments(self._keep)
        self._call = arguments.replaced((args, kwargs))
        self._given = BlockState(None, arguments.mutable) if arguments.mutable else None
        self._has_graph = bool(arguments.objects) and BlockState(None, arguments.objects).has_graph
        self._state, self._compares = block.begin()
        self._trained = [parameter.requires_grad for parameter in block.parameters]
        self._random = RandomStates(device)
        device_types = {"cpu", device.torch_device.type} - {"meta"}
        self._autocast = [_autocast_of(device_type) for device_type in device_types]
        modes = num_function_modes()
        self._default_device = torch.get_default_device() if modes else None
        self.attention: AttentionCalls | None = None  # whose results are kept
        self._places: list[Place] = []  # of the first run, until it ends
        self._expected: list[Signature] = []  # of what autograd saved in the first run
        self._values: list[torch.Tensor] = []  # some elements of each
        self._saved: dict[int, SavedTensor] = {}  # by the second run, until autograd takes it
        self._num_saved = 0
        self._different: list[str] = []
        self._task: object = None  # the backward that the second run was for

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor
        if tensor.grad_fn is not None:  # one written in place would own the graph that owns us
            store, self._store = self._store, None
            if store is not None and (back := store(tensor)) is not None:
                stands = tensor.new_empty(0)
                self._away[id(stands)] = back
                return stands
            kept = tensor.detach().requires_grad_()
        if not tensor.is_inference():
            self._tensors.append(SavedTensor(kept, version_of(kept)))
        return kept

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        back = self._away.get(id(tensor))
        return tensor if back is None else back().requires_grad_()

    # -- the first run ----------------------------------------------------------------------------
    def save(self, tensor: torch.Tensor) -> Place:
        """Hold a tensor that autograd saves in the first run, and return its place."""
        place = Place(len(self._places), SavedTensor(tensor, version_of(tensor)))
        self._places.append(place)
        self._expected.append(_signature(tensor))
        return place

    def end(self) -> str | None:
        """Compare the states, after the first run, and drop what was held if they are equal.

        Returns:
            None, or the name of something that the forward has changed. The caller then keeps what
            is `held`, and the forward never runs again.
        """
        changed = self._changed()
        if changed is None:
            self._random.forget_unmoved()
            if self._compares:
                held = (place.kept for place in self._places)
                self._values = [_some_values(tensor, version) for tensor, version in held]
            self.drop()
        return changed

    def _changed(self) -> str | None:
        if self._has_graph:
            return "an argument (an object with tensors of a graph)"
        if self._given is not None and (name := self._given.difference()) is not None:
            return name
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                return f"an argument ({tensor.dtype} {list(tensor.shape)})"
        return self._state.difference()

    def held(self) -> list[Place]:
        """The places of a first run that will not run again; its arguments are dropped."""
        held, self._places = self._places, []
        self._call, self._tensors, self._given, self.attention = ((), {}), [], None, None
        return held

    def drop(self) -> None:
        """Drop the tensors that are held. Safe to call twice."""
        for place in self._places:
            place.kept = None
        self._places = []

    # -- the second run ---------------------------------------------------------------------------
    def save_again(self, tensor: torch.Tensor) -> SavedTensor:
        """Hold a tensor that autograd saves in the second run, until autograd takes it."""
        index, self._num_saved = self._num_saved, self._num_saved + 1
        if index >= len(self._expected):  # the module went on after the error that was to end it
            raise _AllSavedError
        saved = self._saved[index] = SavedTensor(tensor.detach(), version_of(tensor))
        was, now = self._expected[index], _signature(tensor)
        if was != now:
            self._different.append(f"tensor {index}: got {_words(now)}, expected {_words(was)}")
        if index + 1 == len(self._expected):
            raise _AllSavedError
        return saved

    def take(self, place: Place, run: Callable[[Recomputation], None]) -> Any:
        """A tensor that backward needs, after a `run` if this backward has had none."""
        if place.kept is not None:
            return place.kept
        task = _task()
        if place.index not in self._saved or self._task != task or task == -1:
            run(self)
        saved = self._saved.pop(place.index, None)
        if saved is None:
            raise CheckpointError(
                "a tensor was saved in the forward, and not when it was run again"
            )
        return saved

    def run(self) -> None:
        """Run the forward again. CheckpointError if it does not save what the first one saved."""
        self._check()
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"{self._name}: its forward cannot be run again, since a tensor among its "
                    f"arguments was written in place meanwhile ({tensor.dtype} "
                    f"{list(tensor.shape)} is at version {version_of(tensor)}, expected version "
                    f"{version}); write out of place (y = y + x, not y += x), or {INSTEAD}"
                )
        self._saved.clear()
        self._num_saved, self._different, self._task = 0, [], _task()
        args, kwargs = _Arguments(self._back).replaced(self._call)
        work: Callable[[], object] = functools.partial(self._run_prepared, args, kwargs)
        if self._given is not None:
            work = functools.partial(self._given.run, work)
        with contextlib.ExitStack() as around:
            for arguments in self._autocast:
                if arguments != _autocast_of(arguments[0]):
                    around.enter_context(torch.autocast(*arguments))
            if self._default_device is not None:
                around.enter_context(self._default_device)
            self._state.run(work)
        if self._num_saved < len(self._expected):
            raise CheckpointError(
                f"a forward that was run again in backward saved {self._num_saved} tensors, "
                f"expected {len(self._expected)} as in the first run: it takes another way when it "
                f"is run again; {INSTEAD}"
            )
        if self._different:
            raise CheckpointError(
                "a forward that was run again in backward saved other tensors than the first run: "
                f"{'; '.join(self._different)}; {INSTEAD}"
            )
        if self._values:
            self._compare_values()

    def _run_prepared(self, args: Any, kwargs: Any) -> None:
        present = _Present(self.block, self._trained, self._random)
        run_and_restore(functools.partial(self._run, args, kwargs, present), present.restore)

    def _run(self, args: Any, kwargs: Any, present: _Present) -> None:
        present.exchange()
        with torch.enable_grad(), contextlib.suppress(_AllSavedError):
            self._forward(*args, **kwargs)

    def _compare_values(self) -> None:
        """CheckpointError if the second run has saved other values than the first one."""
        values, self._values = self._values, []
        apart = {k: _difference(_some_values(*self._saved[k]), v) for k, v in enumerate(values)}
        apart = {index: units for index, units in apart.items() if units}
        on_cpu = all(self._saved[index].tensor.device.type == "cpu" for index in apart)
        if not apart:
            return
        if not on_cpu and (len(apart) == 1 or max(apart.values()) <= ROUNDING):
            _warn_of_rounding(self.block.kind)
            return
        index = min(apart)
        raise CheckpointError(
            f"{self._name}: its forward computes other values when it runs again in backward "
            f"(saved tensor {index} of {len(values)}, {_words(self._expected[index])}). "
            f"{self.block.kind} depends on something that is not among its attributes, as a global "
            "counter, a generator behind a global name, or a closure. Make it an attribute of the "
            f"block, or {INSTEAD}"
        )


def _words(signature: Signature) -> str:
    shape, dtype, device = signature
    return f"{dtype} {list(shape)} on {device}"


def _task() -> object:
    """The backward that runs, or what torch takes several for; -1 outside of any."""
    return backward_group() or backward_number()


_Autocast = tuple[str, torch.dtype, bool, bool]  # the arguments of torch.autocast


def _autocast_of(device_type: str) -> _Autocast:
    enabled = torch.is_autocast_enabled(device_type)
    return device_type, torch.get_autocast_dtype(device_type), enabled, _caching()


_caching = torch.is_autocast_cache_enabled


# -- arguments -------------------------------------------------------------------------------------
class _Arguments:
    """Puts `leaf(tensor)` in the place of every tensor in tuples, lists and dicts.

    Lists and dicts become new ones. A tensor that comes twice is again one. All else is as it is.
    `objects` are those that may hold tensors of their own, and `mutable` these and the containers.
    """

    def __init__(self, leaf: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._leaf = leaf
        self._known: dict[int, Any] = {}
        self.objects: list[Any] = []
        self.mutable: list[Any] = []

    def replaced(self, call: tuple[Any, dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = call
        named = {name: self._replace(value) for name, value in kwargs.items()}
        return tuple(map(self._replace, args)), named

    def _replace(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._known:
                self._known[id(value)] = self._leaf(value)
            return self._known[id(value)]
        kind = type(value)
        if kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            parts = map(self._replace, value)
            return tuple(parts) if kind is tuple else kind(*parts)
        if kind is list or kind is dict:
            self.mutable.append(value)
            if kind is list:
                return list(map(self._replace, value))
            return {key: self._replace(item) for key, item in value.items()}
        if value is not None and not isinstance(value, (bool, int, float, str, torch.Size)):
            self.objects.append(value)
            self.mutable.append(value)
        return value


# -- what stands beside the block's state ----------------------------------------------------------
class _Present:
    """What a second run exchanges beside the block's state, and puts back: hooks that have run
    before ours, parameters that are frozen now, and the states of generators."""

    def __init__(
        self, block: RecomputedModule, trained: Sequence[bool], states: RandomStates
    ) -> None:
        self._hooks = vars(block.module)[BEFORE]
        ours = [key for key, hook in self._hooks.items() if serves(hook)]
        before = itertools.takewhile(lambda key: key != ours[-1], list(self._hooks) if ours else ())
        self._before = [key for key in before if key not in ours]
        self._tables = [(table, table.copy()) for table in (self._hooks, GLOBAL_HOOKS[0])]
        self._frozen = [
            parameter
            for parameter, was in zip(block.parameters, trained, strict=True)
            if was and not parameter.requires_grad
        ]
        self._random = states
        self._states = states.present()

    def exchange(self) -> None:
        """The forward runs next."""
        for parameter in self._frozen:  # the first run saved tensors for their gradients
            parameter.requires_grad_(True)
        for key in self._before:  # [Note: hooks before ours]
            del self._hooks[key]
        everywhere, held = self._tables[1]
        if held:  # torch's global ones run for the block's submodules: from its own hooks on
            everywhere.clear()
            self._hooks[-1] = lambda *_: everywhere.update(held)
            self._hooks.move_to_end(-1, last=False)
        self._random.set()

    def restore(self) -> None:
        """Put all of it back. To call it again does no harm."""
        for table, held in self._tables:
            if list(table) != list(held):
                table.clear()
                table.update(held)
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        set_states(self._states)


# -- values ----------------------------------------------------------------------------------------
def _some_values(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Elements of a saved tensor at fixed places, [n].

    None of a tensor that was written since, and none of bytes: kernels leave some of those that
    they work in unwritten.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    if version_of(tensor) != version or not is_plain or tensor.dtype in (torch.uint8, torch.int8):
        return torch.empty(0)
    along = max(1, int(NUM_COMPARED ** (1 / max(1, tensor.dim()))))
    places = tuple(slice(None, None, max(1, size // along)) for size in tensor.shape)
    with torch.no_grad():
        return tensor.detach()[places].reshape(-1).clone()


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """By how many units in the last place of the largest element two tensors differ at most."""
    if torch.equal(got, expected):
        return 0.0
    if not got.is_floating_point() or got.shape != expected.shape:
        return float("inf")
    one, other = got.double(), expected.double()
    apart = torch.where(one.isnan() & other.isnan(), 0.0, (one - other).abs())
    apart = torch.where(one == other, 0.0, apart)  # infinite ones
    scale = other.nan_to_num().abs().max() * torch.finfo(got.dtype).eps
    return 0.0 if not apart.any() else float(apart.max() / scale)


@functools.cache
def _warn_of_rounding(kind: str) -> None:
    logger.warning(
        "%s: its forward saves other bits when it runs again in backward, as operators without a "
        "defined order of additions do (torch.use_deterministic_algorithms(True) names them). "
        "Gradients are as exact as with torch's own checkpoint (logged once for each class)",
        kind,
    )
