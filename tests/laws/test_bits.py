"""Laws 1, 2, 4 and 6 at once: where state lies, when it is updated, what is kept and where a run is
interrupted never change a bit of a loss, a norm, a weight or a moment, and cost what is planned.

A covering array: every pair of values of two axes is in a case, for instance every model with every
home of its state. The default run has each pair of values of the other axes, and each model twice.
The other cases, and cases drawn from the whole product, are slow. What the
other files of this folder show is particular: hazards, faults, counts, order.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold import native
from stronghold.engine.inspection import Inspection
from stronghold.plan.cost import LEVELS, WEIGHT_FETCHES
from tests.models import HUGGING_FACE, MODELS, PLAIN, loss_of
from tests.support.insides import offload_small
from tests.support.pairs import covering, pairs, thinned
from tests.support.training import (
    OPTIMIZERS,
    Run,
    assert_identical,
    config,
    initialized,
    moments_of,
    train_plain,
    train_windowed,
)

STEPS = 3
NUM_DRAWN = 1000
SMALLEST_PIECE = 2048 * 24  # a page of each array: every layer takes several pieces

ON_GPU = {"resident_updates": "gpu"}
PLACES: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1},
    "two slots": {"window": 2},
    "every slot": {"window": 64},
    "one resident": {"window": 1, "resident_layers": 1},
    "half on the gpu": {"window": 2, "resident_layers": 1, **ON_GPU},
    "updated on the gpu": {"resident_layers": "all", "activations": "recompute", **ON_GPU},
    "whole": {"resident_layers": "all", **ON_GPU},
}
UPDATES: dict[str, tuple[float, dict[str, Any]]] = {  # where in the step
    "gate": (0.5, {"early_layers": 0}),
    "early": (1e4, {"early_layers": "all"}),
    "early, clipped": (0.5, {"early_layers": "all"}),
    "some early": (0.0, {"early_layers": 2}),
}
# Built as Llama is, of the same modules in the same order: one case each.
LIKE_LLAMA = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"]
AXES: dict[str, list[str]] = {
    "model": [name for name in (*PLAIN, *HUGGING_FACE) if name not in LIKE_LLAMA],
    "place": list(PLACES),
    "home": ["ram", "moments", "masters", "weights"],
    "activations": [*LEVELS],
    "update": list(UPDATES),
    "micro-batches": ["1", "3"],
    "precision": ["fp32", "bf16", "fp16", "lean"],  # lean: bf16 with lean states
    "optimizer": list(OPTIMIZERS),
    "between": ["nothing", "evaluation", "resumed"],
    "cores": [f"{isa} {1 + number % 2}" for number, isa in enumerate(native.isas())],
    "lanes": ["on time", "late"],
}
Case = tuple[str, ...]


# A gradient that comes in parts, or never, takes an entry more than was planned.
IN_PARTS = {"called_twice", "shared_list", "layer_drop"}
# Which layers are used, and get gradients, differs from step to step; or a layer reads weights of
# another one, which are fetched on demand; or autograd comes to a layer's outputs in any order.
UNSTEADY = IN_PARTS | {"skip_inside", "experts", "structured"}
UNSTEADY |= {"fused_loss", "megatron_bert", "tied_blocks", "t5"}
# Backward does not come to all layers: nothing is moved and made for those.
PARTLY_USED = {"unused", "frozen_prefix"}
# Their buffers and what they are given are fp32 values, which half precision does not mix with.
FP32 = {"structured", "shared_list", "sequential", "buffers", "growing_buffers"}


def never(*values: str) -> bool:
    """Half precision does not mix with values in fp32."""
    half = not {"bf16", "fp16", "lean"}.isdisjoint(values)
    return half and not FP32.isdisjoint(values)


def drawn(count: int) -> Iterator[Case]:
    rng = random.Random(0)
    axes = AXES | {"model": [*PLAIN, *HUGGING_FACE]}
    for _ in range(count):
        case = tuple(rng.choice(values) for values in axes.values())
        if not never(*case):
            yield case


@functools.cache
def plain(
    name: str, clipping: float, accumulation: int, precision: str, optimizer: str = "adamw"
) -> Run:
    return train_plain(
        MODELS[name],
        steps=STEPS,
        clipping=clipping,
        accumulation=accumulation,
        precision=precision,
        optimizer=optimizer,
    )


@contextmanager
def engine_of(name: str, settings: dict[str, Any], seed: int) -> Iterator[Any]:
    model, make_batch = MODELS[name](seed=seed)
    engine = initialized(model, settings)
    try:
        yield engine, make_batch
    finally:
        engine.destroy()


def section_of(of: dict[str, str], folder: Path) -> dict[str, Any]:
    threads = of["cores"].split()[1]
    section = {"activations": of["activations"], "cpu_threads": int(threads), **PLACES[of["place"]]}
    section |= UPDATES[of["update"]][1]
    if of["home"] != "ram":
        section["nvme"] = {"path": str(folder), "spill": of["home"]}
    if of["lanes"] == "late":
        section["emulated"] = {"jitter_s": 0.0003, "seed": 1}
    return section


def after(value: str, axis: str) -> str:
    """Two further on: not the neighbour, which is much alike."""
    values = AXES[axis]
    return values[(values.index(value) + 2) % len(values)]


def trained(of: dict[str, str], folder: Path) -> Run:
    """The run of a case, as its engines leave it."""
    accumulation = int(of["micro-batches"])
    options = {
        "clipping": UPDATES[of["update"]][0],
        "accumulation": accumulation,
        "precision": of["precision"],
        "optimizer": of["optimizer"],
    }
    parts = [(range(STEPS), of)]
    # the second part of the run in another place, and home
    if of["between"] == "resumed":
        there = {"place": after(of["place"], "place"), "home": after(of["home"], "home")}
        parts = [(range(1), of), (range(1, STEPS), {**of, **there})]
    run = Run()
    torch.manual_seed(1)
    for part, here in parts:
        section = section_of(here, folder)
        settings = config(section=section, **options)
        with engine_of(of["model"], settings, seed=part.start) as (engine, make_batch):
            if part.start > 0:
                engine.load_checkpoint(folder / "saved")
            for step in part:
                before = engine.inspect()
                for micro in range(step * accumulation, (step + 1) * accumulation):
                    loss = loss_of(engine(**make_batch(micro)))
                    engine.backward(loss)
                    engine.step()
                    run.losses.append(loss.detach().clone())
                run.norms.append(engine.get_global_grad_norm())
                if step == 0:
                    interrupt(of["between"], of["model"], engine, make_batch)
            check_step(engine, before, of)
            check_memory(engine, of)
            if part.stop < STEPS:
                engine.save_checkpoint(folder / "saved")
            run.weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
            run.moments = moments_of(engine)
    return run


def check_step(engine: Any, before: Inspection, of: dict[str, str]) -> None:
    """The last step moved the bytes of the formula. Not where uses differ from step to step."""
    is_steady = of["model"] not in UNSTEADY | PARTLY_USED
    if not is_steady or of["between"] not in ("nothing", "evaluation"):
        return
    fetched = engine.inspect().traffic.fetched_bytes - before.traffic.fetched_bytes
    assert fetched == fetch_bytes(engine, num_passes=int(of["micro-batches"]))


def fetch_bytes(engine: Any, *, num_passes: int) -> int:
    """Bytes from host to device in a step. Each pass, of forward and backward, fetches the streamed
    layers twice, but for those of the window at its turn. Layers that stay come once, where the
    host has updated them."""
    plan, layers = engine.plan, engine.inspect().layers
    streamed = [layer.weights.nbytes for layer in layers if layer.index not in plan.resident]
    stays = plan.resident - plan.updated_on_gpu
    trained = [layer for layer in layers if layer.index in stays and layer.trained]
    at_turn = sum(streamed[len(streamed) - plan.window :]) if plan.window else 0
    of_pass = WEIGHT_FETCHES * sum(streamed) - at_turn
    return num_passes * of_pass + sum(layer.weights.nbytes for layer in trained)


def check_memory(engine: Any, of: dict[str, str]) -> None:
    """The peak of each tier is the plan's."""
    report, model = engine.memory_report(), of["model"]
    assert report.nvme_peak == report.nvme_planned
    if model in IN_PARTS:
        return  # a block that is called again has a gradient slot of its own
    assert report.host_peak == report.host_planned
    assert report.gpu_peak <= report.gpu_planned
    # what a model does not use has no gradient
    if model not in UNSTEADY | PARTLY_USED:
        assert report.gpu_peak == report.gpu_planned


