"""ArcticTraining's tests that train or save on a CPU.

It needs an older Transformers, and so an environment of its own: run scripts/conformance with the
Python of an environment that holds ArcticTraining and stronghold.
"""

from __future__ import annotations

from pathlib import Path

from conformance_suite.arctic.table import FILES, REASONS, ROWS
from conformance_suite.pytest_suite import PytestSuite

SUITE = PytestSuite(
    name="arctic",
    project="ArcticTraining",
    package="arctic_training",
    about="ArcticTraining's tests that train or save on a CPU, in an environment of its own.",
    page=(
        "The tests are those of its repository that need no GPU and make an engine. Each config\n"
        'gets `"stronghold": {"device": "emulated", "window": 1}`. The data sets and configs are\n'
        "small ones, made here, under the names that the tests ask for.\n"
        "DeepSpeed's CPU Adam, which would be compiled first, is `stronghold.CPUAdam`."
    ),
    marker=Path("tests") / FILES[0],
    folder=Path(),
    prefix="tests/",
    files=FILES,
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.arctic.plugin",
    options=("-m", "not gpu"),
    limit_s=3600.0,
)
