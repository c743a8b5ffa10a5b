"""The config: from JSON to frozen, typed, checked settings. No other room reads the raw dict.

source      reads the config from a file, a dict, base64 or the launcher's arguments
section     the "stronghold" section: its schema and errors, and DeepSpeed's keys about NVMe
keys        the table of DeepSpeed's keys: honoured, without effect, refused; their values
training    `load`: reads and checks all of it, with DeepSpeed's defaults and batch arithmetic; and
            the optimizer, from the config or from a client's object
"""

from stronghold.config.section import NvmeConfig as NvmeConfig
from stronghold.config.section import StrongholdConfig as StrongholdConfig
from stronghold.config.section import parse_bytes as parse_bytes
from stronghold.config.source import read_config as read_config
from stronghold.config.source import section_enabled as section_enabled
from stronghold.config.training import OptimizerSettings as OptimizerSettings
from stronghold.config.training import Settings as Settings
from stronghold.config.training import check_keys as check_keys
from stronghold.config.training import load as load
from stronghold.config.training import (
    settings_from_client_optimizer as settings_from_client_optimizer,
)
from stronghold.config.training import settings_from_config as settings_from_config
from stronghold.config.training import settings_of_group as settings_of_group
