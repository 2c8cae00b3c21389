"""Messages advise only flags that the running command has."""

import contextlib
import io
import re

import pytest
import tyro
from helpers.flags import flag_names
from helpers.reached_code import flags_in, reached, texts_in

from lora_grpo.errors import UserError
from lora_grpo.evaluation import EvaluateOptions
from lora_grpo.gguf import ExportOptions
from lora_grpo.hub import PushOptions
from lora_grpo.merging import MergeOptions, merged_model
from lora_grpo.merging import cli as merging
from lora_grpo.planning import Options
from lora_grpo.report import ReportOptions

ENTRIES = {
    "recipe": ("lora_grpo.pipeline", "run_recipe"),
    "evaluate": ("lora_grpo.evaluation.cli", "evaluate_and_report"),
    "merge": ("lora_grpo.merging.cli", "merge"),
    "push": ("lora_grpo.hub.push", "push_to_hub"),
    "export_gguf": ("lora_grpo.gguf.cli", "export"),
    "report": ("lora_grpo.report.writing", "report"),
    "check_gpu": ("lora_grpo.planning.gpu_check", "check_gpu"),
}
OPTIONS = {
    "evaluate": EvaluateOptions,
    "merge": MergeOptions,
    "push": PushOptions,
    "export_gguf": ExportOptions,
    "report": ReportOptions,
    "check_gpu": Options,
}
# Arguments for bubblewrap, nvidia-smi, git, torchrun, vLLM and llama.cpp.
OF_OTHER_PROGRAMS = {
    *("--unshare-all", "--cap-drop", "--clearenv", "--setenv", "--ro-bind", "--dev-bind", "--dev", "--remount-ro"),
    *("--tmpfs", "--ro-bind-try"),
    *("--chdir", "--die-with-parent", "--query-gpu", "--format", "--always", "--exclude", "--abbrev", "--dirty"),
    *("--standalone", "--nproc-per-node", "--enable-lora", "--max-lora-rank", "--max-loras", "--logprobs-mode"),
    *("--quantization", "--max-model-len", "--lora"),
    *("--model", "--host", "--port", "--jinja", "--parallel", "--ctx-size", "--threads", "--merge"),
}
# Modules that speak of another command than their own: the page of a run, the check of a recipe.
ALSO_OF = {
    "lora_grpo.report": {"recipe"},
    "lora_grpo.planning": {"recipe"},
}
# What a command cannot reach although its code does.
UNREACHED = {
    ("evaluate", "lora_grpo.models.model_files", "--model.name"),  # `read_config` of a folder, which was checked before
}


@pytest.fixture(scope="module")
def flags():
    """The flags of each command, from the first column of its help."""
    found = {"recipe": {*flag_names(), "--task", "--help", "--help-all"}}
    for command, options in OPTIONS.items():
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
            patch.setenv("COLUMNS", "400")
            with pytest.raises(SystemExit):
                tyro.cli(options, args=["--help"])
        columns = re.findall(r"^\W*?(-.*?)(?:  |$)", output.getvalue(), re.MULTILINE)
        found[command] = set(re.findall(r"--[a-z][\w.-]*", "\n".join(columns)))
    return found


@pytest.mark.parametrize("command", ENTRIES)
def test_a_command_names_only_flags_that_it_has(flags, command):
    # Exporting a run merges it, and says that the error is one of merge.py.
    stop = {ENTRIES["merge"]} - {ENTRIES[command]}
    wrong = []
    for module, name in sorted(reached(*ENTRIES[command], stop=stop)):
        texts = [*texts_in(module, name)]
        printed = {*ENTRIES} & {text.replace("-", "_") for text in texts}  # the command line of another command
        for text, flag in [(each, flag) for each in texts for flag in flags_in(each)]:
            named = {other for other in ENTRIES if re.search(rf"\b{other}\b", text)} | printed | {command}
            named |= next((others for prefix, others in ALSO_OF.items() if module.startswith(prefix)), set())
            known = set().union(*(flags[each] for each in named)) | OF_OTHER_PROGRAMS
            is_section = any(each.startswith(f"{flag}.") for each in known)
            if flag not in known and not is_section and (command, module, flag) not in UNREACHED:
                wrong.append(f"{module}.{name} names {flag}: {text[:80]}")
    assert wrong == []


def test_exporting_a_run_that_cannot_be_merged_names_merge_py(tmp_path, monkeypatch):
    def refuse(options):
        raise UserError("the base is quantized; pass another one with --base")

    (tmp_path / "run.json").touch()
    monkeypatch.setattr(merging, "merge", refuse)
    with pytest.raises(UserError, match=r"^lora-grpo merge /.*: the base is quantized; pass another one with --base$"):
        merged_model(tmp_path)
