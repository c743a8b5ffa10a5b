"""What stronghold relies on in other packages: one test for each row of the table of patches.

A test `test_KEY` asserts facts about the installed package alone, as the row `KEY` states them: a
signature, or a behaviour. It fails when a release changes them. No engine is made in this file.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import pickle
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils.deepspeed as accelerate_deepspeed
import bitsandbytes
import deepspeed
import numpy as np
import pytest
import torch
from accelerate.accelerator import Accelerator
from accelerate.state import PartialState
from deepspeed.utils import zero_to_fp32
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stronghold.patches import autograd, modules, quantised, tensors
from stronghold.patches.distributed import shared_store
from stronghold.patches.table import PATCHES, Lifetime, Manner, Package
from stronghold.patches.versions import report_untried, untried_versions
from tests.support.frameworks import fresh_accelerate
from tests.support.stock import one_rank

__all__ = ["fresh_accelerate"]

ROWS = {patch.key: patch for patch in PATCHES}
# Rows whose names exist in builds with CUDA alone, or on objects that their own tests make.
LATER = {
    "raw_stream",
    "full_functions",
    "zero_attributes",
    "opt_called",
    "compiled",
    "loss_function",
    "weight_conversions",
}


def named(name: str) -> Any:
    """The object with this dotted name: the longest module that can be imported, then attributes.
    An attribute that instances have alone is taken from one."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(words[:length]))
        except ImportError:
            continue
        for word in words[length:]:
            if value in MAKERS and not hasattr(value, word):
                value = MAKERS[value]()
            value = getattr(value, word)
        return value
    raise AttributeError(name)


def parameters_of(function: Any) -> list[str]:
    """The names of a function's parameters. Wrappers show the original's."""
    return list(inspect.signature(function).parameters)


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 11}
    return GPT2LMHeadModel(GPT2Config(**sizes, **changes))


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
    return LlamaForCausalLM(LlamaConfig(intermediate_size=8, **sizes))


# Of classes whose attributes are set when an object is made: a function that makes one.
MAKERS: dict[Any, Callable[[], Any]] = {
    nn.Module: lambda: nn.Linear(1, 1),
    torch.Tensor: lambda: torch.ones(1),
    torch.UntypedStorage: lambda: torch.ones(1).untyped_storage(),
    type(torch.ops.aten.add.Tensor): lambda: torch.ops.aten.add.Tensor,
}


# -- the table -------------------------------------------------------------------------------------
def test_every_row_has_one_test_and_every_test_one_row() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    about_the_table = {name for name in tests if name.startswith(("every_", "an_untried_"))}
    assert tests - about_the_table == set(ROWS)
    assert len(ROWS) == len(PATCHES)


@pytest.mark.parametrize("key", sorted(ROWS.keys() - LATER))
def test_every_name_exists(key: str) -> None:
    for name in ROWS[key].names:
        named(name)


def test_every_row_says_how_long_its_change_lasts() -> None:
    assert all((p.lifetime is Lifetime.NOTHING) is (p.manner is Manner.USED) for p in PATCHES)


def test_every_pinned_version_was_tried() -> None:
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(line.split(" ;")[0].split("==") for line in pins.splitlines() if "==" in line)
    packages = {patch.package for patch in PATCHES if patch.package.name != "python"}
    assert {p.name: pinned[p.name] for p in packages if pinned[p.name] not in p.tried} == {}


def test_an_untried_version_is_one_phrase() -> None:
    package = Package(name="torch", tried=("2.11.0", "2.13.1"))

    def phrase(version: str) -> list[str]:
        return untried_versions([package], lambda _: version)

    assert phrase("2.11.3+cu129") == phrase("2.12.0") == phrase("2.13.9") == []
    assert phrase("2.14.0.dev1") == ["torch 2.14.0.dev1 (tried: 2.11.0 to 2.13.1)"]
    assert phrase("2.9") == ["torch 2.9 (tried: 2.11.0 to 2.13.1)"]


