"""Tests that are Python code: they run in the harness, the program in a process beside it.

Sent into the sandbox for such tests only, beside `harness` and `crossing`; runs in one namespace with them. The tests
find the program's functions under their names, as `Remote`s, and ask for everything over a `Link`; what comes back is
plain data, or another `Remote`. The program's process is made before the tests are read.
"""

from __future__ import annotations

import builtins
import marshal
import os
import resource
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import IO, Any, NoReturn

    from threepo.rewards.sandbox.crossing import decode, encode, receive, send
    from threepo.rewards.sandbox.harness import MEMORY_EXIT, alone, ending_of, execute, module, tell


def run_script(
    job: dict[str, Any], prefix: CodeType, program: CodeType, tests: IO[bytes], go: int, control: int
) -> None:
    asked, ask = os.pipe()
    replies, reply = os.pipe()
    pid = os.fork()
    if not pid:
        null = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1):
            os.dup2(null, file)
        alone(job, (asked, reply))
        _serve(asked, reply, prefix, program)
    os.close(asked)
    os.close(reply)
    null = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(null, file)  # what the tests print is nobody's
    link = Link(pid, ask, replies)
    names = module("tests")
    sys.modules["__main__"] = sys.modules["tests"]
    sys.set_int_max_str_digits(0)
    for index, source in enumerate(marshal.load(tests)):
        if not os.read(go, 1):
            return
        tell(control, _script_case(job, link, names, prefix if not index else None, source))
        if link.gone:
            return


def _script_case(job: dict[str, Any], link: Link, names: dict[str, Any], prefix: CodeType | None, source: str) -> str:
    try:
        if prefix is not None:
            exec(prefix, names)
            link.loaded()
        link.allow(job["cpu_s"])
        link.supply(source, names)
        exec(compile(source, "<tests>", "exec", 0, True), names)
    except GoneError:
        pass
    except AssertionError:
        return "wrong"
    except SystemExit as end:
        return "wrong" if end.code else "ok"  # unittest.main ends so
    except MemoryError:
        return "memory"
    except BaseException:
        return link.ending(job["cpu_s"]) if link.lost else "runtime"
    return link.ending(job["cpu_s"]) if link.lost else "ok"


def _used_names(source: str) -> tuple[set[str], set[str]]:
    """All names in the code, and those of which it takes attributes."""
    names, owners = set(), set()
    only_tree = 0x400  # ast.PyCF_ONLY_AST, without the import
    queue: list[Any] = [compile(source, "<tests>", "exec", only_tree, True)]
    for node in queue:
        if type(node).__name__ == "Name":
            names.add(node.id)
        elif type(node).__name__ == "Attribute":
            owners.add(getattr(node.value, "id", ""))
        for field in getattr(node, "_fields", ()):
            value = getattr(node, field, None)
            queue.extend(value if isinstance(value, list) else [value])
    return names, owners


class GoneError(BaseException):
    """The process of the program has ended."""


