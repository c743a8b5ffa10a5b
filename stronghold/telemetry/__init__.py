"""The log of a run (here), figures of steps and spans of lanes."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("stronghold")


def show_log() -> None:
    """Lines of the step go to the screen, as DeepSpeed's do, unless the program set logging up
    itself."""
    if not logger.hasHandlers():
        others = int(os.environ.get("RANK", 0)) > 0
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[stronghold] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING if others else logging.INFO)
