"""Partition: module -> layers. Finds a model's repeated blocks, and says of every parameter which
layer it moves with, or that it stays.

Owns the law that every parameter is in exactly one layer; the search for blocks, in this order: the
paths that the user named, the tables of known families (by `config.model_type`, or by class name
for Megatron, PyTorch and research code), the structure of the module tree; and the register of
models that were built without values, which it does not keep alive. A family needs an entry only
where structure would choose wrongly, or where a model of one block must work. Decides by types,
names and shapes: never reads a parameter's data, never runs or changes the model. Made once by the
training thread; immutable afterwards.

[Note: residents] A block's parameters may leave the GPU only because nothing but the block's own
forward uses them. A parameter that two blocks hold, or a block and something outside, leaves its
block and stays resident, as does every parameter outside the blocks: embedding, final norm, head.

[Note: callable] A block is streamed by hooks around its call, so a block is a module that has a
forward. ModuleList and ModuleDict have none: they are looked through, wherever they stand between a
container and its blocks.

[Note: no blocks] A model in which the search finds no blocks has no streamed layer: all of its
parameters are resident. Only blocks that the user named must be there.
"""

from __future__ import annotations

import fnmatch
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stronghold.errors import ConfigError, StateError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedParameter:
    """A parameter with all its names: `name` is its first in `model.named_parameters()`, `aliases`
    has that one and, when it is tied, the others, in registration order."""

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """The unit that moves (`streamed`), or parameters that never do. `name` is the dotted path of
    the block, or of a resident group's first holder; "" is the root. `modules` are those whose
    forward uses the parameters: the block, or every direct holder of a resident parameter.
    `parameters`: each once, trainable first, then frozen, and within these by `format_of`;
    otherwise in registration order."""

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[NamedParameter, ...]
    streamed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """`layers` in the order of registration, in which forward is expected to use them."""

    layers: tuple[Layer, ...]
    model: nn.Module

    @property
    def streamed(self) -> tuple[Layer, ...]:
        """The layers that move."""
        return tuple(layer for layer in self.layers if layer.streamed)


