"""OpenEnv's server of the environment: `uv run uvicorn server:app`."""

from doors import DoorsAction, DoorsEnvironment, DoorsObservation
from openenv.core.env_server import create_app

app = create_app(DoorsEnvironment, DoorsAction, DoorsObservation, env_name="doors", max_concurrent_envs=64)
