"""From what a user sets to the checked configuration of a run, for the command line and for Python.

    config = settle({"train": {"max_steps": 60}}, Invocation(), recipe)      # preset, then files, then what is given
    changed_settings(config, recipe.presets)                                 # the preset's values that it replaced

layers.py       merges preset, resumed run, settings file and given settings
checks.py       checks a configuration across fields, and against packages and processes
user_code.py    the code that a configuration names, and the digests of its files
recipe_file.py  the presets of a recipe file, and the recipe of a task
"""

from lora_grpo.settings.checks import check
from lora_grpo.settings.layers import Recipe, changed_settings, settle
from lora_grpo.settings.recipe_file import read_recipe, recipe_of_task
from lora_grpo.settings.user_code import named_code, resolved_path, user_files, user_objects
