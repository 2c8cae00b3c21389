"""The server of the package xllamacpp, with the flags of llama-server. Runs as a script, without lora_grpo."""

from __future__ import annotations

import argparse
import signal
import sys


def main() -> None:
    parser = argparse.ArgumentParser(prog="llama-server")
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--jinja", action="store_true")  # the default here
    flags = parser.parse_args()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = flags.model
    params.hostnames = [flags.host]
    params.port = flags.port
    params.n_parallel = flags.parallel
    params.n_ctx = flags.ctx_size
    params.cache_ram_mib = 0
    if flags.threads:
        params.cpuparams.n_threads = flags.threads
        params.cpuparams_batch.n_threads = flags.threads
    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(server.listening_address, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
