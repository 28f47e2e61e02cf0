"""`LoRARequest`: which adapter a prompt of the SDK is answered with."""

from __future__ import annotations

from typing import NamedTuple


class LoRARequest(NamedTuple):
    """An adapter by name; it is loaded from the PEFT folder `lora_path` when it is first asked for. The number has no effect here."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
