"""Tiny models of random weights under the names that Transformers' DeepSpeed tests load."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2Model,
    GPTJConfig,
    GPTJModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from conformance_suite.hub import add_model

T5 = "patrickvonplaten/t5-tiny-random"
GPT2 = "sshleifer/tiny-gpt2"
GPTJ = "hf-internal-testing/tiny-random-gptj"

TEXTS = (
    "question: In what country is Normandy located?  context: The Normans gave their name to",
    "Normandy, a region in France. They were descended from Norse raiders and pirates from",
    "Denmark, Iceland and Norway in the 10th and 11th centuries.",
)


def build(hub: Path) -> None:
    """Write the three models, and T5's tokenizer, into the folder `hub`."""
    torch.manual_seed(0)
    tokenizer = T5Tokenizer().train_new_from_iterator(TEXTS, vocab_size=200)
    t5 = T5Config(
        vocab_size=len(tokenizer) + 8,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )
    add_model(hub, T5, T5ForConditionalGeneration(t5), tokenizer)
    gpt2 = GPT2Config(vocab_size=128, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    add_model(hub, GPT2, GPT2Model(gpt2))
    gptj = GPTJConfig(vocab_size=128, n_embd=16, n_layer=2, n_head=2, n_positions=256, rotary_dim=4)
    add_model(hub, GPTJ, GPTJModel(gptj))
