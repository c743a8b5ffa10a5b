"""Every Python process that has this folder in PYTHONPATH, and STRONGHOLD_PRETENDED set, finds the
pretended device: those that a script starts, too.

A process that needs torch as it is takes the variable out of its environment.
"""

import os

if os.environ.get("STRONGHOLD_PRETENDED"):
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    from tests.pretended import install

    extension = install.install()
    from tests.pretended import kernels, process_groups

    kernels.install(extension)
    process_groups.install()
