"""The `"stronghold"` section of the config: its keys, their types and meanings, and its errors.

Owns the schema, from which error messages and docs/config.md are made. Owns the one reading of all
keys about NVMe, also those of DeepSpeed's offload sections. A key that is left out, null or
"auto" is None, and the plan derives it. Settings are frozen. This module imports no device, no
torch and no DeepSpeed. The training thread enters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
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
from stronghold.errors import ConfigError, did_you_mean, with_unknown_key_page

if TYPE_CHECKING:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

UNITS = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)
BYTES_EXPECTED = 'bytes: an integer, "24GB" (1e9 bytes each) or "24GiB" (2**30 bytes each)'

MAX_THREADS = 4096  # must match kernels/src/api.cpp

# Keys that a version had, and what takes their place.
REMOVED_KEYS = {
    f"{SECTION}.deferred_layers": "Every update is either early or behind the clip barrier: delete "
    "it, or set early_layers.",
    f"{SECTION}.base": 'Set "frozen": "nf4", which packs at each start. nvme takes what RAM cannot '
    "hold.",
    f"{SECTION}.numa": "Delete it, and start the process next to the GPU: "
    "numactl --cpunodebind=N --membind=N (nvidia-smi topo -m shows N).",
    f"{SECTION}.emulated.numa_node": "Delete it.",
    f"{SECTION}.prefetch": "Every slot but the one in use is fetched ahead: delete it, or set "
    "window.",
    f"{SECTION}.kept_activations": 'Give numbers of blocks in activations: {"recompute": 28, '
    '"keep": 4}.',
    f"{SECTION}.speculation": "Delete it, and set early_layers to 0 for no early updates.",
    f"{SECTION}.nvme.engine": "Delete it: threads read and write files.",
    f"{SECTION}.nvme.depth": "Delete it.",
    f"{SECTION}.nvme.block": "Delete it.",
}


def parse_bytes(value: object) -> int:
    """Parse a size in bytes: an integer, or a number with a unit in any case.

    Units: B, kB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (of 1024). Raises ValueError
    for a size that is not positive, that has no unit, or whose unit has two meanings ("24G").
    """
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


Bytes = Annotated[int, BeforeValidator(parse_bytes), WithJsonSchema({"type": "bytes"})]
Name = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Level = Literal[  # in this order; `plan.cost` defines each
    "keep", "offload", "attention", "attention_offload", "recompute", "recompute_offload"
]


def key(description: str, *, default: Any = None, **limits: Any) -> Any:
    """Declare a key that may be left out. It is `default` then.

    None as the default: the plan derives the value. `limits`: bounds, as pydantic names them.
    """
    return Field(default=default, description=description, **limits)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, data: Any) -> Any:
        """Drop keys whose value is null or "auto": they count as left out."""
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None and value != "auto"}


class EmulatedConfig(_Section):
    """The faults and the speed of the emulated device."""

    poison: bool = key(
        "Fill a slot with NaN when it is released, so that a use after the release shows.",
        default=True,
    )
    jitter_s: float = key(
        "Largest random delay before each operation on a lane, in seconds.", default=0.0, ge=0
    )
    seed: NotNegative = key("Seed of the random delays.", default=0)
    link_gbps: float | None = key(
        "Speed of the link between host and device, in each direction, in 1e9 bytes per second. "
        "Left out: the speed of memory copies.",
        gt=0,
    )
    update_gbps: float | None = key(
        "Speed of the CPU optimizer, in 1e9 bytes of host memory per second. Left out: its own "
        "speed.",
        gt=0,
    )
    wire_gbps: float | None = key(
        "Speed of weights and gradients from other ranks, in 1e9 bytes per second. Left out: "
        "their own speed.",
        gt=0,
    )
    nvme_gbps: float | None = key(
        "Speed of all NVMe disks together, in each direction, in 1e9 bytes per second. Left out: "
        "the speed of the files.",
        gt=0,
    )


class NvmeConfig(_Section):
    """Files for the state that RAM cannot hold."""

    path: Name | Annotated[list[Name], Field(min_length=1)] | None = key(
        "Directory on an NVMe disk. Or a list of directories on several disks: state is then "
        "striped over them in equal shares. Left out: DeepSpeed's nvme_path."
    )
    capacity: Bytes | None = key(
        "Most bytes of all files, of all ranks of a node. Left out: the free space."
    )
    spill: Literal["moments", "masters", "weights"] | None = key(
        'State that lies on NVMe even if RAM could hold it. "moments": those of the optimizer. '
        '"masters": also the fp32 masters. "weights": also the weights, on one GPU alone. Left '
        "out: the state that host_memory cannot hold, moments first, then masters, then weights, "
        "of the last layers first. A layer with state on NVMe is not updated early."
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories. Empty until DeepSpeed's keys are read as well."""
        if self.path is None:
            return ()
        if isinstance(self.path, str):
            return (self.path,)
        return tuple(self.path)


