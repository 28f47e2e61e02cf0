"""How a model is split over ranks: the mesh and the plan derived from tensor roles."""
