"""A program of several ranks, of which rank VICTIM kills itself at MOMENT. A launcher enters by
`python -m tests.support.killed_programs FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from stronghold.checkpoint import saving
from stronghold.train.ranks import Ranks
from tests.models import MODELS, loss_of
from tests.support.rank_models import engine_of, rank
from tests.support.training import config

MOMENTS = ("start", "forward", "backward", "step", "save")
TIMEOUT_S = 2.0


def die(folder: Path, *_: Any, **__: Any) -> None:
    """End this process as the kernel does where memory is short."""
    (folder / "died").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path) -> None:
    """Two steps, in the second of which the victim dies, and a save."""
    (folder / f"process-{rank()}").write_text(str(os.getpid()))
    moment = os.environ["MOMENT"] if rank() == int(os.environ["VICTIM"]) else ""
    killed: Any = partial(die, folder)
    if moment == "start":
        killed()
    model, make_batch = MODELS["gpt"]()
    timeout_s = float(os.environ.get("TIMEOUT_S", TIMEOUT_S))
    section = {"device": "emulated", "window": 1, "rank_timeout_s": timeout_s}
    engine = engine_of(model, config(section=section))
    for step in range(2):
        last = step == 1
        if last and moment == "forward":
            model.blocks[1].register_forward_pre_hook(killed)
        if last and moment == "backward":
            next(model.blocks[0].parameters()).register_hook(killed)
        if last and moment == "step":
            Ranks.add = killed  # type: ignore[method-assign]
        engine.backward(loss_of(engine(**make_batch(2 * step + rank()))))
        engine.step()
    if moment == "save":
        saving.write_tensors = killed
    engine.save_checkpoint(folder / "saved")
    engine.destroy()
    assert not moment, f"{moment}: what kills the rank was never called"


if __name__ == "__main__":
    train(Path(sys.argv[-1]))  # DeepSpeed puts --local_rank before it
