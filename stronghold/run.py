"""Starts a script or a module under `stronghold.plugin`, in this process.

Owns argv of the program that it starts. Use it alone or behind a launcher:

    python -m stronghold.run script.py ARGS
    deepspeed --module stronghold.run script.py ARGS
    accelerate launch --module stronghold.run script.py ARGS
    torchrun -m stronghold.run script.py ARGS

`-m package.module` in place of the script runs a module. A program with a command of its own has a
module that its command starts: name that one.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from stronghold import plugin

USAGE = "usage: python -m stronghold.run [--local_rank=N] (SCRIPT | -m MODULE) [ARGS ...]"
# DeepSpeed's launcher puts the rank right behind the module that it starts: before the script.
RANK = re.compile(r"--local[-_]rank(=.*)?")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script or module as `__main__`, and pass the rest of `argv` to it.

    `argv` defaults to this process's arguments. A `--local_rank` in front of the script becomes the
    script's first argument, as without this module. Raises SystemExit, with the usage, if `argv`
    names no script or module that exists.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    rank: list[str] = []
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
    plugin.enable()
    sys.argv = [target, *rank, *rest]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)  # as `python SCRIPT` has it
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
