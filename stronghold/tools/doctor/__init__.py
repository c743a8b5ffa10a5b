"""`stronghold doctor`: what this machine can do, and what is wrong with it.

`selftest` is `stronghold test`. It is imported on its own, because it imports DeepSpeed.
"""

from __future__ import annotations

from stronghold.tools.doctor.findings import Findings, Problem, table
from stronghold.tools.doctor.measure import examine, gpu_name

__all__ = ["Findings", "Problem", "examine", "gpu_name", "table"]
