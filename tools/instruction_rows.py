"""Write rows for `--task ifeval`: requests with one instruction that a program can check.

    python tools/instruction_rows.py outputs/rows        # the instruction is "Do not use any commas."
    python tools/instruction_rows.py outputs/rows --instruction change_case:english_lowercase --text "Use lowercase."

Writes train.jsonl (280 rows) and eval.jsonl (128 rows, about other topics), in the form of IFEval: `prompt`,
`instruction_id_list` and `kwargs`. `--arguments '{"num_bullets": 3}'` are those of the instruction.
"""

import argparse
import json
import random
from pathlib import Path

from lora_grpo.files import atomic, json_files

TOPICS = """
ants apples bees bicycles boats bread bridges cats cheese chess clocks coffee corn deserts forests gardens glass gold
honey horses islands kites lamps maps mirrors music owls paper pianos rain rivers roses salt shoes silk snow stars tea
tigers towers trains turtles violins volcanoes whales wind windmills winter wolves wool zebras
""".split()  # noqa: SIM905
REQUESTS = (
    *("Name three facts about {}.", "Describe {} in two sentences.", "Why do people like {}?"),
    *("Write a short message to a friend about {}.", "What should a child know about {}?", "Compare {} and books."),
    *("Tell me about the history of {}.", "Write the first lines of a story about {}."),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instruction", default="punctuation:no_comma", help="one of IFEval's or IFBench's")
    parser.add_argument("--text", default="Do not use any commas.", help="how the prompt words it")
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON object")
    given = parser.parse_args()
    random.Random(0).shuffle(TOPICS)
    given.folder.mkdir(parents=True, exist_ok=True)
    for split, topics in (("train", TOPICS[:35]), ("eval", TOPICS[35:])):
        rows = [
            {
                "prompt": f"{request.format(topic)} {given.text}",
                "instruction_id_list": [given.instruction],
                "kwargs": [given.arguments],
            }
            for topic in topics
            for request in REQUESTS
        ]
        atomic.write_text(given.folder / f"{split}.jsonl", json_files.dump_lines(rows))


if __name__ == "__main__":
    main()
