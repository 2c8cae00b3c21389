"""Read which modules a Python file imports, without running it."""

import ast

IMPORTING_FUNCTIONS = ("import_module", "__import__", "importorskip")


def imports(path):
    """Yield (module, names) of every import of a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} has a relative import; write lora_grpo. in full"
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in IMPORTING_FUNCTIONS:
                yield str(node.args[0].value), []
