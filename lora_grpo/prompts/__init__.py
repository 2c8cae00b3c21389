"""Prompts: chat messages and templates, answer formats, and what belongs to a model's thoughts.

    prompted = chat.add_prompts(rows, "xml")             # messages that ask for <answer>...</answer>
    text = chat.render_row(tokenizer, prompted[0])       # the text that the model continues
    thoughts.answer_of(completion)                       # the part of a completion that is graded

chat.py      prompt styles: messages, rendering, writing and parsing completions
messages.py  checks the chat messages that a user wrote
turns.py     the turns of a conversation in the format of the chat template
thoughts.py  what a prompt has begun of a completion, where thoughts end, and what is graded
"""

from lora_grpo.prompts import chat, thoughts, turns
from lora_grpo.prompts.chat import DEFAULT_STYLE, add_prompts, read_completion, render_row, write_completion
from lora_grpo.prompts.messages import check_asks, checked_messages, own_prompt
