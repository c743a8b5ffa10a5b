"""A zoo of tiny models: every shape of module, parameter and call that the runtime must survive.

`MODELS[name](**options)` returns `(model, make_batch)`: a float32 model in train mode, seeded, and
a function that turns a seed into the keyword arguments of one call, so that
`loss_of(model(**make_batch(seed)))` is a scalar loss. Nothing here touches the global random state
except by running a model with dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Any]
MakeBatch = Callable[[int], Batch]
Factory = Callable[..., tuple[nn.Module, MakeBatch]]

VOCAB, HIDDEN, HEADS, LENGTH = 37, 16, 2, 8

MODELS: dict[str, Factory] = {}  # all of them
PLAIN: list[str] = []  # plain PyTorch: no import beyond torch
HUGGING_FACE: list[str] = []  # importing transformers takes seconds


def loss_of(output: Any) -> Tensor:
    """The scalar loss in any model's output: itself, `.loss`, ["loss"] or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    return output["loss"] if isinstance(output, dict) else output.loss


def _register(names: list[str]) -> Callable[[Factory], Factory]:
    def register(factory: Factory) -> Factory:
        def seeded(*, seed: int = 0, **options: Any) -> tuple[nn.Module, MakeBatch]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model, make_batch = factory(**options)
            return model.train(), make_batch

        name = factory.__name__
        MODELS[name] = seeded
        names.append(name)
        return seeded

    return register


plain, hugging_face = _register(PLAIN), _register(HUGGING_FACE)


