"""Logits that are never whole: head and loss of a causal language model in parts of the tokens.

Owns what stands in a Transformers model for its head's forward and its loss function. The head
returns `Logits`, a tensor that has a shape and no memory; the model's loss takes the hidden states
from it, and computes logits, losses and gradients of some tokens at a time. Whatever else is done
with it is done with logits that are computed then, as if they had been there. Changes no module but
for these two attributes, which `close` takes back. The training thread enters, and autograd's.

[Note: four products] Of a part of the tokens forward has all logits: the softmax, so the gradient
of the hidden states, is one product away, and is kept in place of the logits. The head's own
gradient is a sum over all tokens: backward computes the logits again, of all tokens and part of the
vocabulary, so that every row of the gradient is one product, rounded once, in the memory where it
is to be. That is four products where plain training has three. Added up part by part the gradient
would need a sum in fp32 as large as the head, 2 GiB for 128k words of 4096 numbers, and its memory
traffic costs as much as the fourth product.

[Note: known] The loss must be Transformers' own for causal language models, given what the head
returned: what a model does to its logits in between (soft capping, a scale) makes them real.
Liger's fused loss takes the head's weight itself, and neither its forward nor the loss is called.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from stronghold.errors import ConfigError

logger = logging.getLogger("stronghold")

KEY = "stronghold.loss_chunk"
# Without the key smaller logits are computed whole, so that every bit is the plain model's.
LARGE_BYTES = 1 << 30  # of all logits in fp32
TOKENS = 1024  # of a part, without the key


def part_of(tokens: int, vocab: int, loss_chunk: int | None) -> int:
    """How many tokens' logits there are at once; 0 for all, in the plain way."""
    if loss_chunk is not None:
        return loss_chunk
    return TOKENS if tokens * vocab * 4 >= LARGE_BYTES else 0


# -- a tensor without memory -----------------------------------------------------------------------
class Logits(torch.Tensor):
    """What a head gives for hidden states, computed when it is asked for."""

    _hidden: torch.Tensor
    _weight: torch.Tensor
    _bias: torch.Tensor | None
    _age: Callable[[], Any]
    _age_in_forward: Any
    _computed: torch.Tensor | None

    # Autograd sees every function; only what it calls underneath is given real logits.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Logits, Logits._compute, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _compute(self) -> torch.Tensor:
        if self._computed is None:
            weight = self._weight
            if self._age() != self._age_in_forward or weight.device != self.device:
                raise ConfigError(
                    f"logits of {list(self.shape)} were not computed in forward, and the head's "
                    "weight has changed since: read outputs.logits before engine.step(), or set "
                    f"{KEY} to 0, so that they are whole"
                )
            with torch.no_grad():
                self._computed = F.linear(self._hidden, weight, self._bias)
        return self._computed

    def _whole(self) -> torch.Tensor:
        """Real logits with the same graph."""
        return torch.Tensor.view_as(self, self)

    # What is asked of the memory, or of the object, comes to no dispatcher.
    def numpy(self, *, force: bool = False) -> Any:
        return self._whole().numpy(force=force)

    def tolist(self) -> Any:
        return self._compute().tolist()

    def data_ptr(self) -> int:
        return self._compute().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._compute().untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        return self._whole().__dlpack__(**options)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self._whole())

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._whole(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole().__reduce_ex__(protocol)

    def retain_grad(self) -> None:
        self._refuse("retain_grad")

    def register_hook(self, hook: Any) -> Any:
        self._refuse("register_hook")

    def _refuse(self, name: str) -> None:
        raise ConfigError(
            f"logits.{name}: head and loss are computed in parts of the tokens, and the loss's "
            f"gradient does not come through the logits. Set {KEY} to 0"
        )


class _Head(torch.autograd.Function):
    """The head, for all that asks for logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            Logits,
            (*hidden.shape[:-1], weight.size(0)),
            dtype=hidden.dtype,
            device=hidden.device,
        )
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.size(-1))
        of_hidden, of_weight, of_bias = ctx.needs_input_grad
        return (
            gradient @ weight if of_hidden else None,
            rows.t() @ hidden.reshape(-1, hidden.size(-1)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _lazy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    age: Callable[[], Any],
) -> torch.Tensor:
    """`age` is another one when the weight has other values."""
    logits: Logits = _apply_head(hidden, weight, bias)
    logits._hidden, logits._weight, logits._bias = hidden, weight, bias
    logits._age, logits._age_in_forward = age, age()
    logits._computed = None
    return logits


# -- the loss --------------------------------------------------------------------------------------
class _Losses(torch.autograd.Function):
    """Cross-entropy in fp32 of each token (`hidden`: tokens x size); 0 where `ignored`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        ignored: torch.Tensor,
        part: int,
    ) -> torch.Tensor:
        of_hidden = ctx.needs_input_grad[0]
        tokens = hidden.size(0)
        losses: torch.Tensor = hidden.new_empty(tokens, dtype=torch.float32)
        highest, logs = torch.empty_like(losses), torch.empty_like(losses)
        gradient = hidden.new_empty(hidden.shape) if of_hidden else None
        for begin in range(0, tokens, part):
            of = slice(begin, begin + part)
            label = labels[of, None]
            logits = F.linear(hidden[of], weight, bias)
            logits = logits.float()
            highest[of] = logits.amax(-1)
            logits.sub_(highest[of, None])
            own = logits.gather(1, label)[:, 0]
            logits.exp_()
            sums = logits.sum(-1)
            logs[of] = sums.log()
            torch.sub(logs[of], own, out=losses[of])
            if gradient is not None:
                logits.div_(sums[:, None])
                logits.scatter_add_(1, label, logits.new_full((), -1.0).expand(label.shape))
                torch.mm(logits.to(hidden.dtype), weight, out=gradient[of])
            del logits
        losses.masked_fill_(ignored, 0.0)
        ctx.part = part
        needed = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(
            gradient,
            ignored,
            *((hidden, weight, bias, labels, highest, logs) if needed else ()),
        )
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: torch.Tensor) -> Any:
        gradient, ignored, *rest = ctx.saved_tensors
        outer = outer.masked_fill(ignored, 0.0)
        of_hidden = None
        if gradient is not None:
            of_hidden = (gradient * outer[:, None]).to(gradient.dtype)
        del gradient
        if not rest:
            return (of_hidden,) + (None,) * 5
        found = _of_weight(*rest, outer=outer, part=ctx.part, of_bias=ctx.needs_input_grad[2])
        return (of_hidden, *found, None, None, None)


