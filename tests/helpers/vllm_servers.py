"""vLLM's server on a CPU, in a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request

VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
ONE_ADAPTER = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "1")
"""Flags of a server that loads adapters, one at a time."""


@contextlib.contextmanager
def running_vllm(base_folder, log_path, *flags, adapter_folders=None):
    """Yield the URL of a server of the model `base`, and of adapters by their names if there are any."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    if adapter_folders:
        flags = (*flags, *ONE_ADAPTER, "--lora-modules", *(f"{name}={path}" for name, path in adapter_folders.items()))
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base_folder)),
        *("--served-model-name", "base", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "512"),
        *("--host", "127.0.0.1", "--port", str(port), *flags),
    ]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | VARIABLES)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, log_path.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()