def token_batch(seed: int, vocab: int = VOCAB, length: int = LENGTH) -> Batch:
    """Two sequences of tokens and the labels to predict."""
    random = torch.Generator().manual_seed(seed)
    draw = torch.randint(vocab, (2, length + 1), generator=random)
    return {"input_ids": draw[:, :-1].contiguous(), "labels": draw[:, 1:].contiguous()}


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# --- parts ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class MLP(nn.Module):
    def __init__(self, hidden: int = HIDDEN, inner: int = 4 * HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int = HIDDEN, inner: int = 4 * HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; returns the loss. Subclasses change `run`, the way through the
    blocks."""

    def __init__(self, blocks: list[nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, HIDDEN))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        x = self.run(x, input_ids)
        return _cross_entropy(self.head(self.norm(x)), labels)


# --- the ordinary one, and its options ------------------------------------------------------------


@plain
def gpt(num_layers: int = 3, dropout: float = 0.0, tied: bool = False) -> Any:
    return Decoder([Block(dropout=dropout) for _ in range(num_layers)], tied=tied), token_batch


@plain
def gpt_tied(num_layers: int = 3) -> Any:
    return Decoder([Block() for _ in range(num_layers)], tied=True), token_batch


@plain
def gpt_dropout(num_layers: int = 3, dropout: float = 0.2) -> Any:
    return Decoder([Block(dropout=dropout) for _ in range(num_layers)]), token_batch


class _Checkpointed(Decoder):
    use_reentrant = False

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@plain
def gpt_checkpointed(num_layers: int = 3, dropout: float = 0.1, use_reentrant: bool = False) -> Any:
    """The user's own gradient checkpointing: blocks run again in backward, with the same
    dropout."""
    model = _Checkpointed([Block(dropout=dropout) for _ in range(num_layers)])
    model.use_reentrant = use_reentrant
    return model, token_batch


# --- parameters -----------------------------------------------------------------------------------


class WeirdBlock(nn.Module):
    """Parameters of 1, 15, 17 and 4097 elements, one without dimensions and one without
    elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.first = nn.Parameter(0.1 * torch.randn(15))
        self.last = nn.Parameter(0.1 * torch.randn(17))
        self.table = nn.Parameter(0.02 * torch.randn(4097))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.first[:HIDDEN], self.last[:HIDDEN]
        mixed = self.table[: HIDDEN * HIDDEN].view(HIDDEN, HIDDEN)
        rest = (
            self.table[HIDDEN * HIDDEN :].square().mean() + self.last[HIDDEN] + self.nothing.sum()
        )
        shifted = torch.cat([x[..., :15] * low, x[..., 15:]], dim=-1) + high
        return x + self.scale * torch.tanh(shifted @ mixed) * self.gain + rest


@plain
def weird_model(num_layers: int = 4) -> Any:
    return Decoder([WeirdBlock() for _ in range(num_layers)]), token_batch


@plain
def frozen(num_layers: int = 4) -> Any:
    """A whole frozen block, one with a frozen matrix in front of trainable ones, a frozen
    embedding."""
    model = Decoder([Block() for _ in range(num_layers)])
    model.blocks[1].requires_grad_(False)
    model.blocks[2].norm1.weight.requires_grad_(False)
    model.blocks[2].mlp.up.weight.requires_grad_(False)
    model.embedding.weight.requires_grad_(False)
    return model, token_batch


@plain
def frozen_prefix(num_layers: int = 4) -> Any:
    """Everything up to block 1 is frozen: backward ends before it reaches the first blocks."""
    model = Decoder([Block() for _ in range(num_layers)])
    for part in (model.embedding, *model.blocks[:2]):
        part.requires_grad_(False)
    model.positions.requires_grad_(False)
    return model, token_batch


class _Adapted(Block):
    """A frozen block with a low-rank trainable path beside it, as LoRA trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.low = nn.Linear(HIDDEN, 2, bias=False)
        self.high = nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.high(self.low(x))


@plain
def adapters(num_layers: int = 3) -> Any:
    """Only the adapters in the blocks are trained; embedding, norm and head are frozen."""
    model = Decoder([])
    model.requires_grad_(False)
    model.blocks.extend(_Adapted() for _ in range(num_layers))
    return model, token_batch


class _WithSpare(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(HIDDEN, 3)


@plain
def unused(num_layers: int = 3) -> Any:
    """Parameters that no forward uses: in every block, a whole block, and beside the blocks."""
    model = Decoder([_WithSpare() for _ in range(num_layers)])
    model.blocks.insert(1, _Idle())
    model.spare = nn.Linear(HIDDEN, 5)
    return model, token_batch


class _Idle(Block):
    """A block whose call uses none of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


@plain
def tied_blocks(num_layers: int = 4) -> Any:
    """Blocks 0 and 2 share a matrix; block 1 has a matrix under two names; block 3 shares a module
    with block 0."""
    model = Decoder([Block() for _ in range(num_layers)])
    model.blocks[2].mlp.up.weight = model.blocks[0].mlp.up.weight
    model.blocks[1].mlp.down.weight = nn.Parameter(model.blocks[1].mlp.down.weight.detach().clone())
    model.blocks[1].again = nn.Linear(4 * HIDDEN, HIDDEN)
    model.blocks[1].again.weight = model.blocks[1].mlp.down.weight
    model.blocks[3].norm1 = model.blocks[0].norm1
    return model, token_batch


class _Resized(nn.Module):
    """MLP of its own width between a projection in and out: no two blocks have the same shapes."""

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, inner, bias=bias)
        self.down = nn.Linear(inner, HIDDEN, bias=not bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@plain
def uneven() -> Any:
    return Decoder(
        [_Resized(7, True), _Resized(120, False), _Resized(33, True), Block()]
    ), token_batch


@plain
def sequential() -> Any:
    """A list of unlike layers, some without parameters, and nothing that repeats."""
    first, middle, last = nn.Linear(9, 33), nn.Linear(33, 65), nn.Linear(65, 1)
    net = nn.Sequential(first, nn.ReLU(), middle, nn.LayerNorm(65), nn.GELU(), last)
    return _Regression(net), _regression_batch


class _Regression(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.net(inputs), targets)


def _regression_batch(seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6, 9, generator=random)
    return {"inputs": inputs, "targets": inputs.sum(dim=1, keepdim=True).sin()}


# --- calls ----------------------------------------------------------------------------------------


class _Twice(Decoder):
    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in (
            self.blocks[0],
            self.blocks[1],
            self.blocks[1],
            self.blocks[2],
            self.blocks[0],
        ):
            x = block(x)
        return x


@plain
def called_twice() -> Any:
    """Block 1 runs twice in a row, block 0 first and last."""
    return _Twice([Block() for _ in range(3)]), token_batch


@plain
def shared_list() -> Any:
    """The same module stands in the list more than once: two blocks make five calls."""
    first, second = Block(), Block()
    return Decoder([first, second, second, first, second]), token_batch


class _StructuredBlock(Block):
    """Takes a tuple and keyword arguments, among them a dict; returns a dict in a tuple."""

    def forward(  # type: ignore[override]
        self, state: tuple[Tensor, int], *, context: dict[str, Tensor], scale: float = 1.0
    ) -> tuple[dict[str, Any], int]:
        x, depth = state
        x = super().forward(x * context["mask"].unsqueeze(-1))
        return {"hidden": scale * x, "aux": [x.square().mean(), None]}, depth + 1


class _Structured(Decoder):
    def forward(self, input_ids: Tensor, labels: Tensor, *, mask: Tensor) -> dict[str, Any]:
        x, depth = self.embedding(input_ids) + self.positions, 0
        penalty = x.new_zeros(())
        for block in self.blocks:
            output, depth = block((x, depth), context={"mask": mask}, scale=0.9)
            x, penalty = output["hidden"], penalty + output["aux"][0]
        logits = self.head(self.norm(x))
        loss = _cross_entropy(logits, labels) + 0.01 * penalty
        return {"logits": logits, "loss": loss, "depth": depth}


@plain
def structured(num_layers: int = 3) -> Any:
    def make_batch(seed: int) -> Batch:
        mask = torch.ones(2, LENGTH)
        mask[0, LENGTH - 1 - seed % 3 :] = 0.0
        return {**token_batch(seed), "mask": mask}

    return _Structured([_StructuredBlock() for _ in range(num_layers)]), make_batch


class _Skipping(Decoder):
    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if int(input_ids[0, index]) % 2:
                x = block(x)
        return x


@plain
def layer_drop(num_layers: int = 4) -> Any:
    """Which blocks are called depends on the batch; a block may be left out altogether."""
    return _Skipping([Block() for _ in range(num_layers)]), token_batch


class _MayPass(Block):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach()[0, 0, self.index]) > 0 else super().forward(x)


