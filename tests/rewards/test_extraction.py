"""The part of a completion that is its answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threepo.rewards.math import boxes, extract_answer, keeps_layout
from threepo.types import THINK, THINK_END


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{4} no: \boxed{ 5 }", "5"),
        (r"\fbox{5}", "5"),
        (r"\framebox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\\boxed{5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, \{2\}\right\}}", r"\left\{1, \{2\}\right\}"),
        (r"\boxed{\{1\right.}", r"\{1\right."),
        (r"\boxed{3 + \boxed{5}}", r"3 + \boxed{5}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\text{The area is } \boxed{5}}", "5"),
        (r"\boxed{Area = $\boxed{5}$.}", "5"),
        (r"\boxed{\boxed{3}, \boxed{5}}", r"\boxed{3}, \boxed{5}"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{6 \boxed{5}", "5"),
        (r"put it into \boxed{}: \boxed{5}. That was \boxed{ }", "5"),
        (r"<think>\boxed{4}</think> \boxed{5}", "5"),
        (r"<think>\boxed{4}</think> it is 5", None),
        (r"<think>\boxed{4}</think> x </think> 5", None),
        (r"<think> not closed \boxed{5}", None),
        ("<think> not closed. Answer: 5", None),
        (r"<think>\boxed{4}</think> <think> again \boxed{5}", None),
        (r"\boxed{5} <think> or \boxed{6}", "5"),
        ("Answer: 5", "5"),
        ("**Answer:** 5", "5"),
        ("answer: 4\nAnswer: $5$.", "$5$."),
        ("The final answer:\n5", "5"),
        (r"Answer: 4, or \boxed{5}", "5"),
        ("The answer is 5", None),
        ("Answer:", None),
        ("#### 5", None),
        (r"\boxed{", None),
        (r"\boxed", None),
        ("", None),
        ("}}}{{{", None),
        (r"} \boxed{5} {", "5"),
    ],
)
def test_answers_are_found(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


BALANCED = st.recursive(
    st.text(st.characters(exclude_characters="{}\\")),
    lambda inner: st.lists(inner).map(lambda parts: "{" + "".join(parts) + "}"),
)


def _no_thought(text: str) -> bool:
    return THINK not in text and THINK_END not in text


@given(st.text().filter(_no_thought), BALANCED.filter(lambda text: bool(text.strip()) and _no_thought(text)))
def test_a_box_holds_whatever_is_balanced(before: str, content: str) -> None:
    assert extract_answer(before.replace("\\", "") + r"\boxed{" + content + "}") == content.strip()


@given(
    st.lists(st.sampled_from([r"\boxed", r"\fbox", "{", "}", r"\{", r"\}", "\\", "x", " ", "</think>"])).map("".join)
)
def test_the_contents_of_boxes_are_balanced(text: str) -> None:
    for start, end in boxes(text):
        inside = text[start:end].replace("\\\\", "").replace(r"\{", "").replace(r"\}", "")
        assert inside.count("{") == inside.count("}")
        assert text[end] == "}"


@pytest.mark.parametrize(
    ("completion", "kept"),
    [
        (r"<think>so</think>\boxed{5}", True),
        ("<think>so\nit is</think>\n\n\\boxed{\\frac{1}{2}}\n", True),
        (r"<think></think> \boxed{5}", True),
        (r"<think>\boxed{4}</think> \boxed{5}", True),
        (r"<think>so</think> \boxed{5}.", False),
        (r"<think>so</think> It is \boxed{5}", False),
        (r"<think>so</think> \boxed{4} \boxed{5}", False),
        (r"<think>so</think> \boxed{4}{5}", False),
        (r"<think>so</think> \boxed{5", False),
        (r"<think>so</think> \boxed{}", False),
        (r"<think>so</think> 5", False),
        (r"<think>a<think>b</think>c</think> \boxed{5}", False),
        (r"<think>a</think><think>b</think> \boxed{5}", False),
        (r"so</think> \boxed{5}", False),
        (r"<think>so \boxed{5}", False),
        (r"First, <think>so</think> \boxed{5}", False),
        (r"\boxed{5}", False),
        ("", False),
    ],
)
def test_the_layout(completion: str, kept: bool) -> None:
    assert keeps_layout(completion) is kept