def _of_weight(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    highest: torch.Tensor,
    logs: torch.Tensor,
    *,
    outer: torch.Tensor,
    part: int,
    of_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of the head's weight and bias, some words after the others."""
    tokens, vocab = hidden.size(0), weight.size(0)
    words = max(1, min(vocab, part * vocab // max(tokens, 1)))  # as many logits as in forward
    found = torch.empty_like(weight)
    found_bias = torch.empty_like(bias) if bias is not None and of_bias else None
    for begin in range(0, vocab, words):
        of = slice(begin, min(begin + words, vocab))
        logits = F.linear(hidden, weight[of], None if bias is None else bias[of])
        logits = logits.float()
        logits.sub_(highest[:, None]).sub_(logs[:, None]).exp_()
        here = (labels >= of.start) & (labels < of.stop)
        column = (labels - of.start).clamp_(0, of.stop - of.start - 1)
        logits.scatter_add_(1, column[:, None], -here.float()[:, None])
        logits.mul_(outer[:, None])
        if found_bias is not None:
            found_bias[of] = logits.sum(0)
        logits = logits.to(hidden.dtype)
        torch.mm(logits.t(), hidden, out=found[of])
        del logits
    return found, found_bias


_apply_head: Any = _Head.apply
_apply_losses: Any = _Losses.apply


# -- what stands in the model ----------------------------------------------------------------------
class Forward:
    """Stands for a module's `forward` while an engine lives; a copy of the module has its own."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module = module
        self._run = run
        self.__wrapped__ = getattr(run, "__wrapped__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")


class _Loss:
    """Stands for a model's `loss_function`, which is `plain`; a copy of the model has that."""

    def __init__(self, plain: Callable[..., torch.Tensor], loss_chunk: int | None) -> None:
        self._plain = plain
        self._loss_chunk = loss_chunk
        self.num_divided = 0  # calls that were computed in parts

    def __reduce__(self) -> Any:
        return functools.partial, (self._plain,)

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        given = labels if shift_labels is None else shift_labels
        if (
            not isinstance(logits, Logits)
            or logits._computed is not None  # somebody has read, and may have written them
            or vocab_size != logits.size(-1)
            or given is None
            or given.numel() * vocab_size != logits.numel()
        ):
            return self._plain(
                logits._whole() if isinstance(logits, Logits) else logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **more,
            )
        if shift_labels is None:
            shift_labels = F.pad(given, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        hidden = logits._hidden.reshape(-1, logits._hidden.size(-1))
        ignored = target == ignore_index
        self.num_divided += 1
        losses = _apply_losses(
            hidden,
            logits._weight,
            logits._bias,
            target.masked_fill(ignored, 0),
            ignored,
            part_of(hidden.size(0), vocab_size, self._loss_chunk),
        )
        count = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(count, torch.Tensor):
            count = count.to(losses.device)
        return losses.sum() / count  # type: ignore[no-any-return]


class LogitsInParts:
    """Of one model, until `close`: its causal language models, where the head and the loss are
    known. `loss_chunk` as in the config. `updates`: how often a head's weight was updated, None for
    one whose head is left alone."""

    def __init__(
        self,
        model: nn.Module,
        loss_chunk: int | None,
        updates: Callable[[torch.Tensor], int | None] = lambda _: 0,
    ) -> None:
        self._loss_chunk = loss_chunk
        self._updates = updates
        self._heads: dict[nn.Module, Forward] = {}
        self._losses: list[tuple[nn.Module, _Loss]] = []
        for part in model.modules() if loss_chunk != 0 else ():
            plain = _known_loss(part)
            head = _known_head(part) if plain is not None else None
            if plain is None or head is None or updates(head.weight) is None:
                continue
            if head not in self._heads:  # else: of a model inside this one, too
                if not _is_product(head):
                    continue
                self._heads[head] = Forward(head, functools.partial(self._forward, head))
                vars(head)["forward"] = self._heads[head]
            if str(getattr(part.forward, "__module__", "")).startswith("liger_kernel"):
                logger.info(
                    "%s: liger_kernel computes head and loss in training; %s counts in evaluation",
                    type(part).__name__,
                    KEY,
                )
            loss = _Loss(plain, loss_chunk)
            vars(part)["_loss_function"] = loss
            self._losses.append((part, loss))

    @property
    def num_divided(self) -> int:
        """How many losses were computed in parts."""
        return sum(loss.num_divided for _, loss in self._losses)

    def close(self) -> None:
        """Give the modules back what they had. Safe to call twice."""
        for head, forward in self._heads.items():
            if vars(head).get("forward") is forward:
                del vars(head)["forward"]
        for part, loss in self._losses:
            if vars(part).get("_loss_function") is loss:
                del vars(part)["_loss_function"]
        self._heads.clear()
        self._losses.clear()

    def _forward(self, head: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        if self._divides(head, input):
            weight, updates = head.weight, self._updates
            return _lazy(input, weight, head.bias, lambda: (weight._version, updates(weight)))
        return F.linear(input, head.weight, head.bias)

    def _divides(self, head: nn.Linear, hidden: torch.Tensor) -> bool:
        device = hidden.device.type
        if torch.compiler.is_compiling() or (
            device != "meta" and torch.is_autocast_enabled(device)
        ):
            return False
        if hidden.dim() < 2 or hidden.dtype is not head.weight.dtype:
            return False
        every = nn.modules.module
        if (
            head._backward_hooks
            or head._backward_pre_hooks
            or every._global_backward_hooks
            or every._global_backward_pre_hooks
        ):
            return False
        tokens = hidden.numel() // hidden.size(-1)
        return part_of(tokens, head.weight.size(0), self._loss_chunk) > 0


def _known_loss(part: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Transformers' own for causal language models, where the model has it by its class."""
    by_class = isinstance(getattr(type(part), "loss_function", None), property)
    if not by_class or "_loss_function" in vars(part) or vars(part).get("loss_type") is None:
        return None
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    of_type = LOSS_MAPPING.get(vars(part)["loss_type"])
    return ForCausalLMLoss if of_type is ForCausalLMLoss else None


def _known_head(part: nn.Module) -> nn.Linear | None:
    try:
        head = part.get_output_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):  # has none
        return None
    return head if isinstance(head, nn.Linear) else None


def _is_product(head: nn.Module) -> bool:
    """Whether its forward is a product with its weight, and nothing else."""
    return (
        type(head).forward is nn.Linear.forward
        and "forward" not in vars(head)
        and "weight" in head._parameters
        and head._compiled_call_impl is None
    )
