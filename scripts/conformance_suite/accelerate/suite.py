"""Accelerate's tests of DeepSpeed: those that DeepSpeed's own continuous integration runs."""

from __future__ import annotations

from pathlib import Path

from conformance_suite.accelerate import process
from conformance_suite.accelerate.table import FILES, REASONS, ROWS
from conformance_suite.pytest_suite import PytestSuite

PAGE = """\
The tests are those under `tests/deepspeed` of its repository, slow ones too. They run on the
pretended GPU of our tests. Each config gets `"stronghold": {"window": 1}`, so layers move. The
models are tiny ones with random weights, and the data set is small, under the names that the
tests load. Further packages are needed: `parameterized`, `pytest-order`, `evaluate`.

Differences in the tests' processes:

- A test of two GPUs launches two ranks. Each has a pretended GPU.
- `deepspeed.runtime.engine.DeepSpeedEngine` names this engine's class, which tests compare.
- DeepSpeed's `WarmupLR` takes `warmup_num_steps: 0` as 1. Newer versions of DeepSpeed refuse 0.
- `DeepSpeedCPUAdam` is `stronghold.CPUAdam`: DeepSpeed would compile its own.
- The tests `test_deepspeed_plugin`, `test_ds_config` and `test_init_zero3` make no engine. Their
  configs have no section. With it, Accelerate reads stage 2 instead of 3, and they would fail."""

SUITE = PytestSuite(
    name="accelerate",
    project="Accelerate",
    package="accelerate",
    about="Accelerate's tests of DeepSpeed, on a pretended GPU.",
    page=PAGE,
    marker=Path("tests") / "deepspeed" / "test_deepspeed.py",
    folder=Path(),
    prefix="tests/deepspeed/",
    files=FILES,
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.accelerate.plugin",
    environment={**process.environment(), "RUN_SLOW": "1"},
    limit_s=3600.0,
)