@plain
def skip_inside(num_layers: int = 4) -> Any:
    """A block that may return its very input: called, without a use of its parameters."""
    return Decoder([_MayPass(index) for index in range(num_layers)]), token_batch


class _ExpertBlock(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(HIDDEN, 2 * HIDDEN) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.norm(x).flatten(0, 1)
        weight, choice = self.router(inputs).softmax(dim=-1).max(dim=-1)
        mixed = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            mine = (choice == index).nonzero().squeeze(-1)
            if mine.numel():
                mixed = mixed.index_add(0, mine, expert(inputs[mine]) * weight[mine].unsqueeze(-1))
        return x + mixed.view_as(x)


@plain
def experts(num_layers: int = 3, num_experts: int = 7) -> Any:
    """Top-1 mixture: some experts get no token in some batches, and then no gradient."""
    return Decoder([_ExpertBlock(num_experts) for _ in range(num_layers)]), token_batch


class _BufferBlock(nn.Module):
    """Running statistics, a counter and a table that is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(HIDDEN)
        self.mlp = MLP()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer(
            "signs", torch.tensor([1.0, -1.0]).repeat(HIDDEN // 2), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        normed = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(normed * self.signs)


@plain
def buffers(num_layers: int = 3) -> Any:
    return Decoder([_BufferBlock() for _ in range(num_layers)]), token_batch


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
        return _cross_entropy(F.linear(hidden, self._head_weight()), labels)

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
        loss = _cross_entropy(F.linear(inner, self._head_weight(), self.lm_head.bias), labels)
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
        return {"loss": _cross_entropy(self.head(x), labels)}


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


@hugging_face
def llama(**config: Any) -> Any:
    return _causal("Llama", _LLAMA, config)


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
