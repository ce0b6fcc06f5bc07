"""Reading a configuration: YAML file, ``a.b=c`` overrides, errors that fit on one screen.

The package ``config`` imports neither torch nor anything of ours, so that a bad value is refused in a
second, before any process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_grpo.config.base import Config
from megatron_grpo.config.run import RunConfig


class ConfigError(ValueError):
    """The configuration can't be used; the message says which key, which value and what to change."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read ``path`` and apply ``overrides`` (``"grpo.seed=1"``; values are YAML).

    Raises:
        ConfigError: the file is missing or not YAML, or a key or value is not accepted.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}; see configs/ for examples") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}:\n{_explain(error)}") from None


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override '{override}' is not of the form section.key=value")
    *sections, last = key.split(".")
    node = values
    for depth, section in enumerate(sections):
        child = node.setdefault(section, {})
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                f"override '{override}': {'.'.join(sections[: depth + 1])} is the value {child!r}, not a section"
            )
        node = child
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override '{override}': the value is not valid YAML: {error}") from None


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        given = item.get("input")
        value = f" (given: {given!r})" if not isinstance(given, dict | Config) else ""
        lines.append(f"  {where + ': ' if where else ''}{message}{value}")
    return "\n".join(lines)


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML that :func:`load_config` reads back."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
