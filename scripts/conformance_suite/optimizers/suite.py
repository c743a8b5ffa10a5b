"""Optimizer tests of PyTorch, bitsandbytes and ColossalAI, with stronghold's CPU optimizers."""

from __future__ import annotations

from pathlib import Path

from conformance_suite.optimizers.table import FILES, REASONS, ROWS
from conformance_suite.pytest_suite import PytestSuite

SUITE = PytestSuite(
    name="optimizers",
    project="torch",
    title="Tests of optimizers",
    package="torch",
    about="Optimizer tests of PyTorch, bitsandbytes and ColossalAI, with CPUAdam and the others.",
    page=(
        "The tests are those of the repositories of PyTorch, bitsandbytes and ColossalAI:\n"
        "checkouts that lie side by side in one folder. Each project's optimizer under test is\n"
        "replaced by `CPUAdam`, `CPULion` or `CPUSGD`. Tests of other optimizers are left out.\n"
        "The packages `expecttest` and `lion-pytorch` are needed."
    ),
    marker=Path("pytorch") / "test" / "test_optim.py",
    folder=Path(),
    prefix="",
    files=FILES,
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.optimizers.plugin",
    # Each project's own settings of pytest are for its whole suite; one of them writes logs.
    options=("-c", "/dev/null", "--rootdir", "."),
)
