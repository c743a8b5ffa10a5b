"""Laws of the costs: what is counted without memory is what a real forward computes and saves.

The oracle runs the same model on real tensors and keeps the distinct storages that autograd saved.
A CPU differs from a GPU in three places, each with its known number of bytes (`attention_extra` and
below).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.utils import ModelOutput

from stronghold.errors import ConfigError
from stronghold.model.costs import DTYPES, ModelCosts, count_costs, trace_costs
from stronghold.model.logits import LogitsInParts
from stronghold.model.partition import Partition, partition
from tests.models import HIDDEN, LENGTH, MODELS, VOCAB
from tests.support.quiet import law_of_time, on_time

TOKENS = 2 * LENGTH  # of the zoo's batches


def on_meta(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in batch.items()}


def total(costs: ModelCosts, field: str) -> Any:
    """Of the whole model."""
    return sum(attrgetter(field)(layer) for layer in costs.layers)


def traced(name: str, dtype: str = "fp32", **options: Any) -> ModelCosts:
    model, make_batch = MODELS[name](**options)
    return trace_costs(
        model, partition(model), batch=2, seq=LENGTH, dtype=dtype, inputs=on_meta(make_batch(0))
    )


def attention_extra(query: Tensor, *tensors: Tensor, dtype: str) -> int:
    """Bytes that the fused kernel of a GPU saves and the one of a CPU does not: the seed and offset
    of dropout, and in fp32 log-sum-exp rows up to a multiple of 32."""
    if not any(tensor.requires_grad for tensor in (query, *tensors)):
        return 0
    batch, heads, rows, _ = query.shape
    return 24 if dtype != "fp32" else 16 + 4 * batch * heads * (-rows % 32)


def really_kept(
    model: nn.Module, batch: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Bytes of the storages that one forward on the CPU leaves behind: saved by autograd, or given
    to several blocks; plus what a GPU's attention adds."""
    model.to(DTYPES[dtype])
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}
    entered: dict[int, tuple[Any, set[nn.Module]]] = {}
    extra = []
    fused = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        extra.append(attention_extra(*args[:3], dtype=dtype))
        return fused(*args, **kwargs)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held: the address is no other's
        return tensor

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        for leaf in (*args, *kwargs.values()):
            for tensor in leaf if isinstance(leaf, tuple) else (leaf,):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    entered.setdefault(storage.data_ptr(), (storage, set()))[1].add(module)

    for layer in partition(model).streamed:
        layer.modules[0].register_forward_pre_hook(enter, with_kwargs=True)
    with saved_tensors_hooks(pack, lambda packed: packed):
        monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
        output = model(**batch)  # held: the graph frees nothing
    monkeypatch.undo()
    kept |= {key: storage for key, (storage, blocks) in entered.items() if len(blocks) > 1}
    del output
    return sum(storage.nbytes() for storage in kept.values()) + sum(extra)


# The same operators on both: bytes must be equal. Others of the zoo drop their layers at random.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        *("gpt", "gpt_tied", "weird_model", "frozen", "frozen_prefix", "adapters", "unused"),
        *("tied_blocks", "uneven", "sequential", "called_twice", "shared_list", "structured"),
        *("buffers", "megatron_gpt", "megatron_bert", "gpt2", "bert", "gemma2"),
    ],
)
def test_saved_bytes_are_those_of_a_real_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, make_batch = MODELS[name]()
    assert total(traced(name), "saved_bytes") == really_kept(
        model, make_batch(0), "fp32", monkeypatch
    )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "mixtral"])
def test_saved_bytes_in_bf16_are_those_of_a_real_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grouped heads, which no GPU's kernel takes in fp32."""
    model, make_batch = MODELS[name]()
    batch = make_batch(0)
    assert total(traced(name, "bf16"), "saved_bytes") == really_kept(
        model, batch, "bf16", monkeypatch
    )


