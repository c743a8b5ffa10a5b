"""Bad input: one error each, which says what to change, before anything is allocated.

Budget errors carry numbers: each test follows the advice and trains.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
import torchao.optim
from torch import nn
from transformers.optimization import Adafactor

import stronghold
from stronghold.devices import device
from stronghold.devices.memory import DeviceMemory
from stronghold.errors import BudgetError, ConfigError
from stronghold.train import arrays
from tests.conftest import HAS_CUDA, lane_threads
from tests.models import MODELS, loss_of
from tests.support.insides import tables_of
from tests.support.sizes import named_size
from tests.support.training import config, initialized
from tests.support.twin import Twin


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every host slab, lane and device buffer that is made from now on."""
    made: list[str] = []

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(arrays, "map_slab")
    count(device.Lane, "__init__")
    count(DeviceMemory, "allocate")
    return made


def refused(
    allocations: list[str],
    model: nn.Module,
    settings: Any,
    error: type[ConfigError],
    *advice: str,
    **initialize: Any,
) -> ConfigError:
    """Initialize; the one error, whose message holds every regular expression of `advice`."""
    before = [(p, p.data_ptr(), p.dtype, p.shape, p.device) for p in model.parameters()]
    names = [list(vars(module)) for module in model.modules()]
    tables = [tables_of(module) for module in model.modules()]
    initialize.setdefault("model_parameters", list(model.parameters()))
    with pytest.raises(ConfigError) as caught:
        stronghold.initialize(model=model, config=settings, **initialize)
    assert type(caught.value) is error
    message = str(caught.value)
    for words in advice:
        assert re.search(words, message), f"{words!r} is not in: {message}"
    assert allocations == [], "something was allocated first"
    assert lane_threads() == []
    assert [(p, p.data_ptr(), p.dtype, p.shape, p.device) for p in model.parameters()] == before
    assert [list(vars(module)) for module in model.modules()] == names
    assert [tables_of(module) for module in model.modules()] == tables
    return caught.value


def trains(
    model: nn.Module, make_batch: Callable[[int], Any], settings: Any, **options: Any
) -> Any:
    """One step through the engine; the engine's memory report."""
    options.setdefault("model_parameters", list(model.parameters()))
    engine, *_ = stronghold.initialize(model=model, config=settings, **options)
    engine.backward(loss_of(engine(**make_batch(0))))
    engine.step()
    engine.synchronize()
    report = engine.memory_report()
    engine.destroy()
    return report


# --- budgets: follow the advice, and it works -----------------------------------------------------


def least(error: ConfigError) -> int:
    """The exact bytes that are needed; the size in the message is that, or hardly more."""
    assert isinstance(error, BudgetError)
    assert error.need_bytes is not None
    assert error.need_bytes <= named_size(str(error), "to at least") <= 1.01 * error.need_bytes
    return error.need_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt", "weird_model", "uneven"])
def test_a_gpu_budget_below_the_smallest_window(
    name: str, precision: str, allocations: list[str]
) -> None:
    model, make_batch = MODELS[name]()

    def settings(budget: int | str) -> dict[str, Any]:
        return config(precision=precision, section={"gpu_memory": budget})

    error = refused(
        allocations, model, settings(100), BudgetError, r"stronghold\.gpu_memory: got 100 bytes"
    )
    enough = least(error)
    again = refused(allocations, model, settings(enough - 1), BudgetError)
    assert least(again) == enough
    report = trains(model, make_batch, settings(enough))
    assert report.gpu_peak <= enough


