"""Measure how long torch.compile traces the logprobs of Unsloth's loss pass, with and without recompute.

    python tests/gpu_rig/compiled_chunks.py 8 16 32  # rows of the batch; needs the extra `gpu`, but no GPU

Prints one JSON line per pass, size and variant: `chunks` in the largest traced graph, and the CPU seconds of the
first call: Dynamo and AOTAutograd, without code generation. They do not depend on the GPU or the model's size.
"""

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS, HIDDEN, VOCABULARY = 64, 16, 32


def trace_only():
    """Have torch.compile trace without generating code. Returns the list of chunks per traced graph."""
    import torch
    from torch._dynamo.backends.debugging import aot_eager

    compile_graph, counts = torch.compile, []

    def count_chunks(graph, inputs):
        counts.append(sum("logsumexp" in str(node.target) for node in graph.graph.nodes))
        return aot_eager(graph, inputs)

    def trace(function=None, *, fullgraph=False, dynamic=None, **generation):
        return compile_graph(function, fullgraph=fullgraph, dynamic=dynamic, backend=count_chunks)

    torch.compile = trace
    return counts


def first_call(function, rows, gradient):
    """Return the seconds of the first forward pass and, with gradients, of the first backward pass."""
    import torch

    torch._dynamo.reset()
    hidden = torch.randn(1, rows * TOKENS, HIDDEN, requires_grad=gradient)
    head, ids = torch.randn(VOCABULARY, HIDDEN), torch.randint(VOCABULARY, (1, rows * TOKENS))
    started = time.process_time()
    logprobs = function(hidden, head, ids, 4 * rows)
    if gradient:
        logprobs.sum().backward()
    return time.process_time() - started


def main():
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu_rig")]
    import card
    import torch

    os.environ.update(TORCHDYNAMO_DISABLE="0", UNSLOTH_COMPILE_DISABLE="0")
    card.pretend("NVIDIA GeForce RTX 4090", "24", "8.9")
    counts = trace_only()
    from lora_grpo.models import unsloth_policy

    run, os.system = os.system, lambda command: 1  # Unsloth runs ldconfig to find a driver
    unsloth_policy.import_unsloth()
    os.system = run
    torch.cuda.is_available = lambda: False  # Dynamo would ask the driver for a stream
    from unsloth_zoo import rl_replacements

    used = rl_replacements.chunked_hidden_states_selective_log_softmax
    default = rl_replacements.RL_REPLACEMENTS["grpo_selective_log_softmax"]
    for rows in map(int, sys.argv[1:]):
        for gradient in (True, False):
            for variant, function in (("default", default), ("lora_grpo", used)):
                counts.clear()
                seconds = first_call(function, rows, gradient)
                line = {"rows": rows, "gradient": gradient, "variant": variant, "chunks": max(counts)}
                print(json.dumps({**line, "seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
