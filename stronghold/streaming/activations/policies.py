"""Saved tensors: keep them, offload them to the host, or compute them again.

Owns what autograd saves while a streamed layer runs, and counts its bytes in the first steps.
Entered by the training thread in forward and by autograd's thread in backward. Policies are chosen
layer by layer, one mechanism serves all (`torch.autograd.graph.saved_tensors_hooks` around each
layer's forward):

keep        a saved tensor that aliases a slot becomes a handle (layer, offset, shape, stride):
            the slot holds another layer by the time of backward; everything else stays on the
            device
offload     beside that, other saved tensors go to host memory on the drain lane, and come back on
            the fetch lane one layer ahead of backward. Two layers' are on the device at a time
            ([Note: two layers])
recompute   the layer's forward runs again in backward, from its inputs (`recompute`)
attention   the same, but what attention's kernels gave is kept (`attention`)
..._offload what these two keep goes to host memory and comes back, as under offload

[Note: two layers] On a GPU the host is many layers ahead of compute, and sees that a copy is done
long after. So nothing is dropped because it was seen to be done: when the forward of layer i ends,
compute is made to wait for the copies of layer i - 1, and their sources are dropped then. What is
computed next takes their memory, in stream order. It is the same on the way back: what was brought
back is dropped as soon as compute waits for its copy and autograd is through with it.

[Note: lent] Inputs that wait on the host for a layer's second run take the room of its gradients,
as far as it goes (`host`, [Note: lent]): first those of the first chunks, and all else is pinned.

[Note: foreign hooks] The user's own checkpointing also works by saved-tensor hooks. Torch applies
the innermost pair alone, so ours pass on to the pair that was active before what they do not turn
into handles.

[Note: pack] What a pack hook returns is owned by the graph's node. The tensor itself would own, as
its `grad_fn`, that node in turn, a cycle that no collector sees: a graph that ends without a
backward would never be freed. `detach` shares memory and version alone. Autograd does not look for
writes in place where a hook stands in between, so that it is done here.

[Note: sparse] A sparse tensor has no storage of its own, but tensors of indices and values. It is
kept on the device as it is, or computed again. Where its values are a weight's memory in a slot
(`torch.sparse_coo_tensor(indices, weight)`), its tensors are saved one by one, and it is made of
them again in backward.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from stronghold.devices.base import Fence, Record, completed
from stronghold.devices.lane_name import LaneName
from stronghold.errors import BudgetError, ConfigError, LaneError, format_size
from stronghold.memory.slab import PinnedPool
from stronghold.model.gpu_operators import AttentionCost, total_attention
from stronghold.plan.cost import AGAIN, ATTENTION, AWAY
from stronghold.plan.plan import Plan
from stronghold.streaming.activations.attention import (
    AttentionCalls,
    say_not_kept,
    watched,
)
from stronghold.streaming.activations.key_value_caches import without_cache
from stronghold.streaming.activations.recompute import (
    Place,
    Recomputation,
    RecomputedModule,
    SavedTensor,
)
from stronghold.streaming.executor import Executor
from stronghold.streaming.parts import Parts
from stronghold.streaming.patches.attention import Through, running
from stronghold.streaming.patches.autograd import (
    Hooks,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)
from stronghold.streaming.patches.tensors import sparse_parts, tree_leaves, version_of
from stronghold.telemetry.metrics import WaitCause

logger = logging.getLogger("stronghold")


class ActivationSizes:
    """`saved[i]` and `boundary[i]`: what block i's largest forward so far kept for backward, and
    what entered it, which recomputation keeps instead. Parameters and slots are not counted, a
    storage is counted once per block. `attended[i]`: what attention's kernels took of it.
    `square_saved` and `square_boundary` are the parts with two dimensions of `length`, the tokens
    of a sequence of the running batch (0: not known). Nothing is counted unless `counting`."""

    def __init__(self, num_layers: int) -> None:
        self.counting = False
        self.saved = [0] * num_layers
        self.boundary = [0] * num_layers
        self.length = 0
        self.square_saved = [0] * num_layers
        self.square_boundary = [0] * num_layers
        self.attended = [total_attention(())] * num_layers
        self.least_chunks = 1  # that a divided call had
        self._num_chunks = 0  # that the running call has, if it is divided
        self._layer: int | None = None  # whose forward runs, unless it is a recomputation
        # Held while the forward runs: an address that was freed would be given to another.
        self._seen: dict[int, torch.UntypedStorage] = {}
        self._bytes = self._square_bytes = 0
        self._attended: list[AttentionCost] = []  # calls of the forward that runs

    def divide(self, layer: int, inputs: Any, num_chunks: int) -> None:
        """A call of the layer begins whose chunks enter one after the other."""
        if self.counting:
            known = self.least_chunks
            self.least_chunks = num_chunks if known == 1 else min(known, num_chunks)
            self.enter(layer, inputs)
            self._num_chunks = num_chunks

    def enter(self, layer: int, inputs: Any) -> None:
        """A forward of the layer begins."""
        if not self.counting:
            return
        self._layer = layer
        self._seen.clear()
        if self._num_chunks:  # what chunks save adds up
            return
        self._bytes = self._square_bytes = 0
        self._attended = []
        storages = {
            part.untyped_storage().data_ptr(): (part.untyped_storage().nbytes(), self._grows(part))
            for leaf in tree_leaves(inputs)
            if isinstance(leaf, torch.Tensor)
            for part in _strided(leaf)
        }
        entered = sum(nbytes for nbytes, _ in storages.values())
        if entered > self.boundary[layer]:
            self.boundary[layer] = entered
            square = sum(nbytes for nbytes, grows in storages.values() if grows)
            self.square_boundary[layer] = square

    def _grows(self, tensor: torch.Tensor) -> bool:
        """True if the tensor grows with the square of the length."""
        return self.length > 1 and list(tensor.shape).count(self.length) > 1

    def leave(self, *, chunk: bool = False) -> None:
        """It returned or raised."""
        self._layer = None
        self._seen.clear()
        if not chunk:
            self._num_chunks = 0

    def saw_attention(self, layer: int, call: AttentionCost) -> None:
        """Attention's kernels computed a call."""
        if layer != self._layer:
            return
        self._attended.append(call)
        self.attended[layer] = max(self.attended[layer], total_attention(self._attended))

    def saw(self, layer: int, tensor: torch.Tensor) -> None:
        """Autograd saves the tensor, which is in no slot."""
        if layer != self._layer or isinstance(tensor, nn.Parameter):
            return
        for part in _strided(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen[storage.data_ptr()] = storage
                self._bytes += storage.nbytes()
                self._square_bytes += storage.nbytes() if self._grows(part) else 0
        if self._bytes > self.saved[layer]:
            self.saved[layer] = self._bytes
            self.square_saved[layer] = self._square_bytes


_COMPRESSED = {  # layouts of two tensors of indices: the methods that give them
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def _strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with a storage that it is made of: itself, or of a sparse one indices and values.
    None of another layout, whose memory torch does not show."""
    if tensor.layout is torch.strided:
        return [tensor]
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    names = _COMPRESSED.get(tensor.layout)
    if names is None:
        return []
    return [*(getattr(tensor, name)() for name in names), tensor.values()]


MIN_OFFLOAD_BYTES = 16 << 10  # below this a copy costs more than the room it frees
MAX_STORAGE_WASTE = 4  # a view of a storage this many times larger stays on the device


class SavedWeight(NamedTuple):
    """A saved tensor inside a slot: resolved to whatever slot holds the layer in backward, unless
    its values are of another epoch."""

    layer: int
    epoch: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class SavedStorage:
    """One storage on its way to the host and back; several saved tensors may be views of it. `lent`
    has the record of the entry that it lies in ([Note: lent]).

    Autograd's graph owns it: when the last node that saved it has run, it dies, and its host memory
    returns to the pool.
    """

    source: torch.Tensor | None
    version: int
    host: torch.Tensor
    lent: tuple[Record, ...] = ()
    stored: Fence | None = None
    back: _Back | None = None


@dataclass(slots=True, eq=False)
class _Back:
    """What is brought back of `owner`, after `ready`."""

    owner: weakref.ref[SavedStorage]
    memory: torch.Tensor
    ready: Fence


class SavedActivation(NamedTuple):
    """A view of a `SavedStorage`."""

    storage: SavedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedResident(NamedTuple):
    """The same over weights that stay on the device."""

    tensor: torch.Tensor
    version: int


class SavedSparse(NamedTuple):
    """A sparse tensor, by what each of its tensors became ([Note: sparse])."""

    parts: tuple[Any, ...]
    layout: torch.layout
    shape: torch.Size
    is_coalesced: bool

    def made_of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sparse tensor of these indices and values, which share its memory."""
        if self.layout is torch.sparse_coo:
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices, values, self.shape, is_coalesced=self.is_coalesced, check_invariants=False
            )
        compressed, plain, values = parts
        return torch.sparse_compressed_tensor(
            compressed, plain, values, self.shape, layout=self.layout, check_invariants=False
        )


class _Foreign(NamedTuple):
    packed: Any


@dataclass(slots=True, eq=False)
class _Scope:
    """One running forward: what to close, as far as it is open."""

    layer: int
    hooks: saved_tensors_hooks | None = None
    outside: Through | None = None  # what attention's calls went through before
    again: Recomputation | None = None  # of a first run


def _refuse_written(packed: SavedTensor) -> NoReturn:
    raise RuntimeError(
        "a tensor needed for backward was modified in place after it was saved: "
        f"{packed.tensor.dtype} {list(packed.tensor.shape)} is at version "
        f"{version_of(packed.tensor)}, expected version {packed.version}; write out of "
        "place (y = y + x, not y += x)"
    )


def _unwritten(kept: SavedTensor) -> torch.Tensor:
    written = version_of(kept.tensor) != kept.version
    return _refuse_written(kept) if written else kept.tensor.detach()


logged: set[tuple[str, str]] = set()  # classes of blocks, and what their forwards change


def _log_kept(kind: str, changed: str, on_host: int, on_device: int) -> None:
    """Log that a forward of a block of class `kind` cannot run again; once for each cause."""
    if (kind, changed) not in logged:
        logged.add((kind, changed))
        logger.warning(
            "%s: its forward changes %s, so that it cannot run again in backward. The tensors that "
            "it saves are kept: %s on the host and %s on the device in this call (logged once for "
            "each class)",
            kind,
            changed,
            format_size(on_host),
            format_size(on_device),
        )


class Activations:
    """Applies each layer's policy: the plan's `activations`, by the layout's index. Offloaded ones
    take `host_room_bytes` of the host at most (None: what it has). While it `spares`, forwards that
    begin keep nothing on the device that can be computed again."""

    def __init__(
        self, parts: Parts, plan: Plan, executor: Executor, host_room_bytes: int | None
    ) -> None:
        self._policies = policies = plan.activations
        self.spares = False
        offloading = [layer for layer, policy in enumerate(policies) if policy in AWAY]
        self._last_offloading = max(offloading, default=-1)
        self._device, self._metrics, self._host = parts.device, parts.metrics, parts.host
        self._executor = executor
        self._open: list[_Scope] = []  # the outermost first
        self._again: Recomputation | None = None  # whose forward is about to run again
        self._outside: Hooks | None = None  # the pair that was active before the outermost of them
        self._saved: dict[int, list[weakref.ref[SavedStorage]]] = defaultdict(list)
        self._in_scope: dict[int, SavedStorage] = {}
        self._leaving: deque[list[SavedStorage]] = deque()  # by forward of a layer, oldest first
        self._coming: set[_Back] = set()  # compute has not been made to wait for them
        self._stored: Fence = completed(LaneName.DRAIN, "nothing offloaded")  # the newest copy
        self._pool = PinnedPool(self._device, host_room_bytes, expected_bytes=plan.offloaded_bytes)
        self._host.vacate = self._vacate
        # By layer what lies in its gradients' room, and where it ends, one behind the other.
        self._borrowed: dict[int, list[tuple[weakref.ref[SavedStorage], int]]] = defaultdict(list)
        self._recomputed: dict[nn.Module, RecomputedModule] = {}
        self.sizes = ActivationSizes(len(policies))
        self._watched = [
            watched(partial(self.sizes.saw_attention, layer)) for layer in range(len(policies))
        ]
        self._plain = [
            self._hooks(layer, None, None, None, offload=False) for layer in range(len(policies))
        ]

    # -- around a layer's forward -----------------------------------------------------------------
    def enter(
        self,
        layer: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        recomputing: bool,
        run: Callable[..., Any] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's forward begins, with these arguments: those that it was given, without
        caches if it will run again (`run`, if it is not the module). Every `enter` has its `leave`,
        also when it raises."""
        foreign = saved_tensor_hooks()
        if not self._open:
            self._outside = foreign
        scope = _Scope(layer, outside=running.through)
        self._open.append(scope)  # before anything is open: an interrupt may end us anywhere
        again, self._again = self._again, None
        self._in_scope.clear()
        first = not recomputing and again is None
        if first:
            self._forget_coming()
            self._leaving.append([])
            self.sizes.enter(layer, (args, kwargs))
        through = self._watched[layer] if first and self.sizes.counting else None
        outer: Callable[[torch.Tensor], Any] | None = None
        offload = False
        if again is not None:
            outer = again.save_again
            through = again.attention.again() if again.attention is not None else None
        elif foreign is not None:  # they decide, also whether the forward runs again
            pack = foreign[0]
            outer = lambda tensor: _Foreign(pack(tensor))  # noqa: E731
        elif first and self.recomputes(layer):
            args, kwargs = without_cache(args, kwargs)
            scope.again = self._recomputation(layer, module, args, kwargs, run)
            outer = scope.again.save
            if scope.again.attention is not None:
                through = scope.again.attention.first
        else:
            offload = self._policy(layer) == "offload" and first
        running.through = through
        if outer is None and not offload:
            pair = self._plain[layer]
        else:
            pair = self._hooks(layer, foreign, outer, scope.again, offload=offload)
        hooks = saved_tensors_hooks(*pair)
        hooks.__enter__()
        scope.hooks = hooks
        return args, kwargs

    def _recomputation(
        self,
        layer: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any] | None,
    ) -> Recomputation:
        policy, state = self._policy(layer), self._executor.layers[layer]
        away = policy in AWAY
        if module not in self._recomputed:
            self._recomputed[module] = RecomputedModule(module, state.parameters)
        again = Recomputation(
            self._recomputed[module],
            args,
            kwargs,
            name=state.name,
            device=self._device,
            check=partial(self._refuse_old, layer, state.views.epoch),
            run=run,
            store=partial(self._store_input, layer) if away else None,
        )
        if policy in ATTENTION:
            keep = partial(self._keep_result, layer, away=away)
            again.attention = AttentionCalls(keep, self._device)
        return again

    def _store_input(self, layer: int, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Of a view its own part alone: chunks share their storage."""
        if not (tensor.is_contiguous() and self._worth_offloading(tensor, part=True)):
            return None
        part = tensor.detach().view(-1).view(torch.uint8)
        saved = self._store(layer, tensor, part, input=True)
        kept = SavedActivation(saved, tensor.dtype, 0, tensor.shape, tensor.stride())
        return partial(self._give_back, kept)

    def _keep_result(
        self, layer: int, tensor: torch.Tensor, *, away: bool
    ) -> Callable[[], torch.Tensor]:
        if away and self._worth_offloading(tensor):
            return partial(self._give_back, self._offloaded(layer, tensor))
        return partial(_unwritten, SavedTensor(tensor.detach(), version_of(tensor)))

    def _give_back(self, kept: SavedActivation) -> torch.Tensor:
        back = self._load(kept.storage)
        return back.view(kept.dtype).as_strided(kept.shape, kept.stride, kept.offset)

    def will_recompute(self, layer: int, *, recomputing: bool) -> bool:
        """Whether a forward of the layer that begins now will run again."""
        first = not recomputing and self._again is None and saved_tensor_hooks() is None
        return first and self.recomputes(layer)

    def recomputes(self, layer: int) -> bool:
        """Whether the layer's policy is to run it again for backward, where one will come."""
        return self._policy(layer) in AGAIN and torch.is_grad_enabled()

    def _policy(self, layer: int) -> str:
        policy = self._policies[layer]
        return "recompute" if self.spares and policy not in AWAY else policy

    def leave(self, layer: int, *, chunk: bool = False) -> None:
        """The layer's forward, or a chunk of it, returned or raised."""
        scope = next((scope for scope in reversed(self._open) if scope.layer == layer), None)
        self.sizes.leave(chunk=chunk)
        last = layer >= self._last_offloading
        if scope is None:  # the forward failed before `enter`, or went chunk by chunk
            if last:
                self._drop_left(newest=0)
            return
        if scope.hooks is not None:
            scope.hooks.__exit__(None, None, None)
        running.through = scope.outside
        again = scope.again
        if again is not None:
            if again.attention is not None and not again.attention.any:
                say_not_kept(again.block.kind)
            changed = again.end()
            if changed is not None:
                self._keep_all(layer, again, changed)
        self._in_scope.clear()
        self._open.remove(scope)
        # What comes after the last layer that offloads keeps its own: no room is left for two.
        # Of chunks as many are on their way as run at once.
        newest = max(1, len(self._device.side_streams.streams)) if chunk else int(not last)
        self._drop_left(newest=newest)

    def _keep_all(self, layer: int, again: Recomputation, changed: str) -> None:
        """Keep what a forward saved that cannot run again: on the host, as far as it has room."""
        on_host = on_device = 0
        for place in again.held():
            tensor, version = place.kept
            place.kept = SavedTensor(tensor.detach(), version)  # [Note: pack]
            nbytes = tensor.numel() * tensor.element_size()
            if version_of(tensor) == version and self._worth_offloading(tensor):
                with contextlib.suppress(BudgetError):
                    place.kept = self._offloaded(layer, tensor)
                    self._last_offloading = max(self._last_offloading, layer)
                    on_host, nbytes = on_host + nbytes, 0
            on_device += nbytes
        _log_kept(again.block.kind, changed, on_host, on_device)

    @property
    def host_bytes(self) -> int:
        """Pinned for what is offloaded."""
        return self._pool.num_bytes

    def abandon(self, *, in_backward: bool = False) -> bool:
        """An interrupt ended forwards anywhere: make this thread's saved-tensor hooks those that
        were active before them. In backward they went with it, whose end restores those from
        before. Whether any forward was open."""
        left_open = bool(self._open)
        if left_open and not in_backward:
            while (active := saved_tensor_hooks()) is not None and active != self._outside:
                pop_saved_tensor_hooks()
            if active is None and self._outside is not None:
                push_saved_tensor_hooks(self._outside)
        if left_open:
            running.through = self._open[0].outside
        for scope in self._open:
            if scope.again is not None:
                scope.again.drop()
        self._open.clear()
        self._in_scope.clear()
        self.sizes.leave()
        return left_open

    def _hooks(
        self,
        layer: int,
        foreign: Hooks | None,
        outer: Callable[[torch.Tensor], Any] | None,
        again: Recomputation | None,
        *,
        offload: bool,
    ) -> Hooks:
        """The pair that stands around a forward of the layer, which `again` runs again. It is
        called for each tensor that autograd saves, some forty times a block: what can be looked up
        before is, and named tuples are made without their Python. Neither function names itself or
        the other one: what they hold, the block's inputs too, goes with the graph at once."""
        executor, sizes, layers = self._executor, self.sizes, self._executor.layers
        run_again, weights = self._run_again, executor.weights
        layer_at, staying = weights.layer_at, weights.staying
        new: Any = tuple.__new__

        def pack(tensor: torch.Tensor) -> Any:
            try:
                address = tensor.untyped_storage().data_ptr()
            except NotImplementedError:  # not strided; to ask for the layout takes 2 us
                return self._pack_sparse(tensor, layer, outer, offload=offload)
            held = layer_at.get(address)
            if held is not None:
                at, epoch = tensor.storage_offset(), layers[held].views.epoch
                place = at, tensor.shape, tensor.stride()
                return new(SavedWeight, (held, epoch, tensor.dtype, *place))
            if sizes.counting:
                sizes.saw(layer, tensor)
            if address in staying:
                return SavedResident(tensor.detach(), version_of(tensor))  # [Note: pack]
            if outer is not None:
                return outer(tensor)
            if offload and self._worth_offloading(tensor):
                return self._offloaded(layer, tensor)
            return new(SavedTensor, (tensor.detach(), version_of(tensor)))

        def unpack(packed: Any) -> torch.Tensor:
            if type(packed) is Place:
                assert again is not None
                packed = again.take(packed, run_again)
            if type(packed) is SavedTensor:
                tensor, version = packed
                return tensor if version_of(tensor) == version else _refuse_written(packed)
            if type(packed) is SavedWeight:
                held, epoch, dtype, offset, shape, stride = packed
                if layers[held].views.epoch != epoch:
                    self._refuse_old(held, epoch)
                weight = executor.weights_of(held, layer)
                if weight.dtype is not dtype:
                    weight = weight.view(dtype)
                weight = weight.as_strided(shape, stride, offset)
                # With create_graph backward saves it in its turn, where none of our hooks stands,
                # and needs it when the slot holds another layer.
                return weight.clone() if torch.is_grad_enabled() else weight
            if type(packed) is SavedSparse:
                return self._unpack_sparse(packed, layer, foreign, again)
            return self._unpack(packed, foreign)

        return pack, unpack

    def _pack_sparse(
        self,
        tensor: torch.Tensor,
        layer: int,
        outer: Callable[[torch.Tensor], Any] | None,
        *,
        offload: bool,
    ) -> Any:
        """The handle of a sparse tensor that autograd saves ([Note: sparse])."""
        parts, layer_at = _strided(tensor), self._executor.weights.layer_at
        if any(part.untyped_storage().data_ptr() in layer_at for part in parts):
            pack, _ = self._hooks(layer, None, outer, None, offload=offload)
            coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
            return SavedSparse(tuple(map(pack, parts)), tensor.layout, tensor.shape, coalesced)
        if self.sizes.counting:
            self.sizes.saw(layer, tensor)
        return outer(tensor) if outer else SavedTensor(tensor.detach(), version_of(tensor))

    def _unpack_sparse(
        self, packed: SavedSparse, layer: int, foreign: Hooks | None, again: Recomputation | None
    ) -> torch.Tensor:
        _, unpack = self._hooks(layer, foreign, None, again, offload=False)
        return packed.made_of([unpack(part) for part in packed.parts])

    def _unpack(self, packed: Any, foreign: Hooks | None) -> torch.Tensor:
        if isinstance(packed, SavedResident):
            # Torch does not look: it has our handle.
            if version_of(packed.tensor) != packed.version:
                raise ConfigError(
                    "backward needs weights as they were before an update on the gpu: the graph is "
                    "older than the step. Run the forward again after engine.step, or set "
                    'stronghold.resident_updates to "host"'
                )
            return packed.tensor
        if isinstance(packed, SavedActivation):
            return self._give_back(packed)
        assert isinstance(packed, _Foreign)
        assert foreign is not None
        return foreign[1](packed.packed)

    def _run_again(self, again: Recomputation) -> None:
        self._again = again  # until the module's own hook enters
        try:
            again.run()
        finally:
            self._again = None

    def _refuse_old(self, layer: int, epoch: int) -> None:
        """ConfigError when the layer's weights have changed, where autograd would say the same."""
        state = self._executor.layers[layer]
        if state.views.epoch != epoch:
            raise ConfigError(
                f"backward needs the weights of {state.name} as they were in "
                "its forward, and they were written since, by engine.step() or in place: call "
                "backward before the step, and write after it"
            )

    # -- offload ----------------------------------------------------------------------------------
    def _worth_offloading(self, tensor: torch.Tensor, *, part: bool = False) -> bool:
        if tensor.layout is not torch.strided:
            return False
        nbytes = 0 if part else tensor.untyped_storage().nbytes()
        return (
            tensor.device == self._device.torch_device
            and not isinstance(tensor, nn.Parameter)
            and tensor.numel() * tensor.element_size() >= MIN_OFFLOAD_BYTES
            and nbytes <= MAX_STORAGE_WASTE * tensor.numel() * tensor.element_size()
        )

    def _offloaded(self, layer: int, tensor: torch.Tensor) -> SavedActivation:
        """The tensor as a view of its storage, which goes to the host once."""
        address = tensor.untyped_storage().data_ptr()
        saved = self._in_scope.get(address)
        if saved is None:
            storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            storage.set_(tensor.untyped_storage())
            saved = self._in_scope[address] = self._store(layer, tensor, storage)
        at = int(tensor.storage_offset())
        return SavedActivation(saved, tensor.dtype, at, tensor.shape, tensor.stride())

    def _store(
        self, layer: int, tensor: torch.Tensor, source: torch.Tensor, *, input: bool = False
    ) -> SavedStorage:
        """The bytes `source` of the tensor's storage go to the host. As an `input` they may lie
        where the layer's gradients will."""
        kept, nbytes = tensor.detach(), source.numel()  # [Note: pack]
        saved = self._borrow(layer, kept, nbytes) if input else None
        if saved is None:
            saved = SavedStorage(kept, version_of(kept), self._pool.take(nbytes))
            self._return_later(layer, saved)
        target, device = saved.host, self._device
        saved.stored = device.drain.submit(
            f"offload {layer}",
            lambda: device.copy(target, source),
            after=(device.compute.record(f"activation {layer}"),),
            writes=saved.lent,
            nbytes=nbytes,
        )
        self._stored = saved.stored
        if not self._leaving:  # a layer inside this one has ended, and was the last to offload
            self._leaving.append([])
        self._leaving[-1].append(saved)
        return saved

    def _return_later(self, layer: int, saved: SavedStorage) -> None:
        """Memory that is taken again while a transfer still reads it cannot happen: the next
        offload waits for compute, and compute waited for that transfer."""
        pool, host = self._pool, saved.host
        self._saved[layer].append(weakref.ref(saved, lambda _: pool.give(host)))

    def _borrow(self, layer: int, tensor: torch.Tensor, nbytes: int) -> SavedStorage | None:
        """Room in the layer's gradient entry ([Note: lent]); None where there is none."""
        entry, here = self._host.lent_entry(layer), self._borrowed[layer]
        while here and here[-1][0]() is None:
            here.pop()
        begin = here[-1][1] if here else 0
        if entry is None or begin + nbytes > entry.memory.nbytes:
            return None
        room = entry.memory.view(torch.uint8)[begin : begin + nbytes]
        saved = SavedStorage(tensor, version_of(tensor), room, (entry.record,))
        reference = weakref.ref(saved)
        here.append((reference, begin + nbytes))
        self._saved[layer].append(reference)
        return saved

    def _vacate(self, layer: int) -> None:
        """Gradients are about to come where something of the layer's may still lie."""
        for reference, _ in self._borrowed.pop(layer, ()):
            saved = reference()
            if saved is not None:
                assert saved.stored is not None
                saved.stored.wait()
                target = self._pool.take(saved.host.numel())
                target.copy_(saved.host)
                saved.host, saved.lent = target, ()
                self._return_later(layer, saved)

    def _drop_left(self, *, newest: int) -> None:
        """Drop the sources of all but the `newest` forwards, in stream order after their copies
        ([Note: two layers]). The in-place check is autograd's own, which packing would lose."""
        while len(self._leaving) > newest:
            left = self._leaving.popleft()
            if left:  # the lane copies in order: the last copy is done after the others
                assert left[-1].stored is not None
                waited = self._device.compute.wait_everywhere(left[-1].stored)
                self._metrics.waited(WaitCause.DRAIN, waited)
            for saved in left:
                assert saved.source is not None
                source, saved.source = saved.source, None
                if version_of(source) != saved.version:
                    raise RuntimeError(
                        "a tensor that backward needs was written in place while it was offloaded "
                        f"({source.dtype} {list(source.shape)} is at version {version_of(source)}, "
                        f"expected version {saved.version}); write out of place (y = y + x, not "
                        'y += x), or set stronghold.activations to "keep"'
                    )

    def prefetch(self, layer: int) -> None:
        """Backward of the layer comes next: begin to bring its activations back, in the order of
        need."""
        self._drop_left(newest=0)
        self._forget_coming()
        alive = self._saved[layer] = [saved for saved in self._saved[layer] if saved() is not None]
        for reference in reversed(alive):
            if (saved := reference()) is not None:
                self._bring_back(saved, layer)

    def _bring_back(self, saved: SavedStorage, layer: int) -> _Back:
        if saved.back is not None:
            return saved.back
        device, host = self._device, saved.host
        memory = torch.empty(saved.host.numel(), dtype=torch.uint8, device=device.torch_device)
        assert saved.stored is not None
        ready = device.fetch.submit(
            f"onload {layer}",
            lambda: device.copy(memory, host),
            # After compute: the allocator may have taken the memory from work still queued there.
            after=(saved.stored, device.compute.record(f"room for activation {layer}")),
            reads=saved.lent,
            nbytes=saved.host.numel(),
        )
        saved.back = _Back(weakref.ref(saved), memory, ready)
        self._coming.add(saved.back)
        return saved.back

    def _load(self, saved: SavedStorage) -> torch.Tensor:
        back = self._bring_back(saved, -1)
        self._metrics.waited(WaitCause.FETCH, self._device.compute.wait(back.ready))
        self._coming.discard(back)
        return back.memory

    def _forget_coming(self) -> None:
        """Drop what was brought back for a graph that was dropped unused, in stream order after its
        copy. Whatever autograd used was dropped by autograd."""
        for back in [back for back in self._coming if back.owner() is None]:
            self._device.compute.wait_everywhere(back.ready)
            self._coming.discard(back)

    def close(self) -> None:
        """Unregister the host memory."""
        for fence in (self._stored, *(back.ready for back in self._coming)):
            with contextlib.suppress(LaneError):  # who needed it was told; nobody will any more
                fence.wait()
        self._coming.clear()
        self._leaving.clear()
        for saved in (reference() for here in self._borrowed.values() for reference, _ in here):
            if saved is not None:
                saved.host, saved.lent = saved.host.clone(), ()
        self._borrowed.clear()
        self._saved.clear()
        self._pool.close()