def test_a_gpu_budget_below_the_window_that_is_asked_for(allocations: list[str]) -> None:
    model, make_batch = MODELS["gpt"](num_layers=4)
    section: dict[str, Any] = {"window": 3, "gpu_memory": 60_000}
    settings = config(section=section)
    error = refused(
        allocations, model, settings, BudgetError, "window of 3 slots needs", "leave window out"
    )
    enough = least(error)
    trains(model, make_batch, config(section={"window": 3, "gpu_memory": enough}))
    without = named_size(str(error), "leave window out, with which")
    trains(model, make_batch, config(section={"gpu_memory": without}))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_host_with_too_little_memory(accumulation: int, allocations: list[str]) -> None:
    model, make_batch = MODELS["gpt"]()

    def settings(budget: int | str, early: int | str = 0) -> dict[str, Any]:
        section = {"host_memory": budget, "early_layers": early}
        return config(accumulation=accumulation, section=section)

    error = refused(
        allocations, model, settings("1KiB"), BudgetError, "1024 bytes are available", "host_memory"
    )
    assert "early_layers" not in str(error)
    enough = least(error)
    refused(allocations, model, settings(enough - 1), BudgetError)
    report = trains(model, make_batch, settings(enough))
    assert report.host_peak == report.host_planned == enough
    error = refused(allocations[:0], model, settings(1, early="all"), BudgetError)
    more = least(error)
    assert named_size(str(error), "stronghold.early_layers, which takes") == more - enough
    report = trains(model, make_batch, settings(more, early="all"))
    assert report.host_peak == report.host_planned == more


