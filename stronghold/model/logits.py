"""Logits that are never whole: head and loss of a causal language model in chunks of the tokens.

Owns the replacements of a Transformers model's head forward and loss function. The head returns
`Logits`, a tensor with a shape and without memory. The model's loss takes the hidden states from
it, and computes logits, losses and gradients of some tokens at a time. Any other use of `Logits`
computes the whole logits first, and then does what it would do with them. Only these two attributes
of modules change, and `close` restores them. The training thread enters, and autograd's thread.

[Note: four products] One chunk of the tokens takes these steps:
1. Forward computes the chunk's logits and their softmax.
2. Forward multiplies this with the weight: the gradient of the hidden states. It keeps this
   gradient, and drops the logits.
3. Backward computes logits again, of all tokens and some of the vocabulary.
4. Backward multiplies them with the hidden states: rows of the head's gradient. Each row is one
   product, which is rounded once, in its final memory.
That is four products; plain training has three. To add the head's gradient up chunk by chunk would
need a sum in fp32 as large as the head: 2 GiB for 128k words of 4096 numbers. The traffic of this
sum costs as much as the fourth product.

[Note: known] The loss must be Transformers' for causal language models, with the head's result as
its argument. If the model changes its logits before the loss (soft capping, a scale), they become
real. Liger's fused loss takes the head's weight itself, and calls neither the head's forward nor
the loss.
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
# Without the key, logits below this size are whole, so that every bit is the plain model's.
LARGE_BYTES = 1 << 30  # bytes of all logits in fp32
TOKENS = 1024  # tokens of a chunk, without the key

Updates = Callable[[torch.Tensor], int | None]
Age = list[tuple[int, int | None]]
Run = Callable[[nn.Module, Callable[[], torch.Tensor]], torch.Tensor]


def part_of(tokens: int, vocab: int, loss_chunk: int | None) -> int:
    """Return the number of tokens whose logits exist at once; 0: all, in the plain way."""
    if loss_chunk is not None:
        return loss_chunk
    return TOKENS if tokens * vocab * 4 >= LARGE_BYTES else 0


# -- a tensor without memory -----------------------------------------------------------------------
class Logits(torch.Tensor):
    """The logits of a head: (..., vocabulary), computed when their values are used."""

    _hidden: torch.Tensor
    _head: Head
    _age_in_forward: Age
    _computed: torch.Tensor | None

    # Autograd sees every function. The functions that it calls get real logits.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Logits, Logits._compute, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _compute(self) -> torch.Tensor:
        if self._computed is None:
            with torch.no_grad():
                self._computed = self._use(lambda w, b: F.linear(self._hidden, w, b))
        return self._computed

    def _use(self, compute: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        """Call `compute` with the head's weight and bias. ConfigError if they are not those of
        forward."""
        head = self._head.module

        def checked() -> torch.Tensor:
            if self._head.age != self._age_in_forward or head.weight.device != self.device:
                raise ConfigError(
                    f"logits of {list(self.shape)} were not computed in forward, and the head's "
                    "weights have changed since: use outputs.logits before engine.step(), or set "
                    f"{KEY} to 0, so that they are whole"
                )
            return compute(head.weight, head.bias)

        return self._head.run(checked)

    def _whole(self) -> torch.Tensor:
        """Return real logits with the same autograd graph."""
        return torch.Tensor.view_as(self, self)

    # These methods use the memory or the object, and pass no dispatcher.
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


class _Product(torch.autograd.Function):
    """The head's product as a function of autograd, which returns `Logits`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        shape = (*hidden.shape[:-1], weight.size(0))
        logits: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            Logits, shape, dtype=hidden.dtype, device=hidden.device
        )
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.size(-1))
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        hidden_gradient = gradient @ weight if needs_hidden else None
        weight_gradient = None
        if needs_weight:
            weight_gradient = rows.t() @ hidden.reshape(-1, hidden.size(-1))
        bias_gradient = rows.sum(0) if needs_bias else None
        return hidden_gradient, weight_gradient, bias_gradient


