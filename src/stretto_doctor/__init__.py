"""`stretto doctor`: whether this machine and the hosts of a deployment can run a config; imports no torch."""
