import dataclasses

import pytest

from lora_grpo.config.batch import batch_shape, smaller_micro_batch
from lora_grpo.config.schema import RunConfig, check_fields
from lora_grpo.errors import UserError
from lora_grpo.settings import checks


def config(**settings):
    """Return a RunConfig with `train__max_steps=3` for `train.max_steps`."""
    changed = RunConfig(output_dir="out")
    for name, value in settings.items():
        section, _, key = name.partition("__")
        if key:
            value = dataclasses.replace(getattr(changed, section), **{key: value})
        changed = dataclasses.replace(changed, **{section: value})
    return changed


def check(config):
    checks.check(check_fields(config))


def shape_of(group, prompts, micro, processes=1):
    sizes = config(sampling__num_generations=group, train__prompts_per_step=prompts, train__micro_batch_size=micro)
    with pytest.MonkeyPatch.context() as launcher:
        launcher.setenv("WORLD_SIZE", str(processes))
        return batch_shape(sizes)


def refusal(function, *arguments):
    with pytest.raises(UserError) as error:
        function(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("group", "prompts", "micro", "processes", "completions", "passes"),
    [(8, 8, 8, 1, 64, 8), (8, 8, 64, 1, 64, 1), (16, 8, 128, 1, 128, 1), (2, 3, 1, 1, 6, 6), (8, 8, 4, 4, 64, 4)],
)
def test_a_step_is_cut_into_equal_passes(group, prompts, micro, processes, completions, passes):
    shape = shape_of(group, prompts, micro, processes)
    assert shape.completions_per_step == completions == group * prompts
    assert shape.accumulation_steps == passes
    assert shape.parallel_samples * processes == completions


@pytest.mark.parametrize(
    ("group", "prompts", "micro", "processes", "parts"),
    [
        (
            8,
            8,
            7,
            1,
            [
                "64 completions of a step",
                "micro-batches of 7 ",
                "pass --train.micro-batch-size 8, or change --train.prompts-per-step or --sampling.num-generations",
            ],
        ),
        (8, 8, 200, 1, ["pass --train.micro-batch-size 64"]),
        (8, 8, 64, 2, ["64 completions", "on 2 processes", "--train.micro-batch-size 32"]),
        (2, 1, 1, 3, ["3 processes cannot share", "change --train.prompts-per-step"]),
    ],
)
def test_a_batch_that_does_not_fit_says_what_would(group, prompts, micro, processes, parts):
    message = refusal(shape_of, group, prompts, micro, processes)
    for part in parts:
        assert part in message


def test_the_size_a_refusal_offers_is_accepted():
    divisors = {1, 2, 4, 8, 16, 32}  # of the 32 completions of a process
    for micro in set(range(1, 70)) - divisors:
        offered = int(refusal(shape_of, 8, 8, micro, 2).split("--train.micro-batch-size ")[1].split(",")[0])
        assert shape_of(8, 8, offered, 2).accumulation_steps * offered * 2 == 64


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train__micro_batch_size", 7, "do not divide"),
        ("data__task", "gsm8", "unknown task 'gsm8'; did you mean 'gsm8k'?"),
        ("data__prompt_style", "xmll", "--data.prompt-style is 'xmll'; expected 'xml'"),
        ("rewards", (), "no rewards; name at least one"),
        ("rewards", ("corect_answer",), "did you mean 'correct_answer'?"),
        ("grpo", ("num_iterations=0",), "num_iterations=0; expected 1 or more"),
        ("lora__rank", 0, "--lora.rank is 0; expected a value greater than"),
        ("lora__targets", (), "--lora.targets is (); expected at least 1 item"),
        ("sandbox__timeout_seconds", 1e300, "--sandbox.timeout-seconds is 1e+300"),
        ("sandbox__memory_mb", 10**9, "--sandbox.memory-mb is 1000000000"),
        ("model__gpu_memory_share", 0.0, "--model.gpu-memory-share is 0.0; expected a value greater than 0"),
        ("model__gpu_memory_share", 1.1, "less than or equal to 1"),
        ("sampling__temperature", float("nan"), "--sampling.temperature is nan"),
        ("train__learning_rate", float("inf"), "--train.learning-rate is inf"),
        ("lora__dropout", 1.0, "--lora.dropout is 1.0; expected a value less than 1"),
        ("sampling__max_completion_tokens", 1024, "leaves no room for a prompt in --model.max-sequence-tokens 1024"),
        ("eval__k", (1, 5), "--eval.k 5 needs --eval.num-samples 5 or more, got 4"),
        ("eval__k", (0,), "--eval.k is 0; expected a value greater than"),
    ],
)
def test_what_cannot_run_is_refused_with_its_flag(name, value, message):
    assert message in refusal(check, config(**{name: value}))


def test_a_mask_by_logprobs_needs_the_whole_distribution():
    masked = {"grpo": ("off_policy_mask_threshold=0.1",)}
    assert "needs --sampling.top-p 1, got 0.9" in refusal(check, config(**masked, sampling__top_p=0.9))
    check(config(**masked))
    check(config(sampling__top_p=0.9))


@pytest.mark.parametrize(
    "field", ["loss_type=bnpo", "entropy_coef=0.01", "use_adaptive_entropy=true", "top_entropy_quantile=0.2"]
)
def test_a_loss_that_depends_on_the_micro_batch_needs_its_size(field):
    message = refusal(check, config(grpo=(field,)))
    assert f"--grpo {field.split('=')[0]}=" in message
    assert "pass --train.micro-batch-size, e.g. 8" in message
    given = config(grpo=(field,), train__micro_batch_size=8)
    check(given)
    assert smaller_micro_batch(given) is None


@pytest.mark.parametrize("field", ["loss_type=dr_grpo", "entropy_coef=0.0", "top_entropy_quantile=1.0"])
def test_other_losses_do_not(field):
    check(config(grpo=(field,)))
    assert smaller_micro_batch(config(grpo=(field,), train__micro_batch_size=8)) == 4


def test_checkpoints_fall_between_two_generations():
    assert "--train.max-steps 200 is not a multiple" in refusal(check, config(grpo=("num_iterations=3",)))
    message = refusal(check, config(grpo=("num_iterations=3",), train__max_steps=201))
    assert "--train.checkpoint-steps 20 is not a multiple of num_iterations=3" in message
    check(config(grpo=("num_iterations=3",), train__checkpoint_steps=21, train__max_steps=201))
    check(config(grpo=("num_iterations=4",)))
