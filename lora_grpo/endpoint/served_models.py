"""Models that are served to people and harnesses: every request is rendered and sampled on its own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from lora_grpo.endpoint.answers import Policy, all_finished, chat_choice, completion, text_choice, too_long
from lora_grpo.endpoint.contexts import Context, KnownConversations, answer_message
from lora_grpo.endpoint.protocol import ChatRequest, Completion, RequestError, TextRequest, messages_of
from lora_grpo.prompts import plain_text
from lora_grpo.sampling import Request, SampledTokens, completion_seed

_DEFAULT_TEMPERATURE = 1.0
"""OpenAI's, for requests without one."""


class ServedModels:
    """Answers requests with a model, or with a model and its base.

    Requests sample as they ask. No conversation is known from one request to the next, so the prompts are those of an
    evaluation with the same messages.

    All methods run in the thread of the endpoint.

    Args:
        policy: the model.
        adapter_of_model: the names of the models, and whether each is sampled with the adapter. The first one answers
            requests without a name.
        context_tokens: maximum number of tokens of a prompt and its completion.
    """

    def __init__(self, policy: Policy, adapter_of_model: Mapping[str, bool], context_tokens: int) -> None:
        self._policy = policy
        self._adapter_of_model = adapter_of_model
        self._context_tokens = context_tokens
        self._conversations = KnownConversations(policy.tokenizer, policy.eos_token_ids, policy.encode)
        self._is_plain = plain_text.asks_in_plain_text(policy.tokenizer, {})

    def at(self, secret: str) -> ServedModels:
        """Return itself for the address without a secret, or raise RequestError. See `make_app`."""
        if secret:
            raise RequestError(f"nothing is served at /{secret:.40}/v1; use the base_url without {secret:.40}", 404)
        return self

    async def chat(self, request: ChatRequest) -> Completion:
        """Answer a chat completion."""
        model = self._model_of(request)
        messages = messages_of(request)
        tools = request.offered_tools
        context = self._conversations.context(messages, tools)
        wants_tokens = bool(request.logprobs)
        ends_at_question = self._is_plain
        samples = await self._sample(
            request, model, context, wants_tokens=wants_tokens, ends_at_question=ends_at_question
        )
        choices = []
        for sample in samples:
            text = context.begun_text + sample.text
            message = answer_message(self._policy.tokenizer, context, sample.token_ids, text, tools=tools)
            choices.append(chat_choice(self._policy.tokenizer, message, sample, wants_tokens=wants_tokens))
        return completion(model, request, context, samples, choices)

    async def complete(self, request: TextRequest) -> Completion:
        """Answer a completion of a text."""
        model = self._model_of(request)
        context = self._conversations.text_context(request.single_prompt)
        wants_tokens = request.logprobs is not None
        samples = await self._sample(request, model, context, wants_tokens=wants_tokens, ends_at_question=False)
        choices = []
        for sample in samples:
            choices.append(text_choice(self._policy.tokenizer, sample, wants_tokens=wants_tokens))
        return completion(model, request, context, samples, choices)

    def _model_of(self, request: ChatRequest | TextRequest) -> str:
        """Return the name of the model that answers a request."""
        names = list(self._adapter_of_model)
        model = request.model or names[0]
        if model not in names:
            raise RequestError(f"model is {model!r:.80}; expected {' or '.join(names)}", 404, "model_not_found")
        return model

    async def _sample(
        self,
        request: ChatRequest | TextRequest,
        model: str,
        context: Context,
        *,
        wants_tokens: bool,
        ends_at_question: bool,
    ) -> list[SampledTokens]:
        """Return `n` completions of a context."""
        temperature = _DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
        top_p = 1.0
        if temperature > 0 and request.top_p is not None:
            top_p = request.top_p
        if temperature == 0 and wants_tokens:
            raise RequestError("logprobs are not known at temperature 0; leave them out, or send another temperature")
        token_limit = self._token_limit(request, context)
        seed = request.seed
        if seed is None:
            seed = secrets.randbits(31)

        futures = []
        for number in range(request.num_choices):
            sampled = Request(
                prompt_ids=context.token_ids,
                seed=completion_seed(seed, "choice", number),
                max_tokens=token_limit,
                temperature=temperature,
                top_p=top_p,
                stop=request.stop_texts,
                ends_at_next_question=ends_at_question,
                adapter=self._adapter_of_model[model],
                order=(number,),
            )
            futures.append(self._policy.queue.submit(sampled))
        samples = await all_finished(futures)
        if wants_tokens and any(sample.logprobs is None for sample in samples):
            raise RequestError("this sampler returns no logprobs; leave them out")
        return samples

    def _token_limit(self, request: ChatRequest | TextRequest, context: Context) -> int:
        """Return how many tokens a completion may have: what is left of the context, or fewer if the request says so.

        Raises:
            RequestError: the prompt, or what the request asks for, does not fit.
        """
        length = len(context.token_ids)
        remaining = self._context_tokens - length
        token_limit = request.token_limit or remaining
        if not 0 < token_limit <= remaining:
            asked = f" and max_tokens is {request.token_limit}" if request.token_limit else ""
            raise too_long(
                "the request",
                f"the prompt has {length} tokens{asked}, but the context has {self._context_tokens}; send less, or "
                "serve with a larger --context-tokens",
            )
        return token_limit
