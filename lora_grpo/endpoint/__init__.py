"""The endpoint: agents and other programs talk to the sampled model in the OpenAI protocol.

    POST /SECRET/v1/chat/completions   {"messages": [...]}     -> sampled by the policy, kept token for token

    POST /v1/chat/completions          {"messages": [...]}     -> `lora-grpo serve`: each request on its own

protocol.py       requests, checked, and the answers
contexts.py       from messages to token ids: sampled tokens are continued, never encoded again
answers.py        the policy that answers, and how samples become answers
live_episode.py   the requests of one episode, and what they sampled
served_models.py  the requests to models that are served to people and harnesses
app.py            addresses, bodies, streams and errors
server.py         serves the application, in an event loop in a thread
"""

from lora_grpo.endpoint.answers import Policy
from lora_grpo.endpoint.app import make_app
from lora_grpo.endpoint.contexts import Call
from lora_grpo.endpoint.live_episode import EpisodeLimits, LiveEpisode, WarmUp
from lora_grpo.endpoint.served_models import ServedModels
from lora_grpo.endpoint.server import LOOPBACK, LoopThread, listen, names_of_server, serving, serving_in_thread
