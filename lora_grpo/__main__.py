"""`lora-grpo`, also as `python -m lora_grpo`."""

import sys


def main() -> None:
    from lora_grpo.cli import run_front_door

    sys.exit(run_front_door(sys.argv[1:]))


if __name__ == "__main__":
    main()
