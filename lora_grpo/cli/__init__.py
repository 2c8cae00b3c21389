"""The command line: parses arguments into settings, and turns errors into one line and an exit code.

    def main():
        config, invocation = parse(sys.argv[1:], recipe="mine", description=__doc__, presets=PRESETS)
        ...
    sys.exit(run_command(main))      # 0; 2 for a user error, 1 for a failed run, 128 + signal if interrupted

arguments.py    parses a recipe's command line, and shows its help
verbs.py        `lora-grpo` and its commands, which the scripts also run
chat.py         `lora-grpo chat`: questions and answers, before and after training
serve.py        `lora-grpo serve`: an OpenAI-compatible endpoint
new.py          `lora-grpo new`: a folder with a task, its tests and a README, from the templates in new_task/
watch.py        `lora-grpo watch`: the report page, live while a run trains
named_model.py  the model that the argument of `chat` and `serve` names
main.py         runs a command, sets the exit code, and closes an unfinished run
"""

from lora_grpo.cli.arguments import parse
from lora_grpo.cli.main import run_command
from lora_grpo.cli.verbs import run_front_door, run_verb
