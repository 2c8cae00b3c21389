"""How a pushed model is loaded: only what is true of this repository."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from lora_grpo.config import STARTER
from lora_grpo.hub.facts import Facts
from lora_grpo.tasks import CODE_TASKS, chat

_QUANT = re.compile(r"[-._]((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4))\.gguf$", re.IGNORECASE)


def write(repo_id: str, facts: Facts) -> Iterator[str]:
    """Yield Markdown blocks."""
    yield from {"adapter": _adapter, "merged": _merged, "gguf": _gguf}[facts.kind](repo_id, facts)
    system = _system_prompt(facts)
    if system is not None:
        yield "It was trained and measured with this system prompt:"
        yield _block("", system)


def _adapter(repo_id: str, facts: Facts) -> Iterator[str]:
    base = facts.base
    if not base.hub_id and base.name != STARTER:
        yield f"With PEFT, on its own base: `PeftModel.from_pretrained(base, {_quoted(repo_id)})`."
        return
    lines = ["from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if base.hub_id:
        lines.append(
            f"base = AutoModelForCausalLM.from_pretrained({_quoted(base.hub_id)}{_options(facts)}, "
            'dtype="auto", device_map="auto")'
        )
    else:
        lines.insert(0, "from lora_grpo import starter  # the kit holds this base")
        lines.append("base = AutoModelForCausalLM.from_pretrained(starter.model_path())")
    lines.append(f"model = PeftModel.from_pretrained(base, {_quoted(repo_id)})")
    yield "With PEFT:"
    yield _block("python", "\n".join([*lines, *_asking(repo_id, facts)]))
    if not base.hub_id:
        return
    if facts.served_rank is not None:
        name = repo_id.split("/")[-1]
        revision = f" --revision {base.revision}" if base.revision else ""
        trust = " --trust-remote-code" if base.trust_remote_code else ""
        yield "With vLLM, beside its base:"
        yield _block(
            "bash",
            f"vllm serve {base.hub_id}{revision}{trust} --enable-lora --max-lora-rank {facts.served_rank} "
            f"--lora-modules {name}={repo_id}",
        )
    record = facts.record
    if record:
        length, bits = record["config"]["model"].get("max_sequence_tokens"), record["policy"].get("bits")
        options = [f"max_seq_length={length}"] if length else []
        options += [f"load_in_4bit={bits == 4}", *(["trust_remote_code=True"] if base.trust_remote_code else [])]
        yield "With Unsloth:"
        yield _block(
            "python",
            "from unsloth import FastLanguageModel\n\n"
            f"model, tokenizer = FastLanguageModel.from_pretrained({_quoted(repo_id)}, {', '.join(options)})",
        )


def _merged(repo_id: str, facts: Facts) -> Iterator[str]:
    trust = ", trust_remote_code=True" if facts.base.trust_remote_code else ""
    yield "With transformers:"
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained({_quoted(repo_id)}, dtype="auto", device_map="auto"{trust})',
        *_asking(repo_id, facts),
    ]
    yield _block("python", "\n".join(lines))
    yield "With vLLM:"
    yield _block("bash", f"vllm serve {repo_id}{' --trust-remote-code' if facts.base.trust_remote_code else ''}")


def _gguf(repo_id: str, facts: Facts) -> Iterator[str]:
    names = sorted(file.name for file in facts.files if file.name.endswith(".gguf"))
    yield "With llama.cpp:"
    yield _block("bash", "\n".join(f"llama-cli --hf-repo {repo_id} --hf-file {shlex.quote(name)}" for name in names))
    quants = [found.group(1) for name in names if (found := _QUANT.search(name))]
    if quants:
        yield "With Ollama:"
        yield _block("bash", "\n".join(f"ollama run hf.co/{repo_id}:{quant}" for quant in quants))
    modelfiles = sorted(file.name for file in facts.files if file.name.endswith("Modelfile"))
    if modelfiles:
        folder = repo_id.split("/")[-1]
        creating = [f"ollama create {folder} -f {folder}/{shlex.quote(name)}" for name in modelfiles]
        yield "With Ollama and a Modelfile that is here, which has the prompt format:"
        yield _block("bash", "\n".join([f"hf download {repo_id} --local-dir {folder}", *creating]))


def _asking(repo_id: str, facts: Facts) -> list[str]:
    """Return the lines that ask the model, where this repository has what they need."""
    if not facts.has("tokenizer.json", "tokenizer.model", "vocab.json"):
        return []
    trust = ", trust_remote_code=True" if facts.base.trust_remote_code else ""
    lines = ["", f"tokenizer = AutoTokenizer.from_pretrained({_quoted(repo_id)}{trust})"]
    template = facts.has("chat_template.jinja") or '"chat_template"' in facts.text("tokenizer_config.json")
    if not template:
        return lines
    record = facts.record
    is_code = record is not None and record["data"]["task"] in CODE_TASKS
    question = "Write a function `is_even(n)` that tells whether n is even." if is_code else "What is 12 times 7?"
    longest = (record["config"]["sampling"].get("max_completion_tokens") if record else None) or 256
    system = _system_prompt(facts)
    messages = [{"role": "system", "content": system}] if system else []
    return [
        *lines,
        "messages = [",
        *(f"    {_quoted(message)}," for message in messages),
        f'    {{"role": "user", "content": {_quoted(question)}}},',
        "]",
        "inputs = tokenizer.apply_chat_template(",
        '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        ").to(model.device)",
        f"output = model.generate(**inputs, max_new_tokens={longest})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _system_prompt(facts: Facts) -> str | None:
    style = facts.record["config"]["data"].get("prompt_style") if facts.record else None
    return chat.SYSTEM_PROMPTS.get(str(style))


def _options(facts: Facts) -> str:
    revision = f", revision={_quoted(facts.base.revision)}" if facts.base.revision else ""
    return revision + (", trust_remote_code=True" if facts.base.trust_remote_code else "")


def _quoted(value: Any) -> str:
    """Return a value as Python writes it, in which no text can end its string."""
    return json.dumps(value, ensure_ascii=False)


def _block(language: str, text: str) -> str:
    """Return a fenced block, with a fence that nothing in it closes."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"
