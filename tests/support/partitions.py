"""What tests of the partition share: the zoo's layers, and how they are looked at."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stronghold.model.partition import Layer, Partition
from tests.models import MODELS, Block

AROUND = ["", "embedding", "norm", "head"]
MEGATRON = [
    "language_model.embedding.word_embeddings",
    "language_model.embedding.position_embeddings",
    "language_model.encoder.final_layernorm",
]
BERT_EMBEDDINGS = [
    f"bert.embeddings.{name}"
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
]
T5_STACKS = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]

ONE_BLOCK = [
    f"blocks.0.{name}"
    for name in ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down")
]


def numbered(path: str, count: int) -> list[str]:
    return [f"{path}.{index}" for index in range(count)]


# name -> (streamed layers, resident layers), each in order
LLAMA = (numbered("model.layers", 3), ["model.embed_tokens", "model.norm", "lm_head"])
LLAMA_TIED = (LLAMA[0], ["model.embed_tokens", "model.norm"])
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "gpt": (numbered("blocks", 3), AROUND),
    "gpt_tied": (numbered("blocks", 3), ["", "embedding", "norm"]),
    "gpt_dropout": (numbered("blocks", 3), AROUND),
    "gpt_checkpointed": (numbered("blocks", 3), AROUND),
    "weird_model": (numbered("blocks", 4), AROUND),
    "frozen": (numbered("blocks", 4), AROUND),
    "frozen_prefix": (numbered("blocks", 4), AROUND),
    "adapters": (numbered("blocks", 3), AROUND),
    "unused": (numbered("blocks", 4), [*AROUND, "spare"]),
    "tied_blocks": (
        numbered("blocks", 4),
        ["", "embedding", "blocks.0.norm1", "blocks.0.mlp.up", "norm", "head"],
    ),
    "uneven": (numbered("blocks", 4), AROUND),
    "sequential": (["net.0", "net.2", "net.3", "net.5"], []),
    "called_twice": (numbered("blocks", 3), AROUND),
    "shared_list": (numbered("blocks", 2), AROUND),
    "structured": (numbered("blocks", 3), AROUND),
    "layer_drop": (numbered("blocks", 4), AROUND),
    "skip_inside": (numbered("blocks", 4), AROUND),
    "experts": (numbered("blocks", 3), AROUND),
    "buffers": (numbered("blocks", 3), AROUND),
    "growing_buffers": (numbered("blocks", 3), AROUND),
    "fused_loss": (numbered("blocks", 3), AROUND),
    "megatron_gpt": (numbered("language_model.encoder.layers", 3), MEGATRON),
    "megatron_bert": (
        numbered("language_model.encoder.layers", 3),
        [*MEGATRON, "lm_head", "lm_head.dense", "binary_head"],
    ),
    "torch_transformer": (
        numbered("transformer.encoder.layers", 2) + numbered("transformer.decoder.layers", 2),
        ["embedding", "transformer.encoder.norm", "transformer.decoder.norm", "head"],
    ),
    "llama": LLAMA,
    "odd_llama": (numbered("model.layers", 5), LLAMA[1]),
    "cache_dependent": LLAMA,
    "qwen2": LLAMA_TIED,
    "qwen3": LLAMA,
    "qwen3_next": (numbered("model.layers", 2), LLAMA[1]),
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "gemma2": LLAMA_TIED,
    "phi3": LLAMA,
    "gpt2": (
        numbered("transformer.h", 3),
        ["transformer.wte", "transformer.wpe", "transformer.ln_f"],
    ),
    "bert": (
        numbered("bert.encoder.layer", 3),
        [
            *BERT_EMBEDDINGS,
            "cls.predictions",
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
        ],
    ),
    "two_scalars": ([], [""]),
    "one_linear": ([], [""]),
    "nested": ([], ["", "body.first.0", "body.norm"]),
    "one_block": ([], [*AROUND[:2], *ONE_BLOCK, *AROUND[2:]]),
    "one_weird_block": ([], [*AROUND[:2], "blocks.0", *AROUND[2:]]),
    "half_frozen": ([], [*AROUND[:2], *ONE_BLOCK, *AROUND[2:]]),
    "t5": (T5_STACKS, ["shared", "encoder.final_layer_norm", "decoder.final_layer_norm"]),
}


def build(name: str, **options: Any) -> nn.Module:
    return MODELS[name](**options)[0]


def streamed(found: Partition) -> list[str]:
    return [layer.name for layer in found.streamed]


def resident(found: Partition) -> list[str]:
    return [layer.name for layer in found.layers if not layer.streamed]


def layer_of(found: Partition, parameter: nn.Parameter) -> Layer:
    (layer,) = [x for x in found.layers if any(n.parameter is parameter for n in x.parameters)]
    return layer


class Holder(nn.Module):
    """Any modules as attributes, with a forward that nobody calls."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("partition must not run the model")


def pair() -> list[nn.Module]:
    return [Block(), Block()]
