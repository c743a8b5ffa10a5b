"""docs/members.md: every member of the engine that frameworks touch has its row, and every row
holds on a live engine.

The rows' sources are found again in the installed accelerate and transformers: a use of theirs that
the table lacks fails here, and so does a row whose use is gone.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from stronghold.errors import ConfigError
from tests.models import MODELS, loss_of
from tests.support.installed_sources import (
    ENGINE_NAMES,
    MODEL_IS_ENGINE,
    Use,
    accesses,
    source_root,
    uses_of_engine,
    uses_of_optimizer,
)
from tests.support.training import config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "members.md"
EVIDENCE = re.compile(r"(?:accelerate|transformers)/[\w/]+\.py:[\w.]+")

# --- what the installed sources touch -------------------------------------------------------------


def rows(heading: str) -> dict[str, list[str]]:
    """member -> evidence in the two packages, of the table under `heading`."""
    page = PAGE.read_text(encoding="utf-8")
    [section] = [part for part in re.split(r"^## ", page, flags=re.M) if part.startswith(heading)]
    found = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            member, touched, here = (cell.strip() for cell in line.strip("|").split("|"))
            assert here
            found[member.strip("`")] = EVIDENCE.findall(touched)
    return found


@pytest.mark.parametrize(
    ("heading", "uses"),
    [("engine\n", uses_of_engine), ("engine.optimizer\n", uses_of_optimizer)],
    ids=["engine", "optimizer"],
)
def test_the_table_is_what_the_installed_sources_touch(
    heading: str, uses: Callable[[], set[Use]]
) -> None:
    listed = {(member, place) for member, places in rows(heading).items() for place in places}
    installed = uses()
    assert installed - listed == set(), "uses that docs/members.md lacks"
    assert listed - installed == set(), "rows of docs/members.md whose use is gone"


def test_no_other_file_holds_an_engine() -> None:
    strangers = set()
    for package in ("accelerate", "transformers"):
        root = source_root(package)
        for path in (root / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            distinct = ENGINE_NAMES - {"engine", "self.engine"}
            if "test_utils" in path.parts or not any(f"{name}." in text for name in distinct):
                continue
            named = distinct & {receiver for _, receiver, _ in accesses(ast.parse(text))}
            if named and path.relative_to(root).as_posix() not in MODEL_IS_ENGINE:
                strangers.add(path.relative_to(root).as_posix())
    assert strangers == set()


# --- what each row says, on a live engine ---------------------------------------------------------


class Live:
    """An engine after one step, and what the checks need around it."""

    def __init__(self, folder: Path) -> None:
        model, self.make_batch = MODELS["gpt_tied"]()
        self.model = model
        self.folder = folder
        self.settings = config(accumulation=2)
        self.engine, self.optimizer, _, _ = stronghold.initialize(
            model=model, config=self.settings, model_parameters=model.parameters()
        )
        for seed in range(2):
            self.engine.backward(self.loss(seed))
            self.engine.step()

    def loss(self, seed: int) -> torch.Tensor:
        return loss_of(self.engine(**self.make_batch(seed)))


def absent(name: str) -> Callable[[Live], None]:
    def check(live: Live) -> None:
        assert not hasattr(live.engine, name)

    return check


def absent_from_optimizer(name: str) -> Callable[[Live], None]:
    def check(live: Live) -> None:
        assert not hasattr(live.optimizer, name)

    return check


def check_backward(live: Live) -> None:
    loss = live.loss(2)
    assert torch.equal(live.engine.backward(loss, scale_wrt_gas=False), loss)
    assert torch.equal(live.engine.backward(live.loss(2)), loss / 2)


def check_boundary(live: Live) -> None:
    live.engine.set_gradient_accumulation_boundary(is_boundary=True)
    live.engine.backward(live.loss(2), scale_wrt_gas=False)
    live.engine.step()  # a window of one micro-batch instead of two
    assert live.engine.was_step_applied()
    assert live.engine.global_steps == 2
    live.engine.set_gradient_accumulation_boundary(is_boundary=False)
    assert not live.engine.is_gradient_accumulation_boundary()


def state_on_cpu(name: str, **options: Any) -> Callable[[Live], None]:
    """The method of this name gives the model's state dict."""

    def check(live: Live) -> None:
        state = getattr(live.engine, name)(**options)
        assert state.keys() == live.model.state_dict().keys()
        assert {value.device.type for value in state.values()} == {"cpu"}
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()

    return check


def check_config(live: Live) -> None:
    assert live.engine.config == live.settings
    assert live.engine.config.get("zero_optimization", {}).get("stage", None) is None


