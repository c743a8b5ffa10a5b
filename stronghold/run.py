"""Starts a script or a module under `stronghold.plugin`, in this process.

`python -m stronghold.run script.py ARGS`, and the same behind a launcher: `deepspeed --module
stronghold.run script.py ARGS`, `accelerate launch --module stronghold.run script.py ARGS`,
`torchrun -m stronghold.run script.py ARGS`. `-m package.module` in place of the script runs a
module: of a program that owns its command line, the one that its command starts. Owns argv of what
it starts.
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
    plugin.enable()
    sys.argv = [target, *rank, *rest]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)  # as `python SCRIPT` has it
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
