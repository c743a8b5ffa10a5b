"""Lightning's Trainer, whose checkpoints may come between the micro-batches of a step."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from tests.models import without_caches  # noqa: E402
from tests.support.checkpoints import make_batch, make_model  # noqa: E402
from tests.support.lightning_on_cpu import OnCPU, lightning_on_cpu  # noqa: E402

NUM_BATCHES = 5  # of an epoch: two steps, and the first micro-batch of the next
EPOCHS = 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "stronghold": {"device": "emulated", "window": 1},
}


class Task(BoringModel):  # type: ignore[misc]
    """A small GPT-2 with dropout. `losses`: of every micro-batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = None
        self.inner = without_caches(make_model(seed=seed))
        self.losses: list[torch.Tensor] = []
        self.engine: list[Any] = []  # in a list, so that it is no submodule

    def training_step(self, batch: int, _: int) -> torch.Tensor:
        self.engine[:] = [self.trainer.strategy.model]
        loss: torch.Tensor = self.inner(**make_batch(int(batch))).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        numbers = torch.arange(NUM_BATCHES)
        return torch.utils.data.DataLoader(numbers, batch_size=None)


def fit(
    folder: Path, *, seed: int, epochs: int, resume: Path | None = None
) -> tuple[Task, dict[str, torch.Tensor]]:
    """Train, with a checkpoint of every epoch in `folder`. Returns the task and its weights."""
    StrategyRegistry.register("within step", OnCPU, override=True, config=dict(CONFIG))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        default_root_dir=folder,
        strategy="within step",
    )
    torch.manual_seed(1)
    task = Task(seed)
    with lightning_on_cpu():
        trainer.fit(task, ckpt_path=None if resume is None else str(resume))
    engine = task.engine.pop()
    engine.synchronize()
    weights = {name: p.detach().clone() for name, p in task.inner.named_parameters()}
    engine.destroy()
    return task, weights


@pytest.mark.slow
def test_an_epoch_of_an_odd_number_of_batches_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its kernel for shared memory would be compiled for half a minute.
    communication = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(communication, "build_shm_op", lambda: None)
    straight, expected = fit(tmp_path / "straight", seed=0, epochs=EPOCHS)
    assert len(straight.losses) == EPOCHS * NUM_BATCHES
    saved = tmp_path / "straight" / "epoch=0.ckpt"
    assert list(saved.rglob("sums-*"))
    resumed, weights = fit(tmp_path / "on", seed=9, epochs=EPOCHS, resume=saved)
    assert len(resumed.losses) == (EPOCHS - 1) * NUM_BATCHES
    assert all(map(torch.equal, resumed.losses, straight.losses[NUM_BATCHES:]))
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
