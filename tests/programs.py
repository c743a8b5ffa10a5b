"""Programs that nobody wrote: what a user may do with an engine, drawn by a seed, and performed
twice, in plain PyTorch (or, where that is no oracle, with every weight on the device) and by a plan
that the same seed draws. Every loss, norm, weight, master and moment is equal to the bit, or the
engine refuses.

    python -m tests.programs FIRST END

runs these seeds, says what was refused, and prints of each that differs the shortest
program that does. Seeds from `DRAWN` on draw the model, too.
"""

from __future__ import annotations

import collections
import copy
import functools
import logging
import math
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from stronghold.errors import BudgetError, ConfigError, LaneError
from stronghold.model.partition import find_blocks
from stronghold.plan.cost import LEVELS
from tests.conftest import choose_kernels
from tests.laws.test_adapters import CASES
from tests.laws.test_bits import FP32, PLACES, SMALLEST_PIECE
from tests.models import HUGGING_FACE, MODELS, PLAIN, loss_of
from tests.models.drawn import drawn_model
from tests.support.sides import ByEngine, Plain
from tests.support.states import MOMENTS

Action = Callable[[Any, random.Random], Any]  # (side, what chooses)
APART = 1000  # batches from here on are nobody's to train on
DRAWN = 10_000  # seeds from here on draw the model, too


def adapted(name: str) -> Callable[..., Any]:
    def factory(seed: int = 0) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, make_batch = CASES[name]()
        return model.train(), make_batch

    return factory


DROPPING = ("gpt", "torch_transformer", "gpt2", "bert", "t5")
FACTORIES: dict[str, Callable[..., Any]] = {
    **{name: MODELS[name] for name in (*PLAIN, *HUGGING_FACE)},
    **{f"{name} with dropout": functools.partial(MODELS[name], dropout=0.2) for name in DROPPING},
    **{name: adapted(name) for name in CASES},
}
# Transformers' heads that can be computed in parts of the tokens.
CAUSAL = {*HUGGING_FACE, "gpt2 with dropout"} - {"bert", "t5"}


# --- what a program does --------------------------------------------------------------------------


def train(s: Any, r: random.Random) -> None:
    how = r.choice(["engine", "engine", "user", "caller", "half"])
    for _ in range(s.case.accumulation):
        loss = s.next()
        s.backward(loss * 0.5 if how == "half" else loss, by=how)
        s.step()
        s.say("loss", loss)
    outcome(s)


def outcome(s: Any) -> None:
    s.say("norm", "not finite" if s.norm is not None and not math.isfinite(s.norm) else s.norm)
    s.say("applied", s.applied)


def odd_step(s: Any, r: random.Random) -> None:
    """Something between forward and backward of a micro-batch, or before its step."""
    at, what = r.randrange(s.case.accumulation), r.choice(ODD)
    s.say("odd", what)
    for k in range(s.case.accumulation):
        loss = s.next()
        s.say("loss", loss)
        if k == at and what == "no backward":
            s.step()
            continue
        if k == at:
            loss = before_backward(what, s, r, loss)
        s.backward(loss)
        if k == at and what == "gradients":
            gradients(s, r)
        if k == at and what == "read after":
            read(s, r)
        s.step()
    outcome(s)


ODD = ["read", "evaluation", "dropped", "sum", "retained", "two backwards", "penalty"]
ODD += ["gradients", "read after", "no backward"]


def before_backward(what: str, s: Any, r: random.Random, loss: torch.Tensor) -> torch.Tensor:
    """The loss of which backward is to be called."""
    if what == "read":
        read(s, r)
    elif what == "evaluation":
        evaluate(s, r)
    elif what == "dropped":
        s.say("dropped", s.loss(APART + 9))
    elif what == "sum":
        return loss + s.next()
    elif what == "retained":
        s.backward(loss, retain=True)
    elif what == "two backwards":  # in either order
        losses = [loss, s.next()]
        first = r.randrange(2)
        s.backward(losses[first])
        return losses[1 - first]
    elif what == "penalty":  # weights in the loss, beside the model
        named = s.named()
        for name in r.sample(list(named), 2):
            loss = loss + 0.1 * named[name].flatten()[:1].square().sum()
    return loss


def gradients(s: Any, r: random.Random) -> None:
    name = r.choice(trained(s))
    gradient = s.gradient(name)
    s.say(name, gradient)


