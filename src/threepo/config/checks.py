"""Range checks of the records; each names the field, the value found, and what to set instead."""

from typing import Any

from threepo.errors import UserError


def require(condition: bool, name: str, value: Any, fix: str) -> None:
    """Raise `UserError` about the field `name` unless `condition` holds."""
    if not condition:
        raise UserError(f"{name} = {value!r}: {fix}")


def positive(record: Any, table: str, *names: str) -> None:
    """The named fields must be greater than 0."""
    for name in names:
        value = getattr(record, name)
        require(value > 0, f"{table}.{name}", value, "must be greater than 0")


def not_negative(record: Any, table: str, *names: str) -> None:
    """The named fields must be 0 or more."""
    for name in names:
        value = getattr(record, name)
        require(value >= 0, f"{table}.{name}", value, "must be 0 or more")


def share(record: Any, table: str, *names: str) -> None:
    """The named fields must lie between 0 and 1."""
    for name in names:
        value = getattr(record, name)
        require(0 <= value <= 1, f"{table}.{name}", value, "must lie between 0 and 1")
