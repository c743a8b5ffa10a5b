"""What tests of the config share: the least one, and what `load` makes of more, or refuses."""

from __future__ import annotations

from typing import Any

import pytest

from stronghold import config as configs
from stronghold.errors import ConfigError

BASE = {"train_micro_batch_size_per_gpu": 2}
LOGGER = "stronghold"


def load(**extra: Any) -> configs.Settings:
    """The settings of the least config and `extra`."""
    return configs.load({**BASE, **extra})


def refusal(config: Any, **kwargs: Any) -> str:
    """The message with which `load` refuses a config."""
    with pytest.raises(ConfigError) as caught:
        configs.load(config, **kwargs)
    return str(caught.value)
