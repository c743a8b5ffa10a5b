"""The `"stronghold"` section of the config: its keys, types and meanings, and their errors.

Owns the schema: the error messages and docs/config.md are both made from it; and the one reading of
all that the config says about NVMe, also in DeepSpeed's offload and aio keys. A key that is left
out, null or "auto" is derived later by the plan. Frozen once read. No device, no torch, no
DeepSpeed is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from stronghold.config.source import SECTION, section_of
from stronghold.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

UNITS = {prefix + "b": 1000**i for i, prefix in enumerate(("", "k", "m", "g", "t"))} | {
    prefix + "ib": 1024**i for i, prefix in enumerate(("k", "m", "g", "t"), start=1)
}
SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)
BYTES_EXPECTED = 'bytes: an integer, "24GB" (1e9 bytes each) or "24GiB" (2**30 bytes each)'

BLOCK_ALIGNMENT, MAX_BLOCK_BYTES = 4096, 1 << 30  # those of stronghold_io.h, as MAX_DEPTH
BLOCK_EXPECTED = 'bytes in multiples of 4096, up to 1 GiB, such as 1048576 or "1MiB"'
MAX_DEPTH = 4096
MAX_THREADS = 4096  # that of kernels/src/api.cpp


def parse_bytes(value: object) -> int:
    """Bytes from an integer, or from a number with a unit in any case: B, kB, MB, GB, TB (powers of
    1000) and KiB, MiB, GiB, TiB (of 1024). ValueError for what is not positive, has no unit, or has
    one that means two things ("24G")."""
    if isinstance(value, str) and (match := SIZE.fullmatch(value)):
        unit = UNITS.get(match[2].lower())
        size = 0 if unit is None else int(Decimal(match[1]) * unit)
    elif isinstance(value, float) and value.is_integer():  # 24e9 is a float in JSON
        size = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        size = 0
    if size <= 0:
        raise ValueError(f"expected {BYTES_EXPECTED}")
    return size


def parse_block(value: object) -> int:
    """`parse_bytes` for a block of O_DIRECT. Raises ValueError."""
    size = parse_bytes(value)
    if size % BLOCK_ALIGNMENT or size > MAX_BLOCK_BYTES:
        raise ValueError(f"expected {BLOCK_EXPECTED}")
    return size


Bytes = Annotated[int, BeforeValidator(parse_bytes), WithJsonSchema({"type": "bytes"})]
Block = Annotated[int, BeforeValidator(parse_block), WithJsonSchema({"type": "block"})]
Name = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Level = Literal[  # in this order: `plan.cost` says what each does
    "keep", "offload", "attention", "attention_offload", "recompute", "recompute_offload"
]


def key(description: str, *, default: Any = None, **limits: Any) -> Any:
    """A key that may be left out: None then, for the plan to derive, or `default`."""
    return Field(default=default, description=description, **limits)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, data: Any) -> Any:
        """Null and "auto" mean that the key is not there."""
        if isinstance(data, Mapping):
            return {
                key: value for key, value in data.items() if value is not None and value != "auto"
            }
        return data


class EmulatedConfig(_Section):
    """How hostile, and how fast, the emulated device is."""

    poison: bool = key(
        "Fill a slot with NaN when it is released, so that a use after release shows.", default=True
    )
    jitter_s: float = key(
        "Largest random delay before each operation on a lane, in seconds.", default=0.0, ge=0
    )
    seed: NotNegative = key("Seed of the random delays.", default=0)
    link_gbps: float | None = key(
        "Pace of each direction of the link between host and device, in 1e9 bytes per "
        "second. Left out: as fast as memory copies.",
        gt=0,
    )
    update_gbps: float | None = key(
        "Pace of the CPU optimizer, in 1e9 bytes of host memory per second. Left out: "
        "as fast as it is.",
        gt=0,
    )
    wire_gbps: float | None = key(
        "Pace of weights, and of gradients, that come from other ranks, in 1e9 bytes "
        "per second. Left out: as fast as they come.",
        gt=0,
    )
    nvme_gbps: float | None = key(
        "Pace of each direction of the NVMe disks together, in 1e9 bytes per second. "
        "Left out: as fast as the files are.",
        gt=0,
    )


class NvmeConfig(_Section):
    """Where state goes that RAM cannot hold, and how it is read and written."""

    path: Name | Annotated[list[Name], Field(min_length=1)] | None = key(
        "Directory on an NVMe disk, or a list of them on several, over which the state "
        "is striped by their measured rates. Left out: DeepSpeed's nvme_path."
    )
    capacity: Bytes | None = key(
        "Most bytes of the files together, of all ranks of a node. Left out: what is free."
    )
    spill: Literal["moments", "masters", "weights"] | None = key(
        "What lies on NVMe even where RAM could hold it: the optimizer's moments; with "
        '"masters" also what makes the weights fp32 masters; with "weights" everything (on one GPU '
        "alone). Left out: what host_memory cannot hold, in this order: of the last layers first. "
        "A layer with arrays there is not updated early."
    )
    engine: Literal["io_uring", "threads"] | None = key(
        "How files are read and written. Left out: io_uring where the kernel permits "
        "it, else threads."
    )
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] | None = key(
        "Blocks in flight on each disk and in each direction. Left out: 16."
    )
    block: Block | None = key("Bytes of one request to the disk. Left out: 1 MiB.")

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories; none before DeepSpeed's keys are read as well."""
        if self.path is None:
            return ()
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


