"""Logits that are never whole: the loss is the plain model's, gradients are no worse, and whatever
else asks for logits gets them.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from stronghold.model.logits import LARGE_BYTES, TOKENS, Logits, LogitsInParts, part_of
from tests.models import MODELS
from tests.models.families import llama_of
from tests.support.training import (
    assert_identical,
    config,
    initialized,
    on,
    train_plain,
    train_windowed,
)

VOCABULARY = 61


def llama(*, tied: bool = False, bias: bool = False) -> Any:
    torch.manual_seed(0)
    model = llama_of(24, 52, 2, 2, 1, VOCABULARY, tie_word_embeddings=tied)
    if bias:
        model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    return model.train()


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 5:] = -100
    return {"input_ids": ids, "labels": labels, **more}


def tied_llama(part: int = 0) -> Any:
    """A model whose head has the embedding's weight and a bias, computed in parts of `part`."""
    model = llama(tied=True, bias=True)
    LogitsInParts(model, part)
    return model, lambda seed: batch()


def tied_in_parts() -> Any:
    return tied_llama(5)


SHIFTED = torch.roll(batch()["labels"], -1, 1)
GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "tied": ({"tied": True}, {}),
    "bias": ({"bias": True}, {}),
    "number of items": ({}, {"num_items_in_batch": torch.tensor(17)}),
    "shifted labels": ({}, {"shift_labels": SHIFTED}),
    "another word is ignored": ({}, {"ignore_index": 3, "labels": batch()["input_ids"]}),
}


def gradients(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = model(**batch(**given)).loss
    loss.backward()
    found = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [1, 7, 100])
@pytest.mark.parametrize("name", list(GIVEN))
def test_the_gradients_are_no_worse_than_the_plain_models(
    name: str, part: int, dtype: torch.dtype
) -> None:
    made, given = GIVEN[name]
    model = llama(**made).to(dtype)
    plain, plain_gradient = gradients(copy.deepcopy(model), given)
    _, exact = gradients(copy.deepcopy(model).double(), given)
    parts = LogitsInParts(model, part)
    loss, gradient = gradients(model, given)
    with torch.no_grad():
        evaluated = model(**batch(**given)).loss
    parts.close()
    assert loss.dtype is plain.dtype
    # another order of one fp32 sum
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0.0)
    assert torch.equal(evaluated, loss)
    # The same number of roundings, of other sums: two random errors of one size.
    assert (gradient - exact).norm() <= 1.2 * (plain_gradient - exact).norm()


def in_parts(name: str, part: int) -> Callable[[], Any]:
    def make() -> Any:
        model, make_batch = MODELS[name]()
        LogitsInParts(model, part)
        return model, make_batch

    return make


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["odd_llama", "qwen2", "gpt2"])
def test_the_engine_has_the_bits_of_a_plain_loop_in_parts(name: str, precision: str) -> None:
    section = {"loss_chunk": 5, "window": 2, "activations": "recompute"}
    run = train_windowed(
        MODELS[name], steps=4, settings=config(precision=precision, section=section)
    )
    assert_identical(run, train_plain(in_parts(name, 5), steps=4, precision=precision))


@pytest.mark.parametrize("updates", ["gpu", "host"])
def test_a_head_of_two_layers_has_the_bits_of_a_plain_loop(updates: str) -> None:
    """Its weight is the embedding's, its bias is its own."""

    section = {"loss_chunk": 5, "window": 1, "resident_updates": updates}
    run = train_windowed(tied_llama, steps=3, settings=config(precision="bf16", section=section))
    assert_identical(run, train_plain(tied_in_parts, steps=3, precision="bf16"))


