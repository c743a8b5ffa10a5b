"""Activation policies: keep saved tensors, offload them, or recompute them (checkpointing).

Chooses the policy around each forward of a layer, and installs one pair of saved-tensor hooks
(`torch.autograd.graph.saved_tensors_hooks`). Owns the stack of running forwards. Entered by the
training thread in forward and by autograd's thread in backward. The policies:

keep        a saved tensor that aliases a slot becomes a handle (layer, offset, shape, stride),
            since the slot holds another layer by the time of backward. All other saved tensors
            stay on the device
offload     in addition, other saved tensors are offloaded to host memory, and loaded one layer
            ahead of backward (`offload`)
recompute   the layer's forward runs again in backward, from its arguments (`recompute`)
attention   as recompute, but the results of attention kernels are kept (`attention`)
..._offload as either of these two, but the kept tensors are offloaded and loaded back
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from stronghold.errors import BudgetError, format_size
from stronghold.plan.cost import AGAIN, ATTENTION, AWAY
from stronghold.plan.plan import Plan
from stronghold.streaming.activations.attention import AttentionCalls, say_not_kept
from stronghold.streaming.activations.key_value_caches import without_cache
from stronghold.streaming.activations.offload import ActivationOffload, LayerOffload
from stronghold.streaming.activations.packing import HookPairs, OuterPack
from stronghold.streaming.activations.recompute import Recomputation, RecomputedModule
from stronghold.streaming.activations.saved import ForeignHooks, SavedTensor, WeightsEpoch
from stronghold.streaming.executor import Executor
from stronghold.streaming.parts import Parts
from stronghold.streaming.patches.attention import Through, running
from stronghold.streaming.patches.autograd import (
    Hooks,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)
from stronghold.streaming.patches.tensors import version_of

logger = logging.getLogger("stronghold")


@dataclass(slots=True, eq=False)
class _Scope:
    """One running forward, and the things to close at its end.

    outside        the function that attention's calls went through before
    hooks          our pair, once it is active
    recomputation  the one that this first run belongs to
    """

    layer: int
    outside: Through | None = None
    hooks: saved_tensors_hooks | None = None
    recomputation: Recomputation | None = None


# classes of blocks, and the names that their forwards change
logged: set[tuple[str, str]] = set()


def _log_kept(block_class: str, changed: str, on_host: int, on_device: int) -> None:
    """Log once per cause that a block cannot be recomputed. Sizes are bytes of this call."""
    if (block_class, changed) in logged:
        return
    logged.add((block_class, changed))
    logger.warning(
        "%s: its forward changes %s, so that it cannot run again in backward. The tensors that "
        "it saves are kept: %s on the host and %s on the device in this call (logged once for "
        "each class)",
        block_class,
        changed,
        format_size(on_host),
        format_size(on_device),
    )


class Activations:
    """Applies each layer's activation policy.

    plan             has the policies, `activations`, by the layout's index
    host_room_bytes  the most host memory for offloaded activations; None: all that is free
    spares           while true, forwards that begin keep nothing on the device that can be
                     recomputed, under any plan
    """

    def __init__(
        self, parts: Parts, plan: Plan, executor: Executor, host_room_bytes: int | None
    ) -> None:
        num_layers = len(plan.activations)
        self._policies = plan.activations
        self.spares = False
        offloading = [layer for layer, policy in enumerate(plan.activations) if policy in AWAY]
        self._last_offloading = max(offloading, default=-1)
        self._device = parts.device
        self._executor = executor
        self._open: list[_Scope] = []  # the outermost first
        # The hooks that were active before the outermost scope.
        self._outside: Hooks | None = None
        # The recomputation whose second run begins, until its module enters.
        self._starting: Recomputation | None = None
        self._recomputed: dict[nn.Module, RecomputedModule] = {}
        self._offload = ActivationOffload(parts, host_room_bytes, plan.offloaded_bytes)
        self._pairs = HookPairs(executor, self._offload, self._run_again)
        self._keeping = [self._pairs.make(layer) for layer in range(num_layers)]

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory for offloaded activations."""
        return self._offload.host_bytes

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
        """Begin a forward of the layer. The caller calls `leave` in any case, also after an error.

        Args:
            layer: the index of the layer.
            module: the block whose forward begins.
            args: its arguments.
            kwargs: its arguments by name.
            recomputing: whether backward has started this forward.
            run: the function that runs again in backward. None: the module.

        Returns:
            The arguments for the forward. They have no caches if the forward will run again.
        """
        foreign_pair = saved_tensor_hooks()
        if not self._open:
            self._outside = foreign_pair
        scope = _Scope(layer, outside=running.through)
        # before anything is open: an interrupt may end us anywhere
        self._open.append(scope)
        recomputation, self._starting = self._starting, None
        self._offload.forget_storages()
        is_first_run = not recomputing and recomputation is None
        if is_first_run:
            self._offload.begin_forward()
        foreign = None if foreign_pair is None else ForeignHooks(foreign_pair)
        through: Through | None = None
        outer: OuterPack | None = None
        offloads = False
        if recomputation is not None:
            outer = recomputation.save_again
            if recomputation.attention is not None:
                through = recomputation.attention.begin_second_run()
        # the user's hooks decide, also whether the forward runs again
        elif foreign is not None:
            outer = foreign.pack
        elif is_first_run and self.recomputes(layer):
            args, kwargs = without_cache(args, kwargs)
            scope.recomputation = self._recomputation(layer, module, args, kwargs, run)
            outer = scope.recomputation.save
            if scope.recomputation.attention is not None:
                through = scope.recomputation.attention.first
        else:
            offloads = self._policy(layer) == "offload" and is_first_run
        running.through = through
        pair = self._keeping[layer]
        if outer is not None or offloads:
            pair = self._pairs.make(
                layer,
                foreign=foreign,
                outer=outer,
                recomputation=scope.recomputation,
                offloads=offloads,
            )
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
        offload = LayerOffload(self._offload, layer) if policy in AWAY else None
        if module not in self._recomputed:
            self._recomputed[module] = RecomputedModule(module, state.parameters)
        recomputation = Recomputation(
            self._recomputed[module],
            args,
            kwargs,
            name=state.name,
            device=self._device,
            check=WeightsEpoch(state, state.views.epoch).refuse_newer,
            run=run,
            offload=offload,
        )
        if policy in ATTENTION:
            recomputation.attention = AttentionCalls(self._device, offload)
        return recomputation

    def will_recompute(self, layer: int, *, recomputing: bool) -> bool:
        """True if a forward of the layer that begins now will run again in backward."""
        is_first_run = not recomputing and self._starting is None
        return is_first_run and saved_tensor_hooks() is None and self.recomputes(layer)

    def recomputes(self, layer: int) -> bool:
        """True if the layer's policy is recomputation, and a backward may follow."""
        return self._policy(layer) in AGAIN and torch.is_grad_enabled()

    def _policy(self, layer: int) -> str:
        policy = self._policies[layer]
        return "recompute" if self.spares and policy not in AWAY else policy

    def leave(self, layer: int, *, chunk: bool = False) -> None:
        """End the layer's forward, or one `chunk` of it, after its return or exception."""
        scope = next((scope for scope in reversed(self._open) if scope.layer == layer), None)
        is_last = layer >= self._last_offloading
        if scope is None:  # the forward failed before `enter`, or went chunk by chunk
            if is_last:
                self._offload.drop_sources(keep_newest=0)
            return
        if scope.hooks is not None:
            scope.hooks.__exit__(None, None, None)
        running.through = scope.outside
        if scope.recomputation is not None:
            self._end_first_run(layer, scope.recomputation)
        self._offload.forget_storages()
        self._open.remove(scope)
        if chunk:  # as many chunks are on their way as run at once
            keep_newest = max(1, len(self._device.side_streams.streams))
        # later layers keep their own tensors: no room is left for two layers
        elif is_last:
            keep_newest = 0
        else:
            keep_newest = 1
        self._offload.drop_sources(keep_newest=keep_newest)

    def _end_first_run(self, layer: int, recomputation: Recomputation) -> None:
        if recomputation.attention is not None and not recomputation.attention.any:
            say_not_kept(recomputation.block.class_name)
        changed = recomputation.end()
        if changed is not None:
            self._keep_all(layer, recomputation, changed)

    def _keep_all(self, layer: int, recomputation: Recomputation, changed: str) -> None:
        """Keep the saved tensors of a forward that cannot run again: on the host, if it has room.

        `changed` names the thing that the forward has changed.
        """
        on_host = on_device = 0
        for place in recomputation.held():
            tensor, version = place.kept
            # [Note: pack] of `saved`
            place.kept = SavedTensor(tensor.detach(), version)
            nbytes = tensor.numel() * tensor.element_size()
            if version_of(tensor) == version and self._offload.is_worth_offloading(tensor):
                with contextlib.suppress(BudgetError):
                    place.kept = self._offload.offload(layer, tensor)
                    self._last_offloading = max(self._last_offloading, layer)
                    on_host += nbytes
                    continue
            on_device += nbytes
        _log_kept(recomputation.block.class_name, changed, on_host, on_device)

    # -- backward ---------------------------------------------------------------------------------
    def prefetch(self, layer: int) -> None:
        """Begin to load the layer's offloaded activations. Its backward comes next."""
        self._offload.prefetch(layer)

    def _run_again(self, recomputation: Recomputation) -> None:
        self._starting = recomputation  # until the module's own hook calls `enter`
        try:
            recomputation.run()
        finally:
            self._starting = None

    # -- ends -------------------------------------------------------------------------------------
    def abandon(self, *, in_backward: bool = False) -> bool:
        """Close all forwards after an interrupt, which may have ended them anywhere.

        This thread's saved-tensor hooks are again those from before the forwards. In backward
        autograd restores them by itself.

        Returns:
            True if a forward was open.
        """
        left_open = bool(self._open)
        if left_open:
            if not in_backward:
                self._restore_outside_hooks()
            running.through = self._open[0].outside
        for scope in self._open:
            if scope.recomputation is not None:
                scope.recomputation.drop()
        self._open.clear()
        self._offload.forget_storages()
        return left_open

    def _restore_outside_hooks(self) -> None:
        num_left = sum(scope.hooks is not None for scope in self._open)
        active = saved_tensor_hooks()
        while active is not None and active != self._outside:
            pop_saved_tensor_hooks()
            num_left -= 1
            active = saved_tensor_hooks()
        if active is None and self._outside is not None:
            push_saved_tensor_hooks(self._outside)
        elif active is not None:
            # A context manager around the block, as torch's checkpoint is, has ended before. It
            # popped the innermost pair, which was ours. Its own is still there.
            for _ in range(num_left):
                pop_saved_tensor_hooks()

    def close(self) -> None:
        """Wait for all copies, and unregister the host memory."""
        self._offload.close()
