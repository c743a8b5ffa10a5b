"""Ctrl-C at a random moment of training, saving or loading; then the checkpoint again, on the same
engine, and the losses of a run that nobody interrupted. A program of its own, since what it does to
its thread would meet pytest's code, too, and since it may hang:

    python -m tests.support.interrupts FOLDER FIRST COUNT

runs the seeds FIRST to FIRST + COUNT - 1, prints a line for each, and fails at the first that is
not exact.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.conftest import choose_kernels
from tests.support.checkpoints import assert_same, resume, session, snapshot, train
from tests.support.saved import has_saved_tensor_hooks

Round = Callable[[], None]
BEFORE, AFTER = 2, 3  # steps before the checkpoint, and after it
POLICIES = ("keep", "offload", "recompute")


def places(folder: Path) -> list[dict[str, Any]]:
    """Options of engines, one after the other: how updates come, and where layers are."""
    (folder / "nvme").mkdir(parents=True)
    modes: list[dict[str, Any]] = [
        {"clipping": 1.0},
        {"clipping": 0.0, "precision": "bf16"},
        {"clipping": 1.0, "accumulation": 2, "precision": "bf16"},
        {"clipping": 0.5, "precision": "fp16"},
    ]
    sections: list[dict[str, Any]] = [
        {"window": 1, "resident_layers": 0},
        {"window": 2, "resident_layers": 1, "resident_updates": "host"},
        {"window": 2, "resident_layers": 1, "resident_updates": "gpu"},
        {"resident_layers": "all"},
        {"window": 2, "nvme": {"path": str(folder / "nvme"), "spill": "weights"}},
    ]
    found = []
    for k, (section, mode) in enumerate(itertools.product(sections, modes)):
        policy = {} if section.get("resident_layers") == "all" else POLICIES[k % 3]
        more: dict[str, Any] = {"activations": policy} if policy else {}
        more["async_checkpoint"] = k % 2 == 1
        if mode["clipping"] == 0.0:
            more["early_layers"] = "all"
        found.append({**mode, "section": {**section, **more}})
    return found


class Stopped(KeyboardInterrupt):
    """The interrupt of this program, and no other."""


def at_bytecode(work: Round, number: int, *, within: str = "/stronghold/") -> int:
    """`work`, ended at this bytecode of the package, counted from 1; how many it has (0: none).
    `within`: what the path of a file has whose bytecodes count."""
    seen = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal seen
        if within not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            seen += 1
            if seen == number:
                sys.settrace(None)
                raise Stopped
        return trace

    # A signal never comes between a block and the exit of a context manager in C. This does, and
    # would leave torch without the functions of subclasses.
    functions_of_subclasses = torch._C._get_torch_function_state()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
        torch._C._set_torch_function_state(functions_of_subclasses)
    return seen


def at_signal(work: Round, after_s: float) -> None:
    """`work`, ended as Ctrl-C ends it."""

    def stop(*_: Any) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def at_thread(work: Round, after_s: float) -> None:
    """`work`, ended by another thread, as notebooks do it."""
    training, ended = threading.get_ident(), threading.Event()
    start, is_starting = threading.Thread.start, threading.Lock()

    def start_alone(thread: threading.Thread) -> None:
        # CPython gives a new thread the number of the one that makes it, until it runs. An
        # interrupt that comes then ends the new one, and `start` waits for it for ever.
        with is_starting:
            start(thread)

    def stop() -> None:
        if not ended.wait(after_s):
            with is_starting:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(training), ctypes.py_object(Stopped)
                )

    stopping = threading.Thread(target=stop)
    stopping.start()
    with patch.object(threading.Thread, "start", start_alone):
        try:
            work()
            for _ in range(100):  # what was sent at the very end is raised here
                time.sleep(0.0)
        finally:
            ended.set()
            stopping.join()


class Place:
    """Engines of one kind: the uninterrupted run, and how long an interrupted one has."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._options = options
        self._folder = folder
        self.checkpoint = folder / "checkpoint"
        with session(**self._options) as engine:
            self.first = train(engine, BEFORE)
            engine.save_checkpoint(self.checkpoint)
            self.losses = train(engine, AFTER)
            engine.wait_for_checkpoint()
            self.end = snapshot(engine)
        with session(**self._options) as engine:
            self._round(engine)
            resume(engine, self.checkpoint)
            begun = time.perf_counter()
            self._round(engine)
            self.seconds = time.perf_counter() - begun
        with session(**self._options) as engine:
            self.bytecodes = at_bytecode(lambda: self._round(engine), 0)

    def _round(self, engine: Any) -> None:
        train(engine, 2)
        engine.save_checkpoint(self._folder / "beside", tag="beside")
        train(engine, 1)
        engine.load_checkpoint(self.checkpoint)
        train(engine, 1)

    def run(self, number: int) -> str:
        """What this seed interrupted where, in words. AssertionError where losses or state
        differ."""
        chosen = random.Random(number)
        way = ("bytecode", "bytecode", "signal", "thread")[number % 4]
        with session(**self._options) as engine:
            fresh = chosen.random() < 0.5
            if not fresh:
                self._round(engine)
            where = self._interrupted(engine, way, chosen)
            resume(engine, self.checkpoint)
            losses = train(engine, AFTER)
            assert len(losses) == len(self.losses)
            for step, (loss, other) in enumerate(zip(losses, self.losses, strict=True)):
                assert torch.equal(loss, other), f"{where}: micro-batch {step} differs"
            assert_same(snapshot(engine), self.end)
        with session(**self._options) as engine:  # a later engine
            assert all(map(torch.equal, train(engine, BEFORE), self.first)), f"{where}: later"
        assert not has_saved_tensor_hooks()
        return f"{way}, {'fresh' if fresh else 'warm'}, in {where}"

    def _interrupted(self, engine: Any, way: str, chosen: random.Random) -> str:
        work = lambda: self._round(engine)  # noqa: E731
        try:
            if way == "bytecode":
                at_bytecode(work, chosen.randint(1, self.bytecodes))
            elif way == "signal":
                at_signal(work, chosen.uniform(1e-4, self.seconds))
            else:
                at_thread(work, chosen.uniform(1e-4, self.seconds))
        except Stopped as error:
            return _where(error)
        except Exception as error:  # what was interrupted may say it in its own words
            if not isinstance(error.__context__, Stopped):
                raise
            return f"{type(error).__name__} in {_where(error.__context__)}"
        return "nothing: it came too late, or where Python drops it"


def _where(error: BaseException) -> str:
    names, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/stronghold/" in code.co_filename:
            names.append(f"{Path(code.co_filename).stem}.{code.co_name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join([*names[:1], *names[-2:]]) or "the program"


def main() -> None:
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    all_places, made = places(folder), {}
    choose_kernels()
    for number in range(first, first + count):
        at = number // 4 * 7 % len(all_places)  # each is interrupted in every way
        if at not in made:
            own = folder / str(at)
            own.mkdir(parents=True)
            made[at] = Place(own, all_places[at])
        print(f"seed {number}, place {at}: {made[at].run(number)}", flush=True)


if __name__ == "__main__":
    main()
