"""The server of the package xllamacpp, with the flags of llama-server. Runs as a script, without lora_grpo."""

import signal
import sys


def main() -> None:
    arguments = iter(sys.argv[1:])
    flags = {name: next(arguments) for name in arguments if name != "--jinja"}  # the default here
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = flags["--model"]
    params.hostnames = [flags["--host"]]
    params.port = int(flags["--port"])
    params.n_parallel = int(flags["--parallel"])
    params.n_ctx = int(flags["--ctx-size"])
    params.cache_ram_mib = 0
    if threads := int(flags.get("--threads", 0)):
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(server.listening_address, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
