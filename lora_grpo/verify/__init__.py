"""Verify that a merged model, a GGUF file, an engine or a server uses an adapter.

    report = verify(VerifyOptions("outputs/gsm8k_lora", against=("outputs/gsm8k_lora/merged",)))
    report.targets[0].result.finding          # "the adapter", "the base", "neither" or "cannot tell"

    prompts ── target ──► sampled tokens with the target's logprobs
    the same tokens ── base and adapter, by transformers and PEFT ──► two more logprobs of each token
    three logprobs ── verdict ──► which of the two models the target is

verify_adapter.py  `lora-grpo verify`: its flags, and its stages
probes.py          the prompts: the user's, the run's, or general ones
targets.py         what a target is asked, and what it answers
open_target.py     opens what --against names
local.py           targets in this process: the adapter in an engine, and merged models
servers.py         targets at an address, and GGUF files:
                   server_client.py sends requests; openai_servers.py, llama_cpp_server.py and ollama_server.py know
                   what each kind of server takes; token_texts.py names tokens by their texts
observe.py         asks a target
reference.py       base and adapter as one model that scores tokens
compare.py         from answers and scores to a report
verdict.py         the statistics: which model is the target?
differences.py     what else differs: prompts, ends, the target's own settings
report.py          the report, and its table
record.py          RUN/verification.json, which the model card reads
"""

from lora_grpo.verify.record import VERIFICATION, verified
from lora_grpo.verify.report import TargetReport, VerifyReport
from lora_grpo.verify.verify_adapter import VerifyOptions, run_verify, verify
