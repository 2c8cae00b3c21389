"""Export a run or a merged model as GGUF files for llama.cpp, Ollama, and LM Studio.

    export(ExportOptions(Path("outputs/gsm8k_lora"), modelfile=True))    # outputs/gsm8k_lora/gguf/gsm8k_lora.Q8_0.gguf

    config.json ── architecture ──► hyperparameters and llama.cpp tensor names
    tokenizer   ── tokenizer ─────► vocabulary, merges, special tokens, chat template
    README.md   ── metadata ──────► license, base model, sampling settings
    weights     ── types ─────────► Q8_0, F16, ..., in blocks of rows
                                    K-quants: a 16-bit file, then llama.cpp's llama-quantize

The gguf package writes the format and quantizes. The export fails if llama.cpp would compute something differently from
transformers.

export_model.py    `lora-grpo export-gguf`: its flags, where the files go, and what is printed
writer.py          writes the GGUF files of a model
architecture.py    maps Llama, Mistral, Qwen2, and Qwen3 to llama.cpp architectures
types.py           chooses the type of each tensor, and converts it while it is written
tokenizer.py       byte-level BPE and SentencePiece tokenizers
metadata.py        license, base model, data sets and sampling settings, without local paths
modelfile.py       Ollama's Modelfile and its files for the Hub
chat_template.py   a chat template as Ollama's Go template
files.py           the checks before a push, and one table of the files of a run
"""

from lora_grpo.gguf.export_model import ExportOptions, export
from lora_grpo.gguf.files import GgufSection, check_exported, gguf_section, gguf_sections
from lora_grpo.gguf.modelfile import HUB_FILES, model_references
