"""The factory's configurations, composed by Hydra once for each choice of files."""

from copy import deepcopy
from functools import lru_cache

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from valora_train.cli import config_folder


@lru_cache
def _composed(choices: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", overrides=list(choices))


def configured(*overrides: str) -> DictConfig:
    """What a command line with these overrides composes."""
    choices, values = [], []
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        group = one.key_or_group
        chooses = one.package is not None or (config_folder() / group).is_dir()
        (choices if chooses or group.startswith("hydra") else values).append(one)
    config = deepcopy(_composed(tuple(one.input_line for one in choices)))
    ConfigLoaderImpl._apply_overrides_to_config(values, config)  # as `compose` ends
    return config
