"""GGUF files for llama.cpp, Ollama and LM Studio."""

from lora_grpo.gguf_export.cli import Options, export_and_say

__all__ = ["Options", "export_and_say"]
