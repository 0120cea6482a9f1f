"""C3PO from prompts to optimizer, in one file to read from top to bottom.

    python examples/rl_loop.py        # takes seconds on a CPU

C3PO (paper section 3.2, algorithm 2) is reinforcement learning with verifiable rewards in which the completions of a
prompt come from several policies, sampled from a posterior over the weights. One step:

    1. Sample N sets of weights from the posterior. Each writes G / N completions of every prompt.
    2. Reward every completion by a program that knows the answer.
    3. Compare the G completions of a prompt with each other, across the policies: advantages.
    4. Sample one more set of weights and take the gradient there, corrected for the fact that other policies wrote the
       completions (Seq-MIS).
    5. Sum the loss over tokens, divide once, and let IVON update the mean and the variance of the posterior.

Everything except the posterior (`threepo.IVON`) is written out here: tokenizer, model, sampler, reward, loss. This file
is for learning. The library does the same with fast engines, real verifiers, checkpoints and all variants:
`threepo train demo/c3po`.

The task is to continue the alphabet to its end: the answer to "c" is "def.". The policy starts from random weights and
learns from rewards alone.

Names end in the dimensions of their tensors, outermost first:

    P  prompts of a step                                 L  tokens of a prompt
    G  completions of a prompt, over all draws           T  tokens of the longest completion
    K  completions of a prompt by one draw, G / N        S  tokens of a row, L + T
    R  rows: completions of a step, P * G                V  vocabulary
"""

from dataclasses import dataclass

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from threepo import IVON, Draw

STEPS = 80
PROMPTS, GROUP, DRAWS = 16, 16, 4  # P, G, N
LOW, HIGH = 0.5, 2.0  # Seq-MIS masks completions whose ratio is outside these


# A tokenizer, a model, a task


LETTERS, END = "abcdef", "."
VOCABULARY = LETTERS + END  # one token per character
STOP = VOCABULARY.index(END)  # also fills a row after its completion has ended
LONGEST = len(VOCABULARY)  # tokens of a completion; longer ones are cut


