"""What a prompt has begun belongs to the completion, and only what follows the last closed thought is graded."""

import pytest
from helpers.gguf_models import byte_level, published_template, qwen_tokenizer, wrapped

from lora_grpo.data import gold_episodes
from lora_grpo.errors import UserError
from lora_grpo.grading import mathematics, numbers
from lora_grpo.grading.code_extraction import extract_program
from lora_grpo.prompts import chat, thoughts, turns
from lora_grpo.prompts.chat import add_prompts
from lora_grpo.prompts.template_variables import set_variables
from lora_grpo.rewards import Scorer, graded, parse_reward_specs, resolve
from lora_grpo.rewards.functions import REWARDS, strict_xml_format, think_answer_format
from lora_grpo.rollouts import Episode
from lora_grpo.sampling import Decoded, Sampler, SamplingParams
from lora_grpo.tasks import Session, get_task, grade_all

HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"
FAMILIES = {
    "qwen": "<think>\n{}\n</think>\n\n{}",
    "magistral": "[THINK]{}[/THINK]{}",
    "gemma 4": "<|channel>thought\n{}<channel|>{}",
    "gpt-oss": HARMONY,
    "seed-oss": "<seed:think>{}</seed:think>{}",
    "command a": "<|START_THINKING|>{}<|END_THINKING|>{}",
    "apertus": "<|inner_prefix|>{}<|inner_suffix|>{}",
}
EIGHTEEN = {"id": "a", "question": "How many?", "answer": "18", "prompt_style": "xml"}
DEFINED = "```python\ndef f(x):\n    return x\n```"
PROGRAM = {"id": "p", "entry_point": "f", "test": "assert f(3) == 3", "prelude": ""}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_of_a_family_follows_its_last_closed_thought(family):
    completion = FAMILIES[family].format("It is 17.", "It is 18.")
    opening, closing, _ = FAMILIES[family].split("{}")
    assert thoughts.answer_of(completion) == "It is 18."
    assert thoughts.answer_of(completion + completion) == "It is 18."
    assert thoughts.answer_of(f"It is 17.{closing}It is 18.") == "It is 18."
    assert thoughts.answer_of(f"It is 18. {opening}Wait") is None
    assert thoughts.answer_of(f"{opening}It is 18.") is None
    assert thoughts.answer_of(f"{completion}{opening}It is 18.") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("18", "18"),
        ("  18 \n", "  18 \n"),
        ("", ""),
        ("<think></think>", ""),
        ("<think>a</think>\n\n    return x\n", "    return x\n"),
        ("<think>a</think> 18", "18"),
        ("<think>a</think>\n \n18", "18"),
        ("<think>In <think> tags.</think>18", "18"),
        ("<think>a[/THINK]18", None),
        ("[THINK]a</think>18", None),
        ("<think>a[THINK]b</think>18", "18"),
        ("<reasoning>a</reasoning>18", "<reasoning>a</reasoning>18"),
        ("<Think>a</Think>18", "<Think>a</Think>18"),
        # Of gpt-oss: an answer without a thought, two thoughts, a preamble, and a call of a tool after a thought.
        ("<|channel|>final<|message|>18", "18"),
        (HARMONY.format("a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "18"), "18"),
        ("<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>18", "18"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f", "to=functions.f"),
        ("<|channel|>analysis<|message|>a<|end|>", None),
        # What a text mentions, and the code of an answer, mark no thoughts.
        ("The `<think>` tag.", "The `<think>` tag."),
        ("text.split('</think>')", "text.split('</think>')"),
        ("<think>It ends with `</think>`. a</think>b", "b"),
        ("<think>a</think>\n```python\n# <think>\n```\nb", "```python\n# <think>\n```\nb"),
        ("<think>a</think>\n```\n</think>\n```\nb", "```\n</think>\n```\nb"),
        ("```\na\n```\n<think>b", None),
        ("<think>```\na</think>b", "b"),  # the thought ends within its code
        ("<think>```\na\n```</think>b<think>c", None),
        ("a\n```\nb</think>c", "c"),  # this fence has no end, so that it starts no code
        ("<think>a</think>\n```\nb\n```\nc\n```\n<think>d", None),
    ],
)
def test_an_answer_is_what_follows_the_thoughts(text, answer):
    assert thoughts.answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "passed", "reason"),
    [
        ("<think>\\boxed{18}. No, wait.</think>The answer is 20.", False, "wrong_answer"),
        ("<think>\\boxed{17}. No, wait.</think>The answer is 18.", True, "correct"),
        ("<think>So \\boxed{18}. Wait, let me", False, "unfinished_thought"),
        ("\\boxed{18}. No, wait.</think>The answer is 20.", False, "wrong_answer"),
        ("<think>\\boxed{18}</think>", False, "no_answer"),
        ("\\boxed{18} <think>Is it?", False, "unfinished_thought"),
        ("[THINK]\\boxed{17}[/THINK]\\boxed{18}", True, "correct"),
        ("<think>\\boxed{17}</think>\\boxed{18}", True, "correct"),
        ("<think><answer>17</think><answer>18</answer>", True, "correct"),
        ("<think><answer>18</think>", False, "no_answer"),
    ],
)
def test_math_is_graded_after_the_thoughts(text, passed, reason):
    verdict = numbers.check(text, EIGHTEEN)
    assert (verdict.passed, verdict.reason) == (passed, reason)
    assert grade_all("gsm8k", [text], [EIGHTEEN]) == [verdict]
    assert grade_all("starter", [text], [EIGHTEEN]) == [verdict]
    if "The answer is" not in text:  # math has no final statements
        verdict = mathematics.check(text, EIGHTEEN)
        assert (verdict.passed, verdict.reason) == (passed, reason)


