"""Rollouts: episodes, each the prompt of a row and everything that follows it, and the loop that plays them.

    groups = play_all(sampler, rows, params, seeds)    # B lists of G: completions, or conversations with an environment
    episodes = [episode for group in groups for episode in group]
    verdicts = grade(task, episodes)                   # one for each episode

episode.py         one completion or conversation: its tokens, which of them the model sampled, its grade
token_tree.py      an episode whose calls do not extend each other: one row of tokens, and what each token follows
agent_episodes.py  episodes that agents play, programs outside this process
loop.py            the loop of rollouts and evaluations: the model's turns alternate with an environment
"""

from lora_grpo.rollouts.episode import Episode, agent_text, conversations_of, grade, has_agent, transcript
from lora_grpo.rollouts.loop import fit_batch, play, play_all
from lora_grpo.rollouts.token_tree import ROOT, ModelCall, TreeRow, tree_row
