"""Sends `ready` and a true answer itself, then leaves with 0."""

# status: failed, crashed
import json
import os


def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body


os.write(3, frame(["ready"]) + frame(["returned", [], 6]))
os._exit(0)
