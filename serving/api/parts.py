"""What every API process of a server makes for itself: the text side of the model, and the service over a client of the engine."""

from __future__ import annotations

from pagoda.hal import heap
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.desk import Desk
from pagoda.serving.api.service import ModelCard, Service
from pagoda.serving.api.tally import Tally
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.wire_client import WireClient
from pagoda.serving.frontend.load import text_of
from pagoda.serving.frontend.text import TextFrontend


def load_text(engine_config: EngineConfig, server_config: ServerConfig) -> TextFrontend:
    """Tokenizer, templates and parsers; what reading them left goes back to the system."""
    text = text_of(
        engine_config,
        chat_template=server_config.chat_template,
        content_format=server_config.chat_template_content_format,
        template_defaults=server_config.default_chat_template_kwargs,
        tool_call_parser=server_config.tool_call_parser,
        reasoning_parser=server_config.reasoning_parser,
        tool_parser_plugin=server_config.tool_parser_plugin,
        reasoning_parser_plugin=server_config.reasoning_parser_plugin,
    )
    heap.trim()
    return text


def made_service(
    client: WireClient, text: TextFrontend, card: ModelCard, config: ServerConfig, tally: Tally | None = None, desk: Desk | None = None
) -> Service:
    """Over a connected client; hears of adapters that other processes load."""
    service = Service(client, text, card, config, tally, desk)
    client.on_adapters = service.take_adapters
    return service
