"""One folder a vendor, each small; found by name through entry points, never imported by name. Imports ops and hal."""
