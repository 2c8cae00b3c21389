"""What depends on private methods of TRL: the functions of trl_compat.py, some of them together.

Calls of Unsloth's generated trainer are checked in tests/gpu_rig.
"""

import sys

import pytest
import torch
from helpers.loss_passes import make_trainer, micro_batch, random_model, with_adapter
from helpers.overrides import count_calls, overrides, rejected_calls
from helpers.tiny_runs import TINY, run_tiny
from trl import GRPOTrainer

from lora_grpo.runs import read_metrics
from lora_grpo.training import trl_compat
from lora_grpo.training.fast_trainer import FastGRPOTrainer, RecipeTrainer

OVERRIDES = overrides(GRPOTrainer)


@pytest.mark.parametrize(("owner", "name"), OVERRIDES, ids=lambda value: getattr(value, "__name__", value))
def test_an_override_takes_every_call_of_the_method_it_replaces(owner, name):
    assert rejected_calls(owner, name, GRPOTrainer) == []


def test_a_run_calls_every_override(tmp_path, monkeypatch):
    calls = count_calls(monkeypatch.setattr)
    run_tiny(tmp_path / "out", train={"max_steps": 1, "checkpoint_steps": 1})
    not_called = {f"{owner.__name__}.{name}" for owner, name in OVERRIDES} - calls.keys()
    # RecipeTrainer plays episodes and grades them itself.
    assert not_called == {"FastGRPOTrainer._generate_single_turn", "FastGRPOTrainer._calculate_rewards"}


def test_micro_batches_are_slices_in_the_order_of_the_prompts(tmp_path, monkeypatch):
    loss = FastGRPOTrainer._compute_loss
    micro_batches = []

    def recorded(trainer, model, inputs):
        micro_batches.append([tuple(ids) for ids in inputs["prompt_ids"].tolist()])
        return loss(trainer, model, inputs)

    monkeypatch.setattr(FastGRPOTrainer, "_compute_loss", recorded)
    run_tiny(tmp_path / "out", train={"max_steps": 2})
    assert [len(set(batch)) for batch in micro_batches] == [1] * 4
    assert len({batch[0] for batch in micro_batches}) == 4


def test_values_of_a_step_are_logged_with_their_mean(tmp_path, monkeypatch):
    loss = FastGRPOTrainer._compute_loss

    def recorded(trainer, model, inputs):
        values = trl_compat.step_values(trainer)["mine"]
        values.append(float(len(values)))
        return loss(trainer, model, inputs)

    monkeypatch.setattr(FastGRPOTrainer, "_compute_loss", recorded)
    run, _ = run_tiny(tmp_path / "out", train={"max_steps": 2})
    assert [step["mine"] for step in read_metrics(run.folder)] == [0.5, 0.5]  # two micro-batches


@pytest.mark.parametrize(
    ("settings", "depends"),
    [({}, False), ({"beta": 0.04}, True), ({"entropy_coef": 0.01}, True), ({"top_entropy_quantile": 0.5}, True)],
    ids=str,
)
def test_terms_of_the_loss_that_act_on_all_tokens_are_known(settings, depends, tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, **settings)
    assert trl_compat.loss_depends_on_all_tokens(trainer) is depends
    assert trl_compat.has_entropy_bonus(trainer) is ("entropy_coef" in settings)


def test_rollouts_that_are_used_again_and_micro_batches_are_counted(tmp_path, monkeypatch):
    loss = FastGRPOTrainer._compute_loss
    counted = []

    def recorded(trainer, model, inputs):
        counted.append((trl_compat.micro_batch_number(trainer), trl_compat.reuses_rollouts(trainer)))
        return loss(trainer, model, inputs)

    monkeypatch.setattr(FastGRPOTrainer, "_compute_loss", recorded)
    run_tiny(tmp_path / "out", train={"max_steps": 2}, grpo=("num_iterations=2",))
    assert counted == [(0, False), (1, False), (0, True), (1, True)]


