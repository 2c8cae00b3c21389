"""The server of the package xllamacpp, with the flags of llama-server. Runs as a script, without lora_grpo."""

import signal
import sys


def main() -> None:
    import xllamacpp

    arguments = sys.argv[1:]
    arguments.remove("--jinja")  # the default here
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))

    params = xllamacpp.CommonParams()
    params.model.path = flags["--model"]
    params.hostnames = [flags["--host"]]
    params.port = int(flags["--port"])
    params.n_parallel = int(flags["--parallel"])
    params.n_ctx = int(flags["--ctx-size"])
    params.cache_ram_mib = 0
    threads = int(flags.get("--threads", 0))
    if threads:
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(server.listening_address, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
