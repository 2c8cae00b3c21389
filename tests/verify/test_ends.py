"""Where a target ends completions, against where the adapter ends them."""

import random

import pytest
from helpers.stand_in_servers import Model, OpenAIStandIn, SglangStandIn

from lora_grpo.verify import VerifyOptions, differences, verify
from lora_grpo.verify.differences import missed_end
from lora_grpo.verify.reference import Scores
from lora_grpo.verify.targets import Answer

END = 2
CASES = [
    # tokens of twelve completions, the model's probability of an end at each, whether sampled and greedy ones go on
    ([5, 6, END], [0.0, 0.1, 0.99999], False, False),
    ([5, 6, 7], [0.0, 0.9, 0.5], False, False),  # cut at max_tokens, or unlikely tokens
    ([5, 6, 7], [0.0, 0.99, 0.0], True, True),  # an end token that is not shown
    ([5, 6, 7, 8, 9], [0.9, 0.9, 0.9, 0.9, 0.0], True, False),
    ([5, END, 7], [0.0, 0.9, 0.0], True, True),
    ([END, END], [0.5, 0.5], True, True),
]


@pytest.mark.parametrize(("token_ids", "end_probabilities", "sampled_go_on", "greedy_go_on"), CASES)
def test_completions_go_on_where_the_model_ends_them(token_ids, end_probabilities, sampled_go_on, greedy_go_on):
    scores = Scores([-1.0] * len(token_ids), [True] * len(token_ids), end_probabilities)
    for is_greedy, go_on in ((False, sampled_go_on), (True, greedy_go_on)):
        difference = missed_end([Answer(token_ids)] * 12, [scores] * 12, [END], is_greedy=is_greedy)
        assert (difference is not None) == go_on


@pytest.mark.parametrize("seed", range(5))
def test_completions_that_are_sampled_from_the_model_seldom_seem_too_long(seed, monkeypatch):
    """Of 400 sets of 12 completions, one in a hundred seems too long at a limit of a hundredth, or fewer."""
    monkeypatch.setattr(differences, "_LEAST_PROBABILITY", 0.01)
    generator = random.Random(seed)
    num_too_long = 0
    for _ in range(400):
        answers, scores = [], []
        for _ in range(12):
            probabilities = []
            token_ids = []
            while len(token_ids) < 32 and END not in token_ids:
                probabilities.append(generator.choice([0.001, 0.05, 0.3, 0.9]))
                token_ids.append(END if generator.random() < probabilities[-1] else 5)
            answers.append(Answer(token_ids))
            scores.append(Scores([-1.0] * len(token_ids), [True] * len(token_ids), probabilities))
        num_too_long += missed_end(answers, scores, [END], is_greedy=False) is not None
    assert num_too_long <= 4


class Endless(Model):
    """A model whose end token ends nothing."""

    def complete(self, prompt_ids, max_tokens, temperature, seed):
        token_ids, logprobs = [], []
        while len(token_ids) < max_tokens:
            more_ids, more = super().complete(prompt_ids + token_ids, max_tokens - len(token_ids), temperature, seed)
            token_ids += more_ids
            logprobs += more
        return token_ids, logprobs

    def has_ended(self, token_ids):
        return False


def report_on(server, starter_models, tokens=32):
    with server.served() as url:
        options = VerifyOptions(
            str(starter_models.adapter_folder),
            base=str(starter_models.base_folder),
            against=(f"{url}#tuned",),
            weight_bits=32,
            tokens=tokens,
        )
        return verify(options).targets[0]


@pytest.mark.parametrize("server_class", [OpenAIStandIn, SglangStandIn])
@pytest.mark.parametrize("is_endless", [False, True])
@pytest.mark.parametrize("tokens", [2, 32])  # with 2, no sampled completion tells
def test_a_server_that_lost_its_end_token(starter_models, server_class, is_endless, tokens):
    kind = Endless if is_endless else Model
    server = server_class(base=starter_models.base, tuned=kind(starter_models.tuned.model, starter_models.tokenizer))
    report = report_on(server, starter_models, tokens)
    assert report.result.finding == "the adapter", report.summary
    changed = [difference.kind for difference in report.differences if difference.changes_answers]
    assert changed == ["EOS"] * is_endless
    assert report.uses_adapter == (not is_endless)


def test_long_answers_are_asked_for_only_if_no_sampled_completion_has_ended(starter_models):
    lengths = []
    for kind in (Model, Endless):
        server = SglangStandIn(
            base=starter_models.base, tuned=kind(starter_models.tuned.model, starter_models.tokenizer)
        )
        report_on(server, starter_models)
        lengths.append(max(body["max_tokens"] for route, body in server.bodies if route.endswith("completions")))
    assert lengths == [32, 96]