def test_an_untried_version_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packages = [Package(name="torch", tried=("1.0",)), Package(name="not_imported", tried=("1",))]
    monkeypatch.setattr("stronghold.patches.versions.PACKAGES", packages)
    report_untried.cache_clear()
    report_untried()
    report_untried()
    monkeypatch.undo()
    report_untried.cache_clear()
    (line,) = caplog.messages
    assert f"torch {torch.__version__} (tried: 1.0)" in line
    assert "docs/patches.md" in line


# -- DeepSpeed and Accelerate ----------------------------------------------------------------------
def test_initialize() -> None:
    assert {"args", "config", "config_params"} <= set(parameters_of(deepspeed.initialize))
    source = inspect.getsource(importlib.import_module("accelerate.accelerator"))
    assert "import deepspeed" in source
    assert "deepspeed.initialize" in source  # read at the call, not imported once


def test_zero_init() -> None:
    assert {"config_dict_or_path", "config"} <= set(parameters_of(deepspeed.zero.Init.__init__))
    context = deepspeed.zero.Init.__new__(deepspeed.zero.Init)
    context.enabled = False
    with context:
        layer = nn.Linear(2, 2)
    assert layer.weight.shape == (2, 2)
    assert vars(layer.weight) == {}


def test_zero_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = ROWS["zero_to_fp32"].names
    names = {"checkpoint_dir", "tag", "exclude_frozen_parameters"}
    assert names <= set(parameters_of(named(name)))
    state = {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}
    monkeypatch.setattr(zero_to_fp32, name.rpartition(".")[2], lambda *_, **__: state)
    loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(nn.Linear(1, 1), "nowhere")
    assert loaded.weight.item() == 1.0


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = accelerate_deepspeed.HfDeepSpeedConfig
    original = config.set_stage_and_offload

    def with_stage_2(given: Any) -> None:
        given.config["zero_optimization"]["stage"] = 2
        original(given)

    assert config({"zero_optimization": {"stage": 3}}).is_zero3()
    monkeypatch.setattr(config, "set_stage_and_offload", with_stage_2)
    theirs = {"zero_optimization": {"stage": 3}}
    changed = config(theirs)
    assert changed.is_zero2()
    assert theirs["zero_optimization"]["stage"] == 3  # Accelerate has a copy


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_state() -> None:
    kinds = inspect.signature(PartialState.__init__).parameters
    assert list(kinds)[:2] == ["self", "cpu"]
    assert inspect.Parameter.VAR_KEYWORD in {p.kind for p in kinds.values()}
    source = inspect.getsource(PartialState.__init__)
    assert 'kwargs.pop("backend", None)' in source


def test_accelerate_weights() -> None:
    assert parameters_of(Accelerator.get_state_dict) == ["self", "model", "unwrap"]
    source = inspect.getsource(Accelerator.get_state_dict)
    assert "clone_tensors_for_torch_save(self.unwrap_model(model).state_dict())" in source


def test_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_module_of_this_test.py").write_text("value = 1\n", encoding="utf-8")
    executed: list[str] = []

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name != "a_module_of_this_test":
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, [str(tmp_path)])
            assert spec is not None
            loader: Any = spec.loader

            def exec_module(module: Any) -> None:
                del loader.exec_module
                loader.exec_module(module)
                executed.append(module.__name__)

            loader.exec_module = exec_module
            return spec

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    # a probe executes nothing
    assert importlib.util.find_spec("a_module_of_this_test") is not None
    assert executed == []
    assert importlib.import_module("a_module_of_this_test").value == 1
    assert executed == [sys.modules.pop("a_module_of_this_test").__name__]


# -- parameters ------------------------------------------------------------------------------------


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks the first parameter, which has torch's property from its base class."""
    model = gpt2()
    assert "device" not in vars(nn.Parameter)
    assert model.device == next(model.parameters()).device == torch.device("cpu")
    there = property(lambda _: torch.device("meta"))
    monkeypatch.setattr(nn.Parameter, "device", there, raising=False)
    assert model.device == torch.device("meta")


