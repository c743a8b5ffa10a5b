"""Where a layer's gradients and their fp32 sums lie in a gradient slot.

The thread that runs autograd's hooks enters. Everything here runs on the compute lane.
"""

from __future__ import annotations

import torch

from stronghold.memory.buffers import GradientSlot
from stronghold.memory.layer import LayerState
from stronghold.model.arrays import Section


def gradient_view(slot: GradientSlot, state: LayerState, position: int) -> torch.Tensor:
    """The place of a parameter's gradient, in its shape. Layers are alike, so each view is made
    once."""
    part, section = state.layout.slices[position], state.sections[position]
    key = True, section.byte_of(part.offset), section.dtype, part.shape
    view = slot.views.get(key)
    if view is None:
        view = slot.views[key] = state.maps["weights"].parameter(slot.gradients, part)
    return view


def sum_view(slot: GradientSlot, state: LayerState, position: int) -> torch.Tensor:
    """The place of a parameter's fp32 sum over the chunks of one call, in its shape. It is not the
    place of what other calls gave."""
    if state.sections[position].dtype is torch.float32 and position not in slot.arrived:
        return gradient_view(slot, state, position)
    if slot.sums is None:  # two gradients of one parameter are rare, and not planned
        numel = state.layout.trainable_numel
        slot.sums = torch.empty(numel, dtype=torch.float32, device=slot.gradients.device)
    part = state.layout.slices[position]
    key = False, part.offset, torch.float32, part.shape
    view = slot.views.get(key)
    if view is None:
        flat = slot.sums[part.offset : part.offset + part.numel]
        view = slot.views[key] = flat.view(part.shape)
    return view


def round_sums(slot: GradientSlot, state: LayerState) -> None:
    """The sums of a call are complete: round them, and add them to what other calls gave."""
    if not slot.arrived and slot.summing:
        for section in state.maps["weights"].sections:
            if section.begin < state.layout.trainable_numel and slot.sums is not None:
                _round_section(slot, state, section)
    for position, total in slot.summing.items():
        place = gradient_view(slot, state, position)
        if position in slot.arrived:
            place.add_(total.to(place.dtype))
        elif total is not place:
            place.copy_(total)
        slot.arrived.add(position)
    slot.summing.clear()


def _round_section(slot: GradientSlot, state: LayerState, section: Section) -> None:
    """One rounding for all parameters of a section, where none had come before."""
    if section.dtype is torch.float32:
        return
    assert slot.sums is not None
    place = state.maps["weights"].view(slot.gradients, section.begin, section.end)
    place.copy_(slot.sums[section.begin : section.end])
    rounded = [k for k in slot.summing if state.sections[k] is section]
    slot.arrived.update(rounded)
    for position in rounded:
        del slot.summing[position]