def test_the_other_rules_read_the_answer_too():
    xml = "<reasoning>\nr\n</reasoning>\n<answer>\n18\n</answer>"
    think = {**EIGHTEEN, "prompt_style": "think"}
    for text, row, strict, flexible in (
        ("<think>18</think>None", EIGHTEEN, False, False),
        ("<think>18", EIGHTEEN, False, False),
        (f"<think>17</think>{xml}", EIGHTEEN, True, True),
        (f"Hm. <think>17</think>{xml}", EIGHTEEN, True, True),
        (f"<think>17{xml}", EIGHTEEN, False, False),
        ("<think>\n17</think>\n<answer>18</answer>", think, True, True),
        ("17</think>\n<answer>18</answer>", think, False, True),
    ):
        rules = numbers.check(text, row).rules
        assert (rules["strict"], rules["flexible"]) == (strict, flexible), text


def test_a_program_may_contain_markers():
    program = "def f(text):\n    return text.split('</think>')[-1]"
    for text in (
        program,
        f"```python\n# after </think>\n{program}\n```",
        f"```python\n{program}\n```",
        f"<think>x</think>\n```python\n{program}\n```",
    ):
        assert "split('</think>')" in str(extract_program(text, "f")), text


def test_a_program_in_a_thought_is_no_program():
    texts = [
        f"<think>{DEFINED}",
        f"<think>{DEFINED}</think>",
        f"<think>Hm.</think>{DEFINED}",
        f"{DEFINED}<think>Hm.",
        f"[THINK]Hm.[/THINK]\n{DEFINED}",
        f"<think>def f(x): return 4</think>{DEFINED}",
        DEFINED,
    ]
    verdicts = grade_all("starter-code", texts, [PROGRAM] * len(texts))
    unfinished = ["unfinished_thought", "no_code", "passed", "unfinished_thought", "passed", "passed", "passed"]
    assert [verdict.reason for verdict in verdicts] == unfinished
    assert {verdict.tests for verdict in verdicts if not verdict.passed} == {(0, 0)}


CHECK = """
CALLS = []
def load(split): return [{'question': f'{n}?', 'answer': str(n)} for n in (18, 19)]
def check(completion, row):
    CALLS.append(completion)
    return row['answer'] in completion
"""


