"""GGUF files with a header and one small tensor."""

import numpy as np

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' + message['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def write_header(path, *, architecture="qwen2", context=1024, **strings):
    """Write a GGUF file that says what a model's would say, and return its path."""
    from gguf import GGUFWriter, LlamaFileType

    writer = GGUFWriter(path, architecture)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_context_length(context)
    writer.add_chat_template(CHATML)
    for name, value in strings.items():
        writer.add_string(name.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
