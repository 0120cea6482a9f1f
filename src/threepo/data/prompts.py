"""Instructions around problems, for training and for evaluation: the paper's meaning in our words.

In every template `{prompt}` stands for the problem's text.
"""

MATH_TRAINING = """\
Solve the mathematics problem below. First reason inside <think> and </think>. After </think>, give nothing but the \
final answer, inside \\boxed{}.

{prompt}

Keep to this layout:
<think>
your reasoning
</think>
\\boxed{your final answer}"""
"""RLVR on mathematics: reasoning in tags, then only the boxed answer (spec 8.1)."""

MATH_EVALUATION = """\
You are an expert in solving mathematics problems. Think step by step, and put your final answer inside \\boxed{}.

Question:
{prompt}"""
"""Evaluation on mathematics: one user turn, which differs from the training prompt (spec 8.1)."""

CODE = """\
Solve the programming problem below in Python. First reason inside <think> and </think>. After </think>, give the \
whole program in one block:
```python
your program
```

{prompt}"""
"""RLVR and evaluation on code: the last Python block is what runs (spec 8.2, 9.3)."""

CODE_STDIN = "The program reads standard input and writes standard output."
"""Text added to a problem whose tests are inputs and outputs."""

CODE_STARTER = "Begin with this code, and keep its names:\n```python\n{starter}\n```"
"""Text added to a problem that gives the signature of its solution; `{starter}` stands for the signature."""