def test_check_gets_what_follows_the_thoughts(tmp_path):
    (tmp_path / "asked.py").write_text(CHECK)
    (tmp_path / "whole.py").write_text(CHECK + "SEES_THOUGHTS = True\n")
    texts = ["<think>18", "<think>18</think>17", "<think>17</think>\n\n18", "18", " 18\n"]
    for name, passed, seen in (
        ("asked.py", [False, False, True, True, True], ["17", "18", "18", " 18\n"]),
        ("whole.py", [True, True, True, True, True], texts),
    ):
        task = get_task(str(tmp_path / name))
        row = task.load("train")[0]
        verdicts = grade_all(str(tmp_path / name), texts, [row] * len(texts))
        assert [verdict.passed for verdict in verdicts] == passed
        assert seen == task.module.CALLS
        assert (verdicts[0].reason == "unfinished_thought") == (name == "asked.py")


THINK_RIGHT = "<think>\nIt is sixteen and two more.</think>\n<answer>18</answer>"


@pytest.mark.parametrize(
    ("reward", "text", "value"),
    [
        ("think_answer_format", THINK_RIGHT, 1),
        ("think_answer_format", THINK_RIGHT.partition("</think>")[0], 0),
        ("strict_xml_format", "<think>\na</think>\n\n<reasoning>\nr\n</reasoning>\n<answer>\n18\n</answer>", 1),
        ("strict_xml_format", "<think>\n<reasoning>\nr\n</reasoning>\n<answer>\n18\n</answer>", 0),
        ("soft_xml_format", "<think><reasoning>r</reasoning><answer>18</answer>", 0),
        ("soft_xml_format", "<think>a</think><reasoning>r</reasoning><answer>18</answer>", 1),
        ("soft_xml_format", "<think><reasoning>r</reasoning><answer>18</answer></think>18", 0),
        ("xml_tag_count", "<think><reasoning>a</think><reasoning>r</reasoning><answer>18</answer>", 1),
        ("xml_tag_count", "<think><reasoning>r</reasoning><answer>18</answer>", 0),
        ("integer_answer", "<think>\\boxed{a}</think>\\boxed{18}", 1),
        ("integer_answer", "<think>\\boxed{18}", 0),
        ("integer_answer", "[THINK]\\boxed{18}[/THINK]\\boxed{a}", 0),
    ],
)
def test_format_rewards_read_the_answer(reward, text, value):
    assert REWARDS[reward].function([text, [{"role": "assistant", "content": text}]]) == [value] * 2


def test_a_pattern_reads_the_whole_completion():
    [reward] = resolve(parse_reward_specs(["pattern:^<think>=1.0"]))
    columns = {"completions": [THINK_RIGHT, "18"], "id": ["a", "b"], "verdicts": [None, None]}
    assert reward.function(**columns) == [1, 0]


OPENS = {  # template, its variables, what its prompt has begun
    "qwen3": ({}, ""),
    "qwen3 off": ({"enable_thinking": False}, ""),
    "qwen3_5_think": ({"enable_thinking": True}, "<think>\n"),
    "qwen3_5_think off": ({"enable_thinking": False}, ""),
    "qwen3_5_nothink on": ({"enable_thinking": True}, "<think>\n"),
    "deepseek_r1_distill": ({}, "<think>\n"),
    "nemotron_3_nano on": ({"enable_thinking": True}, "<think>\n"),
    "nemotron_3_nano off": ({"enable_thinking": False}, ""),
    "gptoss": ({}, ""),
    "gemma4 on": ({"enable_thinking": True}, ""),
    "glm4moe off": ({"enable_thinking": False}, ""),
    "qwen2_5": ({}, ""),
}
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<turn|>", "<|end|>", "<|return|>")
MARKS = ("[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<|channel|>", "<|message|>", "<|start|>")


def tokenizer_of(name, special=(*TOKENS, *MARKS)):
    """Return a small tokenizer with a published template and its variables."""
    tokenizer = wrapped(byte_level(special=special), published_template(name.split()[0]), eos_token="<|im_end|>")
    variables, _ = OPENS.get(name, ({}, ""))
    if variables:
        set_variables(tokenizer, variables, 64, quiet=True)
    return tokenizer


def asked(style="xml", **columns):
    return add_prompts([{**EIGHTEEN, "task": "gsm8k", **columns}], style)[0]


