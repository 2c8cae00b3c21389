"""`lora-grpo verify` as a user runs it: its output, its exit codes, its record, and its errors."""

import gzip
import json
import shutil
import signal
import subprocess
import sys

import pytest
from helpers.made_runs import make_adapter
from helpers.tiny_runs import run_tiny

from lora_grpo import starter
from lora_grpo.cli import run_front_door
from lora_grpo.errors import UserError
from lora_grpo.hub.facts import gather
from lora_grpo.merging import MergeOptions, merge, merge_model
from lora_grpo.merging.report import Divergences
from lora_grpo.models import ModelFlags, resolve
from lora_grpo.verify.probes import choose_prompts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run and its merged model."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    run_tiny(folder, train={"max_steps": 4, "learning_rate": 5e-3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_model, "measure_divergences", lambda *_: Divergences(not_measured="in a test"))
        merge(MergeOptions(str(folder)))
    return folder


def lora_grpo(capsys, *arguments):
    code = run_front_door(list(map(str, arguments)))
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_merged_model_is_verified_and_the_card_says_so(run, capsys):
    code, output, _ = lora_grpo(capsys, "verify", run, "--against", run / "merged")
    assert code == 0
    assert f"{run / 'merged'}: the adapter: " in output
    assert "effect" in output and "1.00 ± 0.00" in output
    [(name, entry)] = json.loads((run / "verification.json").read_text()).items()
    assert (name, entry["result"]["finding"]) == ("merged", "the adapter")
    facts = gather(run / "merged", "merged")
    assert facts.verified == (f"merged: {entry['summary']}",)
    assert gather(run / "adapter", "adapter").verified == ()

    # The statement is withdrawn if the files change, and if a later verification does not confirm it.
    weights = run / "merged" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert gather(run / "merged", "merged").verified == ()
    weights.write_bytes(content)
    assert gather(run / "merged", "merged").verified != ()


def test_the_base_is_told_from_the_adapter(run, capsys):
    code, output, errors = lora_grpo(capsys, "verify", run, "--against", run / "merged", starter.model_path())
    assert code == 1
    assert f"{starter.model_path()}: the base, without the adapter: " in output
    assert errors.strip().splitlines()[-1] == (
        f"error: 1 of 2 targets do not answer as the adapter does, or it cannot be told: {starter.model_path()}"
    )
    assert list(json.loads((run / "verification.json").read_text())) == ["merged"]


@pytest.mark.parametrize(("damage", "expected"), [("a folder", 0), ("not JSON", 2)])
def test_a_verification_that_cannot_be_kept_is_printed(run, capsys, tmp_path, damage, expected):
    run = shutil.copytree(run, tmp_path / "run")
    path = run / "verification.json"
    path.unlink(missing_ok=True)
    if damage == "a folder":
        path.mkdir()
    else:
        path.write_text("{")
    code, output, errors = lora_grpo(capsys, "verify", run, "--against", run / "merged")
    assert code == expected
    assert f"{run / 'merged'}: the adapter: " in output
    assert str(path) in errors.strip().splitlines()[-1]


def test_fewer_prompts_than_asked_for_are_a_note(capsys, tmp_path):
    spec = resolve(str(make_adapter(tmp_path / "adapter", base="starter")), ModelFlags())
    assert len(choose_prompts(None, spec, 16)[0]) == 16
    assert capsys.readouterr().err == ""
    assert len(choose_prompts(None, spec, 50)[0]) == 16
    assert "16 prompts, and not 50 (--num-prompts)" in capsys.readouterr().err


def test_prompts_are_those_of_a_file(run, capsys, tmp_path):
    for name, text in {
        "prompts.txt": "What is 3 plus 4?\n\nTom has 3 plums and buys 4.\n",
        "prompts.jsonl": '{"question": "What is 3 plus 4?"}\n'
        '{"messages": [{"role": "user", "content": "Tom has 3 plums and buys 4."}]}\n',
    }.items():
        (tmp_path / name).write_text(text)
        flags = ["--prompts", tmp_path / name, "--tokens", "8"]
        code, output, _ = lora_grpo(capsys, "verify", run, "--against", "transformers", *flags)
        assert code == 0
        num_tokens = int(output.splitlines()[-1].split()[2])
        assert 2 <= num_tokens <= 16


@pytest.mark.parametrize("name", ["prompts.jsonl.gz", "prompts.json", "Prompts.NDJSON"])
def test_prompts_are_read_from_json_lines_of_every_name(tmp_path, name):
    spec = resolve(str(make_adapter(tmp_path / "adapter", base="starter")), ModelFlags())
    content = b'{"question": "What is 3 plus 4?"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    prompts, _ = choose_prompts(tmp_path / name, spec, 1)
    assert prompts == [[{"role": "user", "content": "What is 3 plus 4?"}]]


@pytest.mark.parametrize("messages", [[], [{"content": "a"}], [{"role": "user"}], [{"role": 1, "content": "a"}], "a"])
def test_a_row_without_messages_is_named(tmp_path, messages):
    spec = resolve(str(make_adapter(tmp_path / "adapter", base="starter")), ModelFlags())
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question": "a"}) + "\n" + json.dumps({"messages": messages}) + "\n")
    with pytest.raises(UserError, match=f"^{path}:2 has no prompt; expected a list `messages`"):
        choose_prompts(path, spec, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to verify; pass --against"),
        (("--against", "no/such/folder"), "--against no/such/folder does not exist; expected a merged model"),
        (("--against", "unsloth"), "--against unsloth: a run with Unsloth compares"),
        (("--against", "{run}"), "is an adapter; pass `transformers` or `vllm`"),
        (("--against", "{run}/run.json"), "run.json is no model; expected a merged model"),
        (("--against", "http://127.0.0.1:PORT"), "http://127.0.0.1:PORT is no address of a server"),
        (("--against", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("--against", "transformers", "--prompts", "missing.txt"), "missing.txt cannot be read: No such file"),
        (("--against", "transformers", "--tokens", "0"), "--tokens"),
    ],
)
def test_mistakes_are_one_line(run, capsys, arguments, said):
    code, output, errors = lora_grpo(capsys, "verify", run, *(word.format(run=run) for word in arguments))
    assert code == 2
    assert output == ""
    last_line = errors.strip().splitlines()[-1]
    assert last_line.startswith("error: ") and said in last_line


def test_a_model_without_an_adapter_is_refused(run, capsys):
    code, _, errors = lora_grpo(capsys, "verify", run / "merged", "--against", "transformers")
    assert code == 2
    assert "has no adapter; pass a run or an adapter" in errors


INTERRUPTED = """
import sys, time
from lora_grpo.cli import run_command
from lora_grpo.verify import verify_adapter

def main():
    verify_adapter._in_background(lambda: time.sleep(600))
    raise KeyboardInterrupt

sys.exit(run_command(main))
"""


def test_ctrl_c_does_not_wait_for_a_server_that_is_still_asked():
    command = [sys.executable, "-c", INTERRUPTED]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "interrupted\n")
