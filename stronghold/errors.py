"""Exception types, and what their messages are made of. Every other room may import it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class StrongholdError(Exception):
    """Base of every exception that stronghold raises on purpose."""


class ConfigError(StrongholdError, ValueError):
    """The user's configuration, model or call is wrong; the message says what to change."""


class BudgetError(ConfigError):
    """The plan does not fit a tier; raised before anything is allocated.

    `need_bytes`: the least size of the tier that suffices; None where there is no such number.
    """

    def __init__(self, message: str, *, need_bytes: int | None = None) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes


class CheckpointError(StrongholdError, OSError):
    """A checkpoint on disk is damaged, incomplete or not ours; the message names the file."""


class StateError(StrongholdError, RuntimeError):
    """An invariant of stronghold's own does not hold: a bug of ours."""


class RankError(StrongholdError, RuntimeError):
    """Another rank has ended, is stopped or went another way; the message names it."""


class LaneError(StrongholdError, RuntimeError):
    """An operation on a lane failed; `__cause__` is the original exception."""

    def __init__(self, lane: str, operation: str, cause: BaseException) -> None:
        super().__init__(f"{operation} failed on the {lane} lane: {type(cause).__name__}: {cause}")
        self.lane = lane
        self.operation = operation
        self.surfaced = False  # whether it was raised where the program can catch it
        self.first: LaneError | None = None  # what had failed before on a lane of the same device


def format_size(nbytes: float, *, round_up: bool = False) -> str:
    """`nbytes` with two decimals in GiB, or in MiB below 1 GiB; as plain bytes below 1 MiB.
    `round_up`: the text never names less than `nbytes`, for sizes that you are asked to allow."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            hundredths = nbytes * 100 / size
            return f"{(math.ceil(hundredths) if round_up else round(hundredths)) / 100:.2f} {unit}"
    return f"{math.ceil(nbytes)} bytes"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' for the closest known word, or '' when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a value of the config must be: `fits` decides, `words` say it in an error."""

    fits: Callable[[Any], bool]
    words: str


def is_number(value: object) -> bool:
    """Finite, not negative, and no boolean."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


NUMBER = Expected(is_number, "a number >= 0")
BOOLEAN = Expected(lambda value: isinstance(value, bool), "true or false")


def value_problem(key: str, value: object, expected: Expected) -> str | None:
    """The line of an error for the value of `key`, or None where it fits."""
    if expected.fits(value):
        return None
    hint = ""
    if isinstance(value, str) and expected is NUMBER:
        hint = " Write it without quotes."
        if value == "auto":
            hint = " Fill it in: nothing replaced it."
    return f"{key}: got {value!r}, expected {expected.words}.{hint}"


def explain(error: ValidationError, whole: str, known: Iterable[str] = ()) -> str:
    """Where the first of what is wrong in a file's contents stands, what was got and what was
    expected."""
    first, *more = error.errors(include_url=False)
    where = ".".join((whole, *map(str, first["loc"])))
    value, expected = first["input"], first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        said = f"{where}: missing"
    elif first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        said = f"{where}: unknown key.{did_you_mean(str(first['loc'][-1]), known)}"
    elif isinstance(value, str | int | float | list | None):
        said = f"{where}: got {value!r:.80}. {expected}"
    else:
        said = f"{where}: {expected}"
    return f"{said}; {len(more)} more" if more else said