class Link:
    """The tests' end of the line to the program."""

    def __init__(self, pid: int, ask: int, replies: int) -> None:
        self.pid, self._ask, self._replies = pid, ask, replies
        self.lost = self.gone = False
        self._names: dict[str, Any] = {}
        self._before = 0.0

    def allow(self, cpu_s: float) -> None:
        """Let the program use `cpu_s` more seconds of processor time."""
        if sys.platform == "linux" and not self.gone:
            self._before = _cpu_of(self.pid)
            hard = resource.prlimit(self.pid, resource.RLIMIT_CPU)[1]
            soft = min(hard, int(-(-(self._before + cpu_s) // 1)))
            resource.prlimit(self.pid, resource.RLIMIT_CPU, (soft, hard))

    def loaded(self) -> None:
        """Wait until the program stands."""
        self._take()

    def supply(self, source: str, names: dict[str, Any]) -> None:
        """Give the tests what they use and do not have: modules that they forgot to import, and the program's names.

        Of modules never the program's own, nor of built-in functions: both could be made to agree with it.
        """
        self._names = names
        used, owners = _used_names(source)
        for name in used - names.keys() - set(dir(builtins)):
            if name in owners and name in sys.stdlib_module_names:
                names[name] = __import__(name)
            else:
                names.update(self.do("names", name))

    def do(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Have the program do something; what it changed of the arguments is changed here too."""
        shared = {name: value for name, value in self._names.items() if _is_of_tests(value)}
        self._send([what, encode([list(arguments), named], shared, _place_of), list(shared)])
        result, changed = decode(self._take(), shared.__getitem__, lambda place: Remote(self, place))
        for old, new in zip((*arguments, *named.values()), changed, strict=True):
            _adopt(old, new)
        return result

    def ending(self, cpu_s: float) -> str:
        """How the program's process ended; to end before the tests have is never right."""
        self.gone = True
        ending = ending_of(self.pid, self._before + cpu_s)
        return "runtime" if ending == "ok" else ending

    def _send(self, message: Any) -> None:
        try:
            send(self._ask, message)
        except BrokenPipeError:
            self._lose()

    def _take(self) -> Any:
        try:
            kind, value = receive(self._replies)
        except EOFError:
            self._lose()
        if kind == "raised":
            raise _exception(*value)
        return value

    def _lose(self) -> NoReturn:
        self.lost = True  # the tests may catch whatever is raised
        raise GoneError


def _is_of_tests(value: Any) -> bool:
    """Whether this is a class written in the tests, so that its objects cross as what they hold."""
    return isinstance(value, type) and value.__module__ == "tests"


def _place_of(value: Any) -> int:
    if isinstance(value, Remote):
        return int(value._place)
    raise TypeError(f"a {type(value).__name__} cannot be handed to the program")


def _cpu_of(pid: int) -> float:
    """Processor seconds that another process has used (the clock of a process, as Linux numbers it)."""
    return time.clock_gettime((~pid << 3) | 2)


def _exception(classes: list[str], message: str) -> Exception:
    """The nearest built-in exception; one that would end this process is none."""
    for name in classes:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                return found(message)
            except TypeError:  # such as UnicodeDecodeError, which wants more than a message
                continue
    return RuntimeError(message)


def _adopt(old: Any, new: Any) -> None:
    """Make `old` what the program left of it."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, (dict, set)) and type(old) is type(new):
        old.clear()
        old.update(new)
    elif hasattr(old, "__dict__") and type(old) is type(new) and not isinstance(old, (Remote, type)):
        vars(old).clear()
        vars(old).update(vars(new))


class Remote:
    """An object of the program that is no plain data. Its operators are the program's, against its own objects only."""

    def __init__(self, link: Link, place: int) -> None:
        self._link, self._place = link, place

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it there."""
        return self._link.do("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """Its attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set its attribute."""
        if name in ("_link", "_place"):
            object.__setattr__(self, name, value)
        else:
            self._link.do("setattr", self, name, value)

    def __iter__(self) -> Any:
        """Its items, all at once."""
        return iter(self._link.do("list", self))

    def __next__(self) -> Any:
        """Its next item."""
        return self._link.do("next", self)

    def __len__(self) -> int:
        """Its length."""
        return int(self._link.do("len", self))

    def __bool__(self) -> bool:
        """Its truth."""
        return bool(self._link.do("bool", self))

    def __str__(self) -> str:
        """Its text."""
        return str(self._link.do("str", self))

    def __repr__(self) -> str:
        """Its representation."""
        return str(self._link.do("repr", self))

    def __hash__(self) -> int:
        """By identity."""
        return id(self)

    def __eq__(self, other: object) -> bool:
        """Equal to nothing but what the program made."""
        return isinstance(other, Remote) and bool(self._link.do("eq", self, other))


def _operator(name: str) -> Any:
    def operate(self: Remote, *others: Any) -> Any:
        return self._link.do(name, self, *others)

    return operate


OPERATORS = (
    *("getitem", "setitem", "delitem", "contains", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("matmul", "neg", "lt", "le", "gt", "ge"),
)
for _name in OPERATORS:
    setattr(Remote, f"__{_name}__", _operator(_name))


# The program's end


def _serve(asked: int, reply: int, prefix: CodeType, program: CodeType) -> NoReturn:
    """Run the program, then do what the tests ask of it until they end."""
    sys.set_int_max_str_digits(0)
    names = module("solution")
    held: list[Any] = []

    def hold(value: Any) -> int:
        held.append(value)
        return len(held) - 1

    def class_of(name: str) -> type:
        found = names.get(name)
        return found if isinstance(found, type) else type(name, (), {})

    message: list[Any]
    classes: list[str]
    what, message, classes = "", [], []
    while True:
        try:
            if not what:
                execute(names, prefix, program)
                answer: Any = None
            else:
                arguments, named = decode(message, class_of, held.__getitem__)
                result = _do(what, names, arguments, named)
                shared = {name: names[name] for name in classes if isinstance(names.get(name), type)}
                answer = encode([result, [*arguments, *named.values()]], shared, hold)
            send(reply, ["value", answer])
        except MemoryError:
            os._exit(MEMORY_EXIT)
        except Exception as error:
            send(reply, ["raised", [[cls.__name__ for cls in type(error).__mro__], str(error)]])
            if not what:
                os._exit(1)
        try:
            what, message, classes = receive(asked)
        except EOFError:
            os._exit(0)


def _do(what: str, names: dict[str, Any], arguments: list[Any], named: dict[str, Any]) -> Any:
    import operator

    if what == "names":
        return {name: names[name] for name in arguments if name in names}
    if what == "call":
        return arguments[0](*arguments[1:], **named)
    return getattr(operator if what in OPERATORS or what == "eq" else builtins, what)(*arguments)
