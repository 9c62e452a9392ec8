"""How one policy is spread over the ranks of a mesh: `shard.parallelise` is the way in."""
