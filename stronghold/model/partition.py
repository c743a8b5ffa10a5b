"""Partition: module -> layers. It finds a model's repeated blocks.

It puts every parameter into one layer (FSDP unit) that moves or stays.

Owns the law that every stored tensor (`model.stored_tensors`) is in exactly one layer. Owns the
search for blocks: the paths that the user named, else the structure of the module tree.

Types, names and shapes decide. It never reads a parameter's data, and never runs or changes the
model. The training thread makes a partition once; it is immutable afterwards.

[Note: residents]

1. A block's parameters may leave the GPU because only the block's forward uses them.
2. A parameter of two blocks, or of a block and a module outside, leaves its block and stays
   resident.
3. Every parameter outside the blocks stays resident: embedding, final norm, head.
4. With `trains_in` a layer trains one dtype. Of a block that trains several, as with routers in
   fp32, the dtype with the most bytes moves. The other trained parameters stay resident.

[Note: callable] Hooks around a block's call stream the block. So a block is a module that has a
forward. ModuleList and ModuleDict have none. The search looks through them, wherever they stand
between a container and its blocks.

[Note: no blocks] If the search finds no blocks, the model has no streamed layer: all of its
parameters are resident. Only blocks that the user named must exist.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import is_, itemgetter

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stronghold.errors import ConfigError, ErrorPage, StateError, did_you_mean, with_page
from stronghold.model.stored_tensors import StoredTensors, stored_tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedParameter:
    """A stored tensor with all of its names.

    It is a parameter, or an inner tensor of a quantised parameter (`model.stored_tensors`). `name`
    is its first in the model. `aliases` has that name and those of ties, in registration order.
    `num_weights`: number of weights that it stands for, if that is not its number of elements.
    """

    name: str
    aliases: tuple[str, ...]
    parameter: torch.Tensor
    num_weights: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """The unit that moves (`streamed`; an FSDP unit), or parameters that never move.

    name        dotted path of the block, or of a resident group's first holder; "" is the root
    modules     modules whose forward uses the parameters: the block, or every direct holder of a
                resident parameter
    parameters  its stored tensors, each once: trainable ones first, and in registration order
    """

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[NamedParameter, ...]
    streamed: bool


class ModelNames:
    """The parameters of a model under all their names, as they are when this object is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._tables = [
            table for module in model.modules() for table in (module._modules, module._parameters)
        ]
        self._entries = self._read()

    def _read(self) -> list[nn.Module | nn.Parameter | None]:
        return [entry for table in self._tables for entry in table.values()]

    def check(self) -> None:
        """Raise ConfigError if a name of a parameter has come, gone, or another parameter."""
        entries = self._read()
        if len(entries) == len(self._entries) and all(map(is_, entries, self._entries)):
            return
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name in {**self._parameters, **parameters}:
            before, now = self._parameters.get(name), parameters.get(name)
            if before is not now:
                change = "is another parameter"
                if before is None or now is None:
                    change = "is new" if before is None else "is gone"
                raise ConfigError(
                    f"{name} {change}: the model was changed after stronghold.initialize, and the "
                    "engine trains and saves the parameters that it had. Change the model (a head, "
                    "adapters, blocks) before stronghold.initialize, or call engine.destroy(), "
                    "change it, and initialize again. PEFT's merge_adapter, unmerge and unload "
                    "change quantised weights, too"
                )


# without slots, so that `stored` is made once
@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """The layers of a model, in registration order. Forward is expected to use them in it."""

    layers: tuple[Layer, ...]
    model: nn.Module
    names: ModelNames

    @property
    def streamed(self) -> tuple[Layer, ...]:
        """The layers that move."""
        return tuple(layer for layer in self.layers if layer.streamed)

    def modules_without_stored(self) -> list[nn.Module]:
        """Return the modules that hold no stored tensor, in themselves and in their children.

        Of a module and its children the list has the module alone.
        """
        holders = {""}
        for layer in self.layers:
            for named in layer.parameters:
                for alias in named.aliases:
                    names = alias.split(".")[:-1]
                    holders.update(".".join(names[:depth]) for depth in range(len(names) + 1))
        return [
            module
            for name, module in self.model.named_modules()
            if name not in holders and name.rpartition(".")[0] in holders
        ]


