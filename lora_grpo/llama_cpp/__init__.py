"""llama.cpp: samples a GGUF file as its users will, with the file's own tokenizer and chat template.

    file = read_gguf(Path("outputs/run/gguf/run.Q4_0.gguf"))
    sampler = load_sampler(file, rows, max_tokens=256)          # a Sampler; starts a server
    sampler.tokenizer                                           # what lora_grpo.tasks.chat needs of a tokenizer

The server is the user's `llama-server`, if it is on the PATH, or that of the package xllamacpp. Both get the same flags
and have the same HTTP interface.

gguf_model.py  reads what the header of a GGUF file says about the model
server.py      starts the server and talks to it
xllamacpp_server.py   the server of the package xllamacpp, as a program with llama-server's flags
sampler.py     samples from the server; its tokenizer renders messages with the template of the GGUF file
"""

from lora_grpo.llama_cpp.gguf_model import GgufModel, read_gguf
from lora_grpo.llama_cpp.sampler import GgufSampler, load_sampler
from lora_grpo.llama_cpp.server import find_program

__all__ = ["GgufModel", "GgufSampler", "find_program", "load_sampler", "read_gguf"]