@pytest.mark.parametrize("name", OPENS)
def test_what_a_template_opens_belongs_to_the_completion(name):
    tokenizer = tokenizer_of(name)
    row = asked()
    prompt = chat.render_row(tokenizer, row)
    begun = OPENS[name][1]
    assert chat.begun_in(prompt, row) == begun and prompt.endswith(begun)
    episode = Episode(row, prompt, [1, 2], tokenizer, [2], 64)
    episode.take([5, 6, 2], "The answer is 18.", [-0.1, -0.2, -0.3], truncated=False)
    assert episode.text == f"{begun}The answer is 18."
    assert (episode.token_ids, episode.loss_mask, episode.logprobs) == ([5, 6, 2], [1, 1, 1], [-0.1, -0.2, -0.3])
    [verdict] = grade_all("gsm8k", [episode.text], [row])
    assert verdict.reason == ("unfinished_thought" if begun else "correct")


@pytest.mark.parametrize("name", OPENS)
@pytest.mark.parametrize("style", ["xml", "think", "boxed", "hashes"])
def test_sft_trains_one_thought_and_a_right_answer(name, style):
    tokenizer = tokenizer_of(name)
    row = asked(style, answer="It is 9 x 2, which makes eighteen.\n#### 18")
    [episode] = gold_episodes(tokenizer, [row])
    trained = tokenizer.decode(episode.token_ids[:-1])
    assert episode.text == OPENS[name][1] + trained
    assert episode.text.count("<think>") == episode.text.count("</think>") <= 1
    verdict = numbers.check(episode.text, row)
    is_in_format = (style, name) != ("think", "gptoss")  # whose answers follow the header of a channel
    assert verdict.passed and verdict.rules["flexible"] and verdict.rules["strict"] == is_in_format
    if style == "think":
        assert think_answer_format([episode.text]) == [1.0 if is_in_format else 0.5]
    if style == "xml":
        assert strict_xml_format([episode.text]) == [1]


@pytest.mark.parametrize(
    ("begun", "reference", "lead", "trained"),
    [
        ("", "18", "", "18"),
        ("", "<think>a</think>18", "", "<think>a</think>18"),
        ("<think>\n", "18", "", "\n</think>\n\n18"),
        ("<think>\n", "18", "\n</think>\n\n", "\n</think>\n\n18"),
        ("<think>\n", "<think>a</think>18", "", "a</think>18"),
        ("<think>\n", "<think>\na\n</think>\n\n18", "", "a\n</think>\n\n18"),
        ("<think>", "<think>\na\n</think>\n\n18", "", "\na\n</think>\n\n18"),
        ("<think>\n", "a</think>18", "", "a</think>18"),
        ("<think>\nOkay.", "<think>\nOkay. It is.</think>18", "", " It is.</think>18"),
        ("[THINK]", "<think>a</think>18", "", "\n[/THINK]\n\n<think>a</think>18"),
        ("The answer is", "The answer is 18.", "", " 18."),
        ("The answer is", " 18.", "", " 18."),
        ("", "18", "<|channel|>final<|message|>", "<|channel|>final<|message|>18"),
        ("", HARMONY.format("a", "18"), "<|channel|>final<|message|>", HARMONY.format("a", "18")),
    ],
)
def test_a_reference_continues_what_the_prompt_has_begun(begun, reference, lead, trained):
    assert thoughts.continuation(begun, reference, lead) == trained
    assert thoughts.answer_of(begun + trained) in ("18", "The answer is 18.")


STEPS = "Let me solve this step by step.\n<think>"