def partition(
    model: nn.Module,
    layers: str | Sequence[str] | None = None,
    format_of: Callable[[nn.Parameter], int] | None = None,
) -> Partition:
    """Split `model` into layers; `layers` is the config key `stronghold.layers`. Without it a model
    may have no blocks ([Note: no blocks]). ConfigError when a path is unknown, or a parameter
    cannot be moved (`_check_lasting`, `_check_movable`). `format_of` gives the number of a
    parameter's format (`model.layout`); without it all have one. A later change of `requires_grad`
    or of the module tree is not seen: partition again."""
    names = _names(model)
    _check_lasting(model, names)
    _check_movable(names)
    owners = _owners(model, find_blocks(model, layers))
    holders = _holders(model)
    members: dict[tuple[nn.Module, bool], list[nn.Parameter]] = {}
    for parameter in names:
        block = owners[parameter]
        key = (holders[parameter][0], False) if block is None else (block, True)
        members.setdefault(key, []).append(parameter)

    def range_order(parameter: nn.Parameter) -> tuple[bool, int]:
        return not parameter.requires_grad, format_of(parameter) if format_of else 0

    found: list[Layer] = []
    for module_name, module in model.named_modules():
        for streamed in (False, True):
            mine = members.get((module, streamed), [])
            if not mine:
                continue
            mine.sort(key=range_order)
            shared = dict.fromkeys(holder for parameter in mine for holder in holders[parameter])
            found.append(
                Layer(
                    index=len(found),
                    name=module_name,
                    modules=(module,) if streamed else tuple(shared),
                    parameters=tuple(
                        NamedParameter(name=names[p][0], aliases=tuple(names[p]), parameter=p)
                        for p in mine
                    ),
                    streamed=streamed,
                )
            )
    check_exactly_once(names, found)
    return Partition(layers=tuple(found), model=model)


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter with all its names, both in registration order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _holders(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Every parameter with the modules that hold it directly, in registration order."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
    return holders


def _owners(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Parameter, nn.Module | None]:
    """Every parameter with the one block that alone uses it, or None: it is resident ([Note:
    residents])."""
    users: dict[nn.Parameter, list[nn.Module | None]] = {}
    for block in blocks:
        for parameter in block.parameters():
            users.setdefault(parameter, []).append(block)
    for module in _outside(model, set(blocks)):
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(None)
    return {parameter: who[0] if len(who) == 1 else None for parameter, who in users.items()}


def _outside(model: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules that are reached without entering a block; one that a block holds too is among
    them."""
    seen: set[nn.Module] = set(blocks)
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield module
            waiting.extend(module.children())


def _check_lasting(model: nn.Module, names: dict[nn.Parameter, list[str]]) -> None:
    """ConfigError for a parameter that the model replaces by another object when it is asked for
    its parameters a second time: what moves would not be what the model computes with."""
    again = dict(model.named_parameters(remove_duplicate=False))
    for parameter, (name, *_) in names.items():
        if again.get(name) is not parameter:
            raise ConfigError(
                f'parameter "{name}" is another nn.Parameter each time the model lists its '
                "parameters, expected one that stays: a module makes it anew, as PEFT's LoRA on "
                "nn.MultiheadAttention does in each listing and each forward. Leave this module "
                "out of the adapter's target_modules."
            )


def _check_movable(names: dict[nn.Parameter, list[str]]) -> None:
    """ConfigError for what no slab can hold or keep: parameters without a shape yet, those
    that are no plain floating-point tensors (quantised, sharded), and trainable ones whose memory
    overlaps another's, a tie that moving would cut."""
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
    # Without an address (the meta device, tensors that wrap others) there is nothing to compare.
    spans = sorted(
        (
            (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), p.device.type, name, p)
            for p, (name, *_) in names.items()
            if p.numel() and p.is_contiguous() and p.data_ptr()
        ),
        key=lambda span: (span[2], span[0]),
    )
    for (_, end, device, first, one), (start, _, other, second, two) in pairwise(spans):
        if device == other and start < end and (one.requires_grad or two.requires_grad):
            raise ConfigError(
                f'parameters "{first}" and "{second}" are two nn.Parameter objects over the same '
                "memory; tie them by assigning the same nn.Parameter to both modules."
            )


def check_exactly_once(names: dict[nn.Parameter, list[str]], layers: list[Layer]) -> None:
    placed = Counter(named.parameter for layer in layers for named in layer.parameters)
    for parameter, aliases in names.items():
        if placed[parameter] != 1:
            raise StateError(
                f'parameter "{aliases[0]}" is in {placed[parameter]} layers, expected exactly one'
            )
    if len(placed) != len(names):
        raise StateError(f"{len(placed) - len(names)} parameters in layers are not the model's own")


# -- which modules are blocks ---------------------------------------------------------------------
_KEY = "stronghold.layers"

# A list of small repeated parts (heads, adapters, norms) beside the real stacks stays resident: a
# fetch of so little costs more in hand-overs than in transfer.
_MIN_SHARE_OF_LARGEST = 0.02
_MIN_BLOCK_NUMEL = 1 << 20


# Paths of block containers by `config.model_type`, as suffixes of module names: "h" is
# "transformer.h" in GPT2LMHeadModel and "h" in GPT2Model. Several paths: several stacks, or several
# versions of the library.
_SUFFIXES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("h",): (
        "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj",
    ),
    ("blocks",): ("mpt",),
    ("layers",): (
        "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2",
        "gemma3", "gemma3_text", "glm", "glm4", "gpt_neox", "gpt_oss", "granite",
        "granitemoe", "internlm2", "llama", "llama4_text", "mamba", "mamba2", "ministral",
        "mistral", "mixtral", "modernbert", "nemotron", "olmo", "olmo2", "olmo3", "olmoe",
        "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_moe", "qwen3_next", "smollm3", "stablelm", "starcoder2",
    ),
    ("encoder.layer",): (
        "bert", "camembert", "deberta", "deberta-v2", "electra", "esm", "mpnet", "roberta",
        "xlm-roberta",
    ),
    ("transformer.layer",): ("distilbert",),
    # Groups, not the layers in them: a group is called num_hidden_layers / num_hidden_groups times
    # per forward.
    ("encoder.albert_layer_groups",): ("albert",),
    ("layers", "encoder.layer"): ("deit", "dinov2", "vit", "vit_mae"),
    ("encoder.block", "decoder.block"): ("longt5", "mt5", "switch_transformers", "t5", "umt5"),
    ("encoder.layers", "decoder.layers"): (
        "bart", "blenderbot", "m2m_100", "marian", "mbart", "pegasus", "whisper",
    ),
}  # fmt: skip

