"""Export a run, a merged model, or an adapter as a GGUF file for llama.cpp, Ollama, and LM Studio.

    export(ExportOptions(Path("outputs/gsm8k_lora"), modelfile=True))    # outputs/gsm8k_lora/gguf/gsm8k_lora.Q8_0.gguf

    config.json ── architecture ──► hyperparameters and llama.cpp tensor names
    tokenizer   ── tokenizer ─────► vocabulary, merges, special tokens, chat template
    weights     ── types ─────────► Q8_0, F16, ..., in blocks of rows
                                    K-quants: a 16-bit file, then llama.cpp's llama-quantize
    adapter     ── lora ──────────► A and B of each tensor, for llama.cpp's --lora

The gguf package writes the format and quantizes. The export fails if llama.cpp would compute something differently from
transformers.

cli.py             command-line flags and printed output
writer.py          writes a model
cost.py            gguf_report.json: the KL divergence between a model and its files
lora.py            writes an adapter
file.py            opens a file that is complete or absent
architecture.py    maps Llama, Mistral, Qwen2, and Qwen3 to llama.cpp architectures
types.py           chooses the type of each tensor and converts it
tokenizer.py       byte-level BPE and SentencePiece tokenizers
sentencepiece.py   scores and space prefix of SentencePiece tokenizers
modelfile.py       Ollama's Modelfile and its files for the Hub, with the chat template translated to Go
measured_files.py  the GGUF files of a run with their sizes and what was measured on them; one table of them
"""

from lora_grpo.gguf.cli import ExportOptions, export
from lora_grpo.gguf.cost import REPORT as GGUF_REPORT
from lora_grpo.gguf.cost import ExportedFile, exported_files
from lora_grpo.gguf.lora import LORA_FILE
from lora_grpo.gguf.measured_files import (
    MeasuredFile,
    current_files,
    files_legend,
    files_notes,
    files_table,
    measured_files,
    nats,
)
from lora_grpo.gguf.modelfile import HUB_FILES, check_hub_file
