"""What a version had and the next one has not: each has one error that says what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from stronghold.config.section import REMOVED_KEYS, parse_section
from stronghold.errors import ConfigError


@pytest.mark.parametrize("dotted", REMOVED_KEYS)
def test_a_removed_key_is_one_error_with_the_way_out(dotted: str) -> None:
    config: Any = 1
    for key in reversed(dotted.split(".")):
        config = {key: config}
    with pytest.raises(ConfigError) as refused:
        parse_section(config)
    assert str(refused.value) == f"{dotted}: stronghold removed this key. {REMOVED_KEYS[dotted]}"
