"""A base model without a chat template that answers, and then, like real ones, writes and answers its own question."""

import json
import shutil
from pathlib import Path

import torch

from lora_grpo import starter
from lora_grpo.config import ModelConfig
from lora_grpo.models import base_model
from lora_grpo.prompts import chat

ANSWERS = {"What is 9 plus 9?": 18, "What is 4 plus 3?": 7, "What is 20 minus 8?": 12, "What is 6 plus 5?": 11}
INVENTED = "\n\nQuestion: How many?\nAnswer: So.\n#### 99\n\nQuestion: How"


OTHERS = {"What is 1 plus 1?": 2, "What is 2 plus 2?": 4}


def rows_file(folder: Path, answers: dict[str, int] = ANSWERS) -> str:
    path = folder / f"{len(answers)} questions.jsonl"
    records = ({"question": question, "answer": str(answer)} for question, answer in answers.items())
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def rows() -> list[dict]:
    records = [
        {"id": f"q/{number}", "task": "gsm8k", "question": question, "answer": str(answer)}
        for number, (question, answer) in enumerate(ANSWERS.items())
    ]
    return chat.add_prompts(records, "hashes")


def make_plain_base(folder: Path) -> str:
    """Write the bundled model after it has learned the answers by heart, and return its folder."""
    name = str(shutil.copytree(starter.model_path(), folder / "plain"))
    Path(name, "chat_template.jinja").unlink()
    settings = ModelConfig(name=name, bits=16)
    tokenizer, model = base_model.load_tokenizer(settings), base_model.load_base(settings).float()
    texts = [
        chat.render_row(tokenizer, row) + f" It is {row['answer']}.\n#### {row['answer']}{INVENTED}" for row in rows()
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for _ in range(60):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1, loss.item()
    model.save_pretrained(name)
    return name
