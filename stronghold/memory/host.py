"""Host memory of a model's state: the slabs of its weights, masters, moments and gradients.

`HostStore` owns every host mapping of the engine: exact-size, page-aligned, pinned once.
`DeviceStore` owns the arrays of layers that are updated on the GPU. These have nothing on the host,
and are neither fetched nor offloaded. Neither store knows when a layer is used.

Threads: the training thread allocates, and autograd's in backward. The offload lane writes
gradients. The update lane writes weights, masters, moments and second arrays. The exchange lane
writes weights on several nodes. These lanes read too, and so do the fetch lane and, for
checkpoints, the io lane. The access records of `streaming` keep them apart.

[Note: layouts] Arrays of a layer, in elements of its `LayerLayout` (`model.arrays` has the bytes):
    weights     the whole layer, in the dtypes of its ranges: the bytes that a fetch copies
    low, moments, their scales   the trainable part, as the optimizer's states name them
                (`stronghold.optim.states`). A scale has one item per group
    accumulated the trainable part in fp32, if micro-batches are added up on the host
Gradients come into entries, in the dtypes of the weights. A layer whose gradients wait for the gate
has an entry. Gradients that are added up, or wait in files, share a small ring of entries. A layer
that is updated early has its weights, low and moments twice: the update reads one set and writes
the other.

[Note: lent] A layer's gradient entry is empty from the step's updates until the next backward of
the layer. It holds the block's inputs meanwhile (offloaded activations, for recompute):
    1. Forward: the activations write the inputs into the entry.
    2. Backward: recompute reads them, as a rule before the layer's last gradient is offloaded.
    3. Backward: the offload writes gradients into the entry.
    4. If step 3 comes before step 2 (of two graphs one runs backward first), `held_entry` ends the
       loan first: the borrower moves the inputs.
The entry's access record orders all four.

[Note: ranks] Of several ranks each holds its shares of a layer's trainable ranges in all but the
first and in its entries. Weights are the node's (`distributed.node_weights`): they have all
elements, of which this rank updates its own and counts those that it fetches.

[Note: staged homes] An array with a staged home has no slab. `tiers` brings it to the host piece by
piece. `access` reads and writes any array, wherever it lies. Weights in files are mapped: at rest a
parameter is a view of the file's pages.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from operator import attrgetter

import torch

from stronghold.devices.base import Device, Record
from stronghold.memory.access import ArrayAccess
from stronghold.memory.buffers import EntryRing, HostEntry
from stronghold.memory.layer import LayerState, SecondArrays
from stronghold.memory.slab import map_slab
from stronghold.memory.tiers import Tiers
from stronghold.model.layout import ModelLayout, ParameterSlice
from stronghold.plan.homes import GPU, HOST

logger = logging.getLogger("stronghold")


class HostStore:
    """All host state of one engine.

    `layers` has every layer of the model. Layers whose home is the GPU take no host memory: their
    arrays are in `DeviceStore`.

    held          layers that have a gradient entry each, if their home is the host
    early         layers that have their arrays twice, for early updates
    accumulate    every trainable layer gets an fp32 array for sums over micro-batches
    ring_entries  number of shared gradient entries, each as large as the largest layer's gradients
    tiers         the homes of the arrays ([Note: staged homes]), and which part is
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
        self._held = held
        self._early = early
        self._accumulate = accumulate
        self._ring_entries = ring_entries
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
        self._host_layers = [state for state in self.layers if state.home is not GPU]
        self._ring = EntryRing()
        # By layer whose entry is lent: makes the borrower leave it ([Note: lent]).
        self._loans: dict[int, Callable[[int], None]] = {}
        self._pinned: dict[int, torch.Tensor] = {}  # by address
        self._mapped_ahead: dict[int, deque[torch.Tensor]] = defaultdict(deque)  # by size
        self.allocated_bytes = self.tiers.ring.nbytes
        self.peak_bytes = self.allocated_bytes
        self._is_prepared = False

    @property
    def training(self) -> bool:
        """True if masters and moments exist."""
        return self.access.has_state

    def _slab(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        mapped = self._mapped_ahead.get(nbytes)
        if mapped:
            self.allocated_bytes -= nbytes  # counted when it was mapped
        slab = mapped.popleft() if mapped else map_slab(nbytes, torch.uint8)
        self._count(slab, pinned=pinned)
        return slab

    def _array_slab(self, array: str, nbytes: int) -> torch.Tensor:
        return self._slab(nbytes, pinned=False)

    def _count(self, slab: torch.Tensor, *, pinned: bool) -> None:
        self.allocated_bytes += slab.nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        if pinned and slab.numel():
            self._device.pinning.pin(slab)
            self._pinned[slab.data_ptr()] = slab

    def adopt(self, index: int) -> None:
        """Make the layer's weight slab, and copy its parameters into it, cast to its dtypes."""
        state = self.layers[index]
        weights = state.maps["weights"]
        if self._shared is not None:
            state.weights = self._shared(index)
            for _, (begin, end) in self.shards.fetched(state.layout):
                self._count(state.weights[weights.bytes_of(begin, end)], pinned=True)
            if self._fills:
                state.fill(state.weights)
            return
        if not state.home_of("weights").is_staged:
            state.weights = map_slab(weights.nbytes, torch.uint8)
            self._count(state.weights, pinned=True)
            state.fill(state.weights)
            return
        state.weights = self.tiers.mapped(index, "weights")
        slices = state.layout.slices
        for position in state.positions_of_model:
            self._write_weights(index, slices[position], state.parameters[position].detach())
        for packed in state.packed:
            inner = {
                name: torch.empty(slices[position].shape, dtype=state.sections[position].dtype)
                for name, position in packed.positions.items()
            }
            state.encode(packed, inner)
            for name, position in packed.positions.items():
                self._write_weights(index, slices[position], inner[name])

    def _write_weights(
        self, index: int, parameter_slice: ParameterSlice, values: torch.Tensor
    ) -> None:
        """Write one parameter's values to its place, through the staging ring."""
        flat = values.reshape(-1)
        begin = parameter_slice.offset
        end = begin + parameter_slice.numel
        pieces = self.access.pieces(index, ("weights",), begin, end, mode="replace")
        for elements, views in pieces:
            views["weights"].copy_(flat[elements])

    def map_ahead(self, index: int) -> None:
        """Map what `prepare_training` will take for an adopted layer, so that it is touched while
        further layers are adopted. Slabs of one size take each other's place."""
        state = self.layers[index]
        arrays = [array for array in state.changed if array != "weights"]
        if self._accumulate:
            arrays.append("accumulated")
        if index in self._held and state.trains_here:
            arrays.append("gradients")
        arrays = [array for array in arrays if state.home_of(array) is HOST]
        if index in self._early:
            arrays += state.changed
        for array in arrays:
            slab = map_slab(state.maps[array].nbytes, torch.uint8)
            self._mapped_ahead[slab.nbytes].append(slab)
            self._count(slab, pinned=False)
            self._device.first_touch.add(slab)

    def prepare_training(self) -> None:
        """Take masters, moments and gradient entries, mapped ahead or new, at the first backward.

        A call that an interrupt ended is continued by the next one. New pages are zero: a master
        then equals its rounded weight, and moments are fresh.
        """
        if self._is_prepared:
            return
        self.access.has_state = True
        for state in self._host_layers:
            self.make_arrays(state, self._array_slab)
        self._make_held_entries()
        self._make_second_arrays()
        self._make_ring_entries(self._ring_entries - len(self._ring))
        self._free(*itertools.chain.from_iterable(self._mapped_ahead.values()))
        self._mapped_ahead.clear()
        self._is_prepared = True

    def make_arrays(self, state: LayerState, zeros: Callable[[str, int], torch.Tensor]) -> None:
        """Make the arrays that the layer needs for training and lacks.

        `zeros`: makes the flat memory of an array from its name and bytes.
        """
        sums = ["accumulated"] if self._accumulate else []
        for array in (*state.changed, *sums):
            if state.array(array) is None and not state.home_of(array).is_staged:
                state.arrays[array] = zeros(array, state.maps[array].nbytes)
            if array == "low" and torch.float32 in state.maps["low"].dtypes:
                self.access.restart_master(state.index)

    def apply_plan(
        self, held: frozenset[int], ring_entries: int, early: frozenset[int] = frozenset()
    ) -> None:
        """Make the gradient entries and second arrays that another plan has, and free all others.

        Arguments as in the constructor. The ring keeps entries that it has beyond `ring_entries`.
        Called between two steps.
        """
        no_longer_held = self._held - held
        self._held = held
        for state in self._host_layers if self.training else ():
            if state.index in no_longer_held and "gradients" in state.arrays:
                self._free(state.drop_array("gradients"))
        self._ring_entries = ring_entries
        self._early = early
        for state in self.layers:
            if state.index not in early:
                self._free(*state.drop_second())
        if self.training:
            self._make_held_entries()
            self._make_second_arrays()
            if any(entry.memory.nbytes < self._largest_gradients for entry in self._ring):
                self._drop_ring()
            self._make_ring_entries(ring_entries - len(self._ring))

    def _make_held_entries(self) -> None:
        for state in self._host_layers:
            is_here = state.home_of("gradients") is HOST
            if state.index in self._held and is_here and state.trains_here:
                self._layer_entry(state)

    def _make_second_arrays(self) -> None:
        for state in self._host_layers:
            if state.index not in self._early or state.second is not None:
                continue
            arrays = {}
            for array in state.changed:
                is_fetched = array == "weights"
                arrays[array] = self._slab(state.maps[array].nbytes, pinned=is_fetched)
            state.second = SecondArrays(arrays, {array: Record() for array in arrays})

    @property
    def _largest_gradients(self) -> int:
        """Bytes of the largest layer's gradients."""
        return max((state.maps["gradients"].nbytes for state in self._host_layers), default=0)

    def _make_ring_entries(self, num_entries: int) -> None:
        for _ in range(num_entries if self._host_layers else 0):
            memory = self._slab(self._largest_gradients, pinned=True)
            self._ring.append(HostEntry(memory))

    def _drop_ring(self) -> None:
        self._free(*(entry.memory for entry in self._ring))
        self._ring.clear()

    def held_entry(self, index: int) -> HostEntry:
        """The layer's gradient entry, to be written now.

        If the plan does not hold gradients (the layer was called twice), it is allocated.
        """
        vacate = self._loans.pop(index, None)
        if vacate is not None:
            vacate(index)
        return self._layer_entry(self.layers[index])

    def lend_entry(self, index: int, vacate: Callable[[int], None]) -> HostEntry | None:
        """Lend the layer's gradient entry to data that leaves before gradients come ([Note: lent]).

        `vacate(index)` moves the data, if gradients come first. Returns None if gradients have
        come, or will not come.
        """
        state = self.layers[index]
        is_here = state.home_of("gradients") is HOST
        never = not state.optimizer.trained or not state.trains_here
        some_came = bool(state.gradients.arrived)
        if index not in self._held or not is_here or never or some_came:
            return None
        self._loans[index] = vacate
        return self._layer_entry(state)

    def end_loan(self, index: int) -> None:
        """The borrower has left the layer's entry."""
        self._loans.pop(index, None)

    def _layer_entry(self, state: LayerState) -> HostEntry:
        if "gradients" not in state.arrays:
            nbytes = state.maps["gradients"].nbytes
            state.arrays["gradients"] = self._slab(nbytes, pinned=True)
        return HostEntry(state.arrays["gradients"], state.records["gradients"])

    def ring_entry(self) -> HostEntry:
        """The next entry of the ring."""
        # the plan holds gradients, and one of them came in two parts
        if not self._ring:
            self._make_ring_entries(2)
        return self._ring.next()

    def unspill_weights(self, available_bytes: int) -> None:
        """Move spilled weights to host memory that outlives the store (swap in).

        If they need more than `available_bytes`, they stay in the files' pages, with a warning. The
        disk then keeps their bytes until the model is dropped. Raises `OSError` if a file
        cannot be read: the weights of its layers are NaN then, never another number.
        """
        spilled = [state for state in self._host_layers if state.home_of("weights").is_staged]
        need = sum(state.weights.nbytes for state in spilled)
        if need > available_bytes:
            logger.warning(
                "the weights of %d layers (%d bytes) do not fit into host memory (%d available): "
                "they stay in files, which take room and must not change "
                "until the model is dropped. To keep them, save a checkpoint",
                len(spilled),
                need,
                available_bytes,
            )
            return
        lost: dict[str, OSError] = {}
        for state in spilled:
            try:
                state.weights = self._read_weights(state)
            except OSError as error:
                lost[state.layout.name] = error
                state.weights = self._nan_weights(state)
        if lost:
            first = next(iter(lost.values()))
            raise OSError(
                first.errno,
                f"the weights of {', '.join(lost)} cannot be read back from NVMe, and are NaN now; "
                f"load a checkpoint. {first}",
            ) from first

    def _read_weights(self, state: LayerState) -> torch.Tensor:
        """A copy of the layer's weights in new host memory."""
        weights = state.maps["weights"]
        memory = map_slab(weights.nbytes, torch.uint8)
        pieces = self.access.pieces(state.index, ("weights",), 0, state.layout.numel)
        for elements, views in pieces:
            weights.view(memory, elements.start, elements.stop).copy_(views["weights"])
        return memory

    def _nan_weights(self, state: LayerState) -> torch.Tensor:
        """Weights for a layer that is lost: all bits are one.

        That is NaN in every dtype that has NaN, but for float8's "fnuz" kinds, where it is the
        lowest number.
        """
        return map_slab(state.maps["weights"].nbytes, torch.uint8).fill_(0xFF)

    def detach_layer(self, index: int) -> dict[str, torch.Tensor]:
        """Remove the layer from the host: it moves to the device while no pass is running.

        Returns its arrays of training by name, which this store no longer counts. The layer has no
        arrays until it gets new ones.
        """
        state = self.layers[index]
        self._free(state.weights, *state.arrays.values(), *state.drop_second())
        arrays = {name: array for name, array in state.arrays.items() if name != "gradients"}
        state.weights = torch.empty(0, dtype=torch.uint8)
        state.drop_arrays()
        state.homes = dict.fromkeys(state.maps, GPU)
        self._host_layers.remove(state)
        if not self._host_layers:  # no gradient is offloaded any more
            self._drop_ring()
        return arrays

    def _free(self, *slabs: torch.Tensor) -> None:
        """Stop counting the slabs, and unpin them."""
        for slab in slabs:
            self.allocated_bytes -= slab.numel() * slab.element_size()
            if self._pinned.pop(slab.data_ptr(), None) is not None:
                self._device.pinning.unpin(slab)

    def close(self) -> None:
        """Unpin and drop every slab. Parameters that are views keep their memory alive."""
        for slab in self._pinned.values():
            self._device.pinning.unpin(slab)
        self._pinned.clear()
        self._ring.clear()
        self._mapped_ahead.clear()
        for state in self.layers:
            state.second = None
            state.weights = torch.empty(0, dtype=torch.uint8)
            state.drop_arrays()


# all others are moments
PURPOSES = {"low": "masters", "accumulated": "accumulated gradients"}


def purpose_of(array: str) -> str:
    """The name that the device's budget has for an array of a layer that is updated on the GPU."""
    return f"{PURPOSES.get(array, 'moments')} of resident layers"


class DeviceStore:
    """The arrays of the layers whose home is the GPU."""

    def __init__(self, host: HostStore, device: Device) -> None:
        self._host = host
        self._device = device
        self._is_prepared = False
        # (layer, array) of the arrays that lie in host memory until `reload_arrays`.
        self._offloaded: set[tuple[int, str]] = set()
        self.layers = [state for state in host.layers if state.home is GPU]
        for state in self.layers:
            purpose = f"weights of {state.layout.name or 'the root'}"
            nbytes = state.maps["weights"].nbytes
            state.weights = device.memory.allocate(nbytes, torch.uint8, purpose)

    def adopt(self, index: int) -> None:
        """Copy the layer's parameters into its weights, cast to its dtypes.

        They pass through host memory of one layer.
        """
        state = self._host.layers[index]
        host_weights = map_slab(state.maps["weights"].nbytes, torch.uint8)
        state.fill(host_weights)
        self._device.copy_now(state.weights, host_weights)

    def move_to_device(self, index: int) -> None:
        """Move a host layer with all its arrays to the device, while no pass is running.

        Its host memory is freed, except for memory that the model's parameters still show.
        """
        state = self._host.layers[index]
        # Copied while the host's weights are pinned.
        weights = self._copy_to_device(state.weights, f"weights of {state.name}")
        host_arrays = self._host.detach_layer(index)
        state.weights = weights
        for name, array in host_arrays.items():
            is_empty_sum = name == "accumulated" and not state.gradients.summed
            if is_empty_sum:
                state.arrays[name] = self._zeros(name, array.nbytes)
            else:
                state.arrays[name] = self._copy_to_device(array, purpose_of(name))
        self.layers.append(state)
        self.layers.sort(key=attrgetter("index"))

    def _copy_to_device(self, array: torch.Tensor, purpose: str) -> torch.Tensor:
        copied = self._device.memory.allocate(array.nbytes, torch.uint8, purpose)
        self._device.copy_now(copied, array)
        return copied

    def prepare_training(self) -> None:
        """Allocate masters, moments and sums, at the first backward.

        A call that an interrupt ended is continued by the next one.
        """
        if self._is_prepared:
            return
        for state in self.layers:
            self._host.make_arrays(state, self._zeros)
        self._is_prepared = True

    def _zeros(self, array: str, nbytes: int) -> torch.Tensor:
        return self._device.memory.allocate_zeros(nbytes, purpose_of(array))

    def offload_arrays(self, *, keeps_weights: bool) -> None:
        """Move every array to host memory between two steps, until `reload_arrays`.

        `keeps_weights`: the weights stay, so that the model can be evaluated.
        """
        for state in self.layers:
            for name, array in state.all_arrays().items():
                is_kept = keeps_weights and name == "weights"
                if is_kept or (state.index, name) in self._offloaded:
                    continue
                copied = map_slab(array.nbytes, torch.uint8)
                self._device.copy_now(copied, array)
                state.replace_array(name, copied)
                self._device.memory.release(array)
                self._offloaded.add((state.index, name))

    def reload_arrays(self) -> None:
        """Move every array back to the device."""
        for state in self.layers:
            for name, array in state.all_arrays().items():
                if (state.index, name) in self._offloaded:
                    copied = self._copy_to_device(array, f"{name} of {state.name}")
                    state.replace_array(name, copied)
        self._offloaded.clear()

    def return_weights(self) -> None:
        """Move every layer's weights to host memory, and drop all other arrays.

        The device's work has ended.
        """
        for state in self.layers:
            on_device = {
                name: array
                for name, array in state.all_arrays().items()
                if (state.index, name) not in self._offloaded
            }
            if "weights" in on_device:
                weights = map_slab(state.weights.nbytes, torch.uint8)
                self._device.copy_now(weights, state.weights)
                state.weights = weights
            self._device.memory.release(*on_device.values())
            state.drop_arrays()
