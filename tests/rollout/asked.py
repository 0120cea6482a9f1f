"""Shared by the tests of every engine: the same requests, and the trainer's log-probs of the answers."""

import torch

from threepo.models.packing import flatten
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.types import Completion, CreditedRow, Draw, Problem, Request

PROMPTS = [
    "a",
    "sort 31\n",
    "a somewhat longer prompt: ",
    "ab",
    "more than one block of a prefix cache: " + "0123456789" * 13,
    "and a thought that is open: <think>\n",
]


def requests_for(policy: Policy, draws: list[Draw | None], rollouts: int = 2) -> list[Request]:
    """Every prompt, `rollouts` times under each draw; prompt-major."""
    return [
        Request(Problem(id=text, prompt=text), tuple(policy.tokenizer(text)["input_ids"]), draw, n * rollouts + i)
        for text in PROMPTS
        for n, draw in enumerate(draws)
        for i in range(rollouts)
    ]


def trainer_logprobs(policy: Policy, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [T] of a completion by the trainer's forward pass, at the weights that the model holds now."""
    with torch.no_grad():
        return policy.logprobs(flatten([CreditedRow.of(completion, 0)], policy.device), temperature)[0].cpu()


def differences(
    policy: Policy, optimizer: IVON, completions: list[Completion], temperature: float = 1.0
) -> dict[tuple[Draw | None, Draw | None], float]:
    """(weights of the trainer, weights claimed): largest difference in log-prob."""
    draws = list(dict.fromkeys(c.draw for c in completions))
    found = {}
    for draw in draws:
        with optimizer.at(draw):
            for other in draws:
                found[draw, other] = max(
                    float((trainer_logprobs(policy, c, temperature) - torch.tensor(c.logprobs)).abs().max())
                    for c in completions
                    if c.draw == other
                )
    return found
