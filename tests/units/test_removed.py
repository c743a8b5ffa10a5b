"""What a version had and the next one has not: each has one error that says what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from stronghold.config.section import REMOVED_KEYS, parse_section
from stronghold.errors import ConfigError
from stronghold.tools.cli import REMOVED, main


@pytest.mark.parametrize("dotted", REMOVED_KEYS)
def test_a_removed_key_is_one_error_with_the_way_out(dotted: str) -> None:
    config: Any = 1
    for key in reversed(dotted.split(".")):
        config = {key: config}
    with pytest.raises(ConfigError) as refused:
        parse_section(config)
    assert str(refused.value) == f"{dotted}: stronghold removed this key. {REMOVED_KEYS[dotted]}"


@pytest.mark.parametrize("words", REMOVED, ids=" ".join)
def test_a_removed_command_is_one_error_with_the_way_out(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words[0], "here", "there", *words[1:]]) == 2
    error = capsys.readouterr().err
    assert error == f"stronghold {' '.join(words)} was removed. {REMOVED[words]}\n"
