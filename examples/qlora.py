"""Trains LoRA adapters over a base of 4 bits: the engine packs the frozen weights (nf4) once.

    python examples/qlora.py
    python examples/qlora.py --model Qwen/Qwen3-8B --output adapters

Without a GPU it runs on the emulated device.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stronghold

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    # "frozen" packs the base's linear layers. "own" keeps adapters in fp32 on a bf16 base.
    "stronghold": {"window": 2, "frozen": "nf4", "dtypes": "own"},
}


def make_model(name: str | None) -> torch.nn.Module:
    """A pretrained base, or a tiny one with random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=6, **sizes)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of Hugging Face (default: a tiny one)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", help="save the adapters in this folder")
    arguments = parser.parse_args()

    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(make_model(arguments.model), lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, _ = stronghold.initialize(model=model, model_parameters=trained, config=CONFIG)
    # The model learns to count.
    tokens = (torch.arange(4)[:, None] + torch.arange(64)[None]).to(engine.device) % 128
    for step in range(arguments.steps):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step}: loss {loss.item():.4f}")
    print(engine.memory_report())
    engine.destroy()
    if arguments.output:
        model.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
