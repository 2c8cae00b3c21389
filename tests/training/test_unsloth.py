"""The Unsloth engine, with the real package, which `make engines` installs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py")
SHORT = """--model.engine unsloth --train.max-steps 12 --train.prompts-per-step 4 --train.micro-batch-size 32
    --data.eval-limit 20 --eval.num-samples 2 --eval.k 1"""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="unsloth is not installed: make engines"),
]

DUMP_CONFIG = """
import json, sys
from pathlib import Path
if sys.argv[1] == "unsloth":
    import unsloth
from lora_grpo.config import RunConfig
from lora_grpo.training.trl_config import grpo_arguments
arguments = grpo_arguments(RunConfig(), Path(sys.argv[2]), [1.0])
from trl import GRPOConfig
print(json.dumps({name: repr(value) for name, value in vars(GRPOConfig(**arguments)).items()}))
"""


def test_the_recipe_trains_with_unsloth(tmp_path):
    """Use a new process, because Unsloth patches imported packages, and 12 steps, so that the reward is logged."""
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, RECIPE, *SHORT.split(), "--output-dir", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Unsloth" in done.stdout + done.stderr
    record = json.loads((folder / "run.json").read_text())
    assert record["policy"]["engine"] == "unsloth" and record["versions"]["unsloth"]
    assert record["status"] == "complete"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert all(step["grad_norm"] > 0 for step in steps if step["frac_reward_zero_std"] < 1)

    from safetensors.torch import load_file

    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert saved and all(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)


def test_unsloth_changes_no_setting_that_the_run_relies_on(tmp_path):
    """Unsloth patches the defaults of GRPOConfig, so every setting that matters is explicit."""
    told = {}
    for engine in ("peft", "unsloth"):
        done = subprocess.run(
            [sys.executable, "-c", DUMP_CONFIG, engine, str(tmp_path)], capture_output=True, text=True, check=True
        )
        told[engine] = json.loads(done.stdout.splitlines()[-1])
    plain, patched = told["peft"], told["unsloth"]
    # Unsloth uses the fused kernel of the same optimizer.
    differing = {name for name in plain if patched.get(name) != plain[name]} - {"optim"}
    assert not differing
    assert "adamw_torch" in patched["optim"]


COUNT = """
import json, sys
from lora_grpo.config.schema import LoraSettings, ModelConfig, RunConfig
from lora_grpo.models import load_policy
config = RunConfig(model=ModelConfig(engine="unsloth"), lora=LoraSettings(rank=8), output_dir="none")
model = load_policy(config).model
def state(quantised):
    tensors = [quantised.absmax, quantised.code]
    return tensors + ([quantised.offset, *state(quantised.state2)] if quantised.nested else [])
frozen = {}
for parameter in model.parameters():
    if not parameter.requires_grad:
        tensors = [parameter.data, *(state(parameter.quant_state) if hasattr(parameter, "quant_state") else [])]
        frozen.update({tensor.data_ptr(): tensor.nbytes for tensor in tensors})
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
layer = model.get_base_model().model.layers[0]
print(json.dumps({
    "weights": sum(frozen.values()), "adapter": [parameter.numel() for parameter in trained],
    "width": model.get_input_embeddings().weight.element_size(), "triton": "triton" in sys.modules,
    "layer": type(layer).__module__, "forward": type(layer).forward.__module__,
}))
"""


def test_weights_and_adapter_take_what_is_planned_and_its_cpu_backend_runs_transformers_layers():
    from lora_grpo.config.schema import ModelConfig
    from lora_grpo.models.memory import weight_bytes
    from lora_grpo.models.model_files import read_config
    from lora_grpo.models.shape import Shape

    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    shape = Shape.of(read_config(ModelConfig()))
    assert sorted(found["adapter"]) == sorted(shape.adapter_tensors(8))
    assert found["weights"] == pytest.approx(weight_bytes(shape, 4, width=found["width"]), rel=0.05)
    # With Triton, this test could count the tensors that the fused layers save (docs/before-you-train.md).
    assert not found["triton"] and found["forward"].startswith("transformers."), found
