"""Export a run, a merged model or an adapter as a GGUF file for llama.cpp, Ollama and LM Studio.

    python scripts/export_gguf.py outputs/gsm8k_lora --modelfile
    python scripts/export_gguf.py merged/ --type q4_k_m
    python scripts/export_gguf.py outputs/gsm8k_lora --what adapter

K-quants such as q4_k_m need llama.cpp's llama-quantize on the PATH.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.gguf import ExportOptions, export


def main() -> None:
    export(read_flags(ExportOptions, sys.argv[1:], prog="export_gguf.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
