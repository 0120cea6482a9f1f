"""Checks of hooks, the methods of another library that a plug-in overrides: renamed there, they would never run.

And what resuming does to the settings that were passed.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from typing import Any

from threepo.errors import ThreepoWarning, UserError

LOGGED = ("posterior/sigma_to_rms", "posterior/clipped_share", "optimizer/skipped_steps")
"""Metrics of IVON that plug-ins add to the log of their library."""


def check_hooks(package: str, tested: str, hooks: str, needed: str = "") -> Callable[[type], Any]:
    """Make a class decorator that raises `UserError` unless the base class has these hooks, with the same parameters.

    `check_called` verifies later that the `needed` hooks were called. Both arguments are names separated by spaces.
    """

    def check(plugin: Any) -> Any:
        plugin._tested = f"{package} {version(package)} is installed, {plugin.__name__} was tested with {tested}"
        plugin._needed = {name: _counting(vars(plugin)[name]) for name in needed.split()}
        for name in [*hooks.split(), *plugin._needed]:
            ours = inspect.signature(vars(plugin)[name]).parameters
            named = [x for x, p in ours.items() if p.kind == p.POSITIONAL_OR_KEYWORD]
            required = [x for x in named if ours[x].default is inspect.Parameter.empty]  # others may be new there
            overridden = getattr(super(plugin, plugin), name, None)
            theirs = list(inspect.signature(overridden).parameters) if overridden else []
            if theirs[: len(named)] != named[: len(theirs)] or len(theirs) < len(required):
                lacks = f"{plugin.__mro__[1].__name__} has no {name}({', '.join(named)})"
                raise UserError(f"{plugin._tested}: {lacks}; install {package}=={tested}")
        for name, hook in plugin._needed.items():
            setattr(plugin, name, hook)
        return plugin

    return check


def _counting(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that its instance remembers the call."""

    @wraps(hook)
    def counting(self: Any, *args: Any, **settings: Any) -> Any:
        vars(self).setdefault("_called", set()).add(hook.__name__)
        return hook(self, *args, **settings)

    return counting


def check_called(plugin: Any) -> None:
    """`UserError` at a step if the library has never called a needed hook that no subclass has replaced."""
    for name, hook in plugin._needed.items():
        if getattr(type(plugin), name) is hook and name not in vars(plugin).get("_called", ()):
            raise UserError(f"{plugin._tested}: it takes a step without {name}, so threepo's draws would not be used")


@contextmanager
def passed_settings_kept(optimizer: Any, passed: Collection[str]) -> Iterator[None]:
    """Keep the settings passed as `ivon`, except `hess_init`, when the body loads a checkpoint, and warn of changes."""
    own = {name: value for name, value in optimizer.param_groups[0].items() if name in passed}
    yield
    saved = {name: optimizer.param_groups[0][name] for name in own}
    other = [name for name in own if own[name] != saved[name]]
    for group in optimizer.param_groups:
        group.update({name: own[name] for name in other if name != "hess_init"})
    if other:
        values = ", ".join(f"{name} = {own[name]!r} (the checkpoint: {saved[name]!r})" for name in other)
        fate = "all but hess_init replace the checkpoint's, whose Hessian is loaded; leave out what should not change"
        warnings.warn(f"resuming with other settings in ivon, {values}: {fate}", ThreepoWarning, stacklevel=3)
