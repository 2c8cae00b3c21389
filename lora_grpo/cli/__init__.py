"""The command line: arguments to a checked configuration, errors to one line and an exit code.

    def main():
        config, invocation = parse(sys.argv[1:], recipe="mine", description=__doc__, presets=PRESETS)   # a recipe
        options = read_flags(Options, sys.argv[1:], prog="merge.py", description=__doc__)              # a script

    sys.exit(run_command(main))      # 0, 2 for a mistake, 1 for a failed run, 128 + signal if interrupted

arguments.py   a recipe's command line: preset, then settings file, then flags
flags.py       a dataclass from arguments by tyro, with every mistake in one line
validate.py    checks of a configuration that need more than its own fields
main.py        exit codes, and the end of an unfinished run
"""

from lora_grpo.cli.arguments import parse
from lora_grpo.cli.flags import read_flags
from lora_grpo.cli.main import run_command

__all__ = ["parse", "read_flags", "run_command"]
