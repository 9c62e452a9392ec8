"""Programs that play tasks with the policy as their model: the environment `agent`, and the gateway that hears them."""
