"""Code that a policy wrote: the sandbox that runs it, and the environment `python-code`."""