@pytest.mark.parametrize(
    ("name", "prefill", "ending", "begun"),
    [
        ("qwen2_5", "<think>", "<|im_start|>assistant\n<think>", "<think>"),
        ("qwen2_5", STEPS, f"<|im_start|>assistant\n{STEPS}", "<think>"),
        ("qwen2_5", "The answer is", "<|im_start|>assistant\nThe answer is", "The answer is"),
        ("qwen2_5", "", "<|im_start|>assistant\n", ""),
        ("qwen3", "<think>\nOkay,", "<|im_start|>assistant\n<think>\nOkay,", "<think>\nOkay,"),
        ("qwen3 off", "<think>", "<|im_start|>assistant\n<think>", "<think>"),
        ("qwen3 off", "It is", "<|im_start|>assistant\n<think>\n\n</think>\n\nIt is", "It is"),
        ("qwen3_5_think", "<think>", "<|im_start|>assistant\n<think>", "<think>"),
        ("qwen3_5_think", "Okay,", "<|im_start|>assistant\n<think>\nOkay,", "<think>\nOkay,"),
        ("qwen3_5_think", "a</think>It", "<|im_start|>assistant\n<think>\na</think>It", "<think>\na</think>It"),
        ("deepseek_r1_distill", "Okay,", "<｜Assistant｜><think>\nOkay,", "<think>\nOkay,"),
    ],
)
def test_the_model_continues_a_last_message_of_its_own(name, prefill, ending, begun):
    tokenizer = tokenizer_of(name)
    row = asked()
    row["prompt"] = [*row["prompt"], {"role": "assistant", "content": prefill}]
    prompt = chat.render_row(tokenizer, row)
    assert prompt.endswith(ending)
    assert chat.begun_in(prompt, row) == begun
    [episode] = gold_episodes(tokenizer, [row])
    assert episode.text.startswith(begun) and episode.text.count("<think>") <= 1
    assert episode.prompt + tokenizer.decode(episode.token_ids[:-1]) == prompt.removesuffix(begun) + episode.text
    assert numbers.check(episode.text, row).passed


def test_a_base_model_continues_a_last_message_too():
    row = asked()
    row["prompt"] = [*row["prompt"], {"role": "assistant", "content": "It is"}]
    tokenizer = qwen_tokenizer(None)
    prompt = chat.render_row(tokenizer, row)
    assert prompt.endswith("How many?\nAnswer: It is")
    assert chat.begun_in(prompt, row) == "It is"
    [episode] = gold_episodes(tokenizer, [row])
    assert episode.text.startswith("It is<reasoning>")


def test_a_question_that_mentions_a_marker_opens_nothing():
    row = asked(question="What does <think> do? I wrote <think>")
    for name in ("qwen3", "gemma4 on", "qwen2_5"):
        assert chat.begun_in(chat.render_row(tokenizer_of(name), row), row) == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_markers_that_are_special_tokens_stay_in_the_text(family):
    markers = thoughts.marker_tokens(FAMILIES[family])
    tokenizer = wrapped(byte_level(special=[*TOKENS, *(set(markers) - {*TOKENS})]), eos_token="<|im_end|>")
    text = FAMILIES[family].format("It is 17.", "It is 18.")
    ids = tokenizer(f"{text}<|im_end|><|endoftext|>", add_special_tokens=False)["input_ids"]
    sampler = Sampler(None, tokenizer, [tokenizer.eos_token_id])
    [sample] = sampler.to_samples([Decoded(ids, None)], SamplingParams(1, 1.0, 1.0, len(ids)))
    assert sample.text == text and thoughts.answer_of(sample.text) == "It is 18."
    assert sample.token_ids == ids


def test_the_end_of_a_turn_of_phi_is_no_marker():
    tokenizer = wrapped(byte_level(special=["<|endoftext|>", "<|end|>", "<|assistant|>"]), eos_token="<|end|>")
    ids = tokenizer("It is 18.<|end|>", add_special_tokens=False)["input_ids"]
    assert thoughts.decode(tokenizer, [ids]) == ["It is 18."]


def test_rewards_of_scripts_add_what_the_template_opens():
    tokenizer = tokenizer_of("qwen3_5_think")
    row = asked()
    texts = ["The answer is 18.", "It is.</think>The answer is 18."]
    token_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    arguments = {"completions": texts, "id": ["a", "a"], "completion_ids": token_ids}
    assert graded("gsm8k", [row])(**arguments) == [1, 1]
    assert graded("gsm8k", [row], tokenizer=tokenizer)(**arguments) == [0, 1]


