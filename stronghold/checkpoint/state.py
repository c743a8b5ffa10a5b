"""What a checkpoint holds beside tensors: random states, the schedule of learning rates, the
client's own.

Owns the file under DeepSpeed's name for a model's state, a pickle as there. The training thread
alone enters.
"""

from __future__ import annotations

import io
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stronghold.device.base import Device
from stronghold.errors import CheckpointError

NOTE = "the weights are in the .safetensors files beside this one: see `stronghold export`"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    """`scheduler`, `loader`: state dicts, or None where there is none. `client`: what the caller
    gave. `loss_scale`: the optimizer's scaler, or None. `random`: None in an imported checkpoint.
    """

    scheduler: dict[str, Any] | None
    loader: dict[str, Any] | None
    client: dict[str, Any]
    loss_scale: dict[str, Any] | None
    random: dict[str, Any] | None
    random_of_ranks: list[Any] | None = None  # of every rank, `random` being the first's


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
        "lr_scheduler": state.scheduler,
        "data_sampler": state.loader,
        "loss_scaler": state.loss_scale,
        "client_state": state.client,
        "random": state.random,
        "random_of_ranks": state.random_of_ranks,
        "dp_world_size": 1,
        "mp_world_size": model_parallel_size,
        "ds_version": versions["deepspeed"],
    }
    buffer = io.BytesIO()
    torch.save(stored, buffer)
    return buffer.getvalue()


def unpack(path: Path) -> ClientState:
    """Read the file back; CheckpointError when it cannot be."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=False)
        return ClientState(
            scheduler=stored["lr_scheduler"],
            loader=stored["data_sampler"],
            client=stored["client_state"],
            loss_scale=stored["loss_scaler"],
            random=stored["random"],
            random_of_ranks=stored.get("random_of_ranks"),
        )
    except (pickle.UnpicklingError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
