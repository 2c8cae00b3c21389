"""Which functions of the package a command can reach, and the flags that their texts name. Reads the source only."""

import ast
import functools
import re

from helpers.fresh_imports import ROOT

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _source():
    """Return the modules, their definitions by (module, name), and what their imports mean."""
    trees = {_module(path): ast.parse(path.read_text()) for path in (ROOT / "lora_grpo").rglob("*.py")}
    definitions, imported = {}, {name: {} for name in trees}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                definitions[module, node.name] = node
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, _FUNCTIONS):
                        definitions[module, f"{node.name}.{each.name}"] = each
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    names = (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
                    definitions |= {(module, name): node for name in names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "lora_grpo":
                imported[module] |= {each.asname or each.name: (node.module, each.name) for each in node.names}
    return trees, definitions, imported


def _resolve(module, name):
    """Return the module and the definition that a name leads to, through the faces of folders; None if neither."""
    trees, definitions, imported = _source()
    if (module, name) in definitions:
        return module, name
    if f"{module}.{name}" in trees:
        return f"{module}.{name}", None
    return _resolve(*imported[module][name]) if name in imported.get(module, {}) else None


def _without_methods(node):
    """Yield the nodes of a definition, without annotations, and without the methods of a class."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        for field, value in ast.iter_fields(each):
            inner = value if isinstance(value, list) else [value]
            if field not in ("annotation", "returns"):
                own = isinstance(each, ast.ClassDef)
                waiting += [
                    sub for sub in inner if isinstance(sub, ast.AST) and not (own and isinstance(sub, _FUNCTIONS))
                ]


def _uses(module, name):
    """Return the definitions that one names, and the attributes that it reads of objects."""
    definitions = _source()[1]
    used, attributes = set(), set()
    for node in _without_methods(definitions[module, name]):
        found = None
        if isinstance(node, ast.Name):
            found = _resolve(module, node.id)
        elif isinstance(node, ast.Attribute):
            owner = _resolve(module, node.value.id) if isinstance(node.value, ast.Name) else None
            if owner and owner[1] is None:
                found = _resolve(owner[0], node.attr)
            else:
                attributes.add(node.attr)
        if found and found[1]:
            used.add(found)
    return used, attributes


def reached(module, name, stop=()):
    """Return the definitions that a function may run. A method counts if its class and its name are used somewhere.

    The functions of `stop`, as (module, name), are not entered.
    """
    _, definitions, _ = _source()
    seen, attributes, waiting = set(), set(), {(module, name)}
    while waiting:
        seen |= waiting
        for each in waiting:
            attributes |= _uses(*each)[1]
        waiting = {used for each in waiting for used in _uses(*each)[0]} - seen - set(stop)
        for owner, (kind, dot, method) in ((key[0], key[1].partition(".")) for key in definitions):
            if dot and (owner, kind) in seen and (method in attributes or method.startswith("__")):
                waiting |= {(owner, f"{kind}.{method}")} - seen
    return seen


def flags_in(text):
    """Return the flags that a text names. A text that ends in a hyphen is only the beginning of one."""
    return [flag.rstrip(".") for flag in _FLAG.findall(text) if not flag.endswith("-")]


def texts_in(module, name):
    """Yield the texts of a definition, without its docstring."""
    node = _source()[1][module, name]
    documentation = {
        each.value
        for part in ast.walk(node)
        if isinstance(getattr(part, "body", None), list)
        for each in part.body
        if isinstance(each, ast.Expr)
    }
    parts = set()
    for each in _without_methods(node):
        if isinstance(each, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in each.values)
            parts |= set(each.values)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and each not in parts | documentation:
            text = each.value
        else:
            continue
        yield text
