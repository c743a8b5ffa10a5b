"""Accelerate's examples and its check of a machine, launched with a DeepSpeed config."""

from __future__ import annotations

from pathlib import Path

from conformance_suite.accelerate import process
from conformance_suite.accelerate_examples.table import REASONS, ROWS
from conformance_suite.pytest_suite import PytestSuite

PAGE = """\
The tests are `FeatureExamplesTests` of its repository, which launch the examples. Here they
launch them with a DeepSpeed config: stage 3, bf16, as `accelerate config` writes it. More cases
are added: `nlp_example.py`, `complete_nlp_example.py`, `memory.py`,
`automatic_gradient_accumulation.py`, `accelerate test`, and `deepspeed_with_config_support.py`
with each template of `examples/deepspeed_config_templates`. Left out are examples of other
things: DistributedDataParallel's hooks and inference. One rank has the pretended GPU of our
tests, and each config gets `"stronghold": {"window": 1}`. The models are tiny ones with random
weights. The package `evaluate` is needed."""

# Not of DeepSpeed: hooks of DistributedDataParallel, inference without training.
OTHERS = ("ddp_comm_hook", "distributed_inference", "pippy")

SUITE = PytestSuite(
    name="accelerate_examples",
    project="Accelerate",
    title="Accelerate's examples",
    package="accelerate",
    about="Accelerate's examples and `accelerate test`, with DeepSpeed configs.",
    page=PAGE,
    marker=Path("examples") / "nlp_example.py",
    folder=Path(),
    prefix="tests/",
    files=("test_examples.py",),
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.accelerate_examples.plugin",
    environment={**process.environment(), "RUN_SLOW": "1"},
    options=("-k", " and ".join(["FeatureExamplesTests", *(f"not {name}" for name in OTHERS)])),
    limit_s=3600.0,
)
