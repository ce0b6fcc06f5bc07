"""Reading a configuration: YAML file, ``a.b=c`` overrides, errors that fit on one screen.

The package ``config`` imports neither torch nor anything of ours, so that a bad value is refused in a
second, before any process starts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_grpo.config.base import Config
from megatron_grpo.config.run import RunConfig


class ConfigError(ValueError):
    """The configuration can't be used; the message says which key, which value and what to change."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without two of its traps: a key that comes twice is an error, and ``1e-5`` is a number."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:  # without those that << will merge in, which may be the same
            if str(key.value) in seen:
                raise yaml.composer.ComposerError(
                    problem=f"the key '{key.value}' comes twice; keep one", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _read_yaml(text: str) -> Any:
    return _unshared(yaml.load(text, _Loader))


def _unshared(value: Any) -> Any:
    """A copy in which aliases are values of their own, so that an override changes one place."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read ``path`` and apply ``overrides`` (``"grpo.seed=1"``; values are YAML).

    Raises:
        ConfigError: the file is missing or not YAML, or a key or value is not accepted.
    """
    try:
        values = _read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}; see configs/ for examples") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; give a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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
        node[last] = _read_yaml(text)
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
