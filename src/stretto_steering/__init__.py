"""`[orchestrator.steering]`: a run sets how far generation is ahead, and how often engines get new weights.

`concurrency.type = "adaptive"`: it sets how many rollouts are in flight.
"""
