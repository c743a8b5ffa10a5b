"""Laws of the partition: every parameter in exactly one layer, blocks found by name, by family and
by structure."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import HIDDEN, HUGGING_FACE, MODELS, PLAIN, VOCAB, Block, Decoder, loss_of
from torch import Tensor, nn

from stronghold.errors import ConfigError, StateError
from stronghold.model import families
from stronghold.model.partition import Layer, Partition, _check_exactly_once, _names, partition

AROUND = ["", "embedding", "norm", "head"]
MEGATRON = [
    "language_model.embedding.word_embeddings",
    "language_model.embedding.position_embeddings",
    "language_model.encoder.final_layernorm",
]
BERT_EMBEDDINGS = [
    f"bert.embeddings.{name}"
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
]
T5_STACKS = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def numbered(path: str, count: int) -> list[str]:
    return [f"{path}.{index}" for index in range(count)]


# name -> (streamed layers, resident layers), each in order
LLAMA = (numbered("model.layers", 3), ["model.embed_tokens", "model.norm", "lm_head"])
LLAMA_TIED = (LLAMA[0], ["model.embed_tokens", "model.norm"])
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "gpt": (numbered("blocks", 3), AROUND),
    "gpt_tied": (numbered("blocks", 3), ["", "embedding", "norm"]),
    "gpt_dropout": (numbered("blocks", 3), AROUND),
    "gpt_checkpointed": (numbered("blocks", 3), AROUND),
    "weird_model": (numbered("blocks", 4), AROUND),
    "frozen": (numbered("blocks", 4), AROUND),
    "frozen_prefix": (numbered("blocks", 4), AROUND),
    "adapters": (numbered("blocks", 3), AROUND),
    "unused": (numbered("blocks", 4), [*AROUND, "spare"]),
    "tied_blocks": (
        numbered("blocks", 4),
        ["", "embedding", "blocks.0.norm1", "blocks.0.mlp.up", "norm", "head"],
    ),
    "uneven": (numbered("blocks", 4), AROUND),
    "sequential": (["net.0", "net.2", "net.3", "net.5"], []),
    "called_twice": (numbered("blocks", 3), AROUND),
    "shared_list": (numbered("blocks", 2), AROUND),
    "structured": (numbered("blocks", 3), AROUND),
    "layer_drop": (numbered("blocks", 4), AROUND),
    "skip_inside": (numbered("blocks", 4), AROUND),
    "experts": (numbered("blocks", 3), AROUND),
    "buffers": (numbered("blocks", 3), AROUND),
    "megatron_gpt": (numbered("language_model.encoder.layers", 3), MEGATRON),
    "megatron_bert": (
        numbered("language_model.encoder.layers", 3),
        [*MEGATRON, "lm_head", "lm_head.dense", "binary_head"],
    ),
    "torch_transformer": (
        numbered("transformer.encoder.layers", 2) + numbered("transformer.decoder.layers", 2),
        ["embedding", "transformer.encoder.norm", "transformer.decoder.norm", "head"],
    ),
    "llama": LLAMA,
    "qwen2": LLAMA_TIED,
    "qwen3": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "gemma2": LLAMA_TIED,
    "phi3": LLAMA,
    "gpt2": (
        numbered("transformer.h", 3),
        ["transformer.wte", "transformer.wpe", "transformer.ln_f"],
    ),
    "bert": (
        numbered("bert.encoder.layer", 3),
        [
            *BERT_EMBEDDINGS,
            "cls.predictions",
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
        ],
    ),
    "t5": (T5_STACKS, ["shared", "encoder.final_layer_norm", "decoder.final_layer_norm"]),
}


def build(name: str, **options: Any) -> nn.Module:
    return MODELS[name](**options)[0]


def streamed(found: Partition) -> list[str]:
    return [layer.name for layer in found.streamed]


def resident(found: Partition) -> list[str]:
    return [layer.name for layer in found.layers if not layer.streamed]


def layer_of(found: Partition, parameter: nn.Parameter) -> Layer:
    (layer,) = [x for x in found.layers if any(n.parameter is parameter for n in x.parameters)]
    return layer


def without_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "MODEL_TYPES", {})
    monkeypatch.setattr(families, "CLASS_NAMES", {})


class Holder(nn.Module):
    """Any modules as attributes, with a forward that nobody calls."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("partition must not run the model")


