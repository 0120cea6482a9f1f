"""What tests that are Python code hold in place of the program's objects: handles, and what is believed of them.

Sent into the sandbox for such tests only, beside `scripts`, whose `Link` they ask; runs in one namespace with it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from threepo.rewards.sandbox.scripts import Link


class Remote:
    """An object of the program that is no plain data. How it stands to the tests' data, the program has no say in.

    Else it could return what comes out as near, less or equal: abs(f(x) - 0.5) < 1e-6 would ask it three times.
    """

    def __init__(self, link: Link, place: int) -> None:
        self._link, self._place = link, place
        self._told = False
        """Whether it came of an operation with the tests' data, which is then what it may know the answer from."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it there."""
        return self._link.do("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """Its attribute."""
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._link.do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set its attribute."""
        if name in ("_link", "_place", "_told"):
            object.__setattr__(self, name, value)
        else:
            self._link.do("setattr", self, name, value)

    def __enter__(self) -> Any:
        """Enter it as a context."""
        return self._link.do("getattr", self, "__enter__")()

    def __exit__(self, kind: type | None, error: object, _: object) -> Any:
        """Leave it, in a test that failed without word of why."""
        return self._link.do("getattr", self, "__exit__")(None, None, None) if kind is None else None

    def __iter__(self) -> Any:
        """Its items: all at once, but of an iterator one by one, since it may have no end."""
        items = self._link.do("items", self)
        return items if isinstance(items, Remote) else iter(items)

    def __next__(self) -> Any:
        """Its next item."""
        return self._link.do("next", self)

    def __contains__(self, item: object) -> bool:
        """Whether one of its items equals it; where it has no items to look at, what it says."""
        try:
            items = iter(self)
        except TypeError:
            return bool(self._link.do("contains", self, item))
        return any(item is one or item == one for one in items)

    def __instancecheck__(self, value: object) -> bool:
        """Whether an object of the program's is of this class; objects of the tests never are."""
        return isinstance(value, Remote) and bool(self._link.do("isinstance", value, self))

    def __subclasscheck__(self, value: object) -> bool:
        """Whether a class of the program's is under this one."""
        return isinstance(value, Remote) and bool(self._link.do("issubclass", value, self))

    def __getitem__(self, key: Any) -> Any:
        """What it has there."""
        return self._link.do("getitem", self, key)

    def __setitem__(self, key: Any, item: Any) -> None:
        """Put something there."""
        self._link.do("setitem", self, key, item)

    def __delitem__(self, key: Any) -> None:
        """Take away what is there."""
        self._link.do("delitem", self, key)

    def __len__(self) -> int:
        """Its length."""
        return int(self._link.do("len", self))

    def __str__(self) -> str:
        """Its text."""
        return str(self._link.do("str", self))

    def __repr__(self) -> str:
        """Its representation."""
        return str(self._link.do("repr", self))

    def __format__(self, form: str) -> str:
        """Its text in a form."""
        return str(self._link.do("format", self, form))

    def __hash__(self) -> int:
        """Its own; to be found in a set it must be equal, too."""
        return int(self._link.do("hash", self))

    def __eq__(self, other: object) -> bool:
        """As the program's objects are to each other; to the tests' data, if it is a container, by what it holds."""
        if isinstance(other, Remote):
            return bool(self._link.do("eq", self, other))
        plain = self._link.do("plain", self)
        return not isinstance(plain, Remote) and bool(plain == other)


def _operation(name: str, reflected: bool = False) -> Any:
    """An operator, or a conversion to a plain number."""

    def operate(self: Remote, *others: Any) -> Any:
        result = self._link.do(name, *((*others, self) if reflected else (self, *others)))
        told = self._told or (name in PAIRED and not all(isinstance(one, Remote) and not one._told for one in others))
        if told and (name in ORDERS or not isinstance(result, Remote)):
            raise TypeError(f"{name} of an object of the program's and of the tests' data")
        if told:
            result._told = True
        return result

    return operate


ORDERS = ("lt", "le", "gt", "ge")
_SUMS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
PAIRED = (*ORDERS, *_SUMS)
_UNARY = ("neg", "pos", "abs", "invert")
OPERATORS = (*PAIRED, *_UNARY, "eq", "contains", "getitem", "setitem", "delitem")
"""What Python's module `operator` has."""
for _name in (*PAIRED, *_UNARY, "bool", "int", "float", "round"):
    setattr(Remote, f"__{_name}__", _operation(_name))
for _name in _SUMS:
    setattr(Remote, f"__r{_name}__", _operation(_name, reflected=True))