def test_an_output_that_a_block_saves_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block saves the result of `relu`, and the linear layer after it saves it as its input.
    Nothing saves the last one again. The mask enters every block, and counts for `first` alone."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return F.relu(self.linear(x) * mask), mask

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(Masked() for _ in range(4))
            self.between = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            mask = self.first(x).detach() + 1.0
            for index, block in enumerate(self.blocks):
                x, mask = block(self.between(x) if index else x, mask)
            return x.mean()

    model, batch = Model(), {"x": torch.ones(5, 8)}
    costs = trace_costs(
        model, partition(model), batch=5, seq=1, dtype="fp32", inputs=on_meta(batch)
    )
    assert total(costs, "saved_bytes") == really_kept(model, batch, "fp32", monkeypatch)
    (first,) = (layer.index for layer in partition(model).layers if layer.name == "first")
    mask_bytes = 5 * 8 * 4
    assert costs.layers[first].saved_bytes >= 2 * mask_bytes  # and x


def test_statistics_of_layer_norms_are_fp32_beside_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps them in bf16: mean and rstd of 7 norms, 2 bytes less each."""
    model, make_batch = MODELS["gpt"](num_layers=3)
    real = really_kept(model, make_batch(0), "bf16", monkeypatch)
    assert total(traced("gpt", "bf16"), "saved_bytes") == real + 7 * 2 * TOKENS * 2


def test_attention_inside_a_module_of_torch_is_fused_too() -> None:
    """Written out it saves a matrix per head: 16 times the bytes for 4 times the length."""
    short, long = (total(encoder(seq), "saved_bytes") for seq in (512, 2048))
    assert long < 4.01 * short


def encoder(seq: int) -> ModelCosts:
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    source = torch.empty(1, seq, 64, device="meta")
    return trace_costs(
        model, partition(model), batch=1, seq=seq, dtype="bf16", inputs={"src": source}
    )


# -- FLOPs ----------------------------------------------------------------------------------------


def block_flops(hidden: int, inner: int, seq: int, tokens: int) -> int:
    """qkv, output, up and down; q k^T and the product with v, all pairs of a sequence."""
    return 2 * tokens * (4 * hidden * hidden + 2 * hidden * inner) + 4 * tokens * seq * hidden


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_flops_follow_the_closed_formula(dtype: str) -> None:
    costs = traced("gpt", dtype)
    model, _ = MODELS["gpt"]()
    of = {layer.name: layer.index for layer in partition(model).layers}
    for block in range(3):
        index = of[f"blocks.{block}"]
        assert costs.layers[index].forward_flops == block_flops(HIDDEN, 4 * HIDDEN, LENGTH, TOKENS)
    assert costs.layers[of["head"]].forward_flops == 2 * TOKENS * HIDDEN * VOCAB
    assert costs.dtype == dtype


def test_a_causal_mask_does_not_halve_the_flops() -> None:
    query = torch.empty(1, 2, 64, 32, device="meta", dtype=torch.bfloat16)

    class Attend(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32, device="meta"))
            self.causal = causal

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            return F.scaled_dot_product_attention(y, y, y, is_causal=self.causal)

    flops, masked = [], []
    for causal in (True, False):
        model = nn.Sequential(Attend(causal))
        costs = trace_costs(
            model, partition(model, "0"), batch=1, seq=64, dtype="bf16", inputs={"input": query}
        )
        flops.append(total(costs, "forward_flops"))
        masked.append(total(costs, "forward.causal_flops"))
    assert flops[0] == flops[1] == 4 * 2 * 64 * 64 * 32
    assert masked == [flops[0], 0.0]


def test_experts_count_for_the_tokens_that_they_get() -> None:
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=100,
    )
    costs, layers = of_config(config, batch=2, seq=32)
    tokens = 64
    attention = 2 * tokens * 4 * 64 * 64 + 4 * tokens * 32 * 64
    # two experts of three matrices for each token
    experts = 2 * tokens * 2 * 3 * 64 * 128
    router = 2 * tokens * 64 * 8
    block = next(layer.index for layer in layers.streamed)
    # Without the rotary embedding's outer product, which lies before the blocks.
    assert costs.layers[block].forward_flops == attention + experts + router


# -- which layer ----------------------------------------------------------------------------------


def of_config(config: Any, *, batch: int, seq: int) -> tuple[ModelCosts, Partition]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()
    layers = partition(model)
    return trace_costs(model, layers, batch=batch, seq=seq, dtype="bf16"), layers


def llama(num_layers: int = 3, **changes: Any) -> LlamaConfig:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(num_hidden_layers=num_layers, **(sizes | changes))


def test_a_block_keeps_its_input_for_recomputation_and_nothing_shared() -> None:
    """Cosines and sines enter every block: they belong to none."""
    costs, layers = of_config(llama(), batch=2, seq=32)
    for layer in layers.layers:
        expected = 2 * 32 * 64 * 2 if layer.streamed else 0
        assert costs.layers[layer.index].boundary_bytes == expected


def test_a_repeated_block_costs_what_it_costs_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("gpt", "llama", "bert", "called_twice")
    remembered = [traced(name, "bf16") for name in names]
    monkeypatch.setattr("stronghold.model.costs.structure", lambda _: (object(),))
    assert remembered == [traced(name, "bf16") for name in names]


def test_the_logits_of_the_loss_belong_to_the_head() -> None:
    costs, layers = of_config(llama(vocab_size=10_000), batch=2, seq=32)
    head = layers.layers[-1]
    assert head.name == "lm_head"
    fp32_logits = 2 * 32 * 10_000 * 4
    assert fp32_logits < costs.layers[head.index].saved_bytes < 1.1 * fp32_logits


def test_logits_in_parts_cost_what_the_formulas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of head and loss: four products instead of three, one part's logits in passing, and nothing
    is saved that has the vocabulary's width."""
    monkeypatch.setattr("stronghold.model.logits.TOKENS", 16)
    whole = of_config(llama(vocab_size=5000), batch=2, seq=32)[0].layers[-1]
    monkeypatch.setattr("stronghold.model.logits.LARGE_BYTES", 1)
    costs, layers = of_config(llama(vocab_size=5000), batch=2, seq=32)
    parts = costs.layers[-1]
    product = 2 * 2 * 32 * 64 * 5000
    assert layers.layers[-1].name == "lm_head"
    assert (whole.forward_flops, whole.backward.product_flops) == (product, 2 * product)
    assert (parts.forward_flops, parts.backward.product_flops) == (2 * product, 2 * product)
    logits = 16 * 5000 * 4
    assert logits <= parts.passing_bytes < 0.5 * whole.passing_bytes
    assert parts.saved_bytes < 0.1 * whole.saved_bytes


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("seq", [64, 4096])
def test_passing_bytes_are_the_peak_of_head_and_loss_on_their_own(trains: bool, seq: int) -> None:
    """Whole logits, and logits in parts. The oracle runs the same modules from the hidden states,
    and knows each tensor by its storage."""
    config = llama(vocab_size=100_000)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        hidden = torch.empty(1, seq, 64, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.empty(1, seq, dtype=torch.long)
    for parameter in (*model.lm_head.parameters(), *model.model.norm.parameters()):
        parameter.requires_grad_(trains)
        if trains:
            parameter.register_post_accumulate_grad_hook(drop_gradient)
    layers = partition(model)
    traced = trace_costs(model, layers, batch=1, seq=seq, dtype="bf16")
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    live = Live((hidden, ids, *model.parameters(), *model.buffers()))
    with contextlib.closing(LogitsInParts(model, None)), live:
        with saved_tensors_hooks(pack, lambda packed: packed):
            x = model.model.norm(hidden)
            loss = model.loss_function(logits=model.lm_head(x), labels=ids, vocab_size=100_000)
        saved_bytes = sum(saved[key].nbytes() for key in saved.keys() & live.sizes.keys())
        saved.clear()
        del x
        loss.backward()
    assert traced.layers[-1].passing_bytes == live.peak - saved_bytes


class Live(TorchDispatchMode):
    """The sizes of all storages that operators have made and that live, and the most of their
    sum."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = [tensor.untyped_storage() for tensor in known]
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self.sizes and storage not in self.known:
                    self.sizes[id(storage)] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, id(storage))
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


# -- what it leaves and refuses -------------------------------------------------------------------


def test_the_model_is_as_before() -> None:
    model, make_batch = MODELS["gpt"]()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    values = {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    trace_costs(
        model, partition(model), batch=2, seq=LENGTH, dtype="bf16", inputs=on_meta(make_batch(0))
    )
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    for name, parameter in model.named_parameters():
        assert values[name] == (parameter, parameter.data_ptr(), parameter.dtype)
        assert parameter.grad is None


@pytest.mark.parametrize("answer", ["all", "sum"])
def test_a_mask_that_masks_nothing_costs_nothing(answer: str) -> None:
    """Models ask whether a mask masks something, in two ways. The answer is that of the batch."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            is_whole = attention_mask.all()
            if answer == "sum":
                is_whole = attention_mask.sum() == attention_mask.numel()
            for block in self.blocks:
                x = block(x)
            return x.sum() if is_whole else (x * attention_mask[..., None]).sum()

    model, x = Asking(), torch.ones(2, 3, 8)
    saved = []
    for masked in (0, 1):
        mask = torch.ones(2, 3, dtype=torch.long)
        mask[0, :masked] = 0
        inputs = {"x": x, "attention_mask": mask}
        layers = partition(model, "blocks")
        costs = count_costs(model, layers, (), inputs, dtype="fp32")
        saved.append(total(costs, "saved_bytes"))
    assert saved[0] < saved[1]


def test_logits_without_a_loss_cost_a_log_softmax() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
            self.head = nn.Linear(8, 1000, bias=False)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            for block in self.blocks:
                x = block(x)
            return {"logits": self.head(x)}

    model, x = Logits(), torch.ones(2, 3, 8)
    costs = count_costs(model, partition(model, "blocks"), (x,), {}, dtype="fp32")
    head = max(costs.layers, key=attrgetter("saved_bytes"))
    assert head.saved_bytes >= 4 * 2 * 3 * 1000
    assert head.backward.product_flops == 2 * head.forward.product_flops > 0


def test_hooks_after_a_forward_see_no_count_and_other_ones_stay() -> None:
    model, make_batch = MODELS["gpt"]()
    seen: list[str] = []
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model.blocks[0].register_full_backward_pre_hook(lambda *_: seen.append("backward"))
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    after = model.register_forward_hook(lambda *_: seen.append("after"))
    batch = make_batch(0)
    count_costs(model, partition(model), (), batch, dtype="fp32")
    assert seen == ["before"]
    model(**batch)
    assert seen == ["before", "before", "after"]
    after.remove()
    model(**batch)
    assert seen[3:] == ["before"]


def test_what_cannot_be_counted_is_refused_and_changes_nothing() -> None:
    """An input without shape and strides; a module that keeps its last output, which none may
    update."""
    model, make_batch = MODELS["gpt"]()
    model.last = kept = ModelOutput(loss=torch.ones(1))
    layers, batch = partition(model), make_batch(0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ConfigError, match="failed on tensors without values"):
        count_costs(model, layers, (nested,), {}, dtype="fp32")
    count_costs(model, layers, (), batch, dtype="fp32")
    assert model.last is kept
    assert list(kept) == ["loss"]


def test_a_buffer_that_forward_makes_does_not_stay() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("table", torch.empty(8, device="meta"))
            for block in self.blocks:
                x = block(x + self.table)
            return x.sum()

    model = Lazy()
    batch = {"x": torch.empty(5, 8, device="meta")}
    trace_costs(model, partition(model), batch=5, seq=1, dtype="fp32", inputs=batch)
    assert [name for name, _ in model.named_buffers()] == []


def test_a_forward_that_depends_on_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="failed on tensors without values"):
        traced("experts")


def test_arguments_that_are_not_known_are_named() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left + right

    model = Pair()
    with pytest.raises(ConfigError, match=r"Pair\.forward needs right"):
        trace_costs(model, partition(model, "blocks"), batch=1, seq=8, dtype="bf16")


@law_of_time
def test_eighty_layers_take_less_than_two_seconds() -> None:
    config = llama(
        80,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    of_config(llama(), batch=1, seq=8)  # imports
    begin = time.process_time()  # of this process: others may be at work here
    costs, layers = of_config(config, batch=1, seq=8192)
    took_s = time.process_time() - begin
    assert len(layers.streamed) == 80
    numel = sum(named.parameter.numel() for layer in layers.layers for named in layer.parameters)
    # The embedding has no product, and the head, in parts, has two.
    assert total(costs, "forward.product_flops") == pytest.approx(2 * numel * 8192, rel=0.001)
    on_time(took_s < 2.0, f"{took_s:.1f} s")