def pair() -> list[nn.Module]:
    return [Block(), Block()]


# --- the zoo -------------------------------------------------------------------------------------


def test_the_zoo_is_covered() -> None:
    assert set(EXPECTED) == set(MODELS) == {*PLAIN, *HUGGING_FACE}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_zoo_model_has_exactly_these_layers(name: str) -> None:
    found = partition(build(name))
    assert (streamed(found), resident(found)) == EXPECTED[name]


@pytest.mark.parametrize("name", list(EXPECTED))
def test_structure_alone_finds_the_same_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    without_table(monkeypatch)
    found = partition(model)
    assert (streamed(found), resident(found)) == EXPECTED[name]


@pytest.mark.parametrize("name", list(EXPECTED))
def test_every_parameter_is_in_exactly_one_layer_under_all_its_names(name: str) -> None:
    model = build(name)
    found = partition(model)
    placed = [named for layer in found.layers for named in layer.parameters]
    assert {id(named.parameter) for named in placed} == {id(p) for p in model.parameters()}
    assert len(placed) == len(list(model.parameters()))
    names = [alias for named in placed for alias in named.aliases]
    assert sorted(names) == sorted(k for k, _ in model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for named in placed:
        assert named.name == named.aliases[0] == first[id(named.parameter)]


@pytest.mark.parametrize("name", list(EXPECTED))
def test_layers_stand_in_registration_order_and_hold_trainable_parameters_first(name: str) -> None:
    model = build(name)
    found = partition(model)
    assert [layer.index for layer in found.layers] == list(range(len(found.layers)))
    modules = [name for name, _ in model.named_modules()]
    positions = [modules.index(layer.name) for layer in found.layers]
    assert positions == sorted(positions)
    order = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    for layer in found.layers:
        keys = [(not n.parameter.requires_grad, order[id(n.parameter)]) for n in layer.parameters]
        assert keys == sorted(keys)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_streamed_layer_is_used_by_its_block_alone(name: str) -> None:
    model = build(name)
    modules = dict(model.named_modules())
    for layer in partition(model).streamed:
        assert layer.modules == (modules[layer.name],)
        inside = set(layer.modules[0].modules())
        for named in layer.parameters:
            holders = [
                m for m in modules.values() if named.parameter in set(m._parameters.values())
            ]
            assert inside.issuperset(holders)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_resident_layer_names_every_holder_of_its_parameters(name: str) -> None:
    model = build(name)
    for layer in partition(model).layers:
        if not layer.streamed:
            mine = {named.parameter for named in layer.parameters}
            holders = [m for m in model.modules() if not mine.isdisjoint(m._parameters.values())]
            assert set(layer.modules) == set(holders)
            assert len(layer.modules) == len(holders)


@pytest.mark.parametrize("name", PLAIN)
def test_the_partition_changes_nothing_in_the_model(name: str) -> None:
    model = build(name)
    before = [(m, dict(vars(m)), dict(m._parameters), dict(m._modules)) for m in model.modules()]
    partition(model)
    for module, attributes, parameters, children in before:
        assert vars(module).keys() == attributes.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        for name, parameter in parameters.items():
            assert module._parameters[name] is parameter
        assert dict(module._modules) == children


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_zoo_model_s_loss_depends_on_its_seeds_alone(name: str) -> None:
    losses = []
    for _ in range(2):
        model, make_batch = MODELS[name]()
        torch.manual_seed(7)
        loss = loss_of(model(**make_batch(3)))
        loss.backward()
        losses.append(loss.detach())
    assert losses[0].ndim == 0
    assert torch.isfinite(losses[0])
    assert torch.equal(*losses)


# --- what stays resident -------------------------------------------------------------------------


def test_tied_weights_belong_to_the_first_holder_and_name_all_of_them() -> None:
    model = build("gpt_tied")
    layer = layer_of(partition(model), model.head.weight)
    assert (layer.name, layer.streamed) == ("embedding", False)
    assert layer.modules == (model.embedding, model.head)
    assert layer.parameters[0].aliases == ("embedding.weight", "head.weight")


def test_a_weight_that_two_blocks_share_leaves_both() -> None:
    model = build("tied_blocks")
    found = partition(model)
    layer = layer_of(found, model.blocks[0].mlp.up.weight)
    assert not layer.streamed
    assert layer.modules == (model.blocks[0].mlp.up, model.blocks[2].mlp.up)
    # The rest of the holder stays in its block: only the shared matrix is needed outside it.
    assert layer_of(found, model.blocks[0].mlp.up.bias).name == "blocks.0"


def test_a_module_that_two_blocks_share_leaves_both() -> None:
    model = build("tied_blocks")
    layer = layer_of(partition(model), model.blocks[3].norm1.weight)
    assert (layer.name, layer.streamed) == ("blocks.0.norm1", False)
    assert layer.modules == (model.blocks[0].norm1,)
    assert len(layer.parameters[0].aliases) == 2


def test_a_weight_tied_inside_one_block_stays_in_it() -> None:
    model = build("tied_blocks")
    layer = layer_of(partition(model), model.blocks[1].again.weight)
    assert (layer.name, layer.streamed) == ("blocks.1", True)
    (named,) = [n for n in layer.parameters if n.parameter is model.blocks[1].again.weight]
    assert named.aliases == ("blocks.1.mlp.down.weight", "blocks.1.again.weight")


def test_a_submodule_that_is_also_used_outside_the_blocks_is_resident() -> None:
    model = Decoder(pair())
    model.norm = model.blocks[1].norm2
    found = partition(model)
    assert "blocks.1.norm2" in resident(found)
    assert layer_of(found, model.norm.weight).modules == (model.norm,)


def test_a_shared_parameter_that_a_block_holds_directly_is_a_layer_beside_the_block() -> None:
    model = build("weird_model", num_layers=2)
    model.blocks[1].gain = model.blocks[0].gain
    found = partition(model)
    assert [(x.name, x.streamed) for x in found.layers if x.name.startswith("blocks")] == [
        ("blocks.0", False),
        ("blocks.0", True),
        ("blocks.1", True),
    ]
    assert layer_of(found, model.blocks[0].gain).modules == tuple(model.blocks)


def test_a_block_that_stands_twice_in_the_list_is_one_layer() -> None:
    model = build("shared_list")
    found = partition(model)
    assert streamed(found) == ["blocks.0", "blocks.1"]
    assert len(found.streamed[0].parameters[0].aliases) == 2
    assert len(found.streamed[1].parameters[0].aliases) == 3


def test_a_block_whose_every_parameter_is_shared_is_no_layer() -> None:
    twins = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    twins[1].weight, twins[1].bias = twins[0].weight, twins[0].bias
    found = partition(nn.Sequential(*twins))
    assert (streamed(found), resident(found)) == (["2"], ["0"])


def test_frozen_parameters_stay_in_their_layer_after_the_trainable_ones() -> None:
    model = build("frozen")
    layer = layer_of(partition(model), model.blocks[2].norm1.weight)
    assert layer.name == "blocks.2"
    assert [n.name for n in layer.parameters if not n.parameter.requires_grad] == [
        "blocks.2.norm1.weight",
        "blocks.2.mlp.up.weight",
    ]
    assert layer.parameters[-1].name == "blocks.2.mlp.up.weight"


def test_blocks_without_parameters_are_no_layers() -> None:
    found = partition(nn.Sequential(Block(), nn.ReLU(), nn.Identity(), Block(), nn.Dropout()))
    assert streamed(found) == ["0", "3"]


# --- blocks by name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("blocks", ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks"], ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.1", ["blocks.1"]),
        (["blocks.2", "blocks.0"], ["blocks.0", "blocks.2"]),
        (["blocks.0", "blocks"], ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks", "head"], ["blocks.0", "blocks.1", "blocks.2", "head"]),
        ("*.*.mlp", ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
        ("mlp", ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
    ],
)
def test_named_paths_choose_the_blocks(layers: str | list[str], expected: list[str]) -> None:
    assert streamed(partition(build("gpt"), layers)) == expected


def test_a_name_overrides_the_table() -> None:
    found = partition(build("t5"), "decoder.block")
    assert streamed(found) == ["decoder.block.0", "decoder.block.1"]
    assert "encoder.block.0.layer.0.SelfAttention.q" in resident(found)


def test_a_path_that_ends_in_a_number_names_a_block_even_if_it_is_a_list() -> None:
    model = Holder(features=nn.Sequential(nn.Sequential(*pair()), nn.Sequential(*pair())))
    assert streamed(partition(model, ["features.0", "features.1"])) == ["features.0", "features.1"]
    assert streamed(partition(model, "features")) == ["features.0", "features.1"]


def test_one_block_is_enough_when_it_is_named() -> None:
    assert streamed(partition(build("gpt", num_layers=1), "blocks")) == ["blocks.0"]


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("block", 'Did you mean "blocks"?'),
        ("transformer.layers", 'Lists of modules in it: "blocks".'),
        ("blocks.3", 'Did you mean "blocks'),
        ("", "expected the dotted path"),
    ],
)
def test_an_unknown_path_is_refused_with_a_suggestion(path: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=r"^stronghold\.layers: got ") as caught:
        partition(build("gpt"), ["blocks.0", path])
    assert f'"{path}"' in str(caught.value)
    assert suggestion in str(caught.value)