def partition(
    model: nn.Module,
    layers: str | Sequence[str] | None = None,
    trains_in: Callable[[torch.Tensor], torch.dtype | None] | None = None,
) -> Partition:
    """Split `model` into layers.

    layers     the config key `stronghold.layers`. None: a model may have no blocks ([Note: no
               blocks])
    trains_in  gives the dtype in which a stored tensor trains; None for a frozen one. Each layer
               trains one. None: a layer may train several

    ConfigError if a path is unknown, or if a parameter cannot move (`_check_lasting`,
    `_check_movable`). The result does not follow later changes of `requires_grad` or of the module
    tree: partition again.
    """
    stored = stored_tensors(model)
    names = stored.names
    _check_lasting(model)
    _check_movable(names)
    owners = _owners(model, find_blocks(model, layers), stored)
    if trains_in is not None:
        _keep_other_dtypes(owners, trains_in)
    holders = _holders(model, stored)
    members: dict[tuple[nn.Module, bool], list[torch.Tensor]] = {}
    for tensor in names:
        block = owners[tensor]
        if block is not None:
            members.setdefault((block, True), []).append(tensor)
        else:
            first_holder = holders[tensor][0]
            members.setdefault((first_holder, False), []).append(tensor)
    result: list[Layer] = []
    for module_name, module in model.named_modules():
        for streamed in (False, True):
            if (module, streamed) not in members:
                continue
            in_order = sorted(
                members[module, streamed], key=lambda tensor: not tensor.requires_grad
            )
            for tensors in _by_dtype(in_order, trains_in):
                users = [module]
                if not streamed:
                    users = list(_holders_of(tensors, holders))
                result.append(
                    Layer(
                        index=len(result),
                        name=module_name,
                        modules=tuple(users),
                        parameters=tuple(_named(tensor, stored) for tensor in tensors),
                        streamed=streamed,
                    )
                )
    check_exactly_once(names, result)
    return Partition(layers=tuple(result), model=model, names=ModelNames(model))


def _keep_other_dtypes(
    owners: dict[torch.Tensor, nn.Module | None],
    trains_in: Callable[[torch.Tensor], torch.dtype | None],
) -> None:
    """Let each block own the trained tensors of one dtype: the one with the most bytes."""
    num_bytes: dict[nn.Module, Counter[torch.dtype]] = {}
    for tensor, block in owners.items():
        dtype = trains_in(tensor)
        if block is not None and dtype is not None:
            num_bytes.setdefault(block, Counter())[dtype] += tensor.numel() * dtype.itemsize
    for tensor, block in owners.items():
        dtype = trains_in(tensor)
        if block is not None and dtype is not None:
            (moving, _), *_ = num_bytes[block].most_common(1)
            owners[tensor] = block if dtype is moving else None


def _by_dtype(
    tensors: Sequence[torch.Tensor], trains_in: Callable[[torch.Tensor], torch.dtype | None] | None
) -> Iterable[list[torch.Tensor]]:
    """The tensors by the dtype in which they train. Frozen ones join those of the first dtype."""
    dtypes = [None if trains_in is None else trains_in(tensor) for tensor in tensors]
    first = next((dtype for dtype in dtypes if dtype is not None), None)
    groups: dict[torch.dtype | None, list[torch.Tensor]] = {}
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        groups.setdefault(dtype or first, []).append(tensor)
    return groups.values()


def _holders_of(
    tensors: Sequence[torch.Tensor], holders: dict[torch.Tensor, list[nn.Module]]
) -> Iterable[nn.Module]:
    """The modules that hold the tensors directly, each once."""
    modules: dict[nn.Module, None] = {}
    for tensor in tensors:
        modules.update(dict.fromkeys(holders[tensor]))
    return modules


def _named(tensor: torch.Tensor, stored: StoredTensors) -> NamedParameter:
    aliases = tuple(stored.names[tensor])
    return NamedParameter(
        name=aliases[0],
        aliases=aliases,
        parameter=tensor,
        num_weights=stored.num_weights.get(tensor),
    )


