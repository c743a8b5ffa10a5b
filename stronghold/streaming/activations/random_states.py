"""The states of the global random generators: torch's, the device's, Python's and NumPy's.

Owns nothing but states that were read. Entered by the training thread and by autograd's.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state

_MT19937_BYTES = 2500  # 624 words and a position


class _Numpy:
    """NumPy's global generator.

    Its state takes 35 us to read, its raw bytes 0.5 us. Where the bytes are the same the state is,
    unless the second number of a pair waits in it: that number is drawn without a new position.
    """

    def __init__(self) -> None:
        self._raw = b""
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The state, which is the same object while nothing was drawn."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        raw = b""
        if type(generator) is np.random.MT19937:
            raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if not raw or raw != self._raw or self._state["has_gauss"]:
            self._raw, self._state = raw, np.random.get_state(legacy=False)
        return self._state

    def has_moved(self, before: dict[str, Any]) -> bool:
        now = self.read()
        pair = (before["has_gauss"], before["gauss"]) != (now["has_gauss"], now["gauss"])
        return before is not now and (pair or repr(before["state"]) != repr(now["state"]))


class _Generator(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    has_moved: Callable[[Any], bool]


_numpy = _Numpy()


def _python_has_moved(before: Any) -> bool:
    """The position comes back after 624 draws alone, when all other words are new."""
    _, words, pair = before
    _, now, other_pair = random.getstate()
    return bool(words[-1] != now[-1] or words[0] != now[0] or pair != other_pair)


_PROCESS = (
    _Generator(
        torch.default_generator.get_state,
        torch.default_generator.set_state,
        lambda before: not torch.equal(before, torch.default_generator.get_state()),
    ),
    _Generator(random.getstate, random.setstate, _python_has_moved),
    _Generator(_numpy.read, np.random.set_state, _numpy.has_moved),
)


class RandomStates:
    """The states of all global generators at the moment when this is made."""

    def __init__(self, device: Device) -> None:
        self._states = [(generator, generator.read()) for generator in _PROCESS]
        state = random_state(device.torch_device)
        if state is not None:
            read: Any = functools.partial(random_state, device.torch_device)
            write = functools.partial(set_random_state, device.torch_device)
            has_moved = lambda was: not torch.equal(was, read())  # noqa: E731
            self._states.append((_Generator(read, write, has_moved), state))

    def forget_unmoved(self) -> None:
        """Keep the states of those alone that have drawn since."""
        self._states = [pair for pair in self._states if pair[0].has_moved(pair[1])]

    def present(self) -> list[tuple[_Generator, Any]]:
        """The same generators with the states that they have now."""
        return [(generator, generator.read()) for generator, _ in self._states]

    def set(self) -> None:
        """The generators go on from these states."""
        set_states(self._states)


def set_states(states: list[tuple[_Generator, Any]]) -> None:
    """The generators go on from these states."""
    for generator, state in states:
        generator.write(state)