def test_a_path_of_a_wrapped_model_names_the_outermost_modules_that_end_in_it() -> None:
    inner = Holder(layers=nn.ModuleList(pair()))
    model = Holder(module=Holder(layers=nn.ModuleList([inner, *pair()])))
    assert streamed(partition(model, "layers")) == numbered("module.layers", 3)


def test_a_path_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'stronghold\.layers: "dropout" holds no module'):
        partition(Holder(dropout=nn.Dropout(), blocks=nn.ModuleList(pair())), "dropout")


def test_an_empty_list_of_paths_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stronghold\.layers: an empty list"):
        partition(build("gpt"), [])


def test_nested_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'"blocks\.1\.mlp" lies inside "blocks\.1"'):
        partition(build("gpt"), ["blocks", "blocks.1.mlp"])


# --- blocks by family ----------------------------------------------------------------------------


def wrap_peft(model: nn.Module) -> nn.Module:
    return Holder(base_model=Holder(model=model))


WRAPPERS: list[tuple[str, Callable[[nn.Module], nn.Module]]] = [
    ("base_model.model.", wrap_peft),
    ("module.", lambda model: Holder(module=model)),
    ("policy.", lambda model: Holder(policy=model, value=nn.Linear(3, 1))),
]


@pytest.mark.parametrize(("prefix", "wrap"), WRAPPERS)
@pytest.mark.parametrize("name", ["gpt2", "t5", "megatron_gpt", "gpt"])
def test_a_wrapped_model_has_the_same_blocks(
    name: str, prefix: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = build(name)
    expected = [prefix + layer for layer in EXPECTED[name][0]]
    assert streamed(partition(wrap(model))) == expected
    # A path of the bare model still names the blocks of the wrapped one.
    path = EXPECTED[name][0][0].rpartition(".")[0]
    assert set(streamed(partition(wrap(model), path))) <= set(expected)


def test_a_known_family_may_have_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", num_hidden_layers=1)
    assert streamed(partition(model)) == ["model.layers.0"]
    without_table(monkeypatch)
    with pytest.raises(ConfigError, match="no repeated blocks"):
        partition(model)


def test_a_wrapped_family_is_known_by_its_own_config() -> None:
    model = wrap_peft(build("llama", num_hidden_layers=1))
    assert streamed(partition(model)) == ["base_model.model.model.layers.0"]


def test_megatron_core_s_layout_is_known_although_its_model_type_is_no_name() -> None:
    class GPTModel(Holder):
        config = SimpleNamespace(model_type=1)

    decoder = Holder(layers=nn.ModuleList([Block()]), final_layernorm=nn.LayerNorm(HIDDEN))
    model = GPTModel(embedding=nn.Embedding(VOCAB, HIDDEN), decoder=decoder)
    assert streamed(partition(model)) == ["decoder.layers.0"]
    assert streamed(partition(Holder(module=model))) == ["module.decoder.layers.0"]


def test_a_class_name_whose_paths_are_absent_falls_back_to_structure() -> None:
    class GPTModel(Holder):
        pass

    assert streamed(partition(GPTModel(trunk=nn.ModuleList(pair())))) == ["trunk.0", "trunk.1"]


def test_a_config_without_a_model_type_is_no_family() -> None:
    model = build("gpt")
    model.config = {"hidden_size": 16}
    assert streamed(partition(model)) == EXPECTED["gpt"][0]


ON_META = {
    "albert": ["encoder.albert_layer_groups.0"],
    "bart": numbered("encoder.layers", 12) + numbered("decoder.layers", 12),
    "bloom": numbered("h", 2),
    "distilbert": numbered("transformer.layer", 6),
    "falcon": numbered("h", 32),
    "gemma": numbered("layers", 28),
    "gpt_neox": numbered("layers", 44),
    "mt5": numbered("encoder.block", 8) + numbered("decoder.block", 8),
    "opt": numbered("decoder.layers", 12),
    "qwen3_moe": numbered("layers", 24),
    "roberta": numbered("encoder.layer", 12),
    "vit": numbered("layers", 12),
}


@pytest.mark.parametrize("model_type", list(ON_META))
def test_a_family_of_real_size_is_known_on_the_meta_device(model_type: str) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type))
    assert streamed(partition(model)) == ON_META[model_type]


