"""Gradients: from autograd to a slot, and from there to the buffer in which they wait.

A gradient lies in exactly one buffer of its layer: as it came, or in the fp32 sum over
micro-batches. The buffer lies on the host, or on the device if the device updates the layer.

[Note: several calls]
1. A layer is called n times before a backward. Between the calls its parameters rest on the host.
   On a GPU they change device thereby, and torch makes a new accumulator for each call.
2. So a parameter gets one gradient on a CPU, and up to n on a GPU.
3. These are added in the slot, in the compute dtype, as autograd adds. So the layer gathers in a
   slot of its own: another layer must not take it in between.

[Note: sums of chunks]
1. A call may be divided (`chunks`). The gradients of its chunks are added in fp32, and rounded
   after its last chunk. Then the slot has one gradient of the call.
2. An fp32 layer sums in the gradient's place. Others have fp32 memory beside the slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from stronghold.devices.device import ComputeSpan, Device
from stronghold.devices.fences import Fence, Record
from stronghold.native import Kernels
from stronghold.plan.memory import SUM_BUFFERS
from stronghold.telemetry.metrics import Metrics, WaitCause
from stronghold.train.arrays import Arrays
from stronghold.train.layer import GradientState, Layer, Slot


class Gradients:
    """Gathers each layer's gradients in a slot, and offloads a layer that is complete.

    Blocks take turns in shared slots. A layer outside of the blocks has a slot of its own, and so
    has one whose gradients wait on the device as they came: there the slot is their buffer.

    trains       False: the model is evaluated alone, without slots
    accumulates  gradients of several micro-batches are summed in fp32
    in_chunks    calls of blocks may be divided
    ends_step    the micro-batch is the step's last: sums of squares are taken as gradients come
    change       called with a layer before its gradients on the host change
    complete     called with it after that, if the step follows
    """

    def __init__(
        self,
        device: Device,
        arrays: Arrays,
        kernels: Kernels,
        layers: Sequence[Layer],
        num_slots: int,
        *,
        trains: bool = True,
        accumulates: bool,
        in_chunks: bool = False,
        metrics: Metrics,
        span: ComputeSpan,
        change: Callable[[Layer], None],
        complete: Callable[[Layer], None],
    ) -> None:
        self._device, self._arrays, self._kernels, self._layers = device, arrays, kernels, layers
        self._metrics, self._span = metrics, span
        self._change, self._complete = change, complete
        self._accumulates, self.ends_step = accumulates, True
        self.offloaded_bytes = 0
        blocks = [layer for layer in layers if layer.is_block and layer.num_trained]
        sharing = [layer for layer in blocks if not self._waits_in_slot(layer)]
        self._shared = [
            Slot.allocate(device, max(x.trained_bytes for x in sharing), f"gradient slot {k}")
            for k in range(num_slots if trains and sharing else 0)
        ]
        self._own: dict[Layer, Slot] = {}
        for layer in layers if trains else ():
            if not layer.is_block and layer.num_trained:
                self._own_slot(layer)
        if trains and in_chunks:
            self._make_sum_memory(sharing, self._shared)
            for layer in (x for x in layers if x.num_trained and x not in sharing):
                if layer.is_block or layer.block is not None:
                    self._make_sum_memory([layer], [self._own_slot(layer)])
        self._called_again: set[Layer] = set()  # have used their own slot in this backward
        # Two host buffers in turn, for gradients on their way to a sum. Made when first needed.
        self._staging: list[tuple[Tensor, Record]] = []
        # Of layers whose gradients have not changed since, with the fence after which they are
        # complete.
        self._square_sums: dict[Layer, tuple[list[float], Fence]] = {}

    def _make_sum_memory(self, layers: Sequence[Layer], slots: Sequence[Slot]) -> None:
        """Give slots the memory for fp32 sums of these layers."""
        numel = max((x.trained_numel for x in layers if x.dtype is not torch.float32), default=0)
        for slot in slots if numel else ():
            slot.sum_memory = self._sum_memory(numel)

    def _sum_memory(self, numel: int) -> Tensor:
        return self._device.memory.allocate(numel, torch.float32, "fp32 sums of chunks")

    def _waits_in_slot(self, layer: Layer) -> bool:
        """True if the layer's gradients wait for the update where they were gathered."""
        return layer.is_on_gpu and not self._accumulates

    # -- autograd to slot -------------------------------------------------------------------------
    def arrived(self, layer: Layer, position: int, gradient: Tensor) -> None:
        """Take a parameter's gradient. Offload the layer if it is complete."""
        slot = layer.gradient_slot or self._claim(layer)
        self._enter(slot)
        target = slot.views_of(layer, layer.trained_bytes)[position]
        is_again = position in slot.arrived or slot.sums.get(position) is target
        if is_again:  # [Note: several calls], or an earlier backward of the step
            target.add_(gradient)
        else:
            target.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            slot.arrived.add(position)
        if layer.num_calls == 1 and len(slot.arrived) == layer.num_trained:
            self._offload(layer)

    def chunk_arrived(
        self, layer: Layer, gradients: Sequence[tuple[int, Tensor]], *, is_last: bool
    ) -> None:
        """Take the gradients of one chunk, by position ([Note: sums of chunks]). After the last one
        of its call, offload the layer unless it was called again."""
        slot = layer.gradient_slot
        if gradients:
            slot = slot or self._claim(layer)
            self._enter(slot)
            if slot.sums:  # which another stream may have written
                self._join(slot, f"chunk {layer.index}")
            for position, gradient in gradients:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                if position in slot.sums:
                    slot.sums[position].add_(gradient)
                else:
                    slot.sums[position] = self._place_of_sum(layer, slot, position).copy_(gradient)
        if is_last and slot is not None:
            with self._device.side_streams.joined():
                self._enter(slot)
                self._round(layer, slot)
                if layer.num_calls == 1:
                    self._offload(layer)

    def _place_of_sum(self, layer: Layer, slot: Slot, position: int) -> Tensor:
        target = slot.views_of(layer, layer.trained_bytes)[position]
        if target.dtype is torch.float32 and position not in slot.arrived:
            return target
        if slot.sum_memory is None:  # a parameter has two gradients, which is rare and not planned
            slot.sum_memory = self._sum_memory(slot.memory.nbytes // layer.dtype.itemsize)
        begin = layer.element(position)
        return slot.sum_memory[begin : begin + target.numel()].view(target.shape)

    def _round(self, layer: Layer, slot: Slot) -> None:
        """Round the sums of a call, and add them to the gradients of earlier calls."""
        views = slot.views_of(layer, layer.trained_bytes)
        for position, total in slot.sums.items():
            target = views[position]
            if position in slot.arrived:
                target.add_(total.to(target.dtype))
            elif total is not target:
                target.copy_(total)
            slot.arrived.add(position)
        slot.sums.clear()

    def _claim(self, layer: Layer) -> Slot:
        """Give the layer a slot to gather in."""
        if self._waits_in_slot(layer) or not layer.is_block or layer.num_calls > 1:
            slot = self._own_slot(layer)
            self._called_again.add(layer)
        else:
            slot = self._shared.pop(0)
            self._shared.append(slot)
            if slot.layer is not None:  # it misses a gradient, which comes by itself, or never
                self._offload(slot.layer)
        slot.layer, layer.gradient_slot = layer, slot
        layer.gradient_state = GradientState.GATHERING
        return slot

    def _enter(self, slot: Slot) -> None:
        """Let the calling thread's stream wait for the slot's users, before its first write."""
        stream = self._device.compute.stream()
        if stream not in slot.writers:
            for fence in slot.record.users:  # the last offload reads it
                with self._span.waiting(fence):
                    self._metrics.waited(WaitCause.OFFLOAD, self._device.compute.wait(fence))
            slot.writers.append(stream)

    def _join(self, slot: Slot, name: str) -> None:
        """Let the calling thread's stream wait for the other streams that have written the slot."""
        compute = self._device.compute
        for stream in slot.writers:
            if stream != compute.stream():
                compute.wait(compute.record(name, stream))
        slot.writers = [compute.stream()]

    def _own_slot(self, layer: Layer) -> Slot:
        """A block's is made when it is needed, and kept until a backward does not need it."""
        if layer not in self._own:
            if self._waits_in_slot(layer):
                memory = self._arrays.of(layer, "gradients").view(torch.uint8)
                self._own[layer] = Slot(memory)
            else:
                purpose = f"gradients of {layer.name}"
                self._own[layer] = Slot.allocate(self._device, layer.trained_bytes, purpose)
        return self._own[layer]

    # -- slot to buffer ---------------------------------------------------------------------------
    def _offload(self, layer: Layer) -> None:
        """Bring the slot's gradients to the layer's buffer, and release the slot."""
        slot, layer.gradient_slot = layer.gradient_slot, None
        assert slot is not None
        slot.layer = None
        layer.gradient_state = GradientState.WAITING
        self._square_sums.pop(layer, None)
        self._round(layer, slot)  # of a call whose last chunk has not come
        positions = sorted(slot.arrived)
        self._join(slot, f"gradients {layer.index}")
        slot.writers.clear()
        if self._waits_in_slot(layer):
            layer.waiting.update(positions)  # they lie in the buffer; a later backward adds there
            return
        slot.arrived = set()
        slot.record.write(self._device.compute.record(f"gradients {layer.index}"))
        if layer.is_on_gpu:
            self._sum(layer, positions, slot.memory, slot.record)
            layer.waiting.update(positions)
        else:
            self._change(layer)
            self._to_host(layer, slot, positions)

    def _to_host(self, layer: Layer, slot: Slot, positions: Sequence[int]) -> None:
        """Queue what follows on the host: the copy to the layer's buffer, or on to a sum, and the
        sums of squares if the step follows."""
        target, record = self._arrays.of(layer, "gradients"), layer.gradient_record
        is_sum = self._accumulates or not layer.waiting.isdisjoint(positions)
        if is_sum:
            target, record = self._staging_buffer()
        self._copy_to_host(layer, slot, positions, target, record)
        if is_sum:
            self._sum(layer, positions, target.view(torch.uint8), record)
        layer.waiting.update(positions)
        if self.ends_step:
            self._sum_squares(layer)
            self._complete(layer)

    def _copy_to_host(
        self, layer: Layer, slot: Slot, positions: Sequence[int], target: Tensor, record: Record
    ) -> None:
        """Queue the copy of these gradients of a slot. The slot is free after it."""
        target, memory = target.view(torch.uint8), slot.memory
        runs = [(0, layer.trained_bytes)]  # a complete layer: one copy, with the padding
        if len(positions) < layer.num_trained:
            begins = [(layer.offsets[k], layer.parameters[k].nbytes) for k in positions]
            runs = [(begin, begin + num_bytes) for begin, num_bytes in begins]
        self.offloaded_bytes += sum(end - begin for begin, end in runs)
        copy, poison = self._device.copy, self._device.memory.poison

        def work() -> None:
            for begin, end in runs:
                copy(target[begin:end], memory[begin:end])
            poison(memory)

        self._device.offload.submit(
            f"offload {layer.index}",
            work,
            reads=(slot.record,),
            writes=(record,),
            nbytes=sum(end - begin for begin, end in runs),
        )

    def _staging_buffer(self) -> tuple[Tensor, Record]:
        largest = max(layer.trained_bytes for layer in self._layers if not layer.is_on_gpu)
        while len(self._staging) < SUM_BUFFERS:
            self._staging.append((self._arrays.pinned(largest, torch.uint8), Record()))
        self._staging.reverse()
        return self._staging[0]

    def _sum(self, layer: Layer, positions: Sequence[int], source: Tensor, record: Record) -> None:
        """Queue the sum of gradients in `source` and those in the layer's buffer: in fp32 over
        micro-batches, in the compute dtype over two backwards of one micro-batch, as autograd
        adds."""
        views = layer.views(source[: layer.trained_bytes])
        sums = {k: self._arrays.gradient(layer, k) for k in positions}
        known = frozenset(layer.waiting)
        kernels = self._device.kernels if layer.is_on_gpu else self._kernels
        segments = [
            (views[k].data_ptr(), total.data_ptr(), total.numel(), k in known)
            for k, total in sums.items()
        ]

        def work() -> None:
            if self._accumulates:
                kernels.accumulate(layer.dtype, segments)
                return
            for k, total in sums.items():
                view = views[k].flatten()
                total.add_(view) if k in known else total.copy_(view)

        lane = self._device.compute if layer.is_on_gpu else self._device.gradients
        lane.submit(
            f"sum {layer.index}",
            work,
            reads=(record,),
            writes=(layer.gradient_record,),
            nbytes=layer.trained_bytes,
        )

    def end_backward(self) -> None:
        """No more gradients come in this backward."""
        for layer in self._layers:
            if layer.gradient_slot is not None:
                self._offload(layer)
        for layer in list(self._own):  # a forward without a backward counts as a call, too
            if (
                layer.is_block
                and not self._waits_in_slot(layer)
                and layer not in self._called_again
            ):
                self._free_own_slot(layer)
        self._called_again.clear()

    def _free_own_slot(self, layer: Layer) -> None:
        slot = self._own.pop(layer)
        for fence in slot.record.users:  # else another tensor gets the memory before the lane ends
            self._device.compute.wait(fence)
        self._release(slot)

    def _release(self, *slots: Slot) -> None:
        sums = (slot.sum_memory for slot in slots if slot.sum_memory is not None)
        self._device.memory.release(*(slot.memory for slot in slots), *sums)

    def forget_calls(self) -> None:
        """A forward begins after a backward. Until then its graph may have a further backward."""
        for layer in self._layers:
            layer.num_calls = 0

    def end_micro_batch(self) -> None:
        """The micro-batch has no further backward."""

    # -- the norm ---------------------------------------------------------------------------------
    def _sum_squares(self, layer: Layer) -> None:
        """Queue the sums of squares, so that the clip barrier finds them done but for the last."""
        sums: list[float] = []
        dtype, segments = self._arrays.gradient_dtype(layer.dtype), self._segments(layer)
        fence = self._device.gradients.submit(
            f"norm {layer.index}",
            lambda: sums.extend(self._kernels.sum_squares(dtype, segments)),
            reads=(layer.gradient_record,),
            nbytes=layer.trained_bytes,
        )
        self._square_sums[layer] = sums, fence

    def _segments(self, layer: Layer) -> list[tuple[int, int]]:
        gradients = [self._arrays.gradient(layer, k) for k in sorted(layer.waiting)]
        return [(gradient.data_ptr(), gradient.numel()) for gradient in gradients]

    def _sum_squares_on_gpu(self, layers: Sequence[Layer]) -> Callable[[], list[float]]:
        """Launch the sums of squares of these layers. Returns a function that waits for them."""
        sums: list[Tensor] = []
        segments: dict[torch.dtype, list[tuple[int, int]]] = {}
        for layer in layers:
            of_dtype = segments.setdefault(self._arrays.gradient_dtype(layer.dtype), [])
            of_dtype += self._segments(layer)

        def work() -> None:
            sums.extend(
                self._device.kernels.sum_squares_async(dtype, rows)
                for dtype, rows in segments.items()
            )

        records = [layer.gradient_record for layer in layers]
        self._device.compute.submit("norm on the device", work, reads=records)
        return self._device.compute.read_later(torch.cat(sums))

    def norm(self) -> Callable[[], float]:
        """The global L2 norm of the step's gradients: a function that waits for it."""
        layers = [layer for layer in self._layers if layer.waiting]
        on_gpu = [layer for layer in layers if layer.is_on_gpu]
        on_host = [layer for layer in layers if not layer.is_on_gpu]
        for layer in on_host:
            if layer not in self._square_sums:  # the last micro-batch had no gradient of it
                self._sum_squares(layer)
        sums = [self._square_sums[layer] for layer in on_host]
        sums_on_gpu = self._sum_squares_on_gpu(on_gpu) if on_gpu else list

        def wait() -> float:
            for _, fence in sums:
                fence.wait()
            # fsum rounds once: the grouping of parameters into layers cannot matter.
            return math.sqrt(math.fsum([*(s for of, _ in sums for s in of), *sums_on_gpu()]))

        return wait

    # -- the end of a step ------------------------------------------------------------------------
    def drop(self, layer: Layer, positions: Collection[int] | None = None) -> None:
        """The layer's gradients, or those of its parameters at `positions`, were used or are
        void."""
        dropped = range(layer.num_trained) if positions is None else positions
        layer.waiting.difference_update(dropped)
        for slot in (layer.gradient_slot, self._own.get(layer)):
            if slot is not None:
                slot.arrived.difference_update(dropped)
        self._square_sums.pop(layer, None)
        if not layer.waiting and layer.gradient_slot is None:
            layer.gradient_state = GradientState.NONE

    def forget(self) -> None:
        """Drop all gradients, after an exception at any place. All lanes have finished."""
        for slot in (*self._shared, *self._own.values()):
            slot.layer, slot.arrived = None, set()
            slot.sums.clear()
            slot.writers.clear()
        for layer in self._layers:
            layer.gradient_slot, layer.num_calls = None, 0
            self.drop(layer)

    def close(self) -> None:
        """Drop every slot. Graphs have no further backward."""
        self.forget_calls()
        self._release(*self._shared)
        for layer, slot in self._own.items():
            if not self._waits_in_slot(layer):
                self._release(slot)
            elif slot.sum_memory is not None:  # its gradients lie in the layer's arrays
                self._device.memory.release(slot.sum_memory)
        self._shared, self._own, self._staging = [], {}, []