def check_module_state(live: Live) -> None:
    state = {name: value.clone() for name, value in live.engine.module_state_dict().items()}
    for parameter in live.model.parameters():
        parameter.data.zero_()
    live.engine.load_module_state_dict(state)
    for name, value in live.engine.module_state_dict().items():
        assert torch.equal(value, state[name])


def check_destroy(live: Live) -> None:
    values = [p.detach().clone() for p in live.engine.parameters()]
    live.engine.destroy()
    live.engine.destroy()
    for parameter, value in zip(live.engine.parameters(), values, strict=True):
        assert torch.equal(parameter, value)
    with pytest.raises(ConfigError, match="this engine was destroyed"):
        live.engine.backward(live.loss(2))


def check_compile(live: Live) -> None:
    live.engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    live.engine.backward(live.loss(2))
    live.engine.step()


def check_states_leave(live: Live, of: str = "engine") -> None:
    getattr(live, of).offload_states()
    getattr(live, of).reload_states()
    live.engine.backward(live.loss(2))
    live.engine.step()


def check_loss_scale(live: Live) -> None:
    assert (live.engine.loss_scale(), live.engine.dynamic_loss_scale()) == (1.0, False)


def check_checkpoint(live: Live) -> None:
    save = live.engine.save_checkpoint
    assert "exclude_frozen_parameters" in inspect.signature(save).parameters
    save(str(live.folder), client_state={"epoch": 3})
    saved = {name: value.clone() for name, value in live.engine.module_state_dict().items()}
    for seed in range(2):
        live.engine.backward(live.loss(seed))
        live.engine.step()
    # What Transformers looks for before it asks to resume.
    assert [path.name for path in live.folder.glob("global_step*")] == ["global_step1"]
    path, client_state = live.engine.load_checkpoint(str(live.folder))
    assert Path(path).exists()
    assert client_state["epoch"] == 3
    assert live.engine.global_steps == 1
    for name, value in live.engine.module_state_dict().items():
        assert torch.equal(value, saved[name])


def check_16bit_model(live: Live) -> None:
    assert live.engine.save_16bit_model(str(live.folder), "weights.bin") is not False
    assert list(live.folder.iterdir())


def check_scheduler(live: Live) -> None:
    live.engine.lr_scheduler = None
    for _ in range(2):
        live.engine.backward(live.loss(2))
        live.engine.step()
    assert live.engine.global_steps == 2


def kept(name: str) -> Callable[[Live], None]:
    """A framework keeps something of its own under this name."""

    def check(live: Live) -> None:
        setattr(live.engine, name, live)
        assert getattr(live.engine, name) is live

    return check


def check_pass_through(live: Live) -> None:
    with pytest.raises(AttributeError):
        live.engine.generate()
    live.model.generate = lambda: "tokens"
    assert live.engine.generate() == "tokens"


def same_parameters(live: Live) -> None:
    own = [id(parameter) for parameter in live.model.parameters()]
    assert [id(parameter) for parameter in live.engine.parameters()] == own


def modes(live: Live) -> None:
    live.engine.eval()
    assert not live.model.training
    live.engine.train()
    assert live.model.training


def check_no_sync(live: Live) -> None:
    with live.engine.no_sync():
        live.engine.backward(live.loss(2))


def true(condition: Callable[[Live], Any]) -> Callable[[Live], None]:
    def check(live: Live) -> None:
        assert condition(live)

    return check


