"""Which layers move, which stay, where each is updated, and the bytes that it takes on each tier.

Pure: no tensors, no threads. The byte counts are the formula that `memory.window`, `memory.host`
and `memory.resident` must meet exactly (a test compares them).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stronghold.errors import ConfigError
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.plan.demand import Demand, Gradients

MAX_GRADIENT_SLOTS = 2  # one gathers while the other drains


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Layers by where they are, as `place` says. `on_gpu` and `on_host`: where a layer is updated.
    `alone` and `turns`: whether its gradients gather in a slot of its own or in the shared ones.
    """

    demand: Demand
    gradients: Gradients
    blocks: list[LayerLayout]
    outside: list[LayerLayout]
    streamed: list[LayerLayout]
    kept: list[LayerLayout]
    on_gpu: list[LayerLayout]
    on_host: list[LayerLayout]
    alone: list[LayerLayout]
    turns: list[LayerLayout]
    whole: bool

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(layer.index for layer in (*self.outside, *self.kept))

    @property
    def most_gradient_slots(self) -> int:
        """How many shared slots are of use: none when no block that takes turns trains."""
        trainable = [layer for layer in self.turns if layer.trainable_numel]
        if not self.demand.training or not trainable:
            return 0
        # Gradients that are used on the gpu never drain: there is nothing to overlap.
        there = {layer.index for layer in self.on_gpu}
        return 1 if all(layer.index in there for layer in trainable) else MAX_GRADIENT_SLOTS

    def gpu_bytes(self, window: int, gradient_slots: int) -> dict[str, int]:
        """Every part of the gpu's peak, activations excepted, with so many slots."""
        size, training = self.demand.weight_bytes, self.demand.training
        trained = sum(layer.trainable_numel for layer in self.on_gpu) if training else 0
        alone = sum(layer.trainable_numel for layer in self.alone) if training else 0
        by_torch = sum(layer.num_trainable for layer in self.on_gpu) if training else 0
        accumulates = self.gradients is Gradients.ACCUMULATED
        largest_gathered = _largest(layer.trainable_numel for layer in self.turns)
        return {
            "weight slots": window * _largest(layer.numel for layer in self.streamed) * size,
            "gradient slots": gradient_slots * largest_gathered * size,
            "resident blocks": sum(layer.numel for layer in self.kept) * size,
            "outside the blocks": sum(layer.numel for layer in self.outside) * size,
            "gradients of resident layers": alone * size,
            "rest of the masters": trained * self.demand.low_bytes,
            "moments": trained * 8,
            "accumulated gradients": trained * 4 if accumulates else 0,
            "gradients (kept by torch)": by_torch * size if self.whole else 0,
            "gradients of other ranks": self._reduction_numel * size,
        }

    @property
    def _reduction_numel(self) -> int:
        if not (self.demand.training and self.demand.reduces_in_room):
            return 0
        return _largest(layer.trainable_numel for layer in self.on_host)


def place(layout: ModelLayout, demand: Demand, reasons: list[str]) -> Places:
    """Where `demand` puts the layers. ConfigError for what the model does not have."""
    blocks = [layer for layer in layout.layers if layer.streamed]
    outside = [layer for layer in layout.layers if not layer.streamed]
    kept = _kept(blocks, demand, reasons)
    on_gpu = [*outside, *kept] if demand.resident_updates == "gpu" else []
    there = {layer.index for layer in on_gpu}
    whole = _is_whole(layout, len(on_gpu), demand)
    if whole:
        reasons.append("the model stays whole on the gpu: no hooks, no copies")
    elif on_gpu:
        why = demand.why("resident_updates")
        reasons.append(f"resident layers are updated on the gpu ({why})")
    # Until the gate opens, gradients on the gpu stay where they were gathered. The gradients of
    # what is no block come early and late in backward.
    held = there if demand.gradients is Gradients.HELD else set[int]()
    alone = [layer for layer in layout.layers if not layer.streamed or layer.index in held]
    return Places(
        demand=demand,
        gradients=demand.gradients,
        blocks=blocks,
        outside=outside,
        streamed=blocks[: len(blocks) - len(kept)],
        kept=kept,
        on_gpu=on_gpu,
        on_host=[layer for layer in layout.layers if layer.index not in there],
        alone=[] if whole else alone,
        turns=[] if whole else [layer for layer in blocks if layer.index not in held],
        whole=whole,
    )


def _kept(blocks: list[LayerLayout], demand: Demand, reasons: list[str]) -> list[LayerLayout]:
    """The last blocks: forward needs the first ones first, and they may still be updated then."""
    wanted = demand.resident_layers or 0
    if wanted > len(blocks):
        raise ConfigError(
            f"stronghold.resident_layers: got {wanted}, but the model has {len(blocks)} blocks; "
            '"all" keeps every one'
        )
    if wanted:
        reasons.append(
            f"{wanted} of {len(blocks)} blocks stay on the gpu ({demand.why('resident_layers')})"
        )
    return blocks[len(blocks) - wanted :]


def _is_whole(layout: ModelLayout, num_on_gpu: int, demand: Demand) -> bool:
    possible = num_on_gpu == len(layout.layers) and {"keep"} >= set(policies_of(layout, demand))
    if demand.whole and not possible:
        raise ConfigError(
            "a model is whole on the gpu when every layer stays and is updated there, and "
            'activations are kept: set stronghold.resident_layers to "all", '
            'stronghold.resident_updates to "gpu" and stronghold.activations to "keep"'
        )
    return possible if demand.whole is None else demand.whole


def policies_of(layout: ModelLayout, demand: Demand) -> tuple[str, ...]:
    """Each layer's activation policy; what is no block keeps its own."""
    chosen = demand.activations or "keep"
    if not isinstance(chosen, str):
        return chosen
    blocks = layout.streamed
    kept = {*blocks[max(0, len(blocks) - demand.kept_activations) :]}
    return tuple(
        chosen if layer.streamed and layer.index not in kept else "keep" for layer in layout.layers
    )


def _largest(numels: Iterable[int]) -> int:
    return max(numels, default=0)
