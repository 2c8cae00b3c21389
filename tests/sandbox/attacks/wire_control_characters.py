"""Puts escape sequences, line breaks and lone surrogates into the message of the verdict, to write on terminals and logs."""


# status: failed
def total(numbers):
    raise ValueError("\x1b]0;passed\x07\x1b[2J\x1b[1A\rpassed\n\ud800\u202e\x00\x9b")
