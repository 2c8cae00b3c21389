"""The rows of a run: training, validation and evaluation rows with prompts, their order and their fingerprints.

    data = load_data(config)                             # disjoint splits, with prompts
    data = fit_data(data, tokenizer, config)             # drops rows that do not fit the context
    train, validation = split_validation(data.train, config)

loading.py   loads and checks the splits, and measures the rows
"""

from lora_grpo.data.loading import (
    Data,
    columns_of,
    fingerprint,
    fit_data,
    gold_episodes,
    load_data,
    load_evaluation_rows,
    load_split,
    other_task,
    prompt_order,
    sft_command,
    split_validation,
    start_sandbox,
)
