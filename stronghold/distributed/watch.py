"""Which ranks are alive, and how far each has come.

Owns a page of memory that the ranks of a node have in common, with a row for each rank of all
nodes, and the thread that keeps this rank's row young; `Signs` brings the rows of other nodes.
Never ends a process: whoever waits for other ranks asks `check`, which raises RankError with the
names of those that will not come. Entered by the beat's thread, the lanes and the training thread;
a row has one writer per field.

[Note: silence] A rank is silent for as long as this process has seen its counter stand still.
Clocks are not compared, and a pause of this process itself (a debugger, a suspended machine) starts
the observation anew: else all ranks would give each other up when they wake. So does a pause of
the rank that reads what other nodes say, for what they say.

[Note: slow] A rank whose counter moves is alive. It may be slow for good reasons (a checkpoint, an
evaluation), so that who waits for it says its name now and then, and goes on waiting until the
process group's own time-out.

[Note: a circle] Ranks that call what all take part in unequally often may each wait in another
collective, for ever. A rank is stuck when a thread of the program's waits for a lane or for ranks,
every lane waits or has nothing to do, and each collective that it waits in lacks a rank, or has one
that came for another. Whoever computes, reads or writes is not, however long it takes, nor where
data is under way. When all are for `CIRCLE_S`, none will ever go on: each says so, and ends.

[Note: another node] Of a process on another node this one knows its row alone, which its own node's
ranks mark when it has ended. One that was the only rank of its node falls silent; a connection that
breaks at the same time shortens the wait for that, since live ranks speak every second.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
from torch.distributed import distributed_c10d

from stronghold.device.base import THREAD_PREFIX, WAITING, ThreadLane
from stronghold.errors import RankError
from stronghold.memory.slab import NodeMemory
from stronghold.native import naming_threads
from stronghold.process import Neighbours, forked_from, start_of, state_of

logger = logging.getLogger("stronghold")

INTERVAL_S = 0.5
CIRCLE_S = 10.0
MESSAGE_BYTES, WAITS_BYTES = 600, 160
PAUSE_S = 4 * INTERVAL_S
BROKEN_S = 2.0  # a process that is killed takes a moment to be gone
SIGNS_S = 1.0  # between what a rank says to other nodes
RANKS_PER_SIGN = 256  # more ranks speak less often: one process answers them all
STORE_TIMEOUT_S = 10.0
BEATS = (f"{THREAD_PREFIX}watch", f"{THREAD_PREFIX}signs")  # threads that others never wait for
ROW = np.dtype(
    [
        ("pid", np.int64),
        ("started", np.int64),  # of the process, in ticks since boot: its number may be used again
        ("beats", np.int64),
        ("signs", np.int64),  # times that it read what other nodes say
        ("arrived", np.int64, 5),  # collectives begun, by group
        ("stuck", np.int64),  # beats for which it could do nothing by itself
        ("waits", f"S{WAITS_BYTES}"),  # the collectives that it is in
        ("left", np.int64),
        ("ended", np.int64),  # another rank of its node says so
        ("failed", np.int64),
        ("message", f"S{MESSAGE_BYTES}"),
    ]
)


class Watch:
    """`ranks[i]` is the global rank at place i, on the node `nodes[i]`; `mine` is this one's place.
    `neighbours` are of these ranks. `silence_s`: how long one may be silent ([Note: silence])."""

    def __init__(
        self,
        ranks: Sequence[int],
        nodes: Sequence[str],
        local: Sequence[int],
        mine: int,
        silence_s: float,
        neighbours: Neighbours,
    ) -> None:
        self._ranks = ranks
        self._nodes = nodes
        self._mine_at = mine
        self._local = local
        self._silence_s = silence_s
        self._memory = NodeMemory("watch", len(ranks) * ROW.itemsize, neighbours)
        self._rows: Any = self._memory.bytes.numpy().view(ROW)
        self._mine = self._rows[mine]
        self.process = os.getpid()
        self._mine["pid"], self._mine["started"] = self.process, start_of(self.process) or 0
        now = time.monotonic()
        self._own_s = now
        self._reader = (-1, now)  # of the rank that reads what other nodes say
        self._seen = [(-1, now)] * len(ranks)
        self.on_loss: Callable[[], None] | None = None  # called once, by the beat's thread
        self._waits: list[tuple[str, Collection[int]] | None] = [None] * len(self._mine["arrived"])
        self._circle_said = ""
        self._signs: Signs | None = None
        if len(local) < len(ranks):
            name = str(neighbours.of_all(f"{nodes[mine]} {os.getpid()} {time.monotonic_ns()}")[0])
            self._signs = Signs(name, self._rows, mine, local, self._has_ended)
        neighbours.barrier()
        if self._signs is not None:
            self._signs.begin()
        self._beat = Beat("watch", INTERVAL_S, self._tick)
        atexit.register(_last_words, weakref.ref(self))

    def _tick(self) -> None:
        now = time.monotonic()
        paused = now - self._own_s > PAUSE_S
        self._own_s = now
        self._mine["beats"] += 1
        self._look_at_itself(paused)
        reads = int(self._rows[self._local[0]]["signs"])
        if reads != self._reader[0]:
            self._reader = (reads, now)
        speed_s = self._signs.interval_s if self._signs is not None else 0.0
        deaf = now - self._reader[1] > PAUSE_S + speed_s
        for i, (beats, _) in enumerate(self._seen):
            found = int(self._rows[i]["beats"])
            if found != beats or paused or (deaf and i not in self._local):
                self._seen[i] = (found, now)
        on_loss = self.on_loss
        # One that has closed its engine took part in all that it was asked for.
        if on_loss is not None and any(self._loss(i, self._silence_s) for i in self._others()):
            self.on_loss = None
            on_loss()

    def _look_at_itself(self, paused: bool) -> None:
        """Whether this rank can do nothing by itself ([Note: a circle])."""
        mine, waits = self._mine, [(k, *w) for k, w in enumerate(tuple(self._waits)) if w]
        lacking = bool(waits) and all(self._lacks(*each) for each in waits)
        stuck = lacking and not paused and _all_wait()
        words = " and ".join(each[1] for each in waits).encode()[:WAITS_BYTES]
        mine["stuck"] = (mine["stuck"] + 1 if words == mine["waits"] else 1) if stuck else 0
        mine["waits"] = words

    def _lacks(self, group: int, waits: str, ranks: Collection[int]) -> bool:
        """Whether one of `ranks` has not come to this collective, or came for another."""
        mark = waits.split()[-1]
        others = [self._waits_of(i) for i in self._others() if self._ranks[i] in ranks]
        elsewhere = any(mark in other.split() and waits not in other for other in others)
        return elsewhere or bool(self.behind(group, ranks))

    def _waits_of(self, i: int) -> str:
        return str(self._rows[i]["waits"].decode(errors="replace"))

    def _circle(self) -> str:
        """What to say where no rank will ever go on."""
        present = [i for i in range(len(self._ranks)) if not self._rows[i]["left"]]
        beats = min(CIRCLE_S, self._silence_s) / INTERVAL_S
        if not all(int(self._rows[i]["stuck"]) > beats for i in present):
            return ""
        waits = [f"{self._name(i)} in {self._waits_of(i)}" for i in present[:8]]
        return (
            f"the ranks wait for each other, each in what another does not come to: "
            f"{'; '.join(waits)}. Call forward, backward, step and what else all ranks take part "
            "in equally often on every rank, and in one order. Load the last checkpoint"
        )

    # -- asked by whoever waits -------------------------------------------------------------------
    def begin(self, group: int, operation: str, ranks: Collection[int]) -> None:
        """This rank begins its next collective of the group, of `ranks`."""
        self.check_self()
        self._mine["arrived"][group] += 1
        number = self._mine["arrived"][group]
        self._waits[group] = (f"{operation} #{group}.{number}", ranks)

    def end(self, group: int) -> None:
        """It has ended, or waits for nobody."""
        self._waits[group] = None

    def check_self(self) -> None:
        """RankError once this rank has failed: the others have ended, and two that each wait in
        another collective would wait for ever."""
        if self._mine["failed"]:
            raise RankError(
                f"this rank cannot go on ({self._mine['message'].decode(errors='replace')}), and "
                "the others have ended. Load the last checkpoint"
            )

    def check(
        self, operation: str, ranks: Collection[int], *, silence_s: float | None = None
    ) -> None:
        """RankError when a rank has ended, failed or fallen silent, or one of `ranks`, for which
        the operation waits, has closed its engine."""
        self.check_self()
        if circle := self._circle():
            self._circle_said = circle
            self.fail(circle)
            raise RankError(circle)
        limit_s = self._silence_s if silence_s is None else min(silence_s, self._silence_s)
        lost = [found for i in self._others() if (found := self._loss(i, limit_s))]
        lost += [
            f"{self._name(i)} has closed its engine, and will not come"
            for i in self._others()
            if self._rows[i]["left"] and self._ranks[i] in ranks
        ]
        if lost:
            raise RankError(
                f"{operation}: {'; '.join(lost)}. Load the last checkpoint, on as many ranks as "
                "are left"
            )

    def explain(
        self, operation: str, group: int, ranks: Collection[int], error: BaseException
    ) -> RankError:
        """What a failed collective means: the rank that has gone, as far as it can be told ([Note:
        another node])."""
        silence_s = None
        wait_s = BROKEN_S
        if self._signs is not None:
            silence_s = BROKEN_S + 3 * self._signs.interval_s
            wait_s = silence_s + BROKEN_S + self._signs.interval_s
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            try:
                self.check(operation, ranks, silence_s=silence_s)
            except RankError as found:
                return found
            time.sleep(0.05)
        behind = self.behind(group, ranks) or "unknown which"
        return RankError(f"{operation}: {error} (ranks that have not come: {behind})")

    def behind(self, group: int, ranks: Collection[int]) -> str:
        """Those of `ranks` that have begun fewer collectives of the group than this one."""
        mine = int(self._mine["arrived"][group])
        return ", ".join(
            self._name(i)
            for i in self._others()
            if self._ranks[i] in ranks and int(self._rows[i]["arrived"][group]) < mine
        )

    def _others(self) -> list[int]:
        return [i for i in range(len(self._ranks)) if i != self._mine_at]

    def _name(self, i: int) -> str:
        place = "" if i in self._local else f" on {self._nodes[i]}"
        return f"rank {self._ranks[i]} (process {self._rows[i]['pid']}{place})"

    def _has_ended(self, i: int) -> bool:
        """Of a rank of this node."""
        row = self._rows[i]
        return not row["left"] and state_of(int(row["pid"]), int(row["started"])) is None

    def _loss(self, i: int, silence_s: float) -> str:
        row, name = self._rows[i], self._name(i)
        if row["failed"]:
            return f"{name} failed: {row['message'].decode(errors='replace')}"
        if row["left"]:
            return ""
        state = state_of(int(row["pid"]), int(row["started"])) if i in self._local else ""
        if state is None or row["ended"]:
            return f"{name} has ended without a word: it was killed, perhaps for want of memory"
        silent_s = time.monotonic() - self._seen[i][1]
        if silent_s > silence_s:
            stopped = " and is stopped" if state in ("T", "t") else ""
            return f"{name} was silent for {silent_s:.0f} s{stopped}"
        return ""

    # -- what this rank says ----------------------------------------------------------------------
    def fail(self, message: str) -> None:
        """The others end with this message when they next wait."""
        self._mine["message"] = (self._circle_said or message).encode()[:MESSAGE_BYTES]
        self._mine["failed"] = 1
        if self._signs is not None:
            with contextlib.suppress(RuntimeError):  # the store may have ended before
                self._signs.say()

    def close(self) -> None:
        """This rank takes part no more. Safe to call twice; in a forked child nothing happens."""
        if forked_from(self.process):
            return
        self._mine["left"] = 1
        self._beat.close()
        if self._signs is not None:
            self._signs.close()
        self._memory.close()


def _all_wait() -> bool:
    """Whether a thread of the program's waits for a lane or for ranks, and every lane waits or has
    nothing to do."""
    names, waits = {thread.ident: thread.name for thread in threading.enumerate()}, False
    for ident, top in sys._current_frames().items():
        name = names.get(ident, "one of autograd's")
        frame: FrameType | None = top
        while frame is not None and frame.f_code not in WAITING:
            frame = frame.f_back
        if not name.startswith(THREAD_PREFIX):
            waits |= frame is not None
        elif frame is None and name not in BEATS and top.f_code is not ThreadLane._loop.__code__:
            return False
    return waits


def _last_words(watch: weakref.ref[Watch]) -> None:
    """The exception that ends the process, for the others' messages."""
    alive = watch()
    if alive is None or forked_from(alive.process):
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        alive.fail(f"{type(error).__name__}: {error}")


