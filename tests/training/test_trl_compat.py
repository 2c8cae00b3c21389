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


@pytest.mark.parametrize(("owner", "name"), OVERRIDES, ids=[f"{owner.__name__}.{name}" for owner, name in OVERRIDES])
def test_an_override_takes_every_call_of_the_method_it_replaces(owner, name):
    assert rejected_calls(owner, name, GRPOTrainer) == []


def test_a_run_calls_every_override(tmp_path, monkeypatch):
    calls = count_calls(monkeypatch.setattr)
    run_tiny(tmp_path / "out", train={"max_steps": 1, "checkpoint_steps": 1})
    not_called = {f"{owner.__name__}.{name}" for owner, name in OVERRIDES} - calls.keys()
    # RecipeTrainer plays episodes and grades them itself.
    assert not_called == {"FastGRPOTrainer._generate_single_turn", "FastGRPOTrainer._calculate_rewards"}


def test_micro_batches_are_slices_in_the_order_of_the_prompts(tmp_path, monkeypatch):
    """A prompt's group of 4 completions is a micro-batch here."""
    compute_loss = FastGRPOTrainer._compute_loss
    prompts_of_micro_batches = []

    def recorded(trainer, model, inputs):
        prompts_of_micro_batches.append({tuple(ids) for ids in inputs["prompt_ids"].tolist()})
        return compute_loss(trainer, model, inputs)

    monkeypatch.setattr(FastGRPOTrainer, "_compute_loss", recorded)
    run_tiny(tmp_path / "out", train={"max_steps": 2})
    assert [len(prompts) for prompts in prompts_of_micro_batches] == [1, 1, 1, 1]
    assert len(set().union(*prompts_of_micro_batches)) == 4


def test_values_of_a_step_are_logged_with_their_mean(tmp_path, monkeypatch):
    compute_loss = FastGRPOTrainer._compute_loss

    def recording(trainer, model, inputs):
        values = trl_compat.step_values(trainer)["mine"]
        values.append(float(len(values)))  # 0 in the first micro-batch of a step, 1 in the second
        return compute_loss(trainer, model, inputs)

    monkeypatch.setattr(FastGRPOTrainer, "_compute_loss", recording)
    run, _ = run_tiny(tmp_path / "out", train={"max_steps": 2})
    assert [step["mine"] for step in read_metrics(run.folder)] == [0.5, 0.5]


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
    compute_loss = FastGRPOTrainer._compute_loss
    passes = []

    def recorded(trainer, model, inputs):
        passes.append((trl_compat.micro_batch_number(trainer), trl_compat.reuses_rollouts(trainer)))
        return compute_loss(trainer, model, inputs)

    monkeypatch.setattr(FastGRPOTrainer, "_compute_loss", recorded)
    run_tiny(tmp_path / "out", train={"max_steps": 2}, grpo=("num_iterations=2",))
    assert passes == [(0, False), (1, False), (0, True), (1, True)]


def test_a_broken_vllm_is_not_imported(fresh, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('no CUDA')")
    info = tmp_path / "vllm-0.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.12.0\n")

    import_trl = tmp_path / "import_trl.py"
    import_trl.write_text("from trl import GRPOTrainer\n")
    assert fresh.start(import_trl).end().returncode == 1

    import_trl.write_text(
        "from lora_grpo.training.trl_compat import ignore_installed_vllm\n"
        "ignore_installed_vllm()\n"
        "from trl import GRPOTrainer\n"
    )
    done = fresh.start(import_trl).end()
    assert done.returncode == 0, done.stderr


def test_trl_casts_the_adapter_to_bfloat16_and_a_run_undoes_it(tmp_path, monkeypatch):
    states = []
    use_float32_adapter = trl_compat.use_float32_adapter

    def recorded(model, trained):
        def record_state():
            dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
            states.append({"dtypes": dtypes, "has a copy as reference": "ref" in model.peft_config})

        record_state()
        use_float32_adapter(model, trained)
        record_state()

    monkeypatch.setattr(trl_compat, "use_float32_adapter", recorded)
    run_tiny(tmp_path / "out", train={**TINY["train"], "beta": 0.1, "max_steps": 1})
    by_trl, by_run = states
    assert by_trl == {"dtypes": {torch.bfloat16}, "has a copy as reference": True}
    assert by_run == {"dtypes": {torch.float32}, "has a copy as reference": False}


