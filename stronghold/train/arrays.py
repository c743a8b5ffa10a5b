"""The arrays of layers: weights, remainders, moments and gradients, in RAM, in files, or on the
device.

It makes and frees them. `pieces` is the one way to the arrays of an update, and `fetched` to the
bytes of a fetch. Both also queue the transfers of what lies in files.

    array                  of the trained parameters
    weights, low, moments  the optimizer's state (`optim.states`). The weights lie in the layer's
                           buffer, whose rest are the frozen parameters
    gradients              as they came, or their fp32 sums over micro-batches; never both. They
                           never lie in files

[Note: pieces in files]
1. Host buffers stand in a ring. A piece of a layer is loaded to one (swap in), updated there, and
   spilled from there (swap out), on three lanes. Meanwhile the next pieces are loaded to others.
2. The record of the buffer orders these three, and the next piece that takes the buffer.
3. Pieces of one layer do not wait for each other. Each load and each update waits for those that
   used the layer's arrays before its first piece, and the spill waits for the update.
4. The layer's newest writer is the last one of its weights. Weights in files: the last spill, which
   waits for the others. Weights in memory: the last update, and the last spill is a reader. So a
   fetch does not wait for the spill of moments. Who reads moments waits for the readers, too.
5. Piece k of a layer always takes the same buffer. So the addresses of an update do not change.
6. Fetches have a ring of their own: an update must not wait until a slot is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from stronghold.devices.device import Device
from stronghold.devices.fences import Fence, LaneName, Record
from stronghold.errors import ConfigError
from stronghold.optim.states import PAGE_BYTES, items, num_items, page_numel
from stronghold.plan.memory import Staging
from stronghold.private import with_own_storage, without_torch_function
from stronghold.train.aliases import num_elsewhere
from stronghold.train.files import Files, Transfer
from stronghold.train.layer import Layer, point
from stronghold.train.slabs import map_slab, trim_heap

BLOCK_BYTES = 8 << 20  # of checkpoints, in host memory
TRIM_BYTES = 256 << 20  # of freed tensors, of which the heap keeps pages meanwhile


class Piece(NamedTuple):
    """Elements of a layer for one operation that changes them.

    begin    the first one
    arrays   from that element on, by name. They are in memory until the operation has ended
    records  hazards of the arrays, but for the gradients'. The operation writes them
    after    fences for which the operation waits
    """

    begin: int
    arrays: dict[str, Tensor]
    records: tuple[Record, ...]
    after: Sequence[Fence] = ()


@dataclass(slots=True, eq=False)
class Memory:
    """Memory of a layer's arrays, but for its gradients.

    buffer   of all parameters, as a slot has them: uint8 [num_bytes]
    at_rest  the parameters' views of it, each in a storage of its own size: a program that saves a
             parameter, or its state dict, saves no other one
    arrays   the optimizer's that are in memory, by name. "weights" is a view of the buffer
    record   hazards of these
    """

    buffer: Tensor
    at_rest: list[Tensor]
    arrays: dict[str, Tensor]
    record: Record


class Ring:
    """Host buffers that pieces take in turn, each with its record."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = [(buffer, Record()) for buffer in buffers]

    def __getitem__(self, number: int) -> tuple[Tensor, Record]:
        return self._buffers[number % len(self._buffers)]


