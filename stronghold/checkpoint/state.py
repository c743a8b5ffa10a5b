"""What a checkpoint holds beside tensors: random states, the schedule of learning rates, the
client's own.

Owns the file under DeepSpeed's name for a model's state, a pickle as there. The training thread
alone enters.
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

from stronghold.checkpoint.tensorfile import HeldFile
from stronghold.device.base import Device
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
    """`scheduler`, `loader`: state dicts, or None where there is none. `client`: what the caller
    gave. `loss_scale`: the optimizer's scaler, or None. `random`: None in an imported checkpoint;
    `random_of_ranks`: of every rank, `random` being the first's."""

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
        "device": device.random_state(),
    }


def restore_random_states(states: dict[str, Any] | None, device: Device) -> None:
    """Set every generator; one that the checkpoint does not have is left."""
    if states is None:
        return
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        device.set_random_state(states["device"])


def pack(
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


def unpack(file: HeldFile, *, trusted: bool) -> ClientState | None:
    """Read the file back; CheckpointError when it cannot be, or holds other things than `pack` put
    there. No code of the file's runs where torch can do without (`weights_only`): only objects of
    own classes in a client state, a schedule or a data loader need it. Such a file is unpickled as
    DeepSpeed's are when it is `trusted`; else None, and the log says what is not read."""
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
    """Which type it is that torch's safe reader refuses, or what else it says."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else next(iter(str(error).splitlines()), repr(error))


def _load(file: HeldFile, *, weights_only: bool) -> Any:
    # What NumPy's generator state is made of; the names are those of NumPy 2 and of NumPy 1.
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
    found = ClientState(**{name: stored.get(key) for key, (name, _) in STORED.items()})
    for key, number in (found.loss_scale or {}).items():
        if not isinstance(number, int | float):
            raise ValueError(f"loss_scaler.{key}: got {number!r}, expected a number")
    for states in (found.random, *(found.random_of_ranks or ())):
        if states is not None:
            random.Random().setstate(states["python"])
            np.random.RandomState().set_state(states["numpy"])
            torch.Generator().set_state(states["torch"])
            if not isinstance(states["device"], torch.Tensor | None):
                raise ValueError("random.device: expected a tensor")
    return found
