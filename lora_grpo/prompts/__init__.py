"""The text around an answer: what a prompt asks for, and which part of a completion is the answer.

    prompted = chat.add_prompts(rows, "xml")             # messages that ask for <answer>...</answer>
    text = chat.render_row(tokenizer, prompted[0])       # the text that the model continues
    thoughts.answer_of(completion)                       # the part of a completion that is graded

styles.py              formats of answers: their system prompts, writing and reading completions
chat.py                the messages of a row's prompt, and rendering them with the chat template
template_variables.py  variables of the chat template, such as `enable_thinking`
plain_text.py          prompts without a chat template, and where their completions end
messages.py            checks the chat messages that a user wrote
turns.py               the turns of a conversation in the format of the chat template
thoughts.py            what a prompt has begun of a completion, where thoughts end, and what is graded
"""

from lora_grpo.prompts import chat, plain_text, styles, template_variables, thoughts, turns
from lora_grpo.prompts.chat import add_prompts, render_row
from lora_grpo.prompts.messages import check_asks, checked_messages, prompt_of_record
from lora_grpo.prompts.styles import DEFAULT_STYLE, read_completion, write_completion
