"""States of the global random generators: torch's, the device's, Python's and NumPy's.

Owns the states that it has read, and nothing else. Entered by the training thread and by autograd's
thread.
"""

from __future__ import annotations

import ctypes
import random
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state

_MT19937_BYTES = 2500  # 624 words and a position


class _Generator(ABC):
    """One global generator."""

    @abstractmethod
    def read(self) -> Any:
        """Return its state."""

    @abstractmethod
    def write(self, state: Any) -> None:
        """Set its state."""

    @abstractmethod
    def has_moved(self, before: Any) -> bool:
        """True if its state differs from `before`."""


class _TorchGenerator(_Generator):
    def read(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def write(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def has_moved(self, before: torch.Tensor) -> bool:
        return not torch.equal(before, torch.default_generator.get_state())


class _DeviceGenerator(_Generator):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> torch.Tensor | None:
        """Return its state; None if the device has no generator of its own."""
        return random_state(self._device)

    def write(self, state: torch.Tensor) -> None:
        set_random_state(self._device, state)

    def has_moved(self, before: torch.Tensor) -> bool:
        state = self.read()
        assert state is not None
        return not torch.equal(before, state)


class _PythonGenerator(_Generator):
    def read(self) -> Any:
        return random.getstate()

    def write(self, state: Any) -> None:
        random.setstate(state)

    def has_moved(self, before: Any) -> bool:
        """Compare the position, the first word, and the second number of a pair.

        The position is the last word. It comes back after 624 draws, when all other words are new.
        """
        _, old_words, old_pair = before
        _, words, pair = random.getstate()
        is_same_position = old_words[-1] == words[-1] and old_words[0] == words[0]
        return bool(not is_same_position or old_pair != pair)


class _NumpyGenerator(_Generator):
    """NumPy's global generator.

    Its state takes 35 us to read, its raw bytes 0.5 us. Equal bytes mean an equal state, unless the
    second number of a pair waits in it: this number is drawn without a new position.
    """

    def __init__(self) -> None:
        self._raw = b""
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the state. It is the same object until a number is drawn."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        raw = b""
        if type(generator) is np.random.MT19937:
            raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if not raw or raw != self._raw or self._state["has_gauss"]:
            self._raw, self._state = raw, np.random.get_state(legacy=False)
        return self._state

    def write(self, state: dict[str, Any]) -> None:
        np.random.set_state(state)

    def has_moved(self, before: dict[str, Any]) -> bool:
        state = self.read()
        if before is state:
            return False
        old_pair = before["has_gauss"], before["gauss"]
        pair = state["has_gauss"], state["gauss"]
        return old_pair != pair or repr(before["state"]) != repr(state["state"])


_PROCESS_GENERATORS: tuple[_Generator, ...] = (
    _TorchGenerator(),
    _PythonGenerator(),
    _NumpyGenerator(),
)
States = list[tuple[_Generator, Any]]


class RandomStates:
    """The states of all global generators at the moment of construction."""

    def __init__(self, device: Device) -> None:
        self._states: States = []
        for generator in _PROCESS_GENERATORS:
            self._states.append((generator, generator.read()))
        device_generator = _DeviceGenerator(device.torch_device)
        state = device_generator.read()
        if state is not None:
            self._states.append((device_generator, state))

    def forget_unmoved(self) -> None:
        """Forget the states of generators that have drawn nothing since."""
        moved = []
        for generator, state in self._states:
            if generator.has_moved(state):
                moved.append((generator, state))
        self._states = moved

    def present(self) -> States:
        """Return these generators with their present states."""
        return [(generator, generator.read()) for generator, _ in self._states]

    def set(self) -> None:
        """Set the generators to these states."""
        set_states(self._states)


def set_states(states: States) -> None:
    """Set the generators to these states."""
    for generator, state in states:
        generator.write(state)
