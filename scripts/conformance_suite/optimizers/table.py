"""Which files of optimizer tests are run, and why some tests cannot apply."""

from __future__ import annotations

from conformance_suite.explanations import Row

# Under a folder that holds checkouts of the three projects.
FILES = (
    "pytorch/test/test_optim.py",
    "bitsandbytes/tests/test_optim.py",
    "ColossalAI/tests/test_optimizer/test_adam_kernel.py",
    "ColossalAI/tests/test_optimizer/test_adam_optim.py",
)

REASONS = {
    "gpu": "needs a GPU, or two",
    "bf16": "bitsandbytes skips its optimizers with momentum in bf16",
}

ROWS = (
    Row("pytorch/*", r"Skipped: (only one GPU detected|Only runs on cuda)", "gpu"),
    Row("bitsandbytes/*-bf16-opt=momentum*", r"^Skipped$", "bf16"),
)
