"""Trains in an Accelerate loop: a section in its DeepSpeed config selects the engine.

    torchrun --nproc_per_node 1 examples/accelerate_loop.py

Without a GPU it runs on the emulated device, in fp32.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import stronghold.plugin  # noqa: F401  Import it before the model is built.

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": torch.cuda.is_available()},
    # Accelerate wants the key. All stages are the same here.
    "zero_optimization": {"stage": 0},
    # torch's AdamW: the engine has its own kernel for it
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "stronghold": {"window": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG), gradient_accumulation_steps=2
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=6, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The model learns to count. A step has two micro-batches of four rows.
    first = torch.arange(8 * arguments.steps) % 4
    rows = (first[:, None] + torch.arange(64)[None]) % 128
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    step = 0
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
            step += 1
    accelerator.end_training()
    accelerator.free_memory()  # destroys the engine


if __name__ == "__main__":
    main()
