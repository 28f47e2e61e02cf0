"""Where ranks run: in this process, or one process each. Needs nothing beyond torch and the standard library."""
