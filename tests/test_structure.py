"""How the house is built: who may import whom, what stays unloaded, what files may be called."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lora_grpo"
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
FILES = sorted(PACKAGE.rglob("*.py"))

HEAVY = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "bitsandbytes",
    "vllm",
    "unsloth",
    "accelerate",
    "matplotlib",
)

# Room -> the rooms it may import. `tasks` and `starter` are one room each; a room may import itself.
MAY_IMPORT = {
    "__init__": set(),
    # Ground floor: no idea what a run is.
    "errors": set(),
    "ranks": {"errors"},
    "launch": {"errors", "ranks"},
    "folder_lock": {"errors", "ranks"},
    "atomic": set(),
    "progress": set(),
    "optional": {"errors"},
    "script_flags": {"errors"},
    "json_lines": {"errors"},
    "json_objects": {"errors"},
    "hardware": {"errors"},
    "grpo_fields": {"errors"},
    "passk": {"errors"},
    "prompts": {"errors"},
    "sandbox": {"errors"},
    "tensor_files": {"errors"},
    "starter": {"prompts"},
    # Tasks and rewards: one grader for both.
    "tasks": {"errors", "json_lines", "prompts", "sandbox", "starter"},
    "rewards": {"prompts", "tasks"},
    "reward_guard": {"errors", "rewards"},
    "reward_files": {"errors", "reward_guard", "rewards"},
    "reward_registry": {"errors", "reward_files", "reward_guard", "rewards"},
    # What is asked for, and its record.
    "config": {"sandbox", "tasks"},
    "config_check": {
        "config", "errors", "grpo_fields", "prompts", "ranks", "reward_registry", "rewards", "sandbox", "tasks",
    },
    "run_record": {"atomic", "config", "errors", "folder_lock", "ranks", "reward_registry"},
    "data": {"config", "errors", "prompts", "sandbox", "tasks"},
    # The model.
    "decoding_slots": set(),
    "slot_memory": {"decoding_slots", "memory"},
    "rollouts": {"decoding_slots", "errors", "slot_memory"},
    "merged_copy": {"rollouts"},
    "vllm_engine": {"base_model", "config", "errors", "merged_copy", "optional", "ranks", "rollouts"},
    "vllm_server": {"errors", "ranks", "rollouts"},
    "engine_samplers": {"rollouts", "vllm_engine"},
    "vllm_sampler": {"config", "errors", "rollouts", "vllm_engine", "vllm_server"},
    "vllm_rollouts": {"vllm_engine", "vllm_sampler", "vllm_server"},
    "base_model": {"atomic", "config", "errors", "json_objects", "starter"},
    "model_shape": {"errors"},
    "memory": {"model_shape"},
    "backends": {"config", "hardware", "ranks", "vllm_engine"},
    # Before a run.
    "fit_offers": {"config", "config_check", "errors", "gpu_fit", "memory"},
    "gpu_rates": {"gpu_limits"},
    "plan_time": {"config", "gpu_fit", "gpu_limits", "gpu_rates", "json_lines", "model_shape"},
    "plan": {
        "backends", "base_model", "checkpoints", "config", "errors", "fit_offers", "gpu_fit", "hardware", "memory",
        "model_shape", "plan_time", "ranks",
    },
    "plan_report": {"errors", "gpu_fit", "memory", "plan"},
    "chunked_log_probs": set(),
    "probe": {"config", "config_check", "errors", "fit_offers", "memory", "slot_memory"},
    "gpu_fit": {"config", "config_check", "errors", "hardware", "memory", "model_shape"},
    "policy": {
        "backends", "base_model", "config", "config_check", "engine_samplers", "errors", "hardware", "merged_copy",
        "optional", "ranks", "rollouts", "vllm_engine", "vllm_rollouts", "vllm_server",
    },
    "command_line": {
        "config", "config_check", "errors", "hardware", "launch", "policy", "ranks", "report", "run_record",
    },
    # The arrows of the flow.
    "checkpoints": {"atomic", "ranks"},
    "completion_lines": {"results", "tasks"},
    "completion_log": {"atomic", "completion_lines", "json_lines", "ranks", "rewards", "tasks"},
    "held_out": {
        "atomic", "completion_lines", "config", "errors", "json_lines", "prompts", "ranks", "reward_registry",
        "rollouts", "tasks", "training_set",
    },
    "adapter_files": {"atomic"},
    "health": {"drift", "passk"},
    "watch": {"adapter_files", "errors", "health", "held_out", "json_lines", "ranks", "run_record"},
    "stop_signal": {"ranks"},
    "step_phases": set(),
    "drift": {"errors"},
    "parity": {"errors", "rollouts"},
    "training_set": {"errors", "prompts", "reward_guard", "reward_registry", "tasks"},
    "grpo_arguments": {"base_model", "config", "config_check", "grpo_fields"},
    "train": {
        "adapter_files", "atomic", "base_model", "checkpoints", "chunked_log_probs", "completion_log", "config", "data",
        "drift", "engine_samplers", "errors", "grpo_arguments", "grpo_fields", "health", "held_out", "parity", "policy",
        "probe", "progress", "prompts", "ranks", "reward_registry", "rollouts", "run_record", "step_phases",
        "stop_signal", "tasks", "training_set", "watch",
    },
    "results": {"tasks"},
    "evaluate": {
        "atomic", "errors", "json_lines", "progress", "prompts", "ranks", "results", "rollouts", "run_record", "tasks",
    },
    "comparison": {"errors", "passk", "results"},
    "difficulty": {
        "comparison", "data", "errors", "evaluate", "results", "rollouts", "run_record", "tasks", "training_set",
    },
    "evaluation_report": {"comparison", "results"},
    "report": {
        "atomic", "comparison", "config", "errors", "evaluation_report", "folder_lock", "json_objects", "run_record",
    },
    "conclude": {"atomic", "comparison", "evaluation_report", "ranks", "report", "results", "run_record"},
    # scripts/evaluate.py.
    "foreign_samples": {"errors", "tasks"},
    "sample_files": {
        "atomic", "data", "errors", "foreign_samples", "json_lines", "progress", "results", "sandbox", "tasks",
    },
    "subjects": {"atomic", "base_model", "config", "errors", "json_objects", "results", "run_record", "tensor_files"},
    "subject_samplers": {
        "base_model", "config", "errors", "hardware", "merged_copy", "prompts", "rollouts", "subjects", "tasks",
        "vllm_engine", "vllm_sampler",
    },
    "evaluation_options": {"config", "errors", "evaluate", "sandbox", "tasks"},
    "evaluation_folder": {"atomic", "errors"},
    "evaluation": {
        "comparison", "data", "errors", "evaluate", "evaluation_folder", "evaluation_options", "evaluation_report",
        "folder_lock", "foreign_samples", "json_lines", "prompts", "results", "rollouts", "run_record", "sample_files",
        "sandbox", "subject_samplers", "subjects", "tasks",
    },
    # scripts/check_gpu.py.
    "random_model": {"atomic", "starter"},
    "card_memory": set(),
    "gpu_limits": {"base_model", "memory", "model_shape"},
    "pretended_card": {"base_model", "errors", "hardware"},
    "gpu_check_table": {"atomic"},
    "timed_command": set(),
    "gpu_check_row": {
        "card_memory", "errors", "gpu_limits", "json_lines", "model_shape", "pretended_card", "random_model",
        "timed_command",
    },
    "gpu_check": {
        "errors", "gpu_check_row", "gpu_check_table", "gpu_limits", "hardware", "json_lines", "pretended_card",
        "random_model", "run_record", "starter", "timed_command", "ranks",
    },
    # scripts/export_gguf.py.
    "gguf_types": {"errors", "tensor_files"},
    "gguf_architecture": {"base_model", "errors", "tensor_files"},
    "gguf_sentencepiece": {"errors"},
    "gguf_tokenizer": {"errors", "gguf_sentencepiece", "prompts"},
    "modelfile": {"atomic", "errors", "gguf_tokenizer", "prompts"},
    "gguf_export": {
        "base_model", "config", "errors", "gguf_architecture", "gguf_tokenizer", "gguf_types", "modelfile", "progress",
        "tensor_files",
    },
    "gguf_options": {"errors", "folder_lock", "gguf_export", "merge_report", "merging", "prompts", "run_record"},
    # scripts/merge.py.
    "merge_outputs": {"tensor_files"},
    "tied_embeddings": {"errors", "merge_outputs", "merged_tensors"},
    "adapter_plan": {"errors", "json_objects", "merge_outputs", "tensor_files", "tied_embeddings"},
    "frozen_base": {"errors", "merge_outputs", "tensor_files"},
    "merged_tensors": {"merge_outputs"},
    "fidelity": {"errors", "merge_outputs", "merged_tensors"},
    "streamed_model": {"errors", "frozen_base", "merged_tensors"},
    "merge_divergence": {
        "adapter_plan", "base_model", "errors", "frozen_base", "json_lines", "merge_outputs", "merged_tensors",
        "prompts", "tied_embeddings", "streamed_model", "subjects", "tensor_files",
    },
    "merge": {
        "adapter_plan", "atomic", "errors", "fidelity", "merge_outputs", "merged_tensors", "progress", "tensor_files",
    },
    "merge_report": {"errors", "fidelity", "subjects"},
    "merging": {
        "adapter_plan", "atomic", "base_model", "errors", "fidelity", "folder_lock", "frozen_base", "json_objects",
        "merge", "merge_divergence", "merge_report", "subjects",
    },
    "dry_run": {"base_model", "config", "config_check", "data", "prompts", "reward_registry", "tasks", "training_set"},
    "preview_groups": {"evaluation_report", "passk", "tasks"},
    "preview_verdict": {"config", "preview_groups", "tasks"},
    "preview_page": {"config", "evaluation_report", "preview_groups", "preview_verdict"},
    "preview": {
        "config", "data", "held_out", "policy", "preview_groups", "preview_page", "prompts", "reward_registry",
        "rollouts", "tasks", "training_set",
    },
    # scripts/push.py.
    "upload_files": {"atomic", "errors"},
    "whole_files": {"atomic", "errors", "tensor_files", "upload_files"},
    "hub_token": {"errors"},
    "hub_failures": {"hub_token"},
    "hub_contents": {"errors", "upload_files"},
    "hub": {"errors", "hub_contents", "hub_failures", "hub_token", "upload_files"},
    "card_schema": {"base_model", "errors", "json_objects", "run_record"},
    "card_figures": {
        "atomic", "base_model", "card_schema", "errors", "evaluation_report", "subjects", "tasks", "upload_files",
    },
    "card_facts": {"card_figures", "card_schema", "config", "errors", "starter", "upload_files", "vllm_engine"},
    "card_snippets": {"card_facts", "config", "prompts", "tasks"},
    "card_metadata": {"card_facts", "card_figures"},
    "model_card": {
        "card_facts", "card_figures", "card_metadata", "card_snippets", "config", "evaluation_report",
        "reward_registry", "tasks", "upload_files",
    },
    "pushing": {
        "card_facts", "card_metadata", "card_schema", "errors", "hub", "hub_token", "merge_report", "model_card",
        "script_flags", "upload_files", "whole_files",
    },
}  # fmt: skip


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Every module that a file imports, anywhere in it, in full: `lora_grpo.config`, `torch`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} has a relative import; write lora_grpo. in full"
            inside = node.module == "lora_grpo"
            found |= {f"lora_grpo.{alias.name}" for alias in node.names} if inside else {node.module}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__", "require"):
                found.add(str(node.args[0].value))
    return found


def rooms_imported(path):
    names = {name.split(".")[1] for name in imported(path) if name.startswith("lora_grpo.")}
    return names - {room(path), "__version__"}


def reachable(start):
    """The rooms that importing a room may load, directly or not."""
    found, open_rooms = set(), {start}
    while open_rooms:
        near = MAY_IMPORT[open_rooms.pop()]
        open_rooms |= near - found
        found |= near
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_module_imports_only_rooms_below_it(path):
    assert room(path) in MAY_IMPORT, f"give {room(path)} a line in MAY_IMPORT"
    assert rooms_imported(path) <= MAY_IMPORT[room(path)]


def test_no_two_rooms_need_each_other():
    assert [name for name in MAY_IMPORT if name in reachable(name)] == []


def test_the_table_speaks_of_rooms_that_exist():
    assert set(MAY_IMPORT) == {room(path) for path in FILES}
    assert set().union(*MAY_IMPORT.values()) <= set(MAY_IMPORT)


@pytest.mark.parametrize("name", ["evaluate", "evaluation", "comparison", "run_record", "passk", "tasks", "rewards"])
def test_nothing_that_measures_depends_on_training_or_the_policy(name):
    assert not {"policy", "train"} & reachable(name)


def test_only_the_policy_imports_unsloth():
    importers = {room(path) for path in FILES if any(name.split(".")[0] == "unsloth" for name in imported(path))}
    assert importers == {"policy"}


def test_the_package_imports_nothing_around_it():
    for path in (*FILES, *RECIPES):
        assert not {name.split(".")[0] for name in imported(path)} & {"recipes", "scripts", "tests"}, path.name


# What stays unloaded


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_the_package_alone_loads_nothing_of_its_own():
    result = run("import sys, lora_grpo; print([name for name in sys.modules if name.startswith('lora_grpo.')])")
    assert result.stdout.strip() == "[]"


def test_no_module_loads_a_heavy_package_when_it_is_imported():
    code = (
        "import importlib, sys\n"
        "heavy = sys.argv[1].split(',')\n"
        "for name in sys.argv[2:]:\n"
        "    importlib.import_module(name)\n"
        "    loaded = [package for package in heavy if package in sys.modules]\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
        "print('all of them')\n"
    )
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
    result = run(code, ",".join(HEAVY), *names)
    assert result.stderr == ""
    assert result.stdout == "all of them\n"


RUN_RECIPE = (
    "import runpy, sys\n"
    "recipe, heavy = sys.argv[1], sys.argv[2].split(',')\n"
    "sys.argv = [recipe, *sys.argv[3:]]\n"
    "try:\n"
    "    runpy.run_path(recipe, run_name='__main__')\n"
    "except SystemExit as ended:\n"
    "    code = ended.code\n"
    "print('loaded', [package for package in heavy if package in sys.modules], 'code', code)\n"
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_help_loads_nothing_heavy_and_names_every_setting(recipe):
    from lora_grpo.command_line import flag_names

    result = run(RUN_RECIPE, recipe, ",".join(HEAVY), "--help")
    assert result.stdout.splitlines()[-1] == "loaded [] code 0"
    for section in ("model", "lora", "data", "sampling", "train", "eval"):
        assert f"--{section}." in result.stdout
    for name in flag_names():
        assert name in result.stdout
    assert ast.get_docstring(ast.parse(recipe.read_text())).split("\n")[0] in result.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
@pytest.mark.parametrize(
    "mistake", [["--sead", "1"], ["--train.micro-batch-size", "7"], ["--model.name", "./missing"], ["--grpo", "x=1"]]
)
def test_a_wrong_argument_is_told_before_anything_heavy_is_loaded(recipe, mistake):
    result = run(RUN_RECIPE, recipe, ",".join(HEAVY), *mistake)
    assert result.stdout == "loaded [] code 2\n"
    assert result.stderr.startswith("error: ")


# Files


def test_no_file_is_named_after_nothing():
    vague = {"util", "utils", "common", "helper", "helpers", "misc", "tools"}
    assert [path for path in (*FILES, *RECIPES) if path.stem in vague] == []


def test_the_readme_lists_every_recipe():
    readme = ROOT / "README.md"
    if not readme.is_file():
        pytest.skip("no README.md yet")
    text = readme.read_text(encoding="utf-8")
    assert RECIPES
    assert [path.name for path in RECIPES if f"`{path.name}`" not in text and f"recipes/{path.name}" not in text] == []


def test_a_recipe_holds_no_logic_but_its_flow():
    for path in RECIPES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert "main" in functions
        loops = [node for node in ast.walk(functions["main"]) if isinstance(node, (ast.For, ast.While, ast.Try))]
        assert loops == [], f"{path.name}: a loop belongs in the package"
