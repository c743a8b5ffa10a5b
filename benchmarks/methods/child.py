"""One method in a process of its own: builds it, runs the steps, writes what was measured as JSON.

    python -m methods.child METHOD TASK_JSON RESULT_FILE

Whatever happens becomes a result: running out of memory, a missing package, a failure. A kill by
the kernel leaves no file, which `process` reads as such.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from methods import resolve
from methods.base import Method, Unavailable
from methods.task import Data, Task

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def main() -> int:
    die_with_parent()
    faulthandler.enable()  # shows the stacks when `process` ends what takes too long
    name, text, result_file = sys.argv[1:]
    task = Task.from_json(text)
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    with running(name, task) as result:
        Path(result_file).write_text(json.dumps(result))
    return 0


@contextlib.contextmanager
def running(name: str, task: Task) -> Iterator[dict[str, Any]]:
    """What became of the method, which is closed at the end."""
    result: dict[str, Any] = {}
    method: Method | None = None
    try:
        method = resolve(name)(task)
        result = {"status": "ok", **train(method, task)}
    except BaseException as error:
        result = classify(error)
    yield result
    if method is not None:
        with contextlib.suppress(Exception):
            method.close()


def die_with_parent() -> None:
    """An interrupted comparison leaves no process on the GPU."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def train(method: Method, task: Task) -> dict[str, Any]:
    """Losses of all steps, and the seconds of those after the warm-up.

    A step's time runs from the end of one to the end of the next, where the loss of the step before
    was read: compute is never more than one step behind. The total ends when every update is done.
    """
    data = Data(task)
    # before the clock starts
    steps = [data.step(index) for index in range(task.num_steps)]
    losses: list[float] = []
    warmup_s: list[float] = []
    step_s: list[float] = []
    pending: torch.Tensor | None = None
    begun = previous = time.perf_counter()
    bar = tqdm(steps, desc=type(method).__name__, disable=None)
    for index, batches in enumerate(bar):
        if index == task.warmup:
            finish(method, task)
            begun = previous = time.perf_counter()
        loss = method.step(batches)
        if pending is not None:
            losses.append(pending.item())
        pending = loss
        now = time.perf_counter()
        (step_s if index >= task.warmup else warmup_s).append(now - previous)
        previous = now
    finish(method, task)
    wall_s = time.perf_counter() - begun
    assert pending is not None
    losses.append(pending.item())
    return {
        "losses": losses,
        "warmup_s": warmup_s,
        "step_s": step_s,
        "wall_s": wall_s,
        "num_parameters": method.num_parameters,
        "activations": method.activations,
        "device_peak_bytes": method.device_peak_bytes(),
        "device_reserved_peak_bytes": method.device_reserved_peak_bytes(),
        "link_bytes": method.link_bytes,
        **method.report(),
    }


def finish(method: Method, task: Task) -> None:
    method.synchronize()
    if task.machine == "cuda":
        torch.cuda.synchronize()


def classify(error: BaseException) -> dict[str, Any]:
    """The result row of an exception, judged by it and by what caused it."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for link in chain:
        text = f"{type(link).__name__}: {link}".splitlines()[0][:400]
        if isinstance(link, Unavailable):
            return {"status": "not here", "reason": str(link)}
        is_memory = isinstance(link, torch.OutOfMemoryError | MemoryError)
        if is_memory or type(link).__name__ == "BudgetError" or _says_memory(link):
            return {"status": "out of memory", "reason": text}
    text = f"{type(error).__name__}: {error}".strip()[:400]
    trail = "".join(traceback.format_exception(error))[-4000:]
    return {"status": "failed", "reason": text, "traceback": trail}


def _says_memory(error: BaseException) -> bool:
    message = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(w in message for w in OUT_OF_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
