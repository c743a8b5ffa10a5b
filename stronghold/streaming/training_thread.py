"""The thread that trains. While it lives, no other thread enters the engine.

[Note: two threads]
1. The training thread runs forward. Layers go to slots, and states of layers change without a lock.
2. Another thread reads a hidden parameter, or calls `state_dict()` or a part of the model.
3. Hazard: both fetch, release and bind layers. A layer is fetched twice, or its slot is taken away.
4. So every call that changes states of layers asks `check` first. It raises in the other thread.
5. A read of a shown parameter asks nothing. The reader may see values of two steps, as in plain
   PyTorch. Training does not see the reader.
"""

from __future__ import annotations

import threading
from typing import Any

from stronghold.devices.base import THREAD_PREFIX
from stronghold.errors import ConfigError
from stronghold.streaming.patches.autograd import NO_BACKWARD, backward_number


class TrainingThread:
    """The thread of the newest forward with a graph, backward or step."""

    def __init__(self) -> None:
        self._thread: Any = None  # of `threading`

    def enter(self) -> None:
        """The calling thread trains from now on, unless it is autograd's."""
        if backward_number() == NO_BACKWARD:
            self._thread = threading.current_thread()

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
        """Raise ConfigError if another thread trains."""
        if self.is_another:
            raise ConfigError(
                f"{operation} in thread {threading.current_thread().name!r}, while thread "
                f"{self._thread.name!r} trains: layers come and go there. Let that thread call it "
                "between two steps, and hand copies over: engine.named_weights() has the newest "
                'weights. With "async_checkpoint": true, save_checkpoint writes beside training'
            )
