"""Programs that generate between two steps, with DeepSpeed's rollouts and as OpenRLHF does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.rollout import (
    HybridEngineRollout,
    ResponseTokenBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
    generalized_jsd_loss,
)
from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRolloutConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from tests.models.families import llama_of
from tests.support.training import ADAM, KernelOptimizer, config, initialized

VOCABULARY = 61
# all that a rollout asks it for
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=1)
SECTIONS: dict[str, dict[str, Any]] = {
    "streamed": {"window": 1},
    "mixed": {"window": 1, "resident_layers": 1, "resident_updates": "gpu"},
    "whole": {"resident_layers": "all"},
}


def causal_model(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return llama_of(24, 52, 3, 2, 1, VOCABULARY, use_cache=True, **options)


def prompts(seed: int) -> RolloutRequest:
    """Two prompts of five tokens. The first has one token of padding before it."""
    tokens = torch.randint(2, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    tokens[0, 0] = mask[0, 0] = 0
    return RolloutRequest(prompt_ids=tokens, prompt_attention_mask=mask)


GREEDY = SamplingConfig(max_new_tokens=6, temperature=0.0)
SAMPLED = SamplingConfig(max_new_tokens=6, temperature=0.8, top_k=7, n_samples_per_prompt=2)


@pytest.mark.parametrize("section", SECTIONS)
def test_deepspeeds_distillation_on_its_own_samples(section: str) -> None:
    """`deepspeed.runtime.rollout` and its loss (OPSD): the student generates, a frozen teacher
    judges, and the student takes a step. Tokens, losses and weights are the plain loop's."""
    model, plain = causal_model(), causal_model()
    teacher = causal_model(1).eval()
    engine = initialized(model, config(clipping=0.0, section=SECTIONS[section]))
    adam = KernelOptimizer(torch.optim.AdamW(plain.parameters(), **ADAM), "exact")
    ours = build_rollout(RolloutConfig(), student_engine=engine, tokenizer=TOKENIZER)
    theirs = HybridEngineRollout(SimpleNamespace(module=plain), TOKENIZER)
    for step, sampling in enumerate((GREEDY, SAMPLED)):
        batches = []
        for rollout in (ours, theirs):
            torch.manual_seed(step)
            batches.append(rollout.generate(prompts(step), sampling))
            rollout.sync_weights(step)
        assert torch.equal(batches[0].input_ids, batches[1].input_ids)
        assert torch.equal(batches[0].attention_mask, batches[1].attention_mask)
        losses = [distilled(student, teacher, batches[0]) for student in (engine, plain)]
        assert torch.equal(losses[0], losses[1])
        engine.backward(losses[0])
        engine.step()
        losses[1].backward()
        adam.step({p: p.grad for p in plain.parameters()}, 0.0)
        plain.zero_grad()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    engine.destroy()


def distilled(student: nn.Module, teacher: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of DeepSpeed's on-policy distillation on one rollout."""
    targets = ResponseTokenBatch.from_rollout(batch)
    inputs = {"input_ids": targets.input_ids, "attention_mask": targets.attention_mask}
    logits = student(**inputs, use_cache=False).logits
    with torch.no_grad():
        judged = teacher(**inputs, use_cache=False).logits
    output = generalized_jsd_loss(
        targets.select_causal_logits(logits),
        targets.select_causal_logits(judged),
        targets.response_mask,
    )
    return output.loss


@pytest.mark.parametrize("section", SECTIONS)
def test_openrlhfs_colocated_loop(section: str) -> None:
    """The calls of its actor, in its order: states leave before the first step, weights are
    broadcast and log-probabilities computed while they are away."""
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    settings = {**config(clipping=0.0, section=SECTIONS[section]), **zero}
    engine, plain = initialized(causal_model(), settings), causal_model()
    adam = KernelOptimizer(torch.optim.AdamW(plain.parameters(), **ADAM), "exact")
    assert engine.config["zero_optimization"]["offload_optimizer"]["device"] != "cpu"
    batch = {"input_ids": prompts(0).prompt_ids, "labels": prompts(0).prompt_ids}
    offload(engine)
    for _ in range(2):
        engine.eval()
        with torch.no_grad():
            logits = engine(**batch).logits
            assert torch.equal(logits, plain.eval()(**batch).logits)
        engine.train()
        plain.train()
        engine.reload_states(non_blocking=True)
        losses = [model(**batch).loss for model in (engine, plain)]
        engine.backward(losses[0])
        engine.step()
        losses[1].backward()
        adam.step({p: p.grad for p in plain.parameters()}, 0.0)
        plain.zero_grad()
        offload(engine)
        received = {}
        for name, parameter in engine.module.named_parameters():
            with GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
                received[name] = parameter.data.clone()
        for name, value in plain.named_parameters():
            assert torch.equal(received[name], value), name
    engine.destroy()


def offload(engine: Any) -> None:
    """As OpenRLHF does."""
    engine.optimizer.offload_states(
        include=[
            OffloadStateTypeEnum.optim_states,
            OffloadStateTypeEnum.contiguous_grad_buffer,
            OffloadStateTypeEnum.hp_params,
            OffloadStateTypeEnum.lp_grads,
        ],
        device=OffloadDeviceEnum.cpu,
        pin_memory=True,
        non_blocking=True,
    )
    engine.empty_partition_cache()


def test_a_prefill_that_is_shared_is_the_hybrid_engines() -> None:
    engine = initialized(causal_model(), config(section=SECTIONS["streamed"]))
    options = HybridEngineRolloutConfig(use_shared_prefill=True)
    rollout = HybridEngineRollout(engine, TOKENIZER, options)
    with pytest.raises(AttributeError, match="prepare_shared_prefill"):
        rollout.generate(prompts(0), SAMPLED)
    engine.destroy()
