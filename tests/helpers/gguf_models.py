"""Tiny random models of every architecture that becomes a GGUF, with tokenizers of the real kinds."""

import importlib.util
from pathlib import Path

from lora_grpo.gguf.tokenizer import LLAMA3_WORDS, QWEN2_WORDS


def chatml(*, messages="messages", start="<|im_start|>", content="message['content']", end="<|im_end|>"):
    """Return ChatML's chat template, or one that differs in a part.

    Args:
        messages: Jinja expression of the messages that are rendered.
        start: text before the role of a message.
        content: Jinja expression of a message's text.
        end: text after a message.
    """
    return (
        f"{{% for message in {messages} %}}"
        f"{{{{ '{start}' + message['role'] + '\\n' + {content} + '{end}\\n' }}}}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '{start}assistant\\n' }}}}{{% endif %}}"
    )


CHATML = chatml()
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

TEXT = """Janet's ducks lay 16 eggs per day. She eats three for breakfast and sells the remainder for $2 per egg.
How much in dollars does she make every day? A robe takes 2 bolts of blue fiber and half that much white fiber.

James decides to run 3 sprints 3 times a week. He runs 60 meters each sprint; I've been told he'll make 1,080 meters.
    def total(values):
        return sum(values)  # 12.5% of 1000 = 125, don't they?
Café, naïve, 数学 и нещо на Български.
"""

ODD = (
    " leading", "trailing ", "two  spaces", "three   spaces\tand\ttabs", "\n\nlines\n \n", "  \n  indented\n    code",
    "12345 and 1,234.5", "it's WE'LL don't", "naïve café", "数学 😀 \u200d", "a<|im_end|>b",
    "<|im_start|>user\nhi<|im_end|>\n", "</s>", "<s>x</s>y", "", "\r\n", "\u00a0no-break\u3000wide",
)  # fmt: skip


def byte_level(
    words=QWEN2_WORDS, *, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ignore_merges=False, pre=None
):
    """Return a byte-level BPE of 400 tokens, as Qwen and Llama 3 have, and as a tokenizers.Tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre or pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 - len(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def sentencepiece(*, complete=True, scheme=None):
    """Return a BPE with byte fallback, as Llama 2 has; `complete` merges are those of a SentencePiece model."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers.tokenization_utils_base import generate_merges

    special = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator([TEXT], trainer)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    pieces = [piece for piece in pieces if len(piece) > 1] + [piece for piece in pieces if len(piece) == 1]
    vocab = {piece: i for i, piece in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    if complete:
        merges = generate_merges(vocab, {piece: -float(i) for i, piece in enumerate(pieces)})
    else:
        import json

        merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def wrapped(tokenizer, chat_template=None, **names):
    """Return it as transformers loads it."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = chat_template
    return wrapped


def published_template(name):
    """Return a published chat template, of which TRL has copies."""
    [folder] = importlib.util.find_spec("trl").submodule_search_locations
    return (Path(folder) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def qwen_tokenizer(chat_template=CHATML):
    return wrapped(byte_level(), chat_template, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def llama3_tokenizer(chat_template=LLAMA3):
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = byte_level(LLAMA3_WORDS, special=special, ignore_merges=True)
    return wrapped(tokenizer, chat_template, bos_token=special[0], eos_token=special[4])


def llama2_tokenizer(chat_template=ZEPHYR):
    return wrapped(sentencepiece(), chat_template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def config(architecture, tokenizer, **changes):
    """Return a configuration of a class's name such as `LlamaForCausalLM`."""
    import transformers

    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    given = {**SIZES, **HEADS, "vocab_size": len(tokenizer) + 3, "tie_word_embeddings": False, **changes}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return kind(**{**ids, **given}, architectures=[architecture])


def save(folder, architecture, tokenizer, dtype="float32", **changes):
    """Write a random model with its tokenizer; weights far enough apart that greedy decoding has no ties."""
    import torch
    import transformers

    torch.manual_seed(0)
    with torch.no_grad():
        model = getattr(transformers, architecture)(config(architecture, tokenizer, **changes))
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