def trained(s: Any) -> list[str]:
    return [name for name, p in s.named().items() if p.requires_grad and name in s.trains]


def read(s: Any, r: random.Random) -> None:
    what = r.choice(["weights", "master", "parameters", "moment"])
    if what in ("weights", "parameters"):
        for name, value in (s.weights() if what == "weights" else s.named()).items():
            s.say(name, value)
        return
    name = r.choice(trained(s))
    s.say(name, s.master(name) if what == "master" else s.moment(name, r.choice(MOMENTS)))


def evaluate(s: Any, r: random.Random) -> None:
    called, training = r.choice([s.call, s.raw]), s.model.training
    s.model.train(r.random() < 0.5)
    batch = s.batch(APART + r.randrange(5))
    way = r.choice([torch.no_grad, torch.inference_mode])
    # Buffers that a forward makes are of the mode in which it made them.
    with (torch.no_grad if s.case.model == "growing_buffers" else way)():
        s.say("evaluated", loss_of(called(**batch)))
        if s.case.model in CAUSAL and r.random() < 0.3:
            s.say("generated", s.generated(batch["input_ids"]))
        if s.case.model in CASES and r.random() < 0.5:  # the base is the reference of its adapters
            with s.model.disable_adapter():
                s.say("reference", loss_of(called(**batch)))
    s.model.train(training)


def exchange(s: Any, r: random.Random) -> None:
    """Other weights for an evaluation, as averages are, and the own ones again. Adapters may be
    merged for it, as for a rollout."""
    if s.case.model in CASES and r.random() < 0.5:
        s.model.merge_adapter()
        with torch.no_grad():
            s.say("merged", loss_of(s.call(**s.batch(APART + 4))))
        s.model.unmerge_adapter()
        return
    names = list(s.named())
    before = {name: p.detach().clone() for name, p in s.named().items()}
    how = r.choice(["in place", "data"])
    for name in names:
        s.write(name, shrink, how)
    evaluate(s, r)
    for name in names:
        s.write(name, lambda weight, own=before[name]: weight.copy_(own), how)


class Boom(Exception):
    """Raised in the middle of a pass by a hook of the user's."""


class Stop(BaseException):
    """The same, as Ctrl-C raises: torch calls fewer hooks after it."""


def boom(s: Any, r: random.Random) -> None:
    modules = [name for name, m in s.model.named_modules() if not list(m.children())]
    module = s.model.get_submodule(r.choice(modules))

    def fail(*_: Any) -> None:
        raise raised

    raised = r.choice([Boom, Stop])
    forward, ended = r.random() < 0.5, False
    hook = (module.register_forward_hook if forward else module.register_full_backward_hook)(fail)
    try:
        s.backward(s.loss(APART + 7))
    except (Boom, Stop):
        ended = True
    finally:
        hook.remove()
    s.say("ended", ended)
    if not ended or r.random() < 0.5:
        s.zero(r.random() < 0.5)


def copied(s: Any, r: random.Random) -> None:
    """A copy of the model, or a file of its weights."""
    if r.random() < 0.5:
        for name, value in s.exported().items():
            s.say(name, value)
        return
    other = s.copied().eval()
    with torch.no_grad():
        s.say("copied", loss_of(other(**s.batch(APART + 3))))


def by_hand(s: Any, r: random.Random) -> None:
    """A step that ends where the program says so."""
    count = r.choice([1, 2, 3])
    for k in range(count):
        s.boundary(k + 1 == count)
        s.backward(s.next())
        s.step()
    s.boundary(None)
    outcome(s)


def throw_away(s: Any, r: random.Random) -> None:
    s.backward(s.loss(APART + 8))
    s.zero(r.random() < 0.5)


def bad(s: Any, r: random.Random) -> None:
    """A step without a finite gradient."""
    at = r.randrange(s.case.accumulation)
    for k in range(s.case.accumulation):
        s.backward(s.next() * (math.nan if k == at else 1.0))
        s.step()
    outcome(s)


def freeze(s: Any, r: random.Random) -> None:
    name = r.choice(list(s.named()))
    parameter = s.named()[name]
    parameter.requires_grad_(not parameter.requires_grad)


def rate(s: Any, r: random.Random) -> None:
    for group in s.optimizer.param_groups:
        group["lr"] = r.choice([1e-3, 5e-3, 2e-2])
        if r.random() < 0.3:
            group["weight_decay"] = r.choice([0.0, 0.05])
            group["betas"] = r.choice([(0.9, 0.99), (0.8, 0.95)])


