"""Which of Accelerate's examples are run, and why some cannot apply to this engine."""

from __future__ import annotations

from conformance_suite.explanations import Row

REASONS = {
    "local sgd": "Accelerate itself refuses local SGD with DeepSpeed",
    "package": "needs a package that is not installed",
}

ROWS = (
    Row("*test_local_sgd", r"LocalSGD is supported only for CPUs and GPUs", "local sgd"),
    Row("*test_schedulefree", r"schedulefree", "package"),
    Row("*test_tracking", r"Skipped|test requires", "package"),
)
