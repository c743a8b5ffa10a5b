"""Laws of a reference without a second model, as TRL's DPOTrainer and GRPOTrainer have it.

The base is the policy with its adapters disabled. Its log-probabilities have the base's bits.
Training goes on with the bits of a plain loop. The host holds one base.
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

import stronghold
from tests.models.families import llama_of
from tests.support.training import ADAM, DTYPES, KernelOptimizer, config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

VOCABULARY = 61
STEPS = 4
CLIPPING = 0.5
BETA = 0.5
# A model, as it is called. Of an engine these are the engine, and the module that TRL unwraps.
Policy = Callable[..., Any]
Loss = Callable[[Policy, Any, int], torch.Tensor]


def base_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return llama_of(24, 52, 3, 2, 1, VOCABULARY).to(dtype)


def policy_model(dtype: torch.dtype) -> Any:
    """Adapters whose second factor is not zero: from the first step they change the output."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_dropout=0.2,
        target_modules="all-linear",
        init_lora_weights=False,
    )
    base = base_model(dtype)
    torch.manual_seed(1)
    return peft.get_peft_model(base, settings)


def sequences(step: int, number: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (number, 9), generator=generator)


def log_probabilities(model: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """Of each next token: (sequences, tokens - 1), in fp32."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen


def reference(module: Any, tokens: torch.Tensor) -> torch.Tensor:
    """With the adapters disabled, and without gradients."""
    with torch.no_grad(), module.disable_adapter():
        return log_probabilities(module, tokens)


def dpo(policy: Policy, module: Any, step: int) -> torch.Tensor:
    """Direct Preference Optimization, https://arxiv.org/abs/2305.18290, eq. 7: the first half of
    the sequences is preferred to the second."""
    tokens = sequences(step)
    of_reference = reference(module, tokens).sum(-1)
    ratio = log_probabilities(policy, tokens).sum(-1) - of_reference
    preferred, rejected = ratio.chunk(2)
    return -nn.functional.logsigmoid(BETA * (preferred - rejected)).mean()


def grpo(policy: Policy, module: Any, step: int) -> torch.Tensor:
    """Group Relative Policy Optimization, https://arxiv.org/abs/2402.03300, eq. 3 and 4: three
    steps learn from one round of sequences. The reference and the policy of the round are computed
    again in each step, the latter in evaluation mode."""
    tokens = sequences(step - step % 3)
    of_reference = reference(module, tokens)
    module.eval()
    with torch.no_grad():
        before = log_probabilities(module, tokens)
    module.train()
    now = log_probabilities(policy, tokens)
    advantage = torch.linspace(-1.0, 1.0, len(tokens))[:, None]
    ratio = (now - before).exp()
    gained = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    away = of_reference - now
    return -(gained - BETA * (away.exp() - away - 1.0)).mean()


LOSSES: dict[str, Loss] = {"dpo": dpo, "grpo": grpo}


@functools.cache
def plain(kind: str, precision: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and weights of a plain loop."""
    model = policy_model(DTYPES[precision]).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = KernelOptimizer(torch.optim.AdamW(parameters, **ADAM))
    losses, norms = [], []
    torch.manual_seed(2)
    for step in range(STEPS):
        loss = LOSSES[kind](model, model, step)
        loss.backward()
        losses.append(loss.item())
        norms.append(adam.step({p: p.grad for p in parameters}, CLIPPING))
        model.zero_grad()
    return (losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


SECTIONS: dict[str, dict[str, Any]] = {
    "window 1": {"window": 1, "activations": "recompute"},
    "window 2, kept": {"window": 2, "activations": "keep"},
    "window 3, offloaded": {"window": 3, "activations": "offload"},
    "one resident": {"window": 1, "resident_layers": 1, "activations": "attention"},
    "all on the GPU": {"resident_layers": "all", "resident_updates": "gpu"},
    "slow updates": {"window": 1, "emulated": {"update_gbps": 0.01, "jitter_s": 0.001}},
    "nvme": {"window": 2, "nvme": {"spill": "weights"}},
}
DAILY = [("window 1", "bf16"), ("window 2, kept", "fp32"), ("all on the GPU", "fp32")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("section", "precision"),
    [
        pytest.param(
            *(section, precision), marks=() if (section, precision) in DAILY else pytest.mark.slow
        )
        for section in SECTIONS
        for precision in ("fp32", "bf16")
    ],
)
def test_training_with_the_base_as_reference_has_the_bits_of_a_plain_loop(
    kind: str, section: str, precision: str, tmp_path: Path
) -> None:
    losses, norms, weights = plain(kind, precision)
    dtype = DTYPES[precision]
    base = base_model(dtype).train()
    model = policy_model(dtype)
    chosen = {"dtypes": "own", **SECTIONS[section]}
    if "nvme" in chosen:
        chosen["nvme"] = {**chosen["nvme"], "path": str(tmp_path)}
    settings = config(clipping=CLIPPING, precision=precision, section=chosen)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine: Any = stronghold.initialize(model=model, config=settings, model_parameters=trained)[0]
    try:
        torch.manual_seed(2)
        for step in range(STEPS):
            loss = LOSSES[kind](engine, engine.module, step)
            engine.backward(loss)
            engine.step()
            assert loss.item() == losses[step], step
            assert engine.get_global_grad_norm() == norms[step], step
            # The base has not changed, and the policy has.
            tokens = sequences(100 + step)
            with torch.random.fork_rng():
                seen = reference(engine.module, tokens)
                with torch.no_grad():
                    assert torch.equal(seen, log_probabilities(base, tokens))
                    assert not torch.equal(seen, log_probabilities(engine, tokens))
        now = engine.module_state_dict()
        for name, value in weights.items():
            assert torch.equal(now[name], value), name
    finally:
        engine.destroy()


@pytest.mark.parametrize("asks", [False, True], ids=["no reference", "reference"])
def test_a_reference_takes_no_memory_of_the_host(asks: bool) -> None:
    """One base, as without a reference: weights, and the state of the adapters."""
    model = policy_model(torch.bfloat16)
    settings = config(precision="bf16", section={"window": 1, "dtypes": "own"})
    trained = [p for p in model.parameters() if p.requires_grad]
    engine: Any = stronghold.initialize(model=model, config=settings, model_parameters=trained)[0]
    try:
        for step in range(2):
            asked = reference(engine.module, sequences(step)) if asks else None
            loss = -log_probabilities(engine, sequences(step)).mean()
            engine.backward(loss if asked is None else loss - asked.mean())
            engine.step()
        report = engine.memory_report()
        layers = engine.inspect().layout.layers
        frozen = 2 * sum(layer.numel - layer.trainable_numel for layer in layers)
        trainable = sum(layer.trainable_numel for layer in layers)
        # fp32 adapters: weight, two moments, a pending gradient.
        assert report.host_peak == report.host_planned == frozen + 16 * trainable
    finally:
        engine.destroy()


def test_a_reference_between_forward_and_backward_changes_no_gradient() -> None:
    """A program may ask for it late: the layers are then fetched again, and backward needs them."""
    runs = []
    for late in (False, True):
        model = policy_model(torch.float32)
        settings = config(section={"window": 1, "activations": "recompute"})
        trained = [p for p in model.parameters() if p.requires_grad]
        engine: Any = stronghold.initialize(model=model, config=settings, model_parameters=trained)[
            0
        ]
        torch.manual_seed(2)
        for step in range(2):
            loss = -log_probabilities(engine, sequences(step)).mean()
            if late:
                reference(engine.module, sequences(step))
            engine.backward(loss)
            engine.step()
        runs.append({name: v.clone() for name, v in engine.module_state_dict().items()})
        engine.destroy()
    early, late_run = runs
    assert all(torch.equal(value, late_run[name]) for name, value in early.items())


def test_the_reference_of_a_packed_base_is_the_packed_base() -> None:
    """As an engine has it that only runs forward, before and after steps of the adapters."""
    section = {"window": 1, "dtypes": "own", "frozen": "nf4"}
    base: Any = stronghold.initialize(
        model=wide_model().requires_grad_(False), config=config(precision="bf16", section=section)
    )[0]
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False
    )
    model = peft.get_peft_model(wide_model(), settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine: Any = stronghold.initialize(
        model=model, config=config(precision="bf16", section=section), model_parameters=trained
    )[0]
    try:
        assert engine.inspect().layout.num_parameters > base.inspect().layout.num_trainable == 0
        for step in range(3):
            tokens = sequences(step)
            with torch.no_grad():
                expected = log_probabilities(base, tokens)
                plain_base = log_probabilities(wide_model(), tokens)
            seen = reference(engine.module, tokens)
            assert torch.equal(seen, expected)
            assert not torch.equal(seen, plain_base), "nothing was packed"
            loss = -(log_probabilities(engine, tokens) - seen).mean()
            engine.backward(loss)
            engine.step()
    finally:
        engine.destroy()
        base.destroy()


def wide_model() -> Any:
    """Linear weights of whole groups of every format."""
    torch.manual_seed(0)
    return llama_of(64, 128, 3, 2, 1, VOCABULARY).bfloat16()