class StrongholdConfig(_Section):
    """The section as the user wrote it. None: the key was left out."""

    enabled: bool = key("Use stronghold. With false, DeepSpeed runs the program.", default=True)
    dtypes: Literal["cast", "own"] | None = key(
        'The dtype in which parameters are trained. "cast": all have the precision of the config, '
        'as in DeepSpeed. "own": each keeps its dtype, such as fp32 adapters or routers in a bf16 '
        "model. Frozen int8 and float8 weights, and quantised modules, always keep theirs. Left "
        'out: "own" if a library quantised a part of the model (bitsandbytes, torchao), '
        'else "cast".'
    )
    states: Literal["exact", "lean"] = key(
        'State that the optimizer keeps of a bf16 parameter. "exact": an fp32 master and fp32 '
        'moments, 12 bytes per parameter with two moments, the weight included. "lean": a master '
        "of 24 bits and 8-bit moments, 5.1 bytes. Lean states are deterministic, too, but round: "
        "a master is within 2^-16 of its value, moments are within 1/31. So no plan chooses them. "
        "A learning rate below 2^-17 of a weight cannot move it, and the log names such layers. "
        "Weights in fp16 and fp32 have exact states alone.",
        default="exact",
    )
    frozen: Literal["nf4"] | None = key(
        "Storage format of the frozen weights of linear layers and of fused experts in the "
        'repeated blocks (quantisation of the base). "nf4": 4 bits per weight, as in QLoRA. '
        "The host, the files and the link carry the packed weights, and each use of a layer "
        "decodes them on the GPU. Packing rounds the weights once, so no plan chooses it. "
        "Trainable weights, norms and biases, the embedding, the head and adapters stay as they "
        "came. Left out: frozen weights stay as they came."
    )
    device: Literal["cuda", "emulated"] | None = key(
        'The device on which layers compute. "emulated": CPU tensors, with a thread per lane and '
        "an enforced memory budget. Left out: CUDA if there is a GPU, else the emulated device."
    )
    gpu_memory: Bytes | None = key(
        "Budget of GPU memory for weights, gradients and resident layers. Activations come beside. "
        "Left out: what the first batch's activations leave of nine tenths of the free memory, or "
        "half of it where the plan does not know them. On the emulated device there is no limit."
    )
    batch_tokens: Positive | None = key(
        "Tokens of the largest micro-batch, with padding. The plan leaves room for it. A batch "
        "without room is refused before it runs. Left out: half as many again as the first batch "
        "that trains."
    )
    host_memory: Bytes | None = key(
        "Budget of host memory of each rank, for weights, masters, moments and gradients. Left "
        "out: the available memory at initialize, plus the memory that the model takes by then "
        "(pages of its files take none). "
        "Ranks on one node get equal parts, each less 1 GiB for libraries. The memory of some "
        "virtual machines grows as it is used: set the environment variable "
        "STRONGHOLD_HOST_MEMORY to the bytes that the machine can have."
    )
    window: Positive | None = key(
        "Weight slots on the GPU (prefetch buffers): the number of layers whose weights can be "
        "there at once."
    )
    activations: Level | Annotated[dict[Level, Positive], Field(min_length=1)] | None = key(
        "What happens to the tensors that autograd saves in a block's forward (activation "
        'checkpointing). "keep": they stay on the GPU. "offload": they go to the host and come '
        'back. "recompute": backward computes them again from the inputs of the block. '
        '"attention": as "recompute", but results of the fused attention kernels are kept, so that '
        'attention is not computed twice. "recompute_offload", "attention_offload": the inputs, '
        "and these results, wait on the host. An object gives a number of blocks per word, the "
        'first blocks first: {"recompute": 20, "attention": 8, "keep": 4}. Never changes a bit. '
        'Left out: the fastest by estimate, or "recompute" on a GPU where the plan does not know '
        "the activations."
    )
    chunk: Positive | None = key(
        "Number of sequences of the batch that go through a block together (micro-batches inside "
        "a block). The other sequences follow while the block's weights are there. So a larger "
        "batch costs no more transfers, and no more memory in the blocks. Gradients of chunks are "
        "added in fp32. This changes rounding, so no plan chooses it. Left out: a micro-batch is "
        "one chunk, as PyTorch computes it."
    )
    streams: Positive | None = key(
        "Number of CUDA streams on which the chunks of a layer take turns. Chunks that do not "
        "fill the GPU then share it. Memory is planned for so many chunks at once. A block whose "
        "modules change what they hold is refused. Never changes a bit, unless a block writes "
        'tensors in closures or globals. Needs "chunk". Left out: 1.'
    )
    loss_chunk: NotNegative | None = key(
        "Number of tokens for which head and loss are computed at a time, in causal language "
        "models of Transformers. The logits are never whole in memory, unless the program reads "
        "them. 0 switches this off. Losses differ from the plain model's by the order of a sum, "
        "gradients by rounding. Left out: 1024 if the logits would take 1 GiB or more in fp32, "
        "else all at once, with PyTorch's bits. 1024 tokens of a vocabulary of 128k take 0.75 GiB "
        "in bf16 for a moment. Fewer tokens save little beside a layer's weights, and make the "
        "matrix products small."
    )
    resident_layers: NotNegative | Literal["all"] | None = key(
        "Number of layers that stay on the GPU and are never streamed. They are spread evenly over "
        "the model, the first block among them."
    )
    resident_updates: Literal["gpu", "host"] | None = key(
        'Where the layers that stay on the GPU are updated. "gpu": on the GPU, with masters and '
        'moments beside them and nothing on the host. "host": on the host, and each step fetches '
        'them. Left out: the faster by estimate. A model without repeated blocks: "gpu", if it '
        "fits."
    )
    early_layers: NotNegative | Literal["all"] | None = key(
        "Number of layers that are updated before the norm of all gradients is known (early "
        "updates), spread evenly over the model. Each has its weights, masters and moments twice "
        "in host memory: 12 more bytes per parameter with Adam in bf16. engine.step commits an "
        "early update if the step is not clipped and does not overflow, and updates the layer "
        "again otherwise. The result has the same bits. Left out: none where gradient_clipping is "
        "above 0, since a clipped step makes these updates twice; else as many as pay by estimate "
        "and host_memory allows."
    )
    cpu_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = key(
        "Threads of the CPU optimizer. Left out: the cores that torch does not use, which are all "
        "but one on a GPU."
    )
    nvme: NvmeConfig | None = key(
        "NVMe disks for the state that host_memory cannot hold. Left out: none, unless "
        "DeepSpeed's offload keys ask for them."
    )
    layers: str | Annotated[list[str], Field(min_length=1)] | None = key(
        "Full name of the ModuleList that holds the repeated blocks, or a list of names for "
        "several stacks. Left out: found by the structure of the model. A model without repeated "
        "blocks stays whole on the GPU, with a warning."
    )
    trace: Annotated[str, Field(min_length=1)] | None = key(
        "File for a Chrome/Perfetto trace, with a row per lane, written at the end. It has the "
        "newest 250,000 operations at least. Each rank writes a file: trace.json, "
        "trace.rank1.json, ... Left out: no trace."
    )
    async_checkpoint: bool = key(
        "Return from save_checkpoint at once, and write its files while the next steps compute. "
        "The next save, load or destroy waits for them.",
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
        description='Settings of the emulated device. An error with device "cuda".',
    )

    @model_validator(mode="after")
    def _consistent(self) -> StrongholdConfig:
        if (self.streams or 1) > 1 and self.chunk is None:
            raise ValueError(
                f"{SECTION}.streams: got {self.streams}, but without {SECTION}.chunk a batch is "
                "one piece of work, which streams cannot share. Set chunk to the number of "
                "sequences that go through a block together, or leave streams out"
            )
        if self.device == "cuda" and "emulated" in self.model_fields_set:
            raise ValueError(
                f"{SECTION}.emulated: got settings of the emulated device, and {SECTION}.device is "
                '"cuda". Remove one of the two'
            )
        return self


