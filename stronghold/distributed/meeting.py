"""How the ranks of a launch meet: through its store, before they have process groups and a watch.

Owns the wait for ranks that have not come yet, and for what they say until `Watch` begins. Never
makes a process group, and never ends a process. The training thread alone enters.

[Note: not there yet] Of a rank that has not come nothing is known but the environment in which a
launcher started it; other processes of its node can read that. So a rank is lost
  1. when its process was seen, here or in its message, and has ended: within seconds
  2. when it has shown no sign of life for `silence_s`: a running process that is not stopped is
     one, on the node where it can be seen
  3. when its process runs, and has not come for as long as torch's own time-out
A rank on another node, or one whose environment was changed after its start, shows no sign before
it comes. Torch waits in calls that cannot look around, for half an hour by default. Those calls
therefore come after all ranks have met here, and have `silence_s` as their time-out; torch's own
is put back when they return.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d

from stronghold.errors import RankError
from stronghold.process import Life, Process, launched_as, state_of

_torch: Any = torch.distributed  # its stubs leave the stores out

logger = logging.getLogger("stronghold")

LOOK_EVERY_S = 1.0  # at the process of a rank that is awaited
SAY_EVERY_S = 60.0  # which rank is awaited
SHORTEST_S, LONGEST_S = 0.005, 0.1  # between two questions to the store
BROKEN_S = 2.0  # a process that is killed takes a moment to be gone
ADDRESS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
JOINING = "stronghold.initialize"


class Attendance:
    """Which processes the ranks of this launch are, as far as this rank knows. `silence_s`: how
    long one may show no sign of life."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._processes: dict[int, Process] = {}

    def note(self, rank: int, process: Process) -> None:
        """The rank has named its process."""
        self._processes[rank] = process

    def wait(
        self,
        rank: int,
        has_come: Callable[[], bool],
        operation: str,
        *,
        begun_s: float,
        patience_s: float,
    ) -> None:
        """Return when `has_come()`. RankError when the rank is lost ([Note: not there yet]). This
        rank waits since `begun_s` (of `time.monotonic`), and for one that lives `patience_s`."""
        alive_s, say_s = begun_s, SAY_EVERY_S
        while not _soon(has_come):
            now = time.monotonic()
            if self._has_ended(rank) and not has_come():
                raise _lost(operation, f"{self._name(rank)} has ended")
            state = self._state(rank)
            if state is not None and state not in "Tt":
                alive_s = now
            silent_s, waited_s = now - alive_s, now - begun_s
            if silent_s > self.silence_s:
                stopped = " and is stopped" if state is not None else ""
                raise _lost(
                    operation,
                    f"{self._name(rank)} did not come, showed no sign of life for "
                    f"{silent_s:.0f} s{stopped}",
                    "If it comes later than the others for a good reason, set "
                    "stronghold.rank_timeout_s to more seconds than that takes",
                )
            if waited_s > patience_s:
                raise _lost(
                    operation,
                    f"{self._name(rank)} lives, but did not come within {waited_s:.0f} s, the "
                    "time-out of torch's process group",
                )
            if waited_s > say_s:
                say_s += SAY_EVERY_S
                logger.warning(
                    "%s waits for %s since %.0f s", operation, self._name(rank), waited_s
                )

    @contextlib.contextmanager
    def explaining(self, operation: str) -> Iterator[None]:
        """A call of torch's that fails here because a rank has gone raises RankError instead."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            if reason := self._reason(error):
                raise _lost(operation, reason) from error
            raise

    def _reason(self, error: RuntimeError) -> str:
        """Which rank has ended; "" when the error may be of another kind."""
        deadline = time.monotonic() + BROKEN_S
        while time.monotonic() < deadline:
            for rank in self._processes:
                if self._has_ended(rank):
                    return f"{self._name(rank)} has ended"
            time.sleep(LONGEST_S)
        if isinstance(error, _torch.DistError):
            return f"a rank, or the store of the launch, which rank 0 keeps, is gone ({error})"
        return ""

    def _state(self, rank: int) -> str | None:
        """The letter of the state in which the rank's process is; None where it is not seen."""
        process = self._processes.get(rank)
        if process is None:
            process = launched_as(rank)
            if process is None:
                return None
            self._processes[rank] = process
        if process.life is not Life.RUNS:
            return None
        return state_of(process.pid, process.started)

    def _has_ended(self, rank: int) -> bool:
        process = self._processes.get(rank)
        return process is not None and process.life is Life.ENDED

    def _name(self, rank: int) -> str:
        process = self._processes.get(rank)
        return f"rank {rank}" if process is None else f"rank {rank} (process {process.pid})"