def interrupt(what: str, name: str, engine: Any, make_batch: Any) -> None:
    if what == "evaluation":  # the raw model, without gradients
        engine.synchronize()  # nothing hides a parameter
        fresh, _ = MODELS[name]()
        for parameter, trained in zip(fresh.parameters(), engine.parameters(), strict=True):
            parameter.data = trained.detach().clone()
        # also those that a forward made
        for path, buffer in engine.module.named_buffers():
            owner, _, leaf = path.rpartition(".")
            fresh.get_submodule(owner).register_buffer(leaf, buffer.clone())
        with torch.no_grad():
            found, expected = (loss_of(m.eval()(**make_batch(9))) for m in (engine.module, fresh))
        engine.module.train()
        assert torch.equal(found, expected)


def check(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = dict(zip(AXES, case, strict=True))
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", SMALLEST_PIECE)
    offload_small(monkeypatch)
    monkeypatch.setenv("STRONGHOLD_ISA", of["cores"].split()[0])
    expected = plain(
        of["model"],
        UPDATES[of["update"]][0],
        int(of["micro-batches"]),
        of["precision"],
        of["optimizer"],
    )
    run = trained(of, folder)
    assert_identical(run, expected)
    assert run.norms == expected.norms


ARRAY = covering(list(AXES.values()), never)
DEFAULT = set(thinned(ARRAY, 0, least=2))
OTHER_LLAMAS = [(name, *ARRAY[37 * k][1:]) for k, name in enumerate(LIKE_LLAMA)]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(c, marks=() if c in DEFAULT else pytest.mark.slow) for c in ARRAY),
        *OTHER_LLAMAS,
    ],
    ids="-".join,
)
def test_nothing_changes_a_bit(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(drawn(NUM_DRAWN)), ids="-".join)
def test_no_case_of_the_whole_product_changes_a_bit(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "reentrant", "policy"),
    pairs(["llama", "gpt2", "bert"], {"anew": False, "reentrant": True}, list(AXES["activations"])),
)
def test_own_gradient_checkpointing_keeps_working(name: str, reentrant: bool, policy: str) -> None:
    def factory() -> Any:
        model, make_batch = MODELS[name]()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        if reentrant:
            model.enable_input_require_grads()
        return model, make_batch

    settings = config(clipping=0.5, section={"window": 1, "activations": policy})
    run = train_windowed(factory, steps=STEPS, settings=settings)
    assert_identical(run, plain(name, 0.5, 1, "fp32"))
