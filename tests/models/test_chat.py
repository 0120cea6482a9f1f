"""Conversations to tokens: against tokens worked out by hand, and against the prompts of the policy at inference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from chats import CHATML, ENDLESS, FORGETFUL, MARKED, THINKING, TIDY, chat, chat_tokenizer
from threepo.errors import UserError
from threepo.models.chat import ChatEncoder, Span, UnrenderableChat

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda text: "<|im_" not in text)


def encoder(template: str, turns: str = "all") -> ChatEncoder:
    tokenizer = chat_tokenizer(template)
    return ChatEncoder(tokenizer, frozenset([tokenizer.eos_token_id]), turns)  # type: ignore[arg-type]


def encode(template: str, *contents: str, turns: str = "all") -> tuple[ChatEncoder, list[int], list[Span]]:
    made = encoder(template, turns)
    return made, *made.encode([made.render(chat(*contents), "row 1")])[0]


def imitated_texts(made: ChatEncoder, tokens: list[int], ranges: list[Span]) -> list[str]:
    return [made.tokenizer.decode(tokens[first:end]) for first, end in ranges]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_conversation_by_hand(template: str) -> None:
    made, tokens, ranges = encode(template, "hi", "ok", "a", "hihi")
    words = [
        *["<|im_start|>", *"user", "Ċ", "hi", "<|im_end|>", "Ċ"],  # 0 to 8
        *["<|im_start|>", *"assistant", "Ċ", "o", "k", "<|im_end|>", "Ċ"],  # 9 to 23
        *["<|im_start|>", *"user", "Ċ", "a", "<|im_end|>", "Ċ"],  # 24 to 32
        *["<|im_start|>", *"assistant", "Ċ", "hi", "hi", "<|im_end|>", "Ċ"],  # 33 to 47
    ]
    assert made.tokenizer.convert_ids_to_tokens(tokens) == words
    assert ranges == [(20, 23), (44, 47)], "the line's end after a turn is never generated"


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL])
def test_the_last_turn_alone(template: str) -> None:
    made, tokens, ranges = encode(template, "q", "<think>x</think>1", "q", "<think>y</think>2", turns="last")
    assert imitated_texts(made, tokens, ranges) == ["<think>y</think>2<|im_end|>"]


def test_a_token_across_the_end_of_the_prompt_is_split() -> None:
    """Of "<think>\\n" the prompt has "<think>": there `>` is a token, and the whole text would have `>` with a line."""
    made, tokens, ranges = encode(THINKING, "hi", "<think>\nhm>\n</think>hi")
    whole = made.tokenizer.apply_chat_template(
        list(chat("hi", "<think>\nhm>\n</think>hi")), return_dict=True, tokenize=True
    )["input_ids"]
    assert made.tokenizer.convert_ids_to_tokens(whole).count(">Ċ") == 2
    words = made.tokenizer.convert_ids_to_tokens(tokens)
    first = ranges[0][0]
    assert words[first - 2 : first + 5] == ["k", ">", "Ċ", "h", "m", ">Ċ", "<"]
    assert imitated_texts(made, tokens, ranges) == ["\nhm>\n</think>hi<|im_end|>"]


@given(TEXTS, TEXTS, st.sampled_from([CHATML, MARKED, THINKING]))
def test_the_tokens_before_an_answer_are_those_of_the_prompt_at_inference(
    question: str, answer: str, template: str
) -> None:
    if template is THINKING:
        answer = f"<think>{answer}"
    made, tokens, ranges = encode(template, question, answer)
    prompt = made.tokenizer.apply_chat_template(
        list(chat(question)), add_generation_prompt=True, return_dict=True, tokenize=True
    )["input_ids"]
    ((first, end),) = ranges
    assert tokens[:first] == prompt
    thought = "<think>" if template is THINKING else ""
    assert imitated_texts(made, tokens, ranges) == [f"{answer.removeprefix(thought)}<|im_end|>"]
    assert tokens[end:] == made.tokenizer("\n")["input_ids"]


@given(st.lists(TEXTS, min_size=2, max_size=6), st.sampled_from([CHATML, MARKED]))
def test_every_turn_of_the_assistant_is_imitated_and_nothing_else(contents: list[str], template: str) -> None:
    made, tokens, ranges = encode(template, *contents)
    assert imitated_texts(made, tokens, ranges) == [f"{content}<|im_end|>" for content in contents[1::2]]
    assert made.tokenizer.decode(tokens) == made.render(chat(*contents), "").text


def test_plain_text_begins_as_in_reinforcement_learning() -> None:
    tokenizer = chat_tokenizer("")
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    own = [("<|im_start|>", begin)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=own)
    made = ChatEncoder(tokenizer, frozenset([end]), "all")
    ((tokens, ranges),) = made.encode([made.render(chat("hi", "ok"), "row 1", plain=True)])
    prompt = tokenizer("hi")["input_ids"]
    assert prompt[0] == begin
    assert tokens == [*prompt, *tokenizer.convert_tokens_to_ids(["o", "k"]), end]
    assert ranges == [(2, 5)]


def test_nothing_predicts_the_first_token_of_a_text() -> None:
    made = encoder("")
    ((tokens, ranges),) = made.encode([made.render(chat("", "ok"), "row 1", plain=True)])
    assert made.tokenizer.convert_ids_to_tokens(tokens) == ["o", "k", "<|im_end|>"]
    assert ranges == [(1, 3)]


def test_a_blank_that_offsets_leave_out_belongs_to_the_next_token() -> None:
    """The prompt ends in a blank, and the whole text would have it in one token with the answer's first letter."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġh"]
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("Ġ", "h")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.post_processor, raw.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=template)
    made = ChatEncoder(tokenizer, frozenset([tokenizer.eos_token_id]), "all")
    ((tokens, ((first, end),)),) = made.encode([made.render(chat("q", "hi"), "row 1")])
    prompt = tokenizer.apply_chat_template(list(chat("q")), add_generation_prompt=True, return_dict=True, tokenize=True)
    assert tokens[:first] == prompt["input_ids"]
    assert tokenizer.decode(tokens[first:end]) == "hi<|im_end|>"


