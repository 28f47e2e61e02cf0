"""Models without a family of their own, run by transformers' modules with our paged attention."""
