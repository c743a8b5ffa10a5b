"""The `"stronghold"` section of the config: its keys, types and meanings, and their errors.

Owns the schema: the error messages and docs/config.md are both made from it. A key that is left
out, null or "auto" is derived later by the plan. Frozen once read. No device, no torch, no
DeepSpeed is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args

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
from pydantic_core import PydanticCustomError

from stronghold.config.source import SECTION
from stronghold.errors import ConfigError, did_you_mean

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
    """Bytes from an integer, or from a number with a unit in any case.

    Units are B, kB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (of 1024). Raises ValueError
    where the value is not positive, has no unit, or has one that means two things ("24G").
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

    poison: bool = Field(
        default=True,
        description="Fill a slot with NaN when it is released, so that a use after release shows.",
    )
    jitter_s: float = Field(
        default=0.0,
        ge=0,
        description="Largest random delay before each operation on a lane, in seconds.",
    )
    seed: NotNegative = Field(default=0, description="Seed of the random delays.")
    link_gbps: float | None = Field(
        default=None,
        gt=0,
        description="Pace of each direction of the link between host and device, in 1e9 bytes per "
        "second. Left out: as fast as memory copies.",
    )
    update_gbps: float | None = Field(
        default=None,
        gt=0,
        description="Pace of the CPU optimizer, in 1e9 bytes of host memory per second. Left out: "
        "as fast as it is.",
    )
    wire_gbps: float | None = Field(
        default=None,
        gt=0,
        description="Pace of weights, and of gradients, that come from other ranks, in 1e9 bytes "
        "per second. Left out: as fast as they come.",
    )
    nvme_gbps: float | None = Field(
        default=None,
        gt=0,
        description="Pace of each direction of the NVMe disks together, in 1e9 bytes per second. "
        "Left out: as fast as the files are.",
    )