class Arrays:
    """Makes the arrays of `layers`, and moves the parameters into them.

    accumulates  gradients are summed in fp32
    in_files     the arrays of each layer that lie in files, in `folders`
    staging      the sizes of the rings

    Layers are taken over one by one, so RAM never has two copies of the model.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[Layer],
        *,
        accumulates: bool,
        in_files: Mapping[Layer, Sequence[str]],
        staging: Staging,
        folders: Sequence[Path],
    ) -> None:
        self._device, self._accumulates = device, accumulates
        self._memory: dict[Layer, Memory] = {}
        self._gradients: dict[Layer, Tensor] = {}
        self._pinned: list[Tensor] = []
        self._on_device: list[Tensor] = []
        self.host_bytes = self.host_peak_bytes = 0  # now, and the most so far
        # Of the arrays in files: the first byte there. Of layers with some: the number of the
        # first piece, and the elements of a piece.
        self._offsets: dict[tuple[Layer, str], int] = {}
        self._first_pieces: dict[Layer, int] = {}
        self._piece_numel: dict[Layer, int] = {}
        self._piece_bytes = staging.piece_bytes
        self._num_fetched = 0  # pieces
        self.read_bytes = self.written_bytes = 0  # of files, queued so far
        self.file_bytes = self._lay_out(layers, in_files)
        self._files = Files(folders, self.file_bytes) if self.file_bytes else None
        try:
            self._updates = Ring(self._buffers_of(staging.update_entries))
            self._fetches = Ring(self._buffers_of(staging.fetch_entries))
            freed_bytes = 0
            for layer in tqdm(
                layers, desc="taking the model over", unit="layer", delay=2.0, leave=False
            ):
                self._take_over(layer)
                freed_bytes += layer.num_bytes
                if freed_bytes >= TRIM_BYTES or layer is layers[-1]:
                    trim_heap()  # else it keeps the pages of what torch has freed
                    freed_bytes = 0
        except BaseException:
            self.close()
            raise

    def _lay_out(self, layers: Sequence[Layer], in_files: Mapping[Layer, Sequence[str]]) -> int:
        """Place the arrays in the files, layer by layer. Returns their bytes."""
        end = num_pieces = 0
        for layer in layers:
            dtypes = {} if layer.states is None else layer.states.dtypes
            arrays = [a for a in {"weights": None, **dtypes} if a in in_files[layer]]
            for array in arrays:
                self._offsets[layer, array] = end
                end += _padded(_num_bytes(layer, array))
            if arrays and layer.states is not None:
                page = page_numel(layer.states.kind)
                numel = int(self._piece_bytes / layer.states.item_bytes(arrays)) // page * page
                assert numel, f"a piece of {self._piece_bytes} bytes is too small for {layer!r}"
                self._piece_numel[layer], self._first_pieces[layer] = numel, num_pieces
                num_pieces += -(-layer.trained_numel // numel)
        return end

    def _buffers_of(self, count: int) -> list[Tensor]:
        if self._files is None:
            return []
        return [self.pinned(self._piece_bytes, torch.uint8) for _ in range(count)]

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of gradients that wait for the update of parameters of `dtype`."""
        return torch.float32 if self._accumulates else dtype

    def _take_over(self, layer: Layer) -> None:
        """Move the layer's parameters into its buffer. Torch frees the memory that they had."""
        memory = self.allocate(layer)
        self._fill(layer, memory)
        self._hold(layer, memory)
        self._begin_masters(layer)
        self.make_gradients(layer)

    def _fill(self, layer: Layer, memory: Memory) -> None:
        for parameter, view in zip(layer.parameters, memory.at_rest, strict=True):
            view.copy_(parameter.detach())

    def _begin_masters(self, layer: Layer) -> None:
        """Zeros are a fresh state. But in fp16 "low" is the master itself. A kernel takes a weight
        in place of a master that does not round to it: that would lose the sign of -0.0."""
        if layer.states is not None and layer.states.low is torch.float32:
            self.of(layer, "low").copy_(self.of(layer, "weights"))

    def allocate(self, layer: Layer) -> Memory:
        """Make zeros for all arrays of the layer where they belong, but for its gradients."""
        buffer = self._zeros(layer, "weights", layer.num_bytes, torch.uint8)
        arrays: dict[str, Tensor] = {}
        if layer.states is not None:
            arrays["weights"] = buffer[: layer.trained_bytes].view(layer.dtype)
            for array, dtype in layer.states.dtypes.items():
                if array != "weights" and (layer, array) not in self._offsets:
                    numel = num_items(array, layer.trained_numel)
                    arrays[array] = self._zeros(layer, array, numel, dtype)
        return Memory(buffer, _in_own_storages(layer, buffer), arrays, Record())

    def _hold(self, layer: Layer, memory: Memory) -> None:
        self._memory[layer] = memory  # all at once: an interrupt may come at any bytecode
        layer.weight_record = memory.record
        layer.bind(memory.at_rest)

    def exchange(self, layer: Layer, memory: Memory) -> Memory:
        """Let this be the memory of the layer, and point its parameters, which are at rest, at it.
        Returns the memory of before."""
        before = self._memory[layer]
        self._hold(layer, memory)
        return before

    def free(self, memory: Memory) -> None:
        """Give back memory that no layer has. The lanes have finished."""
        for array in (memory.buffer, *(x for n, x in memory.arrays.items() if n != "weights")):
            self._free(array)

    def make_gradients(self, layer: Layer) -> None:
        """Make the place for the layer's gradients, unless it has one or does not train."""
        if layer.states is not None and layer not in self._gradients:
            numel, dtype = layer.trained_numel, self.gradient_dtype(layer.dtype)
            self._gradients[layer] = self._zeros(layer, "gradients", numel, dtype)

    def _zeros(self, layer: Layer, array: str, numel: int, dtype: torch.dtype) -> Tensor:
        if (layer, array) in self._offsets:
            return self._map(layer, array, numel, dtype)
        if layer.is_on_gpu:
            purpose = f"{array} of {layer.name}"
            memory = self._device.memory.allocate_zeros(numel * dtype.itemsize, purpose)
            self._on_device.append(memory.view(dtype))
            return self._on_device[-1]
        if array in ("weights", "gradients"):  # the link copies no other arrays
            return self.pinned(numel, dtype)
        slab = self._slab(numel, dtype)
        self._device.first_touch.add(slab)
        return slab

    def _slab(self, numel: int, dtype: torch.dtype) -> Tensor:
        slab = map_slab(numel, dtype)
        self.host_bytes += slab.nbytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        return slab

    def _map(self, layer: Layer, array: str, numel: int, dtype: torch.dtype) -> Tensor:
        assert self._files is not None
        num_bytes = numel * dtype.itemsize
        mapped = self._files.map(self._offsets[layer, array], _padded(num_bytes))
        return mapped[:num_bytes].view(dtype)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros that a stream copies from and to without the host."""
        slab = self._slab(numel, dtype)
        if numel:
            self._device.pinning.pin(slab)
            self._pinned.append(slab)
        return slab

    def of(self, layer: Layer, array: str) -> Tensor:
        """One array of a layer, flat. An array in files is mapped for the caller. It may be read
        and written only while no operation on the layer is queued."""
        if array == "gradients":
            return self._gradients[layer]
        if array in self._memory[layer].arrays:
            return self._memory[layer].arrays[array]
        assert layer.states is not None
        numel, dtype = num_items(array, layer.trained_numel), layer.states.dtypes[array]
        return self._map(layer, array, numel, dtype)

    def buffer(self, layer: Layer) -> Tensor:
        """The bytes of all parameters, as a slot has them: uint8 [num_bytes]."""
        return self._memory[layer].buffer

    def at_rest(self, layer: Layer) -> list[Tensor]:
        """The parameters' views of the layer's buffer."""
        return self._memory[layer].at_rest

    def is_aliased(self, layer: Layer) -> bool:
        """True if the program keeps an alias of one of the layer's parameters at rest."""
        with without_torch_function():
            pairs = zip(layer.parameters, self.at_rest(layer), strict=True)
            return any(
                view.numel() and num_elsewhere(view, int(p.data_ptr() == view.data_ptr()))
                for p, view in pairs
            )

    def gradient(self, layer: Layer, position: int) -> Tensor:
        """The place of one trained parameter's gradient, flat."""
        begin = layer.element(position)
        return self.of(layer, "gradients")[begin : begin + layer.parameters[position].numel()]

    def owns(self, layer: Layer) -> bool:
        """True if this rank has the layer's arrays, and saves them."""
        return True

    def fills(self, layer: Layer, array: str) -> bool:
        """True if this rank writes an array that is loaded."""
        return True

    def restart_master(self, layer: Layer, position: int) -> None:
        """Make a trained parameter's master equal to its weight, which was written from outside. No
        operation on the layer is queued."""
        assert layer.states is not None
        if layer.states.low is None:
            return
        begin, numel = layer.element(position), layer.parameters[position].numel()
        low = self.of(layer, "low")[items("low", begin, begin + numel)]
        if layer.states.low is torch.float32:  # the whole master
            low.copy_(self.of(layer, "weights")[begin : begin + numel])
        else:  # the remainder beside the weight
            low.zero_()

    def moved(self, layer: Layer) -> list[int]:
        """The positions of the parameters that the program has pointed elsewhere
        (`parameter.data = ...`) since the layer was used."""
        if not layer.is_seen:
            return []
        views = self.at_rest(layer)
        with without_torch_function():
            pointers = [parameter.data_ptr() for parameter in layer.parameters]
        return [k for k, pointer in enumerate(pointers) if pointer != views[k].data_ptr()]

    def adopt_moved(self, layer: Layer) -> None:
        """Copy parameters that the program has pointed elsewhere, and point them back. ConfigError
        for another shape or dtype."""
        for k in self.moved(layer):
            parameter, view = layer.parameters[k], self.at_rest(layer)[k]
            for what, value, expected in (
                ("shape", list(parameter.shape), list(view.shape)),
                ("dtype", parameter.dtype, view.dtype),
            ):
                if value != expected:
                    raise ConfigError(
                        f"{layer.names[k]}.data has the {what} {value} now, expected {expected}, "
                        "as when its masters and moments were made: change a model before "
                        "stronghold.initialize, or after engine.destroy() for a new engine"
                    )
            layer.weight_record.wait()
            view.copy_(parameter.detach())
            with without_torch_function():
                point(parameter, view)

    def pieces(self, layer: Layer) -> Iterator[Piece]:
        """Yield the arrays of the layer's update piece by piece, in order. Arrays in memory are one
        piece. The caller queues one operation for each, before it takes the next."""
        assert layer.states is not None
        names = (*layer.states.dtypes, "gradients")
        if layer not in self._piece_numel:
            arrays = {array: self.of(layer, array) for array in names}
            yield Piece(0, arrays, (layer.weight_record,))
            return
        assert self._files is not None
        load, spill = self._device.lane(LaneName.LOAD), self._device.lane(LaneName.SPILL)
        numel, before = self._piece_numel[layer], layer.weight_record.users
        of_layer = (layer.weight_record,)
        are_weights_in_files = (layer, "weights") in self._offsets
        spills: list[Fence] = []
        for number, begin in enumerate(range(0, layer.trained_numel, numel)):
            end = min(begin + numel, layer.trained_numel)
            memory, record = self._updates[self._first_pieces[layer] + number]
            arrays, transfers = self._staged(layer, names, begin, end, memory)
            num_bytes = sum(place.nbytes for _, place in transfers)
            self.read_bytes += num_bytes
            self.written_bytes += num_bytes
            load.submit(
                f"load {layer.index}",
                partial(self._files.read, transfers),
                before,
                writes=(record,),
                nbytes=num_bytes,
            )
            is_last = end == layer.trained_numel
            written = of_layer if is_last and not are_weights_in_files else ()
            yield Piece(begin, arrays, (record, *written), before)
            fence = spill.submit(
                f"spill {layer.index}",
                partial(self._files.write, transfers),
                spills if is_last else (),
                reads=(record, *written),
                writes=of_layer if is_last and are_weights_in_files else (),
                nbytes=num_bytes,
            )
            spills.append(fence)

    def _staged(
        self, layer: Layer, names: Sequence[str], begin: int, end: int, memory: Tensor
    ) -> tuple[dict[str, Tensor], list[Transfer]]:
        """The arrays of a piece. Of those in files: views of a buffer that the transfers fill."""
        assert layer.states is not None
        arrays: dict[str, Tensor] = {}
        transfers: list[Transfer] = []
        filled = 0
        for array in names:
            of_piece = items(array, begin, end)
            if (layer, array) not in self._offsets:
                arrays[array] = self.of(layer, array)[of_piece]
                continue
            dtype = layer.states.dtypes[array]
            num_bytes = (of_piece.stop - of_piece.start) * dtype.itemsize
            place = memory[filled : filled + _padded(num_bytes)]
            first = self._offsets[layer, array] + of_piece.start * dtype.itemsize
            transfers.append((first, place))
            arrays[array] = place[:num_bytes].view(dtype)
            filled += place.nbytes
        return arrays, transfers

    def fetched(self, layer: Layer) -> Iterator[tuple[int, Tensor, Record]]:
        """Yield the bytes of all parameters for the link: the first one's place in the layer, the
        bytes, and the record of their memory. The caller queues one operation for each, before it
        takes the next."""
        if (layer, "weights") not in self._offsets:
            yield 0, self.buffer(layer), layer.weight_record
            return
        assert self._files is not None
        offset = self._offsets[layer, "weights"]
        for begin in range(0, layer.num_bytes, self._piece_bytes):
            memory, record = self._fetches[self._num_fetched]
            self._num_fetched += 1
            num_bytes = min(self._piece_bytes, layer.num_bytes - begin)
            place = memory[: _padded(num_bytes)]
            self.read_bytes += place.nbytes
            self._device.lane(LaneName.STAGE).submit(
                f"stage {layer.index}",
                partial(self._files.read, [(offset + begin, place)]),
                reads=(layer.weight_record,),
                writes=(record,),
                nbytes=place.nbytes,
            )
            yield begin, place[:num_bytes], record

    def blocks(
        self, layer: Layer, array: str, *, writes: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the bytes of an array in order, wherever it lies: the place of the first one, and
        the bytes in host memory, flat uint8. Those of "weights" are the layer's whole buffer. They
        are of the layer's memory at the call: a later `exchange` changes nothing.

        No operation writes the array meanwhile: the caller has waited for the layer's operations,
        or they wait for the caller. A block is valid until the next is taken.

        writes  the caller changes the bytes
        """
        if (layer, array) in self._offsets:
            return self._blocks_in_files(layer, array, writes=writes)
        whole = self.buffer(layer) if array == "weights" else self.of(layer, array)
        whole = whole.view(torch.uint8)
        if layer.is_on_gpu:
            return self._blocks_on_device(whole, writes=writes)
        return iter([(0, whole)])

    def _blocks_in_files(
        self, layer: Layer, array: str, *, writes: bool
    ) -> Iterator[tuple[int, Tensor]]:
        assert self._files is not None
        memory, num_bytes = map_slab(BLOCK_BYTES, torch.uint8), _num_bytes(layer, array)
        for begin in range(0, num_bytes, BLOCK_BYTES):
            block = memory[: min(BLOCK_BYTES, num_bytes - begin)]
            transfer = self._offsets[layer, array] + begin, memory[: _padded(block.numel())]
            self._files.read([transfer])
            yield begin, block
            if writes:
                self._files.write([transfer])

    def _blocks_on_device(self, whole: Tensor, *, writes: bool) -> Iterator[tuple[int, Tensor]]:
        memory = map_slab(BLOCK_BYTES, torch.uint8)
        for begin in range(0, whole.numel(), BLOCK_BYTES):
            on_device = whole[begin : begin + BLOCK_BYTES]
            block = memory[: on_device.numel()]
            self._device.copy_now(block, on_device)
            yield begin, block
            if writes:
                self._device.copy_now(on_device, block)

    def move(self, layer: Layer, *, to_device: bool) -> None:
        """Move a layer's arrays to the device, which updates it from now on, or back to the host.
        Its gradients have no place until `make_gradients`. The lanes have finished, and none of the
        arrays lies in files."""
        layer.is_on_gpu = to_device
        gradients = self._gradients.pop(layer, None)
        if gradients is not None:
            self._free(gradients)
        memory = self._memory[layer]
        memory.buffer = self._moved(layer, "weights", memory.buffer)
        memory.at_rest = _in_own_storages(layer, memory.buffer)
        layer.bind(memory.at_rest)
        for array, source in memory.arrays.items():
            if array == "weights":
                memory.arrays[array] = memory.buffer[: layer.trained_bytes].view(layer.dtype)
            else:
                memory.arrays[array] = self._moved(layer, array, source)

    def _moved(self, layer: Layer, array: str, source: Tensor) -> Tensor:
        """A copy of an array in the layer's present memory. The array is freed."""
        moved = self._zeros(layer, array, source.numel(), source.dtype)
        self._device.copy_now(moved, source)
        self._free(source)
        return moved

    def _is_on_device(self, array: Tensor) -> bool:
        return any(array is other for other in self._on_device)

    def _free(self, array: Tensor) -> None:
        """Take an array out of the counts. The caller drops it."""
        if self._is_on_device(array):
            self._device.memory.release(array)
            self._on_device = [other for other in self._on_device if other is not array]
            return
        if any(array is other for other in self._pinned):
            self._device.pinning.unpin(array)
            self._pinned = [other for other in self._pinned if other is not array]
        self.host_bytes -= array.nbytes

    def close(self) -> None:
        """Free all arrays. Parameters keep the buffers of their layers, in host memory. Weights in
        files stay there, mapped, until the program drops the parameters. What the program has
        pointed elsewhere stays there."""
        for layer, memory in self._memory.items():
            views = memory.at_rest
            if self._is_on_device(memory.buffer):  # a move may have been interrupted
                buffer = torch.empty(layer.num_bytes, dtype=torch.uint8)
                self._device.copy_now(buffer, memory.buffer)
                views = layer.views(buffer)
            moved = {k: layer.parameters[k].data for k in self.moved(layer)}
            layer.bind([moved.get(k, view) for k, view in enumerate(views)])
        for slab in self._pinned:
            self._device.pinning.unpin(slab)
        self._device.memory.release(*self._on_device)
        if self._files is not None:
            self._files.close()
        self._on_device.clear()
        self._pinned.clear()
        self._memory.clear()
        self._gradients.clear()


def _num_bytes(layer: Layer, array: str) -> int:
    """Bytes of an array of the optimizer. Of "weights": of the layer's buffer."""
    if array == "weights":
        return layer.num_bytes
    assert layer.states is not None
    return num_items(array, layer.trained_numel) * layer.states.dtypes[array].itemsize


def _in_own_storages(layer: Layer, buffer: Tensor) -> list[Tensor]:
    return [_in_own_storage(view) for view in layer.views(buffer)]


def _in_own_storage(view: Tensor) -> Tensor:
    """A view of the same memory, in a storage of exactly its bytes."""
    if not view.numel():
        return view
    with torch.inference_mode(False):  # autograd must be able to save it
        own = with_own_storage(view.view(-1).view(torch.uint8))
        return own.view(view.dtype).view(view.shape).data  # without `_base`, which is one more


def _padded(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
