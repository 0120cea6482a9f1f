"""Run a stack machine. Level: how many operations.

    stack 3 5 swap dup over pop         ->  5 3 3
A digit pushes itself; `pop` drops the top, `dup` doubles it, `swap` exchanges the top two, `over` pushes the second.
The answer is the final stack, bottom first.
"""

from random import Random

from threepo.data.task import Task


class Stack(Task):
    """Worked out by writing the stack after every operation."""

    name = "stack"
    default_levels = (4, 5, 6, 7)
    min_level = 2

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        operations: list[str] = []
        stack: list[str] = []
        while len(operations) < level:
            known = ["push", "push"]
            known += ["dup", "pop", "swap", "over"] if len(stack) > 1 else []  # the final stack must not be empty
            operation = rng.choice(known)
            operations.append(str(rng.randrange(10)) if operation == "push" else operation)
            _apply(stack, operations[-1])
        return f"stack {' '.join(operations)}\n", " ".join(stack)

    def work(self, prompt: str) -> str:
        stack: list[str] = []
        lines = []
        for operation in prompt.split()[1:]:
            _apply(stack, operation)
            lines.append(" ".join(stack))
        return "\n".join(lines)


def _apply(stack: list[str], operation: str) -> None:
    if operation == "pop":
        stack.pop()
    elif operation == "dup":
        stack.append(stack[-1])
    elif operation == "swap":
        stack[-1], stack[-2] = stack[-2], stack[-1]
    elif operation == "over":
        stack.append(stack[-2])
    else:
        stack.append(operation)
