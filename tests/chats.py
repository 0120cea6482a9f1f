"""A small fast tokenizer whose tokens can be worked out by hand, and chat templates of the kinds there are."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen2's chat template."""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The same, with the assistant's turns marked."""
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + "
    "(m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Drops the thoughts of all turns but the last, as Qwen3's."""
THINKING = CHATML.replace("assistant\\n' }}", "assistant\\n<think>' }}")
"""Opens the thought in the prompt, as Olmo 3's."""
ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
"""Ends no turn."""
TIDY = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + CHATML
"""Refuses what it does not like, as Mistral's."""


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, and the tokens `hi`, a blank line, and `>` with the end of its line."""
    merges = [("h", "i"), ("Ċ", "Ċ"), (">", "Ċ")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)


def chat(*contents: str) -> tuple[dict[str, str], ...]:
    """Turns of the user and the assistant, who take turns."""
    return tuple({"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents))
