"""LoRA + GRPO on one GPU: overview of the package.

    tasks ────► sampling ────► rewards ────► training ────► run folder: adapter/, run.json, metrics.jsonl
    rows and    completions,   one score     GRPO update         │
    prompts     G per prompt   each              │               ├─► evaluation   base against trained, with p-values
                    ▲                            │               ├─► report       one HTML page
                    └────── updated adapter ─────┘               ├─► merging      one model ─► gguf
                                                                 └─► hub          model card, push

Start with `pipeline.py`, which runs every recipe. The `__init__.py` of each folder describes its files.

pipeline.py    plan, load, evaluate the base, train, evaluate again, report
cli/           command line -> checked configuration; exceptions -> one line and an exit code
config/        every setting with its unit; presets, batch arithmetic
hardware/      GPUs, drivers, and what `auto` chooses for this machine
prompts/       chat templates, prompt styles, turns, thoughts
grading/       answers and programs of completions -> verdicts
tasks/         GSM8K, HumanEval, MBPP, bundled problems, other packages' tasks, a user's file
data/          splits, their order and fingerprints
starter/       the bundled 2-million-parameter model and its problems
sandbox/       runs programs that a model wrote, isolated from their tests and from this machine
rewards/       NAME=WEIGHT -> functions that score completions
models/        resolves names (run, adapter, folder, Hub id); base model, adapter, policy
memory/        the memory that a run needs, and the settings that make it fit: --plan
sampling/      completions from a policy or a GGUF file: built-in sampler, vLLM in this process, vLLM server, llama.cpp
rollouts/      episodes: completions and conversations, and the loop that plays them
loss/          the exact loss pass: logprobs from fewer tokens, in less memory
monitoring/    metrics of steps, alarms, validation and the best adapter, --hours, trackers
training/      TRL's GRPO and SFT trainers, the run, the logprob check
audit/         attacks on a grader: --audit
preview/       what the model answers before training, and whether GRPO can learn from it: --preview, --dry-run
gpu_check/     which engine is the fastest on this GPU
runs/          the run folder: run.json, metrics.jsonl, checkpoints
evaluation/    samples, verdicts, pass@k, paired tests, reports
report/        a run as one HTML page
merging/       merges an adapter into its base, tensor by tensor
gguf/          GGUF files for llama.cpp, Ollama and LM Studio, their size and quality
hub/           files, model card and push
files/         atomic writes, locks, JSON Lines, safetensors

__main__.py is `lora-grpo`. asynchronous.py, commands.py, flags.py, distributed.py, progress.py and errors.py are used
by all folders.

Code imports from another folder only the names that its `__init__.py` provides, and only from folders listed before its
own in `LINES` of tests/test_structure.py. Heavy packages (torch, transformers, trl, peft, unsloth, vllm, datasets) are
imported inside functions, so that --help and --plan start quickly.
"""

__version__ = "0.1.0"
