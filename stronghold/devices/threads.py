"""Threads of this package, and what a forked child has not.

[Note: when the interpreter ends]
1. A program may never destroy its engine. Then the engine finishes its last save in `atexit`.
2. Before `atexit` the interpreter joins all threads but daemons, and ends the pools of
   `concurrent.futures`. These take no call any more.
3. So these threads are daemons. They wait for calls until the process has ended.

[Note: forked children]

1. A process makes an engine: threads, and memory that a fork does not copy.
2. It forks. The child has the engine's objects, without threads and without layers' memory.
3. Hazard: a wait in the child would never end, and a read of a layer would end the child.
4. So each use of an engine calls `check_not_forked` first. Each end of an engine does nothing in a
   child (`forked_from`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from stronghold.errors import ConfigError
from stronghold.native import naming_threads

THREAD_PREFIX = "stronghold:"  # of the name of this package's threads
Call = tuple[Future[Any], Callable[[], Any]]


class Workers(Executor):
    """Threads that run submitted calls, the first one first ([Note: when the interpreter ends]).

    The end of its `with` block waits for all calls. Raises what `naming_threads` raises if the
    system refuses a thread.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        with naming_threads(f"the {name} threads"):
            try:
                for k in range(num_threads):
                    thread = threading.Thread(
                        target=self._run, name=f"{THREAD_PREFIX}{name}_{k}", daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)
            except BaseException:
                self.shutdown()
                raise

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call. RuntimeError after `shutdown`."""
        if self._is_closed:
            raise RuntimeError("these threads take no call after shutdown")
        future: Future[Any] = Future()
        self._calls.put((future, partial(call, *args, **kwargs)))
        return future

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            future, call = queued
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del queued, future, call  # else they live until the next call comes

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after all calls, or after those that run. Safe to call twice."""
        self._is_closed = True
        while cancel_futures and not self._calls.empty():
            queued = self._calls.get()
            if queued is not None:
                queued[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def off_lanes(work: Callable[[], object]) -> None:
    """Run `work` on a thread that is no lane's, and drop its exceptions.

    The calling thread runs it, unless it belongs to this package. Then a new thread runs it, and
    the end of the process waits for that thread.
    """
    if threading.current_thread().name.startswith(THREAD_PREFIX):
        threading.Thread(target=_run_quietly, args=(work,), name=THREAD_PREFIX + "handover").start()
    else:
        _run_quietly(work)


def _run_quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        work()


class SwitchInterval:
    """Sets the interpreter's switch interval while lanes have threads.

    A lane's thread may wake while another thread runs pure Python (tokenising, collating). It then
    waits for the switch interval, by default 5 ms: ten kernels' time on a GPU. The end of the last
    lane restores the program's interval, unless the program has changed it meanwhile.
    """

    INTERVAL_S = 5e-4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_lanes = 0
        self._interval_before_s = 0.0
        self._interval_set_s = 0.0

    def begin(self) -> None:
        with self._lock:
            self._num_lanes += 1
            if self._num_lanes == 1:
                self._interval_before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._interval_before_s, self.INTERVAL_S))
                self._interval_set_s = sys.getswitchinterval()

    def end(self) -> None:
        with self._lock:
            self._num_lanes -= 1
            if self._num_lanes == 0 and sys.getswitchinterval() == self._interval_set_s:
                sys.setswitchinterval(self._interval_before_s)


switch_interval = SwitchInterval()


# -- forked children ------------------------------------------------------------------------------
# os.getpid takes a microsecond, and each operation asks.
_process_id = os.getpid()


def _update_process_id() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_update_process_id)


def forked_from(pid: int) -> bool:
    """True if this process is a forked child of process `pid`, which made the object."""
    return _process_id != pid


def check_not_forked(pid: int, operation: str) -> None:
    """Raise ConfigError in a forked child of `pid`, which made the engine.

    `operation`: the name of the refused call, for the message.
    """
    if forked_from(pid):
        raise ConfigError(
            f"{operation}: this engine belongs to the parent process ({pid}), from which this one "
            f"({_process_id}) was forked: a child has neither its threads nor the memory of its "
            "layers. Use it in the parent and give the child copies of what it needs, or "
            "initialize an engine of the child's own"
        )
