"""Parts of every settings record: checked types, the base class, and errors of one line.

A record is a frozen pydantic dataclass. Recipes are read strictly: nothing is converted, except a whole number to a
number. A user gets one line about the first mistake that pydantic finds: field, value and fix.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from operator import attrgetter
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema, core_schema

from threepo.errors import UserError

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
PositiveOrInfinite = Annotated[
    float,
    Field(gt=0, allow_inf_nan=True),
    BeforeValidator(lambda value: math.inf if value == "Infinity" else value),
    PlainSerializer(lambda value: "Infinity" if value == math.inf else value, when_used="json"),
]
"""JSON has no infinity, so there it is a text."""
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""A time limit of at most eleven days; the system's clocks count no more than 2^31 milliseconds."""

Record = TypeVar("Record")
_ALTERNATIVES = ("str", "tuple[str, ...]")
"""Names that pydantic gives to the types of a field that has several."""


def must(holds: Callable[[Any], Any], fix: str) -> AfterValidator:
    """A check for `Annotated`: the field is refused with the text `fix` unless `holds(value)`."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(fix)
        return value

    return AfterValidator(check)


class Named(NamedTuple):
    """A row of a table of names that a setting can take."""

    code: str
    """The place of the code, as module:name; imported when it is used."""
    says: str
    """A line on it, for docs/configuration.md."""
    needs: str = ""
    """The package that the code imports, which the extra of the row's name installs; empty: none."""

    def load(self) -> Any:
        """Import it."""
        return resolve_name(self.code)


OWN = "your own 'module:name'"
"""Code of the user, where a setting takes it."""


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Annotates a text that must be a key of `table`, as a `Literal` of its keys would be."""

    table: Mapping[str, Any]
    own: str = ""
    """What else it may be, in words: `OWN`; empty: nothing."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        if not self.own:
            return core_schema.literal_schema(list(self.table))
        fix = f"must be {', '.join(map(repr, self.table))} or {self.own}"
        holds = must(lambda name: name in list(self.table) or is_own(name), fix)
        return core_schema.no_info_plain_validator_function(holds.func)  # type: ignore[arg-type]


def is_own(name: Any) -> bool:
    """True if a name that a setting has is of a user's own code: `module:name`."""
    return isinstance(name, str) and ":" in name


_OWN = ":"
"""The kind of all records of users."""


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Annotates a union of the records of a table, of which its key `by` names one, or a user's `module:Class`."""

    base: type["Settings"]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        choices = {getattr(record, self.base._by): handler.generate_schema(record) for record in get_args(source)}
        dump = core_schema.plain_serializer_function_ser_schema(to_dict)
        own = core_schema.no_info_plain_validator_function(self._own, serialization=dump)
        return core_schema.tagged_union_schema({**choices, _OWN: own}, self._tag)

    def _tag(self, value: Any) -> Any:
        kind = value.get(self.base._by) if isinstance(value, Mapping) else getattr(value, self.base._by, None)
        return _OWN if is_own(kind) else kind

    def _own(self, value: Any) -> Any:
        """The user's record: a subclass of `base`, which the table names and has the settings of."""
        from threepo.user_code import find_object

        if isinstance(value, self.base):
            return value
        table, name = self.base._table, value[self.base._by]
        record: Any = find_object(name, f"{table}.{self.base._by}")
        fix = f"must be a subclass of {self.base.__module__}.{self.base.__name__}"
        require(isinstance(record, type) and issubclass(record, self.base), f"{table}.{self.base._by}", name, fix)
        RECORDS[table][name] = record  # for errors
        try:
            return build(record, value, table)
        finally:
            RECORDS[table].pop(name, None)


RECORDS: dict[str, dict[str, Any]] = {}
"""The records of each table by kind; the record of a table without kinds under ""."""
BASES: dict[str, Any] = {}
"""Record whose fields all kinds share, for each table with kinds."""
_adapter: Any = cache(TypeAdapter)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class Settings:
    """A record of one table of a recipe, or of a whole recipe (table ""). `UserError` for invalid values.

    The text under a field is its help, from which docs/configuration.md is made. A table whose keys depend on one of
    them, such as `kind`, has a base (`by="kind"`) and a subclass for each value of that key.
    """

    _table: ClassVar[str] = ""
    _by: ClassVar[str] = ""
    code: ClassVar[str] = ""
    """The code that a record of a kind of optimizer, engine or loss is for, as in `Named`."""

    def __init_subclass__(cls, table: str | None = None, by: str = "") -> None:
        if cls._by:  # the kind of a record that inherits from a kind of ours is text, too
            cls.__annotations__.setdefault(cls._by, str)
        config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
        record: Any = dataclass(frozen=True, kw_only=True, config=config)(cls)
        make = record.__init__

        def __init__(self: Any, **values: Any) -> None:
            try:
                make(self, **values)
            except ValidationError as error:
                raise UserError(_explain(error, self._table)) from None

        record.__init__ = __init__
        if table is not None:
            record._table, record._by = table, by
        if by:
            BASES[record._table] = record
        elif kind := getattr(record, record._by, "") if record._by else "":
            RECORDS.setdefault(record._table, {}).setdefault(kind, record)
        elif table:
            RECORDS[table] = {"": record}

    def check(self, key: str, holds: bool, fix: str) -> None:
        """`require` about the field `key` of this record, or of a record in it, such as `eval.draws`."""
        require(holds, f"{self._table}.{key}".lstrip("."), attrgetter(key)(self), fix)

    def only_if(self, read: bool, fix: str, *keys: str) -> None:
        """Refuse values of the fields `keys` (none: of all) that are not the default, unless something reads them."""
        if read:
            return
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            if not keys or f.name in keys:
                self.check(f.name, getattr(self, f.name) == default, fix)


