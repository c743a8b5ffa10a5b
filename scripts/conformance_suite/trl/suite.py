"""TRL's invariants: configs of one class have one trajectory of losses and gradient norms."""

from __future__ import annotations

import os
from pathlib import Path

from conformance_suite.pytest_suite import SCRIPTS, PytestSuite

SITE = Path(__file__).resolve().parent / "site"

PAGE = """\
The tests are `tests/invariant` of its repository: 50 steps of `trl sft` and `trl dpo`. Configs of
one class differ in the micro-batch and gradient accumulation, or in padding. They must have one
trajectory of losses and gradient norms: each step within a tolerance, and the mean of all
residuals near zero. The tolerances are TRL's. Left out are the members that differ in gradient
checkpointing or in the number of ranks.

The canonical config of each class is trained here without this engine, by plain PyTorch. Then
every config of the class, the canonical one too, is trained with it:
`"stronghold": {"device": "emulated", "window": 1}`. The model is a tiny Qwen2 with random weights.
Attention is eager. Where TRL's configs name a GPU's kernel, padding-free batches are kept apart by
their position ids."""

SUITE = PytestSuite(
    name="trl",
    project="TRL",
    package="trl",
    about="TRL's training invariants: plain training is canonical, this engine is each member.",
    page=PAGE,
    marker=Path("tests") / "invariant" / "test_invariant.py",
    folder=Path(),
    prefix="tests/invariant/",
    files=("test_invariant.py",),
    rows=(),
    reasons={},
    plugin="conformance_suite.trl.plugin",
    environment={
        "PYTHONPATH": os.pathsep.join([str(SITE), str(SCRIPTS), str(SCRIPTS.parent)]),
        "TOKENIZERS_PARALLELISM": "false",
    },
    options=("-m", "invariant", "-k", "not ddp2 and not no_grad_ckpt"),
    limit_s=3600.0,
)
