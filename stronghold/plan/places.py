"""Places: the layers that stay on the GPU or are streamed, and the device of their updates.

Pure: no tensors, no threads. The first step of a plan. `gpu_memory` and `host_memory` count bytes
of its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stronghold.errors import ConfigError
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.plan.cost import AGAIN, Demand

MIB = float(1 << 20)
Layers = tuple[LayerLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedActivations:
    """Bytes of one block's activations that wait on the host when backward begins. `inputs_bytes`
    are the part that the block's inputs take."""

    nbytes: int
    inputs_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The layers of a model, by where they are.

    `outside` are no blocks, and stay on the GPU. Blocks are `streamed` through the window, or are
    `resident_blocks` and stay on the GPU. Layers are updated `on_gpu` or `on_host`. They gather
    gradients in a slot of their own (`own_slots`) or in slots that they share (`shared_slots`).
    `activations` has the policy of every layer, and `offloaded` the activations of those blocks
    that offload some. `whole`: nothing of the model moves, so there are no hooks and no slots.
    """

    layout: ModelLayout
    demand: Demand
    activations: tuple[str, ...]
    offloaded: Mapping[int, OffloadedActivations]
    outside: Layers
    streamed: Layers
    resident_blocks: Layers
    on_gpu: Layers
    on_host: Layers
    own_slots: Layers
    shared_slots: Layers
    whole: bool
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
    is_packed = any(layer.decoded_bytes for layer in layout.layers)
    whole = _is_whole(demand, activations, on_host, is_packed=is_packed)
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
        own_slots=() if whole else tuple(own_slots),
        shared_slots=() if whole else tuple(shared_slots),
        whole=whole,
        reasons=_reasons(layout, demand, on_gpu, whole=whole),
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


def _is_whole(
    demand: Demand, activations: tuple[str, ...], on_host: Layers, *, is_packed: bool
) -> bool:
    """True if no layer of the model moves. ConfigError if the config asks for that, and it is not
    possible."""
    possible = not on_host and {"keep"} >= set(activations)
    possible = possible and demand.chunk is None  # blocks are called chunk by chunk
    possible = possible and not is_packed  # hooks decode the weights of each block
    if demand.whole and not possible:
        raise ConfigError(
            "a model is whole on the gpu when every layer stays and is updated there, and "
            'activations are kept: set stronghold.resident_layers to "all", '
            'stronghold.resident_updates to "gpu" and stronghold.activations to "keep"'
        )
    return possible if demand.whole is None else demand.whole


def _offloaded(
    layout: ModelLayout, demand: Demand, activations: tuple[str, ...]
) -> dict[int, OffloadedActivations]:
    """The activations that wait on the host, of the blocks that have some there."""
    offloaded: dict[int, OffloadedActivations] = {}
    if not demand.work:
        return offloaded
    for index in layout.streamed:
        work = demand.work[index]
        level = activations[index]
        nbytes = work.moved_bytes(level)
        if nbytes:
            inputs_bytes = work.boundary_bytes if level in AGAIN else 0
            offloaded[index] = OffloadedActivations(nbytes=nbytes, inputs_bytes=inputs_bytes)
    return offloaded


def _reasons(
    layout: ModelLayout, demand: Demand, on_gpu: Layers, *, whole: bool
) -> tuple[str, ...]:
    reasons = []
    if demand.resident_layers and not whole:
        reasons.append(
            f"{demand.resident_layers} of {len(layout.streamed)} blocks stay on the gpu "
            f"({demand.why('resident_layers')})"
        )
    if whole:
        reasons.append("the model stays whole on the gpu: no hooks, no copies")
    elif on_gpu:
        why = demand.why("resident_updates")
        reasons.append(f"resident layers are updated on the gpu ({why})")
    return tuple(reasons)
