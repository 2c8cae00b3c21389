"""The wheel, unpacked outside the checkout: the command, the recipes and the bundled model come with it."""

import os
import subprocess
import sys
import zipfile

import pytest
from helpers.fresh_imports import LESSON, ROOT

from lora_grpo import commands


@pytest.mark.registry  # setuptools, to build it
def test_the_wheel_trains_in_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "dist", ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        (entries,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "lora-grpo = lora_grpo.__main__:main" in archive.read(entries).decode()
    recipes = {path.name for path in (tmp_path / "site" / "lora_grpo" / "recipes").iterdir()}
    assert recipes == {*commands.RECIPES.values(), LESSON.name}
    assert (tmp_path / "site" / "lora_grpo" / "py.typed").is_file()

    (tmp_path / "empty").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": ""}
    flags = ["--train.max-steps", "1", "--data.eval-limit", "4", "--monitor.rows", "0", "--eval.num-samples", "0"]
    command = [sys.executable, "-P", "-m", "lora_grpo", "train", "gsm8k", *flags]
    done = subprocess.run(command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "empty" / "outputs" / "gsm8k_lora" / "adapter").is_dir()
    assert "lora-grpo merge outputs/gsm8k_lora" in done.stdout
