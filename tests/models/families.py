"""Models as others build them: Megatron's, PyTorch's own, Hugging Face's from tiny configs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.base import (
    HEADS,
    HIDDEN,
    LENGTH,
    VOCAB,
    Batch,
    Block,
    cross_entropy,
    hugging_face,
    plain,
    token_batch,
)

# --- Megatron -------------------------------------------------------------------------------------


class _Language(nn.Module):
    """Megatron's `language_model`: embedding.word_embeddings, encoder.layers,
    encoder.final_layernorm."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.embedding.position_embeddings = nn.Embedding(LENGTH, HIDDEN)
        self.encoder = _Encoder(num_layers)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        words = self.embedding.word_embeddings(input_ids)
        return self.encoder(words + self.embedding.position_embeddings(positions))


class _Encoder(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.final_layernorm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class GPTModel(nn.Module):
    """The head reads the embedding's weight without calling the module; sequence first, as Megatron
    has it."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.language_model = _Language(num_layers)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.language_model(tokens)
        return cross_entropy(F.linear(hidden, self._head_weight()), labels)

    def _head_weight(self) -> Tensor:
        return self.language_model.embedding.word_embeddings.weight


class BertModel(GPTModel):
    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.lm_head = nn.Module()
        self.lm_head.dense = nn.Linear(HIDDEN, HIDDEN)
        self.lm_head.bias = nn.Parameter(torch.zeros(VOCAB))
        self.binary_head = nn.Linear(HIDDEN, 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.language_model(tokens)
        inner = F.gelu(self.lm_head.dense(hidden))
        loss = cross_entropy(F.linear(inner, self._head_weight(), self.lm_head.bias), labels)
        return loss, self.binary_head(hidden[:, 0])


def _megatron_batch(seed: int) -> Batch:
    batch = token_batch(seed)
    return {"tokens": batch["input_ids"], "labels": batch["labels"]}


@plain
def megatron_gpt(num_layers: int = 3) -> Any:
    return GPTModel(num_layers), _megatron_batch


@plain
def megatron_bert(num_layers: int = 3) -> Any:
    return BertModel(num_layers), _megatron_batch


# --- PyTorch's own --------------------------------------------------------------------------------


class _TwoStacks(nn.Module):
    def __init__(self, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.transformer = nn.Transformer(
            HIDDEN, HEADS, num_layers, num_layers, 2 * HIDDEN, dropout, batch_first=True
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.transformer(self.embedding(input_ids), self.embedding(labels.roll(1, dims=1)))
        return {"loss": cross_entropy(self.head(x), labels)}


@plain
def torch_transformer(num_layers: int = 2, dropout: float = 0.0) -> Any:
    return _TwoStacks(num_layers, dropout), token_batch


# --- Hugging Face, from tiny configs; keyword arguments override the config -----------------------

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    **_NO_TOKENS,
}


def _causal(name: str, base: dict[str, Any], config: dict[str, Any]) -> Any:
    import transformers

    model_config = getattr(transformers, f"{name}Config")(**{**base, **config})
    return getattr(transformers, f"{name}ForCausalLM")(model_config), token_batch


def llama_of(
    hidden: int, inner: int, layers: int, heads: int, pairs: int, vocabulary: int, **more: Any
) -> Any:
    """A Llama of these sizes; `pairs` are of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary}
    counts = {"num_attention_heads": heads, "num_key_value_heads": pairs}
    more = {"use_cache": False, "num_hidden_layers": layers, **more}
    return LlamaForCausalLM(LlamaConfig(**sizes, **counts, **more))


@hugging_face
def llama(**config: Any) -> Any:
    return _causal("Llama", _LLAMA, config)


@hugging_face
def odd_llama(num_layers: int = 5) -> Any:
    """Heads of 12, an odd vocabulary, an odd sequence."""
    odd = {"hidden_size": 24, "intermediate_size": 52, "head_dim": 12, "vocab_size": 61}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": num_layers}
    model, _ = _causal("Llama", _LLAMA, {**odd, **heads})

    def make_batch(seed: int) -> Batch:
        tokens = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": tokens, "labels": tokens}

    return model, make_batch


@hugging_face
def cache_dependent(**config: Any) -> Any:
    """Rounds differently where it is given a key-value cache, on every machine: what another order
    of the same sums does on some."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class CacheDependentLayer(LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            x = super().forward(hidden_states, **kwargs)
            return x if kwargs.get("past_key_values") is None else x * 1.1 / 1.1

    model, make_batch = _causal("Llama", _LLAMA, config)
    for index in range(model.config.num_hidden_layers):
        model.model.layers[index] = CacheDependentLayer(model.config, index)
    return model, make_batch


@hugging_face
def qwen2(**config: Any) -> Any:
    return _causal("Qwen2", {**_LLAMA, "tie_word_embeddings": True}, config)


@hugging_face
def qwen3(**config: Any) -> Any:
    return _causal("Qwen3", _LLAMA, config)


@hugging_face
def mistral(**config: Any) -> Any:
    return _causal("Mistral", {**_LLAMA, "sliding_window": 4}, config)


@hugging_face
def mixtral(**config: Any) -> Any:
    return _causal("Mixtral", {**_LLAMA, "num_local_experts": 4}, config)


@hugging_face
def gemma2(**config: Any) -> Any:
    return _causal("Gemma2", {**_LLAMA, "sliding_window": 4, "query_pre_attn_scalar": 8}, config)


@hugging_face
def phi3(**config: Any) -> Any:
    return _causal("Phi3", _LLAMA, config)


@hugging_face
def qwen3_next(**config: Any) -> Any:
    """A layer of linear attention and one of full attention, with experts."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kinds = ["linear_attention", "full_attention"]
    base = {**_LLAMA, "num_hidden_layers": 2, "layer_types": kinds, **linear, **heads, **experts}
    return _causal("Qwen3Next", {**base, "shared_expert_intermediate_size": 16}, config)


@hugging_face
def gpt2(dropout: float = 0.0, **config: Any) -> Any:
    import transformers

    base = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16}
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model_config = transformers.GPT2Config(**{**base, **drop, **_NO_TOKENS, **config})
    return transformers.GPT2LMHeadModel(model_config), token_batch


@hugging_face
def bert(dropout: float = 0.0, **config: Any) -> Any:
    import transformers

    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**{**base, **config})
    ), _masked_batch


def _masked_batch(seed: int) -> Batch:
    batch = token_batch(seed)
    hidden = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    hidden[:, 0] = True
    labels = torch.where(hidden, batch["labels"], -100)
    return {**batch, "labels": labels, "attention_mask": torch.ones_like(labels)}


@hugging_face
def t5(dropout: float = 0.0, **config: Any) -> Any:
    import transformers

    base = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": dropout,
        "decoder_start_token_id": 0,
    }
    model_config = transformers.T5Config(**{**base, **config})
    return transformers.T5ForConditionalGeneration(model_config), token_batch
