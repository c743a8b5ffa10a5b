"""The state of a device's own generator of random numbers."""

from __future__ import annotations

import torch

_HAVE_NONE = ("cpu", "meta")  # torch's CPU generator is all


def random_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's own generator; None where torch's CPU generator is all."""
    if device.type in _HAVE_NONE:
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore the state that `random_state` returned; without effect where there is no generator of
    the device's own."""
    if device.type not in _HAVE_NONE:
        torch.get_device_module(device).set_rng_state(state, device)
