"""Blocks that only one family has, each with its own test."""
