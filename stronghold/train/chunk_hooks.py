"""Hooks on the modules inside a divided block.

They wait while the chunks run. After the last chunk they are called as for the whole batch, with
the joined arguments and output. Transformers' recorders (router logits, attentions, hidden states)
are such hooks. Hooks that could change a chunk, and hooks on gradients, are refused by name. The
engine's own hooks are let through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from stronghold.errors import ConfigError
from stronghold.private import has_gradient_hooks
from stronghold.train.chunk_values import KEY
from stronghold.train.guards import OwnHook
from stronghold.train.interrupts import run_and_restore

Records = list[tuple[Any, ...]]  # of a chunk: (hook, what it was to be called with), in order


class InnerHooks:
    """The hooks on the modules inside one block, and on their gradients."""

    def __init__(self, block_name: str, block: nn.Module) -> None:
        self._block_name = block_name
        self._modules: dict[str, nn.Module] = {}
        self._forwards: dict[str, Any] = {}  # the instances' own, which replace their classes'
        for name, module in block.named_modules():
            if module is not block:
                self._modules[name] = module
                self._forwards[name] = vars(module).get("forward")

    def refuse(self) -> None:
        """ConfigError for what would see, or change, the call of a chunk as that of the batch."""
        for name, module in self._modules.items():
            if vars(module).get("forward") is not self._forwards[name]:
                found = "forward that was replaced after initialize"
            elif not all(isinstance(hook, OwnHook) for hook in module._forward_pre_hooks.values()):
                found = "hook before its forward"
            elif has_gradient_hooks(module):
                found = "hook on its gradient"
            else:
                continue
            raise ConfigError(
                f"{KEY}: {self._block_name}.{name} has a {found}, which would get a chunk in place "
                f"of the batch: put it on {self._block_name}, or leave the key out"
            )

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Return the hooked modules' names inside the block, each with the number of its hooks."""
        counts = []
        for name, module in self._modules.items():
            if hooks := module._forward_hooks:
                counts.append((name, len(hooks)))
        return tuple(counts)

    def run(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Records]:
        """Call `forward`, and return its output and the calls of the hooks, which wait."""
        records: Records = []
        waiting = []
        for name, _ in self.counts():
            table = self._modules[name]._forward_hooks
            waiting.append((table, dict(table)))

        def work() -> Any:
            for table, hooks in waiting:
                for key, hook in hooks.items():
                    table[key] = functools.partial(_record, records, hook)
            return forward(*args, **kwargs)

        def restore() -> None:
            for table, hooks in waiting:
                for key in table.keys() & hooks.keys():
                    table[key] = hooks[key]

        return run_and_restore(work, restore), records

    def call(self, records: Records) -> None:
        """Call the hooks that waited. ConfigError for one that returns another output."""
        for hook, *given in records:
            if hook(*given) is not None:
                raise ConfigError(
                    f"{KEY}: a forward hook on a {type(given[0]).__name__} in {self._block_name} "
                    "returns another output, which chunks have not got: let it return None, or "
                    "leave the key out"
                )


def _record(records: Records, hook: Callable[..., Any], *given: Any) -> None:
    records.append((hook, *given))
