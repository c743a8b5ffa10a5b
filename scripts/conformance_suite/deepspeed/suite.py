"""DeepSpeed's own unit tests that need no GPU, on one rank."""

from __future__ import annotations

from pathlib import Path

from conformance_suite.deepspeed.table import FILES, REASONS, ROWS
from conformance_suite.pytest_suite import PytestSuite

PARTITION_CHECKS = (
    "Where a test compares gradients,\nits checks of which parameters stage 3 has partitioned "
    "are left out: here none is."
)
SUITE = PytestSuite(
    name="deepspeed",
    project="DeepSpeed",
    package="deepspeed",
    about="DeepSpeed's own unit tests that need no GPU, on one rank.",
    page=(
        "The tests are those of its repository. One rank, no GPU,\n"
        '`"stronghold": {"device": "emulated"}` in each config. ' + PARTITION_CHECKS
    ),
    marker=Path("tests") / "unit" / "common.py",
    folder=Path("tests"),
    prefix="unit/",
    files=FILES,
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.deepspeed.plugin",
    limit_s=3600.0,
    has_engine=True,
)
