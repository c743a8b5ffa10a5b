"""Trains with Lightning's Trainer and its DeepSpeed strategy: a section selects the engine.

    python examples/lightning_fit.py

It needs `pip install lightning`, and a GPU: Lightning's DeepSpeed strategy refuses a CPU.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from transformers import LlamaConfig, LlamaForCausalLM

import stronghold.plugin  # noqa: F401  Import it before the model is built.

HAS_GPU = torch.cuda.is_available()
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": HAS_GPU},
    # torch's AdamW: the engine has its own kernel for it
    "zero_allow_untested_optimizer": True,
    "stronghold": {"window": 2},
}


class Task(lightning.LightningModule):
    """A tiny Llama that learns to count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=6, **sizes))
        self.engine = [None]  # in a list, so that it is no submodule

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.engine[0] = self.trainer.strategy.model
        loss = self.model(input_ids=batch, labels=batch).loss
        print(f"step {index}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    trainer = lightning.Trainer(
        strategy=DeepSpeedStrategy(config=CONFIG),
        accelerator="auto",
        devices=1,
        max_steps=arguments.steps,
        precision="bf16-true" if HAS_GPU else "32-true",
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    task = Task()
    tokens = (torch.arange(4)[:, None] + torch.arange(64)[None]) % 128
    batches = [tokens] * arguments.steps
    trainer.fit(task, torch.utils.data.DataLoader(batches, batch_size=None))
    task.engine[0].destroy()  # Lightning drops the engine, and does not end it


if __name__ == "__main__":
    main()
