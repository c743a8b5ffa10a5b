"""The thread that trains. While it lives, no other thread enters the engine.

[Note: two threads]
1. The training thread runs forward. Layers go to slots, and states of layers change without a lock.
2. Another thread reads a hidden parameter, or calls `state_dict()` or a part of the model.
3. Race: both threads fetch, release and bind layers. A layer is fetched twice, or loses its slot.
4. So every call that changes states of layers asks `check` first. It raises in the other thread.
5. Another thread may begin to train between two calls of the training thread (`training`). A server
   may run each step in the next thread of a pool. Within a call it is refused.
6. A read of a shown parameter asks nothing. The reader may see values of two steps, as in plain
   PyTorch. Training does not see the reader.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from stronghold.devices.threads import THREAD_PREFIX, check_not_forked
from stronghold.errors import ConfigError
from stronghold.private import NO_BACKWARD, backward_number


class TrainingThread:
    """The thread of the newest training forward, backward or step."""

    def __init__(self) -> None:
        self._thread: Any = None  # of `threading`
        self._num_calls = 0  # calls of that thread that are running
        self._lock = threading.RLock()  # after an interrupt its thread can enter again
        self._process = os.getpid()

    @contextlib.contextmanager
    def training(self, operation: str) -> Iterator[None]:
        """Context manager for a call that trains: the calling thread is the training thread.

        It has no effect in autograd's threads. Raises ConfigError within a call of another thread.
        """
        if backward_number() != NO_BACKWARD:
            yield
            return
        with self._lock:
            if self._num_calls:
                self.check(operation)
            if self._thread is not threading.current_thread():
                self._thread, self._num_calls = threading.current_thread(), 0
            self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    @property
    def is_another(self) -> bool:
        """True if the training thread lives, and another thread calls.

        Lanes and autograd's threads work for the training thread.
        """
        current, thread = threading.current_thread(), self._thread
        return bool(
            thread is not None
            and thread is not current
            and thread.is_alive()
            and not current.name.startswith(THREAD_PREFIX)
            and backward_number() == NO_BACKWARD
        )

    def check(self, operation: str) -> None:
        """Raise ConfigError if another thread trains, and in a forked child."""
        check_not_forked(self._process, operation)
        if self.is_another:
            raise ConfigError(
                f"{operation} in thread {threading.current_thread().name!r}, while thread "
                f"{self._thread.name!r} trains: layers come and go there. Let that thread call it "
                "between two steps, and hand copies over: engine.named_weights() has the newest "
                'weights. With "async_checkpoint": true, save_checkpoint writes beside training'
            )
