"""JSON to frozen, typed, checked settings; read once, and nobody else reads the raw dict.

source      where the config comes from: file, dict, base64, arguments
section     the "stronghold" section: schema and errors
keys        the table of DeepSpeed's keys: honoured, without effect, refused
offload     what the section, DeepSpeed's offload keys and its aio say about NVMe
optimizer   Adam's hyper-parameters from the config or from a client's optimizer
training    `load`: all of it, with DeepSpeed's own defaults and batch arithmetic
"""

from stronghold.config.keys import KEYS, Effect, Key
from stronghold.config.optimizer import (
    AdamSettings,
    settings_from_client_optimizer,
    settings_from_config,
)
from stronghold.config.section import (
    EmulatedConfig,
    NvmeConfig,
    StrongholdConfig,
    parse_bytes,
    parse_section,
)
from stronghold.config.source import SECTION, Source, read_config, section_enabled
from stronghold.config.training import (
    Precision,
    SchedulerSettings,
    Settings,
    TrainingConfig,
    check_keys,
    load,
)

__all__ = [
    "KEYS",
    "SECTION",
    "AdamSettings",
    "Effect",
    "EmulatedConfig",
    "Key",
    "NvmeConfig",
    "Precision",
    "SchedulerSettings",
    "Settings",
    "Source",
    "StrongholdConfig",
    "TrainingConfig",
    "check_keys",
    "load",
    "parse_bytes",
    "parse_section",
    "read_config",
    "section_enabled",
    "settings_from_client_optimizer",
    "settings_from_config",
]
