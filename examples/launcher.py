"""Trains under DeepSpeed's launcher, with a call of `deepspeed.initialize`.

    deepspeed --num_gpus 2 examples/launcher.py --deepspeed_config examples/ds_config.json

`import stronghold.plugin` makes `deepspeed.initialize` obey the section "stronghold" of the config.
The ranks share the state of the model. Without a GPU, DS_ACCELERATOR=cpu selects the emulated
device.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stronghold.plugin  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    parser = deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=6, **sizes))
    # The config comes from --deepspeed_config.
    engine, _, _, _ = deepspeed.initialize(
        args=arguments, model=model, model_parameters=model.parameters()
    )
    # Each rank has other data: the model learns to count from different numbers.
    first = torch.arange(4)[:, None] + 4 * engine.global_rank
    tokens = (first + torch.arange(64)[None]).to(engine.device) % 128
    for step in range(arguments.steps):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    engine.destroy()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
