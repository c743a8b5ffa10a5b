"""Models as they were published: the shape of each, and its number of parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import (
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

LLAMA = partial(LlamaConfig, vocab_size=128256, architectures=["LlamaForCausalLM"])
QWEN2 = partial(Qwen2Config, vocab_size=152064, architectures=["Qwen2ForCausalLM"])
QWEN3 = partial(Qwen3Config, vocab_size=151936, head_dim=128, architectures=["Qwen3ForCausalLM"])
QWEN3_MOE = partial(
    Qwen3MoeConfig,
    vocab_size=151936,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    architectures=["Qwen3MoeForCausalLM"],
)
GPT_OSS = partial(GptOssConfig, architectures=["GptOssForCausalLM"])


def _shape(
    family: Any, hidden: int, inner: int, layers: int, heads: int, pairs: int, **more: Any
) -> PretrainedConfig:
    """`inner`: of the MLP, or of one expert. `pairs`: heads of keys and values."""
    width = "moe_intermediate_size" if family is QWEN3_MOE else "intermediate_size"
    config: PretrainedConfig = family(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        **{width: inner, "tie_word_embeddings": False, **more},
    )
    return config


PUBLISHED: dict[str, tuple[PretrainedConfig, int]] = {
    "Llama-3.2-3B": (
        _shape(LLAMA, 3072, 8192, 28, 24, 8, head_dim=128, tie_word_embeddings=True),
        3_212_749_824,
    ),
    "Llama-3.1-8B": (_shape(LLAMA, 4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama-3.3-70B": (_shape(LLAMA, 8192, 28672, 80, 64, 8), 70_553_706_496),
    "Qwen2.5-7B": (_shape(QWEN2, 3584, 18944, 28, 28, 4), 7_615_616_512),
    "Qwen2.5-32B": (_shape(QWEN2, 5120, 27648, 64, 40, 8), 32_763_876_352),
    "Qwen3-8B": (_shape(QWEN3, 4096, 12288, 36, 32, 8), 8_190_735_360),
    "Qwen3-14B": (_shape(QWEN3, 5120, 17408, 40, 40, 8), 14_768_307_200),
    "Qwen3-32B": (_shape(QWEN3, 5120, 25600, 64, 64, 8), 32_762_123_264),
    "Qwen3-30B-A3B": (_shape(QWEN3_MOE, 2048, 768, 48, 32, 4), 30_532_122_624),
    "Qwen3-235B-A22B": (_shape(QWEN3_MOE, 4096, 1536, 94, 64, 4), 235_093_634_560),
    "gpt-oss-120b": (GPT_OSS(num_hidden_layers=36, num_local_experts=128), 116_829_156_672),
}


def published(model: str) -> PretrainedConfig:
    """The config of the model, which saves and loads like that of the hub."""
    return PUBLISHED[model][0]
