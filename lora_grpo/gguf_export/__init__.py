"""Writes a run or a merged model as one GGUF file for llama.cpp, Ollama and LM Studio.

    export(ExportOptions(Path("outputs/gsm8k_lora"), modelfile=True))    # outputs/gsm8k_lora/gguf/gsm8k_lora.Q8_0.gguf

    config.json ── architecture ──► hyperparameters, and llama.cpp's name for every tensor
    tokenizer   ── tokenizer ─────► vocabulary, merges, special tokens, chat template
    weights     ── types ─────────► Q8_0, F16, ..., a few rows at a time
                                    K-quants: a 16-bit file, then llama.cpp's llama-quantize

The gguf package writes the format and quantizes. What llama.cpp would compute differently from transformers is refused.

cli.py             the flags, and what the command prints
writer.py          the file: complete under its name, or absent
architecture.py    Llama, Mistral, Qwen2 and Qwen3 as llama.cpp describes them
types.py           which tensor gets which type, and the conversion
tokenizer.py       byte-level BPE and SentencePiece; sentencepiece.py: scores and space prefix of the latter
modelfile.py       Ollama's Modelfile, with the chat template translated to Go
"""

from lora_grpo.gguf_export.cli import ExportOptions, export

__all__ = ["ExportOptions", "export"]
