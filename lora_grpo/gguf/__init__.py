"""Export a run or a merged model as GGUF files for llama.cpp, Ollama, and LM Studio.

    export(ExportOptions(Path("outputs/gsm8k_lora"), modelfile=True))    # outputs/gsm8k_lora/gguf/gsm8k_lora.Q8_0.gguf

    config.json ── architecture ──► hyperparameters and llama.cpp tensor names
    tokenizer   ── tokenizer ─────► vocabulary, merges, special tokens, chat template
    weights     ── types ─────────► Q8_0, F16, ..., in blocks of rows
                                    K-quants: a 16-bit file, then llama.cpp's llama-quantize

The gguf package writes the format and quantizes. The export fails if llama.cpp would compute something differently from
transformers.

cli.py             command-line flags and printed output
writer.py          writes a model
files.py           the checks before a push, and one table of the files of a run
architecture.py    maps Llama, Mistral, Qwen2, and Qwen3 to llama.cpp architectures
types.py           chooses the type of each tensor, and converts it while it is written
tokenizer.py       byte-level BPE and SentencePiece tokenizers
modelfile.py       Ollama's Modelfile and its files for the Hub, with the chat template translated to Go
"""

from lora_grpo.gguf.export_model import ExportOptions, export
from lora_grpo.gguf.files import GgufSection, check_exported, gguf_section, gguf_sections
from lora_grpo.gguf.modelfile import HUB_FILES, model_references