def test_data() -> None:
    # else deleting ours would not give torch's back
    assert "data" not in vars(nn.Parameter)
    parameter = nn.Parameter(torch.ones(3))
    before = tensors.version_of(parameter)
    parameter.data.mul_(2.0)
    assert tensors.version_of(parameter) == before
    parameter.detach().mul_(2.0)
    assert tensors.version_of(parameter) == before + 1
    other = torch.zeros(3)
    descriptor: Any = torch.Tensor.data
    descriptor.__set__(parameter, other)
    assert parameter.data_ptr() == descriptor.__get__(parameter).data_ptr() == other.data_ptr()
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(3))
    before = tensors.version_of(parameter)
    with torch.no_grad():
        parameter.set_(parameter)
    assert tensors.version_of(parameter) > before
    assert "set_" not in vars(nn.Parameter)
    given = []

    def set_(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        given.append((target, source))
        return target

    monkeypatch.setattr(nn.Parameter, "set_", set_, raising=False)
    layer = nn.Linear(2, 2)
    weight = layer.weight
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert layer.weight is weight
    assert any(target is source is weight for target, source in given)


def test_zero_grad() -> None:
    for owner in (nn.Module, torch.optim.Optimizer):
        assert parameters_of(owner.zero_grad) == ["self", "set_to_none"]
    optimizers = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]
    assert all("zero_grad" not in vars(optimizer) for optimizer in optimizers)


def test_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = ROWS["clipping"].names
    owner, _, attribute = name.rpartition(".")
    assert parameters_of(named(name))[:3] == ["parameters", "max_norm", "total_norm"]
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(named(owner), attribute, lambda *given, **_: calls.append(given))
    parameter = nn.Parameter(torch.ones(3))
    nn.utils.clip_grad_norm_([parameter], 0.5)  # without a gradient, too
    parameter.grad = torch.ones(3)
    nn.utils.clip_grad_norm_(parameter, 0.25)
    assert [(list(given[0]), given[1]) for given in calls] == [
        ([parameter], 0.5),
        ([parameter], 0.25),
    ]


