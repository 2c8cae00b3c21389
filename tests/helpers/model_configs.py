"""Configurations of published models, for counts that need no weights."""

QWEN25_HALF = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}

LLAMA_ONE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "head_dim": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}

TINY_QWEN2 = {
    **QWEN25_HALF,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 4096,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