def test_a_machine_that_lacks_memory_is_refused_without_a_budget_in_the_config(
    allocations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stronghold.train import demand

    model, _ = MODELS["gpt"]()
    # libraries may take 1 GiB more
    monkeypatch.setattr(demand, "available_host_bytes", lambda: (1 << 30) + 10_000)
    refused(allocations, model, config(), BudgetError, "add RAM to at least")


class InBuffer(nn.Module):
    """Nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).mean()


def test_a_gpu_budget_below_a_model_in_which_nothing_repeats(allocations: list[str]) -> None:
    def settings(budget: int | str) -> dict[str, Any]:
        return config(section={"gpu_memory": budget})

    model, advice = (InBuffer(), (r"stronghold\.layers", "no repeated blocks", "got 100 bytes"))
    error = refused(allocations, model, settings(100), BudgetError, *advice)
    report = trains(model, lambda seed: {"x": torch.ones(2, 3)}, settings(least(error)))
    assert report.gpu_peak == report.gpu_planned


# --- refused: a model, or a change of the config; what the one error says; what trains instead ---


def ours(**section: Any) -> dict[str, Any]:
    return {"stronghold": {"device": "emulated", **section}}


def same_memory(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embedding.weight.data)


FILE = "LICENSE/trace.json"  # below what is no folder
BF16 = {"bf16": {"enabled": True}}
MODELS_REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, ...], dict[str, Any] | None]] = {
    "layers that are not there": (None, ours(layers="bloks"), ("bloks", "blocks"), ours()),
    "meta": (lambda m: m.to("meta"), {}, ("meta device", "load its values"), None),
    "one memory": (same_memory, {}, ("same memory", "assigning the same nn.Param"), None),
    "bf16": (lambda m: m.bfloat16(), {}, (r'add "bf16": \{"enabled": true\}', "float32"), BF16),
    # Refused in fp32; in bf16 all are cast, as DeepSpeed does.
    "two dtypes": (
        lambda m: m.blocks[1].bfloat16() and None,
        {},
        (r"blocks\.1\.\S+ is torch\.bfloat16", "bf16"),
        BF16,
    ),
    "double": (
        lambda m: m.double(),
        {},
        (r"asks for fp32: load the model in torch\.float32",),
        None,
    ),
    "nothing to train": (
        lambda m: m.requires_grad_(False),
        {},
        ("requires_grad", "model_parameters"),
        None,
    ),
    "a trace in a folder": (
        None,
        ours(trace="tests"),
        (r"stronghold\.trace: .*cannot be written",),
        ours(),
    ),
    "a trace below a file": (
        None,
        ours(trace=FILE),
        (r"stronghold\.trace: .*cannot be written",),
        ours(),
    ),
    "no GPU": (None, ours(device="cuda"), ('got "cuda"', '"device": "emulated"'), ours()),
}
CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "batch sizes": ({"train_batch_size": 7}, ("do not multiply out", r"7 != 2 \* 1 \* 1")),
    "unknown key": (
        {"stronghold": {"device": "emulated", "windw": 2}},
        (r"stronghold\.windw: unknown key", 'Did you mean "window"'),
    ),
    "more resident layers than there are": (
        {"stronghold": {"device": "emulated", "resident_layers": 99}},
        (r"stronghold\.resident_layers: got 99", '"all"'),
    ),
    "log level": ({"log_level": 1}, ("log_level: got 1", "info, warning")),
}
REFUSED = MODELS_REFUSED | {name: (None, *row, None) for name, row in CONFIGS.items()}
if HAS_CUDA:
    del REFUSED["no GPU"]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_what_to_change(case: str, allocations: list[str]) -> None:
    change, changes, advice, instead = REFUSED[case]
    model, make_batch = MODELS["gpt"]()
    model = (change(model) if change else None) or model
    refused(allocations, model, {**config(), **changes}, ConfigError, *advice)
    if instead is not None:
        trains(model, make_batch, {**config(), **instead})


def test_calls_that_are_refused(allocations: list[str]) -> None:
    model, _ = MODELS["gpt"]()
    refused(allocations, model, None, ConfigError, "no config: pass config=")
    advice = ("RMSprop cannot run on the CPU here", r"torch\.optim\.AdamW")
    client = torch.optim.RMSprop(model.parameters(), lr=0.1)
    refused(allocations, model, config(), ConfigError, *advice, optimizer=client)
    optim = r'Trainer\'s optim= "adamw_torch", "adamw_torch_fused" and "sgd" work'
    for small in (bitsandbytes.optim.PagedAdamW8bit, torchao.optim.AdamW8bit, Adafactor):
        advice = (f"{small.__mro__[0].__name__} cannot run", r'\{"states": "lean"\}: 8-bit', optim)
        client = small(model.parameters())
        refused(allocations, model, config(), ConfigError, *advice, optimizer=client)


@pytest.mark.parametrize("kind", ["transposed", "strided", "expanded"])
def test_parameters_with_strides_of_their_own_train_as_contiguous_ones(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = Twin()
    both.engine.destroy()
    for model in (both.model, both.plain):
        bias = model.blocks[0].mlp.down.bias
        weight = model.blocks[0].mlp.down.weight
        if kind == "transposed":
            weight.data = weight.data.t().contiguous().t()
        elif kind == "strided":
            weight.data = weight.data.repeat_interleave(2, 1)[:, ::2]
        else:
            bias.data = torch.zeros(1).expand(bias.shape)
        assert not all(p.is_contiguous() for p in (weight, bias))
    for parameter in both.plain.parameters():
        parameter.data = parameter.data.contiguous()
    both.restart_plain()
    with caplog.at_level(logging.WARNING, "stronghold"):
        both.engine = initialized(both.model, both.settings)
    (said,) = [record.message for record in caplog.records if "contiguous" in record.message]
    assert "blocks.0.mlp.down." + ("bias" if kind == "expanded" else "weight") in said
    both.train(0)
    both.train(1)
    both.check()
    both.engine.destroy()


def test_no_model(allocations: list[str]) -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        stronghold.initialize(config=config())
    assert allocations == []


# --- the machine ----------------------------------------------------------------------------------


def test_ranks_without_a_process_group(
    allocations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = MODELS["gpt"]()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    advice = ("WORLD_SIZE: got 2", "deepspeed.init_distributed")
    refused(allocations, model, config(), ConfigError, *advice, dist_init_required=False)


def test_a_clients_schedule_that_fails(allocations: list[str]) -> None:
    model, _ = MODELS["gpt"]()

    def broken(optimizer: torch.optim.Optimizer) -> Any:
        raise RuntimeError("no such schedule")

    with pytest.raises(RuntimeError, match="no such schedule"):
        stronghold.initialize(
            model=model, config=config(), model_parameters=model.parameters(), lr_scheduler=broken
        )
    assert allocations == []
