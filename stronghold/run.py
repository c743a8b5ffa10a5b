"""Starts a program under `stronghold.plugin`: a script in this process, or a command in its place.

`python -m stronghold.run script.py ARGS`, and the same behind a launcher: `deepspeed --module
stronghold.run script.py ARGS`, `accelerate launch --module stronghold.run script.py ARGS`,
`torchrun -m stronghold.run script.py ARGS`. `-m package.module` in place of the script runs a
module. Owns argv and the environment of what it starts; never returns to a caller's loop.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from stronghold.errors import ConfigError

USAGE = "usage: python -m stronghold.run [--local_rank=N] (SCRIPT | -m MODULE) [ARGS ...]"
# DeepSpeed's launcher puts the rank right behind the module that it starts: before the script.
RANK = re.compile(r"--local[-_]rank(=.*)?")
SHIM = Path(__file__).parent / "shim"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script or module that `argv` names as `__main__`, with the rest of `argv` as its own
    arguments.

    A `--local_rank` in front of it becomes its first argument, which is where it stands without us.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    rank = []
    while words and RANK.fullmatch(words[0]):
        rank.append(words.pop(0))
        if "=" not in rank[-1] and words:
            rank.append(words.pop(0))
    as_module = bool(words) and words[0] in ("-m", "--module")
    if as_module:
        words.pop(0)
    if not words or words[0].startswith("-"):
        raise SystemExit(USAGE)
    target, rest = words[0], words[1:]
    if not as_module and not os.path.exists(target):
        raise SystemExit(f"stronghold.run: {target!r} does not exist\n{USAGE}")
    from stronghold import plugin  # here, since `launch` should not wait for deepspeed

    plugin.enable()
    sys.argv = [target, *rank, *rest]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)  # as `python SCRIPT` has it
        runpy.run_path(target, run_name="__main__")


def launch(command: Sequence[str]) -> NoReturn:
    """Replace this process by `command`, in which every Python enables the plugin when it imports
    deepspeed.

    For programs that own their command line, and start others. ConfigError when there is no such
    program.
    """
    if not command:
        raise ConfigError("launch: no command; write `stronghold launch -- COMMAND ARGS`")
    try:
        os.execvpe(command[0], list(command), with_shim(os.environ))
    except OSError as error:
        raise ConfigError(f"launch: {command[0]}: {error.strerror}") from error


def with_shim(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the shim's directory first in PYTHONPATH, once."""
    inherited = environment.get("PYTHONPATH", "")
    others = [part for part in inherited.split(os.pathsep) if part and part != str(SHIM)]
    return {**environment, "PYTHONPATH": os.pathsep.join([str(SHIM), *others])}


if __name__ == "__main__":
    main()
