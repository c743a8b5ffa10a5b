"""The forecast as data: what a run will do, and what bounds it.

Pure: no tensors, no rates; `answer` fills it, `page` prints it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stronghold.plan.limits import BreakEven, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier's peak: `parts` add up to `planned_bytes`, `budget_bytes` is what there is."""

    name: str
    budget_bytes: int
    parts: dict[str, int]

    @property
    def planned_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A predicted step. `shares` are the parts of the step that each resource, in words, is on the
    critical path, the largest first; `busy` each lane's part of it."""

    step_s: float
    tokens_per_s: float
    shares: dict[str, float]
    busy: dict[str, float]

    @property
    def bound(self) -> str:
        """The resource that sets most of the step."""
        return next(iter(self.shares), "nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a change would buy: the predicted step with it, None where it still does not fit."""

    change: str
    step_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The question, as the page repeats it."""

    model: str
    num_parameters: int
    num_blocks: int
    machine: str
    dtype: str
    batch: int
    seq: int
    accumulation: int
    clipping: float
    gpus: int = 1
    nodes: int = 1

    @property
    def tokens(self) -> int:
        """Per optimizer step."""
        return self.batch * self.seq * self.accumulation * self.gpus * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """`refusal` says why nothing fits, and then there is no timing; `notes` are warnings; `config`
    is ready to run."""

    asked: Asked
    refusal: str | None
    notes: tuple[str, ...]
    tiers: tuple[Tier, ...]
    reasons: tuple[str, ...]
    timing: Timing | None
    limits: Limits
    break_even: BreakEven
    gains: tuple[Gain, ...]
    config: dict[str, Any] | None

    @property
    def fits(self) -> bool:
        return self.refusal is None

    def as_json(self) -> dict[str, Any]:
        """Every figure, in the units of its name."""
        figures = {"fits": self.fits, "tokens": self.asked.tokens, **asdict(self)}
        if self.timing is not None:
            figures["timing"]["bound"] = self.timing.bound
        return figures
