"""The rows of a run: training, validation and evaluation rows with prompts, their order and their fingerprints.

    data = load_data(config)                             # disjoint splits, with prompts
    data = fit_data(data, tokenizer, config)             # drops rows that do not fit the context
    train, validation = split_validation(data.train, config)

loading.py       the rows of a run: disjoint splits with prompts
split_rows.py    the rows of one split, as their task loads them
duplicates.py    rows with the same problem, within a split or in both
fingerprints.py  the SHA-256 of rows
lengths.py       drops rows that do not fit the context, and measures the rest
references.py    episodes of the reference answers, as SFT trains them
order.py         the order of prompts in training, and the validation rows
"""

from lora_grpo.data.fingerprints import fingerprint
from lora_grpo.data.lengths import fit_data, teacher_prompt_text
from lora_grpo.data.loading import (
    Data,
    check_tasks,
    load_data,
    load_evaluation_rows,
    other_task,
    start_sandbox,
)
from lora_grpo.data.order import longest_first_in_steps, prompt_order, split_validation
from lora_grpo.data.references import gold_episodes, sft_command
from lora_grpo.data.split_rows import columns_of, load_split
