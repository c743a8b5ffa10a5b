"""Every Python process with this folder in PYTHONPATH has stronghold's plugin: TRL's scripts, too.

The plugin waits until DeepSpeed is imported. A script without a DeepSpeed config stays plain.
"""

import stronghold  # noqa: F401
