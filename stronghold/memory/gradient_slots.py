"""Views of a gradient slot: the place of each parameter's gradient and of its fp32 sum.

Owns no memory. All work runs on the compute lane. The thread that runs autograd's hooks enters.
"""

from __future__ import annotations

import torch

from stronghold.memory.buffers import GradientSlot
from stronghold.memory.layer import LayerState
from stronghold.model.arrays import Section


def gradient_view(slot: GradientSlot, state: LayerState, position: int) -> torch.Tensor:
    """Return the place of one parameter's gradient: a view of `slot`, in the parameter's shape.

    Blocks have equal layouts, so each view is made once and kept in `slot.views`.
    """
    parameter = state.layout.slices[position]
    section = state.sections[position]
    key = True, section.byte_of(parameter.offset), section.dtype, parameter.shape
    view = slot.views.get(key)
    if view is None:
        view = state.maps["weights"].parameter(slot.gradients, parameter)
        slot.views[key] = view
    return view


def sum_view(slot: GradientSlot, state: LayerState, position: int) -> torch.Tensor:
    """Return the place of one parameter's fp32 sum over the chunks of one call, in its shape.

    An fp32 parameter sums in its gradient's place, unless an earlier call has left its gradient
    there.
    """
    is_fp32 = state.sections[position].dtype is torch.float32
    if is_fp32 and position not in slot.arrived:
        return gradient_view(slot, state, position)
    # a parameter got two gradients, which is rare and not planned
    if slot.sums is None:
        numel = state.layout.trainable_numel
        slot.sums = torch.empty(numel, dtype=torch.float32, device=slot.gradients.device)
    parameter = state.layout.slices[position]
    begin = parameter.offset
    key = False, begin, torch.float32, parameter.shape
    view = slot.views.get(key)
    if view is None:
        flat = slot.sums[begin : begin + parameter.numel]
        view = flat.view(parameter.shape)
        slot.views[key] = view
    return view


def round_sums(slot: GradientSlot, state: LayerState) -> None:
    """Round the complete fp32 sums of one call, and add them to the gradients of earlier calls."""
    is_first_call = not slot.arrived
    if is_first_call and slot.summing and slot.sums is not None:
        for section in state.maps["weights"].sections:
            if section.begin < state.layout.trainable_numel:
                _round_section(slot, slot.sums, state, section)
    for position, total in slot.summing.items():
        gradient = gradient_view(slot, state, position)
        if position in slot.arrived:
            gradient.add_(total.to(gradient.dtype))
        elif total is not gradient:
            gradient.copy_(total)
        slot.arrived.add(position)
    slot.summing.clear()


def _round_section(
    slot: GradientSlot, sums: torch.Tensor, state: LayerState, section: Section
) -> None:
    """Round all parameters of an empty section with one copy."""
    if section.dtype is torch.float32:
        return
    gradients = state.maps["weights"].view(slot.gradients, section.begin, section.end)
    gradients.copy_(sums[section.begin : section.end])
    rounded = [position for position in slot.summing if state.sections[position] is section]
    slot.arrived.update(rounded)
    for position in rounded:
        del slot.summing[position]