class Head:
    """A model's head, with what its engine knows of it: see `LogitsInParts`."""

    def __init__(self, module: nn.Linear, updates: Updates, run: Run) -> None:
        self.module = module
        self._updates, self._run = updates, run

    @property
    def age(self) -> Age:
        """Another value once the weight or the bias has other values."""
        parameters = self.module.parameters(recurse=False)
        return [(parameter._version, self._updates(parameter)) for parameter in parameters]

    def run(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `compute` while the weights are on the device. Autograd may save them."""
        return self._run(self.module, compute)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `Logits` of the hidden states."""
        logits: Logits = _apply_product(hidden, self.module.weight, self.module.bias)
        logits._hidden = hidden
        logits._head, logits._age_in_forward = self, self.age
        logits._computed = None
        return logits


# -- the loss --------------------------------------------------------------------------------------
class _Losses(torch.autograd.Function):
    """The cross-entropy of each token, in fp32; 0 for `ignored` tokens.

    Shapes: `hidden` (tokens, size), `weight` (vocabulary, size), `labels` and `ignored` (tokens,).
    `part` is the number of tokens of a chunk.
    """

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
        num_tokens = hidden.size(0)
        losses: torch.Tensor = hidden.new_empty(num_tokens, dtype=torch.float32)
        highest = torch.empty_like(losses)  # of each token's logits
        logs = torch.empty_like(losses)  # of each token's sum of exponentials
        needs_hidden = ctx.needs_input_grad[0]
        gradient = hidden.new_empty(hidden.shape) if needs_hidden else None
        for begin in range(0, num_tokens, part):
            chunk = slice(begin, begin + part)
            label = labels[chunk, None]
            logits = F.linear(hidden[chunk], weight, bias)
            logits = logits.float()
            highest[chunk] = logits.amax(-1)
            logits.sub_(highest[chunk, None])
            label_logits = logits.gather(1, label)[:, 0]
            logits.exp_()
            sums = logits.sum(-1)
            logs[chunk] = sums.log()
            torch.sub(logs[chunk], label_logits, out=losses[chunk])
            if gradient is not None:
                logits.div_(sums[:, None])
                logits.scatter_add_(1, label, logits.new_full((), -1.0).expand(label.shape))
                torch.mm(logits.to(hidden.dtype), weight, out=gradient[chunk])
            del logits
        losses.masked_fill_(ignored, 0.0)
        ctx.part = part
        needs_head = any(ctx.needs_input_grad[1:3])
        inputs = (hidden, weight, bias, labels, highest, logs) if needs_head else ()
        ctx.save_for_backward(gradient, ignored, *inputs)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: torch.Tensor) -> Any:
        gradient, ignored, *inputs = ctx.saved_tensors
        outer = outer.masked_fill(ignored, 0.0)
        hidden_gradient = None
        if gradient is not None:
            hidden_gradient = (gradient * outer[:, None]).to(gradient.dtype)
        del gradient
        if not inputs:
            return hidden_gradient, None, None, None, None, None
        weight_gradient, bias_gradient = _head_gradients(
            *inputs, outer=outer, part=ctx.part, needs_bias=ctx.needs_input_grad[2]
        )
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _head_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    highest: torch.Tensor,
    logs: torch.Tensor,
    *,
    outer: torch.Tensor,
    part: int,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the head's weight and bias, computed some words at a time.

    `highest` and `logs` are those of forward; `outer` is the gradient of the losses. All three have
    the shape (tokens,).
    """
    num_tokens, vocab = hidden.size(0), weight.size(0)
    # As many logits exist at once as in forward.
    num_words = max(1, min(vocab, part * vocab // max(num_tokens, 1)))
    weight_gradient = torch.empty_like(weight)
    bias_gradient = torch.empty_like(bias) if bias is not None and needs_bias else None
    for begin in range(0, vocab, num_words):
        end = min(begin + num_words, vocab)
        words = slice(begin, end)
        logits = F.linear(hidden, weight[words], None if bias is None else bias[words])
        logits = logits.float()
        logits.sub_(highest[:, None]).sub_(logs[:, None]).exp_()
        # the token's label is one of these words
        has_label = (labels >= begin) & (labels < end)
        column = (labels - begin).clamp_(0, end - begin - 1)
        logits.scatter_add_(1, column[:, None], -has_label.float()[:, None])
        logits.mul_(outer[:, None])
        if bias_gradient is not None:
            bias_gradient[words] = logits.sum(0)
        logits = logits.to(hidden.dtype)
        torch.mm(logits.t(), hidden, out=weight_gradient[words])
        del logits
    return weight_gradient, bias_gradient


_apply_product: Any = _Product.apply
_apply_losses: Any = _Losses.apply


# -- replacements in the model ---------------------------------------------------------------------
class Forward:
    """Replaces a module's `forward` while an engine lives. A copy of the module is without it."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.__self__, self.__name__ = module, "forward"  # as a method has them
        self._run = run
        self.__wrapped__ = getattr(run, "__wrapped__", module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__name__)