def parse_section(config: Mapping[str, Any]) -> StrongholdConfig:
    """Parse and check the config's section.

    Raises one ConfigError with a line for each wrong key: the value, and the expectation.
    """
    try:
        return StrongholdConfig.model_validate(dict(section_of(config) or {}))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def describe_type(schema: Mapping[str, Any]) -> str:
    """Describe one property of a JSON schema in words, such as 'an integer >= 1'."""
    if "anyOf" in schema:
        choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        return " or ".join(map(describe_type, choices))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        *others, last = [f'"{value}"' for value in values]
        return f"{', '.join(others)} or {last}" if others else last
    if "additionalProperties" in schema and "propertyNames" in schema:
        return "an object of such names with numbers of blocks"
    if "$ref" in schema:
        return "an object"
    if {"minimum", "maximum"} <= schema.keys():
        return f"an {schema['type']} from {schema['minimum']} to {schema['maximum']}"
    type_name = schema.get("type")
    if type_name == "array":
        item = describe_type(schema["items"]).removeprefix("a ")
        return f"a list of at least one {item}"
    words = {
        "boolean": "true or false",
        "integer": "an integer",
        "number": "a number",
        "string": "a string",
        "bytes": BYTES_EXPECTED,
    }[str(type_name)]
    if "minimum" in schema:
        words += f" >= {schema['minimum']}"
    if "exclusiveMinimum" in schema:
        words += f" > {schema['exclusiveMinimum']}"
    return words


