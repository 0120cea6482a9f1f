"""Hooks of plug-ins: a library that has renamed or changed one is refused when the plug-in is imported."""

from typing import Any

import pytest

from threepo.errors import UserError
from threepo.plugins.hooks import check_called, check_hooks


class Library:
    def step(self, batch: int, scale: float = 1.0) -> float:
        return batch * scale

    def run(self) -> float:
        return self.step(2)


class Renamed:
    def advance(self, batch: int) -> float:
        return batch

    def run(self) -> float:
        return self.advance(2)


class Older:
    def step(self, batch: int) -> float:
        return batch

    def run(self) -> float:
        return self.step(2)


class Swapped:
    def step(self, scale: float, batch: int) -> float:
        return batch * scale


class Unused(Library):
    def run(self) -> float:
        return 2.0


def plugin(base: type) -> Any:
    """A plug-in for a library whose class is `base`."""

    class Plugin(base):  # type: ignore[misc]
        def step(self, batch: int, scale: float = 1.0, **more: Any) -> float:
            return -super().step(batch, **more)

    return check_hooks("pytest", "0.1", "", needed="step")(Plugin)


def test_a_hook_that_is_called_does_its_work() -> None:
    for base in (Library, Older):  # the older one has no scale, which is optional here
        made = plugin(base)()
        assert made.run() == -2
        check_called(made)
    with pytest.raises(UserError, match=r"takes a step without step"):
        check_called(plugin(Library)())


def test_a_hook_that_was_renamed_or_changed_is_refused() -> None:
    for base in (Renamed, Swapped):
        with pytest.raises(UserError, match=rf"{base.__name__} has no step\(self, batch, scale\).* pytest==0\.1"):
            plugin(base)


def test_a_hook_that_is_never_called_is_noticed() -> None:
    made = plugin(Unused)()
    assert made.run() == 2
    with pytest.raises(UserError, match=r"pytest .* Plugin was tested with 0\.1: it takes a step without step"):
        check_called(made)


def test_what_a_subclass_replaces_is_its_own() -> None:
    class Own(plugin(Library)):  # type: ignore[misc]
        def step(self, batch: int, **more: Any) -> float:
            return 0.0

    made = Own()
    assert made.run() == 0
    check_called(made)