def shrink(weight: torch.Tensor) -> None:
    weight.mul_(0.9)


def prune(weight: torch.Tensor) -> None:
    weight[weight > 0] = 0.0


def write(s: Any, r: random.Random) -> None:
    how = r.choice(["all", "some", "in place", "data", "gathered"])
    s.say("write", how)
    names = list(s.named())
    if how in ("all", "some"):
        values = s.weights()
        chosen = names if how == "all" else r.sample(names, 2)
        s.load_weights({n: values[n] * 0.95 for n in chosen}, r.choice(["engine", "model"]))
    else:
        s.write(r.choice(names), r.choice([shrink, prune]), how)


HOOKS = ["gradient", "accumulated", "output", "input", "backward", "before", "peek"]


def hook(s: Any, r: random.Random) -> None:
    """A hook of the user's, until the next."""
    kind = r.choice(HOOKS)
    if s.hooks:
        s.hooks.pop().remove()
        return
    s.say("hook", kind)
    parameter = s.named()[r.choice(trained(s))]
    modules = [n for n, m in s.model.named_modules() if isinstance(m, nn.Linear | nn.LayerNorm)]
    module = s.model.get_submodule(r.choice(modules))
    if kind == "gradient":
        s.hooks.append(parameter.register_hook(lambda g: g * 0.5))
    elif kind == "accumulated":
        s.hooks.append(parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5)))
    elif kind == "output":
        s.hooks.append(module.register_forward_hook(lambda _m, _a, o: o * 0.9))
    elif kind == "input":
        s.hooks.append(module.register_forward_pre_hook(lambda _m, a: (a[0] * 0.9,)))
    elif kind == "backward":
        s.hooks.append(
            module.register_full_backward_hook(
                lambda _m, g, _o: tuple(None if one is None else one * 0.9 for one in g)
            )
        )
    elif kind == "before":
        s.hooks.append(module.register_full_backward_pre_hook(lambda _m, g: (g[0] * 0.9,)))
    else:  # another layer's weight
        peek = lambda _m, _a, o: o + parameter.detach().flatten()[:1].to(o.dtype)  # noqa: E731
        s.hooks.append(module.register_forward_hook(peek))


def save(s: Any, r: random.Random) -> None:
    s.save()


def load(s: Any, r: random.Random) -> None:
    if s.saved is not None:
        s.load()


def resume(s: Any, r: random.Random) -> None:
    while s.hooks:
        s.hooks.pop().remove()
    s.resume()


def again(s: Any, r: random.Random) -> None:
    """Another engine of the same model, which was edited between the two."""
    while s.hooks:
        s.hooks.pop().remove()
    what, seed = r.choice(EDITS), r.randrange(10**6)
    s.say("again", what)
    s.again(lambda model: edited(model, what, random.Random(seed)))
    s.saved = None


EDITS = ["nothing", "replaced", "unused", "frozen", "fp32", "tied", "untied"]


def edited(model: nn.Module, what: str, r: random.Random) -> None:
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    name, other = r.choice(list(linears)), linears[r.choice(list(linears))]
    if what == "replaced":
        model.set_submodule(name, copy.deepcopy(linears[name]))
    elif what == "unused":
        linears[name].further = nn.Parameter(torch.ones(5))
    elif what == "frozen":
        for p in r.sample(list(model.parameters()), 3):
            p.requires_grad_(not p.requires_grad)
    elif what == "fp32":
        model.float()
    elif what == "tied" and linears[name].weight.shape == other.weight.shape:
        other.weight = linears[name].weight
    elif what == "untied":
        other.weight = nn.Parameter(other.weight.detach().clone())


def late(s: Any, r: random.Random) -> None:
    """Rates and what is frozen change between backward and step."""
    for _ in range(s.case.accumulation):
        s.backward(s.next())
        r.choice([rate, freeze])(s, r)
        s.step()
    outcome(s)


def states(s: Any, r: random.Random) -> None:
    draw = r.random()
    s.offload(["optim_states", "lp_grads"] if 0.25 <= draw < 0.75 else None)
    if draw < 0.5:
        for name, value in s.weights().items():
            s.say(name, value)
    s.reload()


