"""JSON to frozen, typed, checked settings; read once, and nobody else reads the raw dict.

source      where the config comes from: file, dict, base64, arguments
section     the "stronghold" section: schema and errors; what DeepSpeed's keys say about NVMe
keys        the tables of DeepSpeed's keys: honoured, without effect, refused; their values
training    `load`: all of it, with DeepSpeed's own defaults and batch arithmetic; the
            optimizer, from the config or from a client's object
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
