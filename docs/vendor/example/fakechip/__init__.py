"""An accelerator for Pagoda outside its tree: software, on torch's PrivateUse1, stricter than hardware."""
