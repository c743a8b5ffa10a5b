"""Trains a model in a plain loop: `stronghold.initialize` instead of an optimizer.

    python examples/plain_loop.py
    python examples/plain_loop.py --model Qwen/Qwen3-0.6B --steps 20

Without a GPU it runs on the emulated device.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stronghold

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    # Two layers are on the GPU at a time. Leave "window" out, and the engine chooses it.
    "stronghold": {"window": 2},
}


def make_model(name: str | None) -> torch.nn.Module:
    """A pretrained model, or a tiny one with random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=6, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of Hugging Face (default: a tiny one)")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    model = make_model(arguments.model)
    engine, _, _, _ = stronghold.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    # The model learns to count. Inputs go to the engine's device.
    tokens = (torch.arange(4)[:, None] + torch.arange(64)[None]).to(engine.device) % 128
    for step in range(arguments.steps):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step}: loss {loss.item():.4f}")
    print(engine.memory_report())
    # Weights are on the CPU again, and the model is an ordinary one.
    engine.destroy()


if __name__ == "__main__":
    main()
