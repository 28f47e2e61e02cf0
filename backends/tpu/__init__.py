"""The tpu backend: Google TPUs: data and a probe; nothing runs on them yet."""
