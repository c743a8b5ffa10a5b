"""Identity of a node: processes that see each other in /proc can share memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Name of this boot of this machine; "" if the system does not give one."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def pid_namespace() -> int:
    """Number of this process's PID name space; 0 if the system does not give one.

    Two name spaces that live on one boot have different numbers.
    """
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
