"""Training a part of a model: frozen layers, PEFT's adapters, experts that nobody chose, parameters
that arrive in another dtype than the config's.

Frozen layers stream without gradients and without optimizer state, and what trains does so exactly
as in a plain loop with the same Adam.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import stronghold
from stronghold.errors import ConfigError
from tests.models import HIDDEN, Decoder, loss_of
from tests.models import token_batch as short_batch
from tests.models.families import llama_of
from tests.support.training import (
    ADAM,
    Factory,
    KernelOptimizer,
    assert_identical,
    config,
    initialized,
    train_plain,
    train_windowed,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

VOCABULARY = 61
Batches = Callable[[int], dict[str, Any]]


def token_batch(seed: int) -> dict[str, Any]:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def base_model() -> nn.Module:
    return llama_of(24, 52, 3, 2, 1, VOCABULARY)


def lora(**options: Any) -> tuple[nn.Module, Batches]:
    """A tiny Llama with adapters whose second factor is not zero, so that every factor learns."""
    chosen = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **chosen)
    return peft.get_peft_model(base_model(), settings), token_batch


def checkpointed_lora(*, reentrant: bool) -> tuple[nn.Module, Batches]:
    """As the Trainer sets it up: the embedding's output must ask for a gradient, since nothing
    before the first block does."""
    model, make_batch = lora()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model, make_batch


def sparse(kind: str) -> tuple[nn.Module, Batches]:
    """Adapters whose weight is a sparse tensor: SHiRA's is made of a product, FRoD's of the
    parameter's own memory."""
    if kind == "shira":
        settings: Any = peft.ShiraConfig(r=2, target_modules=["q_proj"], init_weights=False)
    else:
        settings = peft.FrodConfig(target_modules=["q_proj", "v_proj"], init_weights=False)
    settings.task_type = "CAUSAL_LM"
    return peft.get_peft_model(base_model(), settings), token_batch


CASES: dict[str, Factory] = {
    "lora": lora,
    "lora with dropout": functools.partial(lora, lora_dropout=0.3),
    "lora on everything": functools.partial(lora, target_modules="all-linear"),
    "lora and a whole head": functools.partial(lora, modules_to_save=["lm_head"]),
    "lora and whole norms": functools.partial(lora, modules_to_save=["input_layernorm"]),
    "dora": functools.partial(lora, use_dora=True),
    "lora, checkpointed": functools.partial(checkpointed_lora, reentrant=False),
    "lora, checkpointed reentrant": functools.partial(checkpointed_lora, reentrant=True),
}


def prefix_tuning() -> tuple[nn.Module, Batches]:
    """What is learnt comes to the blocks as a key-value cache that has keys already."""
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(base_model(), settings), token_batch


# Of each kind a case: the oracle of programs draws the first ones in every other way.
FURTHER: dict[str, Factory] = {
    "shira": functools.partial(sparse, "shira"),
    "frod": functools.partial(sparse, "frod"),
    "prefixes": prefix_tuning,
}


@pytest.mark.parametrize(
    ("case", "precision", "accumulation", "policy"),
    [
        *((case, "fp32", 1, "recompute") for case in CASES),
        ("lora", "bf16", 3, "offload"),
        ("dora", "bf16", 1, "keep"),
        ("shira", "bf16", 2, "keep"),
        ("shira", "fp32", 2, "recompute"),
        ("frod", "fp32", 2, "keep"),
        ("frod", "bf16", 2, "offload"),
        ("frod", "fp32", 2, "recompute"),
        *(("prefixes", "fp32", 1, policy) for policy in ("keep", "offload", "recompute")),
    ],
)
def test_adapters_train_exactly_as_in_a_plain_loop(
    case: str, precision: str, accumulation: int, policy: str
) -> None:
    factory = (CASES | FURTHER)[case]
    options: dict[str, Any] = {
        "accumulation": accumulation,
        "clipping": 0.5,
        "precision": precision,
    }
    settings = config(section={"window": 1, "activations": policy}, **options)
    run = train_windowed(factory, steps=3, settings=settings)
    expected = train_plain(factory, steps=3, **options)
    assert_identical(run, expected)
    assert run.norms == expected.norms


def test_an_adapter_that_points_its_parameter_elsewhere_is_refused_with_its_name() -> None:
    """CPT projects what it learns in each forward, and assigns the result to `.data`."""
    masks = {"cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]}

    def cpt() -> tuple[nn.Module, Batches]:
        settings = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[5, 6, 7], **masks)
        return peft.get_peft_model(base_model(), settings), lambda seed: {
            **token_batch(seed),
            "input_type_mask": torch.full((2, 9), 4),
        }

    with pytest.raises(ConfigError, match=r"prompt_encoder.*delta_embedding.*other memory"):
        train_windowed(cpt, steps=2, settings=config(section={"window": 1}))