class _Loss:
    """Replaces a model's `loss_function`, which is `plain`. A copy of the model has `plain`."""

    def __init__(self, plain: Callable[..., torch.Tensor], loss_chunk: int | None) -> None:
        self._plain = plain
        self._loss_chunk = loss_chunk
        self.num_divided = 0  # calls that computed the loss in chunks

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
        targets = labels if shift_labels is None else shift_labels
        if not isinstance(logits, Logits) or not self._divides(logits, targets, vocab_size):
            return self._plain(
                logits._whole() if isinstance(logits, Logits) else logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **more,
            )
        assert targets is not None
        if shift_labels is None:
            shift_labels = F.pad(targets, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        hidden = logits._hidden.reshape(-1, logits._hidden.size(-1))
        ignored = target == ignore_index
        known = target.masked_fill(ignored, 0)
        part = part_of(hidden.size(0), vocab_size, self._loss_chunk)
        self.num_divided += 1
        losses = logits._use(lambda w, b: _apply_losses(hidden, w, b, known, ignored, part))
        count = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(count, torch.Tensor):
            count = count.to(losses.device)
        return losses.sum() / count

    @staticmethod
    def _divides(logits: Logits, targets: torch.Tensor | None, vocab_size: int) -> bool:
        """Return whether the loss can be computed in chunks."""
        # a caller has read them, and may have written to them
        if logits._computed is not None:
            return False
        if targets is None or vocab_size != logits.size(-1):
            return False
        return targets.numel() * vocab_size == logits.numel()


def _never_updated(weight: torch.Tensor) -> int:
    return 0


def _run_as_it_is(head: nn.Module, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    return compute()


class LogitsInParts:
    """Computes the losses of a model in chunks of the tokens, until `close`.

    That holds for the causal language models in it whose head and loss are known ([Note: known]).

    Arguments:
        model: the user's model.
        loss_chunk: as in the config: tokens of a chunk; 0: never; None: if the logits are large.
        updates: returns how often a parameter was updated. If it returns None for a head's weight,
            this head stays as it is.
        run: called with a head and a function, which it runs while that head's weights are on the
            device.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_chunk: int | None,
        updates: Updates = _never_updated,
        run: Run = _run_as_it_is,
    ) -> None:
        self._loss_chunk = loss_chunk
        self._updates, self._run = updates, run
        self._heads: dict[nn.Module, Forward] = {}
        self._losses: list[tuple[nn.Module, _Loss]] = []
        if loss_chunk != 0:
            for module in model.modules():
                self._replace(module)

    def _replace(self, module: nn.Module) -> None:
        """Replace the loss and the head of `module`, if it is a causal language model with both."""
        plain = _known_loss(module)
        head = _known_head(module) if plain is not None else None
        if plain is None or head is None or self._updates(head.weight) is None:
            return
        if head not in self._heads:  # a model inside this one may have the same head
            if not _is_product(head):
                return
            known = Head(head, self._updates, self._run)
            self._heads[head] = Forward(head, functools.partial(self._forward, known))
            vars(head)["forward"] = self._heads[head]
        if str(getattr(module.forward, "__module__", "")).startswith("liger_kernel"):
            logger.info(
                "%s: liger_kernel computes head and loss in training; %s counts in evaluation",
                type(module).__name__,
                KEY,
            )
        loss = _Loss(plain, self._loss_chunk)
        vars(module)["_loss_function"] = loss
        self._losses.append((module, loss))

    @property
    def num_divided(self) -> int:
        """The number of losses that were computed in chunks."""
        return sum(loss.num_divided for _, loss in self._losses)

    def close(self) -> None:
        """Restore the modules' forward and loss function. Safe to call twice."""
        for head, forward in self._heads.items():
            if vars(head).get("forward") is forward:
                del vars(head)["forward"]
        for module, loss in self._losses:
            if vars(module).get("_loss_function") is loss:
                del vars(module)["_loss_function"]
        self._heads.clear()
        self._losses.clear()

    def _forward(self, head: Head, input: torch.Tensor) -> torch.Tensor:
        if self._divides(head.module, input):
            return head.logits(input)
        return F.linear(input, head.module.weight, head.module.bias)

    def _divides(self, head: nn.Linear, hidden: torch.Tensor) -> bool:
        """Return whether the head's logits of these hidden states are never whole."""
        if torch.compiler.is_compiling():
            return False
        device = hidden.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            return False
        if hidden.dim() < 2 or hidden.dtype is not head.weight.dtype:
            return False
        if head._backward_hooks or head._backward_pre_hooks:
            return False
        every_module = nn.modules.module
        if every_module._global_backward_hooks or every_module._global_backward_pre_hooks:
            return False
        tokens = hidden.numel() // hidden.size(-1)
        return part_of(tokens, head.weight.size(0), self._loss_chunk) > 0


def _known_loss(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return Transformers' loss for causal language models, if the model's class has this loss."""
    is_of_class = isinstance(getattr(type(module), "loss_function", None), property)
    attributes = vars(module)
    if not is_of_class or "_loss_function" in attributes or attributes.get("loss_type") is None:
        return None
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    loss = LOSS_MAPPING.get(attributes["loss_type"])
    return ForCausalLMLoss if loss is ForCausalLMLoss else None


def _known_head(module: nn.Module) -> nn.Linear | None:
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):  # the module has no head
        return None
    return head if isinstance(head, nn.Linear) else None


def _is_product(head: nn.Module) -> bool:
    """Return whether the head's forward is a product with its weight, and nothing else."""
    return (
        type(head).forward is nn.Linear.forward
        and "forward" not in vars(head)
        and "weight" in head._parameters
        and head._compiled_call_impl is None
    )