def _explain(error: ValidationError) -> str:
    """One line for each wrong key."""
    # A union reports every branch that failed, and the first line of a key is enough.
    lines: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        path = _key_path(detail["loc"])
        key = ".".join((SECTION, *path)) if path else detail["msg"]
        lines.setdefault(key, _explain_one(path, detail))
    return with_unknown_key_page("\n".join(lines.values()))


def nested_section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a key that holds a nested section, or None."""
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _key_path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys of the config in a pydantic location, without the names of a union's branches."""
    path: list[str] = []
    model: type[BaseModel] | None = StrongholdConfig
    for step in location:
        if model is None:
            break
        path.append(str(step))
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
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        known = list(model.model_fields)
        if dotted in REMOVED_KEYS:
            return f"{dotted}: stronghold removed this key. {REMOVED_KEYS[dotted]}"
        hint = did_you_mean(path[-1], known) or f" Known keys: {', '.join(known)}."
        return f"{dotted}: unknown key.{hint}"
    schema = model.model_json_schema()["properties"][path[-1]]
    return f"{dotted}: got {detail['input']!r}, expected {describe_type(schema)}."


# -- DeepSpeed's keys for NVMe --------------------------------------------------------------------
def resolve_nvme(section: StrongholdConfig, zero: DeepSpeedZeroConfig) -> StrongholdConfig:
    """Return the section with the effective `nvme`: None if no key asks for it, else with a path.

    zero  DeepSpeed's reading of its keys. They fill in what the section leaves out:
          offload_optimizer on nvme lets moments and masters spill, offload_param lets everything.
          State is striped over their two paths

    ConfigError for a missing path.
    """
    asked = {
        name: offload
        for name in ("offload_optimizer", "offload_param")
        if (offload := getattr(zero, name)) is not None and offload.device == "nvme"
    }
    if section.nvme is None and not asked:
        return section
    nvme = section.nvme or NvmeConfig()
    paths = dict.fromkeys(str(offload.nvme_path) for offload in asked.values() if offload.nvme_path)
    path, spill = nvme.path or [*paths] or None, nvme.spill
    if path is None:
        key = (
            f"zero_optimization.{next(iter(asked))}.nvme_path" if asked else f"{SECTION}.nvme.path"
        )
        raise ConfigError(
            f'{key}: missing, expected a directory on an NVMe disk, such as "/mnt/nvme0".'
        )
    if spill is None and asked:
        spill = "weights" if "offload_param" in asked else "masters"
    return section.model_copy(
        update={"nvme": nvme.model_copy(update={"path": path, "spill": spill})}
    )