ACTIONS: dict[str, Action] = {
    f.__name__: f
    for f in (
        *(train, odd_step, read, evaluate, boom, throw_away, bad, freeze, rate, write, hook),
        *(exchange, save, load, resume, states, copied, by_hand),
    )
}
CHOICES = [*ACTIONS, *["train"] * 4, *["odd_step"] * 3]
RARE: dict[str, Action] = {"again": again, "late": late}  # one in some programs
ACTIONS |= RARE


# --- which program, and in which plan -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """What both sides have in common, and what the program does, each action with its seed."""

    seed: int
    model: str
    precision: str
    clipping: float
    accumulation: int
    groups: bool  # whether the optimizer has two, with and without weight decay
    warmup: bool
    scaling: dict[str, int]  # fp16's
    section: dict[str, Any]  # what changes bits
    device: str
    actions: tuple[tuple[str, int], ...]

    @property
    def factory(self) -> Callable[..., Any]:
        if self.model in FACTORIES:
            return FACTORIES[self.model]
        return functools.partial(drawn_model, int(self.model.split()[1]))


def drawn(seed: int, device: str = "emulated") -> Case:
    r = random.Random(seed)
    precision = r.choice(["fp32", "bf16", "bf16", "fp16", "lean"])
    model = r.choice([n for n in FACTORIES if precision == "fp32" or n not in FP32])
    section: dict[str, Any] = {"chunk": 1} if r.random() < 0.2 else {}
    if seed >= DRAWN:
        model, section = f"drawn {seed}", {}
    if r.random() < 0.3 and model in CAUSAL:
        section["loss_chunk"] = r.choice([3, 5])
    made = Case(
        seed=seed,
        model=model,
        precision=precision,
        clipping=r.choice([0.0, 0.5]),
        # Quotients by 3 of what reentrant checkpoints hand over in parts are rounded one by one.
        accumulation=r.choice([1, 1, 2, 3 if seed < DRAWN else 4]),
        groups=r.random() < 0.3,
        warmup=r.random() < 0.3,
        scaling={"initial_scale_power": r.choice([8, 24]), "loss_scale_window": 2},
        section=section,
        device=device,
        actions=tuple((r.choice(CHOICES), r.randrange(10**6)) for _ in range(r.randrange(4, 13))),
    )
    actions = list(made.actions)
    if r.random() < 0.3:
        at = r.randrange(len(actions))
        actions.insert(at, (r.choice(list(RARE)), r.randrange(10**6)))
    return replace(made, actions=tuple(actions))


EVERYTHING_THERE: dict[str, Any] = {"window": 64, "activations": "keep", "resident_layers": 0}


def placed(case: Case, r: random.Random, folder: Path) -> dict[str, Any]:
    """A section that changes no bit."""
    made: dict[str, Any] = {"activations": r.choice(list(LEVELS)), "cpu_threads": r.choice([1, 2])}
    # the first plan is changed by what it shows
    if r.random() < 0.3 and case.device == "emulated":
        made["gpu_memory"] = int(r.choice([150, 250, 400, 600, 900]) * 1000)
        paces = {"link_gbps": r.choice([0.05, 0.3]), "update_gbps": r.choice([0.1, 1.0])}
        return {**made, "emulated": paces}
    made |= PLACES[r.choice(list(PLACES))]
    if made["activations"] == "recompute" and r.random() < 0.3:
        with torch.random.fork_rng():
            num_blocks = len(find_blocks(case.factory()[0]))
        if num_blocks > 1:
            made["activations"] = {"recompute": num_blocks - 1, "keep": 1}
    home = r.choice(["ram", "ram", "moments", "masters", "weights"])
    if home != "ram":
        made["nvme"] = {"path": str(folder), "spill": home}
    if r.random() < 0.6:
        made["early_layers"] = r.choice([0, 1, "all", "all"])
    if "chunk" in case.section and r.random() < 0.5:
        made["streams"] = 2
    made["async_checkpoint"] = r.random() < 0.2
    if case.device == "cuda":
        made.setdefault("resident_layers", 0)
    elif r.random() < 0.3:
        made["emulated"] = {"jitter_s": 0.0003, "seed": r.randrange(9)}
    return made


# --- performing it --------------------------------------------------------------------------------


