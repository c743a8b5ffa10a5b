"""DeepSpeed's own unit tests for several ranks, on two ranks over gloo."""

from __future__ import annotations

import dataclasses

from conformance_suite.deepspeed.suite import SUITE as ONE_RANK
from conformance_suite.deepspeed_two_ranks.table import FILES, REASONS, ROWS

SUITE = dataclasses.replace(
    ONE_RANK,
    name="deepspeed_two_ranks",
    title="DeepSpeed's tests on two ranks",
    about="DeepSpeed's own unit tests for several ranks, on two ranks over gloo.",
    page=(
        "The tests are those of its repository that DeepSpeed runs on two or more ranks. Two\n"
        'ranks over gloo, no GPU, `"stronghold": {"device": "emulated"}` in each config.\n'
        "Checks of stage 3's partitions are left out, as on one rank (`deepspeed.md`).\n"
        "Further packages are needed: `comet_ml`, `tensorboard`, `wandb`."
    ),
    files=FILES,
    gpu_files=frozenset(),
    rows=ROWS,
    reasons=REASONS,
    plugin="conformance_suite.deepspeed_two_ranks.plugin",
    limit_s=7200.0,
)
