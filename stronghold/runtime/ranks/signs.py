"""Signs of life between nodes, whose ranks cannot look at each other's processes.

Owns a connection of its own to the store of the launch and the thread that uses it: a lane that
waits for the store must not make this rank look dead. Never judges: `watch` does, by the rows that
come from here. Every rank writes its own row; the first of a node reads those of all other nodes
into the page that the node's ranks have in common.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from torch.distributed import distributed_c10d

from stronghold.device.beat import Beat

INTERVAL_S = 1.0
RANKS_PER_INTERVAL = 256  # more ranks write less often: one process answers them all
STORE_TIMEOUT_S = 10.0


class Signs:
    """`rows[i]` are the rank at place i, `mine` this one, `local` those of this node; `name` is of
    this engine on every rank. `ended(i)` says that a process of this node has gone."""

    def __init__(
        self,
        name: str,
        rows: Any,
        mine: int,
        local: Sequence[int],
        ended: Callable[[int], bool],
    ) -> None:
        self.interval_s = INTERVAL_S * max(1.0, len(rows) / RANKS_PER_INTERVAL)
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
