"""Laws of the partition: every parameter in exactly one layer, whatever is shared or frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.partition import partition
from tests.models import HUGGING_FACE, MODELS, PLAIN, TOYS, Decoder
from tests.support.partitions import EXPECTED, build, layer_of, pair, resident, streamed

# --- the zoo -------------------------------------------------------------------------------------


def test_the_zoo_is_covered() -> None:
    assert set(EXPECTED) == set(MODELS) == {*PLAIN, *HUGGING_FACE, *TOYS}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_zoo_model_has_exactly_these_layers(name: str) -> None:
    found = partition(build(name))
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
def test_layers_are_in_order_and_are_used_where_they_say(name: str) -> None:
    """In the order of registration, trainable parameters first; a streamed layer by its block
    alone, any other by every holder of its parameters."""
    model = build(name)
    found = partition(model)
    modules = dict(model.named_modules())
    assert [layer.index for layer in found.layers] == list(range(len(found.layers)))
    positions = [list(modules).index(layer.name) for layer in found.layers]
    assert positions == sorted(positions)
    order = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    for layer in found.layers:
        keys = [(not n.parameter.requires_grad, order[id(n.parameter)]) for n in layer.parameters]
        assert keys == sorted(keys)
        mine = {named.parameter for named in layer.parameters}
        holders = {m for m in modules.values() if not mine.isdisjoint(m.parameters(recurse=False))}
        if layer.streamed:
            assert layer.modules == (modules[layer.name],)
            assert holders <= set(layer.modules[0].modules())
        else:
            assert set(layer.modules) == holders
            assert len(layer.modules) == len(holders)


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


def test_a_block_whose_every_parameter_is_shared_is_no_layer() -> None:
    twins = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    twins[1].weight, twins[1].bias = twins[0].weight, twins[0].bias
    found = partition(nn.Sequential(*twins))
    assert (streamed(found), resident(found)) == (["2"], ["0"])


# --- what cannot be moved ------------------------------------------------------------------------


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"1\.weight" has no shape yet.*run one forward'):
        partition(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))


def test_a_frozen_parameter_of_integers_moves_with_its_block() -> None:
    model = Decoder(pair())
    model.blocks[0].codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    names = [named.name for named in partition(model).streamed[0].parameters]
    assert names[-1] == "blocks.0.codes"


def test_a_parameter_of_a_tensor_subclass_is_refused() -> None:
    """Its memory is not where the engine would look for it, and it names no inner tensors."""
    model = Decoder(pair())
    quantised = torch.zeros(3).as_subclass(type("Int8Tensor", (torch.Tensor,), {}))
    model.blocks[0].codes = nn.Parameter(quantised, requires_grad=False)
    with pytest.raises(ConfigError, match=r'"blocks\.0\.codes" is a \S*Int8Tensor.*not known'):
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
