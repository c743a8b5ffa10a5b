"""The state of a device's generator of random numbers."""

from __future__ import annotations

import torch

_WITHOUT_GENERATOR = ("cpu", "meta")  # devices that use torch's CPU generator


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's generator, or None if it uses torch's CPU generator."""
    if device.type in _WITHOUT_GENERATOR:
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore the state that `random_state` returned, if the device has a generator."""
    if device.type not in _WITHOUT_GENERATOR:
        torch.get_device_module(device).set_rng_state(state, device)
