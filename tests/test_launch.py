"""`accelerate launch --cpu --num_processes N` starts one process; the kit makes N of it."""

import os
from pathlib import Path

import pytest

from lora_grpo.launch import processes_asked

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import os, sys
from lora_grpo.command_line import run_command

def main():
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    with open(f"{sys.argv[1]}.{os.environ.get('RANK', 'none')}", "w") as file:
        print(*(os.environ.get(name) for name in names), *sys.argv[2:], file=file)
    print("spoke")

if __name__ == "__main__":
    sys.exit(run_command(main))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def environment(**more):
    unset = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_CPU", "OMPI_COMM_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in unset} | more


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("python accelerate launch --cpu --num_processes 2 run.py", 2),
        ("python accelerate launch --num_processes=3 --cpu run.py", 3),
        ("python accelerate launch --num-processes 2 --num_machines 1 --cpu run.py", 2),
        ("python accelerate launch --cpu --num_processes 4 --num_machines 2 run.py", None),
        ("python accelerate launch --cpu run.py --num_processes 7", None),
        ("python accelerate launch --cpu --num_processes two run.py", None),
        ("python accelerate launch --cpu --config_file missing.yaml run.py", None),
        ("bash", None),
        ("", None),
    ],
)
def test_the_number_is_read_from_the_launchers_own_arguments(words, processes):
    assert processes_asked(words.split(), "run.py") == processes


def test_the_number_may_stand_in_a_configuration_file(tmp_path):
    file = tmp_path / "cpu.yaml"
    file.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\nnum_processes: 2\n")
    words = ["accelerate", "launch", "--config_file", str(file)]
    assert processes_asked([*words, "run.py"], "run.py") == 2
    assert processes_asked([*words, "--num_processes", "3", "run.py"], "run.py") == 3


def test_the_configuration_files_are_accelerates_own():
    from accelerate.commands.config.config_args import load_config_from_file

    files = sorted((ROOT / "docs" / "accelerate").glob("*.yaml"))
    assert [path.stem for path in files] == ["cpu", "ddp", "zero2"]
    for path in files:
        assert load_config_from_file(str(path)).num_processes == 2
        assert path.name in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_accelerate_launch_starts_as_many_processes_as_it_is_told(fresh, script, tmp_path):
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")
    done = fresh.start(*launch, script, tmp_path / "said", "--a b", "c", env=environment()).end()
    assert done.returncode == 0, done.stderr
    assert "accelerate started one process of 2" in done.stderr
    written = {path.name: path.read_text() for path in tmp_path.glob("said.*")}
    assert written == {f"said.{rank}": f"{rank} 2 2  --a b c\n" for rank in range(2)}
    assert done.stdout == "spoke\n"


def test_one_process_is_left_alone(fresh, script, tmp_path):
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
    done = fresh.start(*launch, script, tmp_path / "said", env=environment()).end()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said.none").read_text().startswith("None None None")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "their number cannot be read"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "started by MPI (OMPI_COMM_WORLD_SIZE)"),
    ],
)
def test_what_cannot_be_made_several_is_refused_with_the_command_to_type(fresh, script, tmp_path, variables, said):
    done = fresh.start(script, tmp_path / "said", env=environment(**variables)).end()
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    number = variables.get("OMPI_COMM_WORLD_SIZE", "N")
    assert f"python -m torch.distributed.run --standalone --nproc-per-node {number} {script} " in done.stderr
    assert list(tmp_path.glob("said.*")) == []


@pytest.mark.parametrize("variables", [{"ACCELERATE_USE_CPU": "True"}, {"MASTER_ADDR": "x"}, {"PMI_SIZE": "1"}])
def test_an_environment_that_asks_for_one_process_is_left_alone(fresh, script, tmp_path, variables):
    done = fresh.start(script, tmp_path / "said", env=environment(**variables)).end()
    assert (done.returncode, done.stdout, done.stderr) == (0, "spoke\n", "")
