"""Every parameter in the dtype with which it came: no place, home, policy or moment of the update
changes a bit of a model of several dtypes, against a plain loop in the same dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from torch import nn

from stronghold.errors import ConfigError
from stronghold.plan.cost import LEVELS
from stronghold.train.optimizer import make_scaler
from tests.laws.test_bits import PLACES, SMALLEST_PIECE, UPDATES, interrupt
from tests.models import loss_of
from tests.support.insides import offload_small
from tests.support.mixed import BLOCKS, MIXED, OWN, lora, of_family
from tests.support.pairs import covering
from tests.support.training import (
    DTYPES,
    Run,
    assert_identical,
    config,
    initialized,
    moments_of,
    train_plain,
    train_windowed,
)

STEPS = 3


# -- families of Transformers that keep modules in fp32 --------------------------------------------
# DeepSeek V4 in fp16 has no plain loop: its own forward multiplies fp16 with fp32.
FAMILIES = [
    *((family, "fp16") for family in ("afmoe", "gpt_oss", "hy_v4", "longcat_flash", "rwkv")),
    *((family, "bf16") for family in ("bailing_hybrid", "beam", "deepseek_v4", "flint")),
]


@pytest.mark.parametrize(("family", "precision"), FAMILIES)
def test_families_that_keep_modules_in_fp32_train_as_in_a_plain_loop(
    family: str, precision: str
) -> None:
    """Transformers 5 obeys `_keep_in_fp32_modules_strict` in a bf16 model, and the other list in
    an fp16 model alone. RWKV overflows at the first loss scale."""
    half, scaler = DTYPES[precision], None
    factory = of_family(family, half)
    assert {p.dtype for p in factory()[0].parameters()} == {half, torch.float32}
    options: dict[str, Any] = {"clipping": 0.5, "precision": precision}
    settings = config(section={"window": 1, **OWN}, **options)
    if precision == "fp16":
        settings["fp16"]["hysteresis"] = 1
        scaler = make_scaler(DeepSpeedFP16Config(**settings["fp16"]), 0)
    run = train_windowed(factory, steps=4, settings=settings)
    expected = train_plain(factory, steps=4, dtypes="own", scaler=scaler, **options)
    assert_identical(run, expected)
    assert run.norms == expected.norms
    assert run.norms, "every step overflowed"


# -- every placement -------------------------------------------------------------------------------
AXES: dict[str, list[str]] = {
    "model": [*MIXED],
    "place": [*PLACES],
    "home": ["ram", "moments", "masters", "weights"],
    "activations": [*LEVELS],
    "update": [*UPDATES],
    "micro-batches": ["1", "3"],
    "precision": ["bf16", "lean", "fp16"],
    "between": ["nothing", "evaluation", "offloaded", "resumed"],
    "chunk": ["no chunk", "chunk 1", "chunk 2"],
}
Case = tuple[str, ...]


def never(*values: str) -> bool:
    """The oracle of chunks does not know these blocks."""
    chunks = not {"chunk 1", "chunk 2"}.isdisjoint(values)
    return chunks and not {"t5", "ernie"}.isdisjoint(values)


@functools.cache
def plain(name: str, clipping: float, accumulation: int, precision: str, chunk: int) -> Run:
    return train_plain(
        MIXED[name](DTYPES[precision]),
        steps=STEPS,
        clipping=clipping,
        accumulation=accumulation,
        precision=precision,
        dtypes="own",
        chunks=(BLOCKS[name], chunk) if chunk else None,
    )


@contextmanager
def engine_of(of: dict[str, str], folder: Path, seed: int) -> Iterator[Any]:
    section = {**PLACES[of["place"]], **UPDATES[of["update"]][1], **OWN}
    section["activations"] = of["activations"]
    if of["home"] != "ram":
        section["nvme"] = {"path": str(folder), "spill": of["home"]}
    if chunk_of(of):
        section["chunk"] = chunk_of(of)
    settings = config(
        section=section,
        clipping=UPDATES[of["update"]][0],
        accumulation=int(of["micro-batches"]),
        precision=of["precision"],
    )
    model, make_batch = MIXED[of["model"]](DTYPES[of["precision"]])(seed=seed)
    engine = initialized(model, settings)
    try:
        yield engine, make_batch
    finally:
        engine.destroy()


def chunk_of(of: dict[str, str]) -> int:
    return 0 if of["chunk"] == "no chunk" else int(of["chunk"].split()[1])


def after(value: str, axis: str) -> str:
    """Two further on: not the neighbour, which is much alike."""
    values = AXES[axis]
    return values[(values.index(value) + 2) % len(values)]


def trained(of: dict[str, str], folder: Path) -> Run:
    """The run of a case, as its engines leave it."""
    accumulation = int(of["micro-batches"])
    parts = [(range(STEPS), of)]
    # the second part of the run in another place, and home
    if of["between"] == "resumed":
        there = {"place": after(of["place"], "place"), "home": after(of["home"], "home")}
        parts = [(range(1), of), (range(1, STEPS), {**of, **there})]
    run = Run()
    torch.manual_seed(1)
    for part, here in parts:
        with engine_of(here, folder, seed=part.start) as (engine, make_batch):
            if part.start > 0:
                engine.load_checkpoint(folder / "saved")
            for step in part:
                for micro in range(step * accumulation, (step + 1) * accumulation):
                    loss = loss_of(engine(**make_batch(micro)))
                    engine.backward(loss)
                    engine.step()
                    run.losses.append(loss.detach().clone())
                run.norms.append(engine.get_global_grad_norm())
                if step == 0:
                    between(of, engine, make_batch)
            report = engine.memory_report()
            # What leaves the device lies on the host. The plan does not count that.
            if of["between"] != "offloaded":
                assert report.host_peak == report.host_planned
            assert report.nvme_peak == report.nvme_planned
            assert report.gpu_peak == report.gpu_planned
            if part.stop < STEPS:
                engine.save_checkpoint(folder / "saved")
            run.weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
            run.moments = moments_of(engine)
    return run


def between(of: dict[str, str], engine: Any, make_batch: Any) -> None:
    what = of["between"]
    if what == "evaluation":
        fresh, _ = MIXED[of["model"]](DTYPES[of["precision"]])()
        for parameter, trained in zip(fresh.parameters(), engine.parameters(), strict=True):
            assert parameter.dtype is trained.dtype
            parameter.data = trained.detach().clone()
        for own, buffer in zip(fresh.buffers(), engine.module.buffers(), strict=True):
            own.data = buffer.clone()
        with torch.no_grad():
            found, expected = (loss_of(m.eval()(**make_batch(9))) for m in (engine.module, fresh))
        engine.module.train()
        assert torch.equal(found, expected)
    elif what == "offloaded":
        engine.offload_states()
        engine.reload_states()
    else:
        interrupt(what, of["model"], engine, make_batch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", covering(list(AXES.values()), never), ids="-".join)
def test_nothing_changes_a_bit(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = dict(zip(AXES, case, strict=True))
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", SMALLEST_PIECE)
    offload_small(monkeypatch)
    clipping, accumulation = UPDATES[of["update"]][0], int(of["micro-batches"])
    expected = plain(of["model"], clipping, accumulation, of["precision"], chunk_of(of))
    run = trained(of, tmp_path)
    assert_identical(run, expected)
    assert run.norms == expected.norms


# -- what the key changes, and what it refuses -----------------------------------------------------
@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16], ids=str)
def test_cast_trains_base_and_adapters_in_the_precision_of_the_config(half: torch.dtype) -> None:
    options: dict[str, Any] = {"clipping": 0.5, "precision": "bf16"}
    run = train_windowed(lora(half), steps=STEPS, settings=config(section={"window": 1}, **options))
    assert {weight.dtype for weight in run.weights.values()} == {torch.bfloat16}
    assert_identical(run, train_plain(lora(half), steps=STEPS, **options))


class Strange(nn.Module):
    """One parameter of another dtype; blocks of fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.strange = nn.Parameter(torch.ones(4).to(dtype))


