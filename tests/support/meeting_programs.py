"""A program of several ranks of which one kills itself before they train together: MOMENT says
when, VICTIM which. `python -m tests.support.meeting_programs FOLDER` is a launcher's way in."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

TIMEOUT_S = 8.0  # of silence, in these programs
LATE_S = 5.0  # after the other rank
MOMENTS = ("start", "rendezvous", "group up", "first agreement", "groups", "building")


def meet(folder: Path) -> None:
    from stronghold.distributed import meeting
    from stronghold.distributed import process_groups as group
    from stronghold.runtime import stack
    from tests.models import MODELS
    from tests.support.rank_models import engine_of, rank
    from tests.support.training import config

    moment = os.environ["MOMENT"]
    (folder / f"process-{rank()}").write_text(str(os.getpid()))

    def die(*_: Any, **__: Any) -> None:
        (folder / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("EARLY_GROUP"):
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()  # else the program's own call ends, with torch's error
        time.sleep(1)
    if rank() == int(os.environ["VICTIM"]):
        if moment in ("slow", "late"):
            while not (folder / f"waits-{1 - rank()}").exists():
                time.sleep(0.05)
            time.sleep(LATE_S)
        if moment in ("start", "group up", "late"):
            die()
        elif moment == "rendezvous":
            torch.distributed.init_process_group = die
        elif moment == "first agreement":
            group.this_node = die  # type: ignore[assignment]
        elif moment == "groups":
            make, made = torch.distributed.new_group, []

            def second(*arguments: Any, **options: Any) -> Any:
                made.append(make(*arguments, **options) if not made else die())
                return made[-1]

            torch.distributed.new_group = second
        elif moment == "building":
            stack.assemble = die  # type: ignore[assignment]
    wait = meeting.Attendance.wait

    def note_and_wait(*arguments: Any, **options: Any) -> None:
        path = folder / f"waits-{rank()}"
        if not path.exists():
            path.write_text(str(time.time()))
        wait(*arguments, **options)

    meeting.Attendance.wait = note_and_wait  # type: ignore[method-assign]
    model, _ = MODELS["gpt"]()
    section = {
        "device": "emulated",
        "rank_timeout_s": float(os.environ.get("TIMEOUT_S", TIMEOUT_S)),
    }
    engine = engine_of(model, config(section=section))
    engine.destroy()


if __name__ == "__main__":
    meet(Path(sys.argv[-1]))  # DeepSpeed puts --local_rank before it
