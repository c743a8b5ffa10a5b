"""Spans of work on lanes, written as Chrome trace JSON (chrome://tracing, ui.perfetto.dev).

Owns the recorded spans and their file. Never decides which spans are recorded. Never synchronises a
device: a lane that learns its times late records late. Every lane's thread and the training thread
enter. To record is one list append, which the interpreter makes atomic. Memory is bounded: the
newest spans stay. Times are `time.perf_counter()` seconds.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from stronghold.errors import ConfigError

STEP_LANE = "step"
LANES = (
    STEP_LANE,
    "compute",
    "fetch",
    "offload",
    "gradients",
    "update",
    "io",
)  # rows from top to bottom
# At least so many spans are kept, at most twice as many: 200 MB, some hundred steps of 32 blocks.
NEWEST_SPANS = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One operation on a lane. `name`: a verb and a layer or step, such as "fetch 3"."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The verb: "fetch" of "fetch 3"."""
        return self.name.split(" ", 1)[0]

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Trace:
    """Records spans in memory until `write`.

    rank       the process of the trace's rows
    newest     number of spans that are kept at least. Older ones are dropped
    recording  False: `record` drops every span, and costs one test
    """

    def __init__(
        self, rank: int = 0, newest: int = NEWEST_SPANS, *, recording: bool = True
    ) -> None:
        self.recording = recording
        self._rank = rank
        self._newest = newest
        self._origin_s = time.perf_counter()
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self._dropping = threading.Lock()

    def record(self, lane: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record an operation from `start_s` to `end_s` (`time.perf_counter()` seconds)."""
        if self.recording:
            self._spans.append((lane, name, start_s, end_s, args))
            if len(self._spans) > 2 * self._newest:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        with self._dropping:  # of two threads at once, the second has nothing to drop
            surplus = len(self._spans) - self._newest
            if surplus > self._newest:
                del self._spans[:surplus]

    def spans(self) -> list[Span]:
        """The spans that are kept, in the order of recording."""
        with self._dropping:
            kept = list(self._spans)
        return [
            Span(lane=lane, name=name, start_s=start_s, end_s=end_s, args=args)
            for lane, name, start_s, end_s, args in kept
        ]

    def write(self, path: str | Path) -> None:
        """Write the kept spans. A reader of `path` sees the old file or the new one."""
        spans = self.spans()
        lanes = lane_order(span.lane for span in spans)
        rows = {lane: row for row, lane in enumerate(lanes)}
        events = list(_row_names(rows, self._rank))
        for span in spans:
            events.append(_event(span, rows[span.lane], self._rank, self._origin_s))
        document = {"displayTimeUnit": "ms", "traceEvents": events}
        write_whole(path, json.dumps(document, separators=(",", ":")))


def file_of_rank(path: str | Path, rank: int) -> Path:
    """The trace file of a rank: `path` for the first, a name beside it for another."""
    target = Path(path)
    if rank == 0:
        return target
    return target.with_name(f"{target.stem}.rank{rank}{target.suffix}")


def open_path(path: str | Path, rank: int) -> Path:
    """The trace file of a rank, as an absolute path: the program may change its directory.

    Tries to write it, so that a wrong path fails before training and not after it. Raises
    ConfigError then.
    """
    target = file_of_rank(path, rank).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial_of(target).touch()
        partial_of(target).unlink()
    except OSError as error:
        raise ConfigError(
            f"stronghold.trace: {path} cannot be written ({error.strerror or error}). Name a file "
            "in a directory that can be written, or remove the key"
        ) from error
    return target


def read(path: str | Path) -> list[Span]:
    """Read the spans of a file that `Trace.write` made, sorted by start.

    Times are seconds since the trace was created. Raises ConfigError if the file is missing or is
    not a trace.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        events = document["traceEvents"]
        rows = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        spans = [_span(event, rows) for event in events if event["ph"] == "X"]
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"trace {path}: not a trace that stronghold wrote ({type(error).__name__}: {error}); "
            'set "trace" in the "stronghold" section to make one'
        ) from error
    return sorted(spans, key=attrgetter("start_s"))


def _span(event: Mapping[str, Any], rows: Mapping[tuple[Any, Any], str]) -> Span:
    """The span of an event. Raises LookupError or TypeError for a foreign event."""
    start_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    lane = rows[event["pid"], event["tid"]]
    return Span(lane=lane, name=event["name"], start_s=start_s, end_s=end_s, args=event["args"])


def lane_order(lanes: Iterable[str]) -> list[str]:
    """The distinct lanes from top to bottom: those of `LANES` first, others by name."""
    present = set(lanes)
    return [lane for lane in LANES if lane in present] + sorted(present - set(LANES))


def _row_names(rows: Mapping[str, int], rank: int) -> Iterator[dict[str, Any]]:
    """Yield metadata events: names of the process and its rows, and the order of the rows."""
    process = {"name": f"stronghold rank {rank}"}
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": process}
    for lane, row in rows.items():
        event = {"ph": "M", "pid": rank, "tid": row}
        yield {**event, "name": "thread_name", "args": {"name": lane}}
        yield {**event, "name": "thread_sort_index", "args": {"sort_index": row}}


def _event(span: Span, row: int, rank: int, origin_s: float) -> dict[str, Any]:
    """A complete event. Times are microseconds, with the clock's nanoseconds kept."""
    return {
        "ph": "X",
        "pid": rank,
        "tid": row,
        "cat": span.kind,
        "name": span.name,
        "ts": round((span.start_s - origin_s) * 1e6, 3),
        "dur": round(span.duration_s * 1e6, 3),
        "args": dict(span.args),
    }


# -- files that a reader sees whole or not at all --------------------------------------------------
def partial_of(path: Path) -> Path:
    """Name of the file that this process writes before it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file by a temporary name and a rename. Make missing directories."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(target)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
