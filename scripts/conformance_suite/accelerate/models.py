"""The models, data sets and metrics that Accelerate's tests and examples ask the hub for.

Owns what is in the local hub: tiny models with random weights, and sentence pairs that a tiny model
learns within some steps. The names are those of the tests.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from conformance_suite import hub

WORDS = 60
MARKERS = 8  # pairs of words, of which one makes a sentence pair equivalent
ROWS = {"train": 512, "validation": 128, "test": 64}
LABELS = ("not_equivalent", "equivalent")


def sentence_pairs(num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows of GLUE's MRPC: a marker in the second sentence decides the label."""
    draw = random.Random(seed)
    rows = []
    for index in range(num_rows):
        label = draw.randrange(2)
        marker = min(int(draw.expovariate(0.7)), MARKERS - 1)
        sentences = [
            [f"word{draw.randrange(WORDS)}" for _ in range(draw.randrange(4, 12))] for _ in range(2)
        ]
        sentences[1].insert(0, f"{'same' if label else 'other'}{marker}")
        first, second = (" ".join(words) for words in sentences)
        rows.append({"sentence1": first, "sentence2": second, "label": label, "idx": index})
    return rows


def add_sentence_pairs(folder: Path) -> list[str]:
    """Write the data set `nyu-mll/glue`, `mrpc`, and its metric. Return its texts."""
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features(
        {
            "sentence1": Value("string"),
            "sentence2": Value("string"),
            "label": ClassLabel(names=list(LABELS)),
            "idx": Value("int32"),
        }
    )
    splits = {
        name: Dataset.from_list(sentence_pairs(num_rows, seed), features=features)
        for seed, (name, num_rows) in enumerate(ROWS.items())
    }
    for name in ("nyu-mll/glue", "glue"):
        hub.add_dataset(folder, name, "mrpc", splits)
    for name in ("glue", "accuracy"):
        hub.add_metric(folder, name, Path(__file__).with_name("metric.py"))
    return [row[key] for row in splits["train"] for key in ("sentence1", "sentence2")]


def add_gpt2(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "sshleifer/tiny-gpt2": {"n_embd": 2, "n_layer": 2, "n_head": 2},
        "hf-internal-testing/tiny-random-gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4},
        "gpt2": {"n_embd": 48, "n_layer": 4, "n_head": 4},
    }
    for name, size in sizes.items():
        special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        config = GPT2Config(vocab_size=1024, n_positions=128, **size, **special)
        hub.add_model(folder, name, GPT2LMHeadModel(config))


def add_llama(folder: Path, texts: list[str]) -> None:
    """Write a causal model with a tokenizer of the words of `texts`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = hub.word_tokenizer(texts, ("input_ids", "attention_mask"))
    tokenizer.eos_token = tokenizer.sep_token
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    hub.add_model(folder, "HuggingFaceTB/SmolLM-360M", LlamaForCausalLM(config), tokenizer)


def add_mixture(folder: Path) -> None:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    hub.add_model(
        folder, "peft-internal-testing/tiny-random-qwen-1.5-MoE", Qwen2MoeForCausalLM(config)
    )


def add_classifiers(folder: Path, texts: list[str]) -> None:
    """Encoders that already tell the two labels apart; a program makes the head anew."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DistilBertConfig,
        DistilBertForSequenceClassification,
    )

    tokenizer = hub.word_tokenizer(texts, ("input_ids", "token_type_ids", "attention_mask"))
    bert = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    model = BertForSequenceClassification(bert)
    _teach(model, tokenizer)
    # of the head: as far as some steps can move it
    model.config.initializer_range = 0.002
    hub.add_model(folder, "bert-base-cased", model.bert, tokenizer)
    tokenizer = hub.word_tokenizer(texts, ("input_ids", "attention_mask"), lower=True)
    small = DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=64,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=128,
    )
    hub.add_model(
        folder,
        "distilbert-base-uncased",
        DistilBertForSequenceClassification(small).distilbert,
        tokenizer,
    )


def _teach(model: Any, tokenizer: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(150):
        rows = sentence_pairs(32, 1000 + step)
        batch = tokenizer(
            [row["sentence1"] for row in rows],
            [row["sentence2"] for row in rows],
            padding=True,
            return_tensors="pt",
        )
        labels = torch.tensor([row["label"] for row in rows])
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def build(folder: Path) -> None:
    """Fill the hub in `folder`."""
    from transformers import MobileViTConfig

    torch.manual_seed(0)
    texts = add_sentence_pairs(folder)
    add_classifiers(folder, texts)
    add_gpt2(folder)
    add_llama(folder, texts)
    add_mixture(folder)
    hub.add_config(folder, "apple/mobilevit-xx-small", MobileViTConfig())


if __name__ == "__main__":
    build(Path(sys.argv[1]))
