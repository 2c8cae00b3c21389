"""The logprob check on the real trainer, and with vLLM if it is installed."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math

import pytest
import torch
from helpers.sampling import sample

from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import load_data
from lora_grpo.errors import RunError
from lora_grpo.hardware import vllm_available
from lora_grpo.models.policy import Policy, load_policy
from lora_grpo.prompts.chat import render_row
from lora_grpo.runs import claim_run, open_run
from lora_grpo.sampling import Sampler
from lora_grpo.sampling.build import build_sampler
from lora_grpo.training import Training, logprob_check, prepare_training, train
from lora_grpo.training.logprob_check import MOVED, check_logprobs, tolerance

BACKENDS = [
    "transformers",
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.engines,
            pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines"),
        ],
    ),
]
TINY = {
    "model": {"engine": "peft", "max_sequence_tokens": 256},
    "data": {"task": "starter", "train_limit": 16, "eval_limit": 4},
    "sampling": {"num_generations": 8, "max_completion_tokens": 48},
    "rewards": ("correct_answer=2.0", "xml_tag_count=0.5"),
    "train": {
        "max_steps": 4,
        "prompts_per_step": 4,
        "micro_batch_size": 16,
        "learning_rate": 5e-4,  # of the default run
        "lr_scheduler": "constant",
        "warmup_steps": 0,
    },
}


@functools.cache
def starter_data():
    return load_data(replace(RunConfig(), TINY))


def weights(model, trainable):
    copies = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad == trainable:
            copies[name] = parameter.detach().clone()
    return copies


@dataclasses.dataclass
class PreparedRun:
    """A run before training."""

    training: Training
    policy: Policy
    sampler: Sampler
    prompts: list[str]
    base_weights: dict[str, torch.Tensor]

    @property
    def trainer(self):
        return self.training.trainer

    def check(self):
        return check_logprobs(self.trainer, self.sampler, self.prompts)


@pytest.fixture(scope="module", params=BACKENDS)
def prepared(request, tmp_path_factory):
    """The vLLM engine is started once for all tests."""
    folder = tmp_path_factory.mktemp("logprob_check") / "out"
    config = replace(replace(RunConfig(output_dir=str(folder)), TINY), {"sampling": {"backend": request.param}})
    data = copy.deepcopy(starter_data())
    claim_run(config, Invocation())
    run = open_run(config, Invocation(), "test", data.record)
    policy = load_policy(config)
    base_weights = weights(policy.model, trainable=False)
    sampler = build_sampler(policy, config)
    training = prepare_training(run, policy, data.train, sampler)
    run.begin(policy.record)
    prompts = [render_row(policy.tokenizer, row) for row in data.train]
    yield PreparedRun(training, policy, sampler, prompts, base_weights)
    sampler.close()


def test_sampler_and_trainer_agree_and_the_adapter_is_put_back(prepared):
    before = weights(prepared.policy.model, trainable=True)
    random_state = torch.get_rng_state()
    report = prepared.check()
    after = weights(prepared.policy.model, trainable=True)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert report["difference"] < 2e-5 < MOVED * report["tolerance"] <= report["moved"]
    assert report["tokens"] >= 8


@pytest.mark.parametrize(("share", "passes"), [(0.8, True), (1.5, False)])
def test_in_16_bits_rounding_may_grow_with_the_perturbation(prepared, monkeypatch, share, passes):
    monkeypatch.setattr(logprob_check, "tolerance", lambda _: 0.1)
    report = prepared.check()
    assert report["tolerance"] == pytest.approx(report["moved"] / 3) and report["moved"] >= 0.5
    error = share * report["tolerance"]
    sample_exactly = prepared.sampler.sample

    def sample_with_error(*arguments):
        groups = []
        for [completion] in sample_exactly(*arguments):
            logprobs = [logprob + error for logprob in completion.logprobs]
            groups.append([dataclasses.replace(completion, logprobs=logprobs)])
        return groups

    monkeypatch.setattr(prepared.sampler, "sample", sample_with_error)
    if passes:
        assert prepared.check()["difference"] == pytest.approx(error, rel=0.01)
    else:
        with pytest.raises(RunError):
            prepared.check()


def test_the_search_for_the_perturbation_ends_within_a_narrow_range(prepared, monkeypatch):
    least = MOVED * tolerance(prepared.trainer)
    monkeypatch.setattr(logprob_check, "_MAX_MOVED", 1.02 * least)
    assert least <= prepared.check()["moved"] <= 1.02 * least


@pytest.mark.parametrize(
    "moved", [lambda noise: 0.0, lambda noise: math.nan, lambda noise: 0.3 if noise < 0.07 else 2.0]
)
def test_a_perturbation_that_moves_nothing_is_refused_and_one_that_jumps_is_used(prepared, monkeypatch, moved):
    noises = [0.0]
    perturbing = logprob_check._perturbing

    @contextlib.contextmanager
    def recording(model):
        with perturbing(model) as perturb:
            yield lambda noise: (noises.append(noise), perturb(noise))

    monkeypatch.setattr(logprob_check, "tolerance", lambda _: 0.1)
    monkeypatch.setattr(logprob_check, "_perturbing", recording)
    monkeypatch.setattr(logprob_check, "_mean_difference", lambda *_: moved(noises[-1]))
    jumps = moved(1.0) == 2.0  # then it is used, and this sampler's difference, also 2 nats, is above the limit
    with pytest.raises(RunError, match="serves a policy other" if jumps else "cannot be compared"):
        prepared.check()
    assert not jumps or 0.07 <= noises[-2] < 0.071


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_log_probs_are_of_the_tempered_distribution(prepared, temperature):
    prepared.sampler.wake_up(adapter=True)
    prompt = prepared.prompts[:1]
    [[rollout]] = sample(prepared.sampler, prompt, 1, max_tokens=24, temperature=temperature, top_p=1.0, seed=3)
    [ids] = prepared.sampler.encode(prompt)
    with torch.no_grad():
        logits = prepared.policy.model(torch.tensor([ids + rollout.token_ids])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(rollout.token_ids)[:, None])
    assert rollout.logprobs == pytest.approx(expected.squeeze(1).tolist(), abs=1e-4)


def test_a_stale_adapter_is_found(prepared, monkeypatch):
    prepared.sampler.wake_up(adapter=True)
    before = weights(prepared.policy.model, trainable=True)
    with monkeypatch.context() as patched:
        patched.setattr(prepared.sampler, "wake_up", lambda *, adapter: None)
        with pytest.raises(RunError, match="as it was before the adapter changed"):
            prepared.check()
    after = weights(prepared.policy.model, trainable=True)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_sampler_that_serves_the_base_is_found(prepared, monkeypatch):
    wake_up = prepared.sampler.wake_up
    monkeypatch.setattr(prepared.sampler, "wake_up", lambda *, adapter: wake_up(adapter=False))
    with pytest.raises(RunError, match="as it was before the adapter changed"):
        prepared.check()


def test_logprobs_that_are_not_numbers_are_found(prepared, monkeypatch):
    sample = prepared.sampler.sample

    def sample_with_nan(*arguments, **options):
        groups = sample(*arguments, **options)
        for [completion] in groups:
            completion.logprobs[0] = float("nan")
        return groups

    monkeypatch.setattr(prepared.sampler, "sample", sample_with_nan)
    with pytest.raises(RunError):
        prepared.check()


def ignore_adapters(engine, monkeypatch):
    add = engine._engine.add_request
    monkeypatch.setattr(engine._engine, "add_request", lambda *requested, lora_request=None: add(*requested))


def keep_the_first_adapter(engine, monkeypatch):
    load_adapter = engine.load_adapter
    loaded_adapters = []

    def load_once(adapter):
        if not loaded_adapters:
            loaded_adapters.append(load_adapter(adapter))
        return loaded_adapters[0]

    monkeypatch.setattr(engine, "load_adapter", load_once)


def lose_adapters_in_sleep(engine, monkeypatch):
    sleep = engine._engine.sleep

    def forgetful_sleep(level):
        ignore_adapters(engine, monkeypatch)
        sleep(level)

    monkeypatch.setattr(engine._engine, "sleep", forgetful_sleep)


@pytest.mark.parametrize("broken", [None, ignore_adapters, keep_the_first_adapter, lose_adapters_in_sleep])
def test_a_broken_vllm_is_found(prepared, monkeypatch, broken):
    """Sleeping releases no memory on a CPU, but vLLM otherwise does what it does on a GPU."""
    if prepared.training.run.config.sampling.backend != "vllm":
        pytest.skip("no engine")
    monkeypatch.setattr(prepared.sampler.engine, "_sleeps", True)
    if broken:
        broken(prepared.sampler.engine, monkeypatch)
        with pytest.raises(RunError, match="as it was before the adapter changed"):
            prepared.check()
    else:
        assert prepared.check()["difference"] < 2e-5
        assert prepared.sampler.engine._engine.is_sleeping()
    prepared.sampler.engine.wake_up()


def test_another_base_is_found(prepared):
    """The base of the trainer is changed: one norm of 25, by a tenth."""
    norm = prepared.policy.model.get_base_model().model.norm.weight
    with torch.no_grad():
        norm.mul_(1.1)
    try:
        with pytest.raises(RunError, match="policy other than the one being trained"):
            prepared.check()
    finally:
        with torch.no_grad():
            norm.div_(1.1)


def test_a_step_whose_adapter_was_not_handed_over_stops_the_run(prepared, monkeypatch):
    """Must be the last test of this run, because it trains. Step 3 samples with the adapter of step 2."""
    run = prepared.training.run
    wake_up = prepared.sampler.wake_up
    call_numbers = itertools.count(1)

    def forgetful_wake_up(*, adapter):
        if next(call_numbers) != 3:
            wake_up(adapter=adapter)

    monkeypatch.setattr(prepared.sampler, "wake_up", forgetful_wake_up)
    with pytest.raises(RunError, match=r"step 3: logprobs of sampler and trainer differ by .* nats per token"):
        train(prepared.training)
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    differences = [step["sampling/sampling_logp_difference/mean"] for step in steps]
    assert max(differences[:2]) < tolerance() / 10
    assert differences[2] > 2 * tolerance()
    assert all(step["time/rollouts"] > 0 and step["rollouts/tokens_per_second"] > 0 for step in steps)
    assert all(step["time/training"] > 0 and step["time/rewards"] > 0 for step in steps)
    # The adapter was never merged into the base.
    base_weights_after = weights(prepared.policy.model, trainable=False)
    assert all(torch.equal(weight, base_weights_after[name]) for name, weight in prepared.base_weights.items())
    if run.config.sampling.backend == "vllm":
        assert all("sampling/importance_sampling_ratio/mean" in step for step in steps)
        assert all(0 < step["time/adapter_sync"] < step["time/rollouts"] for step in steps)
        assert all(0 <= step["time/engine_wake_up"] < step["time/rollouts"] for step in steps)


def test_a_nucleus_makes_log_probs_differ_and_does_not_stop_a_run(tmp_path):
    config = replace(RunConfig(output_dir=str(tmp_path / "out")), TINY)
    config = replace(config, {"train": {"max_steps": 1}, "sampling": {"top_p": 0.8}})
    data = copy.deepcopy(starter_data())
    claim_run(config, Invocation())
    run = open_run(config, Invocation(), "test", data.record)
    policy = load_policy(config)
    training = prepare_training(run, policy, data.train, build_sampler(policy, config))
    run.begin(policy.record)
    train(training)
    step = json.loads(run.metrics.read_text())
    assert step["sampling/sampling_logp_difference/mean"] > tolerance()
