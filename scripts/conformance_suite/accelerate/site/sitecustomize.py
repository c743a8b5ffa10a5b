"""Every Python process with this folder in PYTHONPATH finds what Accelerate's tests need.

That is the process of the tests and each script that they launch, if STRONGHOLD_CONFORMANCE_DEVICE
is set. Launchers stay as they are: they only start processes.
"""

import os
import sys

LAUNCHERS = {"accelerate", "accelerate-launch"}
launches = not LAUNCHERS.isdisjoint(os.path.basename(word) for word in sys.orig_argv[:3])

if os.environ.get("STRONGHOLD_CONFORMANCE_DEVICE") and not launches:
    from conformance_suite.accelerate import process

    process.prepare()
