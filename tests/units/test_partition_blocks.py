"""Laws of the partition: blocks are found by name and by structure."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.partition import partition, why_no_blocks
from tests.models import HIDDEN, VOCAB, Block
from tests.support.partitions import EXPECTED, Holder, build, numbered, pair, resident, streamed

# --- blocks by name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("blocks", ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks"], ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.1", ["blocks.1"]),
        (["blocks.2", "blocks.0"], ["blocks.0", "blocks.2"]),
        (["blocks.0", "blocks"], ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks", "head"], ["blocks.0", "blocks.1", "blocks.2", "head"]),
        ("mlp", ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
    ],
)
def test_named_paths_choose_the_blocks(layers: str | list[str], expected: list[str]) -> None:
    assert streamed(partition(build("gpt"), layers)) == expected


def test_a_name_overrides_the_search() -> None:
    found = partition(build("t5"), "decoder.block")
    assert streamed(found) == ["decoder.block.0", "decoder.block.1"]
    assert "encoder.block.0.layer.0.SelfAttention.q" in resident(found)


def test_a_path_that_ends_in_a_number_names_a_block_even_if_it_is_a_list() -> None:
    model = Holder(features=nn.Sequential(nn.Sequential(*pair()), nn.Sequential(*pair())))
    assert streamed(partition(model, ["features.0", "features.1"])) == ["features.0", "features.1"]
    assert streamed(partition(model, "features")) == ["features.0", "features.1"]


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


# --- blocks by structure -------------------------------------------------------------------------


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


def test_one_block_is_streamed_by_its_name_alone() -> None:
    model = build("llama", num_hidden_layers=1)
    assert streamed(partition(model)) == []
    assert streamed(partition(model, "model.layers")) == ["model.layers.0"]


ON_META = {
    "albert": [],  # one group, which is called twelve times
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
def test_a_family_of_real_size_is_partitioned_on_the_meta_device(model_type: str) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type))
    assert streamed(partition(model)) == ON_META[model_type]


def test_a_list_of_experts_inside_a_block_is_not_taken() -> None:
    model = build("experts")
    for layer in partition(model).streamed:
        assert sum("experts" in named.name for named in layer.parameters) == 4 * 7


def ends() -> tuple[nn.Module, nn.Module]:
    return nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)


def in_three_lists() -> nn.Module:
    embedding, head = ends()
    first = nn.Sequential(embedding, nn.LayerNorm(HIDDEN))
    return nn.Sequential(first, nn.Sequential(*pair()), nn.Sequential(nn.LayerNorm(HIDDEN), head))


STRUCTURES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "in a block that does not repeat": (
        lambda: Holder(body=Holder(layers=nn.ModuleDict({"a": Block(), "b": Block()}))),
        ["body.layers.a", "body.layers.b"],
    ),
    "numbered attributes": (
        lambda: Holder(stem=nn.Linear(3, 3), block1=Block(), block2=Block(), head=nn.Linear(3, 3)),
        ["block1", "block2"],
    ),
    "lists without a forward": (
        lambda: Holder(layers=nn.ModuleList(nn.ModuleList(pair()) for _ in range(2))),
        ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"],
    ),
    "a sequential with other ends": (
        lambda: nn.Sequential(ends()[0], *pair(), nn.LayerNorm(HIDDEN), ends()[1]),
        ["1", "2"],
    ),
    "unlike lists in a list": (in_three_lists, ["1.0", "1.1"]),
    "numbered lists": (
        lambda: Holder(layer1=nn.Sequential(*pair()), layer2=nn.Sequential(*pair())),
        ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    ),
    "blocks of several widths": (
        lambda: Holder(blocks=nn.ModuleList([Block(), Block(inner=8), Block(), Block()])),
        numbered("blocks", 4),
    ),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_repeated_blocks_are_found_by_structure(case: str) -> None:
    make, expected = STRUCTURES[case]
    assert streamed(partition(make())) == expected


def test_small_lists_beside_the_stack_stay_resident() -> None:
    heads = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))
    norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
    found = partition(Holder(blocks=nn.ModuleList(pair()), heads=heads, norms=norms))
    assert streamed(found) == ["blocks.0", "blocks.1"]


def test_blocks_that_two_lists_hold_are_streamed_once() -> None:
    blocks = pair()
    model = Holder(
        encoder=Holder(layers=nn.ModuleList(blocks)), decoder=Holder(layers=nn.ModuleList(blocks))
    )
    assert streamed(partition(model)) == numbered("encoder.layers", 2)


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
    assert streamed(partition(Holder(stack=stack, body=nn.Linear(100, 100)))) == []


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
def test_a_model_without_repeated_blocks_streams_nothing(model: nn.Module) -> None:
    found = partition(model)
    assert streamed(found) == []
    placed = {named.parameter for layer in found.layers for named in layer.parameters}
    assert placed == set(model.parameters())
    said = why_no_blocks(model)
    assert said.startswith(f"no repeated blocks found in {type(model).__name__}.")
    assert '"stronghold": {"layers": "model.layers"}' in said