class Meeting:
    """The ranks of a launch, this one `rank`, say objects to each other through `store`, where one
    that lives is waited for `patience_s`. RankError without the store."""

    def __init__(self, store: Any, rank: int, attendance: Attendance, patience_s: float) -> None:
        self._store = store
        self._rank = rank
        self._attendance = attendance
        self._patience_s = patience_s
        self._round = 0
        with attendance.explaining(JOINING):
            # How many meetings this rank has begun in this store: the same number on every rank.
            number = store.add(f"stronghold/meetings of {rank}", 1)
        self._name = f"stronghold/meeting {number}"

    def objects(self, members: Sequence[int], mine: object, operation: str) -> list[Any]:
        """The object of each of `members` (global ranks), who all call this. RankError when one is
        lost."""
        self._round += 1
        begun_s = time.monotonic()
        with self._attendance.explaining(operation):
            self._store.set(self._key(self._rank), pickle.dumps((Process.this(), mine)))
            return [self._object_of(rank, operation, begun_s) for rank in members]

    def _object_of(self, rank: int, operation: str, begun_s: float) -> Any:
        key = self._key(rank)
        self._attendance.wait(
            rank,
            lambda: bool(self._store.check([key])),
            operation,
            begun_s=begun_s,
            patience_s=self._patience_s,
        )
        process, said = pickle.loads(self._store.get(key))
        self._attendance.note(rank, process)
        return said

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._round}/{rank}"


def begin(init: Callable[[timedelta], object], attendance: Attendance, usual: timedelta) -> None:
    """Make the default process group by `init(time-out)`, when all ranks of the launch in the
    environment have met; later its time-out is the `usual` one. RankError when a rank is lost."""
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks == 1 or not all(os.environ.get(name) for name in ADDRESS):
        init(usual)
        return
    rank, patience_s = int(os.environ["RANK"]), usual.total_seconds()
    timeout = timedelta(seconds=attendance.silence_s)
    store = _open_store(rank, attendance, timeout, patience_s)
    own_keys = _torch.PrefixStore("stronghold", store)
    Meeting(own_keys, rank, attendance, patience_s).objects(range(num_ranks), None, JOINING)
    with attendance.explaining(JOINING):
        init(timeout)
    set_timeout(None, usual)
    distributed_c10d._get_default_store().set_timeout(usual)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Give `group` (None: the default one) this time-out from now on."""
    distributed_c10d._set_pg_timeout(timeout, group)


def _open_store(rank: int, attendance: Attendance, timeout: timedelta, patience_s: float) -> Any:
    """A connection of its own to the store that `init_process_group` will use. Rank 0 keeps it,
    or torchrun's agent; on rank 0 torch shares one server among all stores of a port."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if keeps:
        return _store(host, port, timeout, keeps=True)
    at = f"{JOINING} at {host}:{port}"
    answers = partial(_answers, host, port)
    attendance.wait(0, answers, at, begun_s=time.monotonic(), patience_s=patience_s)
    with attendance.explaining(at):
        return _store(host, port, timeout, keeps=False)


def _store(host: str, port: int, timeout: timedelta, *, keeps: bool) -> Any:
    return _torch.TCPStore(
        host,
        port,
        is_master=keeps,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), LOOK_EVERY_S):
        return True
    return False


def _soon(has_come: Callable[[], bool]) -> bool:
    """True if `has_come()` within `LOOK_EVERY_S`."""
    deadline, pause_s = time.monotonic() + LOOK_EVERY_S, SHORTEST_S
    while not has_come():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)
    return True


def _lost(operation: str, what: str, remedy: str = "") -> RankError:
    remedy = f" {remedy}." if remedy else ""
    return RankError(
        f"{operation}: {what}. Its own output has the cause, unless it was killed, perhaps for "
        f"want of memory.{remedy} Start all ranks again"
    )
