"""Forked children: an engine belongs to the process that made it.

[Note: forked children]

1. A process makes an engine: threads, and memory that a fork does not copy.
2. It forks. The child has the engine's objects, without threads and without layers' memory.
3. Hazard: a wait in the child would never end, and a read of a layer would end the child.
4. So each use of an engine calls `check_not_forked` first. Each end of an engine does nothing in a
   child (`forked_from`).
"""

from __future__ import annotations

import os

from stronghold.errors import ConfigError

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
