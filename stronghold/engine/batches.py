"""A step, or an evaluation, of as many micro-batches as an iterator gives: `train_batch` and
`eval_batch`, as on DeepSpeed's pipeline engine.

Owns the iterator over the engine's own data, and the choice to join micro-batches into one batch,
which goes through the blocks chunk by chunk. The training thread alone enters.

[Note: joined] Only where the config has a chunk, every rank's micro-batches have the same names,
shapes and kinds, and as many labels are ignored (below 0, as -100 is) and as many tokens masked in
each: else a mean over the whole is not the mean of the means. Whether the loss is a mean at all is
tried once, without gradients and dropout: of one micro-batch twice it must be what it is of that
one. What else a loss may weigh sequences by is not seen: then the config should have no chunk.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from stronghold.distributed.process_groups import Ranks
from stronghold.errors import ConfigError

logger = logging.getLogger("stronghold")

ALIKE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class Batches:
    """Of one engine; `chunked`: its config has a chunk."""

    def __init__(self, engine: Any, ranks: Ranks, *, chunked: bool) -> None:
        self._engine = engine
        self._ranks = ranks
        self._chunked = chunked
        self._own: Iterator[Any] | None = None
        self._is_mean: bool | None = None  # None: not tried

    def train(self, data: Iterator[Any] | None) -> torch.Tensor:
        """A step; the mean of its losses over micro-batches and ranks."""
        engine = self._engine
        if not torch.is_grad_enabled():
            raise ConfigError("engine.train_batch: gradients are off; use eval_batch")
        if not engine.managed_gradient_accumulation():
            raise ConfigError(
                "engine.train_batch: managed_gradient_accumulation is false, and every engine.step "
                "ends a step: call engine, engine.backward and engine.step, or leave the key out"
            )
        count = engine.gradient_accumulation_steps()
        if engine.micro_steps % count:
            raise ConfigError(
                "engine.train_batch: a step has begun with engine.backward; end it with "
                "engine.step, or throw it away with engine.zero_grad"
            )
        batches = list(itertools.islice(self._source(data), count))
        if len(batches) < count:
            raise StopIteration
        engine.train()
        whole = self._joined(batches)
        if whole is None:
            losses = []
            for batch in batches:
                loss = _loss(_called(engine, batch))
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            return self._mean(losses)
        engine.micro_steps += count - 1  # it is the step's last, and all of it
        loss = _loss(_called(engine, whole))
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        return self._mean([loss.detach()])

    def evaluate(
        self, data: Iterator[Any], count: int, *, keep_logits: bool
    ) -> tuple[torch.Tensor, list[Any]]:
        """The mean of the losses of so many micro-batches, over the ranks, and their logits."""
        engine = self._engine
        engine.train(False)
        losses, logits = [], []
        with torch.no_grad():
            for _ in range(count):
                output = _called(engine, next(data))
                losses.append(_loss(output).detach())
                if keep_logits:
                    logits.append(_logits(output))
        return self._mean(losses), logits

    def _source(self, data: Iterator[Any] | None) -> Iterator[Any]:
        if data is not None:
            return data
        if self._own is None:
            loader = self._engine.training_dataloader
            if loader is None:
                raise ConfigError(
                    "engine.train_batch: no data: pass an iterator, or training_data to "
                    "stronghold.initialize"
                )
            self._own = itertools.chain.from_iterable(itertools.repeat(loader))
        return self._own

    def _mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        mean = total / len(losses)
        if not self._ranks.several:
            return mean
        of_ranks: list[Any] = self._ranks.control.objects(mean.item(), "the mean of losses")
        return torch.full_like(mean, sum(of_ranks) / len(of_ranks))

    # -- joining ----------------------------------------------------------------------------------
    def _joined(self, batches: Sequence[Any]) -> Any:
        """All as one batch, or None ([Note: joined])."""
        if not self._chunked or len(batches) < 2:
            return None
        whole = joined(batches)
        if whole is not None and self._is_mean is None:
            self._is_mean = self._loss_is_mean(batches[0])
            if not self._is_mean:
                logger.warning(
                    "engine.train_batch: the loss of a batch is not the mean of its parts' losses, "
                    "so that micro-batches are not joined; they come one after the other"
                )
        possible = whole is not None and bool(self._is_mean)
        if self._ranks.several:  # they drain, and reduce, equally often
            possible = all(self._ranks.control.objects(possible, "joining a batch"))
        return whole if possible else None

    def _loss_is_mean(self, batch: Any) -> bool:
        engine = self._engine
        modes = [(module, module.training) for module in engine.module.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad(), torch.random.fork_rng():
                once = _loss(_called(engine, batch))
                twice = _loss(_called(engine, joined([batch, batch])))
        finally:
            for module, mode in modes:
                module.training = mode
        limit = ALIKE.get(once.dtype, 2e-2) * once.double().abs().clamp_min(1e-6)
        return bool((once.double() - twice.double()).abs() <= limit)


def joined(batches: Sequence[Any]) -> Any:
    """The micro-batches as one, along the first dimension; None where they do not agree."""
    flat = [tree_flatten(batch) for batch in batches]
    leaves, spec = flat[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors or not tensors[0].dim():
        return None
    batch = tensors[0].size(0)
    found = []
    for column in zip(*(leaves for leaves, _ in flat), strict=False):
        first = column[0]
        if not isinstance(first, torch.Tensor):
            if any(other != first for other in column[1:]):
                return None
            found.append(first)
            continue
        kinds = {(leaf.shape, leaf.dtype, leaf.device) for leaf in column}
        if len(kinds) > 1 or not first.dim() or first.size(0) != batch:
            return None
        if not first.is_floating_point() and len({_ignored(leaf) for leaf in column}) > 1:
            return None
        found.append(torch.cat(list(column)))
    if any(other != spec for _, other in flat[1:]):
        return None
    return tree_unflatten(found, spec)


def _ignored(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many entries are no label, in all and without each row's first, which a causal model's
    loss leaves out; of a mask, how many are masked."""
    if tensor.dtype is not torch.bool and tensor.numel() and int(tensor.max()) > 1:
        masked = 0
    else:
        masked = int((tensor == 0).sum())
    below = (tensor < 0) if tensor.dtype is not torch.bool else torch.zeros_like(tensor)
    return int(below.sum()), int(below[..., 1:].sum()) if below.dim() > 1 else 0, masked


def _called(engine: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, tuple | list) else engine(batch)


def _loss(output: Any) -> torch.Tensor:
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ConfigError(
            f"engine.train_batch: the model returned a {type(output).__name__} without a loss; "
            "expected a scalar, an output whose loss it is, or a tuple that it leads"
        )
    return found


def _logits(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("logits")
    return getattr(output, "logits", output[1] if isinstance(output, tuple | list) else None)
