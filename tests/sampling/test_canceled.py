"""Requests that nobody waits for any more leave the batch."""

from lora_grpo import starter
from lora_grpo.config import ModelConfig
from lora_grpo.models import base_model
from lora_grpo.sampling import Request, RequestQueue, Sampler

MAX_TOKENS = 900


def test_a_canceled_request_is_decoded_no_further():
    settings = ModelConfig(name=str(starter.model_path()), bits=16)
    tokenizer = base_model.load_tokenizer(settings)
    model = base_model.load_base(settings).eval()
    no_token = tokenizer.vocab_size
    sampler = Sampler(model, tokenizer, [no_token])  # completions end at their limit only
    [prompt] = sampler.encode(["How many are 3 and 4?"])
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))

    # A short and a long request are decoded together. The long one is canceled when the short one is finished.
    queue = RequestQueue()
    short = queue.submit(Request(prompt, seed=1, max_tokens=4, temperature=1.0, top_p=1.0))
    long = queue.submit(Request(prompt, seed=2, max_tokens=MAX_TOKENS, temperature=1.0, top_p=1.0))
    short.add_done_callback(lambda _: long.cancel())
    queue.close()
    sampler.serve(queue)
    assert len(short.result().token_ids) == 4
    assert long.cancelled()
    assert len(passes) < 10
