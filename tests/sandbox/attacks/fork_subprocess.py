"""Runs a command, as a program that wants a shell would."""

# status: blocked, failed
import subprocess


def total(numbers):
    return int(subprocess.run(["expr", *" + ".join(map(str, numbers)).split()], capture_output=True).stdout)
