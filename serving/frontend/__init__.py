"""Tokenizing, chat templates, detokenizing, stop strings, parsers. Knows text, not tensors."""
