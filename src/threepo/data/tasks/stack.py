from random import Random
from typing import ClassVar

from threepo.data.task import Task


class Stack(Task):
    """Run a stack machine: `stack 3 5 swap dup over pop` -> `5 3 3`, the final stack, bottom first.

    A digit pushes itself; `pop` drops the top, `dup` doubles it, `swap` exchanges the top two, `over` pushes the
    second. Level: how many operations. Worked out by writing the stack after every operation.
    """

    name = "stack"
    default_levels = (4, 5, 6, 7)
    min_level = 2
    top_two: ClassVar = {"dup": (0, 1, 1), "pop": (0,), "swap": (1, 0), "over": (0, 1, 0)}
    """Result of each operation on the second element (0) and the top (1)."""

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        operations: list[str] = []
        stack: list[str] = []
        for _ in range(level):
            known = ["push", "push", *(self.top_two if len(stack) > 1 else ())]  # the final stack must not be empty
            operation = rng.choice(known)
            operations.append(str(rng.randrange(10)) if operation == "push" else operation)
            stack = self.after(stack, operations[-1])
        return f"stack {' '.join(operations)}\n", " ".join(stack)

    def work(self, prompt: str) -> str:
        stacks: list[list[str]] = [[]]
        for operation in prompt.split()[1:]:
            stacks.append(self.after(stacks[-1], operation))
        return "\n".join(map(" ".join, stacks[1:]))

    def after(self, stack: list[str], operation: str) -> list[str]:
        """The stack after one operation."""
        if operation not in self.top_two:
            return [*stack, operation]
        return stack[:-2] + [stack[-2:][i] for i in self.top_two[operation]]