class Signs:
    """Signs of life between nodes, whose ranks cannot look at each other's processes: every rank
    writes its own row to the store of the launch, and the first of a node reads those of all other
    nodes. On a connection and a thread of its own: a wait for the store must not make this rank
    look dead. `rows[i]` are the rank at place i, `mine` this one, `local` those of this node;
    `name` is of this engine on every rank. `ended(i)` says that a process of this node has gone."""

    def __init__(
        self,
        name: str,
        rows: Any,
        mine: int,
        local: Sequence[int],
        ended: Callable[[int], bool],
    ) -> None:
        self.interval_s = SIGNS_S * max(1.0, len(rows) / RANKS_PER_SIGN)
        self._rows = rows
        self._mine = mine
        self._neighbours = [i for i in local if i != mine]
        self._far = [i for i in range(len(rows)) if i not in local] if mine == local[0] else []
        self._ended = ended
        self._keys = [f"stronghold/{name}/{i}" for i in range(len(rows))]
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        self.say()
        self._beat: Beat | None = None

    def begin(self) -> None:
        """Every rank has said something: go on, on a thread of this object's own."""
        self._beat = Beat("signs", self.interval_s, self._tick)

    def say(self) -> None:
        """Tell the other nodes this rank's row as it is now. RuntimeError without the store."""
        self._store.set(self._keys[self._mine], _packed(self._rows[self._mine]))

    def _tick(self) -> None:
        # Without the store the others' rows stand still, which says enough.
        with contextlib.suppress(Exception):
            self.say()
            for i in self._neighbours:
                if self._ended(i) and not self._rows[i]["ended"]:
                    self._rows[i]["ended"] = 1
                    self._store.set(self._keys[i], _packed(self._rows[i]))
            self._read()
        self._rows[self._mine]["signs"] += 1

    def _read(self) -> None:
        keys = [self._keys[i] for i in self._far]
        if keys and self._store.has_extended_api():
            found = self._store.multi_get(keys)
        else:
            found = [self._store.get(key) for key in keys]
        for i, data in zip(self._far, found, strict=True):
            row = np.zeros(1, dtype=self._rows.dtype)
            row.view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            self._rows[i] = row[0]

    def close(self) -> None:
        """End the thread, and tell the others this rank's last row. Safe to call twice."""
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.close()
            with contextlib.suppress(Exception):  # the store may have ended before
                self.say()


def _packed(row: Any) -> bytes:
    return bytes(row.tobytes()).rstrip(b"\0") or b"\0"


class Beat:
    """Calls `work` now and every `interval_s` seconds, on a thread of its own."""

    def __init__(self, name: str, interval_s: float, work: Callable[[], None]) -> None:
        self._end = threading.Event()
        self._interval_s = interval_s
        self._work = work
        self._thread = threading.Thread(target=self._loop, name=THREAD_PREFIX + name, daemon=True)
        with naming_threads(f"the {name} of this rank"):
            self._thread.start()

    def _loop(self) -> None:
        self._work()
        while not self._end.wait(self._interval_s):
            self._work()

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._end.set()
        self._thread.join()
