"""Which of ArcticTraining's tests are run. All of them apply."""

from __future__ import annotations

from conformance_suite.explanations import Row

FILES = (
    "checkpoint/test_ds_engine.py",
    "checkpoint/test_hf_engine.py",
    "trainer/test_causal_trainer.py",
    "trainer/test_dpo_trainer.py",
    "trainer/test_sft_trainer.py",
)

REASONS: dict[str, str] = {}

ROWS: tuple[Row, ...] = ()
