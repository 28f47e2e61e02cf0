"""Parsers of answers: reasoning and tool calls out of text as it streams, one file a family."""
