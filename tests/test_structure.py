"""How the house is built: who may import whom, what stays unloaded, what files may be called."""

import ast
import functools
import re
import tomllib

import pytest
from helpers.fresh_imports import HEAVY, LESSON, RECIPES, ROOT, run, run_recipe
from helpers.import_statements import imports

from lora_grpo.commands import RECIPES as RECIPE_FILES

PACKAGE = ROOT / "lora_grpo"
FILES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = sorted(path for folder in ("recipes", "scripts") for path in (ROOT / folder).glob("*.py"))


# A folder or module of the package may import from the lines above its own, and from nothing else.
LINES = [
    "commands console errors starter",
    "asynchronous distributed progress flags python_objects workers",
    "files sandbox",
    "config",
    "hardware prompts runs",
    "grading",
    "tasks",
    "models",
    "memory",
    "sampling merging",
    "endpoint",
    "agents",
    "rollouts",
    "data rewards",
    "evaluation",
    "audit preview gpu_check gguf loss monitoring verify",
    "training report hub",
    "process_state settings",
    "cli",
    "pipeline",
    "api",
    "__main__",
]
LINE_OF = {room: number for number, line in enumerate(LINES) for room in line.split()}


def room(path):
    """Return the folder of the package that a file is in, or the module that it is."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path):
    """Return the other folders and modules of the package that a file imports from."""
    rooms = set()
    for module, names in imports(path):
        if module == "lora_grpo":
            rooms |= set(names) - {"__version__"}
        elif module.startswith("lora_grpo."):
            rooms.add(module.split(".")[1])
    return rooms - {room(path)}


def face(folder):
    """Return the names that a folder offers: those that its `__init__.py` imports or defines."""
    names = set()
    statements = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")).body
    for_type_checkers = [node for statement in statements if isinstance(statement, ast.If) for node in statement.body]
    for node in [*statements, *for_type_checkers]:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_come_from_upper_lines_only(path):
    if path == PACKAGE / "__init__.py":  # for type checkers; at run time, names are imported when they are used
        assert rooms_imported(path) == {"api", "errors", "training"}
        return
    assert room(path) in LINE_OF, f"give {room(path)} a place in LINES"
    not_above = {imported for imported in rooms_imported(path) if LINE_OF[imported] >= LINE_OF[room(path)]}
    assert not_above == set(), f"{room(path)} stands on line {LINE_OF[room(path)]}; import from lines above it"


@pytest.mark.parametrize("path", [*FILES, *OUTSIDE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_folder_is_used_through_its_face(path):
    room_of_file = room(path) if path in FILES else None
    for module, names in imports(path):
        package, *folder_and_module = module.split(".")
        if package != "lora_grpo" or not folder_and_module:
            continue
        folder = folder_and_module[0]
        if folder == room_of_file or not (PACKAGE / folder).is_dir():
            continue
        assert module == f"lora_grpo.{folder}", f"{module} is inside another folder; import from lora_grpo.{folder}"
        assert set(names) <= face(folder), f"not offered by lora_grpo.{folder}"


def test_no_module_imports_itself_through_others():
    """Within a folder too, there is an order in which its modules can be read."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    imported_by = {}
    for name, path in modules.items():
        imported = set()
        for module, names in imports(path):
            imported |= {module, *(f"{module}.{imported_name}" for imported_name in names)}
        imported_by[name] = imported & modules.keys()

    # A module can be read when those that it imports have been read.
    read = set()
    while ready := {name for name in imported_by if name not in read and imported_by[name] <= read}:
        read |= ready
    assert imported_by.keys() - read == set()


def test_every_line_speaks_of_rooms_that_exist():
    assert set(LINE_OF) == {room(path) for path in FILES} - {"__init__"}


def test_every_folder_and_the_recipes_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent for path in FILES}
    installed = {".".join(folder.relative_to(ROOT).parts) for folder in folders} | {"lora_grpo.recipes"}
    assert {*project["tool"]["setuptools"]["packages"]} == installed
    assert {path.name for path in RECIPES} == {*RECIPE_FILES.values()}


def test_only_one_module_imports_unsloth():
    importers = {path.stem for path in FILES if any(name.split(".")[0] == "unsloth" for name, _ in imports(path))}
    assert importers == {"unsloth_policy"}


def test_the_package_imports_nothing_around_it():
    for path in (*FILES, *RECIPES, LESSON):
        assert not {name.split(".")[0] for name, _ in imports(path)} & {"recipes", "scripts", "tests", "tools"}, (
            path.name
        )


# What stays unloaded


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
    subclasses = ("callbacks", "fallback", "fast_trainer", "sft_trainer")  # of TRL's and transformers' classes
    lazy = {PACKAGE / "training" / f"{name}.py" for name in subclasses}
    files = [path for path in FILES if path not in lazy]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    result = run(code, ",".join(HEAVY), *names)
    assert result.stderr == ""
    assert result.stdout == "all of them\n"


MISTAKES = (["--sead", "1"], ["--train.micro-batch-size", "7"], ["--model.name", "./missing"], ["--grpo", "seed=1"])


@functools.cache
def help_and_mistakes(recipe):
    """Run a recipe for its help, and with each mistake, in one interpreter."""
    return run_recipe(recipe, ["--help-all"], *MISTAKES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_help_all_loads_nothing_heavy_and_names_every_setting(recipe):
    from helpers.flags import flag_names

    from lora_grpo.config import UNUSED_BY_SFT
    from lora_grpo.flags import flag

    printed, loaded, _ = help_and_mistakes(recipe).stdout.partition("\nloaded [] code 0\n")
    assert loaded
    for section in ("model", "lora", "data", "sampling", "train", "eval"):
        assert f"--{section}." in printed
    unused = {flag(name) for name in UNUSED_BY_SFT} if recipe.stem == "sft_lora" else set()
    assert set(flag_names()) - set(re.findall(r"--[\w.-]+", printed)) == unused
    assert ast.get_docstring(ast.parse(recipe.read_text())).split("\n")[0] in printed


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_wrong_argument_is_refused_before_anything_heavy_is_loaded(recipe):
    result = help_and_mistakes(recipe)
    assert result.stdout.endswith("\nloaded [] code 0\n" + "loaded [] code 2\n" * len(MISTAKES))
    assert [line[:7] for line in result.stderr.splitlines()] == ["error: "] * len(MISTAKES)


# Files


def test_no_file_is_named_after_nothing():
    vague = {"util", "utils", "common", "helper", "helpers", "misc", "tools"}
    assert [path for path in (*FILES, *RECIPES) if path.stem in vague] == []


def test_the_readme_lists_every_recipe():
    readme = ROOT / "README.md"
    if not readme.is_file():
        pytest.skip("no README.md yet")
    text = readme.read_text(encoding="utf-8")
    names = [path.name for path in (*RECIPES, LESSON)]
    assert [name for name in names if f"`{name}`" not in text and f"recipes/{name}" not in text] == []