def encode(text: str) -> list[int]:
    """Characters to tokens."""
    return [VOCABULARY.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    """Tokens to characters."""
    return "".join(VOCABULARY[token] for token in tokens)


def reward(prompt: str, completion: str) -> float:
    """The share of the answer that is right, counted from its beginning; 1 if all of it is right."""
    answer = LETTERS[LETTERS.index(prompt) + 1 :] + END
    right = 0
    while right < len(completion) and right < len(answer) and completion[right] == answer[right]:
        right += 1
    return right / len(answer)


def make_model() -> Qwen2ForCausalLM:
    """A Qwen2 with random weights, small enough for a step in a tenth of a second."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return Qwen2ForCausalLM(config)


def make_optimizer(model: Qwen2ForCausalLM, seed: int) -> IVON:
    """The posterior: a Gaussian with mean m and a diagonal Hessian h, which IVON learns from gradients.

    At first, the standard deviation of the noise is 1 / sqrt(ess * hess_init) = 0.014, and the weights' is 0.02. A step
    moves a weight by at most lr * hess_init * clip_radius = 0.002. For a real model, start from IVON's defaults.
    """
    return IVON(model.named_parameters(), lr=2e3, ess=5e6, hess_init=1e-3, clip_radius=1e-3, seed=seed)


# Rollouts


@dataclass
class Rollouts:
    """Completions, one per row, with what the loss needs."""

    tokens_R_S: torch.Tensor
    """Prompt and completion."""
    logprobs_R_T: torch.Tensor
    """Log-probability of each token of the completion under the policy that wrote it; 0 after the end."""
    mask_R_T: torch.Tensor
    """True for the tokens of the completion, its end included."""

    def texts(self) -> list[str]:
        """The completions as text, ends included."""
        tokens_R_T = self.tokens_R_S[:, -self.mask_R_T.shape[1] :]
        return [decode(tokens[mask].tolist()) for tokens, mask in zip(tokens_R_T, self.mask_R_T, strict=True)]


@torch.no_grad()
def generate(model: Qwen2ForCausalLM, prompts_R_L: torch.Tensor) -> Rollouts:
    """Sample a completion of each row at temperature 1, with the weights that the model holds now.

    Every token needs a pass over the whole row. A real engine keeps the keys and values of earlier tokens.
    """
    tokens_R_S, logprobs, mask = prompts_R_L, [], []
    running_R = torch.ones(len(prompts_R_L), dtype=torch.bool)
    for _ in range(LONGEST):
        logprobs_R_V = model(tokens_R_S).logits[:, -1].log_softmax(dim=-1)
        next_R = torch.multinomial(logprobs_R_V.exp(), 1).squeeze(1)
        next_R = torch.where(running_R, next_R, STOP)
        logprobs.append(logprobs_R_V.gather(1, next_R.unsqueeze(1)).squeeze(1) * running_R)
        mask.append(running_R)
        tokens_R_S = torch.cat([tokens_R_S, next_R.unsqueeze(1)], dim=1)
        running_R = running_R & (next_R != STOP)
    return Rollouts(tokens_R_S, torch.stack(logprobs, dim=1), torch.stack(mask, dim=1))


def collect(model: Qwen2ForCausalLM, optimizer: IVON, prompts: list[str], step: int) -> Rollouts:
    """G completions of every prompt, G / N of them by each of N draws. Rows are ordered by prompt, then by draw.

    A draw is an address, not a tensor. IVON computes the noise z from the address, so nothing is stored, and the same
    weights can be computed again from the address (paper equations 3 and 4):

        theta_n = m + sigma * z_n,    sigma = 1 / sqrt(ess * (h + weight_decay))

    A draw writes whole completions of all prompts, so it explores as one consistent policy. A higher temperature would
    only make each token more random.
    """
    share = GROUP // DRAWS  # K
    prompts_PK_L = torch.tensor([encode(prompt) for prompt in prompts]).repeat_interleave(share, dim=0)
    parts = []
    for n in range(DRAWS):
        with optimizer.perturbed(Draw(optimizer.seed, step, n)):
            parts.append(generate(model, prompts_PK_L))

    def by_prompt(name: str) -> torch.Tensor:
        """A field of all parts: N tensors of P * K rows become one of P * N * K rows."""
        by_draw = [getattr(part, name).unflatten(0, (len(prompts), share)) for part in parts]
        return torch.stack(by_draw, dim=1).flatten(0, 2)

    return Rollouts(by_prompt("tokens_R_S"), by_prompt("logprobs_R_T"), by_prompt("mask_R_T"))


# From rewards to the update


def group_advantages(rewards_P_G: torch.Tensor) -> torch.Tensor:
    """A = (r - mean) / (std + 1e-6) over the completions of each prompt (paper section 2.1).

    The group is pooled over draws. If one draw solves a prompt and another does not, that is a signal, even if the
    completions of each draw are all equal. Equal rewards give 0: the prompt has no learning signal in this step.
    """
    centred_P_G = rewards_P_G - rewards_P_G.mean(dim=1, keepdim=True)
    return centred_P_G / (rewards_P_G.std(dim=1, keepdim=True) + 1e-6)


def completion_logprobs(model: Qwen2ForCausalLM, rollouts: Rollouts) -> torch.Tensor:
    """Log-probs [R, T] of completions under the weights that the model holds now, with gradient; 0 after the end."""
    tokens_R_S, mask_R_T = rollouts.tokens_R_S, rollouts.mask_R_T
    # The logits at one position predict the next token: the last position predicts nothing, the first is not predicted.
    logprobs_R_S_V = model(tokens_R_S[:, :-1]).logits.log_softmax(dim=-1)
    chosen_R_S = logprobs_R_S_V.gather(2, tokens_R_S[:, 1:].unsqueeze(2)).squeeze(2)
    return chosen_R_S[:, -mask_R_T.shape[1] :] * mask_R_T


def seq_mis(logprobs_R_T: torch.Tensor, behaviour_R_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence-level masked importance sampling: the weight [R] and the ratio [R] of each completion y.

    The completions come from other weights than those where the gradient is taken. The ratio

        rho = pi_gradient(y | x) / pi_behaviour(y | x) = exp(sum over tokens of the difference of log-probs)

    corrects for this. A few ratios far from 1 would dominate the sum, so completions outside [LOW, HIGH] are masked.
    No gradient flows through the ratio.
    """
    rho_R = (logprobs_R_T.detach() - behaviour_R_T).sum(dim=1).clamp(-20, 20).exp()
    return torch.where((rho_R >= LOW) & (rho_R <= HIGH), rho_R, 0.0), rho_R


def learn(
    model: Qwen2ForCausalLM, optimizer: IVON, rollouts: Rollouts, rewards_P_G: torch.Tensor, step: int
) -> dict[str, float]:
    """Update the posterior from the rewarded rollouts of a step. Returns metrics."""
    advantages_R = group_advantages(rewards_P_G).flatten()
    # The gradient is taken at a draw that wrote none of the completions, so all completions are treated alike. The mean
    # would not do, because IVON learns h from the product of noise and gradient (Stein's identity).
    fresh = Draw(optimizer.seed, step, DRAWS)
    with optimizer.perturbed(fresh):
        logprobs_R_T = completion_logprobs(model, rollouts)
        weights_R, rho_R = seq_mis(logprobs_R_T, rollouts.logprobs_R_T)
        # Paper equation 1. The batch gives one update, so the ratio to the policy before the update is 1 and clipping
        # has no effect. The ratio still carries the gradient: exp(x - x.detach()) has the gradient of x.
        ratio_R_T = (logprobs_R_T - logprobs_R_T.detach()).exp()
        losses_R_T = -(weights_R * advantages_R).unsqueeze(1) * ratio_R_T * rollouts.mask_R_T
        losses_R_T.sum().backward()  # a sum, so a larger batch can be split into parts
    optimizer.observe(fresh)  # the model holds the mean again, bit for bit

    kept_R = weights_R > 0
    tokens = int(rollouts.mask_R_T[kept_R].sum())
    if tokens:
        optimizer.step(divisor=tokens)  # the only division: by the tokens that were kept, after all sums are complete
    else:
        optimizer.discard()  # all completions were masked
    return {"kept": float(kept_R.double().mean()), "rho min": float(rho_R.min()), "rho max": float(rho_R.max())}


def train(seed: int = 0) -> list[float]:
    """Learn the task from random weights; returns the mean reward of each step."""
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make_optimizer(model, seed)
    history = []
    for step in range(STEPS):
        prompts = [LETTERS[i] for i in torch.randint(len(LETTERS), (PROMPTS,))]
        rollouts = collect(model, optimizer, prompts, step)
        rewards_R = [reward(prompts[row // GROUP], text) for row, text in enumerate(rollouts.texts())]
        rewards_P_G = torch.tensor(rewards_R).view(PROMPTS, GROUP)
        seen = learn(model, optimizer, rollouts, rewards_P_G, step)

        history.append(float(rewards_P_G.mean()))
        seen = {"reward": history[-1], "solved": float((rewards_P_G == 1).double().mean()), **seen}
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:2}  " + "  ".join(f"{name} {value:.2f}" for name, value in seen.items()))
    for prompt in LETTERS:  # outside `perturbed` the model holds the mean, which one would deploy
        print(f"the mean policy: {prompt} -> {generate(model, torch.tensor([encode(prompt)])).texts()[0]}")
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads do not help a model of this size
    history = train()
    print(f"reward before {history[0]:.2f}, after {sum(history[-5:]) / 5:.2f} (mean of the last 5 steps)")
