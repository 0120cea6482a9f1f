"""Range checks of the records; each names the field, the value found, and what to set instead."""

import math
from collections.abc import Mapping
from typing import Any

from threepo.errors import UserError


def shown(value: Any) -> str:
    """A value as messages show it: the way TOML writes it, `true` and not `True`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {shown(item)}" for key, item in value.items()) + "}"
    return repr(value)


def require(condition: bool, name: str, value: Any, fix: str) -> None:
    """Raise `UserError` about the field `name` unless `condition` holds."""
    if not condition:
        raise UserError(f"{name} = {shown(value)}: {fix}")


def positive(record: Any, table: str, *names: str) -> None:
    """The named fields must be greater than 0, and finite."""
    for name in names:
        value = getattr(record, name)
        require(0 < value < math.inf, f"{table}.{name}", value, "must be greater than 0 and finite")


def not_negative(record: Any, table: str, *names: str) -> None:
    """The named fields must be 0 or more, and finite."""
    for name in names:
        value = getattr(record, name)
        require(0 <= value < math.inf, f"{table}.{name}", value, "must be 0 or more and finite")


def share(record: Any, table: str, *names: str) -> None:
    """The named fields must lie between 0 and 1."""
    for name in names:
        value = getattr(record, name)
        require(0 <= value <= 1, f"{table}.{name}", value, "must lie between 0 and 1")
