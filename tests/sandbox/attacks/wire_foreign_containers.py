"""Answers with references to containers it was never given, with negative numbers, and with itself inside itself."""

# status: failed, crashed, timeout
# test: given = [1, 2, 3]
# test: assert total(given) == 6 and total(given) == [6]
import json
import os


def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body


def total(numbers):
    nested = ["list", [["again", 1], ["again", -1], ["again", True], ["again", 1e9]]]
    for changes in ([[-1, []]], [[0, [["again", 0]]]], [[True, {}]], [["0", 0]], [[0]], {"0": 1}, 7):
        os.write(3, frame(["returned", changes, nested]))
    os.write(3, frame(["returned", [], ["list", [["again", 1]]]]))
    return -1