# --- blocks by structure -------------------------------------------------------------------------


def test_a_list_of_experts_inside_a_block_is_not_taken() -> None:
    model = build("experts")
    for layer in partition(model).streamed:
        assert sum("experts" in named.name for named in layer.parameters) == 4 * 7


def test_a_list_of_blocks_in_a_block_that_does_not_repeat_is_found() -> None:
    model = Holder(body=Holder(inner=Holder(layers=nn.ModuleDict({"a": Block(), "b": Block()}))))
    assert streamed(partition(model)) == ["body.inner.layers.a", "body.inner.layers.b"]


def test_numbered_attributes_are_blocks() -> None:
    model = Holder(stem=nn.Linear(3, 3), block1=Block(), block2=Block(), head=nn.Linear(3, 3))
    assert streamed(partition(model)) == ["block1", "block2"]


def test_lists_without_a_forward_are_looked_through() -> None:
    rows = [nn.ModuleList(pair()) for _ in range(2)]
    found = partition(Holder(layers=nn.ModuleList(rows)))
    assert streamed(found) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_a_sequential_gives_its_repeated_blocks_and_keeps_its_ends() -> None:
    ends = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
    found = partition(nn.Sequential(ends[0], *pair(), nn.LayerNorm(HIDDEN), ends[1]))
    assert (streamed(found), resident(found)) == (["1", "2"], ["0", "3", "4"])


