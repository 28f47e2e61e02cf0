"""Weight and KV-cache number formats, one file a scheme. Imports ops and hal."""
