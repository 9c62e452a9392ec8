"""`sampler.type = "difficulty_pool"` of a curriculum: tasks are drawn by how hard they have been."""