def talk(row=None, settings="", text_of_reset=None):
    """Return the task file of a conversation of three turns, which keeps what its environment heard.

    Args:
        row: the only row; a question by default.
        settings: more lines of the file.
        text_of_reset: what the environment adds to the question.
    """
    return f"""
HEARD = []

def load(split):
    return [{row or {"question": "How many?", "answer": "18"}!r}]

class Environment:
    def reset(self, **row):
        return {text_of_reset!r}

    def reply(self, text):
        HEARD.append(text)
        return 'Again?' if len(HEARD) % 3 else None

    def get_reward(self):
        return 1.0

def gold(row):
    texts = ('<think>One.</think>18', '18', 'It is 18.')
    return [{{'role': 'assistant', 'content': text}} for text in texts]

{settings}
"""


def open_row(path, source):
    """Write a task file, and return the task and its first row with an environment."""
    path.write_text(source)
    task = get_task(str(path))
    return task, task.with_opening({**task.load("train")[0], "task": str(path)})


@pytest.mark.parametrize(
    ("settings", "heard"),
    [
        ("", ["18", "", "20"]),
        ("SEES_THOUGHTS = True", ["<think>\n17</think>18", "<think>\nHm", "<think>\n19</think>20"]),
    ],
)
def test_reply_hears_what_follows_the_thoughts_of_each_turn(tmp_path, settings, heard):
    task, row = open_row(tmp_path / "talk.py", talk(settings=settings))
    tokenizer = tokenizer_of("qwen3_5_think")
    prompt = chat.render_row(tokenizer, row)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    episode = Episode(row, prompt, ids, tokenizer, [tokenizer.eos_token_id], 2000)
    for text in ("17</think>18", "Hm", "19</think>20"):
        sampled = tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
        episode.take(sampled, text, [0.0] * len(sampled), truncated=False)
    assert heard == task.module.HEARD
    turns_of_model = [message["content"] for message in episode.messages if message["role"] == "assistant"]
    assert turns_of_model == ["<think>\n17</think>18", "<think>\nHm", "<think>\n19</think>20"]
    assert episode.ended_by == "reply"


def test_sft_of_a_conversation_trains_one_thought_a_turn(tmp_path):
    task, row = open_row(tmp_path / "talk.py", talk())
    tokenizer = tokenizer_of("qwen3_5_think")
    [episode] = gold_episodes(tokenizer, [row])
    assert task.module.HEARD == ["18", "18", "It is 18."]
    text = episode.prompt + tokenizer.decode(episode.token_ids)
    assert text.count("<think>") == text.count("</think>") == 3
    assert "<think>\nOne.</think>18<|im_end|>" in text
    assert "<think>\n\n</think>\n\n18<|im_end|>" in text


TOOLS = """
CALLED = []
def load(split): return [{'question': 'How many?', 'answer': '18'}]
class Environment:
    def reset(self, **row): pass
    def look(self, place: str) -> str:
        '''Look.

        Args:
            place: where.
        '''
        CALLED.append(place)
        return 'eighteen'
    def get_reward(self): return float(bool(CALLED))
"""
CALL = '<tool_call>\n{{"name": "look", "arguments": {{"place": "{}"}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "called", "thought"),
    [
        (CALL.format("here"), ["here"], None),
        (f"<think>\nHm.\n</think>\n\n{CALL.format('here')}", ["here"], "Hm."),
        (f"<think>\nOr {CALL.format('there')}\n</think>\n\n{CALL.format('here')}", ["here"], "there"),
        (f"<think>\nOr {CALL.format('there')}", [], "there"),
        (f"<think>\nOr {CALL.format('there')}\n</think>\n\nNo.", [], "there"),
    ],
)
def test_a_call_inside_a_thought_is_not_made(tmp_path, text, called, thought):
    task, row = open_row(tmp_path / "tools.py", TOOLS)
    tokenizer = tokenizer_of("qwen3")
    prompt = chat.render_row(tokenizer, row)
    form = turns.response_format(tokenizer)
    episode = Episode(row, prompt, [1], tokenizer, [tokenizer.eos_token_id], 2000, form)
    sampled = tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
    episode.take(sampled, text, [0.0] * len(sampled), truncated=False)
    assert called == task.module.CALLED
    assert (thought or "") in episode.text
    assert isinstance(episode.session, Session) and episode.session.failed_calls == 0


