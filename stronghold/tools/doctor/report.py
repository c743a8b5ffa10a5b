"""`stronghold doctor --report`: the facts for a bug report, without private text.

Owns which facts are in the report, and the rules that replace private text. It measures nothing:
the profile is the one that `stronghold doctor` wrote before. It writes and prints nothing.

Every string passes `Scrubber.text`. A config passes `Scrubber.value`, which also looks at keys.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from stronghold import native
from stronghold.config.source import read_config
from stronghold.devices import cuda
from stronghold.errors import ConfigError
from stronghold.limits import host_limits
from stronghold.plan import machine
from stronghold.train.rates import cpu_name

PACKAGES = (
    "stronghold",
    "torch",
    "deepspeed",
    "numpy",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "lightning",
    "triton",
)
PRIVATE_NAME = re.compile(r"token(?!s|i)|secret|passw|credential|auth|user|api|key$", re.IGNORECASE)
# DeepSpeed's monitors: strings below them name teams, projects and jobs.
MONITORS = {"wandb", "tensorboard", "comet", "csv_monitor"}
PATH = re.compile(r"[^\s\"'`,;()\[\]=]*[/\\][^\s\"'`,;()\[\]=]*")
MAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)*")
# A key of a service: a known prefix, or 20 characters and more with letters and digits.
SECRET = re.compile(r"\b(?:hf_|sk-|gh[a-z]_|xox[a-z]-)[\w-]+|\b(?=\w*\d)(?=\w*[A-Za-z])\w{20,}\b")
SHORTEST_SECRET = 6  # shorter values of the environment would hide words


class Scrubber:
    """Replaces private text by a word in angle brackets."""

    def __init__(self, environment: Mapping[str, str], user: str, home: str, host: str) -> None:
        secrets = {
            value: "<secret>"
            for name, value in environment.items()
            if PRIVATE_NAME.search(name) and len(value) >= SHORTEST_SECRET
        }
        names = {home: "<path>", Path(home).name: "<user>", user: "<user>", host: "<host>"}
        private = {text: word for text, word in (secrets | names).items() if text.strip("/ ")}
        longest_first = sorted(private, key=len, reverse=True)
        self._words = [
            (re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE), private[text])
            for text in longest_first
        ]

    def text(self, text: str) -> str:
        """The text without secrets, addresses, paths, and names of the user and the host."""
        # Addresses come first: an address with the user's name in it must go as a whole.
        rules = ((MAIL, "<address>"), *self._words, (PATH, "<path>"), (SECRET, "<secret>"))
        for pattern, word in rules:
            text = pattern.sub(word, text)
        return text

    def value(self, value: Any, is_private: bool = False) -> Any:
        """Return a JSON value without private text. Values below a private key are removed."""
        if isinstance(value, Mapping):
            scrubbed = {}
            for key, inner in value.items():
                is_private_key = key in MONITORS or bool(PRIVATE_NAME.search(str(key)))
                scrubbed[self._key(str(key))] = self.value(inner, is_private or is_private_key)
            return scrubbed
        if isinstance(value, list | tuple):
            return [self.value(inner, is_private) for inner in value]
        if value is None or isinstance(value, bool):
            return value
        if is_private:
            return "<removed>"
        return self.text(value) if isinstance(value, str) else value

    def _key(self, key: str) -> str:
        """Return a key without private text.

        Long keys of a config look like secrets, so the rule of secrets does not apply to keys.
        """
        for pattern, word in ((MAIL, "<address>"), *self._words, (PATH, "<path>")):
            key = pattern.sub(word, key)
        return key


def report(config: str | os.PathLike[str] | None = None) -> str:
    """Return the report as JSON.

    `config` is the file of a DeepSpeed config. If it cannot be read, the report has the error.
    """
    facts = {
        "versions": _versions(),
        "machine": _machine(),
        "profile": _profile(),
        "config": None if config is None else _config(config),
        # Names alone: values may be paths.
        "environment": sorted(name for name in os.environ if name.startswith("STRONGHOLD_")),
    }
    scrubber = Scrubber(os.environ, _user(), str(Path.home()), platform.node())
    return json.dumps(scrubber.value(facts), indent=2)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions | {"cuda": torch.version.cuda}


def _machine() -> dict[str, Any]:
    gpus = [cuda.identity(index)[:2] for index in range(cuda.num_devices())]
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "kernels": f"{native.isa()} of {', '.join(native.isas())}",
        "gpus": [{"name": name, "memory_bytes": memory} for name, memory in gpus],
        "limits": dataclasses.asdict(host_limits()),
    }


def _profile() -> Any:
    try:
        profile = machine.find_profile()
    except ConfigError as error:
        return str(error)
    if profile is None:
        return "none: stronghold doctor measures it"
    return dataclasses.asdict(profile)


def _config(path: str | os.PathLike[str]) -> Any:
    try:
        return read_config(path)
    except (ConfigError, OSError) as error:
        return str(error)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return ""