class StrongholdConfig(_Section):
    """The section as the user wrote it: None is a key that was left out."""

    enabled: bool = key(
        "Whether this engine is used. With false, DeepSpeed itself runs the program.", default=True
    )
    dtypes: Literal["cast", "own"] = key(
        "The dtype in which parameters are trained: cast is DeepSpeed's rule, the config's "
        "precision for all of them; own is the one with which each came (fp32 adapters or routers "
        "in a bf16 model). Frozen int8 and float8 weights always keep theirs.",
        default="cast",
    )
    states: Literal["exact", "lean"] = key(
        "What the optimizer keeps of a bf16 parameter: exact is an fp32 master and fp32 moments, "
        "with two moments 12 bytes, weight included; lean is a master of 24 bits and 8-bit "
        "moments, 5.1 bytes. Lean is "
        "as deterministic, but rounds otherwise, so no plan chooses it: a master within 2^-16 of "
        "its value, moments within 1/31. A learning rate below 2^-17 of a weight cannot move it, "
        "and the log names such layers. Weights in fp16 and fp32 are exact alone.",
        default="exact",
    )
    device: Literal["cuda", "emulated"] | None = key(
        "Where layers compute. Left out: CUDA where there is a GPU, else the emulated "
        "device, which is CPU tensors with a thread per lane and an enforced budget."
    )
    gpu_memory: Bytes | None = key(
        "Budget of GPU memory for weights, gradients and resident layers. Left out: "
        "half of what is free, and once the first steps have shown what activations take, nine "
        "tenths with these. On the emulated device: no limit."
    )
    host_memory: Bytes | None = key(
        "Budget of host memory for weights, masters, moments and gradients, of each "
        "rank. Left out: what is available when the engine is made, with what the model takes "
        "then; of several ranks on a node each has an equal part. Where the memory of a virtual "
        "machine grows as it is used, the environment variable STRONGHOLD_HOST_MEMORY says how "
        "many bytes it can have."
    )
    window: Positive | None = key(
        "Weight slots on the GPU: the number of layers that can be there at once."
    )
    prefetch: NotNegative | None = key(
        "How many layers ahead of compute weights are fetched. Less than the window."
    )
    activations: Level | Annotated[dict[Level, Positive], Field(min_length=1)] | None = key(
        "What happens to what autograd saves of a block in forward: it stays on the GPU "
        '("keep"), goes to the host and comes back ("offload"), or is computed again in backward, '
        'from the inputs of the block alone ("recompute") or so that what the fused kernels of '
        'attention gave is kept beside them, and not computed twice ("attention"). With '
        '"recompute_offload" and "attention_offload" what these two keep waits on the host. '
        "An object gives numbers of blocks, the first blocks' first: "
        '{"recompute": 20, "attention": 8, "keep": 4}. Never changes a bit. Left out: what the '
        "search finds fastest, and until the first steps are measured recompute on a GPU."
    )
    chunk: Positive | None = key(
        "How many sequences of the batch go through a block together: the others follow while its "
        "weights are there, so that a larger batch costs no more transfers and no more memory in "
        "the blocks. Gradients of the chunks are added in fp32. Changes rounding, so no plan "
        "chooses it; left out, a micro-batch is one chunk, as PyTorch computes it."
    )
    streams: Positive | None = key(
        "On how many CUDA streams the chunks of a layer take turns, so that the small kernels of "
        "several share the GPU: for chunks that do not fill it. Blocks that hold buffers, or "
        "carry tensors from chunk to chunk in their first call, take theirs one after the other, "
        "and the log says so. Memory is planned for so many chunks at once. Never changes a bit, "
        "unless a block begins later to carry tensors in objects, closures or globals; needs "
        '"chunk". Left out: 1.'
    )
    loss_chunk: NotNegative | None = key(
        "Of causal language models of Transformers: head and loss are computed this many tokens at "
        "a time, in training and evaluation, and the logits are never whole, unless the program "
        "reads them; 0 switches that off. Losses are those of the plain model but for the order of "
        "a sum, gradients are within rounding of it. Left out: 1024 where the logits would take "
        "1 GiB or more in fp32, and below that all at once, to the bit as PyTorch computes them. "
        "1024 tokens of a vocabulary of 128k have 0.75 GiB in passing in bf16; fewer save little "
        "beside a layer's weights, and make the matrix products small."
    )
    kept_activations: NotNegative | None = key(
        "How many of the last blocks keep what they save on the GPU, although activations, one "
        'word then, says otherwise: "recompute" and 4 of 32 are {"recompute": 28, "keep": 4}.'
    )
    resident_layers: NotNegative | Literal["all"] | None = key(
        "Layers that stay on the GPU and are never streamed."
    )
    resident_updates: Literal["gpu", "host"] | None = key(
        "Where layers that stay on the GPU are updated: there, with masters and "
        "moments beside them and nothing on the host, or on the host, from which they are fetched "
        "each step. When every layer stays and is updated there, and activations are kept, the "
        "model is whole: nothing of the engine is on its path. Left out: by simulation, once the "
        "first steps are measured; of a model without repeated blocks there, where that fits."
    )
    speculation: bool = key(
        "Whether layers may be updated before the norm of all gradients is known (early updates). "
        "Such an update writes a second set of the layer's arrays. engine.step commits it if the "
        "step is not clipped and does not overflow, and updates the layer again otherwise. The "
        "result has the same bits.",
        default=True,
    )
    early_layers: NotNegative | Literal["all"] | None = key(
        "How many layers are updated early, spread evenly over the model. Each of them has its "
        "weights, masters and moments twice in host memory: 12 more bytes per parameter with Adam "
        "in bf16. Left out: by simulation, once the first steps are measured, within host_memory."
    )
    deferred_layers: NotNegative | None = key(
        "Without effect since updates are either early or behind the gate. Configs that have it "
        "still load."
    )
    cpu_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = key(
        "Threads of the CPU optimizer. Left out: the cores that torch does not use, and of "
        "eight cores or more two less, which the lanes use."
    )
    nvme: NvmeConfig | None = key(
        "A third tier for the state that host_memory cannot hold. Left out: none, "
        "unless DeepSpeed's offload keys ask for it."
    )
    layers: str | Annotated[list[str], Field(min_length=1)] | None = key(
        "Full name of the ModuleList that holds the repeated blocks, or a list of "
        "names for several stacks. Left out: found by the model's class, then by structure; a "
        "model without repeated blocks stays whole on the GPU, and a warning says so."
    )
    trace: Annotated[str, Field(min_length=1)] | None = key(
        "File for a Chrome/Perfetto trace, with a row per lane, written at the end: "
        "the newest 250,000 operations, or more. Of several ranks the first writes it, and another "
        "beside it: trace.rank1.json beside trace.json. Left out: none."
    )
    async_checkpoint: bool = key(
        "Whether save_checkpoint returns at once and its files are written while the "
        "next steps compute. The next save, load or destroy waits for them.",
        default=False,
    )
    rank_timeout_s: Annotated[float, Field(gt=0)] | None = key(
        "Of several ranks: how long a rank waits for the others in initialize and in each "
        "collective before it ends, in seconds: the time-out of torch's process groups. A rank "
        "that ends is noticed at once. Left out: DeepSpeed's time-out, 600, or the environment "
        "variable DEEPSPEED_TIMEOUT in minutes."
    )
    emulated: EmulatedConfig = Field(
        default_factory=EmulatedConfig,
        description="Settings of the emulated device; contradicts device cuda.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> StrongholdConfig:
        if self.window is not None and self.prefetch is not None and self.prefetch >= self.window:
            raise ValueError(
                f"{SECTION}.prefetch: got {self.prefetch}, expected less than {SECTION}.window "
                f"({self.window}): a layer that is fetched needs a slot beside the one in use. "
                "Lower prefetch or raise window"
            )
        if (self.streams or 1) > 1 and self.chunk is None:
            raise ValueError(
                f"{SECTION}.streams: got {self.streams}, but without {SECTION}.chunk a batch is "
                "one piece of work, which no streams can share. Set chunk to the sequences that "
                "go through a block together, or leave streams out"
            )
        if self.kept_activations is not None and not isinstance(self.activations, str):
            raise ValueError(
                f"{SECTION}.kept_activations: says which blocks differ from {SECTION}.activations, "
                f"got {self.activations!r}, expected one word. Say it there, or leave both out"
            )
        if self.device == "cuda" and "emulated" in self.model_fields_set:
            raise ValueError(
                f'{SECTION}.emulated: is for device "emulated", and {SECTION}.device is "cuda". '
                "Remove one of the two"
            )
        return self


def parse_section(config: Mapping[str, Any]) -> StrongholdConfig:
    """The config's section, checked. Raises one ConfigError: each wrong key, got and expected."""
    try:
        return StrongholdConfig.model_validate(dict(section_of(config) or {}))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def describe_type(schema: Mapping[str, Any]) -> str:
    """One property of a JSON schema in words, such as 'an integer >= 1'."""
    if "anyOf" in schema:
        return " or ".join(
            describe_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null"
        )
    if "enum" in schema or "const" in schema:
        *rest, last = [f'"{word}"' for word in schema.get("enum", [schema.get("const")])]
        return f"{', '.join(rest)} or {last}" if rest else last
    if "additionalProperties" in schema and "propertyNames" in schema:
        return "an object of such names with numbers of blocks"
    if "$ref" in schema:
        return "an object"
    if {"minimum", "maximum"} <= schema.keys():
        return f"an {schema['type']} from {schema['minimum']} to {schema['maximum']}"
    kind = schema.get("type")
    if kind == "array":
        return f"a list of at least one {describe_type(schema['items']).removeprefix('a ')}"
    words = {
        "boolean": "true or false",
        "integer": "an integer",
        "number": "a number",
        "string": "a string",
        "bytes": BYTES_EXPECTED,
        "block": BLOCK_EXPECTED,
    }[str(kind)]
    if "minimum" in schema:
        words += f" >= {schema['minimum']}"
    if "exclusiveMinimum" in schema:
        words += f" > {schema['exclusiveMinimum']}"
    return words


def _explain(error: ValidationError) -> str:
    # A union reports every branch that failed: one line per key is enough.
    lines: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        path = _key_path(detail["loc"])
        lines.setdefault(
            ".".join((SECTION, *path)) if path else detail["msg"], _explain_one(path, detail)
        )
    return "\n".join(lines.values())


def nested_section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a key that holds a section of its own, else None."""
    for choice in (field.annotation, *get_args(field.annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def _key_path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys of the config in a pydantic location, without the names of the union's branches."""
    path: list[str] = []
    model: type[BaseModel] | None = StrongholdConfig
    for part in location:
        if model is None:
            break
        path.append(str(part))
        field = model.model_fields.get(path[-1])
        model = None if field is None else nested_section(field)
    return tuple(path)


def _explain_one(path: tuple[str, ...], detail: Any) -> str:
    if not path:
        return f"{detail['msg'].removeprefix('Value error, ')}."
    model: type[BaseModel] = StrongholdConfig
    for key in path[:-1]:
        model = nested_section(model.model_fields[key]) or model
    dotted = ".".join((SECTION, *path))
    if detail["type"] == "extra_forbidden":
        known = list(model.model_fields)
        hint = did_you_mean(path[-1], known) or f" Known keys: {', '.join(known)}."
        return f"{dotted}: unknown key.{hint}"
    schema = model.model_json_schema()["properties"][path[-1]]
    return f"{dotted}: got {detail['input']!r}, expected {describe_type(schema)}."


# -- DeepSpeed's words for NVMe -------------------------------------------------------------------
def resolve_nvme(
    section: StrongholdConfig, zero: DeepSpeedZeroConfig, aio: Mapping[str, Any] | None
) -> StrongholdConfig:
    """The section with the effective `nvme`: None where nothing asks for it, else with a path.
    `zero` and `aio` are DeepSpeed's reading of its keys: offload_optimizer on nvme lets moments and
    masters spill, offload_param everything; their two paths are striped over. ConfigError for a
    contradiction, and for no path."""
    parts = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    offloads = {
        f"zero_optimization.{key}": part
        for key, part in parts.items()
        if part is not None and part.device == "nvme"
    }
    if section.nvme is None and not offloads:
        return section
    ours = section.nvme or NvmeConfig()
    problems, update = [], {}
    for name, key, value in _theirs(offloads, aio or {}):
        given = getattr(ours, name)
        if given is None:
            update[name] = value
        elif given != value and (name != "path" or _directories(given) != _directories(value)):
            problems.append(
                f"{SECTION}.nvme.{name}: got {given!r}, and {key} asks for {value!r}. "
                "Remove one of the two, or make them equal."
            )
    if problems:
        raise ConfigError("\n".join(problems))
    nvme = ours.model_copy(update=update)
    if not nvme.paths:
        key = f"{next(iter(offloads))}.nvme_path" if offloads else f"{SECTION}.nvme.path"
        expected = 'a directory on an NVMe disk, such as "/mnt/nvme0"'
        raise ConfigError(f"{key}: missing, expected {expected}.")
    return section.model_copy(update={"nvme": nvme})


def _theirs(offloads: Mapping[str, Any], aio: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(our key, DeepSpeed's key, value in our terms) of what its sections say."""
    given = {f"{key}.nvme_path": part.nvme_path for key, part in offloads.items()}
    paths = {key: str(path) for key, path in given.items() if path is not None}
    if paths:
        distinct = list(dict.fromkeys(paths.values()))
        yield "path", " and ".join(paths), distinct if len(distinct) > 1 else distinct[0]
    for deepest in list(offloads)[-1:]:
        yield "spill", f"{deepest}.device", "weights" if "param" in deepest else "masters"
    for name, key in (("depth", "queue_depth"), ("block", "block_size")):
        if (value := aio.get(key)) is not None:
            try:
                yield name, f"aio.{key}", getattr(NvmeConfig.model_validate({name: value}), name)
            except ValidationError as error:
                expected = describe_type(NvmeConfig.model_json_schema()["properties"][name])
                raise ConfigError(f"aio.{key}: got {value!r}, expected {expected}.") from error


def _directories(value: str | list[str]) -> set[Path]:
    return {Path(path) for path in ([value] if isinstance(value, str) else value)}
