"""Low-rank adapters: reading a PEFT folder for one rank, and the device slots beside the linear layers that they change."""
