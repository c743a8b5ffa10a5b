"""DeepSpeed's own unit tests that need no GPU, on one rank."""

from __future__ import annotations

from pathlib import Path

from conformance_suite.deepspeed.table import FILES, GPU_FILES, REASONS, ROWS
from conformance_suite.pytest_suite import PytestSuite

SUITE = PytestSuite(
    name="deepspeed",
    project="DeepSpeed",
    package="deepspeed",
    about="DeepSpeed's own unit tests that need no GPU, on one rank.",
    page=(
        "The tests are those of its repository. One rank, no GPU,\n"
        '`"stronghold": {"device": "emulated"}` in each config. Where a test compares gradients,\n'
        "its checks of which parameters stage 3 has partitioned are left out: here none is.\n"
        "Tests of NVMe run though DeepSpeed's operator for it is not built. Three files skip\n"
        "tests on a CPU: `checkpoint/test_lr_scheduler.py`, `checkpoint/test_zero_optimizer.py`\n"
        "and `runtime/zero/test_zero_tensor_fragment.py`. Here they run, on a pretended GPU.\n"
        "A C++ compiler is needed, as DeepSpeed compiles its Adam for some tests, and the\n"
        "packages `comet_ml`, `tensorboard` and `wandb`."
    ),
    marker=Path("tests") / "unit" / "common.py",
    folder=Path("tests"),
    prefix="unit/",
    files=FILES,
    gpu_files=GPU_FILES,
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.deepspeed.plugin",
    limit_s=3600.0,
    has_reference=True,
)
