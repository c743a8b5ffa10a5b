"""A bar where the output is a terminal; a line every ten seconds where it is a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

LINES_APART_S = 10.0
BAR = "{desc}: {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
LINE = "{desc}: {n_fmt} of {total_fmt}, {remaining} left{postfix}"


class _Lines(tqdm):
    """A tqdm that writes its states as lines, and nothing to clear them."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if msg is None:
            self.fp.write(f"{self}\n")
            self.fp.flush()
        return False  # nothing is left on a line that tqdm would clear


def progress(
    total: int,
    name: str,
    *,
    done: int = 0,
    file: TextIO | None = None,
    clock: Callable[[], float] = time.time,
) -> tqdm:
    """A tqdm of `total` steps, `done` of which are over, with an estimate of the seconds left.

    A bar disappears at its end. Lines stay, and what ends within ten seconds has none.
    """
    file = sys.stderr if file is None else file
    # The estimate is from all steps so far: no single one decides it.
    common = {"total": total, "initial": done, "desc": name, "file": file}
    common |= {"smoothing": 0, "leave": False}
    if file.isatty():
        return tqdm(**common, bar_format=BAR, dynamic_ncols=True, mininterval=0.2)
    lines = _Lines(
        **common,
        bar_format=LINE,
        delay=LINES_APART_S,
        mininterval=LINES_APART_S,
        maxinterval=float("inf"),  # no thread of tqdm's writes between two steps
        miniters=1,
    )
    lines._time = clock
    lines.start_t = lines.last_print_t = clock()
    return lines
