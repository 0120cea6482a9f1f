"""Tests that are Python code: they run in the harness, the program in a process beside it.

Sent into the sandbox for such tests only, beside `harness`, `crossing` and `remote`; runs in one namespace with them.
The tests find the program's functions under their names, as `Remote`s, and ask for everything over a `Link`; what comes
back is plain data, or another `Remote`. The program's process is made before the tests are read.
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

    from threepo.rewards.sandbox.crossing import CONTAINERS, decode, encode, names_of, receive, send
    from threepo.rewards.sandbox.harness import MEMORY_EXIT, alone, ending_of, execute, module, tell
    from threepo.rewards.sandbox.remote import OPERATORS, Remote


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
    names = module("__main__")  # as whose code they may ask to be run
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
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[str, type[Exception]] = {}
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
        shared = self._shared()
        self._send([what, encode([list(arguments), named], shared, _place_of, whole=True), list(shared)])
        try:
            result, changed = decode(self._take(), shared.__getitem__, self._remote)
        except StopIteration:
            if what == "next":
                raise
            raise RuntimeError("StopIteration") from None  # else it would end whatever loop of the tests this is in
        for old, new in zip((*arguments, *named.values()), changed, strict=True):
            _adopt(old, new)
        return result

    def ending(self, cpu_s: float) -> str:
        """How the program's process ended; to end before the tests have is never right."""
        self.gone = True
        ending = ending_of(self.pid, self._before + cpu_s)
        return "runtime" if ending == "ok" else ending

    def _remote(self, place: int, names: list[str]) -> Any:
        """What stands for the program's object there, always the same; a class to catch for one of exceptions."""
        return self._error_class(names) if names else self._remotes.setdefault(place, Remote(self, place))

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
            raise self._exception(*value)
        return value

    def _lose(self) -> NoReturn:
        self.lost = True  # the tests may catch whatever is raised
        raise GoneError

    def _exception(self, names: list[str], message: str, content: list[Any]) -> Exception:
        arguments, attributes = decode(content, self._shared().__getitem__, self._remote)
        cls = self._error_class(names)
        if cls in self._errors.values():
            arguments = (message,)
        try:
            error = cls(*arguments)
        except TypeError:  # which wants more than it keeps, as of JSON
            error = cls.__new__(cls, *arguments)
        vars(error).update(attributes)
        return error

    def _error_class(self, names: list[str]) -> type[Exception]:
        """Python's class of that name, or the tests', or one made under those that it is under.

        None that would end this process. What is made here writes its message as it is, unlike KeyError.
        """
        (module, _, name), *above = names[0].rpartition("."), *names[1:]
        found = getattr(sys.modules.get(module), name, None) if _is_of_python(module) else self._shared().get(name)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
        if name not in self._errors:
            base = self._error_class(above) if above else Exception
            self._errors[name] = type(name, (base,), {"__str__": Exception.__str__})
        return self._errors[name]

    def _shared(self) -> dict[str, type]:
        """The classes of the tests."""
        return {name: value for name, value in self._names.items() if _is_of_tests(value)}


def _is_of_python(module: str) -> bool:
    """Whether its exceptions may be raised in the tests; unittest has one that skips them."""
    return module.partition(".")[0] in sys.stdlib_module_names - {"unittest"}


def _is_of_tests(value: Any) -> bool:
    """Whether this is a class written in the tests, so that its objects cross as what they hold."""
    return isinstance(value, type) and value.__module__ == "__main__"


def _place_of(value: Any) -> int:
    if isinstance(value, Remote):
        return int(value._place)
    raise TypeError(f"a {type(value).__name__} cannot be handed to the program")


def _cpu_of(pid: int) -> float:
    """Processor seconds that another process has used (the clock of a process, as Linux numbers it)."""
    return time.clock_gettime((~pid << 3) | 2)


def _adopt(old: Any, new: Any) -> None:
    """Make `old` what the program left of it."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict) and type(old) is type(new):
        old.clear()
        old |= new
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif type(old) is type(new) and type(old).__name__ in ("deque", "bytearray"):
        old.clear()
        old.extend(new)
    elif hasattr(old, "__dict__") and type(old) is type(new) and not isinstance(old, (Remote, type)):
        vars(old).clear()
        vars(old).update(vars(new))


# The program's end


def _serve(asked: int, reply: int, prefix: CodeType, program: CodeType) -> NoReturn:
    """Run the program, then do what the tests ask of it until they end."""
    sys.set_int_max_str_digits(0)
    names = module("solution")
    held: list[Any] = []
    places: dict[int, int] = {}
    made: dict[str, type] = {}  # classes of the tests that the program does not have

    def hold(value: Any) -> int:
        if id(value) not in places:
            places[id(value)] = len(held)
            held.append(value)  # which keeps its id its own
        return places[id(value)]

    def class_of(name: str) -> type:
        found = names.get(name)
        return found if isinstance(found, type) else made.setdefault(name, type(name, (), {}))

    message: list[Any]
    classes: list[str]
    shared: dict[str, type]
    what, message, classes, shared = "", [], [], {}
    while True:
        try:
            if not what:
                execute(names, prefix, program)
                answer: Any = None
            else:
                shared = {name: class_of(name) for name in classes}
                arguments, named = decode(message, class_of, lambda place, _: held[place])
                result = _do(what, names, arguments, named)
                answer = encode([result, [*arguments, *named.values()]], shared, hold, whole=False)
            send(reply, ["value", answer])
        except MemoryError:
            os._exit(MEMORY_EXIT)
        except Exception as error:
            if not what:
                os._exit(1)  # there is no program to pass any of the tests
            content = encode([error.args, vars(error)], shared, hold, whole=False)
            send(reply, ["raised", [names_of(type(error)), str(error), content]])
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
    if what == "items":
        return list(arguments[0]) if hasattr(type(arguments[0]), "__len__") else iter(arguments[0])
    if what == "plain":
        kinds = {**{cls: cls for cls in CONTAINERS}, type({}.keys()): set, type({}.items()): set}
        return next((of(arguments[0]) for cls, of in kinds.items() if isinstance(arguments[0], cls)), arguments[0])
    if what in OPERATORS:
        return getattr(operator, f"__{what}__")(*arguments)
    return getattr(builtins, what)(*arguments)
