"""Side effects of divided blocks: what a block leaves besides its output is the whole batch's, or
it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from stronghold.errors import ConfigError
from tests.support.training import config, initialized

BATCH, LENGTH, VOCABULARY, LAYERS, CALLS = 5, 11, 61, 2, 3
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, SHARED),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**EXPERTS, "head_dim": 12}),
}


def model_of(family: str) -> Any:
    settings, model_class, more = FAMILIES[family]
    sizes = {"hidden_size": 24, "intermediate_size": 32, "vocab_size": VOCABULARY}
    counts = {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return model_class(settings(**sizes, **counts, **more, attn_implementation="eager"))


def batch_of(call: int, *, masked: bool) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(call)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=made)
    batch = {"input_ids": tokens, "labels": tokens}
    if masked:
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][1, 7:] = 0
    return batch


def recorded(family: str, section: dict[str, Any], *, masked: bool, early: bool) -> list[Any]:
    """Train on everything that is recorded. Return it, call by call, in order."""
    model = model_of(family)
    probed: list[torch.Tensor] = []

    def probe(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [*args, *kwargs.values(), *(output if isinstance(output, tuple) else [output])]
        probed.extend(value for value in given if isinstance(value, torch.Tensor))

    def register() -> None:
        for block in model.model.layers:
            block.mlp.register_forward_hook(lambda module, args, output: probed.append(args[0]))
            block.self_attn.register_forward_hook(probe, with_kwargs=True)
            block.self_attn.o_proj.register_forward_hook(probe, with_kwargs=True)
            block.register_forward_hook(probe, with_kwargs=True)

    if early:
        register()
    engine = initialized(model, config(section=section))
    if not early:
        register()
    wanted = {"output_attentions": True, "output_hidden_states": True}
    if family != "llama":
        wanted["output_router_logits"] = True
    found = []
    for call in range(CALLS):
        probed.clear()
        output = engine(**batch_of(call, masked=masked), **wanted)
        outputs = [*output.hidden_states, *output.attentions, *output.get("router_logits", ())]
        loss = output.loss + sum(value.float().square().mean() for value in outputs)
        loss = loss + sum(v.square().mean() for v in probed if v.requires_grad)
        found.append([t.detach().clone() for t in (loss, *outputs, *probed)])
        num_probed = len(probed)
        engine.backward(loss)
        assert len(probed) == num_probed, "the hooks were called again in backward"
        engine.step()
    found.append(list(engine.module_state_dict().values()))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("family", "masked", "early", "policy"),
    [
        ("llama", True, True, "keep"),
        ("llama", False, False, "recompute"),
        ("mixtral", True, False, "keep"),
        ("mixtral", False, True, "recompute"),
        ("qwen2_moe", True, True, "recompute_offload"),
        ("qwen2_moe", False, False, "keep"),
        ("qwen3_moe", True, False, "recompute"),
        ("qwen3_moe", False, True, "keep"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2])
def test_hooks_and_recorders_get_the_whole_batch(
    family: str, masked: bool, early: bool, policy: str, chunk: int
) -> None:
    """From the first call on, in the order of the plain model, and with gradients."""
    section = {"window": 1, "activations": policy}
    # Without chunks a block that is computed again calls its hooks again.
    expected = recorded(family, {**section, "activations": "keep"}, masked=masked, early=early)
    found = recorded(family, {**section, "chunk": chunk}, masked=masked, early=early)
    for call, whole in zip(found, expected, strict=True):
        for tensor, other in zip(call, whole, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-3, atol=1e-4)


class Slotted:
    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


class Block(nn.Module):
    """Leaves something besides its output, or lets a hook do so."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind
        self.seen: list[int] = []
        self.mean: torch.Tensor | None = None
        self.array, self.slotted = np.zeros(3), Slotted()
        self.table: torch.Tensor | None = None
        if kind == "spectral norm":
            parametrizations.spectral_norm(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "input written" and not x.requires_grad:
            x = x.add_(1.0).clone()  # the first block's
        y: torch.Tensor = self.linear(x)
        if self.kind == "running mean":
            mean = y.detach().mean()
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        elif self.kind == "output kept":
            self.mean = y
        elif self.kind in ("calls counted", "trials counted"):
            self.seen.extend([len(y)] * (self.training == (self.kind == "calls counted")))
        elif self.kind == "array written":
            self.array[0] += self.training
        elif self.kind == "slot written":
            self.slotted.total += self.training
        elif self.kind == "table":
            self.table = torch.arange(8.0) if self.table is None else self.table
            y = y + self.table
        return x + y


def stack_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind) for _ in range(3)))


def replace_forward(block: Any) -> None:
    forward = block.linear.forward
    block.linear.forward = lambda x: forward(x)


