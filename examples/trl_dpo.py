"""Aligns adapters with TRL's DPOTrainer: the base below them is the reference, and is held once.

    torchrun --nproc_per_node 1 examples/trl_dpo.py

It needs `pip install trl`. Without a GPU it runs on the emulated device, in fp32.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import stronghold.plugin  # noqa: F401  Import it before the model is built.

HAS_GPU = torch.cuda.is_available()
# "auto" takes the value of DPOConfig. Never write it inside of "stronghold".
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    # Accelerate wants the key. All stages are the same here.
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
    "stronghold": {"window": 2},
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable character. Use your model's tokenizer instead."""
    words = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(
            folder,
            deepspeed=CONFIG,
            per_device_train_batch_size=4,
            max_steps=arguments.steps,
            learning_rate=5e-3,
            logging_steps=1,
            save_strategy="no",
            bf16=HAS_GPU,
            use_cpu=False,  # the engine chooses the device
        )
        torch.manual_seed(0)
        tokenizer = make_tokenizer()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=128, num_hidden_layers=6, **sizes)
        model = LlamaForCausalLM(config)
        pair = {"chosen": "yes", "rejected": "no"}
        pairs = [{"prompt": f"is {i + 1} after {i}? ", **pair} for i in range(64)]
        lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        dataset = Dataset.from_list(pairs)
        data = {"train_dataset": dataset, "processing_class": tokenizer}
        trainer = DPOTrainer(model, args=settings, peft_config=lora, **data)
        trainer.train()
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {float(entry['loss']):.4f}")
        trainer.accelerator.free_memory()  # destroys the engine


if __name__ == "__main__":
    main()
