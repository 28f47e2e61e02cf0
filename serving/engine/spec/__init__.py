"""Speculative decoding: drafters and verification."""