def test_unlike_lists_in_a_list_are_searched_for_their_own_blocks() -> None:
    first = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN))
    last = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB))
    found = partition(nn.Sequential(first, nn.Sequential(*pair()), last))
    assert streamed(found) == ["1.0", "1.1"]


def test_blocks_of_the_same_shapes_are_alike_whatever_their_class() -> None:
    class Early(Block):
        pass

    class Late(Block):
        pass

    # The body outweighs the list, so that being most of the model is not what finds it.
    model = Holder(body=nn.Linear(200, 200), blocks=nn.ModuleList([Early(), Late()]))
    assert streamed(partition(model)) == ["blocks.0", "blocks.1"]


def test_numbered_lists_are_searched_for_their_own_blocks() -> None:
    model = Holder(layer1=nn.Sequential(*pair()), layer2=nn.Sequential(*pair()))
    assert streamed(partition(model)) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]


def test_a_list_may_mix_kinds_of_blocks() -> None:
    class Other(Block):
        pass

    kinds = [Block(), Other(inner=8), Block(), Block()]
    assert streamed(partition(Holder(blocks=nn.ModuleList(kinds)))) == numbered("blocks", 4)


def test_small_lists_beside_the_stack_stay_resident() -> None:
    heads = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))
    norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
    found = partition(Holder(blocks=nn.ModuleList(pair()), heads=heads, norms=norms))
    assert streamed(found) == ["blocks.0", "blocks.1"]