def test_reply_hears_the_thoughts_also_in_a_task_with_tools(tmp_path):
    reply = "    def reply(self, text): CALLED.append(text)\n"
    source = TOOLS.replace("    def get_reward", f"{reply}    def get_reward") + "SEES_THOUGHTS = True\n"
    task, row = open_row(tmp_path / "tools.py", source)
    tokenizer = tokenizer_of("qwen3")
    prompt = chat.render_row(tokenizer, row)
    form = turns.response_format(tokenizer)
    episode = Episode(row, prompt, [1], tokenizer, [tokenizer.eos_token_id], 2000, form)
    text = "<think>\nHm.\n</think>\n\nNo."
    sampled = tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
    episode.take(sampled, text, [0.0] * len(sampled), truncated=False)
    assert [text] == task.module.CALLED


def test_a_tool_gets_arguments_of_its_types_from_a_format_without_types(tmp_path):
    task, row = open_row(tmp_path / "tools.py", TOOLS.replace("place: str", "place: int"))
    tokenizer = tokenizer_of("qwen3_5_think")
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": 12}}}
    written_call = turns.answer_text(tokenizer, {"role": "assistant", "content": "", "tool_calls": [call]})
    prompt = chat.render_row(tokenizer, row)
    form = turns.response_format(tokenizer)
    episode = Episode(row, prompt, [1], tokenizer, [tokenizer.eos_token_id], 2000, form)
    text = f"Hm.\n</think>\n\n{written_call}"
    sampled = tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
    episode.take(sampled, text, [0.0] * len(sampled), truncated=False)
    assert (task.module.CALLED, episode.session.failed_calls) == ([12], 0)


def test_a_prompt_of_one_message_of_the_assistant_is_refused():
    row = asked()
    row["prompt"] = [{"role": "assistant", "content": "It is"}]
    for template in (published_template("qwen3"), None):
        with pytest.raises(UserError, match="put a user's message before it"):
            chat.render_row(qwen_tokenizer(template), row)


def test_a_prompt_that_ends_with_a_tool_call_is_refused():
    row = asked()
    row["prompt"] = [*row["prompt"], {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]
    with pytest.raises(UserError, match="put the tool's result after it"):
        chat.render_row(tokenizer_of("qwen3"), row)


def test_the_text_of_reset_belongs_to_the_question_before_a_last_message_of_the_assistant(tmp_path):
    prompt = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "<think>"}]
    source = talk(row={"prompt": prompt, "answer": "18"}, text_of_reset=" Think.")
    task, row = open_row(tmp_path / "talk.py", source)
    assert [message["content"] for message in row["prompt"]] == ["How many? Think.", "<think>"]
    tokenizer = tokenizer_of("qwen2_5")
    [episode] = gold_episodes(tokenizer, [row])
    assert task.module.HEARD[0] == "18"
    assert episode.messages[0]["content"] == "<think>One.</think>18"
    assert (episode.prompt + tokenizer.decode(episode.token_ids)).count("<think>") == 1


def test_texts_that_the_trainer_sampled_itself_have_what_the_prompt_has_begun():
    tokenizer = tokenizer_of("qwen3_5_think")
    row = asked()
    ids = tokenizer("Hm.</think>18<|im_end|>", add_special_tokens=False)["input_ids"]
    scorer = Scorer(resolve(parse_reward_specs(["think_answer_format=1.0"])), tokenizer, [row])
    assert scorer.texts(["a", "a"], [ids, ids[:2]])[0] == "<think>\nHm.</think>18"


def test_llama_cpp_keeps_the_markers_of_a_template_in_its_text():
    assert thoughts.marker_tokens(published_template("gemma4")) == ["<channel|>", "<|channel>"]
    assert thoughts.marker_tokens(published_template("gptoss")) == [
        "<|channel|>",
        "<|end|>",
        "<|message|>",
        "<|start|>",
    ]
    for template in ("phi3", "qwen2_5", "llama3_2"):
        assert thoughts.marker_tokens(published_template(template)) == []
