"""Structured outputs: from `StructuredOutputsParams` to grammars that the engine follows, by xgrammar or llguidance. May touch the engine's
seams and the text side; the two libraries load in the engine's process, when first asked for."""