class NvmeConfig(_Section):
    """Where state goes that RAM cannot hold, and how it is read and written."""

    path: Name | Annotated[list[Name], Field(min_length=1)] | None = Field(
        default=None,
        description="Directory on an NVMe disk, or a list of them on several, over which the state "
        "is striped by their measured rates. Left out: DeepSpeed's nvme_path.",
    )
    capacity: Bytes | None = Field(
        default=None,
        description="Most bytes of the files together, of all ranks of a node. Left out: what is "
        "free.",
    )
    spill: Literal["moments", "masters", "weights"] | None = Field(
        default=None,
        description="What lies on NVMe even where RAM could hold it: Adam's moments; with "
        '"masters" also what makes the weights fp32 masters; with "weights" everything (on one GPU '
        "alone). Left out: what host_memory cannot hold, in this order: of the last layers first, "
        "or, where updates begin in backward (no clipping, no overflow check), of layers spread "
        "evenly.",
    )
    engine: Literal["io_uring", "threads"] | None = Field(
        default=None,
        description="How files are read and written. Left out: io_uring where the kernel permits "
        "it, else threads.",
    )
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] | None = Field(
        default=None,
        description="Blocks in flight on each disk and in each direction. Left out: 16.",
    )
    block: Block | None = Field(
        default=None, description="Bytes of one request to the disk. Left out: 1 MiB."
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories; none before DeepSpeed's keys are read as well."""
        if self.path is None:
            return ()
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


class StrongholdConfig(_Section):
    """The section as the user wrote it: None is a key that was left out."""

    enabled: bool = Field(
        default=True,
        description="Whether this engine is used. With false, DeepSpeed itself runs the program.",
    )
    device: Literal["cuda", "emulated"] | None = Field(
        default=None,
        description="Where layers compute. Left out: CUDA where there is a GPU, else the emulated "
        "device, which is CPU tensors with a thread per lane and an enforced budget.",
    )
    gpu_memory: Bytes | None = Field(
        default=None,
        description="Budget of GPU memory for weights, gradients and resident layers. Left out: "
        "half of what is free, and once the first steps have shown what activations take, nine "
        "tenths with these. On the emulated device: no limit.",
    )
    host_memory: Bytes | None = Field(
        default=None,
        description="Budget of host memory for weights, masters, moments and gradients, of each "
        "rank. Left out: what is available when the engine is made, with what the model takes "
        "then; of several ranks on a node each has an equal part.",
    )
    window: Positive | None = Field(
        default=None,
        description="Weight slots on the GPU: the number of layers that can be there at once.",
    )
    prefetch: NotNegative | None = Field(
        default=None,
        description="How many layers ahead of compute weights are fetched. Less than the window.",
    )
    activations: Literal["keep", "offload", "recompute"] | None = Field(
        default=None,
        description="What happens to what autograd saves in forward: it stays on the GPU, goes to "
        "the host and comes back, or is computed again in backward.",
    )
    kept_activations: NotNegative | None = Field(
        default=None,
        description="How many of the last blocks keep what they save on the GPU, although "
        "activations says otherwise: backward needs theirs first.",
    )
    resident_layers: NotNegative | Literal["all"] | None = Field(
        default=None, description="Layers that stay on the GPU and are never streamed."
    )
    resident_updates: Literal["gpu", "host"] | None = Field(
        default=None,
        description="Where layers that stay on the GPU are updated: there, with masters and "
        "moments beside them and nothing on the host, or on the host, from which they are fetched "
        "each step. When every layer stays and is updated there, and activations are kept, the "
        "model is whole: nothing of the engine is on its path.",
    )
    deferred_layers: NotNegative | None = Field(
        default=None,
        description="How many blocks are updated while the next forward runs, where updates do not "
        "wait for the end of the step (gradient_clipping 0, no overflow check): their "
        "gradients are held on the host until then, and where updates take longer than backward a "
        "step takes less. Blocks with state on NVMe come first. Left out: by simulation, once the "
        "first steps are measured.",
    )
    cpu_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = Field(
        default=None,
        description="Threads of the CPU optimizer. Left out: the cores that torch does not use.",
    )
    nvme: NvmeConfig | None = Field(
        default=None,
        description="A third tier for the state that host_memory cannot hold. Left out: none, "
        "unless DeepSpeed's offload keys ask for it.",
    )
    layers: str | Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="Full name of the ModuleList that holds the repeated blocks, or a list of "
        "names for several stacks. Left out: found by the model's class, then by structure.",
    )
    trace: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="File for a Chrome/Perfetto trace, with a row per lane, written at the end: "
        "the newest 250,000 operations, or more. Of several ranks the first writes it, and another "
        "beside it: trace.rank1.json beside trace.json. Left out: none.",
    )
    async_checkpoint: bool = Field(
        default=False,
        description="Whether save_checkpoint returns at once and its files are written while the "
        "next steps compute. The next save, load or destroy waits for them.",
    )
    rank_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Of several ranks: how long one may give no sign of life before the others end "
        "with its name, in seconds.",
    )
    emulated: EmulatedConfig = Field(
        default_factory=EmulatedConfig,
        description="Settings of the emulated device; contradicts device cuda.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> StrongholdConfig:
        if self.window is not None and self.prefetch is not None and self.prefetch >= self.window:
            raise PydanticCustomError(
                "contradiction",
                "{section}.prefetch: got {prefetch}, expected less than {section}.window "
                "({window}): a layer that is fetched needs a slot beside the one in use. "
                "Lower prefetch or raise window",
                {"section": SECTION, "prefetch": self.prefetch, "window": self.window},
            )
        if self.kept_activations is not None and self.activations is None:
            raise PydanticCustomError(
                "contradiction",
                "{section}.kept_activations: says which blocks differ from {section}.activations, "
                "which is left out. Add activations, or leave both out",
                {"section": SECTION},
            )
        if self.device == "cuda" and "emulated" in self.model_fields_set:
            raise PydanticCustomError(
                "contradiction",
                '{section}.emulated: is for device "emulated", and {section}.device is "cuda". '
                "Remove one of the two",
                {"section": SECTION},
            )
        return self


def parse_section(section: object) -> StrongholdConfig:
    """The checked section. Raises one ConfigError: each wrong key, got and expected."""
    if isinstance(section, bool):  # "stronghold": true is short for an empty object
        section = {"enabled": section}
    if section is None or section == "auto":
        section = {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'{SECTION}: got {section!r}, expected an object such as {{"enabled": true}}.'
        )
    try:
        return StrongholdConfig.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def parse_nvme_value(name: str, value: object, key: str) -> Any:
    """What `nvme.<name>` makes of a value that stands under another `key`. Raises ConfigError."""
    try:
        return getattr(NvmeConfig.model_validate({name: value}), name)
    except ValidationError as error:
        expected = describe_type(NvmeConfig.model_json_schema()["properties"][name])
        raise ConfigError(f"{key}: got {value!r}, expected {expected}.") from error


def describe_type(schema: Mapping[str, Any]) -> str:
    """One property of a JSON schema in words, such as 'an integer >= 1'."""
    if "anyOf" in schema:
        return " or ".join(
            describe_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null"
        )
    if "enum" in schema or "const" in schema:
        *rest, last = [f'"{word}"' for word in schema.get("enum", [schema.get("const")])]
        return f"{', '.join(rest)} or {last}" if rest else last
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
        return f"{detail['msg']}."
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
