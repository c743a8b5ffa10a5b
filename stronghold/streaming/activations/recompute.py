"""Recomputation of a block's forward in backward (activation checkpointing).

Owns everything that a second run needs, until autograd's graph has died: the arguments, the states
of random generators, autocast, the default device, and a snapshot of the block's state
(`block_state`). Owns the tensors that the second run saves, until autograd takes them. Decides call
by call whether a forward can run again. Entered by the training thread in forward and by autograd's
thread in backward, never by both at once.

[Note: run again] A second run must compute the values of the first run. The steps, in order:

1. Training thread, before the forward: it takes a snapshot of the block's state and of mutable
   arguments. It detaches tensors among the arguments, and notes their versions. It reads the states
   of the CPU's, the device's, Python's and NumPy's global generator.
2. Training thread, during the forward: autograd saves tensors. This file holds all of them until
   step 3. The peak of a step does not grow: backward needs as much room for the second run, and
   more beside it.
3. Training thread, after the forward: it compares the snapshot. If the forward has changed an
   attribute, a buffer, a hook, an argument or a generator of the block, this call keeps the saved
   tensors (`Activations` offloads them if the host has room), and step 4 never comes. Otherwise the
   held tensors are dropped. States of global generators that did not move are dropped, too.
4. Autograd's thread, when backward asks for the first of the tensors: it compares the versions of
   arguments and of the block's tensors. A tensor that was written since is refused (a hazard:
   write after read). It puts back attributes and hooks that the program has changed since. It sets
   the global generators that moved in the forward to their old states.
5. Autograd's thread: the forward runs as far as its last saved tensor.
6. Autograd's thread: it restores the attributes, hooks and generators of before step 4, also after
   an exception and after Ctrl-C. A tensor that was written in step 5 is refused.

Each call is compared. So a change that comes in a later call is kept in that call. A snapshot does
not see a global counter, a closure, or a generator behind a global name. So calls 1, 2, 4, 8, ...
of each block also compare values: some elements of every saved tensor, to the bit. A difference
is an error, since the gradient would be wrong. On a GPU a difference within rounding, or in one
tensor alone, is a warning: some operators add in an undefined order, or leave elements unwritten.

[Note: as torch has it] torch's non-reentrant checkpoint has the same rules, without steps 1, 3, 6
and the comparison of values. The second run ends when it has saved as many tensors as the first
one. They must have the same shapes, dtypes and devices. A tensor lives until autograd takes it, or
until the forward's nodes die, and serves one backward. An argument that was written in place in
between is refused.

[Note: hooks before ours] The second run gets the arguments of our own pre-hook. Hooks that ran
before our hook (`prepend=True` after initialize, and torch's global ones) have changed these
arguments already, and do not run again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from stronghold.devices.base import Device
from stronghold.streaming.activations.attention import AttentionCalls
from stronghold.streaming.activations.block_state import BEFORE, GLOBAL_HOOKS, BlockState
from stronghold.streaming.activations.offload import LayerOffload
from stronghold.streaming.activations.random_states import RandomStates, set_states
from stronghold.streaming.activations.saved import SavedActivation, SavedTensor
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
# units in the last place by which operators without a defined order may differ
ROUNDING = 64
REMEDY = 'set stronghold.activations to "keep" or "offload"'


class Place:
    """The handle of one tensor that autograd saves in a first run, the `index`-th of them.

    kept  until the forward ends: the tensor, as a `SavedTensor`. After that: its handle if this
          call keeps it, and None if the forward will run again
    """

    __slots__ = ("index", "kept")

    def __init__(self, index: int, kept: Any) -> None:
        self.index = index
        self.kept = kept


Signature = tuple[torch.Size, torch.dtype, torch.device]


def _signature(tensor: torch.Tensor) -> Signature:
    return tensor.shape, tensor.dtype, tensor.device


def _describe(signature: Signature) -> str:
    shape, dtype, device = signature
    return f"{dtype} {list(shape)} on {device}"


class _AllSavedError(Exception):
    """Ends a second run. To modules and their hooks it is an error like others."""


class RecomputedModule:
    """A module whose forward may run again: its newest snapshot, and the number of its calls."""

    def __init__(self, module: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self.module = module
        self.class_name = type(module).__name__
        self.parameters = parameters
        self._num_calls = 0
        self._state: BlockState | None = None

    def begin(self) -> tuple[BlockState, bool]:
        """Begin a first run.

        Returns:
            The snapshot of the state now, and whether this call compares values.
        """
        if self._state is None or self._state.difference() is not None:
            self._state = BlockState(self.module)
        self._num_calls += 1
        is_power_of_two = self._num_calls & (self._num_calls - 1) == 0
        return self._state, is_power_of_two


class Recomputation:
    """One forward of `block`, which begins now and may run again.

    block   the module, its parameters and its newest snapshot
    args    the arguments of the forward
    kwargs  its arguments by name
    name    the layer's name, for errors
    device  the device on which it runs
    check   called before the second run; raises if the module must not run again
    run     the function that runs again, if it is not the module: a part of its forward
    offload takes the first tensor with a graph among the arguments meanwhile, if given
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
        offload: LayerOffload | None = None,
    ) -> None:
        self.block = block
        self._forward: Callable[..., Any] = block.module if run is None else run
        self._name = name
        self._check = check
        self._offload = offload
        self._may_store = offload is not None
        self._tensors: list[SavedTensor] = []  # among the arguments
        # The offloaded argument: an empty tensor in its place, and its handle.
        self._stand_in: torch.Tensor | None = None
        self._stored: SavedActivation | None = None
        arguments = _Arguments(self._keep)
        self._call = arguments.replaced((args, kwargs))
        self._arguments_state: BlockState | None = None
        if arguments.mutable:
            self._arguments_state = BlockState(None, arguments.mutable)
        self._has_graph = bool(arguments.objects) and BlockState(None, arguments.objects).has_graph
        self._state, self._compares_values = block.begin()
        self._required_grad = [parameter.requires_grad for parameter in block.parameters]
        self._random = RandomStates(device)
        device_types = {"cpu", device.torch_device.type} - {"meta"}
        self._autocast = [_autocast_of(device_type) for device_type in device_types]
        has_modes = num_function_modes() > 0
        self._default_device = torch.get_default_device() if has_modes else None
        self.attention: AttentionCalls | None = None  # has the kept results, if any
        self._places: list[Place] = []  # of the first run, until it ends
        self._expected: list[Signature] = []  # of the tensors that the first run saved
        self._values: list[torch.Tensor] = []  # some elements of each of them
        # by the second run, until autograd takes them
        self._saved: dict[int, SavedTensor] = {}
        self._num_saved = 0
        self._mismatches: list[str] = []
        self._backward: object = None  # the backward that the second run was for

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that stands among the kept arguments."""
        kept = tensor
        # one written in place would own the graph that owns us
        if tensor.grad_fn is not None:
            if self._store_first(tensor):
                assert self._stand_in is not None
                return self._stand_in
            kept = tensor.detach().requires_grad_()
        if not tensor.is_inference():
            self._tensors.append(SavedTensor(kept, version_of(kept)))
        return kept

    def _store_first(self, tensor: torch.Tensor) -> bool:
        """Offload the first tensor with a graph, and no later one. True if it was offloaded."""
        if self._offload is None or not self._may_store:
            return False
        self._may_store = False
        self._stored = self._offload.store_input(tensor)
        if self._stored is None:
            return False
        self._stand_in = tensor.new_empty(0)
        return True

    def _argument(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the argument for the second run; an offloaded one is loaded."""
        if tensor is not self._stand_in:
            return tensor
        assert self._offload is not None
        assert self._stored is not None
        return self._offload.load(self._stored).requires_grad_()

    # -- the first run ----------------------------------------------------------------------------
    def save(self, tensor: torch.Tensor) -> Place:
        """Hold a tensor that autograd saves in the first run, and return its place."""
        place = Place(len(self._places), SavedTensor(tensor, version_of(tensor)))
        self._places.append(place)
        self._expected.append(_signature(tensor))
        return place

    def end(self) -> str | None:
        """Compare the states after the first run. If they are equal, drop the held tensors.

        Returns:
            None, or the name of something that the forward has changed. Then the caller keeps the
            `held` tensors, and the forward never runs again.
        """
        changed = self._changed()
        if changed is not None:
            return changed
        self._random.forget_unmoved()
        if self._compares_values:
            for place in self._places:
                tensor, version = place.kept
                self._values.append(_some_values(tensor, version))
        self.drop()
        return None

    def _changed(self) -> str | None:
        """Name something that the forward has changed, or that rules out a second run."""
        if self._has_graph:
            return "an argument (an object with tensors of a graph)"
        if self._arguments_state is not None:
            name = self._arguments_state.difference()
            if name is not None:
                return name
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                return f"an argument ({tensor.dtype} {list(tensor.shape)})"
        return self._state.difference()

    def held(self) -> list[Place]:
        """Return the places of a first run that will not run again, and drop its arguments."""
        places, self._places = self._places, []
        self._call = ((), {})
        self._tensors = []
        self._arguments_state = None
        self.attention = None
        return places

    def drop(self) -> None:
        """Drop the held tensors. Safe to call twice."""
        for place in self._places:
            place.kept = None
        self._places = []

    # -- the second run ---------------------------------------------------------------------------
    def save_again(self, tensor: torch.Tensor) -> SavedTensor:
        """Hold a tensor that autograd saves in the second run, until autograd takes it.

        The error that ends the second run comes out of its last tensor.
        """
        index = self._num_saved
        self._num_saved += 1
        # the module went on after the error that was to end it
        if index >= len(self._expected):
            raise _AllSavedError
        saved = SavedTensor(tensor.detach(), version_of(tensor))
        self._saved[index] = saved
        expected, got = self._expected[index], _signature(tensor)
        if got != expected:
            self._mismatches.append(
                f"tensor {index}: got {_describe(got)}, expected {_describe(expected)}"
            )
        if index + 1 == len(self._expected):
            raise _AllSavedError
        return saved

    def take(self, place: Place, run: Callable[[Recomputation], None]) -> Any:
        """Return the handle of a tensor that backward needs.

        `run` starts the second run, if the present backward has had none. CheckpointError if that
        run has not saved the tensor.
        """
        if place.kept is not None:
            return place.kept
        backward = _running_backward()
        is_new_backward = self._backward != backward or backward == -1
        if place.index not in self._saved or is_new_backward:
            run(self)
        saved = self._saved.pop(place.index, None)
        if saved is None:
            raise CheckpointError(
                "a tensor was saved in the forward, and not when it was run again"
            )
        return saved

    def run(self) -> None:
        """Run the forward again.

        CheckpointError if it does not save the tensors of the first run. RuntimeError if an
        argument was written since.
        """
        self._check()
        self._refuse_written_arguments()
        self._saved.clear()
        self._num_saved = 0
        self._mismatches = []
        self._backward = _running_backward()
        args, kwargs = _Arguments(self._argument).replaced(self._call)
        work: Callable[[], object] = functools.partial(self._run_with_state, args, kwargs)
        if self._arguments_state is not None:
            work = functools.partial(self._arguments_state.run, work)
        with contextlib.ExitStack() as contexts:
            for autocast in self._autocast:
                if autocast != _autocast_of(autocast[0]):
                    contexts.enter_context(torch.autocast(*autocast))
            if self._default_device is not None:
                contexts.enter_context(self._default_device)
            self._state.run(work)
        self._check_saved()
        if self._values:
            self._compare_values()

    def _refuse_written_arguments(self) -> None:
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"{self._name}: its forward cannot be run again, since a tensor among its "
                    f"arguments was written in place meanwhile ({tensor.dtype} "
                    f"{list(tensor.shape)} is at version {version_of(tensor)}, expected version "
                    f"{version}); write out of place (y = y + x, not y += x), or {REMEDY}"
                )

    def _run_with_state(self, args: Any, kwargs: Any) -> None:
        surroundings = _Surroundings(self.block, self._required_grad, self._random)
        work = functools.partial(self._run_forward, args, kwargs, surroundings)
        run_and_restore(work, surroundings.restore)

    def _run_forward(self, args: Any, kwargs: Any, surroundings: _Surroundings) -> None:
        surroundings.exchange()
        with torch.enable_grad(), contextlib.suppress(_AllSavedError):
            self._forward(*args, **kwargs)

    def _check_saved(self) -> None:
        """CheckpointError if the second run saved fewer tensors, or other shapes or dtypes."""
        if self._num_saved < len(self._expected):
            raise CheckpointError(
                f"a forward that was run again in backward saved {self._num_saved} tensors, "
                f"expected {len(self._expected)} as in the first run: it takes another way when it "
                f"is run again; {REMEDY}"
            )
        if self._mismatches:
            raise CheckpointError(
                "a forward that was run again in backward saved other tensors than the first run: "
                f"{'; '.join(self._mismatches)}; {REMEDY}"
            )

    def _compare_values(self) -> None:
        """CheckpointError if the second run has saved other values than the first run."""
        values, self._values = self._values, []
        # by index of the tensor, in units in the last place
        differences: dict[int, float] = {}
        for index, expected in enumerate(values):
            tensor, version = self._saved[index]
            units = _difference(_some_values(tensor, version), expected)
            if units:
                differences[index] = units
        if not differences:
            return
        on_cpu = all(self._saved[index].tensor.device.type == "cpu" for index in differences)
        is_rounding = len(differences) == 1 or max(differences.values()) <= ROUNDING
        if not on_cpu and is_rounding:
            _warn_of_rounding(self.block.class_name)
            return
        index = min(differences)
        raise CheckpointError(
            f"{self._name}: its forward computes other values when it runs again in backward "
            f"(saved tensor {index} of {len(values)}, {_describe(self._expected[index])}). "
            f"{self.block.class_name} depends on something that is not among its attributes, as a "
            "global counter, a generator behind a global name, or a closure. Make it an attribute "
            f"of the block, or {REMEDY}"
        )


