"""Imports stronghold in every Python below `stronghold launch`, where `deepspeed.initialize` obeys
a config's section from then on.

Python imports a module of this name at start, from the first directory of PYTHONPATH that has one.
Costs a process that never imports deepspeed next to nothing; a Python of another environment goes
without. A sitecustomize that was there before runs as if this one were not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next_sitecustomize() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


with contextlib.suppress(ImportError):
    import stronghold  # noqa: F401
_run_the_next_sitecustomize()
