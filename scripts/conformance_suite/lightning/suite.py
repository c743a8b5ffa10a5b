"""Lightning's tests of its DeepSpeed strategies, those of its Trainer and of Fabric."""

from __future__ import annotations

from pathlib import Path

from conformance_suite import pretended_gpu
from conformance_suite.lightning.table import FILES, REASONS, ROWS
from conformance_suite.pytest_suite import PytestSuite

SUITE = PytestSuite(
    name="lightning",
    project="Lightning",
    package="lightning",
    about="Lightning's tests of its DeepSpeed strategies, those of its Trainer and of Fabric.",
    page=(
        "The tests are those of its repository, on the pretended GPU. Each config of a strategy\n"
        'gets `"stronghold": {}`. Tests for two GPUs run on one rank. For evaluation without\n'
        "training Lightning makes a config of its own: there DeepSpeed's own engine runs."
    ),
    marker=Path("tests") / FILES[0],
    folder=Path("tests"),
    prefix="",
    files=FILES,
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.lightning.plugin",
    environment=pretended_gpu.environment(),
    options=("-k", "deepspeed", "-o", "addopts="),
    limit_s=3600.0,
)
