"""The zoo: a declarative decoder, its blocks, one short file a family, loaders. Imports quant, ops and hal."""