def test_large_blocks_are_streamed_however_small_their_share() -> None:
    with torch.device("meta"):
        tower = nn.ModuleList(Block(2**8, 2**10) for _ in range(2))
        small = nn.ModuleList(Block(2**6, 2**8) for _ in range(2))
        tower_of_size = nn.ModuleList(Block(2**9, 2**11) for _ in range(2))
        model = Holder(
            text=nn.ModuleList(Block(2**13, 2**15) for _ in range(2)),
            tower=tower_of_size,
            small=small,
            middle=tower,
        )
    assert streamed(partition(model)) == ["text.0", "text.1", "tower.0", "tower.1"]


def test_a_list_of_plain_layers_counts_when_it_is_most_of_the_model() -> None:
    stack = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    assert streamed(partition(Holder(stack=stack))) == numbered("stack", 3)
    with pytest.raises(ConfigError, match="no repeated blocks"):
        partition(Holder(stack=stack, body=nn.Linear(100, 100)))


@pytest.mark.parametrize(
    "model",
    [
        Block(),
        nn.Linear(3, 3),
        Holder(
            body=nn.Linear(8, 8), tables=nn.ModuleList([nn.Embedding(9, 9), nn.Embedding(9, 9)])
        ),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
        nn.ReLU(),
    ],
    ids=["one block", "one layer", "two tables", "one in a list", "no parameters"],
)
def test_a_model_without_repeated_blocks_is_refused_with_an_example(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"^stronghold\.layers: no repeated blocks") as caught:
        partition(model)
    assert type(model).__name__ in str(caught.value)
    assert '"stronghold": {"layers": "model.layers"}' in str(caught.value)


# --- what cannot be moved ------------------------------------------------------------------------


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"1\.weight" has no shape yet.*run one forward'):
        partition(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))


def test_a_parameter_that_is_not_floating_point_is_refused() -> None:
    model = Decoder(pair())
    model.blocks[0].codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match=r'"blocks\.0\.codes" is torch\.uint8.*register_buffer'):
        partition(model)


def test_parameters_tied_by_memory_alone_are_refused_unless_frozen() -> None:
    model = Decoder(pair())
    model.head.weight.data = model.embedding.weight.data
    with pytest.raises(ConfigError, match=r'"embedding\.weight" and "head\.weight".*same memory'):
        partition(model)
    model.embedding.requires_grad_(False)
    model.head.requires_grad_(False)
    assert len(partition(model).layers) == 6


def test_views_of_one_buffer_that_do_not_overlap_are_fine() -> None:
    model = Decoder(pair())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    assert streamed(partition(model)) == ["blocks.0", "blocks.1"]


def test_a_parameter_in_no_layer_or_in_two_is_noticed() -> None:
    model = build("gpt")
    layers = list(partition(model).layers)
    for broken in (layers[1:], [*layers, layers[2]]):
        with pytest.raises(StateError, match="expected exactly one"):
            _check_exactly_once(_names(model), broken)
