"""Which of Accelerate's tests are run, and why some cannot apply to this engine."""

from __future__ import annotations

from conformance_suite.explanations import Row

FILES = (
    "test_deepspeed.py",
    "test_deepspeed_gradient_accumulation.py",
    "test_deepspeed_multiple_model.py",
    "test_alst_ulysses_sp.py",
)

REASONS = {
    "gathers": "asserts that ZeRO 3 refuses the weights without a key of its own; here each "
    "rank has them",
    "learning": "asserts that accuracy still rises after the first epoch, as it does with a "
    "pre-trained model; the tiny model is perfect by then",
    "sequence parallel": "sequence parallelism over ranks is refused",
    "switched off": "Accelerate skips the test for every DeepSpeed newer than 0.12.6",
}

ROWS = (
    Row("test_alst_ulysses_sp.py::*", None, "sequence parallel"),
    Row("test_deepspeed.py::*test_save_checkpoints", r"DID NOT RAISE|not raised", "gathers"),
    Row("*test_train_multiple_models", None, "learning"),
    Row("*test_peak_memory_usage", r"fails when deepspeed>0\.12\.6", "switched off"),
)