def _running_backward() -> object:
    """The backward that runs, or the group that torch runs as one; -1 outside of any."""
    return backward_group() or backward_number()


_Autocast = tuple[str, torch.dtype, bool, bool]  # the arguments of torch.autocast


def _autocast_of(device_type: str) -> _Autocast:
    dtype = torch.get_autocast_dtype(device_type)
    is_enabled = torch.is_autocast_enabled(device_type)
    return device_type, dtype, is_enabled, torch.is_autocast_cache_enabled()


# -- arguments -------------------------------------------------------------------------------------
class _Arguments:
    """Copies a call's arguments with `replace_tensor(tensor)` in the place of every tensor.

    Tuples, lists and dicts become new ones. A tensor that comes twice is replaced by one tensor.
    All other values stay.

    objects  values that may hold tensors of their own
    mutable  these, and the lists and dicts
    """

    def __init__(self, replace_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._replace_tensor = replace_tensor
        self._replaced: dict[int, Any] = {}  # by id of the tensor
        self.objects: list[Any] = []
        self.mutable: list[Any] = []

    def replaced(self, call: tuple[Any, dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and the arguments by name, with their tensors replaced."""
        args, kwargs = call
        new_kwargs = {name: self._replace(value) for name, value in kwargs.items()}
        new_args = tuple(map(self._replace, args))
        return new_args, new_kwargs

    def _replace(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._replaced:
                self._replaced[id(value)] = self._replace_tensor(value)
            return self._replaced[id(value)]
        value_type = type(value)
        if value_type is tuple:
            return tuple(map(self._replace, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return value_type(*map(self._replace, value))
        if value_type is list:
            self.mutable.append(value)
            return list(map(self._replace, value))
        if value_type is dict:
            self.mutable.append(value)
            return {key: self._replace(item) for key, item in value.items()}
        if value is not None and not isinstance(value, (bool, int, float, str, torch.Size)):
            self.objects.append(value)
            self.mutable.append(value)
        return value


# -- around the second run -------------------------------------------------------------------------
class _Surroundings:
    """State outside of the block's snapshot that a second run exchanges, and then puts back.

    These are hooks that run before ours, parameters that were frozen since, and the states of
    random generators.
    """

    def __init__(
        self, block: RecomputedModule, required_grad: Sequence[bool], states: RandomStates
    ) -> None:
        self._hooks = vars(block.module)[BEFORE]
        keys = list(self._hooks)
        our_keys = [key for key, hook in self._hooks.items() if serves(hook)]
        end = keys.index(our_keys[-1]) if our_keys else 0
        self._earlier_hooks = [key for key in keys[:end] if key not in our_keys]
        self._global_hooks = GLOBAL_HOOKS[0]
        self._global_hooks_now = self._global_hooks.copy()
        self._tables = [
            (self._hooks, self._hooks.copy()),
            (self._global_hooks, self._global_hooks_now),
        ]
        self._frozen = []
        for parameter, required in zip(block.parameters, required_grad, strict=True):
            if required and not parameter.requires_grad:
                self._frozen.append(parameter)
        self._random = states
        self._states = states.present()

    def exchange(self) -> None:
        """Set the state of the first run. The forward runs next."""
        # the first run saved tensors for their gradients
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        for key in self._earlier_hooks:  # [Note: hooks before ours]
            del self._hooks[key]
        if self._global_hooks_now:
            # They run for the block's submodules, so from the block's first hook on.
            self._global_hooks.clear()
            self._hooks[-1] = self._restore_global_hooks
            self._hooks.move_to_end(-1, last=False)
        self._random.set()

    def _restore_global_hooks(self, *_: Any) -> None:
        """Hook before the block's own hooks."""
        self._global_hooks.update(self._global_hooks_now)

    def restore(self) -> None:
        """Put the present state back. Safe to call twice."""
        for table, items in self._tables:
            if list(table) != list(items):
                table.clear()
                table.update(items)
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        set_states(self._states)


# -- values ----------------------------------------------------------------------------------------
def _some_values(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Copy some elements of a saved tensor, at fixed positions.

    Returns:
        [n], with n near `NUM_COMPARED`. [0] if the tensor was written after `version`, has no
        strided memory, or may be unwritten (`_may_be_unwritten`).
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    if version_of(tensor) != version or not is_plain or _may_be_unwritten(tensor):
        return torch.empty(0)
    per_dimension = max(1, int(NUM_COMPARED ** (1 / max(1, tensor.dim()))))
    strides = [max(1, size // per_dimension) for size in tensor.shape]
    positions = tuple(slice(None, None, stride) for stride in strides)
    with torch.no_grad():
        return tensor.detach()[positions].reshape(-1).clone()


def _may_be_unwritten(tensor: torch.Tensor) -> bool:
    """Return True for a saved tensor that a kernel may leave unwritten.

    Some bytes of a work space are never written. Without dropout, torch's fused attention kernels
    do not write the seed and the offset of their random numbers: integers, of at most two elements.
    """
    if tensor.dtype in (torch.uint8, torch.int8):
        return True
    is_integer = not tensor.is_floating_point() and not tensor.is_complex()
    return is_integer and tensor.dtype is not torch.bool and tensor.numel() <= 2


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, in units in the last place of the largest element.

    0.0: the tensors are equal to the bit. Infinity: they are not comparable.
    """
    if torch.equal(got, expected):
        return 0.0
    if not got.is_floating_point() or got.shape != expected.shape:
        return float("inf")
    got_values, expected_values = got.double(), expected.double()
    both_nan = got_values.isnan() & expected_values.isnan()
    distance = torch.where(both_nan, 0.0, (got_values - expected_values).abs())
    # equal infinities
    distance = torch.where(got_values == expected_values, 0.0, distance)
    if not distance.any():
        return 0.0
    unit = expected_values.nan_to_num().abs().max() * torch.finfo(got.dtype).eps
    return float(distance.max() / unit)


@functools.cache
def _warn_of_rounding(class_name: str) -> None:
    """Log once per class that a second run differs within rounding."""
    logger.warning(
        "%s: its forward saves other bits when it runs again in backward, as operators without a "
        "defined order of additions do (torch.use_deterministic_algorithms(True) names them). "
        "Gradients are as exact as with torch's own checkpoint (logged once for each class)",
        class_name,
    )
