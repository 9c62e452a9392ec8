"""The YAML files of vime's command line: models, roles, evals, and further arguments."""