HOOKS: dict[str, tuple[Callable[[Any], object], str]] = {
    "before": (
        lambda block: block.linear.register_forward_pre_hook(lambda module, args: None),
        r"1\.linear has a hook before its forward",
    ),
    "gradient": (
        lambda block: block.linear.register_full_backward_hook(lambda *_: None),
        r"1\.linear has a hook on its gradient",
    ),
    "before the gradient": (
        lambda block: block.linear.register_full_backward_pre_hook(lambda *_: None),
        r"1\.linear has a hook on its gradient",
    ),
    "another output": (
        lambda block: block.linear.register_forward_hook(lambda module, args, y: 2 * y),
        r"a forward hook on a Linear in 1 returns another output",
    ),
    "replaced": (replace_forward, r"1\.linear has a forward that was replaced after initialize"),
}
HOLDS = {
    "spectral norm": r"0 changes _SpectralNorm\._u",
    "running mean": r"0 changes Block\.mean",
    "output kept": r"0 changes Block\.mean",
    "calls counted": r"0 changes Block\.seen",
    "array written": r"0 changes Block\.array",
    "slot written": r"0 changes Block\.slotted",
    "trials counted": r"0 changes Block\.seen",  # a trial calls the block, too
}


def train_stack(
    kind: str, section: dict[str, Any], register: Callable[[Any], object] | None = None
) -> tuple[Any, list[torch.Tensor]]:
    model: Any = stack_of(kind)
    engine = initialized(model, config(section={"window": 1, **section}))
    losses = []
    try:
        if register is not None:
            register(model[1])
        for call in range(CALLS):
            loss = engine(torch.randn(5, 8, generator=torch.Generator().manual_seed(call)))
            loss = loss.square().mean()
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
    finally:
        engine.destroy()
    return model, losses


@pytest.mark.parametrize("kind", HOLDS)
def test_what_a_block_keeps_of_a_chunk_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^stronghold.chunk: {HOLDS[kind]}.*leave the key out"):
        train_stack(kind, {"chunk": 2})


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_sees_or_changes_a_chunk_is_refused_by_name(kind: str) -> None:
    register, words = HOOKS[kind]
    with pytest.raises(ConfigError, match=f"^stronghold.chunk: {words}.*leave the key out"):
        train_stack("", {"chunk": 2}, register)


@pytest.mark.parametrize("kind", ["table", "input written"])
def test_a_trial_leaves_no_trace_and_a_table_stays(kind: str) -> None:
    model, losses = train_stack(kind, {"chunk": 2})
    plain, expected = train_stack(kind, {})
    torch.testing.assert_close(losses, expected)
    for block, other in zip(model, plain, strict=True):
        assert block.seen == other.seen == []
        assert (block.table is None) == (kind != "table")
        assert block.training


class Halving(nn.Module):
    """Its blocks write into an argument that all their chunks get."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HalvingBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.ones(8)
        for block in self.blocks:
            x = block(x, shift)
        return x


class HalvingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        if self.training:
            shift.mul_(0.5)
        y: torch.Tensor = self.linear(x) + shift
        return y


def test_an_argument_that_all_chunks_get_is_not_written() -> None:
    engine = initialized(Halving(), config(section={"window": 1, "chunk": 2}))
    with pytest.raises(ConfigError, match=r"^stronghold.chunk: blocks.0 writes into a parameter"):
        engine(torch.randn(5, 8))
    engine.destroy()


class Inside(nn.Module):
    """A block with one of Transformers' models inside, which has a hook of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of("llama").model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(inputs_embeds=x).last_hidden_state
        return output


def test_the_engines_own_hooks_inside_a_block_are_let_through() -> None:
    losses = []
    for section in ({}, {"chunk": 2}):
        model = nn.Sequential(Inside(), Inside())
        engine = initialized(model, config(section={"window": 1, "layers": ["0", "1"], **section}))
        x = torch.randn(BATCH, LENGTH, 24, generator=torch.Generator().manual_seed(0))
        losses.append(engine(x).square().mean())
        engine.backward(losses[-1])
        engine.destroy()
    torch.testing.assert_close(*losses)


class Positioned(nn.Module):
    """A module inside returns one table for all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + self.table(torch.arange(4))
        return y


def test_a_hook_that_comes_between_two_calls_gets_a_table_once() -> None:
    model = nn.Sequential(*(Positioned() for _ in range(3)))
    engine = initialized(model, config(section={"window": 1, "chunk": 1}))
    seen: list[torch.Tensor] = []
    x = torch.randn(BATCH, 4, 8)
    engine(x)
    model[1].table.register_forward_hook(lambda module, args, output: seen.append(output))
    engine(x)
    assert [tuple(table.shape) for table in seen] == [(4, 8)]
    engine.destroy()


@pytest.mark.parametrize("place", [{"window": 1}, {"resident_layers": "all"}], ids=str)
def test_gradients_of_some_tensors_alone_reach_no_step(place: dict[str, Any]) -> None:
    model = stack_of("")
    engine = initialized(model, config(section={"chunk": 2, **place}))
    plain = initialized(stack_of(""), config(section={"chunk": 2, **place}))
    x = torch.randn(5, 8, requires_grad=True)
    loss = engine(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert gradient.shape == x.shape
    with pytest.raises(ConfigError, match=r"^stronghold.chunk: torch.autograd.grad asks for"):
        torch.autograd.grad(loss, model[1].linear.weight)
    for one in (engine, plain):
        one.backward(one(x.detach()).square().mean())
        one.step()
    for ours, theirs in zip(model.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    engine.destroy()
    plain.destroy()
