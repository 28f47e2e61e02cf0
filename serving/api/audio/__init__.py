"""Transcriptions and translations of sounds. Stands on the text side's sound and speech; knows nothing of other endpoints but `openai`'s
collecting of answers."""
