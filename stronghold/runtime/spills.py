"""The NVMe pipeline: updates and fetches of layers of which a part lies in files, piece by piece.

Owns the order of loads, updates and spills of pieces, and by layer the newest write to its files.
Never decides what spills (the plan) or which Adam (`adam`). The training thread submits, and
autograd's in backward; lanes move and compute.

A layer's way through an update, for each piece of the staging ring ([Note: a piece] of `tiers`):
  load lane    reads the spilled arrays of elements [begin, end) into an entry
  update lane  Adam over these elements: spilled arrays in the entry, the others in their slabs
  spill lane   writes back what Adam changed; the entry is free after it
A fetch of spilled weights, for each piece of the other ring:
  stage lane   reads weights into an entry
  fetch lane   copies them to the slot; the entry is free after it
Loads are submitted as soon as the update is, on a lane of their own: they run ahead, as far as
there are entries, over the border between layers too. Races and what prevents them:
  * an entry is overwritten while it is used     -> a load waits for the entry's `free_after`: its
                                                    spill, or its copy to a slot
  * a load reads what is still being written     -> it waits for the layer's newest spill
  * a stage reads weights that are being written -> it waits for `updated`, which for spilled
                                                    weights is the last piece's spill
  * a spill writes weights that a stage reads    -> the update waits for the layer's last fetch, and
                                                    the spill for the update
  * a spill writes what a checkpoint reads       -> the update waits for the layer's reader
  * a piece fails and a later one succeeds       -> each waits for the one before: the last fence
                                                    of a layer fails when any of its pieces did
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from stronghold.device.base import Device, Fence, completed
from stronghold.device.kernels import Kernels
from stronghold.memory.host import HostStore
from stronghold.memory.tiers import Views
from stronghold.plan.spills import WRITTEN
from stronghold.runtime.adam import ParameterStep, TrainingArrays, adam_bytes, adam_segments
from stronghold.runtime.ledger import Ledger


class Spills:
    """The pipeline of one engine. Layers without spilled arrays are fetched at once, and not
    updated here."""

    def __init__(
        self, *, device: Device, host: HostStore, kernels: Kernels, ledger: Ledger
    ) -> None:
        self._device = device
        self._host = host
        self._tiers = host.tiers
        self._kernels = kernels
        self._ledger = ledger
        self._written = [completed("spill", "initial values") for _ in host.layers]

    # -- updates ----------------------------------------------------------------------------------
    def updates(self, layer: int) -> bool:
        """Whether an update of the layer passes the staging ring."""
        return bool(self._tiers.spilled(layer))

    def update(
        self,
        layer: int,
        steps: Sequence[ParameterStep],
        gradients: torch.Tensor | None,
        after: Sequence[Fence],
    ) -> Fence:
        """Queue one step of Adam, once all of `after` are done, and tell the ledger.

        `gradients` are the layer's (compute dtype or fp32 sums), None where they are spilled too.
        Returns the fence after which `gradients` may be overwritten.
        """
        device, arrays = self._device, self._tiers.spilled(layer)
        updated: Fence | None = None
        spilled = self._written[layer]
        for begin, end in self._tiers.cuts(layer, arrays):
            if not any(begin < s.part.offset + s.part.numel and s.part.offset < end for s in steps):
                continue  # no gradient came for these elements
            entry = self._tiers.updates.next()
            views = self._tiers.views(entry.memory, arrays, end - begin)
            piece = self._arrays(layer, begin, end, views, gradients)
            loaded = device.load.submit(
                f"load {layer}",
                partial(self._tiers.load, layer, begin, views),
                (entry.free_after, self._written[layer]),
                nbytes=self._tiers.nbytes(arrays, end - begin),
            )
            updated = device.update.submit(
                f"update {layer}",
                self._adam(steps, piece),
                (loaded, *after, *([updated] if updated is not None else [])),
                nbytes=adam_bytes(self._host.dtype, piece.gradients.dtype) * (end - begin),
            )
            changed = {array: view for array, view in views.items() if array in WRITTEN}
            entry.free_after = spilled = device.spill.submit(
                f"spill {layer}",
                partial(self._tiers.spill, layer, begin, changed),
                (updated, spilled),
                nbytes=self._tiers.nbytes(tuple(changed), end - begin),
            )
        self._written[layer] = spilled
        if updated is None:
            return self._ledger.updated(layer)
        weights_spill = self._tiers.holds(layer, "weights")
        self._ledger.update(layer, spilled if weights_spill else updated, stored=spilled)
        return updated

    def _arrays(
        self, layer: int, begin: int, end: int, views: Views, gradients: torch.Tensor | None
    ) -> TrainingArrays:
        state = self._host.layers[layer]

        def array(name: str) -> torch.Tensor | None:
            if name in views:
                return views[name]
            slab: torch.Tensor | None = getattr(state, name)
            return slab[begin:end] if slab is not None else None

        found = views.get("accumulated", views.get("gradients"))
        if found is None:
            assert gradients is not None
            found = gradients[begin:end]
        weights, exp_avg, exp_avg_sq = array("weights"), array("exp_avg"), array("exp_avg_sq")
        assert weights is not None
        assert exp_avg is not None
        assert exp_avg_sq is not None
        return TrainingArrays(
            begin=begin,
            end=end,
            weights=weights,
            low=array("low"),
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            gradients=found,
        )

    def _adam(self, steps: Sequence[ParameterStep], arrays: TrainingArrays) -> partial[None]:
        segments = adam_segments(steps, arrays)

        def adam(keep: TrainingArrays) -> None:  # alive: the segments hold its addresses
            self._kernels.adam(self._host.dtype, keep.gradients.dtype, segments)

        return partial(adam, arrays)

    # -- fetches ----------------------------------------------------------------------------------
    def fetch(self, layer: int, target: torch.Tensor, free: Fence) -> Fence:
        """Queue the copy of the layer's newest weights to `target`, which may be written after
        `free`; the fence of the (last) copy."""
        updated, copy = self._ledger.updated(layer), self._device.copy
        if self._tiers.holds(layer, "weights"):
            return self._fetch_pieces(layer, target, free, updated)
        source = self._host.layers[layer].weights
        return self._device.fetch.submit(
            f"fetch {layer}", partial(copy, target, source), (free, updated), nbytes=source.nbytes
        )

    def _fetch_pieces(self, layer: int, target: torch.Tensor, free: Fence, updated: Fence) -> Fence:
        device, fetched = self._device, free
        for begin, end in self._tiers.cuts(layer, ("weights",)):
            entry = self._tiers.fetches.next()
            views = self._tiers.views(entry.memory, ("weights",), end - begin)
            nbytes = self._tiers.nbytes(("weights",), end - begin)
            staged = device.stage.submit(
                f"stage {layer}",
                partial(self._tiers.load, layer, begin, views),
                (entry.free_after, updated),
                nbytes=nbytes,
            )
            entry.free_after = fetched = device.fetch.submit(
                f"fetch {layer}",
                partial(device.copy, target[begin:end], views["weights"]),
                (staged, fetched),
                nbytes=nbytes,
            )
        return fetched