def _holders(model: nn.Module, stored: StoredTensors) -> dict[torch.Tensor, list[nn.Module]]:
    """The modules that hold each stored tensor directly, in registration order."""
    holders: dict[torch.Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for tensor in stored.held_by(module):
            holders.setdefault(tensor, []).append(module)
    return holders


def _owners(
    model: nn.Module, blocks: list[nn.Module], stored: StoredTensors
) -> dict[torch.Tensor, nn.Module | None]:
    """The one block that alone uses each stored tensor; None for a resident one ([Note:
    residents])."""
    users: dict[torch.Tensor, list[nn.Module | None]] = {}
    for block in blocks:
        of_block = (tensor for module in block.modules() for tensor in stored.held_by(module))
        for tensor in dict.fromkeys(of_block):
            users.setdefault(tensor, []).append(block)
    for module in _outside(model, set(blocks)):
        for tensor in stored.held_by(module):
            users.setdefault(tensor, []).append(None)
    owners: dict[torch.Tensor, nn.Module | None] = {}
    for tensor, modules in users.items():
        owners[tensor] = modules[0] if len(modules) == 1 else None
    return owners


def _outside(model: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules that are reached without entering a block. A block may hold them, too."""
    seen: set[nn.Module] = set(blocks)
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield module
            waiting.extend(module.children())


def _check_lasting(model: nn.Module) -> None:
    """ConfigError for a parameter that is a new object in each listing of the model's parameters.

    The model would not compute with the parameter that moves.
    """
    second_listing = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        if second_listing.get(name) is not parameter:
            raise ConfigError(
                f'parameter "{name}" is another nn.Parameter each time the model lists its '
                "parameters, expected one that stays: a module makes it anew, as PEFT's LoRA on "
                "nn.MultiheadAttention does in each listing and each forward. Leave this module "
                "out of the adapter's target_modules."
            )


def _check_movable(names: dict[torch.Tensor, list[str]]) -> None:
    """ConfigError for a parameter that no slab can hold.

    1. It has no shape yet.
    2. It is no plain tensor: it is sharded, or of a class that nothing unpacks.
    3. Its memory overlaps another's, and one of them trains. A move would cut this tie.
    """
    for parameter, (name, *_) in names.items():
        if is_lazy(parameter):
            raise ConfigError(
                f'parameter "{name}" has no shape yet (lazy module): run one forward of the model '
                "before wrapping it."
            )
        if type(parameter.data) is not torch.Tensor:
            raise ConfigError(
                f'parameter "{name}" is a {type(parameter.data).__name__}, expected a '
                "torch.Tensor: quantised or sharded weights are not supported. Wrap the model "
                "before they are made."
            )
    spans: list[tuple[str, int, int, torch.Tensor]] = []
    for number, parameter in enumerate(names):
        # A parameter without an address (the meta device, tensors that wrap others) is not checked.
        if parameter.numel() and parameter.is_contiguous() and parameter.data_ptr():
            spans.append((parameter.device.type, parameter.data_ptr(), number, parameter))
    spans.sort(key=itemgetter(0, 1, 2))
    for (device, begin, _, first), (next_device, next_begin, _, second) in pairwise(spans):
        end = begin + first.numel() * first.element_size()
        overlaps = device == next_device and next_begin < end
        if overlaps and (first.requires_grad or second.requires_grad):
            raise ConfigError(
                f'parameters "{names[first][0]}" and "{names[second][0]}" are two nn.Parameter '
                "objects over the same memory; tie them by assigning the same nn.Parameter to "
                "both modules."
            )


def check_exactly_once(names: Mapping[torch.Tensor, list[str]], layers: list[Layer]) -> None:
    """StateError unless every tensor of `names` is in exactly one layer, and no other parameter is
    in any."""
    placed = Counter(named.parameter for layer in layers for named in layer.parameters)
    for parameter, aliases in names.items():
        if placed[parameter] != 1:
            raise StateError(
                f'parameter "{aliases[0]}" is in {placed[parameter]} layers, expected exactly one'
            )
    if len(placed) != len(names):
        raise StateError(f"{len(placed) - len(names)} tensors in layers are not the model's own")


# -- which modules are blocks ---------------------------------------------------------------------
_KEY = "stronghold.layers"

# A list of small repeated modules (heads, adapters, norms) beside the real stacks stays resident.
# The hand-overs of so small a fetch cost more than its transfer.
_MIN_SHARE_OF_LARGEST = 0.02
_MIN_BLOCK_NUMEL = 1 << 20


def find_blocks(model: nn.Module, layers: str | Sequence[str] | None = None) -> list[nn.Module]:
    """Find the distinct blocks of `model` that hold parameters. None lies inside another.

    `layers` has dotted paths of block containers or of blocks. None: search, which may find none.
    ConfigError for a path that names no module with parameters, or for nested blocks.
    """
    if layers is None:
        # Plain lists of layers (linear maps) count if they are most of the model.
        return _large_groups(model) or _most_of(model, _large_groups(model, any_kind=True))
    return _named_blocks(model, [layers] if isinstance(layers, str) else list(layers))


# --- by name --------------------------------------------------------------------------------------
def _named_blocks(model: nn.Module, paths: list[str]) -> list[nn.Module]:
    if not paths:
        raise ConfigError(
            f"{_KEY}: an empty list names no blocks; leave the key out to have them found."
        )
    # Aliases of shared modules count. The user may take any name by which code reaches a block.
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks: dict[nn.Module, None] = {}
    for path in paths:
        ends = [name for name in modules if name.endswith(f".{path}")]  # in wrapped models
        names = [path] if path in modules else _outermost(ends)
        if not path or not names:
            raise ConfigError(_unknown_path(model, path, modules))
        # A path that ends in a number names a block, even if it is a Sequential. Any other path
        # names a container.
        is_block = path.rpartition(".")[2].isdigit()
        of_path = [
            block
            for name in names
            for block in _blocks_in(modules[name], open_sequential=not is_block)
        ]
        if not of_path:
            raise ConfigError(
                f'{_KEY}: "{path}" holds no module with parameters and a forward of its own, so '
                "there is nothing to stream; name the blocks, or the list that holds them."
            )
        blocks.update(dict.fromkeys(of_path))
    names_of = {module: name for name, module in model.named_modules() if module in blocks}
    for block, name in names_of.items():
        for inner in block.modules():
            if inner is not block and inner in names_of:
                raise ConfigError(
                    f'{_KEY}: "{names_of[inner]}" lies inside "{name}"; a layer moves as a whole, '
                    "so name only one of them."
                )
    return [*blocks]


def _outermost(names: Sequence[str]) -> list[str]:
    """The dotted names that do not lie inside another one."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _unknown_path(model: nn.Module, path: str, names: Iterable[str]) -> str:
    """The message for a path that matches no module."""
    lists = _outermost([name for name, module in model.named_modules() if _is_container(module)])
    quoted = [f'"{name}"' for name in lists[:4] if name]
    hint = f" Lists of modules in it: {', '.join(quoted)}." if quoted else ""
    return (
        f'{_KEY}: got "{path}", expected the dotted path of a module of {type(model).__name__}.'
        f"{did_you_mean(path, filter(None, names))}{hint}"
    )


# --- by structure ---------------------------------------------------------------------------------
def _large_groups(model: nn.Module, *, any_kind: bool = False) -> list[nn.Module]:
    """The blocks of all outermost groups that are not small."""
    groups = list(_outermost_groups(model, any_kind=any_kind))
    sizes = [sum(map(_numel, group)) for group in groups]
    least = _MIN_SHARE_OF_LARGEST * max(sizes, default=0)
    blocks: dict[nn.Module, None] = {}  # two lists may hold the same ones
    for group, size in zip(groups, sizes, strict=True):
        if size >= min(least, _MIN_BLOCK_NUMEL * len(group)):
            blocks.update(dict.fromkeys(group))
    return [*blocks]


def _most_of(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks, if they are most of the model but its embeddings."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    rest = _numel(model) - sum(map(_numel, embeddings))
    return blocks if 2 * sum(map(_numel, blocks)) >= rest else []


def _outermost_groups(module: nn.Module, *, any_kind: bool) -> Iterator[list[nn.Module]]:
    """Groups in registration order. The search does not enter a group: a list of experts belongs to
    its block."""
    group = list(dict.fromkeys(_group(module, any_kind=any_kind)))
    if group:
        yield group
    taken = set(group)
    for child in module.children():
        if taken.isdisjoint(child.modules()):
            yield from _outermost_groups(child, any_kind=any_kind)


def _group(module: nn.Module, *, any_kind: bool) -> list[nn.Module]:
    """Like blocks that `module` holds as a list or as numbered attributes (block0, block1).

    any_kind  the members of a list count, alike or not, and linear maps, too
    """
    if _is_container(module):
        blocks = _blocks_in(module, open_sequential=True)
        if any_kind:
            has_layers = not all(isinstance(block, nn.Embedding) for block in blocks)
            return blocks if len(blocks) > 1 and has_layers else []
        like = _alike(blocks)
        # A Sequential may begin with an embedding and end with a head. A ModuleList mixes only
        # kinds of blocks.
        if isinstance(module, nn.Sequential):
            return like
        return blocks if like and 2 * len(like) >= len(blocks) else []
    siblings: dict[str, list[nn.Module]] = {}
    for name, child in module.named_children():
        stem = re.fullmatch(r"(.*?)\d+", name)
        # Numbered lists (a ResNet's layer1 to layer4) are containers. The blocks in them are the
        # finer choice.
        if stem and _is_callable(child) and not _is_container(child):
            siblings.setdefault(stem[1], []).append(child)
    return [block for group in siblings.values() for block in _alike(group)]


def _alike(blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks that share their kind with another one, without single primitives."""
    kinds = Counter(map(_kind, blocks))
    return [block for block in blocks if kinds[_kind(block)] > 1 and not _is_primitive(block)]


def _kind(module: nn.Module) -> tuple[object, ...]:
    """The class of a module. For a list also the kinds of its members, because every nn.Sequential
    has one class."""
    if _is_container(module):
        return (type(module), *map(_kind, module.children()))
    return (type(module),)


# --- kinds of modules -----------------------------------------------------------------------------
def _is_callable(module: nn.Module) -> bool:
    """True if `module` has a forward, so that hooks fire ([Note: callable])."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_container(module: nn.Module) -> bool:
    """True for a list of modules: ModuleList, ModuleDict, Sequential, or another module whose
    children are all numbered."""
    names = [name for name, _ in module.named_children()]
    if isinstance(module, nn.Sequential) or (names and not _is_callable(module)):
        return True
    return len(names) > 1 and all(name.isdigit() for name in names)


def _is_primitive(module: nn.Module) -> bool:
    """True for a linear map, a convolution or a norm: at most a weight and a bias, and no
    children with parameters."""
    if any(_numel(child) for child in module.children()):
        return False
    parameters = list(module.parameters(recurse=False))
    return len(parameters) <= 2


def _expanded(module: nn.Module, *, open_sequential: bool) -> Iterator[nn.Module]:
    """The blocks in `module`, or `module` itself.

    Lists without a forward are opened at any depth. Lists with a forward (Sequential) are opened
    only at the top, with `open_sequential`.
    """
    if not _is_callable(module) or (open_sequential and _is_container(module)):
        for child in module.children():
            yield from _expanded(child, open_sequential=False)
    else:
        yield module


def _blocks_in(module: nn.Module, *, open_sequential: bool) -> list[nn.Module]:
    """The blocks of `_expanded` that have parameters."""
    blocks = _expanded(module, open_sequential=open_sequential)
    return [block for block in blocks if _numel(block)]


def _numel(module: nn.Module) -> int:
    """The number of a module's parameters, with those of its children."""
    return sum(math.prod(parameter.shape) for parameter in module.parameters())


def why_no_blocks(model: nn.Module) -> str:
    """A message: the reason for which the search found no blocks, and how the user names them."""
    largest = sorted(
        ((_numel(child), name) for name, child in model.named_children()), reverse=True
    )[:3]
    held = ", ".join(f'"{name}" ({numel:,} parameters)' for numel, name in largest) or "none"
    message = (
        f"no repeated blocks found in {type(model).__name__}. Looked for a ModuleList, Sequential "
        "or numbered attributes that hold at least two like modules with parameters. Largest "
        "children: "
        f"{held}. To name the blocks, or the list that holds them, set {_KEY}, for example "
        '"stronghold": {"layers": "model.layers"} or '
        '{"layers": ["encoder.block", "decoder.block"]}.'
    )
    return with_page(message, ErrorPage.NO_BLOCKS)
