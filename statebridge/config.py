"""Configs: YAML files read into frozen dataclasses, with every unknown or wrong key named by its path.

Defaults come from the dataclass, then the file, then `a.b=c` settings from the command line.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from statebridge.errors import ConfigError

T = TypeVar("T")


def load_config(cls: type[T], path: str | os.PathLike[str] | None = None, settings: Sequence[str] = ()) -> T:
    """Read a frozen dataclass from an optional YAML file and `a.b=c` settings.

    Raises
    ------
    ConfigError
        When the file cannot be read, or a key is unknown or has a wrong value; the message names its path.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"The config {path} cannot be read ({error.strerror}).") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"The config {path} is not valid YAML ({error}).") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"The config {path} must be a mapping of names to values.")
        data = loaded or {}
    for setting in settings:
        _apply(data, setting)
    return parse_config(cls, data, str(path or "the settings"))


def parse_config(cls: type[T], data: Mapping[str, Any], where: str = "the config") -> T:
    """Validate a mapping as the frozen dataclass `cls`, refusing unknown keys."""
    _refuse_unknown(cls, data, "", where)
    try:
        return TypeAdapter(cls).validate_python(dict(data))
    except ConfigError as error:  # what the class itself refuses
        raise ConfigError(f"{where}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(top)"
        raise ConfigError(f"{where}: {key}: {first['msg']} (found {first.get('input')!r}).") from error


def _refuse_unknown(cls: Any, data: Mapping[str, Any], prefix: str, where: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {prefix}{key}; known are {', '.join(fields)}.")
        inner = getattr(cls, "__annotations__", {}).get(key)
        inner = _resolve(cls, inner)
        if dataclasses.is_dataclass(inner) and isinstance(value, Mapping):
            _refuse_unknown(inner, value, f"{prefix}{key}.", where)


def _resolve(cls: Any, annotation: Any) -> Any:
    if isinstance(annotation, str):
        import sys

        return getattr(sys.modules[cls.__module__], annotation, None)
    return annotation


def _apply(data: dict[str, Any], setting: str) -> None:
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {setting!r} must have the form a.b=value.")
    *parents, last = path.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {setting!r}: {parent} holds a value, not a group of keys.")
    try:
        data[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {setting!r} is not valid YAML; put the value in quotes.") from error