@pytest.mark.parametrize("rule", ["own", "cast"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_dtype_that_cannot_be_trained_is_refused_with_a_way_on(
    dtype: torch.dtype, rule: str
) -> None:
    settings = config(precision="bf16", section={"dtypes": rule})
    model = Strange(dtype)
    if rule == "cast" and dtype is torch.float64:  # DeepSpeed's rule has a way
        initialized(model, settings).destroy()
        assert model.strange.dtype is torch.bfloat16
        return
    with pytest.raises(ConfigError) as refused:
        initialized(model, settings)
    said = str(refused.value)
    assert f"strange is {dtype}" in said
    assert "Convert it" in said
    assert "freeze it" in said
    assert ("leave stronghold.dtypes out" in said) is (dtype is torch.float64)


# -- bytes -----------------------------------------------------------------------------------------
# Of one element: weights, and what a step changes beside them.
BYTES: dict[tuple[torch.dtype, bool], tuple[int, float]] = {
    (torch.bfloat16, False): (2, 2 + 8),
    (torch.bfloat16, True): (2, 1 + 2 + 2 * 4 / 64),  # lean
    (torch.float16, False): (2, 4 + 8),
    (torch.float32, False): (4, 8),
    (torch.float32, True): (4, 8),
}


@pytest.mark.parametrize("precision", ["bf16", "lean", "fp16"])
@pytest.mark.parametrize(("clipping", "accumulation"), [(0.5, 1), (0.0, 1), (0.5, 3)])
@pytest.mark.parametrize("name", MIXED)
def test_host_bytes_are_the_sum_over_the_formats(
    name: str, clipping: float, accumulation: int, precision: str
) -> None:
    model, make_batch = MIXED[name](DTYPES[precision])()
    expected = {n: p.dtype for n, p in model.named_parameters()}
    settings = config(
        section={"window": 1, **OWN},
        clipping=clipping,
        accumulation=accumulation,
        precision=precision,
    )
    engine = initialized(model, settings)
    for micro in range(2 * accumulation):
        engine.backward(loss_of(engine(**make_batch(micro))))
        engine.step()
    now, report = engine.inspect(), engine.memory_report()
    total, largest = 0.0, 0
    for layer in now.layers:
        gradients = 0
        total += layer.layout.frozen_bytes
        if layer.trained:
            (dtype,) = {expected[name] for name in layer.trained}
            weight, changed = BYTES[dtype, precision == "lean"]
            numel = layer.layout.trained_numel
            gradients = weight * numel
            total += gradients + changed * numel + 4 * numel * (accumulation > 1)
        total += gradients * (accumulation == 1)
        largest = max(largest, gradients)
    if accumulation > 1:
        (entries,) = (s for n, s in now.plan.host_bytes.items() if "gradient ring" in n)
        assert entries % largest == 0
        total += entries
    assert report.host_peak == report.host_planned == total
    assert report.gpu_peak == report.gpu_planned
    engine.destroy()
