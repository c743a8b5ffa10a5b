"""Which of DeepSpeed's unit tests run on two ranks, and why some of them cannot apply.

The rows are those of one rank, and a few of their own.
"""

from __future__ import annotations

import fnmatch

from conformance_suite.deepspeed import table
from conformance_suite.explanations import Row

# Files of the suite of one rank that have tests for several.
FILES = (
    "runtime/test_ds_config_dict.py",
    "runtime/test_multiple_models.py",
    "runtime/test_no_sync_ctxt.py",
    "runtime/test_runtime_utils.py",
    "runtime/half_precision/test_fp16.py",
    "runtime/half_precision/test_zero_optim_overflow.py",
    "runtime/zero/test_unwrap_model.py",
    "v1/half_precision/test_bf16.py",
    "v1/zero/test_zero_user_backward.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_other_optimizer.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_zero_optimizer.py",
    "monitor/test_monitor.py",
)


def concerns(row: Row) -> bool:
    """True if the row is about every file, or about one of `FILES`. Not one of a lack of ranks."""
    file = row.pattern.split("::")[0]
    if row.reason == "ranks":
        return False
    return not file.endswith(".py") or any(fnmatch.fnmatchcase(name, file) for name in FILES)


ROWS = (
    *(row for row in table.ROWS if concerns(row)),
    Row(
        "checkpoint/test_tag_validation.py::*unique_tag*",
        r"ConfigError: save_checkpoint: the ranks give different tags",
        "error type",
    ),
)

REASONS = {row.reason: table.REASONS[row.reason] for row in ROWS}
