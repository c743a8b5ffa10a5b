"""Transformers' tests of its Trainer under DeepSpeed, those of one process."""

from __future__ import annotations

from pathlib import Path

from conformance_suite import pretended_gpu
from conformance_suite.pytest_suite import PytestSuite
from conformance_suite.transformers.table import CLASSES, FILES, REASONS, ROWS

FOLDER = "tests/trainer/distributed/"

SUITE = PytestSuite(
    name="transformers",
    project="Transformers",
    title="Transformers' tests",
    package="transformers",
    about="Transformers' tests of its Trainer under DeepSpeed, those of one process.",
    page=(
        "The tests are those of its repository, of the classes for one process, on the pretended\n"
        'GPU. Each config of a Trainer gets `"stronghold": {}`. The other class loads models for\n'
        "ZeRO-3 without an engine: there the plugin is imported, and must leave DeepSpeed alone.\n"
        "Tests that Transformers skips because DeepSpeed does not pass them are run. The models\n"
        "are tiny ones of random weights, under the names that the tests ask for."
    ),
    marker=Path(FOLDER) / FILES[0],
    folder=Path(),
    prefix=FOLDER,
    files=FILES,
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.transformers.plugin",
    environment=pretended_gpu.environment(),
    options=("-k", CLASSES),
    limit_s=3600.0,
)
