"""What torch-style accelerators share: memory, streams, graphs, collectives and pages over a torch device module. Open to plugins."""
