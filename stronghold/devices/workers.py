"""Threads beside the caller's, for work that belongs to no device.

Owns no lane and no fence: a caller waits for the futures that it gets.

[Note: when the interpreter ends]
1. A program may never destroy its engine. Then the engine finishes its last save in `atexit`.
2. Before `atexit` the interpreter joins all threads but daemons, and ends the pools of
   `concurrent.futures`. These take no call any more.
3. So these threads are daemons. They wait for calls until the process has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from stronghold.devices.lane_name import THREAD_PREFIX
from stronghold.native import naming_threads

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
