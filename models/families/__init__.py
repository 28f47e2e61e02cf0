"""One file a family: reads a checkpoint's config, returns the spec, maps tensor names. No tensor operation lives here."""
