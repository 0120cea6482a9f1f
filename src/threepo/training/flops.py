"""Operations of a training step, counted as in the paper's appendix on compute."""


def step_flops(weights: float, read: float, decoded: float, trained: float, frozen: bool = False) -> dict[str, float]:
    """Operations of one RLVR step by what they are for; the paper's table has their sum.

    Per weight and token, two forward and six forward and backward. The tokens: prompt tokens `read`, once for each
    draw, which shares them among its completions; `decoded` tokens; and tokens of prompts and completions `trained` on,
    once for each draw at which their gradient is taken. `frozen`: no gradients of the weights are made, which saves two
    operations of six, and adapters count nothing.
    """
    forward, passes = 2 * weights, 2 if frozen else 3
    return {"to read prompts": forward * read, "to decode": forward * decoded, "to train": passes * forward * trained}
