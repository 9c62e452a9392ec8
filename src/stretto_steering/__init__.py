"""`[orchestrator.steering]`: a run sets how far generation is ahead, and how often engines get new weights."""
