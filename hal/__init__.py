"""The hardware contract: what a vendor implements and what the rest may ask of it.

Imports nothing of ours, and of others only torch (for types) and the standard library.
"""
