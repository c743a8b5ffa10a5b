"""The state file of a tag: everything that is no tensor.

Owns the pickle `mp_rank_00_model_states.pt`: schedules, random states, the loss scale, what the
caller gave. No code of a file runs where torch's safe reader suffices. The training thread alone
enters.
"""

from __future__ import annotations

import io
import logging
import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stronghold.checkpoint.files import HeldFile
from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.errors import CheckpointError

logger = logging.getLogger("stronghold")

NOTE = "the weights are in the .safetensors files beside this one: see `stronghold export`"
# Of each key in the file, which older ones may lack: the field, and the types that can be taken.
STORED: dict[str, tuple[str, tuple[type, ...]]] = {
    "lr_scheduler": ("scheduler", (dict, type(None))),
    "data_sampler": ("loader", (object,)),
    "loss_scaler": ("loss_scale", (dict, type(None))),
    "client_state": ("client", (dict,)),
    "random": ("random", (dict, type(None))),
    "random_of_ranks": ("random_of_ranks", (list, type(None))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    """Everything of a tag that is no tensor. `scheduler`, `loader`: state dicts, or None. `client`:
    the caller's. `loss_scale`: of the optimizer's scaler, or None. `random`: random states of the
    first rank, or None in an imported checkpoint; `random_of_ranks`: those of every rank."""

    scheduler: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    client: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    random: dict[str, Any] | None = None
    random_of_ranks: list[Any] | None = None


def random_states(device: Device) -> dict[str, Any]:
    """Python's, NumPy's, torch's and the device's generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": random_state(device.torch_device),
    }


def restore_random_states(states: dict[str, Any] | None, device: Device) -> None:
    """Set every generator; one that the checkpoint does not have is left."""
    if states is None:
        return
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        set_random_state(device.torch_device, states["device"])


def pack_state(
    state: ClientState,
    counters: dict[str, int],
    versions: dict[str, str],
    *,
    model_parallel_size: int = 1,
) -> bytes:
    """The file's contents, made now: later changes of live state dicts do not reach it."""
    stored = {
        **counters,
        "module": None,
        "note": NOTE,
        **{key: getattr(state, name) for key, (name, _) in STORED.items()},
        "dp_world_size": 1,
        "mp_world_size": model_parallel_size,
        "ds_version": versions["deepspeed"],
    }
    buffer = io.BytesIO()
    torch.save(stored, buffer)
    return buffer.getvalue()


def unpack_state(file: HeldFile, *, trusted: bool) -> ClientState | None:
    """Read the file back. Torch's safe reader (`weights_only`) runs no code of the file. It refuses
    objects of classes of the program's in a client state, a schedule or a data loader. Such a file
    is unpickled as DeepSpeed's are when it is `trusted`; else the result is None, with a warning.
    CheckpointError when the file is damaged, or holds other things than `pack_state` put there."""
    try:
        return _checked(_load(file, weights_only=True))
    except Exception as error:  # torch's own unpickler has no one type of error
        if not trusted:
            logger.warning(
                "%s is not read: code of its own would run, and weights need none. Load the whole "
                "checkpoint for the client state, if you trust it (%s)",
                file.path,
                unsafe_reason(error),
            )
            return None
    try:
        return _checked(_load(file, weights_only=False))
    except CheckpointError:
        raise
    except Exception as error:  # code of the file's raises what it likes
        raise CheckpointError(f"{file.path}: {error!r}") from error


def unsafe_reason(error: Exception) -> str:
    """The type that torch's safe reader refuses, or the first line of its message."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else next(iter(str(error).splitlines()), repr(error))


def _load(file: HeldFile, *, weights_only: bool) -> Any:
    # The classes of NumPy's generator state; the names are those of NumPy 2 and of NumPy 1.
    rebuild = np.empty(0).__reduce__()[0]
    arrays: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core")]
    allowed = [*arrays, *((rebuild, name) for name in names)]
    with file.reader() as stream, torch.serialization.safe_globals(allowed):
        return torch.load(stream, map_location="cpu", weights_only=weights_only)


def _checked(stored: Any) -> ClientState:
    """ValueError, KeyError or TypeError for what no save writes."""
    for key, (_, types) in STORED.items():
        if not isinstance(stored.get(key), types):
            raise ValueError(f"{key}: got {type(stored.get(key)).__name__}")
    state = ClientState(**{name: stored.get(key) for key, (name, _) in STORED.items()})
    for key, number in (state.loss_scale or {}).items():
        if not isinstance(number, int | float):
            raise ValueError(f"loss_scaler.{key}: got {number!r}, expected a number")
    for states in (state.random, *(state.random_of_ranks or ())):
        if states is not None:
            random.Random().setstate(states["python"])
            np.random.RandomState().set_state(states["numpy"])
            torch.Generator().set_state(states["torch"])
            if not isinstance(states["device"], torch.Tensor | None):
                raise ValueError("random.device: expected a tensor")
    return state
