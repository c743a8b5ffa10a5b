"""Reading of a config from a file, a dict, base64, or the launcher's arguments.

Owns reading alone, not meaning: the result is the user's text as a new dict. Text
that is no JSON is read as Hjson, as in DeepSpeed: comments are accepted, and a comma at the end.
Duplicate keys are an error. The training thread enters, once per engine.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import difflib
import functools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stronghold.errors import ConfigError, did_you_mean

SECTION = "stronghold"
Source = str | os.PathLike[str] | Mapping[str, Any] | None

logger = logging.getLogger("stronghold")


def read_config(source: Source, args: object | None = None) -> dict[str, Any]:
    """Read the config that `deepspeed.initialize(args, config=source)` would use, as a new dict.

    source  a path, a mapping, or base64 of JSON text. None: `args.deepspeed_config`, or
            its older name `args.deepscale_config`
    args    the launcher's arguments

    Raises ConfigError if both or none are given, or if the config cannot be read.
    """
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
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
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"config: got {type(source).__name__}, expected a path to a JSON file, a dict or a "
            "base64 string."
        )
    name = f'config file "{str(source)[:200]}"'
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no path
        decoded = _decode_base64(str(source))
        if decoded is None:
            raise ConfigError(f"{name} cannot be read: {error}.{_neighbour(source)}") from error
        name, text = "config given as base64", decoded
    return _parse(text, name)


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


def _decode_base64(text: str) -> str | None:
    """The decoded text if it looks like an object. Many file names are base64 of other text."""
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except ValueError:
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _neighbour(source: str | os.PathLike[str]) -> str:
    """A hint at a file beside it whose name is alike."""
    path = Path(source).absolute()
    with contextlib.suppress(OSError, ValueError):
        return did_you_mean(path.name, [sibling.name for sibling in path.parent.iterdir()])
    return ""


def _parse(text: str, name: str) -> dict[str, Any]:
    """Parse the text of a config. `name` is for errors."""
    import hjson  # type: ignore[import-untyped]
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys as unique

    try:
        try:
            parsed = json.loads(text, object_pairs_hook=unique)
        except json.JSONDecodeError as error:
            try:
                parsed = hjson.loads(text, object_pairs_hook=unique)  # comments, a last comma
            except hjson.HjsonDecodeError:
                if text[error.pos : error.pos + 1] in ("#", "/"):
                    raise
                # Hjson's position is often far behind the mistake: an unquoted word ends with its
                # line.
                raise error from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name}: got {type(parsed).__name__}, expected an object {{...}}.")
    return parsed
