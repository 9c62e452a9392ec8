"""The YAML files of vime's command line: models, roles, evals, and arguments of one's own."""