class Pair(nn.Module):
    """Two language models, each a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList([llama(), llama(tied=True)])

    def forward(self, **inputs: Any) -> torch.Tensor:
        return sum(model(**inputs).loss for model in self.models)  # type: ignore[return-value]


def test_a_head_in_a_block_stays_as_it_is() -> None:
    def pair() -> Any:
        return Pair(), lambda seed: batch()

    section = {"loss_chunk": 5, "layers": "models", "window": 1}
    run = train_windowed(pair, steps=2, settings=config(section=section))
    assert_identical(run, train_plain(pair, steps=2))


def with_a_late_loss(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The tied model. Training runs compute its loss from its logits after the call."""
    models: list[Any] = []

    def make() -> Any:
        models.append(tied_llama()[0])
        given = {name: value for name, value in batch().items() if name != "labels"}
        return models[-1], lambda seed: given

    def loss_of(output: Any) -> torch.Tensor:
        loss: torch.Tensor = models[-1].loss_function(output.logits, batch()["labels"], VOCABULARY)
        return loss

    monkeypatch.setattr("tests.support.training.loss_of", loss_of)
    return make


@pytest.mark.parametrize("updates", ["gpu", "host"])
def test_a_program_may_compute_the_loss_after_the_call(
    updates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_plain(tied_in_parts, steps=3, precision="bf16")
    section = {"loss_chunk": 5, "window": 1, "resident_updates": updates}
    settings = config(precision="bf16", section=section)
    run = train_windowed(with_a_late_loss(monkeypatch), steps=3, settings=settings)
    assert_identical(run, expected)


def test_logits_of_a_gib_in_fp32_are_in_parts_without_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = LARGE_BYTES // 4 // 131072
    assert part_of(tokens, 131072, None) == TOKENS
    assert part_of(tokens - 1, 131072, None) == 0
    assert [part_of(tokens, 131072, chosen) for chosen in (0, 7)] == [0, 7]
    # The engine takes that way by itself: a border that small logits reach stands for the large.
    monkeypatch.setattr("stronghold.model.logits.LARGE_BYTES", 1)
    monkeypatch.setattr("stronghold.model.logits.TOKENS", 5)
    run = train_windowed(MODELS["odd_llama"], steps=3, settings=config(section={"window": 2}))
    assert_identical(run, train_plain(in_parts("odd_llama", 5), steps=3))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Liger's are GPU kernels")
@pytest.mark.parametrize("tied", [False, True])
def test_ligers_fused_loss_lives_beside_ours(tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As `use_liger_kernel` of a Trainer puts it in: ours has no work then, except in evaluation.

    Triton's interpreter takes the kernels of head and loss alone, with numpy before 2.4.
    """
    caplog.set_level("INFO", "stronghold")
    patch = pytest.importorskip("liger_kernel.transformers").apply_liger_kernel_to_llama

    def fused() -> Any:
        model = llama(tied=tied)
        patch(model=model, rope=False, rms_norm=False, swiglu=False)
        return model, lambda seed: batch()

    def evaluate(engine: Any) -> None:
        loss = engine.module.loss_function
        assert loss.num_divided == 0
        engine.eval()
        with torch.no_grad():
            assert torch.isfinite(engine(**batch()).loss)
        assert loss.num_divided == 1

    section = {"window": 1, "loss_chunk": 5}
    run = train_windowed(fused, steps=3, settings=config(section=section), inspect=evaluate)
    assert_identical(run, train_plain(fused, steps=3))
    assert "LlamaForCausalLM: liger_kernel computes head and loss in training" in caplog.text


class Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return 2 * gradient * ctx.saved_tensors[0]


def written(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 50:] = 0.0
    return logits.logsumexp(-1).sum()


@pytest.mark.parametrize(
    "use",
    [
        lambda logits: logits[:, 1:].square().sum(),
        lambda logits: logits.float().log_softmax(-1)[..., 3].sum(),
        lambda logits: torch.stack([logits, logits]).square().sum(),
        Outside.apply,
        written,
    ],
    ids=["index", "label smoothing", "torch function", "autograd function", "in place"],
)
def test_whatever_else_asks_for_logits_gets_them(use: Callable[[torch.Tensor], Any]) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    LogitsInParts(model, 7)
    ids = batch()["input_ids"]
    results = []
    for each in (plain, model):
        logits = each(input_ids=ids).logits
        assert logits.requires_grad
        assert logits.shape == (3, 11, VOCABULARY)
        value = use(logits)
        value.backward()
        results.append((value, each.lm_head.weight.grad, each.model.embed_tokens.weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_object_itself_is_like_a_tensor() -> None:
    model = llama()
    plain = copy.deepcopy(model)
    LogitsInParts(model, 7)
    with torch.no_grad():
        expected = plain(**batch()).logits

        def made() -> Any:
            return model(**batch()).logits

        assert type(made()) is Logits
        assert torch.equal(copy.deepcopy(made()), expected)
        assert torch.equal(pickle.loads(pickle.dumps(made())), expected)
        assert made().tolist() == expected.tolist()
        assert (made().numpy() == expected.numpy()).all()
        assert repr(made()) == repr(expected)
    with pytest.raises(ConfigError, match=r"stronghold\.loss_chunk to 0"):
        model(**batch()).logits.retain_grad()


def test_what_stands_between_head_and_loss_is_computed_on_whole_logits() -> None:
    """Gemma 2 caps its logits."""
    section = {"loss_chunk": 5}
    run = train_windowed(MODELS["gemma2"], steps=2, settings=config(section=section))
    expected = train_plain(MODELS["gemma2"], steps=2)
    for loss, other in zip(run.losses, expected.losses, strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-5, atol=0.0)


def test_a_frozen_head_costs_no_gradient_of_its_own() -> None:
    model = llama()
    plain = copy.deepcopy(model)
    LogitsInParts(model, 7)
    for each in (plain, model):
        each.lm_head.weight.requires_grad_(False)
        each(**batch()).loss.backward()
    assert model.lm_head.weight.grad is None
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("resident_updates", ["gpu", "host"])
def test_logits_are_used_before_the_step(resident_updates: str) -> None:
    check_use_of_logits({"resident_updates": resident_updates})


def check_use_of_logits(section: dict[str, Any]) -> None:
    model = llama()
    engine = initialized(model, config(section={"loss_chunk": 7, **section}))
    given = on(engine.device, batch())
    too_late = pytest.raises(ConfigError, match=r"outputs.logits before engine.step\(\)")
    try:
        for _ in range(2):
            plain = copy.deepcopy(model).to(engine.device)
            early, late, third = (engine(**given) for _ in range(3))
            engine.backward(late.loss)
            expected = plain(**given).logits
            assert torch.equal(early.logits, expected)
            engine.step()
            assert torch.equal(early.logits, expected)
            with too_late:
                late.logits.sum()
            with too_late:
                model.loss_function(third.logits, given["labels"], VOCABULARY)
        with torch.no_grad():
            kept = engine(**given).logits
        expected = copy.deepcopy(model).to(engine.device)(**given).logits
        engine.offload_states()
        with nullcontext() if model.lm_head.weight.device == engine.device else too_late:
            assert torch.equal(kept, expected)
    finally:
        engine.destroy()


def test_logits_of_an_older_bias_are_refused() -> None:
    model = tied_llama()[0]
    model.lm_head.weight.requires_grad_(False)
    engine = initialized(model, config(section={"loss_chunk": 7}))
    try:
        outputs = engine(**batch())
        engine.backward(outputs.loss)
        engine.step()
        with pytest.raises(ConfigError, match=r"outputs.logits before engine.step\(\)"):
            outputs.logits.sum()
    finally:
        engine.destroy()


def test_the_model_is_given_back_whole_and_copies_are_their_own() -> None:
    model = llama()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    engine, *_ = stronghold.initialize(model=model, config=config(section={"loss_chunk": 7}))
    try:
        assert list(inspect.signature(model.lm_head.forward).parameters) == ["input"]
        assert type(model(**batch()).logits) is Logits
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            output = made(**{name: value.clone() for name, value in batch().items()})
            assert type(output.logits) is torch.Tensor
            assert made.lm_head.forward.__self__ is made.lm_head
            assert torch.isfinite(output.loss)
    finally:
        engine.destroy()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert type(model(**batch()).logits) is torch.Tensor
