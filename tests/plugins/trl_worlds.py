"""Environments made for TRL, in a module that imports nothing slow: every process of an environment imports it."""

import asyncio
from typing import Any


class Counter:
    """As a user of TRL writes it."""

    def __init__(self, step: int = 1) -> None:
        self.width = step

    def reset(self, target: int, **kwargs: Any) -> str:
        self.target, self.count = target, 0
        return f" Count to {target}."

    def increment(self, times: int) -> str:
        """Count on.

        Args:
            times: How often.
        """
        self.count += self.width * times
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def _private(self) -> None: ...


class Judged(Counter):
    """Waits for its judge; one object is used by all its coroutines."""

    async def increment(self, times: int) -> str:
        """Count on.

        Args:
            times: How often.
        """
        self.lock = getattr(self, "lock", None) or asyncio.Lock()
        self.loop = asyncio.get_running_loop()
        async with self.lock:
            await asyncio.sleep(0)
            return super().increment(times)

    async def get_reward(self) -> float:  # type: ignore[override]
        assert self.loop is asyncio.get_running_loop()
        return super().get_reward()


class Pictures(Counter):
    def reset(self, target: int, **kwargs: Any) -> Any:
        return [{"type": "image"}] if target else "none"


class Strict(Counter):
    """Takes the columns of its data and no others, and cannot score an episode."""

    def reset(self, prompt: str, target: int) -> str:  # type: ignore[override]
        return super().reset(target)

    def get_reward(self) -> None:  # type: ignore[override]
        return None


class Plain:
    """Keeps the prompt, and has no `get_reward`."""

    def reset(self, **row: Any) -> None:
        self.row = row

    def peek(self) -> str:
        """Look at the row."""
        return " ".join(sorted(self.row))