def test_a_broken_vllm_is_not_imported(fresh, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('no CUDA')")
    info = tmp_path / "vllm-0.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.12.0\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "if sys.argv[1] == 'ignored':\n"
        "    from lora_grpo.training.trl_compat import ignore_installed_vllm as ignore\n"
        "    ignore()\n"
        "from trl import GRPOTrainer\n"
    )
    for ignored, worked in (("ignored", True), ("imported", False)):
        done = fresh.start(script, ignored).end()
        assert (done.returncode == 0) == worked, done.stderr


def test_trl_casts_the_adapter_to_bfloat16_and_a_run_undoes_it(tmp_path, monkeypatch):
    states = []
    use_float32_adapter = trl_compat.use_float32_adapter

    def adapter_state(model):
        """Return the data types of the adapter, and whether there is a reference."""
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        return dtypes, "ref" in model.peft_config

    def recorded(model, trained):
        states.append(adapter_state(model))
        use_float32_adapter(model, trained)
        states.append(adapter_state(model))

    monkeypatch.setattr(trl_compat, "use_float32_adapter", recorded)
    run_tiny(tmp_path / "out", train={**TINY["train"], "beta": 0.1, "max_steps": 1})
    assert states == [({torch.bfloat16}, True), ({torch.float32}, False)]


def test_importance_sampling_is_enabled_without_an_engine(tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    assert not trl_compat.has_importance_sampling(trainer)
    trl_compat.enable_importance_sampling(trainer)
    assert trl_compat.has_importance_sampling(trainer)
    inputs = micro_batch([2, 2]) | {"importance_sampling_ratio": torch.zeros(4, 12)}
    assert trainer.compute_loss(trainer.model, inputs).item() == 0  # the loss is weighted

    def enable(training):
        trl_compat.enable_importance_sampling(training.trainer)

    run, _ = run_tiny(tmp_path / "out", before=enable, train={"max_steps": 2})
    assert all("sampling/importance_sampling_ratio/mean" in step for step in read_metrics(run.folder))


def test_tiles_are_enabled_without_the_package_and_compute_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(trl_compat, "tiles_of", lambda trainer: None)
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    monkeypatch.undo()
    inputs = micro_batch([2, 2])
    calls = []
    chunked = GRPOTrainer._chunked_logps
    monkeypatch.setattr(GRPOTrainer, "_chunked_logps", lambda *a, **k: calls.append(1) or chunked(*a, **k))
    whole = trainer.compute_loss(trainer.model, dict(inputs)).item()
    assert not calls
    tiles = trl_compat.tiles_of(trainer)
    tiles.enable()
    assert trainer.compute_loss(trainer.model, dict(inputs)).item() == pytest.approx(whole, rel=1e-5)
    assert calls and "liger_kernel" not in sys.modules
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    with torch.no_grad():
        torch.testing.assert_close(*tiles.compare(ids))


def test_rewards_are_those_that_trl_calculates(tmp_path, monkeypatch):
    rewards_of_both = []
    calculate_rewards = RecipeTrainer._calculate_rewards

    def recorded(trainer, inputs, prompts, completions, ids):
        ours = calculate_rewards(trainer, inputs, prompts, completions, ids)
        columns = [trainer.scorer.rows[row["id"]] for row in inputs]
        theirs = GRPOTrainer._calculate_rewards(trainer, columns, prompts, completions, ids)
        rewards_of_both.append((ours, theirs))
        return ours

    (tmp_path / "mine.py").write_text(
        "def mine(completions, trainer_state, log_metric, log_extra, **columns):\n"
        "    log_metric('mine', trainer_state.global_step)\n"
        "    log_extra('mine', completions)\n"
        "    return [None if index % 2 else 1.0 for index, _ in enumerate(completions)]\n"
    )
    monkeypatch.setattr(RecipeTrainer, "_calculate_rewards", recorded)
    rewards = (f"{tmp_path}/mine.py:mine", "near_length:20")
    run, _ = run_tiny(tmp_path / "out", train={"max_steps": 1}, rewards=rewards)
    [(ours, theirs)] = rewards_of_both
    assert ours.dtype == theirs.dtype and torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))
    assert ours.isnan().any() and read_metrics(run.folder)[0]["mine"] == 0