def test_a_batch_is_what_its_conversations_are() -> None:
    made = encoder(THINKING)
    chats = [chat("hi", "<think>a"), chat("x", "<think>\nb"), chat("hi", "<think>a")]
    rendered = [made.render(messages, "") for messages in chats]
    assert made.encode(rendered) == [made.encode([one])[0] for one in rendered]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"row 1: .*message 2 differently .*drop thoughts.*loss_on = 'last', or .*template"
    ):
        encode(FORGETFUL, "q", "<think>x</think>1", "q", "2")
    encode(FORGETFUL, "q", "1", "q", "2")  # no thought to drop


def test_a_template_that_writes_the_answer_otherwise_than_the_prompt_asks_is_refused() -> None:
    with pytest.raises(UserError, match=r"message 2 differently .*; set conversations.chat_template to"):
        encode(THINKING, "q", "no thought", turns="last")


def test_a_turn_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"row 1: .*ends in 'ok\\n' without .*\('<\|im_end\|>'\)"):
        encode(ENDLESS, "hi", "ok")


@pytest.mark.parametrize("turns", ["all", "last"])
def test_tools_are_shown_to_the_policy_before_every_turn(turns: str) -> None:
    template = CHATML.replace("{% for m", "{% if tools %}{{ tools | tojson }}{% endif %}{% for m", 1)
    made = encoder(template, turns)
    tools = [{"type": "function", "function": {"name": "price", "parameters": {}}}]
    shown = made.render(chat("hi", "ok", "a", "b"), "row 1", tools=tools)
    plain = made.render(chat("hi", "ok", "a", "b"), "row 1")
    assert '"price"' in shown.text
    assert shown.text.endswith(plain.text)
    assert [shown.text[slice(*turn)] for turn in shown.turns] == [plain.text[slice(*turn)] for turn in plain.turns]


def test_of_several_templates_the_one_for_tools_is_taken() -> None:
    made = encoder(CHATML)
    made.tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML}
    tools = [{"type": "function", "function": {"name": "price"}}]
    assert '"price"' in made.render(chat("hi", "ok"), "row 1", tools=tools).text
    assert "price" not in made.render(chat("hi", "ok"), "row 1").text


def test_what_the_template_refuses() -> None:
    with pytest.raises(UnrenderableChat, match="begin with the user"):
        encoder(TIDY).render([{"role": "assistant", "content": "hi"}], "row 1")


def test_tokenizers_that_do_not_serve() -> None:
    with pytest.raises(UserError, match=r"row 1: is a conversation, .* no chat template; set model.tokenizer"):
        encoder("").render([{"role": "user", "content": "hi"}], "row 1")
    slow = ByT5Tokenizer()
    slow.chat_template = CHATML
    with pytest.raises(UserError, match="use a fast tokenizer"):
        ChatEncoder(slow, frozenset(), "all")