class Attending(nn.Module):
    """A block with torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.attention(x, x, x, need_weights=False)[0])


def adapted_attention(*targets: str) -> tuple[nn.Module, Batches]:
    settings = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(Decoder([Attending() for _ in range(3)]), settings), short_batch


def test_an_adapter_that_replaces_its_parameters_is_refused_with_the_name_of_one() -> None:
    """PEFT makes the weights of an nn.MultiheadAttention anew in each forward."""
    settings = config(section={"window": 1})
    match = r'"base_model\.model\.blocks\.0\.attention\.\S*weight" is another.*target_modules'
    with pytest.raises(ConfigError, match=match):
        train_windowed(lambda: adapted_attention("attention", "linear"), steps=1, settings=settings)
    run = train_windowed(lambda: adapted_attention("linear"), steps=2, settings=settings)
    assert_identical(run, train_plain(lambda: adapted_attention("linear"), steps=2))


def test_adalora_reads_gradients_before_the_step_and_drops_ranks_as_in_a_plain_loop() -> None:
    """It asks Transformers whether DeepSpeed trains, and DeepSpeed for the gradient then."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        settings = peft.AdaLoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "v_proj"],
            init_r=4,
            target_r=2,
            tinit=0,
            tfinal=1,
            deltaT=1,
            total_step=9,
        )
        return peft.get_peft_model(base_model(), settings)

    plain = make()
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    adam = KernelOptimizer(torch.optim.AdamW(trained, **ADAM))
    expected = []
    for step in range(5):
        loss = loss_of(plain(**token_batch(step)))
        loss.backward()
        plain.base_model.update_and_allocate(step)
        adam.step({p: p.grad for p in trained if p.grad is not None}, 0.5)
        plain.zero_grad()
        expected.append(loss.item())
    settings = config(clipping=0.5, section={"window": 1})
    model, hf = make(), HfDeepSpeedConfig(settings)
    engine: Any = stronghold.initialize(
        model=model,
        config=settings,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
    )[0]
    losses, dropped = [], 0
    for step in range(5):
        loss = loss_of(engine(**token_batch(step)))
        engine.backward(loss)
        model.base_model.update_and_allocate(step)
        dropped += sum(int((p == 0).sum()) for n, p in model.named_parameters() if "lora_E" in n)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    del hf
    assert losses == expected
    assert dropped, "no rank went"
    for (name, value), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_saved_adapters_open_on_the_base_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, make_batch = lora(modules_to_save=["lm_head"])
    engine = initialized(model, config(section={"window": 1}))
    engine.backward(loss_of(engine(**make_batch(0))))
    engine.step()
    engine.module.save_pretrained(tmp_path)
    torch.manual_seed(0)
    opened = peft.PeftModel.from_pretrained(base_model(), tmp_path)
    expected = {k: v for k, v in engine.module_state_dict().items() if "lora_" in k or "saved" in k}
    assert expected
    for name, weight in opened.state_dict().items():
        if name in expected:
            assert torch.equal(weight, expected[name]), name
    merged = engine.module.eval()(**make_batch(1)).loss
    assert torch.allclose(opened.eval()(**make_batch(1)).loss, merged, atol=1e-6)
    engine.destroy()


# --- adapters of a parameter ----------------------------------------------------------------------


def experts_lora(family: str) -> tuple[nn.Module, Batches]:
    """Adapters of fused experts, two on one module: PEFT parametrizes both in each forward."""
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    }
    if family == "gpt_oss":
        base: nn.Module = GptOssForCausalLM(GptOssConfig(num_local_experts=4, **shape))
    else:
        base = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, **shape))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        lora_alpha=4,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    return peft.get_peft_model(base, settings), token_batch


FUSED = {family: functools.partial(experts_lora, family) for family in ("gpt_oss", "qwen3_moe")}
EXPERT_SECTIONS: list[dict[str, Any]] = [
    {"window": 1, "activations": "recompute"},
    {"window": 2, "activations": "keep"},
    {"window": 1, "resident_layers": 1, "activations": "offload"},
    {"window": 2, "chunk": 1, "activations": "recompute"},
    {"resident_layers": "all", "resident_updates": "gpu"},
]


def streamed_blocks(model: Any) -> list[nn.Module]:
    return list(model.base_model.model.model.layers)


@pytest.mark.parametrize("section", EXPERT_SECTIONS, ids=str)
@pytest.mark.parametrize(
    ("family", "precision", "accumulation"),
    [("gpt_oss", "fp32", 3), ("gpt_oss", "bf16", 1), ("qwen3_moe", "bf16", 3)],
)
def test_adapters_of_fused_experts_train_exactly_as_in_a_plain_loop(
    family: str, precision: str, accumulation: int, section: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "accumulation": accumulation,
        "clipping": 0.5,
        "precision": precision,
    }
    run = train_windowed(FUSED[family], steps=3, settings=config(section=section, **options))
    chunks = (streamed_blocks, section["chunk"]) if "chunk" in section else None
    expected = train_plain(FUSED[family], steps=3, chunks=chunks, **options)
    assert_identical(run, expected)
    assert run.norms == expected.norms


# --- dtypes ---------------------------------------------------------------------------------------


def mixed_lora() -> nn.Module:
    """A bf16 base with adapters that PEFT made fp32, its default."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    return peft.get_peft_model(base_model().bfloat16(), settings)


def test_fp32_training_refuses_a_parameter_of_fewer_bits() -> None:
    with pytest.raises(ConfigError, match=r'bfloat16, but the config asks for fp32: add "bf16"'):
        stronghold.initialize(model=mixed_lora(), config=config())
