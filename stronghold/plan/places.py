"""Places: the layers that stay on the GPU or are streamed, and the device of their updates.

Pure: no tensors, no threads. The first step of a plan. `gpu_memory` and `host_memory` count bytes
of its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stronghold.errors import ConfigError
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.plan.cost import Demand

MIB = float(1 << 20)
Layers = tuple[LayerLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The layers of a model, by where they are.

    `outside` are no blocks, and stay on the GPU. Blocks are `streamed` through the window, or are
    `resident_blocks` and stay on the GPU. Layers are updated `on_gpu` or `on_host`. They gather
    gradients in a slot of their own (`own_slots`) or in slots that they share (`shared_slots`).
    `activations` has the policy of every layer. `offloaded` has the bytes of activations that wait
    on the host when backward begins, of those blocks that offload some.
    """

    layout: ModelLayout
    demand: Demand
    activations: tuple[str, ...]
    offloaded: Mapping[int, int]
    outside: Layers
    streamed: Layers
    resident_blocks: Layers
    on_gpu: Layers
    on_host: Layers
    own_slots: Layers
    shared_slots: Layers
    reasons: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.streamed) + len(self.resident_blocks)

    @property
    def resident(self) -> frozenset[int]:
        """The layers whose weights stay on the GPU."""
        return frozenset(layer.index for layer in (*self.outside, *self.resident_blocks))

    @property
    def updated_on_gpu(self) -> frozenset[int]:
        return frozenset(layer.index for layer in self.on_gpu)


def place_layers(layout: ModelLayout, demand: Demand) -> Places:
    """Choose the place of each layer. ConfigError for settings that the model does not have."""
    activations = _activations(layout, demand)
    streamed, resident_blocks = _streamed_and_resident(layout, demand)
    outside = tuple(layer for layer in layout.layers if not layer.streamed)
    on_gpu = (*outside, *resident_blocks) if demand.resident_updates == "gpu" else ()
    updated_on_gpu = frozenset(layer.index for layer in on_gpu)
    on_host = tuple(layer for layer in layout.layers if layer.index not in updated_on_gpu)
    # Until the gate opens, gradients on the GPU stay where they were gathered. The gradients of
    # what is no block come early and late in backward.
    held = frozenset[int]() if demand.accumulate else updated_on_gpu
    own_slots = (e for e in layout.layers if not e.streamed or e.index in held)
    shared_slots = (e for e in layout.layers if e.streamed and e.index not in held)
    return Places(
        layout=layout,
        demand=demand,
        activations=activations,
        offloaded=_offloaded(layout, demand, activations),
        outside=outside,
        streamed=streamed,
        resident_blocks=resident_blocks,
        on_gpu=on_gpu,
        on_host=on_host,
        own_slots=tuple(own_slots),
        shared_slots=tuple(shared_slots),
        reasons=_reasons(layout, demand, on_gpu),
    )


def _activations(layout: ModelLayout, demand: Demand) -> tuple[str, ...]:
    """The policy of every layer's activations."""
    chosen = demand.activations or "keep"
    if isinstance(chosen, str):
        return levels_of(layout, {chosen: len(layout.streamed)})
    return chosen


def levels_of(layout: ModelLayout, counts: Mapping[str, int]) -> tuple[str, ...]:
    """By layer, of so many blocks with each level, the first blocks' first. ConfigError when the
    numbers are not the model's."""
    of_block = iter([level for level, count in counts.items() for _ in range(count)])
    if sum(counts.values()) != len(layout.streamed):
        raise ConfigError(
            f"stronghold.activations: got levels of {sum(counts.values())} blocks, expected "
            f"{len(layout.streamed)}, as many as the model has"
        )
    return tuple(next(of_block) if layer.streamed else "keep" for layer in layout.layers)


def _streamed_and_resident(layout: ModelLayout, demand: Demand) -> tuple[Layers, Layers]:
    """The blocks that pass the window, and those that stay on the GPU."""
    blocks = tuple(layer for layer in layout.layers if layer.streamed)
    num_kept = demand.resident_layers or 0
    if num_kept > len(blocks):
        raise ConfigError(
            f"stronghold.resident_layers: got {num_kept}, but the model has {len(blocks)} "
            'blocks; "all" keeps every one'
        )
    # Evenly over the depth, the first block among them: behind the clip barrier the host updates
    # streamed blocks in forward order, and the compute of the residents between them hides it.
    kept = {place * len(blocks) // num_kept for place in range(num_kept)}
    streamed = tuple(b for place, b in enumerate(blocks) if place not in kept)
    return streamed, tuple(blocks[place] for place in sorted(kept))


def _offloaded(layout: ModelLayout, demand: Demand, activations: tuple[str, ...]) -> dict[int, int]:
    """Bytes of the activations that wait on the host, of the blocks that have some there."""
    if not demand.work:
        return {}
    moved = {index: demand.work[index].moved_bytes(activations[index]) for index in layout.streamed}
    return {index: nbytes for index, nbytes in moved.items() if nbytes}


def _reasons(layout: ModelLayout, demand: Demand, on_gpu: Layers) -> tuple[str, ...]:
    reasons = []
    if demand.resident_layers:
        reasons.append(
            f"{demand.resident_layers} of {len(layout.streamed)} blocks stay on the gpu "
            f"({demand.why('resident_layers')})"
        )
    if on_gpu:
        why = demand.why("resident_updates")
        reasons.append(f"resident layers are updated on the gpu ({why})")
    return tuple(reasons)
