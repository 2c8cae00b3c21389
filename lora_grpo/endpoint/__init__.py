"""The endpoint: agents and other programs talk to the sampled model in the OpenAI protocol.

    POST /SECRET/v1/chat/completions   {"messages": [...]}     -> sampled by the policy, kept token for token

protocol.py      requests, checked, and the answers
contexts.py      from messages to token ids: sampled tokens are continued, never encoded again
live_episode.py  the requests of one episode, and what they sampled
app.py           addresses, bodies, streams and errors
server.py        serves the application
"""

from lora_grpo.endpoint.app import make_app
from lora_grpo.endpoint.contexts import Call
from lora_grpo.endpoint.live_episode import EpisodeLimits, LiveEpisode, Policy, WarmUp
from lora_grpo.endpoint.server import serving
