"""Exception types, and the words that their messages share.

Owns no state. Every other room may import it. Any thread may enter.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class ErrorPage(Enum):
    """The errors that have a page of their own: `docs/errors/VALUE.md`."""

    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    DISK = "disk"
    PINNED_MEMORY = "pinned_memory"
    NO_BLOCKS = "no_blocks"
    UNKNOWN_KEY = "unknown_key"
    TWO_OPTIMIZERS = "two_optimizers"
    OTHER_MODEL = "other_model"
    RANK_LOST = "rank_lost"
    KERNELS = "kernels"


_PACKAGE = Path(__file__).resolve().parent
# Where the pages lie: in an installed package, and in a clone.
_FOLDERS = (_PACKAGE / "pages" / "errors", _PACKAGE.parent / "docs" / "errors")


@cache  # a plan is found by trying some that do not fit
def page_link(page: ErrorPage) -> str:
    """Return the address of an error's page.

    The package's metadata knows the address of the documentation's site ("Documentation" in
    pyproject.toml). Without a site the address is that of the file that came with the package.
    """
    try:
        urls = metadata.metadata("stronghold").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    for url in urls:
        label, _, site = url.partition(",")
        if label == "Documentation":
            return f"{site.strip().rstrip('/')}/errors/{page.value}.html"
    name = f"{page.value}.md"
    folder = next((folder for folder in _FOLDERS if (folder / name).exists()), _FOLDERS[0])
    return (folder / name).as_uri()


def with_page(message: str, page: ErrorPage) -> str:
    """Return the message with a last line that leads to the page. A message has one such line."""
    link = page_link(page)
    return message if link in message else f"{message}\nSee {link}"


def with_unknown_key_page(message: str) -> str:
    """Return the message about keys of the config, with their page if one is unknown."""
    is_unknown = "unknown key." in message
    return with_page(message, ErrorPage.UNKNOWN_KEY) if is_unknown else message


class StrongholdError(Exception):
    """Base of every exception that stronghold raises on purpose.

    `page`: the page of this error, whose address ends the message. None: the class's page, if it
    has one.
    """

    page: ErrorPage | None = None

    def __init__(self, message: str = "", *, page: ErrorPage | None = None) -> None:
        self.page = page or self.page
        super().__init__(message if self.page is None else with_page(message, self.page))


class ConfigError(StrongholdError, ValueError):
    """The user's configuration, model or call is wrong. The message names the change to make."""


class BudgetError(ConfigError):
    """The plan does not fit a tier. Raised before any memory is allocated.

    `need_bytes`: the least size of the tier that suffices, or None if no size is known to.
    """

    def __init__(
        self, message: str, *, need_bytes: int | None = None, page: ErrorPage | None = None
    ) -> None:
        super().__init__(message, page=page)
        self.need_bytes = need_bytes


class CheckpointError(StrongholdError, OSError):
    """A checkpoint on disk is damaged, incomplete or foreign. The message names the file."""


class StateError(StrongholdError, RuntimeError):
    """An invariant of stronghold does not hold: a bug of ours."""


class RankError(StrongholdError, RuntimeError):
    """Another rank has ended, has stopped or has diverged. The message names it."""

    page = ErrorPage.RANK_LOST


class LaneError(StrongholdError, RuntimeError):
    """An operation on a lane failed. `__cause__` is the original exception.

    surfaced  True once it was raised where the program can catch it
    first     an earlier failure on a lane of the same device, or None
    """

    def __init__(self, lane: str, operation: str, cause: BaseException) -> None:
        super().__init__(f"{operation} failed on the {lane} lane: {type(cause).__name__}: {cause}")
        self.lane = lane
        self.operation = operation
        self.surfaced = False
        self.first: LaneError | None = None


def format_size(nbytes: float, *, round_up: bool = False) -> str:
    """Format a size: GiB with two decimals, MiB below 1 GiB, and whole bytes below 1 MiB.

    `round_up`: never below `nbytes`, for sizes that the user is asked to allow.
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            exact = nbytes * 100 / size
            hundredths = math.ceil(exact) if round_up else round(exact)
            return f"{hundredths / 100:.2f} {unit}"
    return f"{math.ceil(nbytes)} bytes"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean "x"?' for the closest known word, or '' if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


@dataclass(frozen=True, slots=True)
class Expected:
    """A condition on a config value.

    `fits`: True for a valid value. `words`: the condition in words, for the error.
    """

    fits: Callable[[Any], bool]
    words: str


def is_number(value: object) -> bool:
    """True for a finite number that is not negative. A boolean is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def is_boolean(value: object) -> bool:
    return isinstance(value, bool)


NUMBER = Expected(is_number, "a number >= 0")
BOOLEAN = Expected(is_boolean, "true or false")


def value_problem(key: str, value: object, expected: Expected) -> str | None:
    """The line of an error for the value of `key`, or None if the value is valid."""
    if expected.fits(value):
        return None
    hint = ""
    if isinstance(value, str) and expected is NUMBER:
        hint = " Write it without quotes."
        if value == "auto":
            hint = " Write a number: no framework replaced it."
    return f"{key}: got {value!r}, expected {expected.words}.{hint}"


def explain(error: ValidationError, whole: str, known: Iterable[str] = ()) -> str:
    """Describe the first error of a file's contents: its place, the value and the expectation.

    `whole`: name of the contents. `known`: names of the fields, for a "did you mean".
    """
    first, *more = error.errors(include_url=False)
    where = ".".join((whole, *map(str, first["loc"])))
    value, expected = first["input"], first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        problem = "missing"
    elif first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        problem = f"unknown key.{did_you_mean(str(first['loc'][-1]), known)}"
    elif isinstance(value, str | int | float | list | None):
        problem = f"got {value!r:.80}. {expected}"
    else:
        problem = expected
    message = f"{where}: {problem}"
    return f"{message}; {len(more)} more" if more else message
