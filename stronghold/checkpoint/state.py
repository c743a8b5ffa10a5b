"""The state file of a tag: everything that is no tensor.

Owns the pickle `mp_rank_00_model_states.pt`: schedules, random states, the loss scale, and the
caller's state. It runs no code of a file that torch's safe reader can read. The training thread
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

from stronghold.checkpoint.files import HeldFile
from stronghold.devices.device import Device, random_state, set_random_state
from stronghold.errors import CheckpointError

logger = logging.getLogger("stronghold")

NOTE = "the weights are in the .safetensors files beside this one: see `stronghold export`"
# The file's keys: DeepSpeed's for a schedule and a data loader.
FIELDS = {
    "lr_scheduler": "scheduler",
    "data_sampler": "loader",
    "loss_scaler": "loss_scale",
    "client_state": "client",
    "random": "random",
    "random_of_ranks": "random_of_ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    """Everything of a tag that is no tensor.

    scheduler, loader  state dicts of the schedule and of the data loader, or None
    client             the caller's state
    loss_scale         state of the optimizer's loss scaler, or None
    random             random states of the first rank
    random_of_ranks    random states of every rank, or None
    """

    scheduler: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    client: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    random: dict[str, Any]
    random_of_ranks: list[Any] | None = None


def random_states(device: Device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the device's random generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": random_state(device.torch_device),
    }


def restore_random_states(states: dict[str, Any] | None, device: Device) -> None:
    """Set every random generator. A generator without a saved state is left."""
    if states is None:
        return
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        set_random_state(device.torch_device, states["device"])


def pack_state(state: ClientState, counters: dict[str, int], versions: dict[str, str]) -> bytes:
    """Return the file's bytes. Later changes of live state dicts do not reach them."""
    fields = {key: getattr(state, name) for key, name in FIELDS.items()}
    stored = {
        **counters,
        "module": None,
        "note": NOTE,
        **fields,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": versions["deepspeed"],
    }
    buffer = io.BytesIO()
    torch.save(stored, buffer)
    return buffer.getvalue()


def unpack_state(file: HeldFile, *, trusted: bool) -> ClientState | None:
    """Read the file back.

    Torch's safe reader (`weights_only`) runs no code of the file. It refuses objects of the
    program's classes in a client state, a schedule or a data loader. A `trusted` file with such
    objects is unpickled, as DeepSpeed's are. For another one the result is None, with a warning.

    The caller has checked the file's checksums. Raises CheckpointError if an object of the
    program's cannot be made.
    """
    try:
        return _load(file, weights_only=True)
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
        return _load(file, weights_only=False)
    except Exception as error:  # code of the file may raise any exception
        raise CheckpointError(f"{file.path}: {error!r}") from error


def unsafe_reason(error: Exception) -> str:
    """Return the type that torch's safe reader refuses, or the first line of its message."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else next(iter(str(error).splitlines()), repr(error))


def _load(file: HeldFile, *, weights_only: bool) -> ClientState:
    # The classes of NumPy's generator state; the names are those of NumPy 2 and of NumPy 1.
    rebuild = np.empty(0).__reduce__()[0]
    arrays: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core")]
    allowed = [*arrays, *((rebuild, name) for name in names)]
    with open(file.system_path, "rb") as stream, torch.serialization.safe_globals(allowed):
        stored = torch.load(stream, map_location="cpu", weights_only=weights_only)
    return ClientState(**{name: stored[key] for key, name in FIELDS.items()})
