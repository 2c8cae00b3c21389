"""Loops for ever before any test."""

# status: timeout
while True:
    pass
