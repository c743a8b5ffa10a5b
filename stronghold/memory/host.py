"""Host bytes: the slabs in which a model's weights, masters, moments and gradients live.

Owns every host mapping of the engine: exact-size, page-aligned, registered with the device once;
and the device's arrays of the layers that are updated there (`DeviceStore`), of which nothing is on
the host, fetched or drained. Never knows when a layer is used. Allocated by the training thread,
and by autograd's in backward; written by the drain lane (gradients), the update lane (weights,
masters, moments, second arrays) and, on several nodes, the exchange lane (weights); read by these,
the fetch lane and, for checkpoints, the io lane. The fences of `runtime` keep them apart.

[Note: layouts] Per layer, of elements of its `LayerLayout` (`model.arrays` has where they lie):
    weights     whole layer, in the dtypes of its ranges: the bytes that a fetch copies
    low, moments, their scales   trainable part: what the optimizer's states name
                (`stronghold.optim.states`); a scale has one item per group
    accumulated trainable part, fp32: only when micro-batches are added up on the host
Gradients arrive in entries, in the dtypes of the weights: one per layer where they wait for the
gate; a small ring where they are added up, or wait in files. A layer that is updated early has its
weights, low and moments twice: an early update reads one set and writes the other.

[Note: lent] An entry that a layer's gradients wait in is empty from the step's updates until its
backward ends. What the layer's blocks were given waits there meanwhile, where it is computed again
from that: the entry's record orders both. Its inputs are read before the last of its gradients is
there, as a rule. Where not (of two graphs one goes backward first), `vacate` moves them before.

[Note: ranks] Of several ranks each holds its shares of a layer's trainable ranges in all but the
first and in its entries. Weights are the node's (`distributed.node_weights`): they have all
elements, of which this rank updates its own and counts those that it fetches.

[Note: staged homes] An array whose home is a staged one has no slab: `tiers` brings it to the host
piece by piece, and `access` gives any array, wherever it lies. Weights in files are mapped: at rest
a parameter is a view of the file's pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from stronghold.device.base import Device, Record
from stronghold.memory.access import ArrayAccess
from stronghold.memory.buffers import Entry, Ring
from stronghold.memory.layer import LayerState, SecondArrays
from stronghold.memory.slab import map_slab
from stronghold.memory.tiers import Tiers
from stronghold.model.layout import ModelLayout
from stronghold.model.partition import WeightSource
from stronghold.plan.homes import GPU, HOST

logger = logging.getLogger("stronghold")


class HostStore:
    """All host state of one engine.

    `layers` has every layer of the model; those whose home is the GPU take nothing here: their
    arrays are the device's (`DeviceStore`). `ring_entries` gradient entries of the largest
    trainable layer exist; layers in `held` have an entry of their own, where its home is the host;
    layers in `early` have their arrays twice; `accumulate` gives every trainable one an fp32
    accumulator. `allocate` makes a flat zero tensor of host memory. `tiers` has the homes of the
    arrays ([Note: staged homes]), and which part is
    this rank's; `shared` are the node's weights ([Note: ranks]).
    """

    def __init__(
        self,
        layout: ModelLayout,
        device: Device,
        *,
        held: frozenset[int],
        early: frozenset[int] = frozenset(),
        accumulate: bool,
        ring_entries: int,
        allocate: Callable[[int, torch.dtype], torch.Tensor] = map_slab,
        tiers: Tiers,
        shared: Callable[[int], torch.Tensor] | None = None,
        fills: bool = True,
    ) -> None:
        self.layout = layout
        self._shared = shared
        self._fills = fills
        self.tiers = tiers
        self.formats, self.shards = self.tiers.formats, self.tiers.shards
        self._device = device
        self._held, self._early = held, early
        self._accumulate = accumulate
        self._ring_entries = ring_entries
        self.allocate = allocate
        self.layers = [
            LayerState(
                layout=layer,
                weights=torch.empty(0, dtype=torch.uint8),
                formats=self.formats,
                shards=self.shards,
                homes=dict(tiers.homes.row(layer.index)),
            )
            for layer in layout.layers
        ]
        self.access = ArrayAccess(self.layers, tiers, device)
        self._mine = [state for state in self.layers if state.home is not GPU]
        self._ring = Ring()
        self.vacate: Callable[[int], None] = lambda index: None  # [Note: lent]
        self._pinned: dict[int, torch.Tensor] = {}  # by address
        self.allocated_bytes = self.peak_bytes = self.tiers.ring.nbytes
        self._prepared = False

    @property
    def training(self) -> bool:
        """Whether masters and moments exist."""
        return self.access.has_state

    def _slab(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        slab = self.allocate(nbytes, torch.uint8)
        self._count(slab, pinned=pinned)
        return slab

    def _count(self, slab: torch.Tensor, *, pinned: bool) -> None:
        self.allocated_bytes += slab.nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        if pinned and slab.numel():
            self._device.pin(slab)
            self._pinned[slab.data_ptr()] = slab

    def adopt(self, index: int, source: WeightSource | None = None) -> None:
        """Make the layer's weight slab and copy its parameters into it, cast to its dtypes; those
        on the meta device are read from `source`."""
        state = self.layers[index]
        weights = state.maps["weights"]
        if self._shared is not None:
            state.weights = self._shared(index)
            for _, (begin, end) in self.shards.fetched(state.layout):
                self._count(state.weights[weights.bytes_of(begin, end)], pinned=True)
            if self._fills:
                state.fill(state.weights, source)
            return
        if not state.home_of("weights").is_staged:
            state.weights = self._slab(weights.nbytes, pinned=True)
            state.fill(state.weights, source)
            return
        state.weights = self.tiers.mapped(index, "weights")
        for k, (part, parameter) in enumerate(
            zip(state.layout.slices, state.parameters, strict=True)
        ):
            values = parameter.detach()
            if parameter.is_meta and source is not None:  # a copy of one parameter at a time
                values = torch.empty(part.shape, dtype=state.sections[k].dtype)
                source.read_into(parameter, values)
            flat, at = values.reshape(-1), part.offset
            end = at + part.numel
            for own, views in self.access.pieces(index, ("weights",), at, end, mode="replace"):
                views["weights"].copy_(flat[own])

    def prepare_training(self) -> None:
        """Make masters, moments and gradient entries at the first backward; goes on where an
        interrupt ended it.

        Fresh pages are zero: a master that starts at its rounded weight, and fresh moments.
        """
        if self._prepared:
            return
        self.access.has_state = True
        for state in self._mine:
            self.make_arrays(state, lambda _, nbytes: self._slab(nbytes, pinned=False))
        self._hold()
        self._make_second_arrays()
        self._make_ring(self._ring_entries - len(self._ring))
        self._prepared = True

    def make_arrays(self, state: LayerState, zeros: Callable[[str, int], torch.Tensor]) -> None:
        """Make what the layer needs for training and has not: `zeros(array, nbytes)`."""
        sums = ["accumulated"] if self._accumulate else []
        for array in (*state.changed, *sums):
            if state.array(array) is None and not state.home_of(array).is_staged:
                state.arrays[array] = zeros(array, state.maps[array].nbytes)
            if array == "low" and torch.float32 in state.maps["low"].dtypes:
                self.access.restart_master(state.index)

    def hold(
        self, layers: frozenset[int], ring_entries: int, early: frozenset[int] = frozenset()
    ) -> None:
        """Between two steps: these layers have gradient entries of their own, no others; the ring
        has `ring_entries` at least, where anything drains; and the layers in `early` have their
        arrays twice."""
        before, self._held = self._held, layers
        for state in self._mine if self.training else ():
            if state.index in before - layers and "gradients" in state.arrays:
                self._give_back(state.drop_array("gradients"))
        self._ring_entries, self._early = ring_entries, early
        for state in self.layers:
            if state.index not in early:
                self._give_back(*state.drop_second())
        if self.training:
            self._hold()
            self._make_second_arrays()
            if any(entry.memory.nbytes < self._largest for entry in self._ring):
                self._drop_ring()
            self._make_ring(ring_entries - len(self._ring))

    def _hold(self) -> None:
        for state in self._mine:
            is_here = state.home_of("gradients") is HOST
            if state.index in self._held and is_here and state.trains_here:
                self._own_entry(state)

    def _make_second_arrays(self) -> None:
        for state in self._mine:
            if state.index in self._early and state.second is None:
                arrays = {
                    array: self._slab(state.maps[array].nbytes, pinned=array == "weights")
                    for array in state.changed
                }
                state.second = SecondArrays(arrays, {array: Record() for array in arrays})

    @property
    def _largest(self) -> int:
        """Bytes of gradients."""
        return max((state.maps["gradients"].nbytes for state in self._mine), default=0)

    def _make_ring(self, num_entries: int) -> None:
        for _ in range(num_entries if self._mine else 0):
            self._ring.append(Entry(self._slab(self._largest, pinned=True)))

    def _drop_ring(self) -> None:
        self._give_back(*(entry.memory for entry in self._ring))
        self._ring.clear()

    def held_entry(self, index: int) -> Entry:
        """The layer's own gradient entry, to be written; made now if the plan does not hold
        gradients (a layer that was called twice)."""
        self.vacate(index)
        return self._own_entry(self.layers[index])

    def lent_entry(self, index: int) -> Entry | None:
        """The same, for whatever will be away when the gradients come ([Note: lent]); None where
        some have come, or where none will."""
        state = self.layers[index]
        is_here = state.home_of("gradients") is HOST
        never = not state.optimizer.trained or not state.trains_here
        some_came = bool(state.gradients.arrived)
        if index not in self._held or not is_here or never or some_came:
            return None
        return self._own_entry(state)

    def _own_entry(self, state: LayerState) -> Entry:
        if "gradients" not in state.arrays:
            nbytes = state.maps["gradients"].nbytes
            state.arrays["gradients"] = self._slab(nbytes, pinned=True)
        return Entry(state.arrays["gradients"], state.records["gradients"])

    def ring_entry(self) -> Entry:
        """The next entry of the ring."""
        if not self._ring:  # the plan holds gradients, and one of them came in two parts
            self._make_ring(2)
        return self._ring.next()

    def bring_back(self, available_bytes: int) -> None:
        """Move spilled weights to memory of their own, which outlives the store. Where they do not
        fit `available_bytes` they stay in the files' pages, and the disk keeps their bytes until
        the model is dropped. `OSError` when a file cannot be read: its layers' weights are NaN
        then, never something else."""
        spilled = [state for state in self._mine if state.home_of("weights").is_staged]
        need = sum(state.weights.nbytes for state in spilled)
        if need > available_bytes:
            logger.warning(
                "the weights of %d layers (%d bytes) do not fit into host memory (%d available): "
                "they stay on NVMe, where they take room until the model is dropped. To keep them, "
                "save a checkpoint",
                len(spilled),
                need,
                available_bytes,
            )
            return
        lost: dict[str, OSError] = {}
        for state in spilled:
            try:
                state.weights = self._read_back(state)
            except OSError as error:
                lost[state.layout.name] = error
                state.weights = self._nothing(state)
        if lost:
            first = next(iter(lost.values()))
            raise OSError(
                first.errno,
                f"the weights of {', '.join(lost)} cannot be read back from NVMe, and are NaN now; "
                f"load a checkpoint. {first}",
            ) from first

    def _read_back(self, state: LayerState) -> torch.Tensor:
        weights = state.maps["weights"]
        memory = self.allocate(weights.nbytes, torch.uint8)
        for own, views in self.access.pieces(state.index, ("weights",), 0, state.layout.numel):
            weights.view(memory, own.start, own.stop).copy_(views["weights"])
        return memory

    def _nothing(self, state: LayerState) -> torch.Tensor:
        """Weights of a layer that is lost. All bits are one: NaN of every dtype that has NaN, but
        for float8's "fnuz" kinds, whose lowest number it is."""
        return self.allocate(state.maps["weights"].nbytes, torch.uint8).fill_(0xFF)

    def give_up(self, index: int) -> dict[str, torch.Tensor]:
        """The layer moves to the device while no pass is running. Returns its arrays of training,
        which this store no longer counts. The layer has no arrays until it gets new ones."""
        state = self.layers[index]
        self._give_back(state.weights, *state.arrays.values(), *state.drop_second())
        left = {name: array for name, array in state.arrays.items() if name != "gradients"}
        state.weights = torch.empty(0, dtype=torch.uint8)
        state.drop_arrays()
        state.homes = dict.fromkeys(state.maps, GPU)
        self._mine.remove(state)
        if not self._mine:  # nothing drains any more
            self._drop_ring()
        return left

    def receive(
        self,
        index: int,
        arrays: Mapping[str, torch.Tensor],
        copy: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """The layer comes back from the device, while no pass is running: it has slabs again, of
        the values of `arrays`, which `copy(target, source)` brings."""
        state = self.layers[index]
        for name, array in arrays.items():
            slab = self._slab(array.nbytes, pinned=name == "weights")
            copy(slab, array)
            state.replace_array(name, slab)
        state.homes = {}
        self._mine.append(state)
        self._mine.sort(key=lambda one: one.index)

    def _give_back(self, *slabs: torch.Tensor) -> None:
        for slab in slabs:
            self.allocated_bytes -= slab.numel() * slab.element_size()
            if self._pinned.pop(slab.data_ptr(), None) is not None:
                self._device.unpin(slab)

    def close(self) -> None:
        """Unregister and drop every slab; parameters that are views keep their memory alive
        themselves."""
        for slab in self._pinned.values():
            self._device.unpin(slab)
        self._pinned.clear()
        self._ring.clear()
        for state in self.layers:
            state.second = None
            state.weights = torch.empty(0, dtype=torch.uint8)
            state.drop_arrays()


PURPOSES = {"low": "masters", "accumulated": "accumulated gradients"}  # of others: moments


def purpose_of(array: str) -> str:
    """What the device's budget calls an array of a layer that is updated there."""
    return f"{PURPOSES.get(array, 'moments')} of resident layers"


class DeviceStore:
    """The arrays of the layers of `host` whose home is the GPU."""

    def __init__(self, host: HostStore, device: Device) -> None:
        self._host, self._device = host, device
        self._allocate = host.allocate
        self._training = self._away = False
        self.layers = [state for state in host.layers if state.home is GPU]
        for state in self.layers:
            name = f"weights of {state.layout.name or 'the root'}"
            state.weights = device.allocate(state.maps["weights"].nbytes, torch.uint8, name)

    def adopt(self, index: int, source: WeightSource | None = None) -> None:
        """Copy the layer's parameters into its weights, cast to its dtypes, through host memory of
        one layer; those on the meta device are read from `source`."""
        state = self._host.layers[index]
        passing = self._allocate(state.maps["weights"].nbytes, torch.uint8)
        state.fill(passing, source)
        self._device.copy_now(state.weights, passing)

    def take(self, index: int) -> None:
        """Move a host layer here while no pass is running, with all that it has; its host memory is
        given back, but for what the model's parameters still show."""
        state = self._host.layers[index]
        weights = self._moved(state.weights, f"weights of {state.name}")  # as long as it is pinned
        left = self._host.give_up(index)
        state.weights = weights
        for name, array in left.items():
            if name == "accumulated" and not state.gradients.summed:  # there is no sum
                state.arrays[name] = self._zeros(name, array.nbytes)
            else:
                state.arrays[name] = self._moved(array, purpose_of(name))
        self.layers.append(state)
        self.layers.sort(key=lambda one: one.layout.index)

    def give(self, index: int) -> None:
        """Undo `take`: move a layer back to the host, with all that it has. No pass is running."""
        state = self._host.layers[index]
        arrays = state.all_arrays()
        self._host.receive(index, arrays, self._device.copy_now)
        self._device.release(*arrays.values())
        self.layers.remove(state)

    def _moved(self, array: torch.Tensor, purpose: str) -> torch.Tensor:
        there = self._device.allocate(array.nbytes, torch.uint8, purpose)
        self._device.copy_now(there, array)
        return there

    def prepare_training(self) -> None:
        """Make masters, moments and accumulators; called at every backward, works at the first."""
        if self._training:
            return
        for state in self.layers:  # what an interrupt ended goes on where it was
            self._host.make_arrays(state, self._zeros)
        self._training = True

    def _zeros(self, array: str, nbytes: int) -> torch.Tensor:
        return self._device.allocate(nbytes, torch.uint8, purpose_of(array)).zero_()

    def leave(self) -> None:
        """Between two steps: every array goes to host memory, until `come_back`."""
        self._away = True
        for state in self.layers:
            for name, array in state.all_arrays().items():
                there = self._allocate(array.nbytes, torch.uint8)
                self._device.copy_now(there, array)
                state.replace_array(name, there)
                self._device.release(array)

    def come_back(self) -> None:
        """What `leave` has moved is on the device again."""
        self._away = False
        for state in self.layers:
            for name, array in state.all_arrays().items():
                state.replace_array(name, self._moved(array, f"{name} of {state.name}"))

    def give_back(self) -> None:
        """The device's work has ended: every layer's weights move to host memory, their own."""
        for state in self.layers:
            if self._away:
                state.drop_arrays()
                continue
            weights = self._allocate(state.weights.nbytes, torch.uint8)
            self._device.copy_now(weights, state.weights)
            self._device.release(*state.all_arrays().values())
            state.weights = weights
            state.drop_arrays()
