"""Engines of this process that are alive.

Owns the set of them, by weak references. It ends an engine whose model another engine takes over,
and finishes the work of all engines when the process ends. The training thread alone enters.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Any

from torch import nn

logger = logging.getLogger("stronghold")

_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def register(engine: Any) -> None:
    """Finish this engine's work when the process ends, if the engine is alive then."""
    _engines.add(engine)


def end_previous_engines(model: nn.Module, *, trains: bool) -> None:
    """End engines that stream this very model, where a new engine may take the model over.

    An engine that has trained nothing ends. Such an engine computes a reference's log-probabilities
    before training, for example. An engine that has trained ends if the new one `trains` too and no
    gradient waits for a step. DeepSpeed allows the same. Other engines stay, and the new engine
    refuses the model.
    """
    for engine in list(_engines):
        if engine._destroyed or engine.module is not model:
            continue
        has_no_state = engine.optimizer is None or not engine._job.has_trained
        if engine.micro_steps == 0 and has_no_state:
            engine.destroy()
        elif trains and engine.micro_steps and not engine._job.trainer.is_in_step:
            logger.warning(
                "the engine that has trained this model for %d steps ends, since another one is "
                "made of it: that begins with new moments, from the weights in their own dtype",
                engine.global_steps,
            )
            engine.destroy()


@atexit.register
def finish_engines() -> None:
    """Finish the last checkpoint and the trace of every engine that is alive.

    It runs before the interpreter takes modules down. A program whose framework made the engine
    never destroys it. Errors go to the log.
    """
    for engine in list(_engines):
        try:
            engine.finish()
        except Exception:
            logger.exception("the process ends with work unfinished")
