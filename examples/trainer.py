"""Trains with Transformers' Trainer: a section in its DeepSpeed config selects the engine.

    torchrun --nproc_per_node 1 examples/trainer.py

Without a GPU it runs on the emulated device, in fp32.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import stronghold.plugin  # noqa: F401  Import it before the model is built.

HAS_GPU = torch.cuda.is_available()
# "auto" takes the value of TrainingArguments. Never write it inside of "stronghold".
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    # Accelerate wants the key. All stages are the same here.
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
    "stronghold": {"window": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        # Make the TrainingArguments first: they tell Transformers of the config.
        settings = TrainingArguments(
            folder,
            deepspeed=CONFIG,
            per_device_train_batch_size=4,
            max_steps=arguments.steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=HAS_GPU,
            use_cpu=False,  # the engine chooses the device
            dataloader_pin_memory=HAS_GPU,
        )
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=6, **sizes))
        # The model learns to count.
        rows = (torch.arange(16)[:, None] + torch.arange(64)[None]) % 128
        dataset = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=model, args=settings, train_dataset=dataset)
        trainer.train()
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {float(entry['loss']):.4f}")
        trainer.accelerator.free_memory()  # destroys the engine


if __name__ == "__main__":
    main()