MODEL_TYPES: dict[str, tuple[str, ...]] = {
    model_type: paths for paths, types in _SUFFIXES.items() for model_type in types
}

# Paths by class name, exactly as they are below that module: class names are not unique, so nothing
# is guessed.
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    # Megatron: the legacy models, then Megatron core's.
    "GPTModel": ("language_model.encoder.layers", "decoder.layers"),
    "BertModel": ("language_model.encoder.layers", "encoder.layers"),
    "T5Model": (
        "language_model.encoder.layers",
        "language_model.decoder.layers",
        "encoder.layers",
        "decoder.layers",
    ),
    "TransformerLanguageModel": ("encoder.layers", "decoder.layers"),
    "ParallelTransformer": ("layers",),
    "TransformerBlock": ("layers",),
    # Other layouts of the same: a model that holds `transformer.layers` with embedding and head
    # beside it.
    "GPT2Model": ("transformer.layers",),
    # minGPT, nanoGPT.
    "GPT": ("transformer.h", "transformer.layers"),
    # torch.nn, and the reference code of Llama.
    "Transformer": ("layers", "encoder.layers", "decoder.layers"),
    "TransformerEncoder": ("layers",),
    "TransformerDecoder": ("layers",),
}


def find_blocks(model: nn.Module, layers: str | Sequence[str] | None = None) -> list[nn.Module]:
    """The distinct blocks of `model` that hold parameters; none lies inside another. `layers`:
    dotted paths of block containers or of blocks, `*` matches within one component; None searches,
    and may find none. ConfigError for a path that names nothing with parameters, or nested blocks.
    """
    if layers is not None:
        blocks = _named_blocks(model, [layers] if isinstance(layers, str) else list(layers))
    else:
        blocks = _family_blocks(model) or _structural_blocks(model)
    return _distinct(blocks)


# --- by name --------------------------------------------------------------------------------------
def _named_blocks(model: nn.Module, paths: list[str]) -> list[nn.Module]:
    if not paths:
        raise ConfigError(
            f"{_KEY}: an empty list names no blocks; leave the key out to have them found."
        )
    # Aliases of shared modules count: any name by which the user's code can reach a block is a good
    # name.
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks: list[nn.Module] = []
    for path in paths:
        names = _matches(path, modules)
        if not names:
            raise ConfigError(_unknown_path(model, path, modules))
        # A path that ends in a number or a wildcard names blocks, even if they are Sequentials; any
        # other names a container.
        last = path.rsplit(".", 1)[-1]
        as_block = last.isdigit() or "*" in last
        found = [
            block
            for name in names
            for block in _expanded(modules[name], open_sequential=not as_block)
            if _numel(block)
        ]
        if not found:
            raise ConfigError(
                f'{_KEY}: "{path}" holds no module with parameters and a forward of its own, so '
                "there is nothing to stream; name the blocks, or the list that holds them."
            )
        blocks += found
    _refuse_nested(model, _distinct(blocks))
    return blocks


def _matches(path: str, names: Iterable[str]) -> list[str]:
    """Names equal to `path`, component by component; else the outermost names that end in it
    (wrapped models)."""
    pattern = path.split(".")
    split = [name.split(".") for name in names if name]
    exact = [parts for parts in split if _fits(parts, pattern)]
    suffix = [parts for parts in split if _fits(parts[-len(pattern) :], pattern)]
    return [".".join(parts) for parts in exact or _outermost(suffix)]


def _fits(parts: list[str], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))


def _outermost(names: list[list[str]]) -> list[list[str]]:
    chosen = {tuple(name) for name in names}
    return [
        name
        for name in names
        if not any(tuple(name[:length]) in chosen for length in range(1, len(name)))
    ]


def _unknown_path(model: nn.Module, path: str, names: Iterable[str]) -> str:
    lists = [name.split(".") for name, module in model.named_modules() if _is_container(module)]
    found = ", ".join(f'"{".".join(parts)}"' for parts in _outermost(lists)[:4] if parts != [""])
    return (
        f'{_KEY}: got "{path}", expected the dotted path of a module of {type(model).__name__} '
        f'("*" stands for any one component).{did_you_mean(path, filter(None, names))}'
        + (f" Lists of modules in it: {found}." if found else "")
    )


def _refuse_nested(model: nn.Module, blocks: list[nn.Module]) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    chosen = {id(block) for block in blocks}
    for block in blocks:
        for inner in block.modules():
            if inner is not block and id(inner) in chosen:
                raise ConfigError(
                    f'{_KEY}: "{names[id(inner)]}" lies inside "{names[id(block)]}"; a layer moves '
                    "as a whole, so name only one of them."
                )


