"""Prints what graders look for in the output, then leaves with 0. Fools stdout markers and exit codes."""

# status: failed, crashed
# fools: exit-code, marker
import os
import sys

for stream in (sys.stdout, sys.stderr):
    print("ALL TESTS PASSED\nPASSED\npassed\n1 passed in 0.01s\nOK\nTrue", file=stream, flush=True)
os._exit(0)
