"""`engine.named_weights`: updated weights for a generation server, without a second model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from tests.models import MODELS, loss_of
from tests.models.families import llama_of
from tests.support import quantised_bases
from tests.support.pairs import each
from tests.support.training import config, dense_copies, initialized, same_bits
from tests.support.twin import twin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

STREAMED = {"window": 1}
MIXED = {"window": 1, "resident_layers": 1, "resident_updates": "gpu"}
REFRESHED = {"window": 2, "resident_layers": 1, "resident_updates": "host"}
WHOLE = {"window": None, "resident_layers": "all"}
VOCABULARY = 61


class Server(nn.Module):
    """Stands on the other side: a model of its own, with a `load_weights` as servers have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loaded: list[str] = []

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor when it comes, and keep none."""
        own = self.model.state_dict()
        self.loaded = []
        for name, tensor in weights:
            own[name].copy_(tensor)
            self.loaded.append(name)


def given(engine: Any, **options: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights(**options)}


def expected_of(engine: Any) -> dict[str, torch.Tensor]:
    """The state dict, tied tensors once, under their first name."""
    engine.synchronize()
    seen: set[int] = set()
    result = {}
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            result[name] = tensor.detach().clone()
    return result


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("section", "precision"),
    each(
        {"streamed": STREAMED, "mixed": MIXED, "refreshed": REFRESHED, "whole": WHOLE},
        ["fp32", "bf16"],
    ),
)
def test_they_are_the_state_dict_after_a_step(section: dict[str, Any], precision: str) -> None:
    with twin(precision=precision, section=section) as both:
        for seed in range(2):
            both.train(seed)
            found = given(both.engine)
            assert_same(found, expected_of(both.engine))
        assert list(found) == [name for name in both.plain.state_dict() if name in found]
        both.train(2)


def test_a_server_that_follows_has_the_models_outputs() -> None:
    with twin("gpt", section=STREAMED) as both:
        server = Server(MODELS["gpt"]()[0])
        for seed in range(2):
            both.train(seed)
            server.load_weights(both.engine.named_weights())
            with torch.no_grad():
                assert torch.equal(both.on(7)(server.model), both.on(7)(both.plain))


@pytest.mark.parametrize("spill", ["masters", "weights"])
def test_weights_in_files_are_given(spill: str, tmp_path: Path) -> None:
    section = {**STREAMED, "nvme": {"path": str(tmp_path), "spill": spill}}
    with twin(precision="bf16", section=section) as both:
        both.train(0)
        assert_same(given(both.engine), expected_of(both.engine))
        both.train(1)


def test_tied_weights_come_once_and_buffers_come_too() -> None:
    model = llama_of(24, 52, 2, 2, 1, VOCABULARY, tie_word_embeddings=True)
    model.register_buffer("scale", torch.arange(3.0))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    engine = initialized(model, config(section=STREAMED))
    names = [name for name, _ in engine.named_weights()]
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "scale" in names
    assert "cache" not in names
    engine.destroy()


def test_a_dtype_is_that_of_floating_point_tensors_alone() -> None:
    with twin(section=STREAMED) as both:
        both.model.register_buffer("count", torch.tensor(3))
        both.train(0)
        found = given(both.engine, dtype=torch.bfloat16)
        for name, value in expected_of(both.engine).items():
            dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
            assert torch.equal(found[name], value.to(dtype)), name
        del both.model.count


def test_no_tensor_is_copied_that_lies_where_it_is_wanted() -> None:
    """Views of the engine's memory: each of its own size, none of them a copy."""
    with twin(precision="bf16", section=STREAMED) as both:
        both.train(0)
        both.engine.synchronize()
        addresses = {name: p.data_ptr() for name, p in both.model.named_parameters()}
        for name, tensor in both.engine.named_weights(device="cpu", dtype=torch.bfloat16):
            assert tensor.data_ptr() == addresses[name]
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert not tensor.requires_grad
        del tensor


def test_copies_live_as_long_as_the_caller_holds_them() -> None:
    """With another dtype each tensor is copied. The one before is gone by then."""
    with twin(precision="bf16", section=STREAMED) as both:
        both.train(0)
        alive: list[Any] = []
        most = 0
        for name, tensor in both.engine.named_weights(dtype=torch.float32):
            alive = [ref for ref in alive if ref() is not None]
            most = max(most, len(alive))
            alive.append(_weak(tensor))
            del tensor, name
        assert most == 0


def _weak(tensor: torch.Tensor) -> Any:
    import weakref

    return weakref.ref(tensor)


def test_tensors_that_are_kept_are_of_one_step() -> None:
    """A program that keeps views reads the old values or the new ones, and no mixture."""
    with twin(precision="bf16", section=STREAMED) as both:
        both.train(0)
        kept = dict(both.engine.named_weights())
        both.train(1)
        both.engine.synchronize()  # no operation on an alias waits
        assert_same({name: value.clone() for name, value in kept.items()}, expected_of(both.engine))


def test_an_iterator_over_two_steps_is_refused(tmp_path: Path) -> None:
    with twin(section=STREAMED) as both:
        both.train(0)
        weights = both.engine.named_weights()
        next(weights)
        both.train(1)
        with pytest.raises(ConfigError, match="of two steps"):
            next(weights)
        both.engine.save_checkpoint(str(tmp_path))
        for change in (
            lambda: both.engine.load_checkpoint(str(tmp_path)),
            lambda: both.engine.module.load_state_dict(both.plain.state_dict()),
        ):
            weights = both.engine.named_weights()
            next(weights)
            change()
            with pytest.raises(ConfigError, match="of two steps"):
                next(weights)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_between_backward_and_step_they_are_the_old_ones(accumulation: int) -> None:
    """Early updates write elsewhere: they change no bit of what is given, or of the step."""
    options: dict[str, Any] = {"accumulation": accumulation, "early": "all", "section": STREAMED}
    with twin(precision="bf16", **options) as both:
        both.train(*range(accumulation))
        before = given(both.engine)
        both.backward(both.on(5))
        assert_same(given(both.engine), before)
        if accumulation == 2:
            both.engine.step()
            assert_same(given(both.engine), before)
            both.backward(both.on(6))
        both.step()


