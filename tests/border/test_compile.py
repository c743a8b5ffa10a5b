"""Compiled blocks: `engine.compile()`, `block.compile()`, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from tests.models import MODELS
from tests.support.mixed import OWN, lora_model, odd, token_batch
from tests.support.training import assert_identical, config, train_plain, train_windowed
from tests.support.twin import Twin, twin

STREAMED = {"window": 1, "resident_layers": 0}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def num_graphs() -> int:
    """That were compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compile_plain(model: nn.Module, backend: str) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)


@pytest.mark.parametrize(
    ("section", "precision", "backend"),
    [
        ({**STREAMED, "activations": "recompute"}, "fp32", "aot_eager"),
        ({"window": None, "resident_layers": "all"}, "bf16", "aot_eager"),
        ({**STREAMED, "activations": "attention"}, "bf16", "aot_eager"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({**STREAMED, "activations": "offload"}, "bf16", "aot_eager"),
                ({**STREAMED, "activations": "keep", "chunk": 1}, "fp32", "aot_eager"),
                ({**STREAMED, "chunk": 1}, "fp32", "aot_eager"),
                ({**STREAMED, "activations": "recompute"}, "bf16", "inductor"),
            )
        ),
    ],
)
def test_blocks_that_the_engine_compiles_have_the_bits_of_compiled_plain_ones(
    section: dict[str, Any], precision: str, backend: str
) -> None:
    before = num_graphs()
    with twin(precision=precision, section=section) as both:
        both.engine.compile(backend=backend, compile_kwargs={"dynamic": False})
        both.engine.compile()
        assert both.engine.is_compiled
        if "chunk" not in section:
            compile_plain(both.plain, backend)
            both.train(0)
            both.train(1)
        else:
            other = Twin(precision=precision, section=section)
            for each in (both, other):
                each.engine.backward(each.on(0)(each.engine))
                each.engine.step()
            both.plain.load_state_dict(other.engine.module_state_dict())
            other.engine.destroy()
        assert num_graphs() > before
        copied = copy.deepcopy(both.model)
        both.engine.destroy()
        assert not any("forward" in vars(module) for module in both.model.modules())
        with torch.no_grad():
            expected = both.on(3)(both.model)
            next(both.model.blocks[0].parameters()).mul_(2.0)
            assert torch.equal(both.on(3)(copied), expected), "it runs the original's blocks"
            next(both.model.blocks[0].parameters()).div_(2.0)


@pytest.mark.parametrize(("activations", "first"), [("keep", True), ("recompute", False)])
def test_a_block_that_compiles_itself_has_the_same_bits(activations: str, first: bool) -> None:
    model = MODELS["gpt"]()[0]

    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)

    if first:
        compile_blocks()
    before = num_graphs()
    section = {**STREAMED, "activations": activations}
    with twin(of=model, section=section) as both:
        if not first:
            compile_blocks()
        both.train(0)
        both.train(1)
        assert num_graphs() > before


@pytest.mark.parametrize("activations", [pytest.param("keep", marks=pytest.mark.slow), "recompute"])
def test_compiled_blocks_go_on_after_a_forward_that_raises_and_after_layers_have_moved(
    activations: str,
) -> None:
    """Of these blocks a part stays on the device: two hooks stand around a compiled call."""
    fails = False

    def failing(*_: Any) -> None:
        if fails:
            raise ValueError("of the program")

    def compiled_odd(seed: int = 0) -> Any:
        model, make_batch = odd(torch.bfloat16)(seed)
        fails_within = activations == "keep"  # torch compiles no whole graph around it
        where = model.blocks[1].norm if fails_within else model.head
        where.register_forward_pre_hook(failing)
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=not fails_within)
        return model, make_batch

    def interrupt(engine: Any, micro: int) -> None:
        nonlocal fails
        if micro == 0:
            fails = True
            with pytest.raises(ValueError, match="of the program"):
                engine(**odd(torch.bfloat16)()[1](7))
            fails = False
        elif micro == 1:
            engine.offload_states()
            engine.reload_states()
        models.append(engine.module)

    models: list[Any] = []
    own = {**STREAMED, **OWN, "activations": activations}
    options: dict[str, Any] = {"clipping": 0.5, "precision": "bf16"}
    run = train_windowed(
        compiled_odd, steps=4, settings=config(section=own, **options), after=interrupt
    )
    assert_identical(run, train_plain(compiled_odd, steps=4, dtypes="own", **options))
    for block in models[0].blocks:  # its own compiled call, and its class's forward
        assert block._compiled_call_impl.__name__ == "_call_impl"
        assert "forward" not in vars(block)


def test_blocks_over_packed_weights_compile_with_the_same_bits() -> None:
    def factory(seed: int = 0) -> Any:
        return lora_model(torch.bfloat16, seed), token_batch

    def compile_blocks(engine: Any, micro: int) -> None:
        if micro == 0:
            engine.compile(backend="aot_eager")

    section = {**STREAMED, **OWN, "frozen": "nf4"}
    settings = config(section=section, precision="bf16")
    before = num_graphs()
    run = train_windowed(factory, steps=3, settings=settings, after=compile_blocks)
    assert num_graphs() > before
    assert_identical(run, train_windowed(factory, steps=3, settings=settings))


def test_the_engine_leaves_a_block_that_the_program_has_compiled() -> None:
    with twin(section=STREAMED) as both:
        first, second = both.model.blocks[:2]
        first.compile(backend="eager")
        own = first._compiled_call_impl
        both.train(0)
        both.engine.compile(backend="aot_eager")
        both.train(1)
    assert first._compiled_call_impl is own
    assert second._compiled_call_impl is None


def test_a_model_that_is_compiled_whole_is_refused_before_it_trains() -> None:
    both = Twin(section={**STREAMED, "activations": "recompute"})

    def check() -> None:
        with pytest.raises(ConfigError, match=r"call engine\.compile\(\)"):
            both.on(0)(both.engine)
        with torch.no_grad():
            assert torch.equal(both.on(0)(both.engine), both.on(0)(both.plain))

    both.engine.module = torch.compile(both.model, backend="eager")
    check()
    both.engine.module = both.model
    both.train(1)
    both.model.compile(backend="eager")
    check()
    both.check()
    both.engine.destroy()
    model = MODELS["gpt"]()[0]
    with pytest.raises(ConfigError, match=r"engine\.compile\(\)"):
        stronghold.initialize(
            model=torch.compile(model, backend="eager"),  # type: ignore[arg-type]
            config=config(section=STREAMED),
            model_parameters=model.parameters(),
        )


def test_compilation_within_a_step_or_of_the_whole_graph_is_refused() -> None:
    with twin(section=STREAMED) as both:
        with pytest.raises(ConfigError, match="leave them out"):
            both.engine.compile(schedule=[(0, [])])
        both.backward(both.on(0))
        with pytest.raises(ConfigError, match=r"after engine\.step"):
            both.engine.compile(backend="eager")
        both.step()
        assert not both.engine.is_compiled