ENGINE: dict[str, Callable[[Live], None]] = {
    "forward": true(lambda live: torch.equal(live.loss(3), live.loss(3))),
    "backward": check_backward,
    "step": check_boundary,
    "set_gradient_accumulation_boundary": check_boundary,
    "is_gradient_accumulation_boundary": check_boundary,
    "was_step_applied": check_boundary,
    "global_steps": check_boundary,
    "get_global_grad_norm": true(lambda live: float(live.engine.get_global_grad_norm()) > 0.0),
    "no_sync": check_no_sync,
    "set_requires_gradient_sync": absent("set_requires_gradient_sync"),
    "zero_grad": true(lambda live: live.engine.zero_grad() is None),
    "train": modes,
    "eval": modes,
    "to": true(lambda live: live.engine.to("cpu") is live.engine),
    "module": true(lambda live: live.engine.module is live.model),
    "__dict__": true(lambda live: "forward" not in live.engine.__dict__),
    "_orig_mod": absent("_orig_mod"),
    "_converted_to_transformer_engine": absent("_converted_to_transformer_engine"),
    "parameters": same_parameters,
    "named_parameters": true(
        lambda live: (
            [name for name, _ in live.engine.named_parameters()]
            == [f"module.{name}" for name, _ in live.model.named_parameters()]
        )
    ),
    "modules": true(lambda live: live.model in set(live.engine.modules())),
    "buffers": true(lambda live: list(live.engine.buffers()) == list(live.model.buffers())),
    "state_dict": true(
        lambda live: (
            live.engine.state_dict().keys()
            == {f"module.{name}" for name in live.model.state_dict()}
        )
    ),
    "module_state_dict": check_module_state,
    "load_module_state_dict": check_module_state,
    "zero_gather_16bit_weights_on_model_save": true(
        lambda live: live.engine.zero_gather_16bit_weights_on_model_save() is False
    ),
    "_zero3_consolidated_16bit_state_dict": state_on_cpu(
        "_zero3_consolidated_16bit_state_dict", exclude_frozen_parameters=True
    ),
    "_consolidated_16bit_state_dict": state_on_cpu("_consolidated_16bit_state_dict"),
    "save_checkpoint": check_checkpoint,
    "load_checkpoint": check_checkpoint,
    "save_16bit_model": check_16bit_model,
    "config": check_config,
    "compile": check_compile,
    "offload_states": check_states_leave,
    "loss_scale": check_loss_scale,
    "destroy": check_destroy,
    "register_post_step_hook": absent("register_post_step_hook"),
    "train_batch_size": true(lambda live: live.engine.train_batch_size() == 4),
    "get_lr": true(lambda live: live.engine.get_lr() == [1e-2]),
    "zero_optimization_stage": true(lambda live: live.engine.zero_optimization_stage() == 0),
    "optimizer": true(lambda live: isinstance(live.engine.optimizer, torch.optim.Optimizer)),
    "lr_scheduler": check_scheduler,
    "training_dataloader": true(lambda live: live.engine.training_dataloader is None),
    "device": true(lambda live: live.engine.device == torch.device("cpu")),
    "local_rank": true(lambda live: live.engine.local_rank == 0),
    "global_rank": true(lambda live: live.engine.global_rank == 0),
    "world_size": true(lambda live: live.engine.world_size == 1),
    "dp_world_size": true(lambda live: live.engine.dp_world_size == 1),
    "mp_world_size": true(lambda live: live.engine.mp_world_size == 1),
    "_accelerator": kept("_accelerator"),
    "generate": check_pass_through,
}


def check_live_groups(live: Live) -> None:
    before = {name: value.clone() for name, value in live.engine.module_state_dict().items()}
    live.optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(2):
        live.engine.backward(live.loss(2))
        live.optimizer.step()  # the engine's, as Fabric calls it
    assert live.engine.global_steps == 2
    for name, value in live.engine.module_state_dict().items():
        assert torch.equal(value, before[name])


def check_add_group(live: Live) -> None:
    with pytest.raises(ConfigError, match="add_param_group"):
        live.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def check_optimizer_state(live: Live) -> None:
    state = live.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    live.optimizer.load_state_dict(state)
    assert live.optimizer.param_groups[0]["lr"] == 0.5
    assert live.engine.get_lr() == [0.5]


OPTIMIZER: dict[str, Callable[[Live], None]] = {
    "param_groups": check_live_groups,
    "step": check_live_groups,
    "defaults": true(lambda live: live.optimizer.defaults["lr"] == 1e-2),
    "state": true(lambda live: live.optimizer.state is not None),
    "state_dict": check_optimizer_state,
    "load_state_dict": check_optimizer_state,
    "zero_grad": true(lambda live: live.optimizer.zero_grad() is None),
    "add_param_group": check_add_group,
    "offload_states": lambda live: check_states_leave(live, "optimizer"),
    "overflow": true(lambda live: live.optimizer.overflow is False),
    "loss_scale": true(lambda live: live.optimizer.loss_scale == 1.0),
    **{
        name: absent_from_optimizer(name)
        for name in ("train", "eval", "optimizer", "local_state_dict", "clip_master_grads")
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("heading", "member"),
    [("engine\n", member) for member in rows("engine\n")]
    + [("engine.optimizer\n", member) for member in rows("engine.optimizer\n")],
)
def test_what_the_row_says_holds(heading: str, member: str, tmp_path: Path) -> None:
    check = (ENGINE if heading == "engine\n" else OPTIMIZER)[member]
    live = Live(tmp_path)
    try:
        check(live)
    finally:
        live.engine.destroy()