def test_importance_sampling_is_enabled_without_an_engine(tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    assert not trl_compat.has_importance_sampling(trainer)
    trl_compat.enable_importance_sampling(trainer)
    assert trl_compat.has_importance_sampling(trainer)
    trainer.vllm_importance_sampling_clip_max = 0.0
    assert trainer.compute_loss(trainer.model, micro_batch([2, 2])).item() == 0  # all weights are zero

    def enable(training):
        trl_compat.enable_importance_sampling(training.trainer)

    run, _ = run_tiny(tmp_path / "out", before=enable, train={"max_steps": 2})
    assert all("sampling/importance_sampling_ratio/mean" in step for step in read_metrics(run.folder))


def test_tiles_are_enabled_without_a_package_of_kernels_and_compute_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(trl_compat, "tiles_of", lambda trainer, score, model: None)
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    monkeypatch.undo()
    inputs = micro_batch([2, 2])
    loss_without_tiles = trainer.compute_loss(trainer.model, dict(inputs)).item()
    score = super(FastGRPOTrainer, trainer)._get_per_token_logps_and_entropies
    tiles = trl_compat.tiles_of(trainer, score, trainer.model)
    trainer.loss_pass._score = tiles.enable()
    assert trainer.compute_loss(trainer.model, dict(inputs)).item() == pytest.approx(loss_without_tiles, rel=1e-5)
    assert "liger_kernel" not in sys.modules
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    with torch.no_grad():
        torch.testing.assert_close(*tiles.compare(ids))


@pytest.mark.skipif(not trl_compat.has_fused_head(), reason="TRL 1.16 has a fused head")
def test_a_fused_head_computes_logits_of_completions_alone(tmp_path, monkeypatch):
    from trl.trainer import utils

    computed = []
    compute = utils._ChunkedLogProbFunction.apply

    def recording(states, *args):
        computed.append(len(states))
        return compute(states, *args)

    monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", recording)
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    trainer.loss_pass.packing_disabled_reason = "padded rows have prompts, too"
    inputs = micro_batch([2, 2])
    computed.clear()
    trainer.compute_loss(trainer.model, dict(inputs))
    assert sum(computed) == inputs["completion_mask"].sum().item()


@pytest.mark.skipif(not trl_compat.has_fused_head(), reason="TRL 1.14 scores whole logits itself")
def test_whole_logits_have_entropies_only_if_they_are_asked_for(tmp_path, monkeypatch):
    from trl.trainer import utils

    calls = []
    entropy_from_logits = utils.entropy_from_logits

    def recording(*args, **kwargs):
        calls.append(args)
        return entropy_from_logits(*args, **kwargs)

    monkeypatch.setattr(utils, "entropy_from_logits", recording)
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12, temperature=0.7)
    inputs = micro_batch([2, 2])
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    completion_width = inputs["completion_ids"].shape[1]
    score = trl_compat.whole_logits_score(trainer, None)
    calls.clear()
    with torch.no_grad():
        logprobs, entropies, _ = score(trainer.model, ids, mask, completion_width)
        assert entropies is None
        assert not calls
        same_logprobs, entropies, _ = score(trainer.model, ids, mask, completion_width, compute_entropy=True)
    assert entropies.shape == logprobs.shape
    assert len(calls) == 1
    assert torch.equal(logprobs, same_logprobs)


def test_rewards_are_those_that_trl_calculates(tmp_path, monkeypatch):
    steps = []
    calculate_rewards = RecipeTrainer._calculate_rewards

    def recorded(trainer, inputs, prompts, completions, ids):
        rewards = calculate_rewards(trainer, inputs, prompts, completions, ids)
        columns = [trainer.scorer.rows[row["id"]] for row in inputs]
        rewards_of_trl = GRPOTrainer._calculate_rewards(trainer, columns, prompts, completions, ids)
        steps.append((rewards, rewards_of_trl))
        return rewards

    (tmp_path / "mine.py").write_text(
        "def mine(completions, trainer_state, log_metric, log_extra, **columns):\n"
        "    log_metric('mine', trainer_state.global_step)\n"
        "    log_extra('mine', completions)\n"
        "    return [None if index % 2 else 1.0 for index, _ in enumerate(completions)]\n"
    )
    monkeypatch.setattr(RecipeTrainer, "_calculate_rewards", recorded)
    specs = (f"{tmp_path}/mine.py:mine", "near_length:20")
    run, _ = run_tiny(tmp_path / "out", train={"max_steps": 1}, rewards=specs)
    [(rewards, rewards_of_trl)] = steps
    assert rewards.isnan().any()
    torch.testing.assert_close(rewards, rewards_of_trl, rtol=0, atol=0, equal_nan=True)
    assert read_metrics(run.folder)[0]["mine"] == 0
