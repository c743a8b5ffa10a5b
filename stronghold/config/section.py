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
from pydantic_core import PydanticCustomError

from stronghold.config.source import SECTION
from stronghold.errors import ConfigError, did_you_mean

UNITS = {prefix + "b": 1000**i for i, prefix in enumerate(("", "k", "m", "g", "t"))} | {
    prefix + "ib": 1024**i for i, prefix in enumerate(("k", "m", "g", "t"), start=1)
}
SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)
BYTES_EXPECTED = 'bytes: an integer, "24GB" (1e9 bytes each) or "24GiB" (2**30 bytes each)'


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


Bytes = Annotated[int, BeforeValidator(parse_bytes), WithJsonSchema({"type": "bytes"})]
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
        "what is free.",
    )
    host_memory: Bytes | None = Field(
        default=None, description="Budget of pinned host memory. Left out: what the machine has."
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
    resident_layers: NotNegative | Literal["all"] | None = Field(
        default=None, description="Layers that stay on the GPU and are never streamed."
    )
    cpu_threads: Positive | None = Field(
        default=None,
        description="Threads of the CPU optimizer. Left out: the cores that torch does not use.",
    )
    layers: str | Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="Full name of the ModuleList that holds the repeated blocks, or a list of "
        "names for several stacks. Left out: found by the model's class, then by structure.",
    )
    trace: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="File for a Chrome/Perfetto trace, with a row per lane. Left out: none.",
    )
    async_checkpoint: bool = Field(
        default=False,
        description="Whether save_checkpoint returns at once and its files are written while the "
        "next steps compute. The next save, load or destroy waits for them.",
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
    kind = schema.get("type")
    if kind == "array":
        return f"a list of at least one {describe_type(schema['items']).removeprefix('a ')}"
    words = {
        "boolean": "true or false",
        "integer": "an integer",
        "number": "a number",
        "string": "a string",
        "bytes": BYTES_EXPECTED,
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


def _key_path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys of the config in a pydantic location, without the names of the union's branches."""
    path: list[str] = []
    model: type[BaseModel] = StrongholdConfig
    for part in location:
        path.append(str(part))
        if not (isinstance(part, str) and part in model.model_fields):
            break
        annotation = model.model_fields[part].annotation
        nested = [
            t
            for t in (annotation, *get_args(annotation))
            if isinstance(t, type) and issubclass(t, BaseModel)
        ]
        if not nested:
            break
        model = nested[0]
    return tuple(path)


def _explain_one(path: tuple[str, ...], detail: Any) -> str:
    if not path:
        return f"{detail['msg']}."
    model, key = (
        (EmulatedConfig, f"{SECTION}.{path[0]}") if len(path) > 1 else (StrongholdConfig, SECTION)
    )
    dotted = f"{key}.{path[-1]}"
    if detail["type"] == "extra_forbidden":
        known = list(model.model_fields)
        hint = did_you_mean(path[-1], known) or f" Known keys: {', '.join(known)}."
        return f"{dotted}: unknown key.{hint}"
    schema = model.model_json_schema()["properties"][path[-1]]
    return f"{dotted}: got {detail['input']!r}, expected {describe_type(schema)}."
