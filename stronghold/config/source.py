"""Reading of a config from a file, a dict, base64, or the launcher's arguments.

Owns reading alone, not meaning: the result is the user's text as a new dict. DeepSpeed's own parser
reads (Hjson, with an error for duplicate keys), so that every file that DeepSpeed accepts is
accepted. The errors are ours. The training thread enters, once per engine.
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
    """Read the config that `deepspeed.initialize(args, config=source)` would use, as a new dict.

    source  a path, a mapping, or base64 of JSON text. None: `args.deepspeed_config`, or the older
            `args.deepscale_config`
    args    the launcher's arguments

    Raises ConfigError if both or none are given, or if the config cannot be read.
    """
    from_args = _from_arguments(args)
    if from_args is not None and source is not None:
        raise ConfigError(
            f"two configs: args.deepspeed_config is {from_args!r} and initialize was called with "
            "config=. Keep one: drop --deepspeed_config from the command, or config= from the call."
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
    path = Path(source)
    exists = False
    # too long for a name, or with a null byte
    with contextlib.suppress(OSError, ValueError):
        exists = path.exists()
    if exists:
        return _parse(_read_text(path), f'config file "{path}"')
    decoded = _decode_base64(str(source))
    if decoded is not None:
        return _parse(decoded, "config given as base64")
    raise ConfigError(_missing_file(str(source)))


def section_enabled(config: Mapping[str, Any]) -> bool:
    """True if the config asks for stronghold: it has the section, and `enabled` is not false.

    Logs a top-level key that is nearly the section's name, once: DeepSpeed ignores it. Raises
    ConfigError if `enabled` is no boolean.
    """
    for key in config:
        is_other_key = key != SECTION and isinstance(key, str)
        if is_other_key and difflib.get_close_matches(key.lower(), [SECTION], cutoff=0.8):
            warn_once(f'config key "{key}" is ignored. Did you mean "{SECTION}"?')
    section = section_of(config)
    enabled = False if section is None else section.get("enabled")
    if enabled is None or enabled == "auto":
        return True
    if not isinstance(enabled, bool):
        raise ConfigError(f"{SECTION}.enabled: got {enabled!r}, expected true or false.")
    return enabled


def section_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section of the config as a mapping, or None if it is absent.

    `true` and `false` are short for an object with `enabled`. Raises ConfigError for other types.
    """
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


@functools.lru_cache(maxsize=1024)  # the cache lets each message through once
def warn_once(message: str) -> None:
    """Log a warning, once per process."""
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
    """The decoded text if it looks like an object. Many file names are base64 of other text."""
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> dict[str, Any]:
    """Parse the text of a config. `name` is for errors."""
    import hjson  # type: ignore[import-untyped]
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    if not text.strip():
        raise ConfigError(
            f'{name} is empty: write at least {{"train_micro_batch_size_per_gpu": 1}}.'
        )
    try:
        json_error = _json_error(text)
        parsed = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except hjson.HjsonDecodeError as error:
        hjson_error = (error.lineno, error.colno, error.msg)
        line, column, reason = hjson_error if json_error is None else json_error
        raise ConfigError(_not_json(name, text, line, column, reason)) from error
    except RecursionError as error:
        raise ConfigError(f"{name}: {_TOO_DEEP}.") from error
    except ValueError as error:
        hint = " Keep one of each." if "Duplicate" in str(error) else ""
        raise ConfigError(f"{name}: {error}.{hint}") from error
    if isinstance(parsed, dict):
        _check_bounds(parsed, name)
        return parsed
    if json_error is not None:
        raise ConfigError(_not_json(name, text, *json_error))
    raise ConfigError(f"{name} holds {type(parsed).__name__}, expected a JSON object {{...}}.")


_TOO_DEEP = f"nested more than {MAX_LEVELS} levels deep, and no key needs that"


def _check_bounds(config: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError for values that later readers cannot handle: endless nesting, and integers
    of over 63 bits."""
    for _, dotted, value, level in _entries(config):
        if level > MAX_LEVELS:
            raise ConfigError(f"{name}: {dotted[:80]}...: {_TOO_DEEP}.")
        if isinstance(value, int) and value.bit_length() > 63:
            raise ConfigError(
                f"{dotted}: got an integer of {value.bit_length()} bits, expected at most 63."
            )


def check_key_types(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key anywhere in the config is no string, with a line for each.

    A dict can have such keys, JSON cannot.
    """
    lines = []
    for key, dotted, _, _ in _entries(config):
        if not isinstance(key, str):
            lines.append(
                f"{dotted}: got a key of type {type(key).__name__}, expected a string. Write it in "
                "quotes."
            )
    if lines:
        raise ConfigError("\n".join(sorted(lines)))


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any, int]]:
    """Yield (key, dotted name, value, level) for every value in nested mappings and lists.

    The key of a list's item is "".
    """
    pending: list[tuple[Any, str, Any, int]] = [("", "", config, 0)]
    while pending:
        entry = pending.pop()
        yield entry
        _, dotted, value, level = entry
        if isinstance(value, Mapping):
            for key, item in value.items():
                pending.append((key, f"{dotted}.{key}".lstrip("."), item, level + 1))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                pending.append(("", f"{dotted}[{number}]", item, level + 1))


def _json_error(text: str) -> tuple[int, int, str] | None:
    """(line, column, reason) of the text's first mistake as JSON. None for a comment: Hjson has it.

    Hjson's position is often far behind the mistake: an unquoted word ends with its line.
    """
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if text[error.pos : error.pos + 1] in ("#", "/"):
            return None
        return error.lineno, error.colno, error.msg
    return None


def _not_json(name: str, text: str, line: int, column: int, reason: str) -> str:
    lines = text.splitlines()
    excerpt = lines[line - 1].strip() if line <= len(lines) else ""
    return f"{name} is not JSON: line {line}, column {column}: {reason}, in: {excerpt[:80]}"


def _missing_file(source: str) -> str:
    if source.lstrip().startswith("{"):
        return "config is JSON text: pass the dict, json.loads(text), or the path of a file."
    path = Path(source[:4096])
    siblings: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        siblings = [sibling.name for sibling in path.absolute().parent.iterdir()]
    return (
        f'config file "{source[:200]}" does not exist (working directory {os.getcwd()}).'
        f"{did_you_mean(path.name, siblings)}"
    )
