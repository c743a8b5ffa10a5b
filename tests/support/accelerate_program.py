"""What `accelerate launch` runs: Accelerate's own check of a machine, then its two scalars trained.

Writes what each process found to the folder that is named, for the test that launched it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.test_utils import RegressionDataset, RegressionModel
from accelerate.test_utils.scripts import test_script
from accelerate.utils import DummyOptim
from torch.utils.data import DataLoader

LEARNING_RATE = 1e-2
ROWS, BATCH = 24, 2  # BATCH of each process


def main(folder: str) -> None:
    # DeepSpeed would compile a kernel for minutes, and gloo needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    test_script.main()
    accelerator = Accelerator()
    model: Any = RegressionModel()
    rows = DataLoader(RegressionDataset(length=ROWS, seed=0), batch_size=BATCH)
    optimizer: Any = DummyOptim(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    norms = []
    for batch in rows:
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(f"{folder}/state")
    found = {
        "engine": f"{type(model).__module__}.{type(model).__name__}",
        "processes": accelerator.num_processes,
        "norms": norms,
        "weights": accelerator.get_state_dict(model),
    }
    torch.save(found, Path(folder) / f"found-{accelerator.process_index}")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
