"""Plain data, and the shape of objects, between the tests of a program and the program: over a pipe, as JSON.

Sent into the sandbox for tests that are Python code, beside `harness` and `scripts`; runs in one namespace with them.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from threepo.rewards.sandbox.harness import write

MESSAGE_LIMIT = 64 << 20


def send(file: int, message: Any) -> None:
    """Write a message with its length before it."""
    import json

    data = json.dumps(message).encode()
    write(file, len(data).to_bytes(8, "big") + data)


def receive(file: int) -> Any:
    """Read a message; EOFError where the other side has gone."""
    import json

    size = int.from_bytes(_read(file, 8), "big")
    if size > MESSAGE_LIMIT:
        raise MemoryError
    return json.loads(_read(file, size))


def _read(file: int, size: int) -> bytes:
    parts, missing = [], size
    while missing:
        part = os.read(file, min(missing, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
CONTAINERS = (*SEQUENCES.values(), dict)
CLASSES = {cls.__name__: cls for cls in (bool, int, float, complex, str, bytes, *CONTAINERS)}


def _clock(value: Any) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.tzinfo]


STANDARD: dict[str, Any] = {
    "array.array": lambda value: [value.typecode],
    "builtins.bytearray": lambda value: [],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "collections.Counter": lambda value: [],
    "collections.OrderedDict": lambda value: [],
    "collections.defaultdict": lambda value: [value.default_factory],
    "collections.deque": lambda value: [(), value.maxlen],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.datetime": lambda value: [value.year, value.month, value.day, *_clock(value)],
    "datetime.time": _clock,
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "datetime.timezone": lambda value: [value.utcoffset(None)],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
}
"""Numbers and containers of the standard library: what their classes, called with it, make such a number of, or such a
container before it has anything in it."""
_APPENDED = ("array.array", "builtins.bytearray", "collections.deque")


def encode(root: Any, classes: dict[str, Any], hold: Any, whole: bool) -> list[Any]:
    """`root` as a table of [kind, content], its first row; content refers to other rows as [number].

    Objects of `classes` cross by their attributes; for others `hold` gives a number that stands for them. So it does
    for containers of a class of their own, which may have methods, unless they are to be copied `whole`.
    """
    rows: list[Any] = []
    queue = [root]
    places: dict[int, int] = {id(root): 0}

    def refer(value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float, str):
            if isinstance(value, kind):
                return kind(value)
        if id(value) not in places:
            places[id(value)] = len(queue)
            queue.append(value)  # which keeps it alive, and its id its own
        return [places[id(value)]]

    for value in queue:
        of = type(value)
        kind = next((name for name, cls in SEQUENCES.items() if of is cls or (whole and isinstance(value, cls))), "")
        name = f"{of.__module__}.{of.__qualname__}"
        if kind:
            rows.append([kind, [refer(item) for item in value]])
        elif name in STANDARD:
            items = [refer(item) for item in value] if name in _APPENDED else []
            pairs = [[refer(key), refer(item)] for key, item in value.items()] if isinstance(value, dict) else []
            rows.append(["standard", name, [refer(part) for part in STANDARD[name](value)], items, pairs])
        elif of is dict or (whole and isinstance(value, dict)):
            rows.append(["dict", [[refer(key), refer(item)] for key, item in value.items()]])
        elif isinstance(value, bytes):
            rows.append(["bytes", list(value)])
        elif isinstance(value, complex):
            rows.append(["complex", [value.real, value.imag]])
        elif isinstance(value, type) and CLASSES.get(name := value.__name__) is value:
            rows.append(["class", name])
        elif classes.get(of.__name__) is of:
            rows.append(["object", of.__name__, [[name, refer(item)] for name, item in vars(value).items()]])
        else:
            rows.append(["held", hold(value), names_of(value) if isinstance(value, type) else []])
    return rows


def names_of(error: type) -> list[str]:
    """A class of exceptions and those above it, by module and name; none of other classes."""
    return [f"{cls.__module__}.{cls.__name__}" for cls in error.__mro__] if issubclass(error, Exception) else []


def decode(rows: list[Any], class_of: Any, held: Any) -> Any:
    """What `encode` had, made of plain data, of classes by their names, and of what `held` makes of a number."""
    made: dict[int, Any] = {}

    def value(reference: Any) -> Any:
        return build(reference[0]) if isinstance(reference, list) else reference

    def build(place: int) -> Any:
        if place not in made:
            made[place] = _shell(rows[place], class_of, held, value)
        return made[place]

    for place in range(len(rows)):
        build(place)
    for place, (kind, *content) in enumerate(rows):
        thing = made[place]
        if kind == "list":
            thing.extend(map(value, content[0]))
        elif kind == "set":
            thing.update(map(value, content[0]))
        elif kind == "dict":
            thing.update((value(key), value(item)) for key, item in content[0])
        elif kind == "standard":
            for item in content[2]:
                thing.append(value(item))
            for key, item in content[3]:
                thing[value(key)] = value(item)
        elif kind == "object":
            vars(thing).update((name, value(item)) for name, item in content[1])
    return made[0]


def _shell(row: list[Any], class_of: Any, held: Any, value: Any) -> Any:
    """The thing of a row: whole where it cannot change, else empty, since it may hold itself."""
    kind, content = row[0], row[1]
    if kind in ("tuple", "frozenset"):
        return SEQUENCES[kind](map(value, content))
    if kind == "bytes":
        return bytes(content)
    if kind == "complex":
        return complex(*content)
    if kind == "class":
        return CLASSES[content]
    if kind == "standard":
        return _standard(content)(*map(value, row[2]))
    if kind == "held":
        return held(*row[1:])
    if kind == "object":
        return object.__new__(class_of(content))
    return {"list": list, "set": set, "dict": dict}[kind]()


def _standard(name: str) -> Any:
    """The class of this name; no other than those above, whoever asks."""
    if name not in STANDARD:
        raise ValueError(name)
    module, _, of = name.partition(".")
    return getattr(__import__(module), of)