def build(record: type[Record], table: Mapping[str, Any], name: str = "") -> Record:
    """Make a record from dictionaries and lists; messages call it `name`, which is empty for a whole recipe."""
    table = dict(table)
    fields = dataclasses.fields(record) if dataclasses.is_dataclass(record) else ()  # a union of records has none
    for f in fields:
        base, given = BASES.get(f.name), table.get(f.name)  # without a kind, it is the kind of the default
        if base and isinstance(given, Mapping) and f.default_factory is not dataclasses.MISSING:
            table[f.name] = {base._by: getattr(f.default_factory(), base._by), **given}
    try:
        return _adapter(record).validate_json(json.dumps(table, default=_plain), strict=True)  # type: ignore[no-any-return]
    except ValidationError as error:
        kind = str(table.get(BASES[name]._by, "")) if name in BASES else ""
        raise UserError(_explain(error, name, kind)) from None


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as Python's, anything else as text."""
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)


def to_dict(record: Any) -> dict[str, Any]:
    """A record as nested dictionaries and lists, ready for JSON; `build` reads it back to an equal record."""
    return _adapter(type(record)).dump_python(record, mode="json")  # type: ignore[no-any-return]


def _explain(error: ValidationError, table: str, kind: str = "") -> str:
    """The first mistake: which field, its value, and what it must be."""
    first = error.errors()[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), UserError):
        return str(cause)  # two settings that do not go together: it names them
    if first["type"] == "unexpected_keyword_argument" and "." in (quoted := str(first["loc"][-1])):
        return f"{quoted!r}: is a quoted name with points, and no key; write it without quotation marks"
    name = table
    for key in first["loc"]:
        if isinstance(key, int):
            name += f"[{key}]"
        elif name in BASES and key in RECORDS[name] and not kind:
            kind = key  # pydantic puts the kind that it has chosen between the table and the key
        elif key in _ALTERNATIVES:
            break  # of a field that is text or a list
        else:
            name = f"{name}.{key}" if name else key
    mistake, value = first["type"], shown(first["input"])
    if mistake == "unexpected_keyword_argument":
        return _unknown(name, kind)
    if mistake == "missing" and name.endswith("]"):
        return f"{name.rpartition('[')[0]} = {value}: has too few values"
    if mistake == "missing":
        return f"{name} is missing: set it in the recipe, or on the command line as {name}=..."
    if name in RECORDS and mistake in ("dict_type", "dataclass_type", "union_tag_not_found"):
        return f"{name} = {value}: is a table; write its keys under [{name}]"
    if mistake == "union_tag_invalid":
        by = BASES[name]._by
        return f"{name}.{by} = {shown(first['input'][by])}: must be one of {', '.join(map(repr, RECORDS[name]))}"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{name} = {value}: {message.replace('a valid array', 'a list').replace('an object', 'a table')}"


def _unknown(name: str, kind: str) -> str:
    table, _, key = name.rpartition(".")
    records = RECORDS.get(table) or RECORDS.get(table.rpartition(".")[0], {})  # the table of a name: methods.grpo
    kinds = {other: [f.name for f in dataclasses.fields(record)] for other, record in records.items()}
    if owners := [repr(other) for other, names in kinds.items() if key in names]:
        by = f"{table}.{BASES[table]._by}"
        return f"{name}: is for {by} = {' or '.join(owners)}, and here it is {kind!r}; remove it, or change {by}"
    if name in RECORDS:
        return f"[{name}]: is a table of other commands; remove it"
    tables = sorted(other.rpartition(".")[2] for other in RECORDS if other.rpartition(".")[0] == table)
    known = list(dict.fromkeys(chain(kinds.get(kind, ()), *kinds.values()))) or tables
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {table and f'{table}.'}{near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"unknown {'key' if table else 'table'} {name}; {hint}"


def shown(value: Any) -> str:
    """A value as TOML writes it: `true` and not `True`."""
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


def flat(table: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables by dotted keys."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the differences of two configurations: dotted key, and the value in each, which is None if missing."""
    then, now = dict(flat(old)), dict(flat(new))
    for name in then | now:
        if then.get(name) != now.get(name):
            yield name, then.get(name), now.get(name)


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describes the first difference of a recorded configuration from the present one; empty if there is none."""
    return next((f"{name} = {shown(a)} there, {shown(b)} here" for name, a, b in differences(old, new)), "")