def performed(case: Case, *, reference: bool) -> tuple[list[tuple[str, Any]], Exception | None]:
    """What was logged, and what ended it."""
    r, s = random.Random(case.seed), None
    with tempfile.TemporaryDirectory() as folder:
        try:
            if not reference:
                s = ByEngine(case, Path(folder), lambda files: placed(case, r, files))
            elif case.section or case.device != "emulated":
                s = ByEngine(case, Path(folder), lambda _: EVERYTHING_THERE)
            else:
                s = Plain(case)
            torch.manual_seed(1)
            random.seed(1)
            np.random.seed(1)
            for name, seed in case.actions:
                s.say("--", (name, seed))
                ACTIONS[name](s, random.Random(seed))
            s.say("--", "end")
            for name, value in s.weights().items():
                s.say(name, value)
            for name in trained(s):
                s.say(f"master of {name}", s.master(name))
            if s.norm:  # else there may be no moments yet
                s.say("moments", s.moments())
            s.destroy()
        except Exception as error:
            return [] if s is None else s.log, error
        finally:
            if s is not None:
                with suppress(LaneError):  # told of above
                    s.destroy()
    return s.log, None


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):  # moments, of what the reference has updated
        pairs = [(a, b) for n in expected for a, b in zip(found[n], expected[n], strict=True)]
        return all(same(a, b) for a, b in pairs)
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if isinstance(found, torch.Tensor) and found.shape == expected.shape and not found.numel():
        return True  # nothing has no kind of states
    if not isinstance(found, torch.Tensor) or found.dtype != expected.dtype:
        return False
    return torch.equal(found.nan_to_num(7.7), expected.nan_to_num(7.7))


def judged(case: Case) -> tuple[str, str]:
    """("equal", "refused", "no room", or "different" or "error"; why)"""
    expected, expected_error = performed(case, reference=True)
    found, error = performed(case, reference=False)
    action: Any = ""
    for (label, value), (other_label, other) in zip(found, expected, strict=False):
        action = value if label == "--" else action
        if label != other_label or not same(value, other):
            return "different", f"in {action}: {label}: got {value}, expected {other}"
    if isinstance(error, BudgetError):
        return "no room", ""
    refused = isinstance(error, ConfigError) or "set stronghold." in str(error)
    if refused or isinstance(expected_error, ConfigError):
        return "refused", f"in {action}: {error or expected_error}"
    if type(error) is not type(expected_error):
        trace = "".join(traceback.format_exception(error or expected_error))
        return (
            "error",
            f"in {action}: got {error!r}, expected {expected_error!r}\n{trace[-3000:]}",
        )
    return "equal", ""


def shortest(case: Case, kind: str) -> Case:
    """Without the options and actions that it does not take."""
    plainer: list[dict[str, Any]] = [{"section": {}}, {"accumulation": 1}, {"groups": False}]
    for options in [*plainer, {"warmup": False}, {"precision": "fp32"}]:
        less = replace(case, **options)
        case = less if judged(less)[0] == kind else case
    for k in reversed(range(len(case.actions))):
        less = replace(case, actions=case.actions[:k] + case.actions[k + 1 :])
        case = less if judged(less)[0] == kind else case
    return case


@contextmanager
def many_pieces() -> Iterator[None]:
    """Tiny layers take several pieces, whatever is saved is worth sending to the host, and all
    second runs are compared: one that differs in other calls alone is not noticed."""
    with ExitStack() as patches:
        pieces = mock.patch("stronghold.plan.memory.PIECE_BYTES", SMALLEST_PIECE)
        patches.enter_context(pieces)
        patches.enter_context(mock.patch("stronghold.train.offload.MIN_OFFLOAD_BYTES", 1))
        always = mock.patch("stronghold.train.activations.is_compared", return_value=True)
        patches.enter_context(always)
        yield


def check(seed: int, device: str = "emulated") -> tuple[str, str]:
    """What `judged` gives; AssertionError with the shortest program that is not exact."""
    with many_pieces():
        case = drawn(seed, device)
        kind, why = judged(case)
        if kind in ("different", "error"):
            case = shortest(case, kind)
            raise AssertionError(f"{case}\n{placed(case, random.Random(seed), Path())}\n{why}")
        return kind, why


def main() -> None:
    choose_kernels()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kinds: collections.Counter[str] = collections.Counter()
    device = "cuda" if torch.cuda.is_available() else "emulated"
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            kind, why = check(seed, device)
        except AssertionError as error:
            kind, why = "WRONG", str(error)
        kinds[kind] += 1
        if why:
            print(f"seed {seed}: {kind}: {why}", flush=True)
    print(dict(kinds))
    sys.exit(kinds["WRONG"] > 0)


if __name__ == "__main__":
    main()
