"""The routes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from neo_server import __version__
from neo_server.api_key import check_api_key
from neo_server.choices import Choices
from neo_server.errors import UnknownModelError
from neo_server.frontend import Frontend
from neo_server.http.answer import stream, whole
from neo_server.http.forms import ChatForm, CompletionForm
from neo_server.http.logprobs import Spelling
from neo_server.http.schema import (
    ChatBody,
    CompletionBody,
    Conversation,
    DetokenizeBody,
    TokenizeChat,
    TokenizeText,
)
from neo_server.prometheus import make_registry
from neo_server.state import ServerState


class Api:
    """Thin: checks, submits, answers."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._frontend = Frontend(state)
        self._registry = make_registry(state)

    def router(self) -> APIRouter:
        """Every route. Without the key: health, metrics and version."""
        router = APIRouter()
        for path, route in (
            ("/health", self.health),
            ("/metrics", self.metrics),
            ("/version", self.version),
        ):
            router.add_api_route(path, route, methods=["GET"])
        key = [Depends(self._check_key)]
        for method, path, keyed in (
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ):
            router.add_api_route(
                path, keyed, methods=[method], dependencies=key, response_model=None
            )
        return router

    async def health(self) -> Response:
        """200 when requests are served, else 503."""
        return Response(status_code=200 if self._state.is_serving else 503)

    async def metrics(self) -> Response:
        """In Prometheus' text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> dict[str, str]:
        """Of this server."""
        return {"version": __version__}

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, model: str) -> dict[str, Any]:
        """The model, by its name."""
        self._check_model(model)
        return self._model()

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continues each prompt."""
        self._check_model(body.model)
        choices = await Choices.submit(self._frontend, body.messages())
        form = CompletionForm(
            *self._form_parts(),
            logprobs=body.logprobs is not None,
            echo=body.echo,
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        if body.stream:
            return stream(choices, form, include_usage=body.include_usage)
        return await whole(request, choices, form)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        """Answers a conversation in the model's chat template."""
        self._check_model(body.model)
        message = body.message()
        message.token_ids.ids.extend(await self._render(body))
        choices = await Choices.submit(self._frontend, [message])
        form = ChatForm(
            *self._form_parts(),
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        if body.stream:
            return stream(choices, form, include_usage=body.include_usage)
        return await whole(request, choices, form)

    async def tokenize(self, body: TokenizeChat | TokenizeText) -> dict[str, Any]:
        """Token ids of a text or a conversation, as its prompt has them."""
        self._check_model(body.model)
        if isinstance(body, TokenizeChat):
            ids = await self._render(body)
        else:
            special = body.add_special_tokens
            ids = await self._frontend.encode(body.prompt, add_special_tokens=special)
        limit = self._state.resolved.config.scheduler.max_model_len
        return {"count": len(ids), "max_model_len": limit, "tokens": ids}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, str]:
        """The text of token ids, special ones included."""
        self._check_model(body.model)
        return {"prompt": await self._frontend.decode(body.tokens, skip_special_tokens=False)}

    def _form_parts(self) -> tuple[str, tuple[int, ...], Spelling]:
        state = self._state
        return state.model_name, state.resolved.model.eos_token_ids, state.tokenizer.spelling

    async def _render(self, body: Conversation) -> list[int]:
        messages = [message.model_dump() for message in body.messages]
        return await self._frontend.encode_messages(
            messages, add_generation_prompt=body.add_generation_prompt
        )

    async def _check_key(self, authorization: Annotated[str | None, Header()] = None) -> None:
        check_api_key(authorization, self._state.options.api_key)

    def _check_model(self, model: str | None) -> None:
        served = self._state.model_name
        if model is not None and model != served:
            raise UnknownModelError(f"model is {model!r:.100}; this server has {served!r}")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._state.model_name,
            "object": "model",
            "created": self._state.created,
            "owned_by": "neo",
            "max_model_len": self._state.resolved.config.scheduler.max_model_len,
        }