# -- attention -------------------------------------------------------------------------------------
def counted_attention(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of queries that come to `F.scaled_dot_product_attention` from now on."""
    shapes, plain = [], F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        shapes.append(query.shape)
        return plain(query, *given, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    return shapes


def test_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = counted_attention(monkeypatch)
    heads = torch.ones(1, 2, 3, 4)
    sdpa_attention_forward(gpt2().transformer.h[0].attn, heads, heads, heads, None)
    assert shapes == [heads.shape]


def test_meta_autocast() -> None:
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.autocast("meta", enabled=False)
    assert isinstance(torch.autocast, type)


def test_attention_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = counted_attention(monkeypatch)
    layer, rows = nn.MultiheadAttention(4, 2, batch_first=True), torch.ones(1, 3, 4)
    layer(rows, rows, rows, need_weights=False)
    assert shapes == [torch.Size([1, 2, 3, 2])]


# -- written on the user's objects -----------------------------------------------------------------
# -- quantised weights -----------------------------------------------------------------------------
def kept_on_context(function: Any, *args: Any) -> list[str]:
    """The attributes with tensors that `function.forward` leaves on its context."""
    context = SimpleNamespace(needs_input_grad=(True,) + (False,) * (len(args) - 1))
    context.save_for_backward = lambda *tensors: None
    function.forward(context, *args)
    values = vars(context).items()
    return [name for name, value in values if isinstance(value, torch.Tensor | list | tuple)]


def test_products() -> None:
    functions = named("bitsandbytes.autograd._functions")
    x = torch.randn(2, 64)
    linear = bitsandbytes.nn.Linear4bit(64, 8, bias=False).to("cpu")
    state = linear.weight.quant_state
    assert kept_on_context(functions.MatMul4Bit, x, linear.weight.data, None, None, state) == [
        "needs_input_grad",
        "tensors",
    ]
    linear = bitsandbytes.nn.Linear8bitLt(64, 8, bias=False, has_fp16_weights=False).to("cpu")
    linear(x)
    assert linear.weight.CB is None  # `settle` gives it back
    arguments = (x, linear.weight.data, None, None, linear.state)
    assert "A" in kept_on_context(functions.MatMul8bitFp, *arguments)
    assert "tensors" in kept_on_context(functions.MatMul8bitLt, *arguments)
    # they read the names at each call
    for function in (functions.matmul, functions.matmul_4bit):
        assert re.search(r"MatMul\w+\.apply\(A, B, out, bias, ", inspect.getsource(function))


def test_evaluation_layout() -> None:
    forward = inspect.getsource(bitsandbytes.nn.Linear4bit.forward)
    assert "_convert_weight_packed_for_cpu(self.weight.data, quant_state)" in forward
    assert parameters_of(named("bitsandbytes.nn.modules._convert_weight_packed_for_cpu"))[:2] == [
        "qweight",
        "quant_state",
    ]


def test_weights_that_are_there() -> None:
    """They return another object for the device where they are. Without `to` they quantise."""
    for linear in (
        bitsandbytes.nn.Linear4bit(64, 8),
        bitsandbytes.nn.Linear8bitLt(64, 8, has_fp16_weights=False),
    ):
        weight = linear.to("cpu").weight
        there = quantised.itself_if_there
        assert weight.to("cpu") is not weight
        assert there(type(weight).to, weight, "cpu") is weight
        assert there(type(weight).to, weight, "meta").is_meta
    unquantised = bitsandbytes.nn.Linear4bit(64, 8).weight
    assert there(type(unquantised).to, unquantised, "cpu").quant_state is not None


def test_nf4_product() -> None:
    module = named("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = module.to_nf4(torch.randn(64, 256))
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: packed):
        F.linear(torch.randn(2, 256, requires_grad=True), weight)
    assert [type(tensor) for tensor in saved] == [module.NF4Tensor]
    with pytest.raises(RuntimeError, match="data pointer"):
        saved[0].untyped_storage().data_ptr()


def test_hidden_class() -> None:
    functions = []

    class Hidden(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            functions.append(func)
            with autograd.without_torch_function():
                return func(*args, **(kwargs or {}))

    parameter: Any = nn.Parameter(torch.ones(3))
    parameter.__class__ = Hidden
    shape: Any = torch.Tensor.shape
    assert parameter.shape == (3,)
    assert functions == [shape.__get__]
    assert torch.add(parameter, 1.0)[0] == 2.0
    assert functions[1] is torch.add
    parameter.__class__ = nn.Parameter
    assert type(parameter) is nn.Parameter
    parameter + 1.0
    assert functions[2:] in ([], [torch.Tensor.__getitem__])


def test_full_functions() -> None:
    parameter: Any = nn.Parameter(torch.ones(3))
    functions = deepspeed.utils
    assert functions.safe_get_full_fp32_param(parameter) is None
    assert functions.safe_get_full_optimizer_state(parameter, "exp_avg") is None
    assert functions.safe_get_full_grad(parameter) is None
    calls: list[Any] = []

    def answer(name: str, *given: Any, **options: Any) -> str:
        calls.append((name, *given, *options.values()))
        return name

    mapping, *methods = (name.rpartition(".")[2] for name in ROWS["full_functions"].names)
    setattr(parameter, mapping, object())
    for name in methods:
        setattr(parameter, name, lambda *given, name=name, **more: answer(name, *given, **more))
    value = torch.zeros(3)
    assert functions.safe_get_full_fp32_param(parameter) == "get_full_hp_param"
    assert functions.safe_get_full_optimizer_state(parameter, "exp_avg") == "get_full_hp_param"
    assert functions.safe_get_full_grad(parameter) == "get_full_hp_grad"
    functions.safe_set_full_fp32_param(parameter, value)
    functions.safe_set_full_optimizer_state(parameter, value, "exp_avg")
    functions.safe_set_full_grad(parameter, value)
    assert [(call[0], call[-1]) for call in calls[1:2]] == [("get_full_hp_param", "exp_avg")]
    assert [call[0] for call in calls[3:]] == [
        "set_full_hp_param",
        "set_full_hp_param",
        "set_full_hp_grad",
    ]
    assert all(any(argument is value for argument in call) for call in calls[3:])


@pytest.mark.usefixtures("fresh_accelerate")
def test_zero_attributes(tmp_path: Path) -> None:
    with one_rank(tmp_path), deepspeed.zero.Init(dtype=torch.bfloat16):
        layer: Any = nn.Linear(2, 3)
    weight = layer.weight
    assert weight.numel() == 0
    assert (weight.ds_numel, weight.ds_shape) == (6, (3, 2))
    assert weight.ds_tensor.numel() >= 6
    assert hasattr(weight, "ds_id")


def test_forward() -> None:
    layer, rows = nn.Linear(2, 2), torch.ones(1, 2)
    results: list[Any] = []
    layer.register_forward_hook(lambda module, given, result: results.append(result))
    vars(layer)["forward"] = lambda given: "of the instance"
    assert layer(rows) == "of the instance"
    del vars(layer)["forward"]
    assert results == ["of the instance"]
    assert torch.equal(layer(rows), nn.Linear.forward(layer, rows))


def test_loss_function() -> None:
    model, ids = llama(), torch.tensor([[1, 2, 3]])
    known = named("transformers.loss.loss_utils.ForCausalLMLoss")
    assert parameters_of(known)[:6] == [
        "logits",
        "labels",
        "vocab_size",
        "num_items_in_batch",
        "ignore_index",
        "shift_labels",
    ]
    assert isinstance(inspect.getattr_static(model, "loss_function"), property)
    assert named("transformers.loss.loss_utils.LOSS_MAPPING")[model.loss_type] is known
    assert model.loss_function is known
    assert "loss_type" in vars(model)
    result = model(ids, labels=ids)
    expected = F.cross_entropy(result.logits[0, :-1].float(), ids[0, 1:])
    torch.testing.assert_close(result.loss, expected)
    calls = []
    name = ROWS["loss_function"].names[0].rpartition(".")[2]
    vars(model)[name] = lambda *given, **options: calls.append((given, options)) or result.loss
    assert model(ids, labels=ids).loss is result.loss
    assert len(calls) == 1
    del vars(model)[name]
    assert model.loss_function is known


def test_parameter_table() -> None:
    layer = nn.Linear(2, 2, bias=False)
    table, weight = modules.parameter_table(layer), layer.weight
    assert table["weight"] is weight
    view: Any = weight.view_as(weight)
    table["weight"] = view
    assert layer.weight is view
    assert layer(torch.eye(2)).grad_fn is not None
    table["weight"] = weight
    assert next(layer.parameters()) is weight
    norm = nn.BatchNorm1d(2)
    buffers: Any = named("torch.nn.Module._buffers")
    assert isinstance(buffers, dict)
    submodules = ROWS["parameter_table"].names[2].rpartition(".")[2]
    assert vars(nn.Sequential(norm))[submodules] == {"0": norm}
    assert norm.running_mean is dict(norm.named_buffers())["running_mean"]


def test_opt_called() -> None:
    def schedule() -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    _, unmarked = schedule()
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step"):
        unmarked.step()
    optimizer, marked = schedule()
    modules.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        marked.step()


# -- autograd --------------------------------------------------------------------------------------
def test_backward_number() -> None:
    numbers = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            numbers.append(autograd.backward_number())
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True) * 1.0
                inner.register_hook(lambda _: numbers.append(autograd.backward_number()))
                inner.backward()
            numbers.append(autograd.backward_number())
            return gradient

    assert autograd.backward_number() == autograd.NO_BACKWARD == -1
    for _ in range(2):
        Nested.apply(torch.ones(1, requires_grad=True)).backward()
    outer, inner, again, following, *_ = numbers
    assert outer == again >= 0
    assert len({outer, inner, following}) == 3

    raising = torch.ones(1, requires_grad=True) * 1.0
    raising.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        raising.backward()
    assert autograd.backward_number() == autograd.NO_BACKWARD


def test_running_node() -> None:
    weight = torch.ones(1, requires_grad=True)
    other = torch.ones(1, requires_grad=True)
    result = weight * other
    executed: list[bool] = []

    def look(_: torch.Tensor) -> None:
        node = autograd.running_node()
        assert node.name() == "MulBackward0"
        leaves = [behind for behind, _ in node.next_functions]
        assert leaves[0].variable is weight
        assert leaves[1].variable is other
        for leaf in leaves:
            try:
                executed.append(autograd.will_execute(leaf))
            except RuntimeError:
                executed.append(False)

    result.register_hook(look)
    torch.autograd.grad(result, weight, retain_graph=True)
    assert executed == [False, False]
    executed.clear()
    result.backward()
    assert executed == [True, True]


def test_end_of_backward() -> None:
    order = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    result = weight * 1.0
    result.register_hook(lambda _: autograd.at_end_of_backward(lambda: order.append("end")))
    result.backward()
    assert order == ["gradient", "end"]
    with pytest.raises(RuntimeError):
        autograd.at_end_of_backward(lambda: None)


def test_saved_tensor_hooks() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    outer, inner = (pack, pack), (pack, lambda packed: packed)
    assert autograd.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(*outer):
        assert autograd.saved_tensor_hooks() == outer
        torch.autograd.graph.saved_tensors_hooks(*inner).__enter__()  # and never its exit
        assert autograd.saved_tensor_hooks() == inner
        autograd.pop_saved_tensor_hooks_above(outer)
        assert autograd.saved_tensor_hooks() == outer
    assert autograd.saved_tensor_hooks() is None


def test_transforms() -> None:
    inside = []

    def function(given: torch.Tensor) -> torch.Tensor:
        inside.append(autograd.is_transformed())
        return given.sin().sum()

    def with_hooks(given: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return function(given)

    assert not autograd.is_transformed()
    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    assert inside == [True, True]
    with pytest.raises(RuntimeError, match="support saved tensor hooks"):
        torch.func.grad(with_hooks)(torch.ones(2))
    assert not autograd.is_transformed()


def test_function_modes() -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            raise AssertionError(func)

    tensor = torch.ones(2).as_subclass(Refusing)
    with autograd.without_torch_function():
        assert tensor.sum() == 2.0


def test_dispatch_mode() -> None:
    seen = []

    class Seen(autograd.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    weight = torch.ones(2, requires_grad=True)
    with Seen():
        F.silu(weight).sum().backward()
    aten = torch.ops.aten
    assert seen[:2] == [aten.silu.default, aten.sum.default]
    assert aten.silu_backward.default in seen


# -- tensors ---------------------------------------------------------------------------------------
def test_trees() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    nested = {"a": [one, (two, None)], "b": 3}
    first, second, *others = tensors.tree_leaves(nested)
    assert first is one
    assert second is two
    assert 3 in others
    flatten, unflatten = (
        named(f"torch.utils._pytree.tree_{name}") for name in ("flatten", "unflatten")
    )
    leaves, spec = flatten(nested)
    assert isinstance(spec, named("torch.utils._pytree.TreeSpec"))
    assert unflatten(leaves, spec) == nested
    doubled = tensors.tree_map_only(torch.Tensor, lambda tensor: tensor + 1, nested)
    assert (doubled["a"][0].item(), doubled["b"]) == (2.0, 3)
    output = gpt2()(torch.tensor([[1, 2]]))
    assert any(leaf is output.logits for leaf in tensors.tree_leaves(output))


def test_version() -> None:
    weight = nn.Parameter(torch.ones(2))
    before = tensors.version_of(weight)
    with torch.no_grad():
        weight.add_(1.0)
        weight[0].mul_(2.0)  # of a view
        weight.view(2).copy_(torch.ones(2))
    assert tensors.version_of(weight) == tensors.version_of(weight.detach()) == before + 3
    with torch.inference_mode():
        tensor = torch.ones(1)
    with pytest.raises(RuntimeError, match="version counter"):
        tensors.version_of(tensor)


def test_aliases() -> None:
    slot = torch.ones(8)
    address = tensors.storage_address(slot.untyped_storage())

    def count() -> int:
        return tensors.num_references(address)

    alone = count()
    views = [slot[2:], slot.detach(), slot.numpy()]
    assert count() == alone + 3
    del views[:]
    assert count() == alone
    weight = nn.Parameter(torch.ones(1))
    weight.data = slot[:1]
    assert count() == alone + 1


def test_own_storage() -> None:
    slot = torch.arange(8.0)
    piece = slot[2:4]
    view = tensors.with_own_storage(piece)
    assert view.data_ptr() == piece.data_ptr()
    assert view.untyped_storage().nbytes() == view.nbytes == 8
    address = tensors.storage_address(view.untyped_storage())
    before = tensors.num_references(address)
    more = slot[:1]
    assert tensors.num_references(address) == before
    view.add_(1.0)
    assert slot.tolist() == [0.0, 1.0, 3.0, 4.0, 4.0, 5.0, 6.0, 7.0]
    del slot, piece, more
    assert view.tolist() == [3.0, 4.0]


def test_one_storage_object() -> None:
    tensor = torch.ones(4, device="meta")
    identity = id(tensor.untyped_storage())
    assert id(tensor[1:].untyped_storage()) == identity == id(tensor.untyped_storage())
    assert id(torch.ones(4, device="meta").untyped_storage()) != identity
    ended: list[int] = []
    reference = weakref.ref(tensor.untyped_storage(), lambda _: ended.append(1))
    assert reference() is not None
    view = tensor[1:]
    del tensor
    assert ended == []
    del view
    assert ended == [1]


def test_sparse_parts() -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,))
    with pytest.raises(RuntimeError, match="uncoalesced"):
        twice.indices()
    indices, values = tensors.sparse_parts(twice)
    assert (indices.tolist(), values.tolist()) == ([[1, 1]], [2.0, 3.0])


def test_schema() -> None:
    add = torch.ops.aten.add_.Tensor._schema.arguments
    assert [argument.name for argument in add] == ["self", "other", "alpha"]
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in add]
    assert writes == [True, False, False]
    view = torch.ops.aten.view.default._schema.arguments[0]
    assert not view.alias_info.is_write


def test_attention_kernels() -> None:
    seen_by_modes, *operators = map(named, ROWS["attention_kernels"].names)
    assert F.scaled_dot_product_attention is seen_by_modes
    forwards = [
        operator
        for operator in operators
        if "attention" in str(operator) and "backward" not in str(operator)
    ]
    assert len(forwards) == 5
    for operator in forwards:
        names = [argument.name for argument in operator.default._schema.arguments]
        assert names[:3] == ["query", "key", "value"]
        assert "is_causal" in names
    heads = torch.ones(1, 2, 3, 4, device="meta", dtype=torch.bfloat16)
    flash, efficient = forwards[:2]
    assert flash(heads, heads, heads, 0.0, True, False)[0].shape == heads.shape
    assert efficient(heads, heads, heads, None, True)[0].shape == heads.shape


def test_tensor_subclasses() -> None:
    function, make, to_copy = map(named, ROWS["tensor_subclasses"].names)
    seen = []

    class Empty(torch.Tensor):
        __torch_function__ = function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return torch.full((2, 3), 7.0)

    empty = make(Empty, (2, 3), dtype=torch.float32, device=torch.device("cpu"))
    assert type(empty) is Empty
    assert empty.shape == (2, 3)
    result = empty * 2
    assert type(result) is torch.Tensor
    assert result[0, 0] == 7.0
    empty.to(torch.bfloat16)
    assert seen[-1] is to_copy.default


@pytest.mark.gpu
def test_raw_stream() -> None:
    address = named(ROWS["raw_stream"].names[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert address(torch.cuda.current_device()) == stream.cuda_stream
    assert address(torch.cuda.current_device()) == torch.cuda.current_stream().cuda_stream


# -- modules and parameters ------------------------------------------------------------------------
def test_compiled() -> None:
    layer = nn.Linear(2, 2)
    assert not modules.is_compiled(layer)
    assert modules.is_compiled(torch.compile(layer))
    assert not modules.is_call_compiled(layer)
    layer.compile()
    assert modules.is_call_compiled(layer)
    assert modules.is_compiled(layer)


def test_transient_buffers() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("transient", torch.ones(1), persistent=False)
    assert modules.transient_buffers(module) == {"transient"}
    assert set(module.state_dict()) == {"kept"}


def test_state_dict_hooks() -> None:
    layer = nn.Linear(2, 2)
    calls = []

    def before(*_: Any) -> None:
        calls.append("before")

    def after(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        assert module is layer
        calls.append([prefix, *state])
        state["a." + "weight"] = torch.ones(1)

    layer.register_state_dict_pre_hook(before)
    handle = modules.register_state_dict_hook(layer, after)
    assert list(modules.hooks_before_state_dict(layer)) == [before]
    assert layer.state_dict(prefix="a.")["a.weight"].shape == (1,)
    assert calls == ["before", ["a.", "a.weight", "a.bias"]]
    handle.remove()
    assert layer.state_dict()["weight"].shape == (2, 2)


def test_gradient_hooks() -> None:
    weight, order = nn.Parameter(torch.ones(1)), []
    assert not modules.hooks_on_gradient(weight)
    assert modules.hooks_after_gradient(weight) == {}
    one, two = (
        weight.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
        for number in (1, 2)
    )
    hooks = modules.hooks_after_gradient(weight)
    assert list(hooks) == [one.id, two.id]
    hooks[one.id] = hooks.pop(one.id)
    weight.sum().backward()
    assert order == [2, 1]
    one.remove()
    assert list(modules.hooks_after_gradient(weight)) == [two.id]
    handle = weight.register_hook(lambda gradient: gradient)
    assert len(modules.hooks_on_gradient(weight) or ()) == 1
    handle.remove()
    assert not modules.hooks_on_gradient(weight)


def test_module_backward_hooks() -> None:
    instance, before, everywhere, before_everywhere = (
        name.rpartition(".")[2] for name in ROWS["module_backward_hooks"].names
    )
    layer, every = nn.Linear(1, 1), nn.modules.module
    for owner, name, register in (
        (layer, instance, layer.register_full_backward_hook),
        (layer, before, layer.register_full_backward_pre_hook),
        (every, everywhere, every.register_module_full_backward_hook),
        (every, before_everywhere, every.register_module_full_backward_pre_hook),
    ):
        assert not vars(owner)[name]
        handle = register(lambda *_: None)
        assert len(vars(owner)[name]) == 1
        handle.remove()
        assert not vars(owner)[name]


def test_forward_hooks() -> None:
    after, before, with_kwargs, every_after, every_before = (
        name.rpartition(".")[2] for name in ROWS["forward_hooks"].names
    )
    layer, every = nn.Linear(1, 1), nn.modules.module
    for owner, name, register in (
        (layer, after, layer.register_forward_hook),
        (layer, before, layer.register_forward_pre_hook),
        (every, every_after, every.register_module_forward_hook),
        (every, every_before, every.register_module_forward_pre_hook),
    ):
        handle = register(lambda *_: None)
        assert list(vars(owner)[name]) == [handle.id]
        handle.remove()
        assert not vars(owner)[name]
    handle = layer.register_forward_hook(lambda *_: None, with_kwargs=True)
    assert list(vars(layer)[with_kwargs]) == [handle.id]


def test_default_store(tmp_path: Path) -> None:
    was_there = torch.distributed.is_initialized()
    if not was_there:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
    try:
        first, second = (shared_store(f"{tmp_path} {number}") for number in range(2))
        assert not first.check(["key"])
        assert first.compare_set("key", "", "one") == b"one"
        assert first.compare_set("key", "", "two") == b"one"
        assert not second.check(["key"])
    finally:
        if not was_there:
            torch.distributed.destroy_process_group()


# -- NumPy -----------------------------------------------------------------------------------------
def test_numpy_pickles() -> None:
    (name,) = ROWS["numpy_pickles"].names
    words = pickle.dumps(np.ones(3, np.uint32), protocol=2)
    assert name.rpartition(".")[0].encode() in words
    assert np.ones(1).__reduce__()[0] is named(name)


# -- Transformers ----------------------------------------------------------------------------------
def test_from_config() -> None:
    build = modules.build_from_config(GPT2LMHeadModel)
    model: Any = build(gpt2().config, dtype=torch.bfloat16)
    assert type(model) is GPT2LMHeadModel
    assert model.dtype is torch.bfloat16


def test_known_classes() -> None:
    def names(kind: type) -> set[str]:
        return {
            base.__name__
            for base in kind.__mro__
            if base.__module__.partition(".")[0] == "transformers"
        }

    model, ids = gpt2(), torch.tensor([[1, 2]])
    assert {"PreTrainedModel"} <= names(LlamaForCausalLM) & names(type(model))
    cache = DynamicCache()
    assert "Cache" in names(type(cache))
    assert cache.get_seq_length() == 0
    model(ids, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 2
    assert "CacheLayerMixin" in names(type(cache.layers[0]))
    assert "use_cache" in parameters_of(model.forward)
    assert model(ids, use_cache=False).past_key_values is None
