"""Where a config comes from: a file, a dict, base64, or the launcher's arguments.

Owns reading, and nothing about meaning: what comes out is the user's own words as a fresh dict.
Reading is DeepSpeed's (Hjson, and its refusal of duplicate keys), so that every file that DeepSpeed
accepts is accepted; the errors are ours. Called in the training thread, once per engine.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import difflib
import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stronghold.errors import ConfigError, did_you_mean

SECTION = "stronghold"
MAX_LEVELS = 50
Source = str | os.PathLike[str] | Mapping[str, Any] | None

logger = logging.getLogger("stronghold")


def read_config(source: Source, args: object | None = None) -> dict[str, Any]:
    """The config that `deepspeed.initialize(args, config=source)` would use, as a new dict:
    `source` is a path, a mapping, or base64 of JSON text, and without it `args.deepspeed_config`
    (or the older `args.deepscale_config`) is; both given is an error, as in DeepSpeed. ConfigError.
    """
    from_args = _from_arguments(args)
    if from_args is not None and source is not None:
        raise ConfigError(
            f"two configs: args.deepspeed_config is {from_args!r} and initialize was called with "
            "config=. "
            "Keep one: drop --deepspeed_config from the command, or config= from the call."
        )
    source = from_args if source is None else source
    if source is None or source == "":
        raise ConfigError(
            'no config: pass config="ds_config.json" (or a dict), or --deepspeed_config FILE.'
        )
    if isinstance(source, Mapping):
        _check_bounds(source, "config")
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"config: got {type(source).__name__}, expected a path to a JSON file, a dict or a "
            "base64 string."
        )
    path, exists = Path(source), False
    with contextlib.suppress(OSError, ValueError):  # too long for a name, or with a null byte
        exists = path.exists()
    if exists:
        return _parse(_read_text(path), f'config file "{path}"')
    decoded = _decode_base64(str(source))
    if decoded is not None:
        return _parse(decoded, "config given as base64")
    raise ConfigError(_missing_file(str(source)))


def section_enabled(config: Mapping[str, Any]) -> bool:
    """Whether the config asks for stronghold: its section is there, and `enabled` is not false. A
    top-level key that is nearly the section's name is logged, once: DeepSpeed ignores it."""
    for key in config:
        foreign = key != SECTION and isinstance(key, str)
        if foreign and difflib.get_close_matches(key.lower(), [SECTION], cutoff=0.8):
            warn_once(f'config key "{key}" is ignored. Did you mean "{SECTION}"?')
    section = section_of(config)
    enabled = False if section is None else section.get("enabled")
    if enabled is None or enabled == "auto":
        return True
    if not isinstance(enabled, bool):
        raise ConfigError(f"{SECTION}.enabled: got {enabled!r}, expected true or false.")
    return enabled


def section_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section as it stands there; `true` and `false` are short for an object that says so."""
    section = config.get(SECTION)
    if section is None or section == "auto":
        return None
    if isinstance(section, bool):
        return {"enabled": section}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'{SECTION}: got {section!r}, expected an object such as {{"enabled": true}}.'
        )
    return section


@functools.lru_cache(maxsize=1024)  # the cache is what makes it once
def warn_once(message: str) -> None:
    """Log a warning, but not twice."""
    logger.warning("%s", message)


def _from_arguments(args: object | None) -> Any:
    current = getattr(args, "deepspeed_config", None)
    older = getattr(args, "deepscale_config", None)
    if current is not None and older is not None:
        raise ConfigError(
            "two configs: --deepspeed_config and --deepscale_config are both given. Drop "
            "--deepscale_config."
        )
    return older if current is None else current


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f'config "{path}" is a directory, expected a JSON file.')
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f'config file "{path}" is not text in UTF-8 (byte {error.start}): save it as JSON in '
            f"UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(f'config file "{path}" cannot be read: {error.strerror}.') from error


def _decode_base64(text: str) -> str | None:
    """The decoded text if it looks like an object: many file names are base64 of something."""
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, what: str) -> dict[str, Any]:
    import hjson  # type: ignore[import-untyped]
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    if not text.strip():
        raise ConfigError(
            f'{what} is empty: write at least {{"train_micro_batch_size_per_gpu": 1}}.'
        )
    try:
        syntax = _json_error(text)
        parsed = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except hjson.HjsonDecodeError as error:
        place = (error.lineno, error.colno, error.msg) if syntax is None else syntax
        raise ConfigError(_not_json(what, text, *place)) from error
    except RecursionError as error:
        raise ConfigError(f"{what}: {_TOO_DEEP}.") from error
    except ValueError as error:
        hint = " Keep one of each." if "Duplicate" in str(error) else ""
        raise ConfigError(f"{what}: {error}.{hint}") from error
    if isinstance(parsed, dict):
        _check_bounds(parsed, what)
        return parsed
    if syntax is not None:
        raise ConfigError(_not_json(what, text, *syntax))
    raise ConfigError(f"{what} holds {type(parsed).__name__}, expected a JSON object {{...}}.")


_TOO_DEEP = f"nested more than {MAX_LEVELS} levels deep, which no key's value is"


def _check_bounds(config: Mapping[str, Any], what: str) -> None:
    """ConfigError for what breaks whoever reads on: endless nesting, integers of over 63 bits."""
    for _, dotted, value, level in _entries(config):
        if level > MAX_LEVELS:
            raise ConfigError(f"{what}: {dotted[:80]}...: {_TOO_DEEP}.")
        if isinstance(value, int) and value.bit_length() > 63:
            raise ConfigError(
                f"{dotted}: got an integer of {value.bit_length()} bits, expected at most 63."
            )


def check_key_types(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, a line for each, where a key anywhere in the config is no string: a dict
    can have such keys, JSON cannot."""
    lines = [
        f"{dotted}: got a key of type {type(key).__name__}, expected a string. Write it in quotes."
        for key, dotted, _, _ in _entries(config)
        if not isinstance(key, str)
    ]
    if lines:
        raise ConfigError("\n".join(sorted(lines)))


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any, int]]:
    """Every value in nested mappings and lists, after its key ("" for an item of a list) and its
    dotted name, and with its level."""
    found: list[tuple[Any, str, Any, int]] = [("", "", config, 0)]
    while found:
        _, dotted, value, level = entry = found.pop()
        yield entry
        if isinstance(value, Mapping):
            found += [(k, f"{dotted}.{k}".lstrip("."), v, level + 1) for k, v in value.items()]
        elif isinstance(value, list | tuple):
            found += [("", f"{dotted}[{k}]", v, level + 1) for k, v in enumerate(value)]


def _json_error(text: str) -> tuple[int, int, str] | None:
    """Where the text stops being JSON (line, column, reason); None at a comment, which Hjson has.
    Its own position is often far behind the mistake: an unquoted word goes to the end of its line.
    """
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if text[error.pos : error.pos + 1] in ("#", "/"):
            return None
        return error.lineno, error.colno, error.msg
    return None


def _not_json(what: str, text: str, line: int, column: int, reason: str) -> str:
    found = (text.splitlines()[line - 1 :] or [""])[0].strip()
    return f"{what} is not JSON: line {line}, column {column}: {reason}, in: {found[:80]}"


def _missing_file(source: str) -> str:
    if source.lstrip().startswith("{"):
        return "config is JSON text: pass the dict, json.loads(text), or the path of a file."
    path = Path(source[:4096])
    siblings: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        siblings = [entry.name for entry in path.absolute().parent.iterdir()]
    return (
        f'config file "{source[:200]}" does not exist (working directory {os.getcwd()}).'
        f"{did_you_mean(path.name, siblings)}"
    )
