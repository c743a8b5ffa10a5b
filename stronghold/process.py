"""Processes: which one an object belongs to, and whether that one still runs.

Owns the identity of a process, which those that wait for another one ask for. Owns the contract of
the processes of one node that work on one model (`Neighbours`), how a process writes a file that
others read, and how a temporary change ends when Ctrl-C comes. Any thread may enter.

[Note: identity] The kernel gives a process's number to later processes again, so its start belongs
to it. Both mean something in one PID name space of one boot alone: two containers on one kernel
have equal numbers. Of a process in another name space, or on another machine, nothing can be known:
it may run.

[Note: forked children] A forked child inherits an engine's objects without its threads, and without
the memory of its layers: what it waited for would never come, and what it read would end it. So
whatever uses an engine asks `check_not_forked` first, and whatever ends one does nothing there.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from stronghold.errors import ConfigError

Result = TypeVar("Result")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Neighbours:
    """The processes of one node that work on one model, this one `index` of `count`: how they do
    one after the other what would disturb them at once, and how all learn of it when one fails.
    Every process of every node makes the same calls, on its training thread. This class is of a
    process that is alone; `distributed.process_groups` has that of several."""

    index = 0
    count = 1

    def of_node(self, mine: Result) -> list[Result]:
        """The objects of this node's processes, in order."""
        return [mine]

    def of_all(self, mine: Result) -> list[Result]:
        """The objects of all nodes' processes."""
        return [mine]

    def barrier(self) -> None:
        """Return when every process of every node has called it."""

    def first(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on the first of this node, which alone does it; an error on all."""
        found = self.together(lambda: work() if self.index == 0 else None)
        return cast(Result, found[0])

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """What `work` returns on each of this node. When it raises on one, of whatever node, all
        raise: that one its own error, the others one that names its rank."""
        return [work()]


ALONE = Neighbours()


class Life(enum.Enum):
    """What is known of a process."""

    RUNS = enum.auto()
    ENDED = enum.auto()
    UNSEEN = enum.auto()  # of another machine or container: nobody here can tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of all machines. A field that the system does not give is "" or 0. `started`:
    clock ticks since boot; `namespace`: its PID name space."""

    boot: str
    namespace: int
    pid: int
    started: int

    @classmethod
    def this(cls) -> Process:
        pid = os.getpid()
        return cls(
            boot=boot_id(),
            namespace=pid_namespace(),
            pid=pid,
            started=start_of(pid) or 0,
        )

    @property
    def life(self) -> Life:
        """Whether it runs, as far as this process can tell ([Note: identity])."""
        this = Process.this()
        if not self.boot or (self.boot, self.namespace) != (this.boot, this.namespace):
            return Life.UNSEEN
        return Life.RUNS if state_of(self.pid, self.started) is not None else Life.ENDED


_here = os.getpid()  # asked at every operation, and the system takes a microsecond to say it


def _look_again() -> None:
    global _here
    _here = os.getpid()


os.register_at_fork(after_in_child=_look_again)


def forked_from(pid: int) -> bool:
    """Whether this process is another than `pid`, which made the object in question."""
    return _here != pid


def check_not_forked(pid: int, operation: str) -> None:
    """ConfigError in a forked child of `pid`, which made the engine ([Note: forked children])."""
    if _here != pid:
        raise ConfigError(
            f"{operation}: this engine belongs to the parent process ({pid}), from which this one "
            f"({_here}) was forked: a child has neither its threads nor the memory of its "
            "layers. Use it in the parent and give the child copies of what it needs, or "
            "initialize an engine of the child's own"
        )


def state_of(pid: int, started: int) -> str | None:
    """The letter by which the kernel names the state of a process of this name space, "?" where it
    hides it; None when the process has ended, reaped or not."""
    fields = _stat(pid)
    if fields is None:
        return "?" if _exists(pid) else None
    state, begun = fields[0], int(fields[19])
    return state if begun == started and state not in "ZX" else None


def start_of(pid: int) -> int | None:
    """When a process of this name space started; None where there is none, or nobody says."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def boot_id() -> str:
    """What tells this boot of this machine from all others; "" where nobody says."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def pid_namespace() -> int:
    """The number of this process's PID name space: on one boot no two that live have the same."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def run_and_restore(work: Callable[[], Result], restore: Callable[[], object]) -> Result:
    """Call `work`, then `restore`, however `work` ends.

    A KeyboardInterrupt may come between any two bytecodes, also of `restore`, which then runs again
    from its beginning. A context manager would not do: an interrupt can come before its exit, which
    then waits until the traceback is gone.
    """
    try:
        try:
            return work()
        finally:
            restore()
    except BaseException:
        restore()
        raise


def partial_of(path: Path) -> Path:
    """Where this process writes a file before it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all, making the directories that are missing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(target)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _stat(pid: int) -> list[str] | None:
    try:
        stat = Path(f"/proc/{pid:d}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # the name before it may hold anything


def _exists(pid: int) -> bool:
    """Of a process whose state is hidden from us (hidepid)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True