# --- by family ------------------------------------------------------------------------------------
def _unwrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model` and what it merely wraps, outermost first, with their names: every only child in turn
    (PEFT, DDP, an outer module that adds a loss)."""
    name, module = "", model
    yield name, module
    while len(children := list(module.named_children())) == 1:
        child, module = children[0]
        name = f"{name}.{child}" if name else child
        yield name, module


def _family_paths(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(suffixes, exact paths) of the block containers of a known model, else both empty. The
    outermost module with a `config.model_type` or a listed class name decides; `model_type` wins,
    because class names (BertModel) are not unique."""
    for name, module in _unwrapped(model):
        config: Any = getattr(module, "config", None)
        model_type = getattr(config, "model_type", None)
        if isinstance(model_type, str):
            return MODEL_TYPES.get(model_type, ()), ()
        paths = CLASS_NAMES.get(type(module).__name__)
        if paths is not None:
            return (), tuple(f"{name}.{path}" if name else path for path in paths)
    return (), ()


def _family_blocks(model: nn.Module) -> list[nn.Module]:
    suffixes, exact = _family_paths(model)
    modules = dict(model.named_modules())
    containers = {name: module for name, module in modules.items() if _is_container(module)}
    found = [
        name.split(".")
        for name in containers
        if name in exact or any(name == path or name.endswith(f".{path}") for path in suffixes)
    ]
    return [
        block
        for parts in _outermost(found)
        for block in _expanded(containers[".".join(parts)], open_sequential=True)
        if _numel(block)
    ]


# --- by structure ---------------------------------------------------------------------------------
def _structural_blocks(model: nn.Module) -> list[nn.Module]:
    """Outermost groups of at least two blocks of one kind; failing that, the layers of plain lists
    that are most of the model. Small groups of small blocks are left out."""
    repeated = _large_groups(model, _repeated_blocks)
    if repeated:
        return repeated
    plain = _large_groups(model, _plain_layers)
    embeddings = {module for module in model.modules() if isinstance(module, nn.Embedding)}
    rest = _numel(model) - sum(map(_numel, embeddings))
    return plain if 2 * sum(map(_numel, plain)) >= rest else []


def _large_groups(
    model: nn.Module, group_of: Callable[[nn.Module], list[nn.Module]]
) -> list[nn.Module]:
    groups = list(_outermost_groups(model, group_of))
    sizes = [sum(map(_numel, group)) for group in groups]
    least = _MIN_SHARE_OF_LARGEST * max(sizes, default=0)
    return [
        block
        for group, size in zip(groups, sizes, strict=True)
        if size >= min(least, _MIN_BLOCK_NUMEL * len(group))
        for block in group
    ]


def _outermost_groups(
    module: nn.Module, group_of: Callable[[nn.Module], list[nn.Module]]
) -> Iterator[list[nn.Module]]:
    """Groups in registration order. Inside a group nothing is searched: a list of experts belongs
    to its block."""
    group = group_of(module)
    if group:
        yield group
    taken = set(group)
    for child in module.children():
        if taken.isdisjoint(child.modules()):
            yield from _outermost_groups(child, group_of)


def _repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The group of like blocks that `module` holds as a list or as numbered attributes (block0,
    block1), or none."""
    if not _is_container(module):
        return _numbered_siblings(module)
    blocks = [block for block in _expanded(module, open_sequential=True) if _numel(block)]
    like = _alike(blocks)
    # A Sequential may begin with an embedding and end with a head; a ModuleList mixes kinds only as
    # kinds of block.
    if isinstance(module, nn.Sequential):
        return _distinct(like)
    return _distinct(blocks) if like and 2 * len(like) >= len(blocks) else []


def _numbered_siblings(module: nn.Module) -> list[nn.Module]:
    siblings: dict[str, list[nn.Module]] = {}
    for name, child in module.named_children():
        stem = re.fullmatch(r"(.*?)\d+", name)
        # Numbered lists (a ResNet's layer1 to layer4) are containers: their own blocks are the
        # finer choice.
        if stem and _is_callable(child) and not _is_container(child):
            siblings.setdefault(stem[1], []).append(child)
    return _distinct(block for group in siblings.values() for block in _alike(group))


def _plain_layers(module: nn.Module) -> list[nn.Module]:
    """Children with parameters, of any kind, of a list that has at least two."""
    if not _is_container(module):
        return []
    blocks = [block for block in _expanded(module, open_sequential=True) if _numel(block)]
    if len(blocks) < 2 or all(isinstance(block, nn.Embedding) for block in blocks):
        return []
    return _distinct(blocks)


def _alike(blocks: list[nn.Module]) -> list[nn.Module]:
    """Those of `blocks` that share their kind or all their shapes with another one and are more
    than one primitive."""
    kinds = Counter(map(_kind, blocks))
    shapes = Counter(map(_shapes, blocks))
    return [
        block
        for block in blocks
        if (kinds[_kind(block)] > 1 or shapes[_shapes(block)] > 1) and not _is_primitive(block)
    ]


def _kind(module: nn.Module) -> tuple[object, ...]:
    """The class; of a list also what it holds, because every nn.Sequential has the same class."""
    if _is_container(module):
        return (type(module), *map(_kind, module.children()))
    return (type(module),)


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())


# --- what modules are -----------------------------------------------------------------------------
def _is_callable(module: nn.Module) -> bool:
    """Whether calling `module` works, so that hooks fire ([Note: callable])."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_container(module: nn.Module) -> bool:
    """A list of modules: ModuleList, ModuleDict, Sequential, or any other module whose children are
    all numbered."""
    names = [name for name, _ in module.named_children()]
    if isinstance(module, nn.Sequential) or (names and not _is_callable(module)):
        return True
    return len(names) > 1 and all(name.isdigit() for name in names)


def _is_primitive(module: nn.Module) -> bool:
    """A linear map, a convolution, a norm: at most a weight and a bias, and nothing inside."""
    inside = sum(_numel(child) for child in module.children())
    return not inside and len(list(module.parameters(recurse=False))) <= 2


def _expanded(module: nn.Module, *, open_sequential: bool) -> Iterator[nn.Module]:
    """The blocks in `module`, or itself. Lists without a forward are always opened, at any depth;
    those with one (Sequential) only at the top and only with `open_sequential`."""
    if not _is_callable(module) or (open_sequential and _is_container(module)):
        for child in module.children():
            yield from _expanded(child, open_sequential=False)
    else:
        yield module


def _numel(module: nn.Module) -> int:
    return sum(math.prod(parameter.shape) for parameter in module.parameters())


def _distinct(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(blocks))


def why_no_blocks(model: nn.Module) -> str:
    """Why the search found no blocks in `model`, and how the user names them."""
    largest = sorted(
        ((_numel(child), name) for name, child in model.named_children()), reverse=True
    )[:3]
    held = ", ".join(f'"{name}" ({numel:,} parameters)' for numel, name in largest) or "none"
    return (
        f"no repeated blocks found in {type(model).__name__}. Looked for a known family "
        "(config.model_type or class name), then for a ModuleList, Sequential or numbered "
        "attributes that hold at least two like modules with parameters. Largest children: "
        f"{held}. To name the blocks, or the list that holds them, set {_KEY}, for example "
        '"stronghold": {"layers": "model.layers"} or '
        '{"layers": ["encoder.block.*", "decoder.block.*"]}.'
    )


# -- where the values of meta parameters come from ------------------------------------------------
class WeightSource(Protocol):
    """Values by parameter: names change when a model is wrapped."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether it knows the parameter's values."""

    def read_into(self, parameter: nn.Parameter, target: torch.Tensor) -> None:
        """Fill contiguous CPU memory of the parameter's shape, cast to the target's dtype."""


_SOURCES: weakref.WeakKeyDictionary[nn.Module, WeightSource] = weakref.WeakKeyDictionary()


def set_source(model: nn.Module, source: WeightSource) -> None:
    """`stronghold.initialize` will fill the model's meta parameters from `source`."""
    _SOURCES[model] = source


def source_of(model: nn.Module) -> WeightSource | None:
    """The source of the model, or of the one that it wraps; None for one that has its values."""
    return next((_SOURCES[module] for module in model.modules() if module in _SOURCES), None)


def forget_source(model: nn.Module) -> None:
    """The model has its values now."""
    for module in model.modules():
        _SOURCES.pop(module, None)


def materialize(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a meta parameter `values`; it stays the same object. `.data` cannot cross from the meta
    device: what the object wraps is exchanged instead."""
    real = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, real)
