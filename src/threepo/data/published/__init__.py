"""The published data sets by name. To add one: a file next to this one with its record, and a line here."""

from threepo.data.published.code_r1 import CODE_R1
from threepo.data.published.dapo_math import DAPO_MATH
from threepo.data.published.gsm8k import GSM8K
from threepo.data.published.llama_nemotron import LLAMA_NEMOTRON, LLAMA_NEMOTRON_ANY
from threepo.data.published_set import ConversationSet, PublishedSet

PUBLISHED: dict[str, PublishedSet] = {found.name: found for found in (CODE_R1, DAPO_MATH, GSM8K)}
CONVERSATIONS: dict[str, ConversationSet] = {found.name: found for found in (LLAMA_NEMOTRON, LLAMA_NEMOTRON_ANY)}