def test_after_an_interrupt_they_are_given() -> None:
    with twin(section=STREAMED) as both:
        both.train(0)
        before = given(both.engine)
        block = next(m for m in both.model.modules() if isinstance(m, nn.LayerNorm))

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        for call in (both.engine, both.engine.module):
            handle = block.register_forward_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                call(**both.make_batch(1))
            handle.remove()
            assert_same(given(both.engine), before)
        both.train(1)


def test_within_a_pass_it_is_refused() -> None:
    with twin(section=STREAMED) as both:
        seen: list[str] = []

        def look(*_: Any) -> None:
            with pytest.raises(ConfigError, match="within a forward"):
                both.engine.named_weights()
            seen.append("forward")

        block = next(m for m in both.model.modules() if isinstance(m, nn.LayerNorm))
        handle = block.register_forward_hook(look)
        both.train(0)
        handle.remove()
        assert seen


@pytest.mark.parametrize("section", [MIXED, WHOLE])
def test_a_model_that_is_away_is_given(section: dict[str, Any]) -> None:
    with twin(precision="bf16", section=section) as both:
        both.train(0)
        before = given(both.engine)
        both.engine.offload_states()
        found = given(both.engine, device="cpu")
        assert both.engine.inspect().device.memory.allocated_bytes == 0
        assert_same(found, before)
        both.engine.reload_states()
        both.train(1)


def test_a_model_that_is_not_trained_is_given() -> None:
    model = MODELS["gpt"]()[0].requires_grad_(False)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine: Any = stronghold.initialize(model=model, config=config(section=STREAMED))[0]
    assert engine.optimizer is None
    assert_same(given(engine), expected)
    engine.destroy()


def test_what_is_written_through_a_tensor_is_trained() -> None:
    """As through any alias of a weight."""
    with twin(section=STREAMED) as both:
        both.train(0)
        expected = dict(both.plain.named_parameters())
        with torch.no_grad():
            for name, tensor in both.engine.named_weights():
                tensor.mul_(0.5)
                expected[name].mul_(0.5)
        del tensor
        both.train(1)


def test_a_destroyed_engine_says_so() -> None:
    model, _ = MODELS["gpt"]()
    engine = initialized(model, config(section=STREAMED))
    engine.destroy()
    with pytest.raises(ConfigError, match="was destroyed"):
        engine.named_weights()


# -- adapters --------------------------------------------------------------------------------------
def token_batch(seed: int) -> dict[str, Any]:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def adapted() -> Any:
    """A tiny Llama with LoRA, with the same bits at each call."""
    torch.manual_seed(0)
    targets = ["q_proj", "down_proj"]
    settings = peft.LoraConfig(
        r=4, init_lora_weights=False, target_modules=targets, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(llama_of(24, 52, 2, 2, 1, VOCABULARY), settings)


def test_adapters_are_given_with_their_base() -> None:
    """Under PEFT's names: the server has the model's own adapters."""
    engine = initialized(adapted(), config(clipping=0.0, section={"window": 1, "dtypes": "own"}))
    server = Server(adapted())
    for seed in range(2):
        engine.backward(loss_of(engine(**token_batch(seed))))
        engine.step()
        server.load_weights(engine.named_weights())
        with torch.no_grad():
            outputs = (
                side(**token_batch(7)).logits for side in (server.model.eval(), engine.eval())
            )
            assert torch.equal(*outputs)
        engine.train()
    engine.destroy()


def test_a_packed_base_is_decoded() -> None:
    section = {"window": 1, "dtypes": "own", "frozen": "nf4"}
    engine = initialized(adapted(), config(section=section))
    engine.backward(loss_of(engine(**token_batch(0))))
    engine.step()
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    found = given(engine)
    for name, value in found.items():
        assert torch.equal(value, state[name]), name
    assert found.keys() == state.keys()
    engine.destroy()


@pytest.mark.parametrize(
    "kind",
    [
        "nf4 double",
        "torchao int8",
        pytest.param("int8", marks=pytest.mark.slow),
        pytest.param("torchao float8", marks=pytest.mark.slow),
    ],
)
def test_a_quantised_base_is_given_with_its_scales(kind: str) -> None:
    """A server cannot read the codes of bitsandbytes without scales and code books."""
    model, make_batch = quantised_bases.BASES[kind]()
    engine = initialized(model, config(precision="bf16", section=STREAMED))
    engine.backward(loss_of(engine(**make_batch(0))))
    engine.step()
    state = dense_copies(engine.module_state_dict())
    found = dense_copies(dict(engine.named_weights()))
    assert list(found) == list(state)
    for name, value in found.items():
        assert same_bits(value, state[name]), name
    others = dense_copies(dict(engine.named_weights(dtype=torch.float16)))
    for name, value in others.items():
        is_code = any(part in name for part in (".base_layer.", "k_proj", "o_proj"))
        is_code = is_code or "gate_proj" in name
        expected = state[name].dtype if is_code else torch.float16
        assert value.dtype is expected, name
    engine.destroy()
