"""The log of a run (here), figures of steps and spans of lanes."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("stronghold")


def show_log() -> None:
    """Show the lines of the log on the screen, as DeepSpeed does.

    Does nothing if the program has set up logging. Ranks above 0 show warnings alone.
    """
    if not logger.hasHandlers():
        is_first_rank = int(os.environ.get("RANK", 0)) <= 0
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[stronghold] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if is_first_rank else logging.WARNING)
